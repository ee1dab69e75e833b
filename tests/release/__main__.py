"""`tests/run release`: everything that has to hold before a release, as one table. Ends with status 1 if anything does not.

- The version is the same in the package, in JupyterLab's extension and at the head of the changelog.
- The recipe for conda-forge needs what the package needs.
- A run of this version on a real GPU is recorded, and the scripts for the next one work on a double.
- Wheel and sdist are built; both have the licence, and the wheel that is built from the sdist has the same files.
- The extension's prebuilt files match its sources, and name the licence of everything in them.
- The wheel is used next to other packages, and uninstalled without a trace.
- The documentation's site has no warning, and axe finds nothing on any of its pages.
- What people see and click in JupyterLab, on the hub's pages and in reports works in a browser, and axe finds nothing there, in each look.
- The wheel is installed into an empty environment of each supported Python that the machine has: of the lowest with the oldest declared
  dependencies, of the others with the newest, which the suite itself uses with the lowest. There the core of the suite passes, on the
  installed package: configuration, ledger, client, commands, kernel extension. Commands for Pythons that are missing are named.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import yaml

from tests.gpu.figures import RECORDED
from tests.installs.story import Failure, Result, build, build_wheel, tried
from tests.support.paths import RELEASE_ONLY, ROOT

LEFT_OUT: Final = (
    "tests/kernelext/cells/test_msgspec.py",  # has a separate environment, which tests/run sets up
    "tests/kernelext/cells/test_gui_loops.py",  # ipykernel 6 has no way to wake such a loop: nothing is freed there
)
CORE: Final = ("tests/config", "tests/ledger", "tests/client", "tests/commands", "tests/kernelext")
_TEST_PACKAGES: Final = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "websocket-client")
_EXTRAS: Final = "[lab,hub]"
_AT_ONCE: Final = 3
_PYPROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())


# -- checks that need no environment ----------------------------------------------------------------------------------------


def check_version() -> str:
    """Return the version, which is the same everywhere."""
    text = (ROOT / "provisioner" / "fractional_gpu" / "__init__.py").read_text()
    version: str = re.findall(r'^__version__ = "([^"]+)"', text, re.MULTILINE)[0]
    extension: str = json.loads((ROOT / "kernelext" / "labextension" / "package.json").read_text())["version"]
    if extension != version:
        raise Failure(f"the package is {version}, and kernelext/labextension/package.json says {extension}")
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heads[:1] != [version]:
        raise Failure(f"the package is {version}, and CHANGELOG.md begins with {heads[:1]}")
    return version


def check_recipe() -> str:
    """Return what conda-forge's recipe needs: the same as the package."""
    recipe = yaml.safe_load((ROOT / "examples" / "conda" / "recipe.yaml").read_text())
    if recipe["context"]["version"] != check_version():
        raise Failure(
            f"the package is {check_version()}, and examples/conda/recipe.yaml says {recipe['context']['version']}"
        )
    own = {one.replace(" ", "").replace("_", "-") for one in recipe["requirements"]["run"]}
    needed = {one.replace("_", "-") for one in _PYPROJECT["project"]["dependencies"]}
    if different := own - {"--linux", "python>=${{python-min}}"} ^ needed:
        raise Failure(f"examples/conda/recipe.yaml and pyproject.toml differ in {', '.join(sorted(different))}")
    return f"{len(needed)} packages"


def check_pythons_of_the_metadata() -> str:
    """Return the supported Pythons: each is a classifier."""
    found = supported()
    lowest = _PYPROJECT["project"]["requires-python"]
    if lowest != f">={found[0]}":
        raise Failure(f"requires-python is {lowest}, and the lowest classifier is {found[0]}")
    return ", ".join(found)


def supported() -> list[str]:
    """Return the Pythons that the metadata name, lowest first."""
    names = "\n".join(_PYPROJECT["project"]["classifiers"])
    return sorted(re.findall(r"Python :: (3\.\d+)", names), key=lambda one: int(one.partition(".")[2]))


def check_hardware() -> str:
    """Return on which devices the hardware tests of this version were recorded."""
    runs = [json.loads(file.read_text()) for file in sorted(RECORDED.glob("*.json"))]
    machines = [run["machine"] for run in runs if run["machine"]["version"] == check_version()]
    if not machines:
        raise Failure("no run of this version on a GPU is recorded (docs/gpu-tests.md)")
    return "; ".join(f"{one['devices'][0]['name']}, driver {one['driver']}" for one in machines)


def check_builds(out: Path) -> str:
    """Build wheel and sdist into the folder; return what they have."""
    built = build(out)
    names = wheel_names(built.wheel)
    if not any(name.endswith("licenses/LICENSE") for name in names):
        raise Failure("the wheel has no LICENSE")
    if foreign := {name.partition("/")[0] for name in names} - _tops():
        raise Failure(f"the wheel would install {', '.join(sorted(foreign))}")
    source = built.unpack(out / "unpacked")
    if not (source / "LICENSE").is_file():
        raise Failure("the sdist has no LICENSE")
    if names != wheel_names(build_wheel(out / "again", source)):
        raise Failure("the wheel that is built from the sdist has other files than the one of the checkout")
    return f"{len(names)} files, {built.wheel.stat().st_size >> 10} KiB; the sdist makes the same wheel"


def _tops() -> set[str]:
    version = check_version()
    name = f"jupyter_fractional_gpu-{version}"
    packages = {"fractional_gpu", "fractional_gpu_kernel", "fractional_gpu_hub", "jupyter-fractional-gpu.pth"}
    return packages | {f"{name}.data", f"{name}.dist-info"}


def wheel_names(wheel: Path) -> list[str]:
    """Return the names of the files in a wheel, sorted."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def check_extension() -> str:
    """Build JupyterLab's extension again and compare; return whose licences it has."""
    _run([sys.executable, "-m", "tests.labextension.rebuild", "--check"])
    (file,) = (ROOT / "kernelext" / "labextension" / "prebuilt" / "static").glob("third-party-licenses.json")
    packages = json.loads(file.read_text())["packages"]
    if missing := [one["name"] for one in packages if not one.get("licenseId")]:
        raise Failure(f"no licence is known of {', '.join(missing)}, which the prebuilt extension has in it")
    kinds = sorted({one["licenseId"] for one in packages})
    return f"as built from its sources; {len(packages)} packages of others in it ({', '.join(kinds) or 'none'})"


def passes(*files: str) -> str:
    """Run these tests, in each look, and return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *files]
    return _run(command, environment={"JUPYTER_GPU_ALL_LOOKS": "1"}).strip().splitlines()[-1]


# -- environments -------------------------------------------------------------------------------------------------------------


def check_environment(python: str, wheel: Path, folder: Path, *, oldest: bool) -> str:
    """Install the wheel into an empty environment of that Python, and run the core of the suite; return its last line."""
    _run(["uv", "venv", "--quiet", "--python", python, str(folder)])
    inner = str(folder / "bin" / "python")
    install = ["uv", "pip", "install", "--quiet", "--python", inner]
    resolution = ["--resolution", "lowest-direct"] if oldest else []
    _run([*install, *resolution, f"{wheel}{_EXTRAS}"])
    _run([*install, *_TEST_PACKAGES])
    where = _run([inner, "-I", "-c", "import fractional_gpu; print(fractional_gpu.__file__)"]).strip()
    if not Path(where).is_relative_to(folder):
        raise Failure(f"{inner} imports {where}, not the wheel")
    # Warnings of old dependencies about themselves say nothing about this package.
    options = [
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=. tests/support/quick tests/support/injected tests/support/no_debugpy",
        *(["-W", "default"] if oldest else []),
    ]
    left_out = [f"--ignore={file}" for file in LEFT_OUT]
    output = _run([inner, "-m", "pytest", *options, *left_out, *CORE])
    return re.sub(r"^=*\s*|\s*=*$", "", output.strip().splitlines()[-1])


def find_python(version: str) -> str | None:
    """Return the path of such an interpreter, None if the machine has none."""
    found = subprocess.run(
        ["uv", "python", "find", "--no-project", "--no-python-downloads", version],
        capture_output=True,
        text=True,
        check=False,
    )
    pyenv = Path(
        os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions"
    )  # its shims refuse versions that are not chosen
    others = sorted(pyenv.glob(f"{version}.*/bin/python"))
    return found.stdout.strip() or next(map(str, others), None)


# -- the table ----------------------------------------------------------------------------------------------------------------


def _run(command: Sequence[str], *, cwd: Path = ROOT, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run the command and return what it printed. Raises Failure with the end of it if it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise Failure(f"`{' '.join(map(str, command[:6]))} ...` ended with {done.returncode}:\n{tail}")
    return done.stdout


def results(scratch: Path, versions: Sequence[str]) -> Iterator[Result]:
    """Make every check: the long ones, which wait for processes more than they compute, a few at once and the longest first."""
    yield tried("version", check_version)
    yield tried("conda recipe", check_recipe)
    yield tried("Pythons", check_pythons_of_the_metadata)
    yield tried("hardware", check_hardware)
    built = tried("wheel and sdist", lambda: check_builds(scratch / "dist"))
    yield built
    checks = {
        **(dict(_environments(scratch, versions)) if built.holds else {}),
        **{row: partial(passes, *files) for row, files in RELEASE_ONLY.items()},
        "JupyterLab's extension": check_extension,
    }
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(tried, checks.keys(), checks.values())


def _environments(scratch: Path, versions: Sequence[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    (wheel,) = (scratch / "dist").glob("*.whl")
    for version in versions:
        python = find_python(version)
        if python is None:
            print(f"Python {version}: not here; `uv python install {version}` adds it", file=sys.stderr)
            continue
        oldest = version == supported()[0]
        name = f"Python {version}, {'oldest' if oldest else 'newest'} dependencies"
        yield name, partial(check_environment, python, wheel, scratch / version, oldest=oldest)


def main() -> int:
    """Make every check, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="tests/run release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", nargs="+", default=supported(), metavar="X.Y", help="these Pythons only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jfg-release-") as folder:
        made = list(results(Path(folder), options.python))
    width = max(len(one.check) for one in made)
    for one in made:
        print(one.line(width))
    return int(not all(one.holds for one in made))


if __name__ == "__main__":
    raise SystemExit(main())
