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

Each pass chooses anew, and only the choice of the last pass of an event is carried out (`settle`). An earlier one may ask for room that
the same event frees after it: a hold that lapses, or a lease that gives memory back when it is resized.
"""

from collections.abc import Sequence

from fractional_gpu.core.books.records import BucketKey, Lease, OccupancyKind
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.rules.fairness import gate_opens_ms, residency_ms
from fractional_gpu.core.scheduler.capacity import Capacity, Plan
from fractional_gpu.core.scheduler.victims import Victims


class CellYields:
    """Chooses in one pass over the queue which gates are closed and opened."""

    def __init__(self, changes: Changes, room: Capacity, victims: Victims) -> None:
        self._changes = changes
        self._books = changes.books
        self._capacity = room
        self._victims = victims
        self._closes: list[Lease] = []
        self._opens: list[Lease] = []

    def ask(self, lease: Lease, devices: Sequence[str], key: BucketKey) -> None:
        """Choose leases that can make enough room for the ticket at the end of their cells, if there are such."""
        plan = self._capacity.plan(lease, devices, key.need_mib, key.devices, between_cells=True)
        if not isinstance(plan, Plan):
            return
        for victim in plan.victims:
            self._capacity.asked_to_yield.add(victim.lease_id)
            if victim.occupancy is OccupancyKind.BUSY:
                self._closes.append(victim)

    def choose_openings(self) -> None:
        """Choose the gates that no ticket needs closed, and those closed for too long. Called at the end of a pass."""
        if not self._changes.channel_free:
            return
        for lease in self._books.gates_closed.values():
            asked, planned = lease.lease_id in self._capacity.asked_to_yield, lease.lease_id in self._capacity.planned
            if not planned and (not asked or self._has_waited(lease)):
                self._opens.append(lease)

    def _has_waited(self, lease: Lease) -> bool:
        """Return whether a lease whose cell has ended has waited for the others long enough; if not, ask for a pass when it has."""
        if lease.gate.ticket is None:
            return False
        until_ms = gate_opens_ms(self._books, lease, lease.gate.ticket.asked_ms)
        self._victims.recheck_at(until_ms)
        return until_ms <= self._books.now_ms

    def settle(self) -> None:
        """Close and open the chosen gates."""
        for lease in self._opens:
            if not lease.gate.closed:
                continue  # its suspend has begun
            if lease.lease_id in self._capacity.asked_to_yield:  # it has waited for the others long enough
                lease.gate.open_until_ms = self._books.now_ms + residency_ms(self._books, lease)
            self._changes.open_gate(lease)
        for lease in self._closes:
            if lease.occupancy is OccupancyKind.BUSY:  # else it has left, or begun to leave, for another ticket
                self._changes.close_gate(lease)
