"""The releases of NVIDIA's Python packages that tests load over the double: python -m tests.driver_double.releases [--all]

They are installed next to the test environment's own packages, each release in a separate folder, because tests check that the
project works without them. Without arguments the oldest and the newest supported releases are installed, with `--all` every release
of cuda-bindings that `fractional_gpu.gpu.nvidia.support` accepts and that the package index has for this Python.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.nvidia.support import bindings_refusal

__all__ = ["OLDEST", "installed", "newest", "oldest", "python_path"]

OLDEST: Final = {"cuda-bindings": "12.8.0", "nvidia-ml-py": "12.560.30"}  # the oldest that pyproject.toml allows
_NEEDED: Final = {"cuda-bindings": ("cuda-pathfinder",), "nvidia-ml-py": ()}
_FOLDER: Final = Path(sys.prefix) / "nvidia-releases"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def installed(package: str = "cuda-bindings") -> list[str]:
    """Return the releases that are installed, oldest first."""
    names = [path.name for path in (_FOLDER / package).glob("*") if not path.name.startswith(".")]
    return sorted(names, key=_numbers)


def oldest(package: str = "cuda-bindings") -> str:
    """Return the oldest supported release. Raises RuntimeError if it is not installed."""
    return _there(package, OLDEST[package])


def newest(package: str = "cuda-bindings") -> str:
    """Return the newest release that is installed. Raises RuntimeError if there is none."""
    return _there(package, next(iter(reversed(installed(package))), "newest"))


def python_path(package: str, release: str) -> Path:
    """Return the folder that PYTHONPATH must name for this release. Raises RuntimeError if it is not installed."""
    return _FOLDER / package / _there(package, release)


def _there(package: str, release: str) -> str:
    if not (_FOLDER / package / release).is_dir():
        raise RuntimeError(f"{package} {release} is not in {_FOLDER}: run `tests/run setup`")
    return release


def offered(package: str) -> list[str]:
    """Return the releases that the package index has for this Python, oldest first."""
    listed = _pip("index", "versions", package)
    versions = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    if versions is None:
        raise RuntimeError(f"the package index does not tell the releases of {package}:\n{listed}")
    return sorted(versions[1].split(", "), key=_numbers)


def install(package: str, release: str) -> None:
    """Install a release, unless it is installed."""
    target = _FOLDER / package / release
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as scratch:
        folder = Path(scratch) / "packages"
        _pip(
            "install", "--no-deps", "--no-compile", "--target", str(folder), f"{package}=={release}", *_NEEDED[package]
        )
        shutil.move(folder, target)
    sys.stdout.write(f"installed {package} {release} for the double of the driver\n")


def install_all(*, every: bool) -> None:
    """Install the oldest and the newest supported releases, of cuda-bindings `every` one. Raises RuntimeError."""
    for package, first in OLDEST.items():
        supported = [one for one in offered(package) if _numbers(one) >= _numbers(first)]
        if package == "cuda-bindings":
            supported = [one for one in supported if not bindings_refusal(one)]
        for release in supported if every and package == "cuda-bindings" else (first, supported[-1]):
            install(package, release)


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if arguments[0] == "index":
        command.remove("--quiet")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Install; 1 if the package index does not have them, 2 for wrong arguments."""
    if arguments not in ([], ["--all"]):
        sys.stderr.write("usage: python -m tests.driver_double.releases [--all]\n")
        return 2
    try:
        install_all(every=bool(arguments))
    except RuntimeError as error:
        sys.stderr.write(f"the double of NVIDIA's driver lacks its Python packages: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
