"""The first hour of a user, and the way out: an installed kernel appears, runs, is suspended, comes back, and goes without a trace."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from tests.support.paths import ROOT
from tests.support.stories import CHECK, fill

__all__ = [
    "PACKAGE",
    "Artifacts",
    "Failure",
    "Home",
    "Installed",
    "Result",
    "build",
    "build_wheel",
    "entries",
    "files",
    "first_hour",
    "foreign",
    "run",
    "traces",
    "tried",
]

PACKAGE = "jupyter-fractional-gpu"
SHARE = "3/4"
LIMIT_S = 600.0


class Failure(AssertionError):  # noqa: N818 - a finding
    """What is not as it should be, in a sentence."""


class Result(NamedTuple):
    """One line of a table of checks."""

    check: str
    holds: bool
    finding: str
    seconds: float

    def line(self, width: int) -> str:
        """Return the line, with the check's name in a column of this width."""
        return f"{'ok  ' if self.holds else 'FAIL'}  {self.check:<{width}}  {self.seconds:6.1f} s  {self.finding}"


def tried(check: str, make: Callable[[], str]) -> Result:
    """Make a check, which returns its finding or raises Failure."""
    print(f"{check} ...", file=sys.stderr, flush=True)
    begun = perf_counter()
    try:
        holds, finding = True, make()
    except Failure as failure:
        holds, finding = False, str(failure)
    return Result(check, holds, finding, perf_counter() - begun)


class Artifacts(NamedTuple):
    """What a release consists of."""

    wheel: Path
    sdist: Path

    def unpack(self, folder: Path) -> Path:
        """Unpack the sdist into the folder, and return the folder of its sources."""
        folder.mkdir()
        run(["tar", "-xzf", self.sdist, "-C", folder], os.environ)
        (source,) = folder.iterdir()
        return source


@dataclass(frozen=True)
class Home:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of this user's processes, without Jupyter or Python settings of the user who runs the test."""
        home, temporary = self.folder / "home", self.folder / "tmp"
        for folder in (home, temporary):
            folder.mkdir(parents=True, exist_ok=True)
        given = {
            name: os.environ[name]
            for name in ("LANG", "LC_ALL", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "UV_CACHE_DIR")
            if name in os.environ
        }
        pip = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PIP_", "UV_INDEX", "UV_DEFAULT_INDEX"))
        }
        return given | pip | {
            "HOME": str(home), "TMPDIR": str(temporary), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1",
            "JUPYTER_GPU_SIMULATE": "1x1GiB",
        }  # fmt: skip


@dataclass(frozen=True)
class Installed:
    python: Path
    command: Path


def run(command: Sequence[str | Path], environment: Mapping[str, str], *, cwd: Path | None = None) -> str:
    texts = [str(part) for part in command]
    done = subprocess.run(
        texts, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise Failure(f"`{' '.join(texts)[:300]}` ended with {done.returncode}:\n{said}")
    return done.stdout


def build(folder: Path) -> Artifacts:
    return Artifacts(build_wheel(folder), _built("sdist", folder, ROOT, "*.tar.gz"))


def build_wheel(folder: Path, source: Path = ROOT) -> Path:
    return _built("wheel", folder, source, "*.whl")


def _built(target: str, folder: Path, source: Path, pattern: str) -> Path:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder], kept, cwd=source)
    (built,) = folder.glob(pattern)
    return built


def entries(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


def traces(*folders: Path) -> set[Path]:
    return {path for path in entries(*folders) if "fractional" in path.name or path.name.startswith("jupyter-gpu")}


def files(prefix: Path) -> set[Path]:
    return {path for path in entries(prefix) if not path.is_dir()}


def foreign(prefix: Path, before: set[Path]) -> set[Path]:
    """Return the files that are new in an environment and belong to no package that is installed there.

    Empty folders do not count: uv leaves those of a wheel's data.
    """
    packages = [str(folder) for folder in prefix.glob("lib/python3*/site-packages")]
    owned = {
        Path(os.path.normpath(str(one.locate_file(file))))
        for one in distributions(path=packages)
        for file in one.files or ()
    }
    return files(prefix) - before - owned - {prefix / ".lock"}  # uv's


# -- the story ------------------------------------------------------------------------------------------------------------

# Runs in the environment's interpreter: two notebooks' kernels on one device, of which one has room at a time.
_TAKE_TURNS = """
import json, subprocess, sys
from jupyter_client.manager import start_new_kernel
command, name, fills, check = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
def status():
    return json.loads(subprocess.run([command, "status", "--json"], check=True, capture_output=True, text=True).stdout)
def states():
    return sorted(lease["lease"]["state"] for lease in status()["leases"])
def must(client, code):
    said = []
    def hear(message):
        said.append(message["content"].get("text") or "")
    reply = client.execute_interactive(code, timeout=300, output_hook=hear)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(said)
started = []
def start(code):
    started.append(start_new_kernel(kernel_name=name, startup_timeout=300))
    must(started[-1][1], code)
    return states()
try:
    told = {"alone": start(fills[0]), "both": start(fills[1])}
    first = started[0][1]
    told |= {"back": must(first, check), "python": must(first, "import sys; print(sys.prefix)"), "after": states()}
    told["socket"] = status()["socket"]
finally:
    for manager, client in started:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
print(json.dumps(told))
"""

# Runs in the environment's interpreter: the command, kept off the sockets and the state of other users of this machine.
_UNINSTALL = """
import sys
from pathlib import Path
from fractional_gpu.client import state_folder
from fractional_gpu.commands import main, uninstall
uninstall._TEMPORARY = ()
state_folder._VAR_TMP = Path(sys.argv[1])
sys.exit(main.main(["uninstall", "--yes", "--json"]))
"""


def first_hour(
    home: Home, jupyter: Installed, prefix: Path, *, base: str = "python3", kernels: Path | None = None
) -> str:
    """Install the kernel, use it, and uninstall; return the command that the product names for the removal of its package.

    `prefix`: where Jupyter is installed; `base`: the kernelspec to copy from; `kernels`: the environment that its kernels run in, if
    that is another one. Raises Failure.
    """
    environment = home.environment
    share = prefix / "share" / "jupyter"
    of_the_user = _make_things(home)
    before = entries(home.folder, share)
    run([jupyter.command, "kernels", "install", "--base", base, "--fraction", SHARE], environment)
    listed = json.loads(run([jupyter.python, "-m", "jupyter_client.kernelspecapp", "list", "--json"], environment))
    ours = [name for name in listed["kernelspecs"] if name.startswith("fractional-gpu-")]
    if len(ours) != 1:
        raise Failure(f"one kernel should have appeared, and Jupyter lists {sorted(listed['kernelspecs'])}")
    fills = json.dumps([fill(1, 32), fill(2, 32)])
    told = json.loads(
        run([jupyter.python, "-c", _TAKE_TURNS, jupyter.command, ours[0], fills, CHECK], environment).splitlines()[-1]
    )
    if not Path(told["socket"]).is_relative_to(home.folder):
        raise Failure(
            f"the user's folders have too long a path for a socket, which is {told['socket']}: what is left there is not seen"
        )
    _check(told, kernels or prefix)
    for act in ("--restart", "--stop", "--detach"):  # the next command finds one that runs
        run([jupyter.command, "broker", act], environment)
    said = json.loads(run([jupyter.python, "-c", _UNINSTALL, home.folder / "tmp"], environment))
    if said["failed"] or not said["removed"]:
        raise Failure(f"not everything could be removed: {said}")
    left = {path for path in entries(home.folder, share) - before if not _is_jupyters(path, home.folder)}
    if left or traces(home.folder):
        raise Failure(f"these are left: {sorted(map(str, left | traces(home.folder)))}")
    if changed := {str(path) for path, text in of_the_user.items() if not path.is_file() or path.read_text() != text}:
        raise Failure(f"these are the user's, and are gone or changed: {sorted(changed)}")
    command: str = said["package"]
    return command


def _make_things(home: Home) -> Mapping[Path, str]:
    """Make what the user has made and keeps: a notebook, and a configuration of the broker."""
    folder = Path(home.environment["HOME"])
    made = {
        folder / "work" / "mine.ipynb": "{}",
        folder / ".jupyter" / "jupyter_gpu_config.py": "c.GPUBroker.pools = {'default': {}}\n",
    }
    for path, text in made.items():
        path.parent.mkdir()
        path.write_text(text)
    return made


def _check(told: Mapping[str, Any], kernels: Path) -> None:
    wanted = {
        "alone": ["resident"],
        "both": ["resident", "suspended"],
        "back": "intact\n",
        "after": ["resident", "suspended"],
    }
    found = {name: told[name] for name in wanted}
    if found != wanted:
        raise Failure(f"the kernels should have taken turns as {wanted}, and did as {found}")
    if Path(told["python"].strip()) != kernels:
        raise Failure(f"the kernel should run in {kernels}, and ran in {told['python'].strip()}")


def _is_jupyters(path: Path, home: Path) -> bool:
    """Return whether Jupyter makes it without us, too: a folder without files, IPython's profile, the note that old settings were moved."""
    if path.is_dir() and not any(one.is_file() and not _is_jupyters(one, home) for one in path.rglob("*")):
        return True
    parts = path.relative_to(home / "home").parts if path.is_relative_to(home / "home") else ()
    return parts[:1] == (".ipython",) or parts == (".jupyter", "migrated")
