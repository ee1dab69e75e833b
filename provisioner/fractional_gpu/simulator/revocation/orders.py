"""What other orders would save before a deadline, of the same kernels at the same moment, for comparison with the arbiter's.

Each of them begins one save after the other as swap channels become free, busy kernels or not, and knows nothing of what fits: a save that
has not ended at the deadline is lost. What host memory does not hold is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from random import Random
from typing import Final

OURS: Final = "ours"
NO_NOTICE: Final = "no-notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A kernel on a device that goes away, as the notice comes. Times in ms."""

    lease_id: str
    mib: int  # on all of its devices
    swap_ms: int  # what its save takes
    work: int  # GPU time of its cells since its process began: ms times GPUs
    value: int  # as the arbiter counts it
    under_way_until_ms: int | None = None  # its save is under way, and ends then


Order = Callable[[Sequence[Holder], Random], list[Holder]]
OTHERS: Final[dict[str, Order]] = {
    "smallest-first": lambda there, _random: sorted(there, key=lambda one: (one.mib, one.lease_id)),
    "random": lambda there, random: random.sample(list(there), len(there)),
}
"""The other orders, by name."""


def saved_in(
    order: Sequence[Holder], *, free_ms: Sequence[int], deadline_ms: int, host_left_mib: int
) -> frozenset[str]:
    """Return which leases are saved in this order. `free_ms`: when each swap channel is free, at the earliest now."""
    channels = list(free_ms)
    heapify(channels)
    saved = {one.lease_id for one in order if (one.under_way_until_ms or deadline_ms + 1) <= deadline_ms}
    for one in order:
        if one.under_way_until_ms is not None or one.mib > host_left_mib:
            continue
        if channels[0] >= deadline_ms:
            break
        ends_ms = channels[0] + one.swap_ms
        heapreplace(channels, ends_ms)
        host_left_mib -= one.mib
        if ends_ms <= deadline_ms:
            saved.add(one.lease_id)
    return frozenset(saved)
