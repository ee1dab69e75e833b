"""Suspends one kernel: keeps its cells waiting, and locks, checkpoints and verifies its processes.

1. Close the gate (which makes cells wait), check that the kernel is idle, have it free cached memory, and take a snapshot of the machine.
2. Check for known obstacles. Nothing is locked yet, so a refusal costs nothing. If too little host memory is reserved, ask the arbiter for
   more, here and in step 4.
3. Lock every CUDA process in the kernel's tree. Locked processes can't change their device memory.
4. Take a second snapshot while the locks are held. It shows what has started, grown or exited since the first.
5. Checkpoint each process, and verify the driver's answer. The first checkpoint is the point of no return.

Before step 5, every failure is rolled back, and the kernel continues. After that, the suspend ends as UNKNOWN unless the driver confirms
that all processes are saved, or that all are running again. `outcomes` says what each driver error leads to.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import (
    ENDED,
    FRESH_S,
    HostSnapshot,
    ProcessInspector,
    stopped_sentence,
)
from fractional_gpu.broker.lanes import SWAPS
from fractional_gpu.broker.swap.outcomes import after_checkpoint, before_checkpoint
from fractional_gpu.core.effects import Suspend
from fractional_gpu.core.events import SuspendOutcome
from fractional_gpu.core.units import format_memory
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.memory import shortage
from fractional_gpu.host.process import ProcessIdentity, is_alive, read_stat
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.messages import CELL_RUNS, NO_CELL_RUNS, GateVerb

Journal = Callable[[str], Awaitable[None]]
"""Writes the lease to disk before an operation begins the given phase."""

Reserve = Callable[[int], int]
"""Asks the arbiter to reserve host memory (MiB) for the suspend in progress. Returns the total MiB reserved afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTimes:
    """The time limit of each step, in seconds."""

    gate_s: float
    lock_s: float
    checkpoint_s: float


class StepError(Exception):
    """Raised if a step fails before the point of no return. `need_mib` is the memory to save if that is more than was reserved."""

    def __init__(self, outcome: SuspendOutcome, sentence: str, need_mib: int = 0) -> None:
        super().__init__(sentence)
        self.outcome = outcome
        self.need_mib = need_mib


Suspended = tuple[SuspendOutcome, int, str]
"""The result of a suspend: the outcome, the MiB saved or needed, and a sentence."""

SHRINK_TIMEOUT_S = 10.0
_HOST_MARGIN_MIB = 64
_UNLOCKED = (ProcessState.RUNNING, ProcessState.NO_CONTEXT, ProcessState.GONE)
_LONGEST_REASON = 300
_MUTE_GATE_S = 0.25  # time limit for a gate that did not answer last time
_BETWEEN_CELLS_S = 1.0  # how long a kernel without a context may take to finish its cell
_LOOK_S = 0.02
_DEAF_S = 5.0  # a silent process whose connections broke this long ago is no longer a kernel

IsQuiet = Callable[[Kernel], Awaitable[bool]]
"""Returns whether the devices show that a kernel has been idle long enough, even if its extension doesn't answer."""


CheckpointCheck = Callable[[Kernel, Collection[ProcessIdentity], HostSnapshot], Awaitable[str]]
"""Returns a sentence explaining why a kernel's CUDA processes can't be checkpointed, or "" if they can be."""


@dataclass(frozen=True, slots=True)
class Gate:
    shut: bool = False
    answers: bool = False


def _runs_no_cell(kernel: Kernel) -> bool:
    return kernel.link is not None and kernel.link.detail == NO_CELL_RUNS


def _is_no_kernel(kernel: Kernel) -> bool:
    """Return whether a kernel that had our extension has replaced itself (`os.execv`) and therefore no longer runs cells."""
    doubt_s = kernel.iopub.doubt_s if kernel.iopub is not None else 0.0
    return kernel.gated and kernel.link is None and doubt_s >= _DEAF_S


def _check_alive(kernel: Kernel) -> None:
    if kernel.identity is None or not is_alive(kernel.identity):
        raise StepError(SuspendOutcome.ABORTED, "the kernel process ended")


def _check_idle(kernel: Kernel) -> None:
    _check_alive(kernel)
    if kernel.busy:
        raise StepError(SuspendOutcome.ABORTED, "the kernel became busy")


class Suspension:
    """Suspends kernels with the checkpoint worker. Without `is_quiet`, every kernel is assumed to have done no work."""

    def __init__(
        self, inspector: ProcessInspector, worker: WorkerLink, times: SwapTimes, check: CheckpointCheck | None
    ) -> None:
        self.is_quiet: IsQuiet | None = None
        self._inspector = inspector
        self._worker = worker
        self._times = times
        self._check = check

    async def suspend(
        self, kernel: Kernel, effect: Suspend, journal: Journal, reserve: Reserve | None = None
    ) -> Suspended:
        """Suspend the kernel. Return the outcome, the MiB saved (or needed, if too little was reserved), and a sentence.

        If the host memory reserved in `effect` is too little, this method calls `reserve` for more. Cancel it only when the broker is
        exiting, because processes may stay locked.
        """
        reserve = reserve or (lambda _mib: effect.host_mib)
        locked: list[ProcessIdentity] = []
        kernel.checkpoint.sizes = {}
        try:
            use = await self._prepare(kernel, effect, reserve)
            if use is None:
                return SuspendOutcome.NOTHING_TO_SAVE, 0, "the kernel has no CUDA context: nothing had to be saved"
            # The journal is written before each step that a dying broker would leave half done, so that the next broker knows what to undo.
            await journal("locking")
            empty = await self._lock_all(use, locked)
            use = await self._check_locked(kernel, effect, locked, empty, reserve)
            kernel.checkpoint.sizes = use
            await journal("checkpointing")
        except StepError as error:
            return await self._roll_back(locked, error.outcome, str(error), error.need_mib)
        except LedgerError as error:
            sentence = f"the broker could not record it: {error}"
            return await self._roll_back(locked, SuspendOutcome.ABORTED, sentence)
        except GPUError as error:
            asked = error.code is not GPUErrorCode.TARGET_STOPPED  # the driver is not asked about a stopped process
            sentence = f"the driver refused before anything was saved: {error}" if asked else str(error)
            return await self._roll_back(locked, before_checkpoint(error.code), sentence)
        except OSError as error:
            sentence = f"the broker could not examine the kernel's processes: {error}"
            return await self._roll_back(locked, SuspendOutcome.REFUSED, sentence)
        return await self._checkpoint_all(locked, kernel.checkpoint.total_mib)

    async def _prepare(self, kernel: Kernel, effect: Suspend, reserve: Reserve) -> dict[ProcessIdentity, int] | None:
        """Return the CUDA processes to lock, with their MiB, or None if there is nothing to save. Raises StepError, GPUError or OSError."""
        _check_not_stopped(kernel)
        # A preempted kernel is busy, and a cell that waits at the gate blocks the main loop. Neither can shrink.
        is_busy = effect.preempt or effect.between_cells or bool(kernel.cell.unused)
        gate = await (self._shut_gate(kernel, effect) if is_busy else self._close_gate(kernel))
        shrinks = gate.answers and not is_busy and not self._inspector.off
        unshrunk, host = await self._first_snapshot(kernel, effect, shrinks=shrinks)
        use, heirs, between_cells = await self._use(kernel, effect, host, gate)
        if not use:
            if between_cells:
                return None
            raise StepError(
                SuspendOutcome.REFUSED, "the kernel has no CUDA context yet and could create one at any moment"
            )
        if kernel.cell.unused:
            raise StepError(SuspendOutcome.REFUSED, "its cell is now using the GPU")
        # Check permanent obstacles before temporary ones, so that a kernel that can never be saved is not tried again.
        why = self._inspector.off
        if not why and self._check is not None:
            why = await self._check(kernel, use, host)
        if why:
            raise StepError(SuspendOutcome.IMPOSSIBLE, why)
        if unshrunk is not None:
            raise unshrunk
        _check_heirs(kernel, heirs)
        _check_places(use, host, effect)
        _check_reserved(use, effect, reserve)
        await _check_host_memory(use)
        return use

    async def _close_gate(self, kernel: Kernel) -> Gate:
        """Tell our extension to keep cells waiting from now on. Raises StepError if a cell is running.

        If the extension doesn't answer in time, the kernel is treated as one without our extension. In that case, the devices must show
        that it has been idle for a while. Its messages don't prove this if its Python is blocked (a module holds the GIL).
        """
        await kernel.until_linked(self._times.gate_s)  # it may not have come back yet after a broker's start
        link = kernel.link
        if link is not None:
            word = await link.ask(GateVerb.CLOSE, _MUTE_GATE_S if link.mute else self._times.gate_s)
            if word == "closed":
                _check_idle(kernel)
                return Gate(shut=True, answers=True)
            if word:
                raise StepError(SuspendOutcome.ABORTED, "a cell began to run")
            if link.closed:
                raise StepError(SuspendOutcome.ABORTED, "the kernel's extension closed its connection")
        _check_idle(kernel)
        if not kernel.gated and link is None:
            return Gate()
        if self.is_quiet is not None and not await self.is_quiet(kernel):
            raise StepError(
                SuspendOutcome.ABORTED,
                "the kernel's extension is not responding, and the kernel used the GPU in the last few seconds",
            )
        # The extension obeys a command in the same step in which it reads it. If the command was read, only the answer could not be sent.
        return Gate(shut=link is not None and link.was_read())

    async def _shut_gate(self, kernel: Kernel, effect: Suspend) -> Gate:
        """Tell the kernel's extension, if it has one, not to let further cells run without a grant. Does not wait for a running cell.

        An extension that doesn't answer (perhaps because the cell holds the interpreter) obeys later. Until then, a running cell blocks in
        CUDA. Raises StepError if the kernel should be between two cells but is running a cell in another of its shells.
        """
        _check_alive(kernel)
        # As in `_close_gate`. A cell that enters the open gate would block without a message to its user.
        await kernel.until_linked(self._times.gate_s)
        link = kernel.link
        if link is None:
            return Gate()
        word = await link.ask(GateVerb.PREEMPT, _MUTE_GATE_S if link.mute else self._times.gate_s)
        if effect.between_cells and word and link.detail == CELL_RUNS:
            raise StepError(SuspendOutcome.ABORTED, "a cell is running in another shell of the kernel")
        return Gate(shut=True, answers=bool(word))

    async def _comes_between_cells(self, kernel: Kernel) -> bool:
        """Wait briefly for a busy kernel's cell to end, and return whether it did. Later cells are kept waiting."""
        until_s = time.monotonic() + _BETWEEN_CELLS_S
        while time.monotonic() < until_s and kernel.link is not None:
            if kernel.requests.waiters > 0 or not kernel.in_use:
                await kernel.link.ask(GateVerb.PREEMPT, self._times.gate_s)
                return _runs_no_cell(kernel)
            await asyncio.sleep(_LOOK_S)
        return False

    async def _first_snapshot(
        self, kernel: Kernel, effect: Suspend, *, shrinks: bool
    ) -> tuple[StepError | None, HostSnapshot]:
        """Take a snapshot. Return an error if something prevents saving (or None), and the snapshot. Raises GPUError.

        /proc is read while the kernel frees cached memory, and the devices are read afterwards.
        """
        device_ids = kernel.measurement.devices_to_read(effect.device_ids)
        if not shrinks:
            return None, await self._inspector.take(device_ids)
        unshrunk, _ = await asyncio.gather(_shrink(kernel), self._inspector.scan_processes())
        return unshrunk, await self._inspector.take(device_ids, max_age_s=FRESH_S)

    async def _use(
        self, kernel: Kernel, effect: Suspend, host: HostSnapshot, gate: Gate
    ) -> tuple[dict[ProcessIdentity, int], Sequence[ProcessIdentity], bool]:
        """Return the result of `ProcessInspector.memory_use`, and whether the kernel is between cells, so that no context can appear."""
        use, heirs = await self._inspector.memory_use(kernel, host)
        if effect.preempt:
            # A busy kernel without a context gives its room back if its cell ends soon.
            between_cells = False
            if not use and gate.answers and await self._comes_between_cells(kernel):
                between_cells = True
                host = await self._inspector.take(kernel.measurement.devices_to_read(effect.device_ids))
                use, heirs = await self._inspector.memory_use(kernel, host)
            between_cells = between_cells or (not use and _is_no_kernel(kernel))
        else:
            if not use and gate.shut and not effect.between_cells:
                _check_idle(kernel)
            between_cells = gate.shut and (not effect.between_cells or _runs_no_cell(kernel))
        return use, heirs, between_cells

    async def _lock_all(
        self, use: Mapping[ProcessIdentity, int], locked: list[ProcessIdentity]
    ) -> set[ProcessIdentity]:
        """Lock the processes, adding each to `locked` beforehand. Return those that turn out to have no context and so are not locked."""
        empty = set()
        for identity in use:
            locked.append(identity)
            try:
                await self._worker.lock(identity, int(self._times.lock_s * 1000))
            except GPUError as error:
                if error.code is GPUErrorCode.NOT_INITIALIZED:
                    locked.remove(identity)
                    empty.add(identity)
                    continue
                if error.code is GPUErrorCode.NOT_READY:
                    raise StepError(
                        SuspendOutcome.ABORTED, f"process {identity.pid} is still working on the GPU"
                    ) from error
                raise
        return empty

    async def _check_locked(
        self,
        kernel: Kernel,
        effect: Suspend,
        locked: Sequence[ProcessIdentity],
        empty: Collection[ProcessIdentity],
        reserve: Reserve,
    ) -> dict[ProcessIdentity, int]:
        """Return the MiB of each locked process. Raises StepError if the kernel changed before it was locked."""
        check = _check_alive if effect.preempt or effect.between_cells else _check_idle
        check(kernel)
        host = await self._inspector.take(kernel.measurement.devices_to_read(effect.device_ids))
        use, heirs = await self._inspector.memory_use(kernel, host)
        if strange := [one for one in empty if host.used_mib(one.pid)]:
            sentence = f"process {strange[0].pid} has device memory, but is unknown to the driver"
            raise StepError(before_checkpoint(GPUErrorCode.NOT_INITIALIZED), sentence)
        use = {one: mib for one, mib in use.items() if one not in empty}
        newcomers = [identity for identity in use if identity not in locked]
        if newcomers:
            raise StepError(SuspendOutcome.ABORTED, f"process {newcomers[0].pid} has just begun to use CUDA")
        _check_heirs(kernel, heirs)
        _check_places(use, host, effect)
        check(kernel)  # IOPub may have reported a cell while the snapshot was taken
        _check_reserved(use, effect, reserve)
        return use

    async def _checkpoint_all(self, locked: list[ProcessIdentity], saved_mib: int) -> Suspended:
        try:
            for identity in locked:
                await self._worker.checkpoint(identity, self._times.checkpoint_s)
                state = await self._worker.state(identity)
                if state is not ProcessState.CHECKPOINTED:
                    lie = f"the driver reported the checkpoint as done, but now reports the state {state}"
                    return await self._after_failed_checkpoint(locked, GPUError(GPUErrorCode.UNKNOWN, lie))
        except GPUError as error:
            return await self._after_failed_checkpoint(locked, error)
        return SuspendOutcome.SAVED, saved_mib, f"{format_memory(saved_mib)} saved in host memory"

    async def _roll_back(
        self, locked: Sequence[ProcessIdentity], outcome: SuspendOutcome, sentence: str, need_mib: int = 0
    ) -> Suspended:
        """Unlock the processes. Return the outcome, or UNKNOWN if a process may still be locked."""
        # In reverse order of locking, so that the way back passes through the same states.
        for identity in reversed(locked):
            try:
                if await self._worker.state(identity) is ProcessState.LOCKED:
                    await self._worker.unlock(identity)
                state = await self._worker.state(identity)
            except GPUError as error:
                if error.code in ENDED:
                    continue
                return SuspendOutcome.UNKNOWN, 0, f"{sentence}; process {identity.pid} may still be locked: {error}"
            if state not in _UNLOCKED:
                said = f"{sentence}; after that, the driver reports process {identity.pid} as {state}"
                return SuspendOutcome.UNKNOWN, 0, said
        return outcome, need_mib, sentence

    async def _after_failed_checkpoint(self, locked: Sequence[ProcessIdentity], error: GPUError) -> Suspended:
        """Roll back if the driver reports that no process's memory has moved. Otherwise, return UNKNOWN."""
        try:
            states = [await self._worker.state(identity) for identity in locked]
        except GPUError as again:
            sentence = f"the checkpoint failed ({error}), and the driver does not report the state ({again})"
            return SuspendOutcome.UNKNOWN, 0, sentence
        outcome = after_checkpoint(error.code, states)
        if outcome is SuspendOutcome.UNKNOWN:
            return outcome, 0, f"the checkpoint failed halfway: {error}"
        return await self._roll_back(locked, outcome, f"the driver could not checkpoint it: {error}")


async def _shrink(kernel: Kernel) -> StepError | None:
    """Have the kernel's idle main loop free cached memory. Return an error if the rest can't be saved, or None."""
    if kernel.link is None:
        return StepError(SuspendOutcome.ABORTED, "the kernel's extension closed its connection")
    word = await kernel.link.ask(GateVerb.SHRINK, SHRINK_TIMEOUT_S)
    if word == "managed":
        return StepError(SuspendOutcome.IMPOSSIBLE, printable(kernel.link.detail)[:_LONGEST_REASON])
    if word != "done":  # or if it does not answer
        return StepError(SuspendOutcome.ABORTED, "the kernel's main loop was not idle")
    return None


def _check_not_stopped(kernel: Kernel) -> None:
    """Raise StepError if the kernel is stopped, because a stopped process answers neither the broker nor the driver."""
    try:
        stopped = kernel.identity is not None and read_stat(kernel.identity.pid).stopped_or_traced
    except ProcessLookupError:
        return  # the process ended, and the next step reports that
    if stopped and kernel.identity is not None:
        raise StepError(SuspendOutcome.REFUSED, stopped_sentence(kernel.identity.pid))


def _check_heirs(kernel: Kernel, heirs: Sequence[ProcessIdentity]) -> None:
    if heirs and not kernel.launch.in_job:
        # Restores of a process with such a child are reported to fail and to lose the kernel's state.
        raise StepError(
            SuspendOutcome.REFUSED,
            f"process {heirs[0].pid} was forked by the kernel after the kernel began to use CUDA, as DataLoader and "
            "multiprocessing workers are; the kernel cannot be suspended while this process is running: wait for it to finish, or end it",
        )


def _check_places(use: Mapping[ProcessIdentity, int], host: HostSnapshot, effect: Suspend) -> None:
    own = effect.device_ids
    foreign = [device_id for device_id in host.homes({one.pid for one in use}) if device_id not in own]
    if foreign:
        # The memory would return to a device on which no room is reserved for it.
        raise StepError(
            SuspendOutcome.REFUSED,
            f"its processes use memory on device {foreign[0]}, which is not part of the lease; it can be suspended once they free it",
        )


def _check_reserved(use: Mapping[ProcessIdentity, int], effect: Suspend, reserve: Reserve) -> None:
    """If the memory exceeds the arbiter's estimate, have the arbiter reserve more. Raises StepError if the host has too little left."""
    need_mib = sum(use.values())
    if need_mib <= effect.host_mib:
        return
    reserved_mib = reserve(need_mib)
    if need_mib > reserved_mib:
        raise StepError(
            SuspendOutcome.ABORTED,
            f"{format_memory(need_mib)} must be saved, but only {format_memory(reserved_mib)} of host memory is reserved",
            need_mib,
        )


async def _check_host_memory(use: Mapping[ProcessIdentity, int]) -> None:
    for identity, used_mib in use.items():
        if used_mib == 0:
            # If no device counts processes by their pids in this pid namespace (for example in a container), it is unknown how much room
            # the state needs on the host, or when it returns to a device.
            raise StepError(SuspendOutcome.REFUSED, f"no device reports how much memory process {identity.pid} uses")
    needs = {identity.pid: used_mib + _HOST_MARGIN_MIB for identity, used_mib in use.items()}
    try:
        short = await SWAPS.run(shortage, needs)
    except (OSError, ValueError) as error:
        sentence = f"the broker could not find out how much host memory is left: {error}"
        raise StepError(SuspendOutcome.REFUSED, sentence) from error
    if short is not None:
        raise StepError(
            SuspendOutcome.NO_MEMORY,
            f"{format_memory(sum(use.values()))} must be saved in host memory, "
            f"but only {format_memory(short.left_mib)} is left (limited by {printable(short.limited_by)})",
        )
