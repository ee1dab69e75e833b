"""`tests/run first-hour`: the built wheel in fresh environments: the kernel appears, runs, is suspended, comes back, and is uninstalled.

The environments: a venv by pip; a prefix as conda makes it; `uv tool`; and a kernel environment next to Jupyter's. Files before and
after are compared; the product's own command for the removal of its package is the one that is run. Needs a package index.

With `--clone`: how many seconds and commands it takes from `git clone` to the first kernel that was suspended and came back, by pip and by
uvx, as in the README.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from fractional_gpu.protocol.names import state_words
from tests.first_hour.story import PACKAGE, Failure, Home, Installed, build_wheel, entries, first_hour, run, traces
from tests.support.paths import ROOT

# -- forms of installation ------------------------------------------------------------------------------------------------


def venv(wheel: Path, folder: Path) -> str:
    home, python = Home(folder / "user"), _made_by_venv(folder / "environment")
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], home.environment)
    return _removed(home, _in(python.parent), python.parent.parent)


def conda_like(wheel: Path, folder: Path) -> str:
    """A prefix with the marks of conda: `conda-meta`, CONDA_PREFIX, copies instead of links."""
    home, prefix = Home(folder / "user"), folder / "environment"
    python = _made_by_venv(prefix, "--copies")
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta" / "history").touch()
    activated = home.environment | {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": str(prefix)}
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], activated)
    return _removed(home, _in(python.parent), prefix)


def uv_tool(wheel: Path, folder: Path) -> str:
    """`uv tool install`: the package alone in a separate environment, its command on the PATH."""
    home, tools = Home(folder / "user"), folder / "uv" / "tools"
    uv = {"UV_TOOL_DIR": tools, "UV_TOOL_BIN_DIR": folder / "bin", "UV_CACHE_DIR": folder / "uv" / "cache"}
    placed = home.environment | {name: str(place) for name, place in uv.items()}
    run(["uv", "tool", "install", "--quiet", "--python", sys.executable, wheel], placed)
    prefix = tools / PACKAGE
    command = first_hour(home, Installed(prefix / "bin" / "python", folder / "bin" / "jupyter-gpu"), prefix)
    run(shlex.split(command), placed)
    if left := entries(folder / "bin") | traces(tools):
        raise Failure(f"`{command}` leaves {sorted(map(str, left))}")
    return command


def second_environment(wheel: Path, folder: Path) -> str:
    """Jupyter in one environment, the kernels' Python in another one; both have the package."""
    home, jupyter, kernels = Home(folder / "user"), folder / "environment", folder / "kernels"
    for prefix in (jupyter, kernels):
        python = _made_by_venv(prefix)
        run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], home.environment)
    run(
        [kernels / "bin" / "python", "-m", "ipykernel", "install", "--prefix", jupyter, "--name", "second"],
        home.environment,
    )
    return _removed(home, _in(jupyter / "bin"), jupyter, base="second", kernels=kernels)


FORMS: dict[str, Callable[[Path, Path], str]] = {
    "venv": venv, "conda-like": conda_like, "uv-tool": uv_tool, "second-environment": second_environment
}  # fmt: skip


def _made_by_venv(prefix: Path, *options: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", *options, prefix], check=True)
    return prefix / "bin" / "python"


def _in(programs: Path) -> Installed:
    return Installed(programs / "python", programs / "jupyter-gpu")


def _removed(
    home: Home, jupyter: Installed, prefix: Path, *, base: str = "python3", kernels: Path | None = None
) -> str:
    """Go through the story and remove the package as the product says; return that command. Raises Failure."""
    command = first_hour(home, jupyter, prefix, base=base, kernels=kernels)
    run([*shlex.split(command), *(["--yes"] if "-m pip" in command else [])], home.environment)
    if left := traces(prefix):
        raise Failure(f"`{command}` leaves {sorted(map(str, left))}")
    return command


# -- from a clone ---------------------------------------------------------------------------------------------------------

_DEMO = "gpu demo --check --json"
_CLONED: dict[str, Sequence[str]] = {
    "pip": (
        "git clone --quiet {source} clone", "python3 -m venv .venv", ".venv/bin/pip install --quiet ./clone[lab]",
        f".venv/bin/jupyter {_DEMO}",
    ),
    "uvx": ("git clone --quiet {source} clone", f"uvx --quiet --from ./clone[lab] jupyter-{_DEMO}"),
}  # fmt: skip


def from_clone(way: str, source: str, folder: Path) -> tuple[int, float, float]:
    """Return the number of commands, the seconds to the first kernel that came back, and to the demonstration's end. Raises Failure.

    `source`: the repository, as `git clone` takes it.
    """
    home = Home(folder / "user")
    environment = {name: value for name, value in home.environment.items() if name != "JUPYTER_GPU_SIMULATE"}
    *first, demo = (shlex.split(command.format(source=source)) for command in _CLONED[way])
    begun = perf_counter()
    for command in first:
        run(command, environment, cwd=folder)
    back_s, lines = None, []
    with subprocess.Popen(
        demo,
        env=environment,
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stderr is not None
        assert running.stdout is not None
        for line in running.stderr:
            lines.append(line.strip())
            if back_s is None and _is_back(lines):
                back_s = perf_counter() - begun
        said = running.stdout.read()  # one object, which a pipe holds
    if running.returncode != 0 or back_s is None or not json.loads(said)["ok"]:
        raise Failure("\n".join([f"`{shlex.join(demo)}` ended with {running.returncode}:", *lines[-30:], said]))
    return len(_CLONED[way]), back_s, perf_counter() - begun


def _is_back(lines: Sequence[str]) -> bool:
    """Return whether the last line shows a kernel on the GPU, and an earlier one shows it suspended."""
    news = [
        line.partition("s  ")[2].partition(": ") for line in lines
    ]  # "10.6 s  tenant-b: suspended, 608 MiB now in host memory"
    name, _, state = news[-1]
    return state == state_words("resident") and any(
        other == name and was.startswith("suspended") for other, _, was in news
    )


# -- the table ------------------------------------------------------------------------------------------------------------


def _tried(name: str, make: Callable[[], str]) -> bool:
    print(f"{name} ...", file=sys.stderr, flush=True)
    begun = perf_counter()
    try:
        holds, finding = True, make()
    except Failure as failure:
        holds, finding = False, str(failure)
    print(f"{'ok  ' if holds else 'FAIL'}  {name:<18}  {perf_counter() - begun:6.1f} s  {finding}", flush=True)
    return holds


def _clone(scratch: Path, source: str, ways: Sequence[str]) -> int:
    print("by    commands  first kernel back  whole demonstration")
    for way in ways:
        folder = scratch / way
        folder.mkdir()
        try:
            commands, back_s, end_s = from_clone(way, source, folder)
        except Failure as failure:
            print(f"FAIL  {way}: {failure}")
            return 1
        print(f"{way:<4}  {commands:>8}  {back_s:>15.1f} s  {end_s:>17.1f} s", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/run first-hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clone", action="store_true", help="measure from a clone to the first kernel that came back")
    parser.add_argument(
        "--source",
        default=str(ROOT),
        metavar="REPOSITORY",
        help="with --clone: what is cloned (default: this checkout)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"these only: {', '.join(FORMS)}; with --clone: pip, uvx"
    )
    options = parser.parse_args()
    names = options.only or list(_CLONED if options.clone else FORMS)
    if unknown := [name for name in names if name not in (_CLONED if options.clone else FORMS)]:
        parser.error(f"there is no {', '.join(unknown)}; allowed: {', '.join(_CLONED if options.clone else FORMS)}")
    with tempfile.TemporaryDirectory(prefix="jfg-first-") as text:
        scratch = Path(text)
        if options.clone:
            return _clone(scratch, options.source, names)
        wheel = build_wheel(scratch / "dist")
        results = []
        for name in names:
            folder = scratch / name
            folder.mkdir()
            results.append(_tried(name, lambda name=name, folder=folder: FORMS[name](wheel, folder)))  # type: ignore[misc]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
