"""A driver under the test's control: process states are data, and each step fails or lies on demand."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Any, cast

from fractional_gpu.broker.kernels.connection import GateLink
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.swap.suspend import CheckpointCheck, SwapTimes
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.effects import Suspend
from fractional_gpu.gpu.interface import (
    DeviceInfo,
    DeviceSensors,
    DeviceUse,
    DeviceUtilisation,
    GPUError,
    GPUErrorCode,
    Monitor,
    ProcessState,
    ProcessUse,
)
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.clock import since_boot_us
from fractional_gpu.host.process import ProcessIdentity, identify
from fractional_gpu.protocol.messages import GateAnswer
from tests.broker.live import started_for

__all__ = ["DEVICE", "OTHERS", "Driver", "Quiet", "journal", "kernel_of", "suspend_of", "swaps_of"]

DEVICE = "GPU-0"
OTHERS = ("GPU-1", "GPU-2", "GPU-3")
DEVICE_MIB = 1000
S = ProcessState
_STEPS: Mapping[str, tuple[ProcessState, ProcessState]] = {
    "lock": (S.RUNNING, S.LOCKED),
    "checkpoint": (S.LOCKED, S.CHECKPOINTED),
    "restore": (S.CHECKPOINTED, S.LOCKED),
    "unlock": (S.LOCKED, S.RUNNING),
}


class Driver:
    """Replaces the monitor and the checkpoint worker. `mib` is the memory of each process with a context, wherever its state is."""

    kind = "simulated"

    def __init__(self) -> None:
        self.states: dict[int, ProcessState] = {}
        self.mib: dict[int, int] = {}
        self.used_milli: dict[int, int] | None = None  # what each process uses on its device; None: not reported
        self.others_mib = 0
        self.where: dict[int, str] = {}  # the device of a process that is not on DEVICE
        self.moves: list[tuple[int, object]] = []  # the moves that each restore was told to make
        self.calls: list[tuple[str, int]] = []
        self.failures: dict[tuple[str, int], GPUErrorCode] = {}
        self.leaves: dict[tuple[str, int], ProcessState] = {}  # the state in which a step really leaves a process
        self.silent_after_a_step = False  # no states are reported after the next failing step
        self.silent = False

    def has_context(self, pid: int, state: ProcessState, mib: int) -> None:
        """Give a process a context."""
        self.states[pid], self.mib[pid] = state, mib

    def process_ended(self, pid: int) -> None:
        """Free the device memory of a process that has ended."""
        del self.states[pid], self.mib[pid]

    # the monitor

    def devices(self) -> list[DeviceInfo]:
        return [
            DeviceInfo(
                device_id=one, index=number, name="G", memory_mib=DEVICE_MIB, simulated=True, checkpointable=True
            )
            for number, one in enumerate((DEVICE, *OTHERS))
        ]

    def sensors(self, _device_id: str) -> DeviceSensors:
        return DeviceSensors()

    def utilisation(self, device_id: str, since_us: int) -> DeviceUtilisation | None:
        if self.used_milli is None:
            return None
        return DeviceUtilisation(
            since_us=since_us,
            until_us=since_boot_us(),
            settle_us=0,
            by_pid={pid: milli for pid, milli in self.used_milli.items() if self.where.get(pid, DEVICE) == device_id},
        )

    def use(self, device_id: str) -> DeviceUse:
        assert device_id in (DEVICE, *OTHERS)
        resident = {
            pid: mib
            for pid, mib in self.mib.items()
            if self.states[pid] is not S.CHECKPOINTED and self.where.get(pid, DEVICE) == device_id
        }
        processes = tuple(ProcessUse(pid=pid, used_mib=mib) for pid, mib in resident.items())
        others_mib = self.others_mib if device_id == DEVICE else 0
        used_mib = sum(resident.values()) + others_mib
        return DeviceUse(device_id=device_id, memory_mib=DEVICE_MIB, used_mib=used_mib, processes=processes)

    # the worker

    async def state(self, identity: ProcessIdentity) -> ProcessState:
        self._fail("state", identity.pid)
        if self.silent:
            raise GPUError(GPUErrorCode.WORKER_HUNG, "nobody says what is true")
        return self.states.get(identity.pid, S.NO_CONTEXT)

    async def lock(self, identity: ProcessIdentity, _timeout_ms: int) -> int:
        return self._step("lock", identity.pid)

    async def checkpoint(self, identity: ProcessIdentity, _deadline_s: float) -> int:
        return self._step("checkpoint", identity.pid)

    async def restore(self, identity: ProcessIdentity, moves: object, _deadline_s: float) -> int:
        self.moves.append((identity.pid, moves))
        return self._step("restore", identity.pid)

    async def unlock(self, identity: ProcessIdentity) -> int:
        return self._step("unlock", identity.pid)

    async def wait_for_previous_worker(self) -> None:
        """There is no earlier worker."""

    def _step(self, name: str, pid: int) -> int:
        self.calls.append((name, pid))
        before, after = _STEPS[name]
        assert self.states[pid] is before, f"{name} of a process that is {self.states[pid]}"
        left = self.leaves.get((name, pid))
        if left is not None:
            self.states[pid] = left
        self._fail(name, pid)
        if left is None:
            self.states[pid] = after
        return 1

    def _fail(self, name: str, pid: int) -> None:
        code = self.failures.get((name, pid))
        if code is not None:
            self.silent = self.silent_after_a_step
            raise GPUError(code, f"{name} failed as told")


class Quiet:
    """A watch that reports what the test sets."""

    doubt_s = 0.0

    def __init__(self) -> None:
        self.busy = False
        self.executing = self.runs_cell = False

    def close(self) -> None:
        """There is nothing to close."""


async def nothing_against(_kernel: Kernel, _processes: object, _host: object) -> str:
    """A check that lets every kernel be checkpointed."""
    return ""


def swaps_of(
    driver: Driver, *, overhead_mib: int = 0, gate_s: float = 30, check: CheckpointCheck = nothing_against
) -> Swaps:
    """Return the swaps that this driver carries out."""
    times = SwapTimes(gate_s=gate_s, lock_s=1, checkpoint_s=30)
    overheads = dict.fromkeys((DEVICE, *OTHERS), overhead_mib)
    return Swaps(cast("Monitor", driver), cast("WorkerLink", driver), times, overheads, check=check)


def suspend_of(kernel: Kernel, *, preempt: bool = False, host_mib: int = 100_000) -> Suspend:
    """Return a suspend as the arbiter would request it."""
    return Suspend(
        lease_id=kernel.lease_id, operation_id=1, generation=1, device_ids=(DEVICE,), host_mib=host_mib, preempt=preempt
    )


@asynccontextmanager
async def kernel_of(
    processes: int = 1, answers: Mapping[str, str | Callable[[], str]] | None = None, *, first: str = ""
) -> AsyncIterator[tuple[Kernel, Quiet, list[int]]]:
    """An idle kernel of real processes; with `answers` (verb to "word" or "word: detail") its extension is connected and replies so.

    `first` is what each of the processes runs before it waits.
    """
    # A lease's id also marks its kernel's processes, so another run of these tests on this machine must use other ids.
    kernel, quiet = Kernel(lease_id=uuid.uuid4().hex, uid=0, token_sha256=""), Quiet()
    with ExitStack() as stack:
        pids = [stack.enter_context(started_for(kernel.lease_id, first=first))["pid"] for _ in range(processes)]
        kernel.watch_process(identify(pids[0]), lambda: None)
        kernel.iopub = cast("IOPubWatch", quiet)
        extension = None
        if answers is not None:
            kernel.link = GateLink(0.0)
            extension = asyncio.create_task(run_extension(kernel.link, answers))
        try:
            yield kernel, quiet, pids
        finally:
            kernel.forget_process()
            if extension is not None:
                await extension


async def run_extension(link: GateLink, answers: Mapping[str, str | Callable[[], str]]) -> None:
    """Answer commands on the connection as `kernel_of` describes, until it closes."""
    while (command := await link.next()) is not None:
        answer = answers.get(str(command.verb))
        said = answer() if callable(answer) else answer
        if said == "hang up":
            link.close()
        elif said is not None:
            word, _, detail = said.partition(": ")
            link.take(GateAnswer(number=command.number, word=word, detail=detail), 0.0)


def journal(phases: list[str], then: Callable[[str], None] = lambda _: None) -> Any:  # noqa: ANN401 - swaps' Journal
    """A journal that keeps the phases and runs an action at each."""

    async def write(phase: str) -> None:
        phases.append(phase)
        then(phase)

    return write
