"""The boundary to devices: the operations that the broker needs from any kind of GPU.

It has two halves: a `Monitor` (quick reads, used by the broker) and a `Checkpointer` (controls other processes' CUDA state, used only by
the checkpoint worker). The NVIDIA and the simulated implementation behave alike, including their error codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class GPUErrorCode(StrEnum):
    """Driver errors that callers handle, with CUDA's numbers."""

    OUT_OF_MEMORY = "out-of-memory"  # 2
    NOT_INITIALIZED = "not-initialized"  # 3: not a CUDA process
    OPERATING_SYSTEM = "operating-system"  # 304
    ILLEGAL_STATE = "illegal-state"  # 401
    NOT_READY = "not-ready"  # 600: lock timed out, process still running
    NOT_PERMITTED = "not-permitted"  # 800
    NOT_SUPPORTED = "not-supported"  # 801
    SYSTEM_NOT_READY = "system-not-ready"  # 802: a driver service is still starting (an HGX host's fabric manager)
    NO_SUCH_PROCESS = "no-such-process"
    WRONG_IDENTITY = "wrong-identity"  # the pid is alive but is another process
    NO_SUCH_DEVICE = "no-such-device"
    DEVICE_LOST = "device-lost"
    TARGET_STOPPED = "target-stopped"  # the process is stopped (SIGSTOP) or held by a debugger, and cannot answer
    WORKER_HUNG = "worker-hung"  # the worker did not answer in time and was replaced
    WORKER_DIED = "worker-died"
    WORKER_BUSY = "worker-busy"  # an earlier broker's worker is still running; nothing was done
    UNKNOWN = "unknown"


class GPUError(Exception):
    """A device operation failed. `code` is for programs, the message for people."""

    def __init__(self, code: GPUErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class ProcessState(StrEnum):
    """A process's checkpoint state: CUDA's states, and some of our own."""

    NO_CONTEXT = "no-context"  # not a CUDA process (or none yet)
    RUNNING = "running"  # 0
    LOCKED = "locked"  # 1
    CHECKPOINTED = "checkpointed"  # 2
    FAILED = "failed"  # 3
    CHECKPOINTING = "checkpointing"  # 4, newer drivers
    RESTORING = "restoring"  # 5, newer drivers
    GONE = "gone"  # no such process
    UNKNOWN = "unknown"  # a state this version does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device. Memory in MiB."""

    device_id: str  # UUID
    index: int
    name: str
    memory_mib: int
    simulated: bool
    checkpointable: bool
    why_not: str = ""  # a sentence; empty if checkpointable
    saves_children: bool = False  # a process with forked children can be saved, if it started in a checkpoint job
    why_no_move: str = ""  # why saved state cannot move to another device, a sentence; empty: it can


class ProcessKind(StrEnum):
    """The kind of work that a process does on a device."""

    COMPUTE = "compute"
    MPS = "mps"  # computes through the MPS server
    GRAPHICS = "graphics"  # graphics only


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """Device memory charged to one process, context included, MiB."""

    pid: int
    used_mib: int
    kind: ProcessKind = ProcessKind.COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """A device's current use, in MiB; `memory_mib` is the total available to processes."""

    device_id: str
    memory_mib: int
    used_mib: int
    processes: tuple[ProcessUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """The processes that worked on a device. Times are microseconds since boot, which setting the wall clock does not change."""

    known_until_us: int  # reports work up to then
    settle_us: int  # work may be reported as running for this long after its end
    worked_us: Mapping[int, int]  # by pid: when it last worked


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUtilisation:
    """The mean use of a device, in thousandths. Times in microseconds since boot."""

    since_us: int  # the period that is known; the next one begins at its end
    until_us: int
    settle_us: int  # figures may include this much time before the period
    by_pid: Mapping[int, int] | None = None  # missing processes used nothing; None: not known by process
    device_milli: int | None = None  # of all processes, maybe only in the last moments; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSensors:
    """Other readings of a device, None if it does not report them. Power and energy are the whole device's."""

    busy_percent: int | None = None  # in the last second or less
    temperature_c: int | None = None
    power_mw: int | None = None  # now, or in the last second
    energy_mj: int | None = None  # used since the driver loaded (simulated: the monitor opened)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A control group's limit on a device and its current use, contexts included, in MiB."""

    hard_mib: int
    used_mib: int


class Monitor(Protocol):
    """Reads devices. Methods block for at most milliseconds on healthy hardware; the broker calls them off its loop."""

    @property
    def kind(self) -> str:
        """`simulated`, `nvidia`, or another package's kind. Every screen says if devices are `simulated`."""

    def devices(self) -> list[DeviceInfo]:
        """Return the devices, if any. Raises GPUError."""

    def use(self, device_id: str) -> DeviceUse:
        """Return which processes use the device. Raises GPUError (NO_SUCH_DEVICE, DEVICE_LOST)."""

    def activity(self, device_id: str, since_us: int) -> DeviceActivity | None:
        """Return which processes worked on the device since `since_us`, or None if unreported. Raises GPUError."""

    def utilisation(self, device_id: str, since_us: int) -> DeviceUtilisation | None:
        """Return how much of the device each process used since `since_us`, or None if unreported. Raises GPUError.

        For consecutive periods, pass the previous answer's `until_us`.
        """

    def sensors(self, device_id: str) -> DeviceSensors:
        """Return the utilisation, temperature, power and energy that the device reports. Raises GPUError."""

    def kernel_environment(self, device_id: str | None) -> dict[str, str]:
        """Return the variables that a kernel needs to see this device (None: it may get one later)."""

    def close(self) -> None:
        """Release everything."""


class MemoryLimits(Protocol):
    """Memory limits of control groups, enforced by the driver. `group`: its path from the hierarchy's root, on the host."""

    def set(self, device_id: str, group: str, mib: int | None) -> None:
        """Set the group's limit on the device; None removes it. Raises GPUError."""

    def read(self, device_id: str, group: str) -> MemoryLimit | None:
        """Return the group's limit on the device, or None if it has none. Raises GPUError."""


class Checkpointer(Protocol):
    """Controls other processes' CUDA state. Every call blocks; only the checkpoint worker makes them, one at a time."""

    def state(self, pid: int) -> ProcessState:
        """Return the driver's state of the process. Raises GPUError."""

    def lock(self, pid: int, timeout_ms: int) -> None:
        """RUNNING -> LOCKED. Raises GPUError NOT_READY if work did not drain in time (still RUNNING)."""

    def checkpoint(self, pid: int) -> None:
        """LOCKED -> CHECKPOINTED: device memory moves to host memory. Raises GPUError; then the process may be broken."""

    def restore(self, pid: int, moves: Mapping[str, str] | None = None) -> None:
        """CHECKPOINTED -> LOCKED; `moves` maps old to new device ids. Out of memory here is fatal to the process."""

    def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING. Raises GPUError."""
