"""The coverage-guided fuzzer on every decoder: `tests/run fuzz SECONDS`, or `python -m tests.fuzz.fuzz SECONDS [TARGET...]`.

libFuzzer through atheris. The seconds are shared by the targets. What breaks a decoder is written to tests/fuzz/corpus/TARGET/, where
the ordinary tests find it again: mend the decoder and keep the file. Exits with 1 if there was any.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
LONGEST = 4096  # bytes of one input
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s+([0-9]+)")
_COVERED = re.compile(r"cov: ([0-9]+)")


def main() -> int:
    """Fuzz each target in a separate process and report the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=int, help="for all targets together")
    parser.add_argument("targets", nargs="*")
    options = parser.parse_args()
    from tests.fuzz.targets import TARGETS  # noqa: PLC0415 - a child imports it instrumented

    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"there is no target {min(unknown)}; there are {', '.join(TARGETS)}")
    names = options.targets or list(TARGETS)
    before = set(CORPUS.glob("*/*"))
    failed = [name for name in names if not fuzz(name, max(1, options.seconds // len(names)))]
    for path in sorted(set(CORPUS.glob("*/*")) - before):
        print(f"found: {path}")  # noqa: T201 - a command
    return 1 if failed else 0


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz one target for this long, print a line, and return whether it held."""
    from tests.fuzz.targets import seeds  # noqa: PLC0415 - a child imports it instrumented

    finds = CORPUS / name
    finds.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as begin:
        for number, (target, data) in enumerate(seeds()):
            if target == name:
                (Path(begin) / f"seed-{number}").write_bytes(data)
        argv = [sys.executable, "-m", "tests.fuzz.child", name, begin, str(finds)]
        argv += [f"-max_total_time={seconds}", f"-artifact_prefix={finds}/", f"-max_len={LONGEST}", "-timeout=20"]
        done = subprocess.run(
            [*argv, "-print_final_stats=1"], capture_output=True, text=True, errors="replace", check=False
        )
    if not any(finds.iterdir()):
        finds.rmdir()
    executed, covered = _EXECUTED.findall(done.stderr), _COVERED.findall(done.stderr)
    what = "held" if done.returncode == 0 else f"FAILED ({done.returncode})"
    figures = f"{executed[-1] if executed else '?'} inputs, {covered[-1] if covered else '?'} edges"
    print(f"{name}: {what}; {figures}", flush=True)  # noqa: T201
    if done.returncode != 0:
        print(done.stderr[-4000:], file=sys.stderr)  # noqa: T201
    return done.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
