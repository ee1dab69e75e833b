"""`tests/run installs`: wheel and sdist, installed in every way that users have, and every install command of the documents.

- The forms: a venv by pip from the wheel, and from the sdist; `uv pip`; `uv tool`; a prefix as conda makes it, by the commands of the
  recipe; a kernel environment next to Jupyter's; The Littlest JupyterHub's plugin, with a stand-in for TLJH. In each a kernel appears,
  runs on a simulated GPU, is suspended and comes back, the broker is started and stopped, and the package is removed by the command
  that the product names. Nothing may be left but the user's notebook and configuration.
- nbgrader, which grades a notebook although its cell waits for the GPU for longer than nbgrader gives a cell.
- The install commands of README and docs, page by page, with these artifacts. Those that cannot be run here are listed with the reason.

Needs a package index.

With `--clone`: how many seconds and commands it takes from `git clone` to the first kernel that was suspended and came back, by pip and by
uvx, as in the README.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import yaml

from fractional_gpu.protocol.names import state_words
from tests.installs import documents
from tests.installs.story import (
    PACKAGE,
    Artifacts,
    Failure,
    Home,
    Installed,
    build,
    entries,
    files,
    first_hour,
    foreign,
    run,
    traces,
    tried,
)
from tests.site.blocks import blocks, commands
from tests.support.paths import ROOT
from tests.support.stories import CHECK, fill
from tests.support.tljh import put_stand_in

# -- forms of installation ------------------------------------------------------------------------------------------------


def pip_wheel(built: Artifacts, folder: Path) -> str:
    return _by_pip(built.wheel, folder)


def pip_sdist(built: Artifacts, folder: Path) -> str:
    return _by_pip(built.sdist, folder)


def _by_pip(artifact: Path, folder: Path) -> str:
    home, prefix = Home(folder / "user"), _environment(folder / "environment")
    before = files(prefix)
    run([*_pip(prefix), "install", artifact], home.environment)
    return _removed(home, prefix, before)


def uv_pip(built: Artifacts, folder: Path) -> str:
    """`uv venv && uv pip install`: without pip in the environment."""
    home, prefix = Home(folder / "user"), folder / "environment"
    run(["uv", "venv", "--quiet", "--python", sys.executable, prefix], home.environment)
    before = files(prefix)
    run(["uv", "pip", "install", "--quiet", "--python", prefix / "bin" / "python", built.wheel], home.environment)
    return _removed(home, prefix, before)


def uv_tool(built: Artifacts, folder: Path) -> str:
    """`uv tool install`: the package alone in a separate environment, its command on the PATH."""
    home, tools = Home(folder / "user"), folder / "uv" / "tools"
    uv = {"UV_TOOL_DIR": tools, "UV_TOOL_BIN_DIR": folder / "bin"}
    placed = home.environment | {name: str(place) for name, place in uv.items()}
    run(["uv", "tool", "install", "--quiet", "--python", sys.executable, built.wheel], placed)
    prefix = tools / PACKAGE
    command = first_hour(home, Installed(prefix / "bin" / "python", folder / "bin" / "jupyter-gpu"), prefix)
    run(shlex.split(command), placed)
    if left := entries(folder / "bin") | traces(tools):
        raise Failure(f"`{command}` leaves {sorted(map(str, left))}")
    return command


def conda_recipe(built: Artifacts, folder: Path) -> str:
    """A prefix with the marks of conda: `conda-meta`, CONDA_PREFIX, copies instead of links. The recipe's commands are run in it.

    conda's index is not asked: the recipe's requirements come from PyPI, where they have the same names.
    """
    recipe = yaml.safe_load((ROOT / "examples" / "conda" / "recipe.yaml").read_text())
    home, prefix = Home(folder / "user"), _environment(folder / "environment", "--copies")
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta" / "history").touch()
    activated = _with_path(home.environment, prefix / "bin")
    activated |= {
        "CONDA_PREFIX": str(prefix),
        "CONDA_DEFAULT_ENV": str(prefix),
        "PYTHON": str(prefix / "bin" / "python"),
    }
    needs = [one for part in ("host", "run") for one in recipe["requirements"][part]]
    run([*_pip(prefix), "install", *(one for one in needs if not one.startswith(("python ", "__")))], activated)
    before = files(prefix)
    source = built.unpack(folder / "source")
    build_script, extra_test = recipe["build"]["script"], recipe["tests"][1]["script"]
    run(["sh", "-euc", build_script.replace("${{ PYTHON }}", "$PYTHON")], activated, cwd=source)
    imports = "; ".join(f"import {name}" for name in recipe["tests"][0]["python"]["imports"])
    for command in (f"$PYTHON -c '{imports}'", "$PYTHON -m pip check", *extra_test):
        run(["sh", "-euc", command], activated, cwd=folder)
    (entry,) = recipe["build"]["python"]["entry_points"]
    name, _, target = entry.partition(" = ")
    if f"from {target.partition(':')[0]} import" not in (prefix / "bin" / name).read_text():
        raise Failure(f"the recipe's program {entry} is another one than the package's")
    return _removed(home, prefix, before)


def second_environment(built: Artifacts, folder: Path) -> str:
    """Jupyter in one environment, the kernels' Python in another one; both have the package."""
    home, jupyter, kernels = Home(folder / "user"), folder / "environment", folder / "kernels"
    before = files(_environment(jupyter))
    for prefix in (jupyter, _environment(kernels)):
        run([*_pip(prefix), "install", built.wheel], home.environment)
    run(
        [kernels / "bin" / "python", "-m", "ipykernel", "install", "--prefix", jupyter, "--name", "second"],
        home.environment,
    )
    second = entries(jupyter / "share" / "jupyter" / "kernels" / "second")
    return _removed(home, jupyter, before | second, base="second", kernels=kernels)


def tljh_plugin(built: Artifacts, folder: Path) -> str:
    """What `--plugin` does: the package in the hub's environment, then what its hooks say, and the way out of docs/tljh.md."""
    home, hub, user = (
        Home(folder / "user"),
        _environment(folder / "tljh" / "hub"),
        _environment(folder / "tljh" / "user"),
    )
    settings = [
        folder / "etc" / "jupyter" / "jupyter_gpu_config.py",
        folder / "etc" / "systemd" / "jupyter-gpu.service",
    ]
    put_stand_in(folder / "stand-in")
    (folder / "bin").mkdir()
    program, socket = hub / "bin" / "jupyter-gpu", folder / "run" / "broker.sock"
    serve = f"{program} broker --detach --socket {socket} --state-dir {folder}/state --config {settings[0]}"
    systemctl = (
        f'case "$1 $2" in "restart jupyter-gpu.service") exec {serve};; '
        f'"disable --now") exec {program} broker --stop --socket {socket};; esac'
    )
    for name, text in (("systemctl", systemctl), ("tljh-config", "true"), ("sudo", 'exec "$@"')):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    tljh = _with_path(home.environment, folder / "bin") | {
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "stand-in", ROOT))), "PIP_YES": "1",
        "TLJH_USER": str(user), "TLJH_CONFIG": "{}",
    }  # fmt: skip
    run([*_pip(hub), "install", "jupyterhub-systemdspawner", "pluggy", "jupyterhub"], home.environment)  # TLJH has them
    before = {prefix: files(prefix) for prefix in (hub, user)}
    run([*_pip(hub), "install", "--upgrade", built.wheel], home.environment)
    settings[1].parent.mkdir(parents=True)
    hooks: list[str | Path] = [hub / "bin" / "python", "-m", "tests.support.tljh", *settings]
    told = json.loads(run(hooks, tljh))
    for prefix, packages in ((hub, told["hub"]), (user, told["user"])):
        run([*_pip(prefix), "install", *packages], home.environment)
    first_hour(home, Installed(user / "bin" / "python", user / "bin" / "jupyter-gpu"), user)
    told["config"]["fractional_gpu"]["socket"] = str(socket)
    run([*hooks, "--after"], tljh | {"TLJH_CONFIG": json.dumps(told["config"])})
    kernels = sorted(path.name for path in (user / "share" / "jupyter" / "kernels").glob("fractional-gpu-*"))
    wanted = told["config"]["fractional_gpu"]["pools"]["default"]["fractions"]
    if len(kernels) != len(wanted) or not all(path.is_file() for path in settings):
        raise Failure(f"there should be kernels for {wanted}, {settings[0]} and {settings[1]}; kernels are {kernels}")
    (removal,) = (block for block in blocks(ROOT / "docs" / "tljh.md") if "pip uninstall" in block.text)
    for command in commands(removal.text):
        mapped = re.sub(r"/etc/systemd/system/", f"{settings[1].parent}/", command)
        mapped = mapped.replace("/etc/jupyter/", f"{settings[0].parent}/").replace("/opt/tljh/", f"{folder}/tljh/")
        run(["sh", "-euc", mapped], tljh)
    left = foreign(hub, before[hub]) | foreign(user, before[user]) | {path for path in settings if path.exists()}
    if left:
        raise Failure(f"docs/tljh.md's removal leaves {sorted(map(str, left))}")
    return "docs/tljh.md, Remove"


def nbgrader(built: Artifacts, folder: Path) -> str:
    """Autograding with the configuration of docs/teaching.md: a cell that waits longer than nbgrader gives it is graded all the same."""
    home, prefix, course = Home(folder / "user"), _environment(folder / "environment"), folder / "course"
    run([*_pip(prefix), "install", built.wheel, "nbgrader"], home.environment)
    environment = _with_path(home.environment, prefix / "bin")
    run(["jupyter", "gpu", "kernels", "install", "--fraction", "1/4", "1"], environment)
    course.mkdir()
    (block,) = (one for one in blocks(ROOT / "docs" / "teaching.md") if one.language == "python")
    (course / "nbgrader_config.py").write_text(f"{block.text}c.CourseDirectory.course_id = 'gpu'\n")
    grading: list[str | Path] = [prefix / "bin" / "python", ROOT / "tests" / "installs" / "grading.py", "jupyter-gpu"]
    points = run([*grading, "fractional-gpu-default-1000", fill(1), CHECK], environment, cwd=course).strip()
    if float(points) != 5:
        raise Failure(f"the student should have 5 points, and has {points}")
    run(["jupyter-gpu", "uninstall", "--yes"], environment)
    return "docs/teaching.md's nbgrader_config.py"


FORMS: Mapping[str, Callable[[Artifacts, Path], str]] = {
    "pip-wheel": pip_wheel, "pip-sdist": pip_sdist, "uv-pip": uv_pip, "uv-tool": uv_tool, "conda-recipe": conda_recipe,
    "second-environment": second_environment, "tljh-plugin": tljh_plugin, "nbgrader": nbgrader,
}  # fmt: skip


def _environment(prefix: Path, *options: str) -> Path:
    run([sys.executable, "-m", "venv", *options, prefix], os.environ)
    return prefix


def _pip(prefix: Path) -> list[str]:
    return [str(prefix / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]


def _with_path(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {**environment, "PATH": f"{folder}{os.pathsep}{environment['PATH']}"}


def _removed(home: Home, prefix: Path, before: set[Path], *, base: str = "python3", kernels: Path | None = None) -> str:
    """Go through the story and remove the package as the product says; return that command. Raises Failure."""
    installed = Installed(prefix / "bin" / "python", prefix / "bin" / "jupyter-gpu")
    command = first_hour(home, installed, prefix, base=base, kernels=kernels)
    run([*shlex.split(command), *(["--yes"] if "-m pip" in command else [])], home.environment)
    if left := foreign(prefix, before):
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
        prog="tests/run installs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clone", action="store_true", help="measure from a clone to the first kernel that came back")
    parser.add_argument(
        "--source",
        default=str(ROOT),
        metavar="REPOSITORY",
        help="with --clone: what is cloned (default: this checkout)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help=f"these only: {', '.join(FORMS)}, or pages such as docs/hub.md; with --clone: pip, uvx",
    )
    options = parser.parse_args()
    pages = documents.pages_that_install()
    known = list(_CLONED) if options.clone else [*FORMS, *pages]
    names = options.only or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; allowed: {', '.join(known)}")
    # A short path: UNIX sockets allow 107 bytes. After a failure a broker may still write there.
    with tempfile.TemporaryDirectory(prefix="jfg-", ignore_cleanup_errors=True) as text:
        scratch = Path(text)
        if options.clone:
            return _clone(scratch, options.source, names)
        # Caches belong to pip and uv, and are nobody's home: one for all forms.
        os.environ |= {f"{name}_CACHE_DIR": str(scratch / "cache" / name) for name in ("PIP", "UV")}
        built = build(scratch / "dist")
        results = []
        for number, name in enumerate(names):
            folder = scratch / str(number)
            folder.mkdir()
            check = FORMS.get(name) or partial(documents.follow, pages[name])
            made = tried(name, partial(check, built, folder))
            print(made.line(18), flush=True)
            results.append(made.holds)
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
