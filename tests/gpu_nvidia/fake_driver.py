"""A double of `cuda.bindings.driver` that behaves as the driver is known to, failures included.

Results are what the bindings give: a tuple that starts with a member of CUresult. Nothing here knows the code under test.
"""

import os
import uuid
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_ECC_UNCORRECTABLE = 214
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_NOT_READY = 802
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    CUDA_ERROR_UNKNOWN = 999


class StateNumber(IntEnum):
    CU_PROCESS_STATE_RUNNING = 0
    CU_PROCESS_STATE_LOCKED = 1
    CU_PROCESS_STATE_CHECKPOINTED = 2
    CU_PROCESS_STATE_FAILED = 3
    CU_PROCESS_STATE_CHECKPOINTING = 4
    CU_PROCESS_STATE_RESTORING = 5


RUNNING, LOCKED, CHECKPOINTED, FAILED = list(StateNumber)[:4]


class Uuid:
    def __init__(self, raw: bytes = bytes(16)) -> None:
        self._raw = raw

    @property
    def bytes(self) -> bytes:  # not writable in the bindings either
        return self._raw


class LockArgs:
    timeoutMs: int = 0  # noqa: N815 - the driver's spelling


class GpuPair:
    oldUuid: Uuid  # noqa: N815
    newUuid: Uuid  # noqa: N815


class RestoreArgs:
    gpuPairs: list[GpuPair]  # noqa: N815
    gpuPairsCount: int = 0  # noqa: N815 - setting the list does not set it


@dataclass
class FakeDevice:
    uuid: str
    free_mib: int = 80_000
    chip: str = "H100"

    @property
    def raw(self) -> bytes:
        return uuid.UUID(self.uuid.removeprefix("GPU-")).bytes


@dataclass
class FakeProcess:
    """A CUDA process on `device` (its index)."""

    device: int = 0
    used_mib: int = 1_000
    state: int = RUNNING
    busy: bool = False  # its work never drains
    managed: bool = False
    mig: bool = False
    doomed: bool = False  # a restore ran out of memory


@dataclass
class _Call:
    name: str
    arguments: tuple[object, ...] = field(default=())


class FakeDriver(ModuleType):
    """The driver, its devices and its processes. `answers[call]` replaces what a call gives; an exception there is raised."""

    CUresult = Result
    CUcheckpointLockArgs = LockArgs
    CUcheckpointRestoreArgs = RestoreArgs
    CUcheckpointGpuPair = GpuPair

    def __init__(self, *, devices: int = 1, version: int = 13000) -> None:
        super().__init__("fake_driver")
        self.devices = [FakeDevice(f"GPU-{uuid.uuid4()}") for _ in range(devices)]
        self.version = version
        self.processes: dict[int, FakeProcess] = {}
        self.answers: dict[str, tuple[int, ...] | Exception] = {}
        self.calls: list[_Call] = []
        self.initialised = False
        self.hidden_at_start = False

    def _given(self, name: str, *arguments: object) -> tuple[object, ...] | None:
        self.calls.append(_Call(name, arguments))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return None if answer is None else (Result(answer[0]), *answer[1:])

    def called(self, name: str) -> int:
        return sum(call.name == name for call in self.calls)

    # The driver's own names from here on.

    def cuInit(self, flags: int) -> tuple[object, ...]:  # noqa: N802
        self.hidden_at_start = "CUDA_VISIBLE_DEVICES" in os.environ
        self.initialised = True
        return self._given("cuInit", flags) or (Result.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[object, ...]:  # noqa: N802
        return self._given("cuDriverGetVersion") or (Result.CUDA_SUCCESS, self.version)

    def cuDeviceGetCount(self) -> tuple[object, ...]:  # noqa: N802
        return self._given("cuDeviceGetCount") or (Result.CUDA_SUCCESS, len(self.devices))

    def cuDeviceGet(self, ordinal: int) -> tuple[object, ...]:  # noqa: N802
        return self._given("cuDeviceGet", ordinal) or (Result.CUDA_SUCCESS, ordinal)

    def cuDeviceGetUuid(self, device: int) -> tuple[object, ...]:  # noqa: N802
        return self._given("cuDeviceGetUuid", device) or (Result.CUDA_SUCCESS, Uuid(self.devices[device].raw))

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[object, ...]:  # noqa: N802
        given = self._given("cuCheckpointProcessGetState", pid)
        if given is not None:
            return given
        if pid not in self.processes:
            return (Result.CUDA_ERROR_NOT_INITIALIZED, None)
        return (Result.CUDA_SUCCESS, StateNumber(self.processes[pid].state))

    def cuCheckpointProcessGetRestoreThreadId(self, pid: int) -> tuple[object, ...]:  # noqa: N802
        given = self._given("cuCheckpointProcessGetRestoreThreadId", pid)
        if given is not None:
            return given
        return (Result.CUDA_SUCCESS, pid + 1) if pid in self.processes else (Result.CUDA_ERROR_NOT_INITIALIZED, None)

    def cuCheckpointProcessLock(self, pid: int, args: LockArgs | None) -> tuple[object, ...]:  # noqa: N802
        given = self._given("cuCheckpointProcessLock", pid, args)
        return given or (self._lock(pid, args),)

    def cuCheckpointProcessCheckpoint(self, pid: int, args: None) -> tuple[object, ...]:  # noqa: N802
        given = self._given("cuCheckpointProcessCheckpoint", pid, args)
        return given or (self._checkpoint(pid),)

    def cuCheckpointProcessRestore(  # noqa: N802
        self, pid: int, args: RestoreArgs | None
    ) -> tuple[object, ...]:
        given = self._given("cuCheckpointProcessRestore", pid, args)
        return given or (self._restore(pid, args),)

    def cuCheckpointProcessUnlock(self, pid: int, args: None) -> tuple[object, ...]:  # noqa: N802
        given = self._given("cuCheckpointProcessUnlock", pid, args)
        return given or (self._unlock(pid),)

    # What they do.

    def _lock(self, pid: int, args: LockArgs | None) -> Result:
        process = self.processes.get(pid)
        if process is None:
            return Result.CUDA_ERROR_NOT_INITIALIZED
        if process.state != RUNNING:
            return Result.CUDA_ERROR_ILLEGAL_STATE
        if process.busy:
            assert args is not None, "the driver would wait for ever"
            assert args.timeoutMs > 0, "the driver would wait for ever"
            return Result.CUDA_ERROR_NOT_READY
        process.state = LOCKED
        return Result.CUDA_SUCCESS

    def _checkpoint(self, pid: int) -> Result:
        process = self.processes.get(pid)
        if process is None:
            return Result.CUDA_ERROR_NOT_INITIALIZED
        if process.state != LOCKED:
            return Result.CUDA_ERROR_ILLEGAL_STATE
        if process.mig:
            return Result.CUDA_ERROR_OUT_OF_MEMORY
        if process.managed:
            process.state = FAILED
            return Result.CUDA_ERROR_NOT_SUPPORTED
        process.state = CHECKPOINTED
        self.devices[process.device].free_mib += process.used_mib
        return Result.CUDA_SUCCESS

    def _restore(self, pid: int, args: RestoreArgs | None) -> Result:
        process = self.processes.get(pid)
        if process is None or not self.initialised:
            return Result.CUDA_ERROR_NOT_INITIALIZED
        if process.doomed:
            return Result.CUDA_ERROR_OPERATING_SYSTEM
        if process.state != CHECKPOINTED:
            return Result.CUDA_ERROR_ILLEGAL_STATE
        target = process.device if args is None else self._target(process.device, args)
        if target is None:
            return Result.CUDA_ERROR_INVALID_VALUE
        if self.devices[target].free_mib < process.used_mib:
            process.doomed = True
            return Result.CUDA_ERROR_OUT_OF_MEMORY
        self.devices[target].free_mib -= process.used_mib
        process.device, process.state = target, LOCKED
        return Result.CUDA_SUCCESS

    def _target(self, device: int, args: RestoreArgs) -> int | None:
        """Return where the pairs send the device; None if the driver refuses them."""
        by_raw = {one.raw: index for index, one in enumerate(self.devices)}
        pairs = [
            (by_raw[pair.oldUuid.bytes], by_raw[pair.newUuid.bytes]) for pair in args.gpuPairs[: args.gpuPairsCount]
        ]
        sent = dict(pairs)
        if len(pairs) != len(self.devices) or set(sent) != set(sent.values()) or len(sent) != len(self.devices):
            return None
        return sent[device] if self.devices[sent[device]].chip == self.devices[device].chip else None

    def _unlock(self, pid: int) -> Result:
        process = self.processes.get(pid)
        if process is None:
            return Result.CUDA_ERROR_NOT_INITIALIZED
        if process.state != LOCKED:
            return Result.CUDA_ERROR_ILLEGAL_STATE
        process.state = RUNNING
        return Result.CUDA_SUCCESS
