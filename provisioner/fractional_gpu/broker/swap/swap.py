"""Suspending and resuming one kernel: the order of steps, and the way back from each.

The rules:
- The driver says what is true; the ledger only says what was meant.
- Up to the checkpoint every failure rolls back (unlock in reverse order, open the gate): ABORTED if the moment was wrong,
  REFUSED if it may be better later, IMPOSSIBLE if this process cannot be checkpointed. The checkpoint is the point of no return:
  after it only forward, or UNKNOWN. What the driver's errors mean is a table, in `outcomes`.
- Where the driver cannot checkpoint at all (`off`), nothing is asked of it: what the devices say is what there is.
- The order of a suspend: close the gate, the kernel is idle, shrink, look, host memory, lock every CUDA process of the tree, look again
  (IOPub, newcomers, sizes), checkpoint, see that it is true.
- What is saved was reserved before: more than the arbiter reserved on the host is not saved, and is told so that more is reserved.
- A gate that does not answer in time, or that is not connected, is no veto: the kernel is treated as one without our extension, once
  the devices' counters were quiet for a while (`is_quiet`). Python that does not run (an extension module that holds the GIL) is idle by
  its messages, too.
- A preempted kernel is busy: its gate is shut for the next cell only, nothing is shrunk, and being busy is no reason to stop. The same
  goes for one whose next cell waits at its gate: its main loop waits with it. A busy kernel without a context gives its room back if it
  comes to the end of a cell in a moment, or if its extension vouches that the cell waits before it uses the GPU (and no child is there).
- The order of a resume: see that the room is really free, with a margin, restore, unlock, see that it is true. A restore without room
  kills the process, so it is never tried to find out.
- Only the devices concerned are read: the lease's own, and others on which its processes were seen.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import (
    ENDED,
    HostSnapshot,
    ProcessInspector,
    stopped_sentence,
)
from fractional_gpu.broker.swap.outcomes import after_checkpoint, after_restore, before_checkpoint
from fractional_gpu.core.effects import Resume, Suspend
from fractional_gpu.core.events import ResumeOutcome, SuspendOutcome
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.units import format_memory, restore_margin_mib
from fractional_gpu.gpu.interface import (
    GPUError,
    GPUErrorCode,
    Monitor,
    ProcessState,
)
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.memory import shortage
from fractional_gpu.host.process import ProcessIdentity, is_alive, read_stat
from fractional_gpu.host.tree import Snapshot
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.decode import printable
from fractional_gpu.protocol.messages import (
    CELL_BARRED,
    CELL_EXAMINED,
    CELL_RUNS,
    NO_CELL_RUNS,
    GateVerb,
)

__all__ = ["Seen", "StepError", "SwapTimes", "Swaps", "Truth"]

log = logging.getLogger(__name__)

_LONGEST_REASON = 300
_SHRINK_TIMEOUT_S = 10.0
_HOST_MARGIN_MIB = 64
_MUTE_GATE_S = 0.25  # how long a gate may take to answer that did not answer the last time
_BETWEEN_CELLS_S = 1.0  # so long is waited for the end of a cell of a kernel without a context
_LOOK_S = 0.02
_DEAF_S = 5.0  # so long after its connections broke a kernel that answers nothing is none any more
_FRESH_S = 0.25  # so old may be what was seen of the processes, for a first look

Journal = Callable[[str, Iterable[ProcessIdentity], int], Awaitable[None]]
"""Writes a step of an operation durably: phase, processes, MiB."""

Screening = Callable[[Kernel, Collection[ProcessIdentity], HostSnapshot], Awaitable[str]]
"""Says why CUDA processes of a kernel cannot be checkpointed, a sentence; "" if nothing speaks against it."""


Quiet = Callable[[Kernel], Awaitable[bool]]
"""Says whether the devices have seen no work of a kernel for so long that it is idle, though its extension does not say so."""


async def _always_quiet(_kernel: Kernel) -> bool:
    return True


async def _nothing_against(_kernel: Kernel, _processes: Collection[ProcessIdentity], _scene: HostSnapshot) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTimes:
    """How long each step may take, seconds."""

    gate_s: float
    lock_s: float
    checkpoint_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a kernel really is. `state` is unattached, unarmed, resident or suspended.

    It is quarantined where the driver says that a process failed; `sentence` then says what that means for the kernel's user.
    """

    state: LeaseState
    device_id: str | None = None
    saved_mib: int = 0
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class _Gate:
    """What became of a kernel's gate: whether it keeps cells out, as far as is known, and whether the extension answers.

    `barred`: a cell runs nevertheless, and waits before its first use of the GPU.
    """

    shut: bool = False
    answers: bool = False
    barred: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """The processes, as they were seen at a moment of the monotonic clock, seconds."""

    snapshot: Snapshot
    at_s: float


class StepError(Exception):
    """A step before the point of no return failed. `need_mib`: what would have to be saved, if that is more than was reserved for it."""

    def __init__(self, outcome: SuspendOutcome, sentence: str, need_mib: int = 0) -> None:
        super().__init__(sentence)
        self.outcome = outcome
        self.need_mib = need_mib


class Swaps:
    """Carries out one operation at a time with the checkpoint worker.

    `overhead_mib` is what no lease may have of each device: a restore leaves a margin free, and no more than that.
    """

    def __init__(
        self, monitor: Monitor, worker: WorkerLink, times: SwapTimes, overhead_mib: Mapping[str, int] | None = None
    ) -> None:
        self._inspector = ProcessInspector(monitor, worker)
        self._worker = worker
        self._times = times
        self._overhead_mib = overhead_mib or {}
        self.screen: Screening = _nothing_against
        self.is_quiet: Quiet = _always_quiet

    @property
    def roots(self) -> Callable[[], list[ProcessIdentity]]:
        """What returns the processes of all kernels: one that was started by another has a lease of its own."""
        return self._inspector.roots

    @roots.setter
    def roots(self, roots: Callable[[], list[ProcessIdentity]]) -> None:
        self._inspector.roots = roots

    @property
    def off(self) -> str:
        """Why the driver cannot checkpoint at all, a sentence; empty: it can."""
        return self._inspector.off

    @off.setter
    def off(self, sentence: str) -> None:
        self._inspector.off = sentence

    @property
    def counts_processes(self) -> bool:
        """Whether the devices are known to count processes by the pids that are seen here."""
        return self._inspector.counts_processes

    @counts_processes.setter
    def counts_processes(self, counts: bool) -> None:
        self._inspector.counts_processes = counts

    async def scene(self) -> HostSnapshot:
        """Look at the machine once, for `truth` of several kernels. Raises GPUError."""
        return await self._inspector.scene()

    def tree(self, kernel: Kernel, scene: HostSnapshot) -> list[ProcessIdentity]:
        """Return the kernel's processes in the scene."""
        return self._inspector.tree(kernel, scene)

    async def states(self, kernel: Kernel, scene: HostSnapshot) -> dict[ProcessIdentity, ProcessState]:
        """Return the CUDA state, now, of every process of the kernel in the scene that has one of its own. Raises GPUError."""
        return await self._inspector.states(kernel, scene)

    async def look_at(self, device_ids: Sequence[str] | None) -> HostSnapshot:
        """Look at the machine once, and at these devices (None: all). Raises GPUError."""
        return await self._inspector.scene(device_ids)

    async def with_memory(
        self, kernel: Kernel, root: ProcessIdentity | None, scene: HostSnapshot, *, saved: bool
    ) -> list[ProcessIdentity]:
        """Return the processes of the kernel, whose own process this is or was, that have device memory (see `ProcessInspector`)."""
        return await self._inspector.with_memory(kernel, root, scene, saved=saved)

    async def used_mib(self, kernel: Kernel) -> int:
        """Return what the kernel's processes have on all devices now. Raises GPUError."""
        scene = await self._inspector.scene()
        return sum(scene.used_mib(identity.pid) for identity in self._inspector.tree(kernel, scene))

    async def shrink(self, kernel: Kernel) -> int | None:
        """Have an idle kernel give cached memory back; return what its processes use then, MiB.

        None if it could not, or if it is not known what they use. Cancellation leaves it to the kernel.
        """
        if kernel.link is None or kernel.busy or await kernel.link.ask(GateVerb.SHRINK, _SHRINK_TIMEOUT_S) != "done":
            return None
        try:
            return await self.used_mib(kernel) or None
        except GPUError as error:
            log.info("lease %s: what is left after shrinking cannot be read: %s", kernel.lease_id[:8], error)
            return None

    async def glance(self) -> Seen | None:
        """Look at the processes, for a `resume` that follows; None if that fails."""
        at_s = time.monotonic()
        try:
            return Seen(await self._inspector.snapshot(), at_s)
        except GPUError:
            return None  # the operation looks by itself, and says what is wrong

    async def until_alone(self) -> None:
        """Return when no checkpoint worker of an earlier broker is at work any more. Cancellation stops the waiting."""
        await self._worker.until_alone()

    # -- suspend ----------------------------------------------------------------------------------------------------------

    async def suspend(self, kernel: Kernel, effect: Suspend, journal: Journal) -> tuple[SuspendOutcome, int, str]:
        """Return the outcome, MiB and a sentence. The MiB are what was saved, or what would have had to be, if too little was reserved.

        Cancellation may leave locks behind: only at the broker's end.
        """
        touched: list[ProcessIdentity] = []
        kernel.checkpointed = {}
        try:
            self._check_goes_on(kernel)
            waits = effect.preempt or effect.between_cells  # for nothing: it is busy, or a cell is at its gate
            gate = await (self._shut_gate(kernel, effect) if waits else self._close_gate(kernel))
            shrinks = gate.answers and not waits and not self.off
            unshrunk, scene = await self._first_look(kernel, effect, shrinks=shrinks)
            use, heirs, between_cells = await self._use(kernel, effect, scene, gate)
            if not use:
                if between_cells:
                    return SuspendOutcome.NOTHING_TO_SAVE, 0, "the kernel has no CUDA context: nothing had to be saved"
                raise self._has_no_context(kernel)
            if why := self.off or await self.screen(kernel, use, scene):
                raise StepError(SuspendOutcome.IMPOSSIBLE, why)  # noqa: TRY301 - as above
            if unshrunk is not None:
                raise unshrunk
            self._check_heirs(heirs)
            self._check_places(use, scene, effect)
            self._check_reserved(use, effect)
            await self._check_host_memory(use)
            await journal("locking", use, 0)
            await self._lock_all(use, touched)
            use = await self._look_again(kernel, effect, touched)
            self._check_reserved(use, effect)
            kernel.checkpointed = use
            await journal("checkpointing", use, kernel.checkpointed_mib)
        except StepError as error:
            return await self._rolled_back(touched, error.outcome, str(error), error.need_mib)
        except LedgerError as error:
            return await self._rolled_back(touched, SuspendOutcome.ABORTED, f"it could not be written down: {error}")
        except GPUError as error:
            sentence = f"the driver refused before anything was saved: {error}"
            if error.code is GPUErrorCode.TARGET_STOPPED:  # it was not asked
                sentence = str(error)
            return await self._rolled_back(touched, before_checkpoint(error.code), sentence)
        except OSError as error:
            sentence = f"the kernel's processes could not be looked at: {error}"
            return await self._rolled_back(touched, SuspendOutcome.REFUSED, sentence)
        return await self._checkpoint_all(touched, kernel.checkpointed_mib)

    async def _close_gate(self, kernel: Kernel) -> _Gate:
        """Have our extension keep cells out from now on. Raises StepError if a cell runs."""
        await kernel.until_linked(self._times.gate_s)  # right after a broker's start it may not have come back yet
        link = kernel.link
        if link is not None:
            word = await link.ask(GateVerb.CLOSE, _MUTE_GATE_S if link.mute else self._times.gate_s)
            if word == "closed":
                self._check_idle(kernel)
                return _Gate(shut=True, answers=True, barred=link.detail == CELL_BARRED)
            if word:
                raise StepError(SuspendOutcome.ABORTED, "a cell began to run")
            if link.closed:
                raise StepError(SuspendOutcome.ABORTED, "the kernel's extension hung up")
        self._check_idle(kernel)
        if not kernel.gated and link is None:
            return _Gate()
        if not await self.is_quiet(kernel):
            raise StepError(
                SuspendOutcome.ABORTED,
                "the kernel's extension does not answer, and the kernel has worked on the GPU within the last seconds",
            )
        # A command that was read is obeyed in the same step. What cannot be sent then is the answer.
        return _Gate(shut=link is not None and link.was_read())

    async def _shut_gate(self, kernel: Kernel, effect: Suspend) -> _Gate:
        """Have the next cell ask before it runs, where an extension is there to do so.

        Raises StepError if the kernel was to be between two cells, and a cell runs in another of its shells.

        One that does not answer (the running cell may hold the interpreter) obeys later: until then a cell that runs blocks in
        CUDA, and gets its ticket for being busy.
        """
        self._check_alive(kernel)
        link = kernel.link
        if link is None:
            return _Gate()
        word = await link.ask(GateVerb.PREEMPT, _MUTE_GATE_S if link.mute else self._times.gate_s)
        if effect.between_cells and word and link.detail in (CELL_RUNS, CELL_EXAMINED):
            raise StepError(SuspendOutcome.ABORTED, "a cell runs in another shell of the kernel")
        return _Gate(shut=True, answers=bool(word), barred=bool(word) and link.detail == CELL_BARRED)

    @staticmethod
    def _runs_no_cell(kernel: Kernel) -> bool:
        """Whether the kernel's gate, which was shut just now, says that no cell runs that could reach the GPU without waiting for it."""
        return kernel.link is not None and kernel.link.detail in (NO_CELL_RUNS, CELL_BARRED)

    async def _use(
        self, kernel: Kernel, effect: Suspend, scene: HostSnapshot, gate: _Gate
    ) -> tuple[dict[ProcessIdentity, int], Sequence[ProcessIdentity], bool]:
        """Return what `ProcessInspector.use` does, and whether no cell of the kernel runs that could create a context now.

        Raises GPUError, and StepError if a cell runs that cannot, but may have started a process that can.
        """
        use, heirs = await self._inspector.use(kernel, scene)
        barred = gate.barred
        if effect.preempt:
            between_cells = False
            if not use and gate.answers and await self._comes_to_gate(kernel):
                between_cells = True
                barred = kernel.link is not None and kernel.link.detail == CELL_BARRED
                scene = await self._inspector.scene(_concerned(kernel, effect))
                use, heirs = await self._inspector.use(kernel, scene)
            between_cells = between_cells or (not use and self._is_no_kernel(kernel))
        else:
            if not use and gate.shut and not effect.between_cells:
                self._check_idle(kernel)
            between_cells = gate.shut and (not effect.between_cells or self._runs_no_cell(kernel))
        if barred and not use and between_cells:
            self._check_alone(kernel, scene)
        return use, heirs, between_cells

    def _check_alone(self, kernel: Kernel, scene: HostSnapshot) -> None:
        """Raise StepError if the kernel's tree has other processes than its own: what they will do is not known to its extension."""
        others = [one.pid for one in self._inspector.tree(kernel, scene) if one != kernel.identity]
        if others:
            raise StepError(
                SuspendOutcome.REFUSED,
                f"a cell runs, and process {others[0]}, which the kernel started, could begin to use the GPU at any moment",
            )

    @staticmethod
    def _has_no_context(kernel: Kernel) -> StepError:
        """What speaks against taking the room of a kernel without a context while its cell runs."""
        if kernel.link is not None and kernel.link.detail == CELL_EXAMINED:
            return StepError(SuspendOutcome.ABORTED, "whether the running cell can reach the GPU is being found out")
        return StepError(
            SuspendOutcome.REFUSED, "the kernel has no CUDA context yet and could create one at any moment"
        )

    @staticmethod
    def _is_no_kernel(kernel: Kernel) -> bool:
        """Whether the process that was a kernel with our extension runs no cells any more: another program took its place (`os.execv`).

        Whatever that does from now on is background work, like a child's of a kernel that idles.
        """
        doubt_s = kernel.watch.doubt_s if kernel.watch is not None else 0.0
        return kernel.gated and kernel.link is None and doubt_s >= _DEAF_S

    async def _comes_to_gate(self, kernel: Kernel) -> bool:
        """Return whether a busy kernel, whose gate was shut, ends its cell in a moment, or its cell is barred from the GPU.

        From then on no cell can create a context.
        """
        until_s = time.monotonic() + _BETWEEN_CELLS_S
        while time.monotonic() < until_s and kernel.link is not None:
            if kernel.waiting > 0 or not kernel.in_use:
                await kernel.link.ask(GateVerb.PREEMPT, self._times.gate_s)
                return self._runs_no_cell(kernel)
            await asyncio.sleep(_LOOK_S)
        return False

    @staticmethod
    def _check_goes_on(kernel: Kernel) -> None:
        """Raise StepError for a stopped kernel: neither its extension nor the driver would get an answer."""
        try:
            stopped = kernel.identity is not None and read_stat(kernel.identity.pid).held_up
        except ProcessLookupError:
            return  # it ended: the next step says so
        if stopped and kernel.identity is not None:
            raise StepError(SuspendOutcome.REFUSED, stopped_sentence(kernel.identity.pid))

    @staticmethod
    def _check_alive(kernel: Kernel) -> None:
        if kernel.identity is None or not is_alive(kernel.identity):
            raise StepError(SuspendOutcome.ABORTED, "the kernel process ended")

    @classmethod
    def _check_idle(cls, kernel: Kernel) -> None:
        cls._check_alive(kernel)
        if kernel.busy:
            raise StepError(SuspendOutcome.ABORTED, "the kernel became busy")

    @staticmethod
    def _check_heirs(heirs: Sequence[ProcessIdentity]) -> None:
        if heirs:
            # A restore beneath such a process is reported to fail, which would lose the kernel's state.
            raise StepError(
                SuspendOutcome.REFUSED,
                f"process {heirs[0].pid} was forked by the kernel after it began to use CUDA (as workers of a DataLoader or of "
                "multiprocessing are) and shares its context: the kernel can be suspended when that process has ended",
            )

    @staticmethod
    def _check_places(use: Mapping[ProcessIdentity, int], scene: HostSnapshot, effect: Suspend) -> None:
        own = effect.device_ids or (effect.device_id,)
        foreign = [device_id for device_id in scene.homes({one.pid for one in use}) if device_id not in own]
        if foreign:
            # It would come back there, where no room is reserved for it.
            raise StepError(
                SuspendOutcome.REFUSED,
                f"its processes have memory on device {foreign[0]}, which is not the lease's: it can be suspended when they have freed it",
            )

    @staticmethod
    def _check_reserved(use: Mapping[ProcessIdentity, int], effect: Suspend) -> None:
        need_mib = sum(use.values())
        if need_mib > effect.host_mib:
            raise StepError(
                SuspendOutcome.ABORTED,
                f"{format_memory(need_mib)} would have to be saved, and {format_memory(effect.host_mib)} of host memory are reserved",
                need_mib,
            )

    async def _check_host_memory(self, use: Mapping[ProcessIdentity, int]) -> None:
        for identity, used_mib in use.items():
            if used_mib == 0:
                # Where no device counts processes by their pids here (a container with pids of its own, say), it is not known what
                # room the state needs on the host, or to come back.
                raise StepError(SuspendOutcome.REFUSED, f"no device tells how much memory process {identity.pid} uses")
        needs = {identity.pid: used_mib + _HOST_MARGIN_MIB for identity, used_mib in use.items()}
        try:
            short = await asyncio.to_thread(shortage, needs)
        except (OSError, ValueError) as error:
            sentence = f"how much host memory is left could not be read: {error}"
            raise StepError(SuspendOutcome.REFUSED, sentence) from error
        if short is not None:
            raise StepError(
                SuspendOutcome.REFUSED,
                f"{format_memory(sum(use.values()))} would have to be saved in host memory, "
                f"where {format_memory(short.left_mib)} are left (limited by {printable(short.limited_by)})",
            )

    async def _first_look(
        self, kernel: Kernel, effect: Suspend, *, shrinks: bool
    ) -> tuple[StepError | None, HostSnapshot]:
        """Have the kernel shrink, if it `shrinks`; return what speaks against saving what is left, and the scene. Raises GPUError.

        The processes are looked at while it shrinks, the devices afterwards. What begins or ends meanwhile is seen after the locks.
        """
        if not shrinks:
            return None, await self._inspector.scene(_concerned(kernel, effect))
        begun_s = time.monotonic()
        unshrunk, snapshot = await asyncio.gather(self._shrink(kernel), self._inspector.snapshot())
        fresh = unshrunk is None and time.monotonic() - begun_s < _FRESH_S
        return unshrunk, await self._inspector.scene(_concerned(kernel, effect), snapshot if fresh else None)

    async def _shrink(self, kernel: Kernel) -> StepError | None:
        """Have cached memory given back on the idle main loop; return what speaks against saving what is left."""
        if kernel.link is None:
            return StepError(SuspendOutcome.ABORTED, "the kernel's extension hung up")
        word = await kernel.link.ask(GateVerb.SHRINK, _SHRINK_TIMEOUT_S)
        if word == "managed":
            return StepError(SuspendOutcome.IMPOSSIBLE, printable(kernel.link.detail)[:_LONGEST_REASON])
        if word != "done":  # also when it does not answer
            return StepError(SuspendOutcome.ABORTED, "the kernel's main loop was not idle")
        return None

    async def _lock_all(self, use: dict[ProcessIdentity, int], touched: list[ProcessIdentity]) -> None:
        """Lock the processes; `touched` are those that may be locked, whatever became of the call."""
        for identity in use:
            touched.append(identity)
            try:
                await self._worker.lock(identity, int(self._times.lock_s * 1000))
            except GPUError as error:
                if error.code is GPUErrorCode.NOT_READY:
                    raise StepError(SuspendOutcome.ABORTED, f"process {identity.pid} has GPU work under way") from error
                raise

    async def _look_again(
        self, kernel: Kernel, effect: Suspend, locked: Sequence[ProcessIdentity]
    ) -> dict[ProcessIdentity, int]:
        """Return what the locked processes use. Raises StepError if the kernel is not what it was when they were locked."""
        check = self._check_alive if effect.preempt or effect.between_cells else self._check_idle
        check(kernel)
        scene = await self._inspector.scene(_concerned(kernel, effect))
        use, heirs = await self._inspector.use(kernel, scene)
        newcomers = [identity for identity in use if identity not in locked]
        if newcomers:
            raise StepError(SuspendOutcome.ABORTED, f"process {newcomers[0].pid} began to use CUDA meanwhile")
        self._check_heirs(heirs)
        self._check_places(use, scene, effect)
        check(kernel)
        return use

    async def _rolled_back(
        self, touched: list[ProcessIdentity], outcome: SuspendOutcome, sentence: str, need_mib: int = 0
    ) -> tuple[SuspendOutcome, int, str]:
        """Unlock in reverse order what is locked. A process that is not known to run again makes it UNKNOWN."""
        for identity in reversed(touched):
            try:
                if await self._worker.state(identity) is ProcessState.LOCKED:
                    await self._worker.unlock(identity)
                state = await self._worker.state(identity)
            except GPUError as error:
                if error.code in ENDED:
                    continue
                return SuspendOutcome.UNKNOWN, 0, f"{sentence}; process {identity.pid} may still be locked: {error}"
            if state not in (ProcessState.RUNNING, ProcessState.NO_CONTEXT, ProcessState.GONE):
                return (
                    SuspendOutcome.UNKNOWN,
                    0,
                    f"{sentence}; then the driver says that process {identity.pid} is {state}",
                )
        return outcome, need_mib, sentence

    async def _unlock(self, locked: list[ProcessIdentity]) -> None:
        for identity in reversed(locked):
            try:
                await self._worker.unlock(identity)
            except GPUError as error:
                log.warning("process %d could not be unlocked: %s", identity.pid, error)

    async def _checkpoint_all(self, locked: list[ProcessIdentity], saved_mib: int) -> tuple[SuspendOutcome, int, str]:
        done: list[ProcessIdentity] = []
        try:
            for identity in locked:
                await self._worker.checkpoint(identity, self._times.checkpoint_s)
                done.append(identity)
                state = await self._worker.state(identity)
                if state is not ProcessState.CHECKPOINTED:
                    lie = f"the driver says {state} after a checkpoint that it called done"
                    return await self._after_failed_checkpoint(locked, GPUError(GPUErrorCode.UNKNOWN, lie))
        except GPUError as error:
            return await self._after_failed_checkpoint(locked, error)
        return SuspendOutcome.SAVED, saved_mib, f"{format_memory(saved_mib)} saved in host memory"

    async def _after_failed_checkpoint(
        self, locked: list[ProcessIdentity], error: GPUError
    ) -> tuple[SuspendOutcome, int, str]:
        """Go back if every process is still locked with its memory on the device; else nobody knows."""
        try:
            states = [await self._worker.state(identity) for identity in locked]
        except GPUError as again:
            return (
                SuspendOutcome.UNKNOWN,
                0,
                f"the checkpoint failed ({error}) and the driver does not say what is true ({again})",
            )
        outcome = after_checkpoint(error.code, states)
        if outcome is SuspendOutcome.UNKNOWN:
            return outcome, 0, f"the checkpoint failed half way: {error}"
        return await self._rolled_back(locked, outcome, f"the driver could not checkpoint it: {error}")

    # -- resume -----------------------------------------------------------------------------------------------------------

    async def resume(
        self, kernel: Kernel, effect: Resume, saved_mib: int, journal: Journal, seen: Seen | None = None
    ) -> tuple[ResumeOutcome, str]:
        """Return the outcome and a sentence. `seen` a moment ago saves a look at the processes.

        Cancellation may leave a half-done resume: only at the broker's end.
        """
        if self.off:
            return ResumeOutcome.NOT_STARTED, f"what is saved cannot be brought back now: {self.off}"
        device_ids = effect.device_ids or (effect.device_id,)
        fresh = seen is not None and time.monotonic() - seen.at_s < _FRESH_S
        try:
            scene = await self._inspector.scene(_concerned(kernel, effect), seen.snapshot if seen and fresh else None)
            states = await self._inspector.states(kernel, scene)
            # What another broker saved is not known: as much as is reserved for it must be free.
            pids = {identity.pid for identity in states}
            lacking = self._lacking(scene, device_ids, saved_mib or effect.reserve_mib, effect.reserve_mib, pids)
        except GPUError as error:
            return ResumeOutcome.NOT_STARTED, f"it cannot be brought back now: {error}"
        if lacking:
            return ResumeOutcome.NOT_STARTED, lacking
        saved = [identity for identity, state in states.items() if state is ProcessState.CHECKPOINTED]
        locked = [identity for identity, state in states.items() if state is ProcessState.LOCKED]
        from_ids = effect.from_device_ids or ((effect.from_device_id,) if effect.from_device_id is not None else ())
        moves = _moves(kernel.homes or from_ids, device_ids)
        await journal("restoring", saved, saved_mib)
        try:
            for identity in saved:
                await self._worker.restore(identity, moves, self._times.checkpoint_s)
            # The kernel's calls go on from here; what the driver says is verified afterwards.
            await self._unlock_restored([*locked, *saved])
            states = await self._states_of(states)
        except GPUError as error:
            return await self._after_failed_restore(kernel, error)
        if all(state is ProcessState.RUNNING for state in states.values()):
            return ResumeOutcome.RESTORED, f"{format_memory(saved_mib)} restored"
        return ResumeOutcome.UNKNOWN, f"after the restore the driver says {', '.join(sorted(set(states.values())))}"

    async def _unlock_restored(self, identities: Iterable[ProcessIdentity]) -> None:
        """Unlock processes that are not gone. Raises GPUError."""
        for identity in identities:
            try:
                await self._worker.unlock(identity)
            except GPUError as error:
                if error.code not in ENDED:
                    raise

    async def _states_of(self, identities: Iterable[ProcessIdentity]) -> dict[ProcessIdentity, ProcessState]:
        """Return what the driver says of these processes, those that are gone left out. Raises GPUError."""
        states = {}
        for identity in identities:
            try:
                states[identity] = await self._worker.state(identity)
            except GPUError as error:
                if error.code not in ENDED:
                    raise
        return {
            one: state for one, state in states.items() if state not in (ProcessState.GONE, ProcessState.NO_CONTEXT)
        }

    def _lacking(
        self, scene: HostSnapshot, device_ids: Sequence[str], saved_mib: int, reserve_mib: int, pids: Collection[int]
    ) -> str:
        """Return a sentence about the first of the devices without the room for what is saved of these processes, or "".

        How much of what was saved belongs on which of several devices is not known: each must have room for all of it, or be as free as
        what is reserved there. A device that no other process uses will never have more room: it needs no margin. Raises GPUError.
        """
        need_mib = saved_mib if len(device_ids) == 1 else min(saved_mib, reserve_mib)
        for device_id in device_ids:
            free_mib = scene.free_mib(device_id)
            margin_mib = 0
            if not scene.is_alone(pids, device_id):
                margin_mib = min(restore_margin_mib(need_mib), self._overhead_mib.get(device_id, 0))
            if free_mib < need_mib + margin_mib:
                needed = format_memory(need_mib) + (
                    f" and a margin of {format_memory(margin_mib)}" if margin_mib else ""
                )
                return f"the device has {format_memory(free_mib)} free, {needed} are needed"
        return ""

    async def _after_failed_restore(self, kernel: Kernel, error: GPUError) -> tuple[ResumeOutcome, str]:
        try:
            states = await self._inspector.states(kernel, await self._inspector.scene())
        except GPUError as again:
            return (
                ResumeOutcome.UNKNOWN,
                f"the restore failed ({error}) and the driver does not say what is true ({again})",
            )
        outcome = after_restore(error.code, states.values())
        if outcome is ResumeOutcome.NOT_STARTED:
            return outcome, f"the driver could not restore it: {error}"
        return outcome, f"the restore failed half way: {error}"

    # -- truth ------------------------------------------------------------------------------------------------------------

    async def truth(
        self, kernel: Kernel, device_id: str | None, saved_mib: int, scene: HostSnapshot | None = None
    ) -> Truth | None:
        """Find out what the kernel is, undoing half-done work where that is safe. None: still unknown; look again later.

        A scene that was taken a moment ago saves the first look.
        """
        try:
            if kernel.identity is None or not is_alive(kernel.identity):
                # What its process left behind may have to be found out first.
                return Truth(state=LeaseState.UNATTACHED) if kernel.ending is None else None
            scene = scene or await self._inspector.scene()
            states = await self._inspector.states(kernel, scene)
            if await self._undone(kernel, scene, states, device_id, saved_mib):
                scene = await self._inspector.scene()
                states = await self._inspector.states(kernel, scene)
        except (GPUError, OSError) as error:
            log.warning("lease %s: the truth is not to be had yet: %s", kernel.lease_id, error)
            return None
        kinds = set(states.values())
        if not kinds:  # a driver that is not asked would not tell of what is saved
            return None if self.off and saved_mib else Truth(state=LeaseState.UNARMED)
        if kinds == {ProcessState.CHECKPOINTED}:
            saved_mib = max(saved_mib, kernel.checkpointed_mib, sum(scene.used_mib(one.pid) for one in states))
            return Truth(state=LeaseState.SUSPENDED, device_id=kernel.home or device_id, saved_mib=saved_mib)
        if kinds == {ProcessState.RUNNING}:
            return Truth(state=LeaseState.RESIDENT, device_id=self._where(kernel, scene) or device_id)
        failed = [identity.pid for identity, state in states.items() if state is ProcessState.FAILED]
        return _failure(failed[0], device_id, saved_mib) if failed else None

    async def _undone(
        self,
        kernel: Kernel,
        scene: HostSnapshot,
        states: dict[ProcessIdentity, ProcessState],
        device_id: str | None,
        saved_mib: int,
    ) -> bool:
        """Undo what is half done, if it is safe; return whether anything was to be undone. Raises GPUError."""
        kinds = set(states.values())
        if ProcessState.CHECKPOINTED in kinds and len(kinds) > 1:
            await self._restore_rest(kernel, scene, states, device_id, saved_mib)
        elif ProcessState.LOCKED in kinds:
            await self._unlock([one for one, state in states.items() if state is ProcessState.LOCKED])
        else:
            return False
        return True

    async def _restore_rest(
        self,
        kernel: Kernel,
        scene: HostSnapshot,
        states: dict[ProcessIdentity, ProcessState],
        device_id: str | None,
        saved_mib: int,
    ) -> None:
        """Some processes of the tree are saved and some are not: bring them all back, if the devices have the room for certain.

        Raises GPUError.
        """
        homes = kernel.homes or ((device_id,) if device_id is not None else ())
        known = {ProcessState.CHECKPOINTED, ProcessState.LOCKED, ProcessState.RUNNING}
        if not set(states.values()) <= known or not homes:
            return
        scene = await self._inspector.scene()  # what was free a moment ago may be another's, who was brought back since
        # Where the others are: they may have been on the way to another device.
        there = self._where(kernel, scene)
        targets = homes if len(homes) > 1 or there is None else (there,)
        if lacking := self._lacking_rest(kernel, scene, states, targets, saved_mib):
            log.warning("lease %s: a part of it is saved and stays so: %s", kernel.lease_id, lacking)
            return
        moves = _moves(homes, targets)
        for identity, state in states.items():
            if state is ProcessState.CHECKPOINTED:
                await self._worker.restore(identity, moves, self._times.checkpoint_s)
        await self._unlock_restored(
            [one for one, state in states.items() if state in (ProcessState.CHECKPOINTED, ProcessState.LOCKED)]
        )

    def _lacking_rest(
        self,
        kernel: Kernel,
        scene: HostSnapshot,
        states: dict[ProcessIdentity, ProcessState],
        targets: Sequence[str],
        saved_mib: int,
    ) -> str:
        """Return why what is saved of the tree cannot be brought back to the rest of it, a sentence, or "". Raises GPUError."""
        rest_mib = _rest_mib(kernel, scene, states, saved_mib)
        pids = {identity.pid for identity in self._inspector.tree(kernel, scene)}
        if rest_mib > 0:
            return self._lacking(scene, targets, rest_mib, rest_mib, pids)
        if all(scene.is_alone(pids, device_id) for device_id in targets):
            return ""  # no device will ever have more room
        return "how much was saved is not known, and others use its device"

    def _where(self, kernel: Kernel, scene: HostSnapshot) -> str | None:
        """Return the device that holds most of the kernel's memory; of one with several devices, its first one."""
        found = scene.homes({identity.pid for identity in self._inspector.tree(kernel, scene)})
        if len(kernel.homes) > 1 and set(found) <= set(kernel.homes):
            return kernel.homes[0]
        return found[0] if found else None


def _concerned(kernel: Kernel, effect: Suspend | Resume) -> list[str]:
    """Return the devices that have to be read for the operation: its own, and others on which the kernel's processes were seen."""
    return list(dict.fromkeys([*(effect.device_ids or (effect.device_id,)), *sorted(kernel.seen_on)]))


def _failure(pid: int, device_id: str | None, saved_mib: int) -> Truth:
    sentence = (
        f"the driver says that process {pid} met an error that cannot be corrected: what this kernel had on the GPU is lost. Its other "
        "variables are still there: save what you need in cells that begin with %%cpu, then restart the kernel"
    )
    return Truth(state=LeaseState.QUARANTINED, device_id=device_id, saved_mib=saved_mib, sentence=sentence)


def _rest_mib(kernel: Kernel, scene: HostSnapshot, states: dict[ProcessIdentity, ProcessState], saved_mib: int) -> int:
    """Return what the saved processes of a half-saved tree need on its devices, MiB; 0: nobody knows.

    The broker that saved them knows it of each. A later one knows the sum, and takes off what is locked: that has what it had then. What
    runs is not taken off: it may have grown, or come since.
    """
    if kernel.checkpointed:
        saved = [kernel.checkpointed.get(one, 0) for one, state in states.items() if state is ProcessState.CHECKPOINTED]
        return sum(saved) if all(saved) else 0
    locked_mib = sum(scene.used_mib(one.pid) for one, state in states.items() if state is ProcessState.LOCKED)
    return max(0, saved_mib - locked_mib)


def _moves(homes: Sequence[str], targets: Sequence[str]) -> dict[str, str] | None:
    """Return where what was on each device is to go, None if everything stays where it was."""
    moves = dict(zip(homes, targets, strict=False))
    return moves if any(old != new for old, new in moves.items()) else None
