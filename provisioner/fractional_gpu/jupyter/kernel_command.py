"""What is known of a kernel's command before the kernel starts: whether it is ipykernel, and whether our extension loads in it.

Rules:

- The command keeps its form. ipykernel gets one argument more, which loads the extension (and which the extension takes out of
  `sys.argv` again), so the kernel has the `sys.path`, `sys.argv` and flags that the local provisioner gives it.
- The interpreter itself is asked whether it can import the extension. A wrong guess would be costly: a kernel that is believed to have
  a gate and has none would start on the GPU without admission. An interpreter that cannot be asked has no gate.
- A module of one of our names is ours only if its source has `MARK`. Where another module has the name (on `PYTHONPATH`, or in the
  notebook's folder, which ipykernel puts before site-packages), the kernel starts without the extension, and a sentence says which
  module was found. The same holds where msgspec, with which the extension calls the broker, is missing or too old.
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
from fractional_gpu.protocol.versions import msgspec_problem

__all__ = ["EARLIER_COMMAND", "MARK", "KernelPlan", "find_interpreter", "plan_kernel"]

_OURS = ("fractional_gpu_kernel", "fractional_gpu")
_NAMES = (*_OURS, "msgspec")
MARK = '__distribution__ = "jupyter-fractional-gpu"'
"""The line in the `__init__.py` of each of our packages that distinguishes it from another package of the same name."""

# Prints, for each name of ours, the module's file and whether its source has the mark; null: there is no such module.
# The last entry is the file and the version of msgspec, if it can be imported.
_PROBE_CODE = f"""
import importlib.util, json
def describe(name):
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    source = getattr(spec.loader, "get_source", lambda name: None)(name) or ""
    return [spec.origin or next(iter(spec.submodule_search_locations or ()), ""), {MARK!r} in source]
try:
    import msgspec
    needed = [msgspec.__file__ or "", getattr(msgspec, "__version__", None)]
except Exception:
    needed = ["", None]
print(json.dumps([*map(describe, {_OURS!r}), needed]), flush=True)
"""
_PROBE_TIMEOUT_S = 30.0
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "HOME")

EARLIER_COMMAND = (
    "an earlier version of jupyter-fractional-gpu made its kernelspec, whose command imports modules that have other names now; run "
    "`jupyter gpu kernels install` to replace it"
)
_FOREIGN = (
    "{interpreter} imports {origin} as {name}, a name that jupyter-fractional-gpu needs there for {purpose}; without it "
    "this kernel has no %gpu, and keeps its share of the GPU reserved from its start. Rename that module, or take it out of the "
    "notebook's folder and of PYTHONPATH, and restart the kernel"
)


@dataclass(frozen=True, slots=True)
class _Module:
    """What an interpreter imports under a name. `usable`: one of our names is ours, msgspec can be imported and is new enough."""

    origin: str
    usable: bool
    version: str | None = None  # msgspec's


_Modules = tuple[_Module | None, ...]  # in the order of _NAMES; None: there is none

# Answers are kept only where all modules are usable: a missing one may be installed at any time.
_answers: dict[tuple[object, ...], _Modules] = {}
_Answer = Future[_Modules | None]
_running_probes: dict[tuple[object, ...], _Answer] = {}  # kernels that start at the same time share one probe
_answers_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """How a kernel is to start.

    `gated`: the extension will load. `obstacle`: why it cannot be loaded where it is installed, and what to do, a sentence.
    """

    is_ipykernel: bool
    gated: bool
    obstacle: str = ""

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
    found = [module for module in modules if module is not None]
    if len(found) < len(modules):  # our extension is not installed there
        return KernelPlan(is_ipykernel=True, gated=False)
    obstacle = _find_obstacle(found, interpreter, folder)
    return KernelPlan(is_ipykernel=True, gated=not obstacle, obstacle=obstacle)


def _find_obstacle(modules: Sequence[_Module], interpreter: str, folder: str) -> str:
    """Return why an interpreter that has the extension cannot load it, and what to do; empty where it can."""
    msgspec = modules[-1]
    if not msgspec.usable and (msgspec.version or not msgspec.origin):  # else another module has the name
        problem = msgspec_problem(msgspec.version, python=interpreter)
        return f"{problem}. Until then it has no %gpu, and keeps its share of the GPU reserved from its start"
    for name, module in zip(_NAMES, modules, strict=True):
        foreign = _foreign_in(folder, name, module.origin) if module.usable else module.origin
        if foreign:
            purpose = "its own module" if name in _OURS else "its calls of the GPU broker"
            return _FOREIGN.format(interpreter=interpreter, origin=foreign, name=name, purpose=purpose)
    return ""


def find_interpreter(program: str, environment: Mapping[str, str]) -> str | None:
    """Return the path of the program that a kernelspec names; None where it cannot be found."""
    major, minor = sys.version_info[:2]
    # For these jupyter_client starts its own interpreter.
    if program in {"python", f"python{major}", f"python{major}.{minor}"}:
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
            if modules is not None and all(module is not None and module.usable for module in modules):
                with _answers_lock:
                    _answers[key] = modules
        finally:
            del _running_probes[mine]
            own.set_result(modules)
    return answer.result()


def _still_holds(known: _Modules, environment: Mapping[str, str]) -> bool:
    """Whether the packages are where they were found, and no other module of their names has come before them since."""
    folders = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return all(
        module is not None
        and Path(module.origin).exists()
        and not any(_foreign_in(folder, name, module.origin) for folder in folders)
        for name, module in zip(_NAMES, known, strict=True)
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
        *ours, (origin, version) = json.loads(done.stdout.splitlines()[-1])
        modules = [None if one is None else _Module(str(one[0]), one[1] is True) for one in ours]
        return (*modules, _Module(origin, not msgspec_problem(version), version))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError):
        return None


def _foreign_in(folder: str, name: str, origin: str) -> Path | None:
    """Return the module that Python would import from the folder under this name, if it is neither ours nor that at `origin`."""
    for candidate in (Path(folder, name, "__init__.py"), Path(folder, f"{name}.py")):
        try:
            source = candidate.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # Python would fail to read it, too
            return candidate
        return None if MARK in source or candidate == Path(origin) else candidate
    return None
