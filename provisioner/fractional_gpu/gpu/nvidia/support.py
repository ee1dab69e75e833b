"""Which releases of NVIDIA's driver and bindings this project can work with, as tables and sentences.

- The checkpoint calls came with driver 570 (CUDA 12.8); moving to another device came with driver 580 (CUDA 13.0).
- Some driver releases are reported to lose state or to hang. Releases that may lose a kernel are refused; others
  only get a warning.
- A device's compute mode (`nvidia-smi -c`) may keep it to one process.
- The driver checkpoints on x86-64 and on few other machines: all others than x86-64 are refused.
"""

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Final

INSTALL_BINDINGS: Final = "pip install 'jupyter-fractional-gpu[cuda]'"
MOVING_CUDA_VERSION: Final = 13000  # as cuDriverGetVersion returns it: 1000 * major + 10 * minor

_WSL_DEVICE: Final = Path("/dev/dxg")  # in place of /dev/nvidia*
_MACHINES: Final = frozenset({"x86_64", "AMD64"})
_FIRST_DRIVER: Final = 570
_FIRST_BINDINGS: Final = (12, 8)
_FIRST_MOVING_DRIVER: Final = 580
_FIRST_MOVING_BINDINGS: Final = 13
_NO_MOVE: Final = frozenset({"13.3.0"})  # a release that lacks the arguments of a restore
_NO_RESTORE: Final = frozenset({"13.0.0", "13.0.1"})  # releases of the bindings that checkpoint and cannot restore

# A release matches a version that is equal to it or goes on with a dot: "610.57" matches "610.57" and "610.57.02".
_REFUSED: Final = {
    "610.57": "locking a process is reported to crash it",
}
_WARNED: Final = {
    "595.71": "killing a process that was restored from a checkpoint on disk is reported to hang the host",
}

_COMPUTE_MODES: Final = {
    1: "lets one thread use it only",
    2: "lets no process compute on it",
    3: "lets one process use it at a time",
}


def sharing_refusal(index: int, compute_mode: object) -> str:
    """Return why the device in this mode (`nvmlDeviceGetComputeMode`) cannot be shared, a sentence, or ""."""
    what = _COMPUTE_MODES.get(compute_mode) if isinstance(compute_mode, int) else None
    return "" if what is None else f"device {index} {what}: it cannot be shared"


def sharing_advice(index: int) -> str:
    """Return what an administrator does about a device that cannot be shared."""
    return f"as root: nvidia-smi -i {index} -c DEFAULT"


def driver_refusal(version: str, *, machine: str | None = None) -> str:
    """Return why this driver cannot be trusted with checkpoints on this kind of machine (`platform.machine()`), a sentence, or ""."""
    machine = platform.machine() if machine is None else machine
    if machine not in _MACHINES:
        return f"NVIDIA's driver does not checkpoint on most machines of the kind {machine}: use an x86-64 one"
    if _WSL_DEVICE.exists():
        return "under WSL2 the driver neither checkpoints nor lists processes: kernels share the device and stay on it"
    major = re.match(r"\d+", version)
    if major is None:
        return f"the NVIDIA driver tells the version {version!r}, which cannot be understood"
    if int(major[0]) < _FIRST_DRIVER:
        return f"the NVIDIA driver {version} cannot checkpoint: install {_FIRST_DRIVER} or newer"
    reason = _matching(version, _REFUSED)
    return f"with the NVIDIA driver {version} {reason}: install another release" if reason else ""


def driver_warnings(version: str) -> tuple[str, ...]:
    """Return sentences for an administrator about this driver."""
    reason = _matching(version, _WARNED)
    return (f"with the NVIDIA driver {version} {reason}",) if reason else ()


def moving_refusal(version: str) -> str:
    """Return why this driver, or the installed bindings, cannot restore a process onto another device, a sentence, or "".

    Releases of both are asked only; `NvidiaCheckpointer.why_cannot_move` asks the driver itself before each move.
    """
    major = re.match(r"\d+", version)
    if major is None or int(major[0]) < _FIRST_MOVING_DRIVER:
        return f"the NVIDIA driver {version} restores kernels on their own device only: install {_FIRST_MOVING_DRIVER} or newer"
    try:
        bindings = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return ""  # then nothing is suspended, for which `why_no_bindings` has the sentence
    numbers = re.match(r"\d+", bindings)
    if numbers is None or int(numbers[0]) < _FIRST_MOVING_BINDINGS or bindings in _NO_MOVE:
        return f"cuda-bindings {bindings} restores kernels on their own device only: {INSTALL_BINDINGS} --upgrade"
    return ""


def why_no_bindings() -> str:
    """Return why the CUDA bindings cannot be used, a sentence with what to do; empty if they can. Does not import them."""
    try:
        version = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return f"the Python package cuda-bindings is not installed: {INSTALL_BINDINGS}"
    return bindings_refusal(version)


def bindings_refusal(version: str) -> str:
    """Return why this release of cuda-bindings cannot be used, a sentence that says what to do, or ""."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _FIRST_BINDINGS:
        first = ".".join(map(str, _FIRST_BINDINGS))
        return f"cuda-bindings {version} has no checkpoint calls, {first} is needed: {INSTALL_BINDINGS} --upgrade"
    if version in _NO_RESTORE:
        return f"cuda-bindings {version} can checkpoint and not restore: {INSTALL_BINDINGS} --upgrade"
    return ""


def _matching(version: str, table: dict[str, str]) -> str:
    return next((why for release, why in table.items() if f"{version}.".startswith(f"{release}.")), "")
