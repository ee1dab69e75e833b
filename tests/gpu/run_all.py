"""Everything that wants a GPU, in one command: python tests/gpu/run_all.py FOLDER (see docs/gpu-tests.md).

The steps are `doctor`, `tests`, `phases` (the benchmark by size) and `kernels` (the benchmark's cells and sharing). Each is a process of
its own with a time limit, and what one wrote stays if the next hangs or the whole is stopped. FOLDER gets at most eight files: a log of
each step, `tests.json`, `phases.json`, `kernels.json`, and `summary.txt`, which is also the last thing printed.

It needs nothing but the standard library itself, so it can install the wheels that the rest needs (`--wheels`) without a network.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.installed import entry_points_installed

ROOT: Final = Path(__file__).resolve().parents[2]
_BENCH: Final = ("tests/gpu/bench.py",)
# Only what the tests need: other plugins of that environment may warn, and a warning is an error here.
_PYTEST: Final = ("-m", "pytest", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "tests/gpu", "--durations=0")
_KILL_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of Python's. `longest_s` is its time limit, `json` the option that names its results, if it has one."""

    arguments: tuple[str, ...]
    simulated: tuple[str, ...]  # what it is given instead of a GPU
    longest_s: int
    json: str = ""


STEPS: Final = {
    "doctor": Step(arguments=("-P", "-m", "provisioner.commands.main", "doctor"), simulated=(), longest_s=120),
    "tests": Step(arguments=_PYTEST, simulated=(), longest_s=570),
    "phases": Step(arguments=(*_BENCH, "--only", "phases"), simulated=("--simulated",), longest_s=570, json="--json"),
    "kernels": Step(
        arguments=(*_BENCH, "--only", "cells", "--only", "sharing"),
        simulated=("--simulated",),
        longest_s=300,
        json="--json",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and print the table; 0 if all of them succeeded, 1 if not, 2 for arguments that are not understood."""
    options = _options(arguments)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with _environment(folder, options) as environment:
        for name in options.only or STEPS:
            longest_s = options.longest or STEPS[name].longest_s
            sys.stdout.write(f"{name}: at most {longest_s} s, log in {folder / name}.log\n")
            sys.stdout.flush()
            lines.append(_run(name, folder, environment, longest_s, simulated=options.simulated))
            lines += _SEEN[name](folder)
    summary = "\n".join(lines) + "\n"
    (folder / "summary.txt").write_text(summary, encoding="utf-8")
    sys.stdout.write(f"\n{summary}")
    return 0 if all(line.startswith(_GOOD) for line in lines if line[0] != " ") else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Everything that wants a GPU: doctor, tests and benchmark.")
    parser.add_argument("folder", type=Path, help="where logs, results and the summary go")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install these first, without a network")
    parser.add_argument("--only", action="append", choices=STEPS, help="a step; may be repeated (default: all)")
    parser.add_argument("--longest", type=int, metavar="SECONDS", help="time limit of each step, instead of its own")
    parser.add_argument("--simulated", action="store_true", help="try it all on a simulated device")
    options = parser.parse_args(arguments)
    if options.wheels is not None and not list(options.wheels.glob("*.whl")):
        parser.error(f"there is no wheel in {options.wheels}; docs/gpu-tests.md says how to collect them")
    if options.longest is not None and options.longest < 1:
        parser.error(f"--longest is a number of seconds from 1, got {options.longest}")
    return options


@contextmanager
def _environment(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The steps' environment: the checkout, and the wheels, come before whatever is installed."""
    with tempfile.TemporaryDirectory(prefix="jgl-site-") as site, entry_points_installed():
        if options.wheels is not None:
            wheels = sorted(str(wheel.absolute()) for wheel in options.wheels.glob("*.whl"))
            install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site)
            subprocess.run([sys.executable, *install, *wheels], check=True)
        inherited = os.environ.get("PYTHONPATH")
        yield {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), site, *([inherited] if inherited else [])]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "JUPYTER_GPU_HARDWARE": "simulated" if options.simulated else "1",
            "JUPYTER_GPU_RESULTS": str(folder / "tests.json"),
            **({"JUPYTER_GPU_SIMULATE": "1x512MiB"} if options.simulated else {}),
        }


_GOOD: Final = "ok "


def _run(name: str, folder: Path, environment: Mapping[str, str], longest_s: int, *, simulated: bool) -> str:
    """Run a step, and return its line of the summary."""
    step = STEPS[name]
    results = (step.json, str(folder / f"{name}.json")) if step.json else ()
    command = [sys.executable, *step.arguments, *(step.simulated if simulated else ()), *results]
    (folder / f"{name}.json").unlink(missing_ok=True)  # an earlier run's are not this one's
    begun = time.monotonic()
    with (
        (folder / f"{name}.log").open("wb") as log,
        # In a session of its own, so that all of it can be ended.
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            status = process.wait(longest_s)
            outcome = "ok" if status == 0 else f"failed (status {status})"
        except subprocess.TimeoutExpired:
            _end(process)
            outcome = f"not done within {longest_s} s"
        except BaseException:
            _end(process)
            raise
    line = f"{outcome} {name}, {time.monotonic() - begun:.0f} s"
    return line if outcome == "ok" else f"{line}: {_last_line(folder / f'{name}.log')}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step and what it started in its session: politely, so that results are written and brokers end, and then at once."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")


# ---- what each step saw, in few lines, each indented -------------------------------------------------------------------------


def _tests_seen(folder: Path) -> list[str]:
    found = _read(folder / "tests.json")
    tests: dict[str, dict[str, Any]] = found.get("tests", {})
    if not tests:
        return []
    device = (found.get("devices") or [{"name": "a simulated device"}])[0]["name"]
    ended = [one for one in tests.values() if "outcome" in one]
    passed = sum(one["outcome"] == "passed" for one in ended)
    lines = [
        f"  {device}, driver {found.get('driver', '-')}, torch {found.get('torch', '-')}: {passed} of {len(ended)} passed"
    ]
    lines += [
        f"  {name}: {one['outcome']}" for name, one in tests.items() if one.get("outcome") not in ("passed", None)
    ]
    rounds = tests.get("test_a_hundred_rounds_keep_every_byte", {}).get("saw", {})
    lines += [
        f"  a hundred rounds: {name} median {value['median']} s, worst {value['max']} s"
        for name, value in rounds.items()
    ]
    return lines


def _phases_seen(folder: Path) -> list[str]:
    phases = _read(folder / "phases.json").get("phases", {})
    copies = phases.get("pinned_copies_gb_per_s", {})
    lines = (
        [f"  pinned copies: {' GB/s, '.join(f'{name} {speed}' for name, speed in copies.items())} GB/s"]
        if copies
        else []
    )
    for row in phases.get("sizes", []):
        if "not_measured" in row:
            lines.append(f"  {row['held_mib']:>6} MiB: not measured, {row['not_measured']}")
        else:
            lines.append(
                f"  {row['held_mib']:>6} MiB, shrinking {'on ' if row['shrinking'] else 'off'}: "
                f"suspend {row['suspend_s']:.2f} s ({row['suspend_gb_per_s']} GB/s), "
                f"resume {row['resume_s']:.2f} s ({row['resume_gb_per_s']} GB/s)"
            )
    return lines


def _kernels_seen(folder: Path) -> list[str]:
    found = _read(folder / "kernels.json")
    lines = [f"  added to a cell: {found['cells']['added_us']['value']} us"] if "cells" in found else []
    return lines + [f"  {name}: {value}" for name, value in found.get("sharing", {}).items() if name.endswith("_s")]


def _read(path: Path) -> dict[str, Any]:
    """Return the results; nothing where a step ended before there were any."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


_SEEN: Final[Mapping[str, Callable[[Path], list[str]]]] = {
    "doctor": lambda _folder: [],  # its log is made for reading
    "tests": _tests_seen,
    "phases": _phases_seen,
    "kernels": _kernels_seen,
}


if __name__ == "__main__":
    raise SystemExit(main())
