"""Room at the end of a cell: a kernel that runs one cell after another is never idle for long, and makes room all the same.

For a ticket that fits nowhere, and that nobody idle can make room for, the gates of busy leases are closed where these leases' leaving
would let it in, alone or with what else is free, leaves or rests. That holds under any `preempt`, and no device has to be quiet for it:

- A lease is asked only after its minimum residency, for a ticket of at least its own priority, and not while it is pinned, or after a
  suspend that failed. The cell that runs goes on.
- Its next cell asks, and has its place in the queue from then on. That cell is behind the ticket, and until it is let in nothing of its
  kernel runs: the lease can be suspended at once, as an idle one.
- If several leases have to leave, the first one to end its cell waits for the others, but no longer than its own swap takes, and at
  least a second (`gate_opens_ms`): some of them may run a cell that never ends. It is not asked again before another minimum residency.
- Gates that no ticket needs closed any more are opened by the pass that finds so. While the swap channel is in use, no pass looks that far:
  they stay as they are until the swap has ended.
"""

from collections.abc import Sequence

from fractional_gpu.core.books.books import Lease
from fractional_gpu.core.books.records import BucketKey, OccupancyKind
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.rules.fairness import gate_opens_ms, residency_ms
from fractional_gpu.core.scheduler.capacity import Capacity, Plan
from fractional_gpu.core.scheduler.victims import Victims

__all__ = ["CellYields"]


class CellYields:
    """Whose gates are closed, in one pass over the queue."""

    def __init__(self, changes: Changes, room: Capacity, victims: Victims) -> None:
        self._changes = changes
        self._books = changes.books
        self._capacity = room
        self._victims = victims

    def ask(self, lease: Lease, devices: Sequence[str], key: BucketKey) -> None:
        """Close the gates of the leases that could let the ticket in at the end of their cells, if they suffice."""
        plan = self._capacity.plan(lease, devices, key.need_mib, key.devices, between_cells=True)
        if not isinstance(plan, Plan):
            return
        for victim in plan.victims:
            self._capacity.asked_to_yield.add(victim.lease_id)
            if victim.occupancy is OccupancyKind.BUSY:
                self._changes.close_gate(victim)

    def open_others(self) -> None:
        """At the end of a pass: open the gates that need not stay closed, and those that were closed for too long."""
        if not self._changes.channel_free:
            return
        for lease in list(self._books.gates_closed.values()):
            asked, planned = lease.lease_id in self._capacity.asked_to_yield, lease.lease_id in self._capacity.planned
            if not asked and not planned:
                self._changes.open_gate(lease)
            elif lease.gate.ticket is not None and not planned:
                self._wait_for_others(lease, lease.gate.ticket.asked_ms)

    def _wait_for_others(self, lease: Lease, since_ms: int) -> None:
        """Its cell has ended, and those of others that have to leave with it have not."""
        until_ms = gate_opens_ms(self._books, lease, since_ms)
        if until_ms > self._books.now_ms:
            self._victims.recheck_at(until_ms)
            return
        lease.gate.open_until_ms = self._books.now_ms + residency_ms(self._books, lease)
        self._changes.open_gate(lease)
