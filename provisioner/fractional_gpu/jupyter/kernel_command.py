"""Reads a kernelspec's `config` before its kernel starts, and finds out whether the kernel is ipykernel and can load our extension.

The extension makes cells wait for the GPU. To load it, `-m ipykernel_launcher` becomes `-m fractional_gpu_kernel ipykernel_launcher`. We
ask the kernel's own interpreter whether it can import the extension, because a wrong guess would let the kernel use the GPU without
waiting. A module with one of our names is ours only if its source contains `MARK`. If another module has that name (on `PYTHONPATH` or in
the notebook's folder), or if msgspec is missing or too old, the kernel starts without the extension and tells the user about it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from fractional_gpu.core.units import parse_fraction_milli, parse_memory_mib
from fractional_gpu.host.process import EXTENSION, find_ipykernel
from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu.protocol.messages import LeaseRequest
from fractional_gpu.protocol.names import msgspec_problem

_OURS = ("fractional_gpu_kernel", "fractional_gpu")
_NAMES = (*_OURS, "msgspec")
MARK = '__distribution__ = "jupyter-fractional-gpu"'
"""The line in each of our packages' `__init__.py` that distinguishes it from other packages of the same name."""

_ANSWER = "jupyter-fractional-gpu found "  # distinguishes the answer from output of a sitecustomize
# Prints the file of each name and whether its source has the mark (or null if there is no such module). It then prints the file and the
# version of msgspec.
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
print({_ANSWER!r} + json.dumps([*map(describe, {_OURS!r}), needed]), flush=True)
"""
_PROBE_TIMEOUT_S = 30.0
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "HOME")

_WITHOUT = "has no %gpu, and its share of the GPU is reserved as soon as it starts"
_FOREIGN = (
    "{interpreter} imports {origin} as {name}, but jupyter-fractional-gpu needs that name for {purpose}; without it "
    f"this kernel {_WITHOUT}. Rename that module, or remove it from the notebook's folder or PYTHONPATH, and restart the kernel"
)
_UNASKED = (
    f"{{interpreter}} could not report whether it has the GPU extension ({{why}}), so this kernel {_WITHOUT}. "
    "Make sure that `{interpreter} -c 'import fractional_gpu_kernel'` works, then restart the kernel"
)
_WRAPPED = (
    "{program} does not start ipykernel directly, so the GPU extension is not loaded automatically. If this is an IPython kernel, "
    f"load it with `%load_ext fractional_gpu_kernel` in the first cell. Until then it {_WITHOUT}"
)


@dataclass(frozen=True, slots=True)
class _Module:
    origin: str
    usable: bool
    version: str | None = None  # of msgspec


_Modules = tuple[_Module | None, ...]  # in the order of _NAMES, with None for a module that was not found

# An answer is kept only if all modules are usable, because a missing module may be installed at any time.
_answers: dict[tuple[object, ...], _Modules] = {}


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """How to start a kernel, and whether the extension will load and make its cells wait for the GPU (`gated`).

    `obstacle` explains why an installed extension cannot load, and what to do about it.
    """

    gated: bool
    obstacle: str = ""

    def command(self, argv: Sequence[str]) -> list[str]:
        position = find_ipykernel(argv) if self.gated else None
        return list(argv) if position is None else [*argv[: position + 1], EXTENSION, *argv[position + 1 :]]


def plan_kernel(
    argv: Sequence[str], environment: Mapping[str, str], folder: str, language: str = "python"
) -> KernelPlan:
    """Find out whether the kernel started by `argv` can load the extension. This may run the kernel's interpreter. Never raises."""
    position = find_ipykernel(argv)
    if position is None:
        hidden = argv and language.lower() == "python"
        return KernelPlan(gated=False, obstacle=_WRAPPED.format(program=argv[0]) if hidden else "")
    interpreter = find_interpreter(argv[0], environment) or argv[0]
    modules = _modules(interpreter, tuple(argv[1:position]), environment)
    if isinstance(modules, str):
        return KernelPlan(gated=False, obstacle=_UNASKED.format(interpreter=interpreter, why=modules))
    found = [module for module in modules if module is not None]
    if len(found) < len(modules):  # our extension is not installed
        return KernelPlan(gated=False)
    obstacle = _find_obstacle(found, interpreter, folder)
    return KernelPlan(gated=not obstacle, obstacle=obstacle)


def _find_obstacle(modules: Sequence[_Module], interpreter: str, folder: str) -> str:
    msgspec = modules[-1]
    if not msgspec.usable and (msgspec.version or not msgspec.origin):  # otherwise another module has the name
        problem = msgspec_problem(msgspec.version, python=interpreter)
        return f"{problem}. Until then it {_WITHOUT}"
    for name, module in zip(_NAMES, modules, strict=True):
        foreign = _foreign_in(folder, name, module.origin) if module.usable else module.origin
        if foreign:
            purpose = "its own module" if name in _OURS else "its calls to the GPU broker"
            return _FOREIGN.format(interpreter=interpreter, origin=foreign, name=name, purpose=purpose)
    return ""


def find_interpreter(program: str, environment: Mapping[str, str]) -> str | None:
    major, minor = sys.version_info[:2]
    # For these names, jupyter_client starts its own interpreter.
    if program in {"python", f"python{major}", f"python{major}.{minor}"}:
        return sys.executable
    return shutil.which(program, path=environment.get("PATH"))


def _modules(interpreter: str, options: tuple[str, ...], environment: Mapping[str, str]) -> _Modules | str:
    try:
        status = Path(interpreter).stat()
    except OSError as error:
        return error.strerror or str(error)
    variables = tuple(environment.get(name) for name in _PYTHON_VARIABLES)
    key = (interpreter, status.st_mtime_ns, status.st_size, options, variables)
    known = _answers.get(key)
    if known is not None and _still_holds(known, environment):
        return known
    modules = _probe([interpreter, *options, "-P", "-c", _PROBE_CODE], environment)
    if not isinstance(modules, str) and all(module is not None and module.usable for module in modules):
        _answers[key] = modules
    return modules


def _still_holds(known: _Modules, environment: Mapping[str, str]) -> bool:
    """Return whether the `known` modules still exist and would not be shadowed by other modules of the same names."""
    folders = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return all(
        module is not None
        and Path(module.origin).exists()
        and not any(_foreign_in(folder, name, module.origin) for folder in folders)
        for name, module in zip(_NAMES, known, strict=True)
    )


def _probe(command: list[str], environment: Mapping[str, str]) -> _Modules | str:
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_TIMEOUT_S:g} s"
    try:
        *ours, (origin, version) = json.loads(done.stdout.partition(_ANSWER.encode())[2].splitlines()[0])
        modules = [None if one is None else _Module(str(one[0]), one[1] is True) for one in ours]
        return (*modules, _Module(origin, not msgspec_problem(version), version))
    except (ValueError, IndexError, TypeError):
        complaints = done.stderr.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(complaints) if line.strip()), f"exit code {done.returncode}")


def _foreign_in(folder: str, name: str, origin: str) -> Path | None:
    """Return the module of this name that Python would import from the folder, unless it is ours or at `origin`."""
    for candidate in (Path(folder, name, "__init__.py"), Path(folder, f"{name}.py")):
        try:
            source = candidate.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # Python could not read it, either
            return candidate
        return None if MARK in source or candidate == Path(origin) else candidate
    return None


# The `config` of a kernelspec's `kernel_provisioner` stanza. jupyter_client ignores misspelt keys, so we check each key.

CONFIG_KEYS = ("pool", "fraction", "memory", "request", "devices", "priority", "simulate")
SIMULATED = re.compile(r"(\d{1,4}x)?\d{1,9}[KMGT]i?B(,(\d{1,4}x)?\d{1,9}[KMGT]i?B){0,63}", re.ASCII | re.IGNORECASE)
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_DEVICES = range(1, 9)
_PRIORITIES = range(-1000, 1001)
_SHOWN = 80  # characters of a bad value to show


def check_pool_name(name: object) -> str:
    if not isinstance(name, str) or not _POOL_NAME.fullmatch(name):
        allowed = "expected up to 63 letters, digits, dots, dashes and underscores, starting with a letter or digit"
        raise BadRequestError(f"pool {shown(name)} is not a valid pool name; {allowed}")
    return name


def parse_kernel_config(
    stanza: Mapping[str, object], *, default_pool: str, default_fraction: str
) -> tuple[LeaseRequest, str | None]:
    """Return the lease request from a kernelspec's `config`, and the simulated devices for any broker started for it.

    The devices are None if the broker should use real ones. Raises BadRequestError, naming the key, its value and what is allowed.
    """
    for key in stanza:
        if key not in CONFIG_KEYS:
            near = get_close_matches(str(key), CONFIG_KEYS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise BadRequestError(
                f"kernel_provisioner config has the unknown key {shown(key)}; {hint}expected one of: {', '.join(CONFIG_KEYS)}"
            )
    devices = _whole_number("devices", stanza.get("devices", 1), _DEVICES)
    try:
        whole = "1" if devices > 1 else default_fraction
        fraction_milli = parse_fraction_milli(_scalar(stanza.get("fraction", whole)))
        sizes = {
            key: parse_memory_mib(_size(stanza[key])) for key in ("memory", "request") if stanza.get(key) is not None
        }
    except ValueError as error:
        raise BadRequestError(f"kernel_provisioner config: {error}") from None
    if devices > 1 and fraction_milli != 1000:
        raise BadRequestError(
            f"kernel_provisioner config: fraction {shown(stanza['fraction'])} cannot be combined with {devices} devices, because several "
            "devices are always whole; leave fraction out, or use one device"
        )
    request = LeaseRequest(
        pool=check_pool_name(stanza.get("pool", default_pool)),
        fraction_milli=fraction_milli,
        memory_mib=sizes.get("memory"),
        priority=_whole_number("priority", stanza.get("priority", 0), _PRIORITIES, ", higher is served first"),
        request_mib=sizes.get("request"),
        devices=devices,
    )
    simulate = stanza.get("simulate")
    if simulate is None or (isinstance(simulate, str) and SIMULATED.fullmatch(simulate)):
        return request, simulate
    raise BadRequestError(
        f"kernel_provisioner config: simulate is {shown(simulate)}; expected COUNTxMEMORY such as 2x80GiB or 2x80GiB,1x40GiB"
    )


def _whole_number(key: str, value: object, allowed: range, more: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise BadRequestError(
            f"kernel_provisioner config: {key} is {shown(value)}; expected a whole number from {allowed.start} to "
            f"{allowed.stop - 1}{more}"
        )
    return value


def _scalar(value: object) -> str | float:
    """Return strings and numbers unchanged. Convert any other value to a string, so that it appears in the parser's error."""
    return value if isinstance(value, (str, int, float)) else repr(value)[:_SHOWN]


def _size(value: object) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        allowed = "expected a positive size such as 512MiB, 20GiB or 20GB"
        raise ValueError(f"memory {shown(value)} is not a valid size; {allowed}")  # noqa: TRY004 - the parser's own error
    return value


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
