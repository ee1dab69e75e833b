"""What the parts of a swap share: the times that steps may take, the journal, and how a step says that it failed."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.core.effects import Resume, Suspend
from fractional_gpu.core.events import SuspendOutcome
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.host.tree import Snapshot

__all__ = ["FRESH_S", "Journal", "ProcessesSeen", "StepError", "SwapTimes", "devices_concerned", "moves_between"]

FRESH_S = 0.25  # processes that were read longer ago than this are read again, even for a first look

Journal = Callable[[str, Iterable[ProcessIdentity], int], Awaitable[None]]
"""Writes a step of an operation durably: its phase, the processes, and MiB."""


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
