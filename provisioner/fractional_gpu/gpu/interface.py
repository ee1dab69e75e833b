"""Defines the operations the broker needs from any kind of GPU.

The interface has two halves. The broker reads devices through a `Monitor`. Only the checkpoint worker uses a `Checkpointer`, which controls
other processes' CUDA state. The NVIDIA and simulated implementations behave the same and use the same error codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class GPUErrorCode(StrEnum):
    """Device errors that callers handle. The numbers in the comments are CUDA error codes."""

    OUT_OF_MEMORY = "out-of-memory"  # 2
    NOT_INITIALIZED = "not-initialized"  # 3: not a CUDA process
    OPERATING_SYSTEM = "operating-system"  # 304
    ILLEGAL_STATE = "illegal-state"  # 401
    NOT_READY = "not-ready"  # 600: the lock timed out and the process is still running
    NOT_PERMITTED = "not-permitted"  # 800
    NOT_SUPPORTED = "not-supported"  # 801
    SYSTEM_NOT_READY = "system-not-ready"  # 802: a driver service, such as the fabric manager, is still starting
    NO_SUCH_PROCESS = "no-such-process"
    WRONG_IDENTITY = "wrong-identity"  # another process now has this pid
    NO_SUCH_DEVICE = "no-such-device"
    DEVICE_LOST = "device-lost"
    TARGET_STOPPED = "target-stopped"  # the process is stopped (SIGSTOP) or held by a debugger, and cannot answer
    WORKER_HUNG = "worker-hung"  # the worker did not answer in time and was replaced
    WORKER_DIED = "worker-died"
    WORKER_BUSY = "worker-busy"  # an earlier broker's worker is still running; nothing was done
    UNKNOWN = "unknown"


class GPUError(Exception):
    """A device operation failed. Programs should use `code`; the message is for people."""

    def __init__(self, code: GPUErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class ProcessState(StrEnum):
    """A process's checkpoint state, which is either one of CUDA's or one we added."""

    NO_CONTEXT = "no-context"  # not a CUDA process, or not yet
    RUNNING = "running"  # 0
    LOCKED = "locked"  # 1
    CHECKPOINTED = "checkpointed"  # 2
    FAILED = "failed"  # 3
    CHECKPOINTING = "checkpointing"  # 4, with newer drivers
    RESTORING = "restoring"  # 5, with newer drivers
    GONE = "gone"  # there is no such process
    UNKNOWN = "unknown"  # a state that this version does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A device: a GPU or a MIG instance."""

    device_id: str  # UUID
    index: int
    name: str
    memory_mib: int
    simulated: bool
    checkpointable: bool
    why_not: str = ""  # a sentence that explains why the device is not checkpointable, or ""
    saves_children: bool = False  # a process that started in a checkpoint job can be saved with its forked children
    why_no_move: str = ""  # a sentence that explains why saved state cannot move to another device, or ""


class ProcessKind(StrEnum):
    """The kind of work a process does on a device."""

    COMPUTE = "compute"
    MPS = "mps"  # computes through the MPS server
    GRAPHICS = "graphics"  # graphics only


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """How much device memory one process uses, in MiB, including its CUDA context."""

    pid: int
    used_mib: int
    kind: ProcessKind = ProcessKind.COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """A device's current memory usage, in MiB. `memory_mib` is the total that processes can use."""

    device_id: str
    memory_mib: int
    used_mib: int
    processes: tuple[ProcessUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """When each process last used a device. Times are in microseconds since boot, so changes to the wall clock don't affect them."""

    known_until_us: int  # the end of the period that the device has reported
    settle_us: int  # a device may report work as running for this long after the work has ended
    worked_us: Mapping[int, int]  # when each process last worked, by pid; only the last 10 s are complete


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUtilisation:
    """A device's mean utilisation, in thousandths. Times are in microseconds since boot."""

    since_us: int  # the reported period; the next one begins at `until_us`
    until_us: int
    settle_us: int  # figures may include this much time before the period
    by_pid: Mapping[int, int] | None = None  # None if unknown; processes that are not listed did not use the device
    device_milli: int | None = None  # the use by all processes, perhaps only in the last moments; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSensors:
    """A device's sensor readings. A reading is None if the device does not report it. Power and energy are for the whole device."""

    busy_percent: int | None = None  # in the last second or less
    temperature_c: int | None = None
    power_mw: int | None = None  # the current value, or the mean of the last second
    energy_mj: int | None = None  # since the driver was loaded; for a simulated device, since the monitor was opened


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A control group's memory limit and current usage on a device, in MiB. Usage includes CUDA contexts."""

    hard_mib: int
    used_mib: int


class Monitor(Protocol):
    """Read access to devices. On healthy hardware, methods block for milliseconds at most. The broker calls them outside its event loop."""

    @property
    def kind(self) -> str:
        """The kind of device: `simulated`, `nvidia`, or one added by another package. Reports mark `simulated` devices as such."""

    def devices(self) -> list[DeviceInfo]:
        """Return all devices; the list can be empty. Raises GPUError."""

    def use(self, device_id: str) -> DeviceUse:
        """Return how much memory is in use, and by which processes. Raises GPUError (NO_SUCH_DEVICE or DEVICE_LOST)."""

    def activity(self, device_id: str, since_us: int) -> DeviceActivity | None:
        """Return which processes have used the device since `since_us`, or None if the device does not report this. Raises GPUError."""

    def utilisation(self, device_id: str, since_us: int) -> DeviceUtilisation | None:
        """Return how much of the device each process used since `since_us`, or None if the device does not report this. Raises GPUError.

        To read consecutive periods, pass the previous result's `until_us`.
        """

    def sensors(self, device_id: str) -> DeviceSensors:
        """Return the utilisation, temperature, power and energy reported by the device. Raises GPUError."""

    def kernel_environment(self, device_id: str | None) -> dict[str, str]:
        """Return the environment variables that let a kernel see this device. Pass None for a kernel that will get its device later."""

    def close(self) -> None:
        """Close the connection to the devices."""


class MemoryLimits(Protocol):
    """Driver-enforced memory limits on control groups. `group` is the group's path on the host, from the root of the hierarchy."""

    def set(self, device_id: str, group: str, mib: int | None) -> None:
        """Set the group's limit on the device, or remove it if `mib` is None. Raises GPUError."""

    def read(self, device_id: str, group: str) -> MemoryLimit | None:
        """Return the group's limit on the device, or None if it has none. Raises GPUError."""


class Checkpointer(Protocol):
    """Controls other processes' CUDA state. Every call blocks. Only the checkpoint worker makes these calls, one at a time."""

    def state(self, pid: int) -> ProcessState:
        """Return the process's checkpoint state as reported by the driver. Raises GPUError."""

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Change the state from RUNNING to LOCKED.

        Raises GPUError. If the process does not finish its work in time, the code is NOT_READY and the process stays RUNNING.
        """

    def checkpoint(self, pid: int) -> None:
        """Change the state from LOCKED to CHECKPOINTED and move device memory to host memory.

        Raises GPUError. After an error, the process might be broken.
        """

    def restore(self, pid: int, moves: Mapping[str, str] | None = None) -> None:
        """Change the state from CHECKPOINTED to LOCKED. `moves` maps old device ids to new ones.

        Raises GPUError. If the device has too little memory, the process is lost.
        """

    def unlock(self, pid: int) -> None:
        """Change the state from LOCKED to RUNNING. Raises GPUError."""
