"""The boundary to devices: the operations that the broker needs of a GPU of any kind.

Two halves: a `Monitor` (quick reads, used by the broker) and a `Checkpointer` (drives other processes' CUDA state, used by the
checkpoint worker alone). The NVIDIA and the simulated implementation behave alike, including their error codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class GPUErrorCode(StrEnum):
    """Driver errors that decide what happens next, with CUDA's numbers."""

    OUT_OF_MEMORY = "out-of-memory"  # 2
    NOT_INITIALIZED = "not-initialized"  # 3: not a CUDA process
    OPERATING_SYSTEM = "operating-system"  # 304
    ILLEGAL_STATE = "illegal-state"  # 401
    NOT_READY = "not-ready"  # 600: lock timed out, process still running
    NOT_PERMITTED = "not-permitted"  # 800
    NOT_SUPPORTED = "not-supported"  # 801
    SYSTEM_NOT_READY = "system-not-ready"  # 802: a service of the driver still starts (an HGX host's fabric manager)
    NO_SUCH_PROCESS = "no-such-process"
    WRONG_IDENTITY = "wrong-identity"  # the pid is alive but is another process
    NO_SUCH_DEVICE = "no-such-device"
    DEVICE_LOST = "device-lost"
    TARGET_STOPPED = "target-stopped"  # the process is stopped (SIGSTOP) or held by a debugger, and cannot answer
    WORKER_HUNG = "worker-hung"  # the worker did not answer in time and was replaced
    WORKER_DIED = "worker-died"
    WORKER_BUSY = "worker-busy"  # the worker of an earlier broker still runs; nothing was done
    UNKNOWN = "unknown"


class GPUError(Exception):
    """A device operation failed. `code` decides, the message explains."""

    def __init__(self, code: GPUErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class ProcessState(StrEnum):
    """CUDA's checkpoint state of a process, and states that CUDA does not enumerate."""

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
    why_no_move: str = ""  # why its saved state cannot be restored on another device, a sentence; empty: it can


class ProcessKind(StrEnum):
    """What a process does on a device."""

    COMPUTE = "compute"
    MPS = "mps"  # computes through the MPS server
    GRAPHICS = "graphics"  # draws, and does not compute


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """Device memory charged to one process, context included, MiB."""

    pid: int
    used_mib: int
    kind: ProcessKind = ProcessKind.COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The memory in use on a device now, MiB; `memory_mib` is the memory that processes can have in all."""

    device_id: str
    memory_mib: int
    used_mib: int
    processes: tuple[ProcessUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """Which processes worked on a device. Times in microseconds since boot, so that setting the wall clock does not change them."""

    known_until_us: int  # work up to then is reported
    settle_us: int  # for this long after its end, work may be reported as still running
    worked_us: Mapping[int, int]  # by pid: the last time at which it worked


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUtilisation:
    """How much of a device was in use over a period: means, thousandths of the device. Times in microseconds since boot."""

    since_us: int  # the period as far as it is known; the next one begins where it ends
    until_us: int
    settle_us: int  # a figure may include so much of the time before its period
    by_pid: Mapping[int, int] | None = None  # a process that is not in it used nothing; None: not known by process
    device_milli: int | None = None  # of all processes, or of the last moments only; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSensors:
    """Other readings of a device; None: the device does not report it. Power and energy are a whole device's."""

    busy_percent: int | None = None  # of the last moments in which anything ran
    temperature_c: int | None = None
    power_mw: int | None = None  # now, or in the last second
    energy_mj: int | None = None  # drawn since the driver was loaded, or the simulated host was made


class Monitor(Protocol):
    """Reads devices. Methods block for at most milliseconds on healthy hardware; the broker calls them off its loop."""

    @property
    def kind(self) -> str:
        """`simulated`, `nvidia`, or the name of another package's kind. Of `simulated` ones every screen says so."""

    def devices(self) -> list[DeviceInfo]:
        """Return the devices; an empty list is an ordinary result. Raises GPUError."""

    def use(self, device_id: str) -> DeviceUse:
        """Return which processes use the device. Raises GPUError (NO_SUCH_DEVICE, DEVICE_LOST)."""

    def activity(self, device_id: str, since_us: int) -> DeviceActivity | None:
        """Return which processes worked on the device since then; None if it does not report that. Raises GPUError."""

    def utilisation(self, device_id: str, since_us: int) -> DeviceUtilisation | None:
        """Return how much of the device each process used since then; None if the device does not report it. Raises GPUError.

        Pass the `until_us` of the answer before, for a period that follows on it.
        """

    def sensors(self, device_id: str) -> DeviceSensors:
        """Return utilisation, temperature, power and energy, as far as the device reports them. Raises GPUError."""

    def kernel_environment(self, device_id: str | None) -> dict[str, str]:
        """Return the environment variables a kernel needs to see this device (None: no device yet, but it may get one)."""

    def close(self) -> None:
        """Release everything."""


class Checkpointer(Protocol):
    """Drives the CUDA state of other processes. Every call blocks; only the checkpoint worker makes them, one at a time."""

    def state(self, pid: int) -> ProcessState:
        """Return the driver's state of the process. Raises GPUError."""

    def lock(self, pid: int, timeout_ms: int) -> None:
        """RUNNING -> LOCKED. Raises GPUError NOT_READY when work did not drain in time (still RUNNING)."""

    def checkpoint(self, pid: int) -> None:
        """LOCKED -> CHECKPOINTED: device memory moves to host memory. Raises GPUError; the process may then be unsound."""

    def restore(self, pid: int, moves: Mapping[str, str] | None = None) -> None:
        """CHECKPOINTED -> LOCKED; `moves` maps old to new device ids. Out of memory here is fatal to the process."""

    def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING. Raises GPUError."""
