"""Controls other processes' CUDA state through the driver's checkpoint calls.

- Use this only in a separate process, because calls can hang. Clean that process's environment first (`driver_environment`): a move must
  name every device, but environment variables can hide some of them.
- We query the driver only about processes that map its library. For any other process, the answer depends on the driver release.
- Thread ids are rejected, and processes that have ended are reported as NO_SUCH_PROCESS. Only the caller, which holds a pidfd, can be sure
  that a pid still belongs to the intended process.
- Locks always have a time limit. Without one, the driver would wait forever.
"""

import importlib
import os
import select
import uuid
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final

from fractional_gpu.gpu import driver_environment
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.nvidia.jobs import job_of
from fractional_gpu.gpu.nvidia.support import INSTALL_BINDINGS, MOVING_CUDA_VERSION
from fractional_gpu.host.process import identify, maps

_SUCCESS: Final = 0
_NO_CUDA: Final = frozenset({1, 3})  # INVALID_VALUE or NOT_INITIALIZED, depending on the driver's release
_ENDING_MS: Final = 100
_MAX_TIMEOUT_MS: Final = 2**32 - 1

_CALLS: Final = (
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)

_CODES: Final[Mapping[int, GPUErrorCode]] = {
    2: GPUErrorCode.OUT_OF_MEMORY,
    3: GPUErrorCode.NOT_INITIALIZED,
    100: GPUErrorCode.NO_SUCH_DEVICE,
    101: GPUErrorCode.NO_SUCH_DEVICE,
    214: GPUErrorCode.DEVICE_LOST,  # an uncorrectable memory error
    304: GPUErrorCode.OPERATING_SYSTEM,
    401: GPUErrorCode.ILLEGAL_STATE,
    600: GPUErrorCode.NOT_READY,
    800: GPUErrorCode.NOT_PERMITTED,
    801: GPUErrorCode.NOT_SUPPORTED,
    802: GPUErrorCode.SYSTEM_NOT_READY,
    803: GPUErrorCode.NOT_SUPPORTED,  # the driver's library and kernel module do not match
    804: GPUErrorCode.NOT_SUPPORTED,  # forward compatibility is not available on this device
}

_STATES: Final[Mapping[int, ProcessState]] = {
    0: ProcessState.RUNNING,
    1: ProcessState.LOCKED,
    2: ProcessState.CHECKPOINTED,
    3: ProcessState.FAILED,
    4: ProcessState.CHECKPOINTING,
    5: ProcessState.RESTORING,
}

_UNSOUND: Final = "the process may be damaged"
_HINTS: Final[Mapping[tuple[str, GPUErrorCode], str]] = {
    ("lock", GPUErrorCode.NOT_READY): "its GPU work did not finish in time; it keeps running",
    ("checkpoint", GPUErrorCode.OUT_OF_MEMORY): (
        f"there is not enough host memory for its state, or it uses a MIG device; {_UNSOUND}"
    ),
    ("checkpoint", GPUErrorCode.NOT_SUPPORTED): (
        f"it uses something that the driver cannot save (managed memory, memory shared with other processes, MPS or MIG); {_UNSOUND}"
    ),
    ("restore", GPUErrorCode.OUT_OF_MEMORY): ("its state did not fit on the device, and the driver cannot retry"),
    ("restore", GPUErrorCode.OPERATING_SYSTEM): (
        "its state cannot be restored, for example because an earlier restore failed"
    ),
}
_GENERAL_HINTS: Final[Mapping[GPUErrorCode, str]] = {
    GPUErrorCode.NOT_INITIALIZED: "it is not a CUDA process",
    GPUErrorCode.ILLEGAL_STATE: "it is in the wrong state for this operation",
    GPUErrorCode.NOT_PERMITTED: (
        "only its own user, root, or a user who may trace it can do this; or persistence mode is off (as root: `nvidia-smi -pm 1`)"
    ),
    GPUErrorCode.NOT_SUPPORTED: "the driver cannot do this for this process, device or driver release",
    GPUErrorCode.OPERATING_SYSTEM: "the operating system refused a request from the driver",
}
_FABRIC_MANAGER: Final = "on an HGX host, it needs the fabric manager: `systemctl status nvidia-fabricmanager`"


class NvidiaCheckpointer:
    """The `Checkpointer` for NVIDIA devices. Not thread-safe: a host may run only one operation at a time.

    The constructor raises GPUError: NOT_SUPPORTED if the bindings are missing or the driver is too old, and NO_SUCH_DEVICE if there is no
    device. `driver` and `has_driver` are for tests.
    """

    def __init__(self, *, driver: ModuleType | None = None, has_driver: Callable[[int], bool] | None = None) -> None:
        self._has_driver = _maps_driver if has_driver is None else has_driver
        driver_environment.clean(os.environ)
        self._driver = _load() if driver is None else driver
        missing = next((call for call in _CALLS if not hasattr(self._driver, call)), "")
        if missing:  # if only restore were missing, saved state would be lost
            raise GPUError(
                GPUErrorCode.NOT_SUPPORTED,
                f"the installed version of cuda-bindings does not provide {missing}; install 12.8 or newer, except 13.0.0 and 13.0.1: "
                f"{INSTALL_BINDINGS} --upgrade",
            )
        result, _ = self._ask("cuInit", 0)
        if result != _SUCCESS:
            code = _CODES.get(result, GPUErrorCode.UNKNOWN)
            hint = _FABRIC_MANAGER if code is GPUErrorCode.SYSTEM_NOT_READY else "`nvidia-smi` may show why"
            raise GPUError(code, f"the CUDA driver could not be initialised: {self._name(result)}; {hint}")

    @property
    def why_cannot_move(self) -> str:
        needed = ("CUcheckpointGpuPair", "CUcheckpointRestoreArgs")
        if missing := [name for name in needed if not hasattr(self._driver, name)]:
            return f"the installed version of cuda-bindings has no {missing[0]} (new in 13.0, not in 13.3.0): {INSTALL_BINDINGS} --upgrade"
        result, version = self._ask("cuDriverGetVersion")
        if result != _SUCCESS or not isinstance(version, int):
            return f"the CUDA driver does not report its version: {self._name(result)}"
        if version < MOVING_CUDA_VERSION:
            return f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, but 13.0 is needed; install driver 580 or newer"
        return ""

    def state(self, pid: int) -> ProcessState:
        try:
            _check(pid)
        except GPUError as error:
            if error.code is GPUErrorCode.NO_SUCH_PROCESS:
                return ProcessState.GONE
            raise
        if not self._has_driver(pid):
            return ProcessState.NO_CONTEXT
        try:
            result, state = self._ask("cuCheckpointProcessGetState", pid)
        except _UnknownAnswerError:
            # After a failed call, version 12.8.0 of the bindings tries to convert uninitialised memory to an enumeration member.
            return ProcessState.NO_CONTEXT if self._is_unknown_to_cuda(pid) else ProcessState.UNKNOWN
        if result == _SUCCESS:
            return _STATES.get(state, ProcessState.UNKNOWN) if isinstance(state, int) else ProcessState.UNKNOWN
        unknown = result in _NO_CUDA or self._is_unknown_to_cuda(pid)
        failure = self._error("read", pid, result)
        if failure.code is GPUErrorCode.NO_SUCH_PROCESS:
            return ProcessState.GONE
        if unknown:
            return ProcessState.NO_CONTEXT
        raise failure

    def lock(self, pid: int, timeout_ms: int) -> None:
        if not 1 <= timeout_ms <= _MAX_TIMEOUT_MS:
            raise ValueError(f"a lock needs a time limit from 1 to {_MAX_TIMEOUT_MS} ms, got {timeout_ms}")
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._do("lock", "cuCheckpointProcessLock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        self._do("checkpoint", "cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, moves: Mapping[str, str] | None = None) -> None:
        """Change the state from CHECKPOINTED to LOCKED. `moves` maps old device ids to new ones.

        Raises GPUError. OUT_OF_MEMORY is fatal to the process. After NO_SUCH_DEVICE or NOT_SUPPORTED, the process is still CHECKPOINTED.
        Raises ValueError if `moves` maps two devices to the same one.
        """
        moving = {_plain(old): _plain(new) for old, new in (moves or {}).items() if _plain(old) != _plain(new)}
        self._do("restore", "cuCheckpointProcessRestore", pid, self._pairs(moving) if moving else None)

    def unlock(self, pid: int) -> None:
        self._do("unlock", "cuCheckpointProcessUnlock", pid, None)

    def _pairs(self, moving: Mapping[str, str]) -> object:
        if len(set(moving.values())) < len(moving):
            raise ValueError(f"a restore cannot move two devices to the same one, got {dict(moving)}")
        reason = self.why_cannot_move
        if reason:
            raise GPUError(GPUErrorCode.NOT_SUPPORTED, f"cannot move a process to another device: {reason}")
        # The driver requires a pair for every device that it sees, so devices that do not move map to themselves.
        seen = self._devices()
        for device in (*moving, *moving.values()):
            if device not in seen:
                there = ", ".join(sorted(seen)) or "none"
                raise GPUError(
                    GPUErrorCode.NO_SUCH_DEVICE, f"cannot move: there is no device {device}; known devices: {there}"
                )
        pairs = []
        for old, new in _permutation(moving, seen).items():
            pair = self._driver.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = seen[old], seen[new]
            pairs.append(pair)
        arguments = self._driver.CUcheckpointRestoreArgs()
        arguments.gpuPairs = pairs
        arguments.gpuPairsCount = len(pairs)
        return arguments

    def _devices(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for index in range(self._must("cuDeviceGetCount")):
            raw = self._must("cuDeviceGetUuid", self._must("cuDeviceGet", index))
            found[f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"] = raw
        return found

    def _must(self, call: str, *arguments: object) -> Any:  # noqa: ANN401 - any result of this call
        result, value = self._ask(call, *arguments)
        if result != _SUCCESS:
            code = _CODES.get(result, GPUErrorCode.UNKNOWN)
            raise GPUError(code, f"the CUDA driver does not list its devices: {call} returned {self._name(result)}")
        return value

    def _do(self, phase: str, call: str, pid: int, arguments: object) -> None:
        _check(pid)
        try:
            with job_of(pid):
                result, _ = self._ask(call, pid, arguments)
        except _UnknownAnswerError as error:
            raise GPUError(GPUErrorCode.UNKNOWN, f"cannot {phase} the CUDA state of process {pid}: {error}") from error
        if result != _SUCCESS:
            raise self._error(phase, pid, result)

    def _ask(self, call: str, *arguments: object) -> tuple[int, Any]:
        try:
            answer = getattr(self._driver, call)(*arguments)
        except (ValueError, KeyError) as error:
            # The bindings convert numbers to enumeration members, and raise ValueError for a number that only a newer driver has.
            # Versions 12.9 to 13.1 look up results in a dictionary, and raise KeyError.
            raise _UnknownAnswerError(f"{call} returned a value unknown to this version ({error})") from error
        except RuntimeError as error:
            raise GPUError(
                GPUErrorCode.NOT_SUPPORTED,
                f"cannot call {call}, because NVIDIA's driver is missing or older than 570: {error}",
            ) from error
        return int(answer[0]), answer[1] if len(answer) > 1 else None

    def _is_unknown_to_cuda(self, pid: int) -> bool:
        try:
            result, _ = self._ask("cuCheckpointProcessGetRestoreThreadId", pid)
        except _UnknownAnswerError:
            return False
        return result in _NO_CUDA

    def _error(self, phase: str, pid: int, result: int) -> GPUError:
        code = _CODES.get(result, GPUErrorCode.UNKNOWN)
        message = f"cannot {phase} the CUDA state of process {pid}: {self._name(result)}"
        if code is GPUErrorCode.OPERATING_SYSTEM:
            _await_end(pid)  # the driver may forget a killed process before it has exited
        try:
            _check(pid)
        except GPUError as error:
            # If the process has ended, that explains the failure better than the driver's result.
            return GPUError(error.code, f"{message}; {error}")
        hint = _HINTS.get((phase, code)) or _GENERAL_HINTS.get(code)
        return GPUError(code, f"{message}: {hint}" if hint else message)

    def _name(self, result: int) -> str:
        try:
            return f"{self._driver.CUresult(result).name} ({result})"
        except ValueError:
            return f"CUDA error {result}"


class _UnknownAnswerError(Exception):
    pass


def _load() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise GPUError(
            GPUErrorCode.NOT_SUPPORTED,
            f"suspending kernels on NVIDIA devices needs the package cuda-bindings ({error}): {INSTALL_BINDINGS}",
        ) from error


def _check(pid: int) -> None:
    try:
        identify(pid)
    except ProcessLookupError as error:
        raise GPUError(GPUErrorCode.NO_SUCH_PROCESS, str(error)) from error
    except ValueError as error:
        raise GPUError(GPUErrorCode.WRONG_IDENTITY, str(error)) from error


def _maps_driver(pid: int) -> bool:
    """Return whether a process maps the driver's library, as any process with CUDA state must. Return True if its maps are unreadable."""
    return maps(pid, lambda path: path.rpartition("/")[2].startswith("libcuda.so"), unreadable=True)


def _await_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # the process has ended, or no descriptor is free, so check without waiting
        return
    try:
        watched = select.poll()
        watched.register(descriptor, select.POLLIN)
        watched.poll(_ENDING_MS)
    finally:
        os.close(descriptor)


def _plain(device_id: str) -> str:
    kind, _, number = device_id.partition("-")
    return f"{kind.upper()}-{number.lower()}"


def _permutation(moving: Mapping[str, str], devices: Iterable[str]) -> dict[str, str]:
    """Extend `moving` to a permutation of all devices. Targets that are not moved themselves are mapped to vacated devices."""
    still = [device for device in devices if device not in moving]
    taken = set(moving.values())
    displaced = [device for device in still if device in taken]
    vacated = sorted(device for device in moving if device not in taken)
    return {
        **moving,
        **{device: device for device in still if device not in taken},
        **dict(zip(sorted(displaced), vacated, strict=True)),
    }
