"""How a kernel's command starts, and whether the extension will load in it.

Rules:

- Only ipykernel gets the extension: `python [options] -m ipykernel_launcher ...`, or the form that our own
  kernelspecs use.
- Whether an interpreter can import the extension is found out by asking that interpreter, never guessed: a kernel
  that is believed to have a gate and has none would start on the GPU without being admitted. An interpreter that cannot
  be asked has a gate only with `LAUNCH_CODE`: where that cannot import the extension, the process ends before it is a
  kernel.
- A module of one of our names is ours only if its source says so (`MARK`). Where it is another one (a user's, on
  `PYTHONPATH`), the kernel starts as one without the extension, and its user is told what was found.
- ipykernel puts the notebook's folder before site-packages, so a folder `fractional_gpu_kernel` or `fractional_gpu` in it would
  shadow ours. `LAUNCH_CODE` imports ours first; a command of another form is changed to it where there is such a
  folder.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from fractional_gpu.host.ipykernel_command import EXTENSION_ARGUMENT, IPythonKernel, find_ipykernel

__all__ = ["LAUNCH_CODE", "MARK", "KernelPlan", "launch_argv", "plan_kernel"]

# Run with `python -P -c`: no folder of the working directory is on sys.path while our packages are imported. -P also
# keeps IPython
# from adding that folder, so it is added here, where IPython has it: behind the standard library, before site-packages.
LAUNCH_CODE = (
    "import sys, fractional_gpu_kernel, fractional_gpu; "
    "from ipykernel.kernelapp import launch_new_instance; "
    "sys.path.insert(next((i for i, p in enumerate(sys.path) "
    "if p.rstrip('/').endswith(('site-packages', 'dist-packages'))), 0), ''); "
    "launch_new_instance()"
)

_OURS = ("fractional_gpu_kernel", "fractional_gpu")
MARK = '__distribution__ = "jupyter-fractional-gpu"'
"""The line in the `__init__.py` of each of our packages by which it is told from another one of the same name."""

# Prints, for each name, where the module is and whether its source has the mark; null: there is none.
_PROBE_CODE = f"""
import importlib.util, json
def look(name):
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    source = getattr(spec.loader, "get_source", lambda name: None)(name) or ""
    return [spec.origin or next(iter(spec.submodule_search_locations or ()), ""), {MARK!r} in source]
print(json.dumps([look(name) for name in {_OURS!r}]), flush=True)
"""
_PROBE_TIMEOUT_S = 30.0
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "HOME")

_FOREIGN = (
    "{interpreter} imports {origin} as {name}, a name that jupyter-fractional-gpu needs there for its own module; without it "
    "this kernel has no %gpu, and keeps its share of the GPU reserved from its start. Rename that module, or take its folder "
    "out of PYTHONPATH, and restart the kernel"
)


@dataclass(frozen=True, slots=True)
class _Module:
    """What an interpreter imports by one of our names. `ours`: its source has the mark."""

    origin: str
    ours: bool


_Modules = tuple[_Module | None, ...]  # in the order of _OURS

_found: dict[tuple[object, ...], _Modules] = {}  # only where all are ours: an installation may come any time
_Answer = Future[_Modules | None]
_asked: dict[tuple[object, ...], _Answer] = {}  # kernels that start at the same time ask once, and share the answer
_found_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What is to be done to a command.

    `gated`: the extension will load. `protect`: and needs our launch form for it. `foreign`: another module has one of our
    names, so the extension must not be loaded; the sentence says which, and what to do.
    """

    is_ipykernel: bool
    gated: bool
    protect: bool = False
    foreign: str = ""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command to run, from the formatted one."""
        found = find_ipykernel(argv) if self.protect or self.foreign else None
        if found is None:
            return list(argv)
        return _plain_argv(argv, found) if self.foreign else launch_argv(argv, found)


def launch_argv(argv: Sequence[str], found: IPythonKernel) -> list[str]:
    """Return the same command in the form that cannot be shadowed."""
    options = [option for option in argv[1 : found.start] if option != "-P"]
    return [argv[0], *options, "-P", "-c", LAUNCH_CODE, *argv[found.stop :]]


def _plain_argv(argv: Sequence[str], found: IPythonKernel) -> list[str]:
    """Return the same command without our extension."""
    rest = [word for word in argv[found.stop :] if word != EXTENSION_ARGUMENT]
    if not found.ours:
        return [*argv[: found.stop], *rest]
    options = [option for option in argv[1 : found.start] if option != "-P"]
    return [argv[0], *options, "-m", "ipykernel_launcher", *rest]


def plan_kernel(argv: Sequence[str], environment: Mapping[str, str], folder: str) -> KernelPlan:
    """Find out whether the extension can be loaded by this kernelspec's `argv`, started in `folder` with `environment`.

    Runs the kernel's interpreter once if it must be asked and is not known yet: from an event loop, call it in a
    thread. Raises nothing: an interpreter that cannot be asked is one without the extension.
    """
    found = find_ipykernel(argv)
    if found is None:
        return KernelPlan(is_ipykernel=False, gated=False)
    interpreter = _interpreter(argv[0], environment)
    modules = None if interpreter is None else _modules(interpreter, tuple(argv[1 : found.start]), environment)
    if modules is None:
        return KernelPlan(is_ipykernel=True, gated=found.ours)
    if foreign := _foreign(modules):
        sentence = _FOREIGN.format(interpreter=interpreter, **foreign)
        return KernelPlan(is_ipykernel=True, gated=False, foreign=sentence)
    origins = tuple(module.origin for module in modules if module is not None)
    if len(origins) < len(_OURS):  # not installed there
        return KernelPlan(is_ipykernel=True, gated=found.ours)
    return KernelPlan(is_ipykernel=True, gated=True, protect=not found.ours and _is_shadowed(Path(folder), origins))


def _interpreter(program: str, environment: Mapping[str, str]) -> str | None:
    major, minor = sys.version_info[:2]
    if program in {"python", f"python{major}", f"python{major}.{minor}"}:  # jupyter_client puts its own in their place
        return sys.executable
    return shutil.which(program, path=environment.get("PATH"))


def _modules(interpreter: str, options: tuple[str, ...], environment: Mapping[str, str]) -> _Modules | None:
    """Return what the interpreter would import by our names, or None if it cannot be asked."""
    try:
        status = Path(interpreter).stat()
    except OSError:
        return None
    variables = tuple(environment.get(name) for name in _PYTHON_VARIABLES)
    key = (interpreter, status.st_mtime_ns, status.st_size, options, variables)
    with _found_lock:
        known = _found.get(key)
    if known is not None and _is_still_so(known, environment):
        return known
    return _ask_once(key, [interpreter, *options, "-P", "-c", _PROBE_CODE], environment)


def _ask_once(key: tuple[object, ...], command: list[str], environment: Mapping[str, str]) -> _Modules | None:
    """Return what `_probe` returns; of several threads that ask the same at the same time, one starts the interpreter for all."""
    mine = os.getpid(), *key  # a forked child has its parent's questions, but not the threads that answer them
    own = _Answer()
    answer = _asked.setdefault(mine, own)
    if answer is own:
        modules = None
        try:
            modules = _probe(command, environment)
            if modules is not None and all(module is not None and module.ours for module in modules):
                with _found_lock:
                    _found[key] = modules
        finally:
            del _asked[mine]
            own.set_result(modules)
    return answer.result()


def _is_still_so(known: _Modules, environment: Mapping[str, str]) -> bool:
    """Whether our packages are where they were found, and no module of their names has come before them since."""
    origins = tuple(module.origin for module in known if module is not None)
    before = [Path(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return all(Path(origin).exists() for origin in origins) and not any(
        _is_shadowed(entry, origins) for entry in before
    )


def _probe(command: list[str], environment: Mapping[str, str]) -> _Modules | None:
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        said = json.loads(done.stdout.splitlines()[-1])
        return tuple(None if one is None else _Module(str(one[0]), one[1] is True) for one in said)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError):
        return None


def _foreign(modules: _Modules) -> dict[str, str]:
    """Return the name and place of a module that has one of our names; empty where none has, or where our extension is not installed."""
    for name, module in zip(_OURS, modules, strict=True):
        if module is None:
            return {}
        if not module.ours:
            return {"name": name, "origin": module.origin}
    return {}


def _is_shadowed(folder: Path, origins: tuple[str, ...]) -> bool:
    """Whether something in the notebook's folder would be imported in our place."""
    for name, origin in zip(_OURS, origins, strict=True):
        for candidate in (folder / name / "__init__.py", folder / f"{name}.py"):
            if candidate.exists() and os.path.realpath(candidate) != os.path.realpath(origin):
                return True
    return False
