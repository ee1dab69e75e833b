"""How a kernel's command starts, and whether the extension will load in it.

Rules:

- Only ipykernel gets the extension: `python [options] -m ipykernel_launcher ...`, or the form that our own
  kernelspecs use.
- Whether an interpreter can import the extension is found out by asking that interpreter, never guessed: a kernel
  that is believed to have a gate and has none would start on the GPU without being admitted. `LAUNCH_CODE` needs no
  asking: where it cannot import the extension, the process ends before it is a kernel.
- ipykernel puts the notebook's folder before site-packages, so a folder `kernelext` or `provisioner` in it would
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
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EXTENSION_ARGUMENT", "LAUNCH_CODE", "KernelPlan", "find_ipykernel", "launch_argv", "plan_kernel"]

EXTENSION_ARGUMENT = "--IPKernelApp.extra_extensions=kernelext"

# Run with `python -P -c`: no folder of the working directory is on sys.path while our packages are imported. -P also
# keeps IPython
# from adding that folder, so it is added here, where IPython has it: behind the standard library, before site-packages.
LAUNCH_CODE = (
    "import sys, kernelext, provisioner; "
    "from ipykernel.kernelapp import launch_new_instance; "
    "sys.path.insert(next((i for i, p in enumerate(sys.path) "
    "if p.rstrip('/').endswith(('site-packages', 'dist-packages'))), 0), ''); "
    "launch_new_instance()"
)

_OURS = ("kernelext", "provisioner")
_PROBE_CODE = (
    "import importlib.util as u, json; "
    f"print(json.dumps([getattr(u.find_spec(n), 'origin', None) for n in {_OURS!r}]), flush=True)"
)
_PROBE_TIMEOUT_S = 30.0
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "HOME")

_found: dict[tuple[object, ...], tuple[str, ...]] = {}  # only what was found: an installation may come any time
_found_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class IPythonKernel:
    """Where a command names ipykernel.

    `argv[:start]` are the interpreter and its options, `argv[start:stop]` say what it runs.
    """

    start: int
    stop: int
    ours: bool


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What is to be done to a command.

    `gated`: the extension will load. `protect`: and needs our launch form for it.
    """

    is_ipykernel: bool
    gated: bool
    protect: bool = False

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command to run, from the formatted one."""
        found = find_ipykernel(argv) if self.protect else None
        return list(argv) if found is None else launch_argv(argv, found)


def find_ipykernel(argv: Sequence[str]) -> IPythonKernel | None:
    """Return where `argv` names ipykernel, or None if it starts something else, of which nothing is known."""
    position = 1
    while position < len(argv) and argv[position].startswith("-"):
        word, following = argv[position], argv[position + 1] if position + 1 < len(argv) else ""
        if word == "-m":
            known = following in {"ipykernel_launcher", "ipykernel"}
            return IPythonKernel(position, position + 2, ours=False) if known else None
        if word == "-c":
            return IPythonKernel(position, position + 2, ours=True) if _is_launch_code(following) else None
        position += 2 if word in {"-X", "-W"} else 1
    return None


def launch_argv(argv: Sequence[str], found: IPythonKernel) -> list[str]:
    """Return the same command in the form that cannot be shadowed."""
    options = [option for option in argv[1 : found.start] if option != "-P"]
    return [argv[0], *options, "-P", "-c", LAUNCH_CODE, *argv[found.stop :]]


def plan_kernel(argv: Sequence[str], environment: Mapping[str, str], folder: str) -> KernelPlan:
    """Find out whether the extension can be loaded by this kernelspec's `argv`, started in `folder` with `environment`.

    Runs the kernel's interpreter once if it must be asked and is not known yet: from an event loop, call it in a
    thread. Raises nothing: an interpreter that cannot be asked is one without the extension.
    """
    found = find_ipykernel(argv)
    if found is None:
        return KernelPlan(is_ipykernel=False, gated=False)
    if found.ours:
        return KernelPlan(is_ipykernel=True, gated=True)
    interpreter = _interpreter(argv[0], environment)
    origins = None if interpreter is None else _origins(interpreter, tuple(argv[1 : found.start]), environment)
    if origins is None:
        return KernelPlan(is_ipykernel=True, gated=False)
    return KernelPlan(is_ipykernel=True, gated=True, protect=_is_shadowed(Path(folder), origins))


def _is_launch_code(code: str) -> bool:
    """Whether it is ours, of this or another version."""
    return "kernelext" in code and "launch_new_instance" in code


def _interpreter(program: str, environment: Mapping[str, str]) -> str | None:
    major, minor = sys.version_info[:2]
    if program in {"python", f"python{major}", f"python{major}.{minor}"}:  # jupyter_client puts its own in their place
        return sys.executable
    return shutil.which(program, path=environment.get("PATH"))


def _origins(interpreter: str, options: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the files of our packages as the interpreter would import them, or None if it cannot."""
    try:
        status = Path(interpreter).stat()
    except OSError:
        return None
    variables = tuple(environment.get(name) for name in _PYTHON_VARIABLES)
    key = (interpreter, status.st_mtime_ns, status.st_size, options, variables)
    with _found_lock:
        known = _found.get(key)
    if known is not None and all(Path(origin).exists() for origin in known):
        return known
    origins = _probe([interpreter, *options, "-P", "-c", _PROBE_CODE], environment)
    if origins is not None:
        with _found_lock:
            _found[key] = origins
    return origins


def _probe(command: list[str], environment: Mapping[str, str]) -> tuple[str, ...] | None:
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        origins = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        return None  # not installed there, or a folder without __init__.py that happens to bear the name
    return tuple(origins)


def _is_shadowed(folder: Path, origins: tuple[str, ...]) -> bool:
    """Whether something in the notebook's folder would be imported in our place."""
    for name, origin in zip(_OURS, origins, strict=True):
        for candidate in (folder / name / "__init__.py", folder / f"{name}.py"):
            if candidate.exists() and os.path.realpath(candidate) != os.path.realpath(origin):
                return True
    return False
