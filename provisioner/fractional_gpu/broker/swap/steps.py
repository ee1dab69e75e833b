"""What the parts of a swap share: the times that steps may take, the journal, how a step says that it failed, and the way back."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import ENDED
from fractional_gpu.broker.swap.outcomes import after_checkpoint
from fractional_gpu.core.effects import Resume, Suspend
from fractional_gpu.core.events import SuspendOutcome
from fractional_gpu.gpu.interface import GPUError, ProcessState
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.process import ProcessIdentity, Snapshot

FRESH_S = 0.25  # processes that were read longer ago than this are read again, even for a first look

Journal = Callable[[str, Iterable[ProcessIdentity], int], Awaitable[None]]
"""Writes a step of an operation durably: its phase, the processes, and MiB."""


Reserve = Callable[[int], int]
"""Asks the arbiter for so many MiB of host memory for the suspend under way; returns what is reserved for it then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTimes:
    """How long each step may take, seconds."""

    gate_s: float
    lock_s: float
    checkpoint_s: float


@dataclass(frozen=True, slots=True)
class ProcessesSeen:
    """The processes as they were at a moment of the monotonic clock, seconds."""

    processes: Snapshot
    at_s: float


class StepError(Exception):
    """A step of a suspend failed before the point of no return.

    `need_mib`: what would have to be saved, if that is more than was reserved on the host.
    """

    def __init__(self, outcome: SuspendOutcome, sentence: str, need_mib: int = 0) -> None:
        super().__init__(sentence)
        self.outcome = outcome
        self.need_mib = need_mib


def devices_concerned(kernel: Kernel, effect: Suspend | Resume) -> list[str]:
    """Return the devices to read for the operation: the lease's own, and others on which the kernel's processes were seen."""
    return list(dict.fromkeys([*(effect.device_ids or (effect.device_id,)), *sorted(kernel.measurement.seen_on)]))


def moves_between(homes: Sequence[str], targets: Sequence[str]) -> dict[str, str] | None:
    """Return the device to which the memory of each device goes; None if all of it stays where it was."""
    moves = dict(zip(homes, targets, strict=False))
    return moves if any(old != new for old, new in moves.items()) else None


# -- rollback ----------------------------------------------------------------------------------------------------------
# The way back from a suspend that failed.
#
# A lease counts as resident again only if every process that may have been locked is known to run: otherwise the outcome is UNKNOWN, and
# the lease is quarantined until the driver says what is true.


Suspended = tuple[SuspendOutcome, int, str]
"""How a suspend ended: the outcome, MiB that were saved or would have to be, and a sentence."""

_UNLOCKED = (ProcessState.RUNNING, ProcessState.NO_CONTEXT, ProcessState.GONE)


class Rollback:
    """Unlocks processes with the checkpoint worker."""

    def __init__(self, worker: WorkerLink) -> None:
        self._worker = worker

    async def roll_back(
        self, locked: Sequence[ProcessIdentity], outcome: SuspendOutcome, sentence: str, need_mib: int = 0
    ) -> Suspended:
        """Unlock what is locked and return the outcome; UNKNOWN if a process is not known to run again."""
        # In reverse order of the locks: the way back passes through the same states as the way there.
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
                said = f"{sentence}; then the driver says that process {identity.pid} is {state}"
                return SuspendOutcome.UNKNOWN, 0, said
        return outcome, need_mib, sentence

    async def after_failed_checkpoint(self, locked: Sequence[ProcessIdentity], error: GPUError) -> Suspended:
        """Go back if every process is still locked with its memory on the device; otherwise the outcome is UNKNOWN."""
        try:
            states = [await self._worker.state(identity) for identity in locked]
        except GPUError as again:
            sentence = f"the checkpoint failed ({error}) and the driver does not say what is true ({again})"
            return SuspendOutcome.UNKNOWN, 0, sentence
        outcome = after_checkpoint(error.code, states)
        if outcome is SuspendOutcome.UNKNOWN:
            return outcome, 0, f"the checkpoint failed half way: {error}"
        return await self.roll_back(locked, outcome, f"the driver could not checkpoint it: {error}")
