"""What is known of a kernel's command before the kernel starts: whether it is ipykernel, and whether our extension loads in it.

Rules:

- The command keeps its form. ipykernel gets one argument more, which loads the extension (and which the extension takes out of
  `sys.argv` again), so the kernel has the `sys.path`, `sys.argv` and flags that the local provisioner gives it.
- The interpreter itself is asked whether it can import the extension. A wrong guess would be costly: a kernel that is believed to have
  a gate and has none would start on the GPU without admission. An interpreter that cannot be asked has no gate.
- A module of one of our names is ours only if its source has `MARK`. Where another module has the name (on `PYTHONPATH`, or in the
  notebook's folder, which ipykernel puts before site-packages), the kernel starts without the extension, and a sentence says which
  module was found.
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

from fractional_gpu.host.ipykernel_command import EXTENSION_ARGUMENT, find_ipykernel

__all__ = ["EARLIER_COMMAND", "MARK", "KernelPlan", "find_interpreter", "plan_kernel"]

_OURS = ("fractional_gpu_kernel", "fractional_gpu")
MARK = '__distribution__ = "jupyter-fractional-gpu"'
"""The line in the `__init__.py` of each of our packages that distinguishes it from another package of the same name."""

# Prints, for each name, the module's file and whether its source has the mark; null: there is no such module.
_PROBE_CODE = f"""
import importlib.util, json
def describe(name):
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    source = getattr(spec.loader, "get_source", lambda name: None)(name) or ""
    return [spec.origin or next(iter(spec.submodule_search_locations or ()), ""), {MARK!r} in source]
print(json.dumps([describe(name) for name in {_OURS!r}]), flush=True)
"""
_PROBE_TIMEOUT_S = 30.0
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "HOME")

EARLIER_COMMAND = (
    "an earlier version of jupyter-fractional-gpu made its kernelspec, whose command imports modules that have other names now; run "
    "`jupyter gpu kernels install` to replace it"
)
_FOREIGN = (
    "{interpreter} imports {origin} as {name}, a name that jupyter-fractional-gpu needs there for its own module; without it "
    "this kernel has no %gpu, and keeps its share of the GPU reserved from its start. Rename that module, or take it out of the "
    "notebook's folder and of PYTHONPATH, and restart the kernel"
)


@dataclass(frozen=True, slots=True)
class _Module:
    """What an interpreter imports under one of our names. `ours`: its source has the mark."""

    origin: str
    ours: bool


_Modules = tuple[_Module | None, ...]  # in the order of _OURS

# Answers are kept only where all modules are ours: a missing one may be installed at any time.
_answers: dict[tuple[object, ...], _Modules] = {}
_Answer = Future[_Modules | None]
_running_probes: dict[tuple[object, ...], _Answer] = {}  # kernels that start at the same time share one probe
_answers_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """How a kernel is to start.

    `gated`: the extension will load. `foreign`: another module has one of our names, so the extension cannot be loaded; the
    sentence says which module, and what to do.
    """

    is_ipykernel: bool
    gated: bool
    foreign: str = ""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the formatted command with the extension's argument if the kernel is gated, else without it."""
        if not self.gated:
            return [word for word in argv if word != EXTENSION_ARGUMENT]
        return [*argv, *([] if EXTENSION_ARGUMENT in argv else [EXTENSION_ARGUMENT])]


def plan_kernel(argv: Sequence[str], environment: Mapping[str, str], folder: str) -> KernelPlan:
    """Find out whether the extension can be loaded by this kernelspec's `argv`, started in `folder` with `environment`.

    Runs the kernel's interpreter once, unless its answer is known: from an event loop, call it in a thread. Raises nothing.
    """
    position = find_ipykernel(argv)
    if position is None:
        return KernelPlan(is_ipykernel=False, gated=False)
    interpreter = find_interpreter(argv[0], environment)
    modules = None if interpreter is None else _modules(interpreter, tuple(argv[1:position]), environment)
    if interpreter is None or modules is None:
        return KernelPlan(is_ipykernel=True, gated=False)
    for name, module in zip(_OURS, modules, strict=True):
        if module is None:  # not installed there
            return KernelPlan(is_ipykernel=True, gated=False)
        foreign = str(_foreign_in(folder, name) or "") if module.ours else module.origin
        if foreign:
            sentence = _FOREIGN.format(interpreter=interpreter, origin=foreign, name=name)
            return KernelPlan(is_ipykernel=True, gated=False, foreign=sentence)
    return KernelPlan(is_ipykernel=True, gated=True)


def find_interpreter(program: str, environment: Mapping[str, str]) -> str | None:
    """Return the path of the program that a kernelspec names; None where it cannot be found."""
    major, minor = sys.version_info[:2]
    if program in {
        "python",
        f"python{major}",
        f"python{major}.{minor}",
    }:  # jupyter_client starts its own interpreter for these
        return sys.executable
    return shutil.which(program, path=environment.get("PATH"))


def _modules(interpreter: str, options: tuple[str, ...], environment: Mapping[str, str]) -> _Modules | None:
    """Return what the interpreter would import under our names, or None if it cannot be asked."""
    try:
        status = Path(interpreter).stat()
    except OSError:
        return None
    variables = tuple(environment.get(name) for name in _PYTHON_VARIABLES)
    key = (interpreter, status.st_mtime_ns, status.st_size, options, variables)
    with _answers_lock:
        known = _answers.get(key)
    if known is not None and _still_holds(known, environment):
        return known
    return _probe_once(key, [interpreter, *options, "-P", "-c", _PROBE_CODE], environment)


def _probe_once(key: tuple[object, ...], command: list[str], environment: Mapping[str, str]) -> _Modules | None:
    """Return what `_probe` returns. Of several threads that need the same answer, one starts the interpreter for all."""
    mine = os.getpid(), *key  # a forked child inherits the parent's entries, but not the threads that complete them
    own = _Answer()
    answer = _running_probes.setdefault(mine, own)
    if answer is own:
        modules = None
        try:
            modules = _probe(command, environment)
            if modules is not None and all(module is not None and module.ours for module in modules):
                with _answers_lock:
                    _answers[key] = modules
        finally:
            del _running_probes[mine]
            own.set_result(modules)
    return answer.result()


def _still_holds(known: _Modules, environment: Mapping[str, str]) -> bool:
    """Whether our packages are where they were found, and no other module of their names has come before them since."""
    folders = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return all(module is not None and Path(module.origin).exists() for module in known) and not any(
        _foreign_in(folder, name) for folder in folders for name in _OURS
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
        found = json.loads(done.stdout.splitlines()[-1])
        return tuple(None if one is None else _Module(str(one[0]), one[1] is True) for one in found)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError):
        return None


def _foreign_in(folder: str, name: str) -> Path | None:
    """Return the module that Python would import from the folder under this name of ours, if it is not ours."""
    for candidate in (Path(folder, name, "__init__.py"), Path(folder, f"{name}.py")):
        try:
            source = candidate.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # Python would fail to read it, too
            return candidate
        return None if MARK in source else candidate
    return None
