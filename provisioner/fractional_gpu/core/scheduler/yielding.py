"""Room at the end of a cell: a kernel that runs one cell after another is never idle for long, and still makes room.

If a ticket fits nowhere and idle leases cannot make room for it, the arbiter closes the gates of busy leases whose leaving would let it
in, together with what is free, leaving or idle. That holds for every `preempt` policy, and needs no quiet device:

- A lease is asked only after its minimum residency, for a ticket of at least its own priority, and not while it is pinned or after a
  failed suspend. The running cell goes on.
- The lease's next cell asks before it runs, and has its place in the queue from then on, behind the ticket. Until it is let in, its
  kernel runs nothing, so the lease can be suspended at once like an idle one.
- If several leases have to leave, the first one to end its cell waits for the others, but only as long as its own swap takes, and at
  least a second (`gate_opens_ms`), because another one may run a cell that never ends. It is not asked again before another minimum
  residency has passed.
- The pass that finds a gate closed for no ticket opens it. While the swap channel is in use, passes do not look that far: gates stay as
  they are until the swap has ended.
"""

from collections.abc import Sequence

from fractional_gpu.core.books.records import BucketKey, Lease, OccupancyKind
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.rules.fairness import gate_opens_ms, residency_ms
from fractional_gpu.core.scheduler.capacity import Capacity, Plan
from fractional_gpu.core.scheduler.victims import Victims


class CellYields:
    """Closes and opens gates in one pass over the queue."""

    def __init__(self, changes: Changes, room: Capacity, victims: Victims) -> None:
        self._changes = changes
        self._books = changes.books
        self._capacity = room
        self._victims = victims

    def ask(self, lease: Lease, devices: Sequence[str], key: BucketKey) -> None:
        """Close the gates of leases that can make enough room for the ticket at the end of their cells, if there are such."""
        plan = self._capacity.plan(lease, devices, key.need_mib, key.devices, between_cells=True)
        if not isinstance(plan, Plan):
            return
        for victim in plan.victims:
            self._capacity.asked_to_yield.add(victim.lease_id)
            if victim.occupancy is OccupancyKind.BUSY:
                self._changes.close_gate(victim)

    def open_others(self) -> None:
        """Open the gates that no ticket needs closed, and those closed for too long. Called at the end of a pass."""
        if not self._changes.channel_free:
            return
        for lease in list(self._books.gates_closed.values()):
            asked, planned = lease.lease_id in self._capacity.asked_to_yield, lease.lease_id in self._capacity.planned
            if not asked and not planned:
                self._changes.open_gate(lease)
            elif lease.gate.ticket is not None and not planned:
                self._wait_for_others(lease, lease.gate.ticket.asked_ms)

    def _wait_for_others(self, lease: Lease, since_ms: int) -> None:
        """Open the gate of a lease whose cell has ended if the others have taken too long, else look again when they have."""
        until_ms = gate_opens_ms(self._books, lease, since_ms)
        if until_ms > self._books.now_ms:
            self._victims.recheck_at(until_ms)
            return
        lease.gate.open_until_ms = self._books.now_ms + residency_ms(self._books, lease)
        self._changes.open_gate(lease)
