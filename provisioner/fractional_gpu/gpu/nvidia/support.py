"""Lists the supported releases of NVIDIA's driver and bindings, and explains why others are refused.

Driver 570 (CUDA 12.8) introduced the checkpoint calls, and driver 580 (CUDA 13.0) can move saved state to another device. We refuse
releases reported to lose a kernel's state, and only warn about releases reported to hang. We also refuse machines other than x86-64,
because few drivers can checkpoint there.
"""

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Final

INSTALL_BINDINGS: Final = "pip install 'jupyter-fractional-gpu[cuda]'"
MOVING_CUDA_VERSION: Final = 13000  # in the format of cuDriverGetVersion: 1000 * major + 10 * minor

_WSL_DEVICE: Final = Path("/dev/dxg")  # instead of /dev/nvidia*
_MACHINES: Final = frozenset({"x86_64", "AMD64"})
_FIRST_DRIVER: Final = 570
_FIRST_BINDINGS: Final = (12, 8)
_FIRST_MOVING_DRIVER: Final = 580
_FIRST_JOBS: Final = (580, 159)  # reported to work from 590.44 on, and seen with 580.159.04
_FIRST_MOVING_BINDINGS: Final = 13
_NO_MOVE: Final = frozenset({"13.3.0"})  # bindings without arguments for a restore
_NO_RESTORE: Final = frozenset({"13.0.0", "13.0.1"})  # bindings that can checkpoint but not restore

# An entry matches its own version and the patches of that version: "610.57" matches "610.57" and "610.57.02".
_REFUSED: Final = {
    "610.57": "locking a process is reported to crash it",
}
_WARNED: Final = {
    "595.71": "killing a process that was restored from a checkpoint on disk is reported to hang the host",
}

_COMPUTE_MODES: Final = {
    1: "allows only one thread to use it",
    2: "allows no process to compute on it",
    3: "allows only one process at a time",
}


def sharing_refusal(index: int, compute_mode: object) -> str:
    what = _COMPUTE_MODES.get(compute_mode) if isinstance(compute_mode, int) else None
    return "" if what is None else f"device {index} {what}: it cannot be shared"


def sharing_advice(index: int) -> str:
    return f"as root: nvidia-smi -i {index} -c DEFAULT"


def driver_refusal(version: str, *, machine: str | None = None) -> str:
    """Return why this driver can't be used for checkpoints on this machine type (`platform.machine()`), or "" if it can."""
    machine = platform.machine() if machine is None else machine
    if machine not in _MACHINES:
        return f"NVIDIA's driver does not support checkpoints on most {machine} machines: use an x86-64 one"
    if _WSL_DEVICE.exists():
        return "under WSL2, the driver can neither checkpoint nor list processes: kernels share the device but are not suspended"
    major = re.match(r"\d+", version)
    if major is None:
        return f"the NVIDIA driver reports an unrecognised version, {version!r}"
    if int(major[0]) < _FIRST_DRIVER:
        return f"the NVIDIA driver {version} cannot checkpoint: install {_FIRST_DRIVER} or newer"
    reason = _matching(version, _REFUSED)
    return f"with the NVIDIA driver {version} {reason}: install another release" if reason else ""


def driver_warnings(version: str) -> tuple[str, ...]:
    reason = _matching(version, _WARNED)
    return (f"with the NVIDIA driver {version} {reason}",) if reason else ()


def saves_children(version: str) -> bool:
    """Return whether this driver release can checkpoint a process with forked children, provided the process is in a checkpoint job."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _FIRST_JOBS


def moving_refusal(version: str) -> str:
    """Return why this driver release or the bindings cannot restore to another device, or "" if they can."""
    major = re.match(r"\d+", version)
    if major is None or int(major[0]) < _FIRST_MOVING_DRIVER:
        return f"the NVIDIA driver {version} can only restore kernels on their old device: install {_FIRST_MOVING_DRIVER} or newer"
    try:
        bindings = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return ""  # without bindings nothing is suspended, and `why_no_bindings` explains why
    numbers = re.match(r"\d+", bindings)
    if numbers is None or int(numbers[0]) < _FIRST_MOVING_BINDINGS or bindings in _NO_MOVE:
        return f"cuda-bindings {bindings} can only restore kernels on their old device: {INSTALL_BINDINGS} --upgrade"
    return ""


def why_no_bindings() -> str:
    """Return why the CUDA bindings cannot be used and what to do about it, or "" if they can be. Does not import the bindings."""
    try:
        version = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return f"the Python package cuda-bindings is not installed: {INSTALL_BINDINGS}"
    return bindings_refusal(version)


def bindings_refusal(version: str) -> str:
    """Return why this release of cuda-bindings cannot be used and what to do about it, or "" if it can be."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _FIRST_BINDINGS:
        first = ".".join(map(str, _FIRST_BINDINGS))
        return (
            f"cuda-bindings {version} has no checkpoint calls; {first} or newer is needed: {INSTALL_BINDINGS} --upgrade"
        )
    if version in _NO_RESTORE:
        return f"cuda-bindings {version} can checkpoint but not restore: {INSTALL_BINDINGS} --upgrade"
    return ""


def _matching(version: str, table: dict[str, str]) -> str:
    return next((why for release, why in table.items() if f"{version}.".startswith(f"{release}.")), "")
