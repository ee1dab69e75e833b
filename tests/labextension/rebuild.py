"""Build the JupyterLab extension's files from its sources: `python -m tests.labextension.rebuild [--check]`.

What is built is committed, so that an installation needs no node. It is built from a copy of the sources with exactly the packages of
`package-lock.json`, and comes out the same everywhere: `--check` builds it again and compares. Needs npm.
"""

import argparse
import filecmp
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.paths import ROOT

FOLDER = ROOT / "kernelext" / "labextension"
PREBUILT = FOLDER / "prebuilt"
DIGEST = FOLDER / "sources.sha256"
_SOURCES = (
    "package.json",
    "package-lock.json",
    "tsconfig.json",
    "core.mjs",
    "webpack.config.cjs",
    ".npmrc",
    "schema/*",
    "src/*",
    "style/*",
)


def sources() -> list[Path]:
    return sorted(path for pattern in _SOURCES for path in FOLDER.glob(pattern))


def digest() -> str:
    total = hashlib.sha256()
    for path in sources():
        total.update(f"{path.relative_to(FOLDER)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def differences(one: Path, other: Path) -> list[str]:
    names = {path.relative_to(folder) for folder in (one, other) for path in folder.rglob("*") if path.is_file()}
    same, _, _ = filecmp.cmpfiles(one, other, [str(name) for name in names], shallow=False)
    return sorted({str(name) for name in names} - set(same))


def build(scratch: Path) -> Path:
    for path in sources():
        copy = scratch / path.relative_to(FOLDER)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    for step in (["ci", "--no-audit", "--no-fund", "--ignore-scripts"], ["run", "build"]):
        done = subprocess.run(["npm", *step], cwd=scratch, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"npm {step[0]} failed:\n{done.stdout}\n{done.stderr}")
    return scratch / "prebuilt"


def main(arguments: list[str] | None = None) -> int:
    """Build, and replace what is committed or (`--check`) compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if what is committed is not current")
    check = parser.parse_args(arguments).check
    if shutil.which("npm") is None:
        raise SystemExit("npm is needed to build the JupyterLab extension (Debian and Ubuntu: apt-get install npm)")
    with tempfile.TemporaryDirectory(prefix="jfg-labextension-") as scratch:
        built = build(Path(scratch))
        if not check:
            shutil.rmtree(PREBUILT, ignore_errors=True)
            shutil.copytree(built, PREBUILT)
            DIGEST.write_text(digest() + "\n")
            print(f"built {PREBUILT}")
            return 0
        different = differences(built, PREBUILT)
    if different:
        print(f"kernelext/labextension/prebuilt is not what its sources give: {', '.join(different)}", file=sys.stderr)
        print("run `tests/run labextension` and commit the result", file=sys.stderr)
        return 1
    print("kernelext/labextension/prebuilt is what its sources give")
    return 0


if __name__ == "__main__":
    sys.exit(main())
