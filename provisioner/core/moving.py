"""Moving a lease to other devices: it is suspended where it is and resumed at once on its target, where room is kept for it meanwhile.

Four cases: an administrator asked for it (`moving_asked`); an idle lease goes where it can grow; an idle one that makes room for a
ticket goes where there is room for it now, instead of only being suspended; a busy one does where nobody idle can make room and its pool
moves busy leases. Only leases on one device are moved for others. A lease on its way waits with a ticket from the beginning, before all
others of its priority; if its target cannot have it after all (a stranger came, the device was lost), it is a suspended lease with a
ticket like any other.
"""

from collections.abc import Sequence

from provisioner.core.changes import Changes
from provisioner.core.fairness import preemptible_from_ms, swap_ms
from provisioner.core.model import LeaseSpec, LeaseState
from provisioner.core.obstacles import named_for
from provisioner.core.records import Footing
from provisioner.core.room import Plan, Room
from provisioner.core.scheduling import elsewhere
from provisioner.core.state import Lease
from provisioner.core.units import format_memory
from provisioner.core.victims import Victims

__all__ = ["Moving", "begin_move", "kept_mib"]


def kept_mib(lease: Lease) -> int:
    """What is kept for a lease on its way, on each of its targets, MiB."""
    grows = lease.ticket.grow if lease.ticket is not None else None
    return max(lease.need_mib, grows.reserve_mib if grows is not None else 0)


class Moving:
    """The moves of one pass over the queue."""

    def __init__(self, changes: Changes, room: Room, victims: Victims) -> None:
        self._changes = changes
        self._books = changes.books
        self._room = room
        self._victims = victims

    def to_grow(self, lease: Lease, spec: LeaseSpec) -> bool:
        """Where an idle lease cannot grow, it may go where there is room now. Returns whether it does."""
        if not self._changes.channel_free or lease.count > 1 or not self._victims.may_leave(lease):
            return False
        need_mib = self._books.reserve_mib(lease, spec)
        targets = self._room.pick(elsewhere(self._books, lease), need_mib)
        if targets is None or lease.host_need_mib > self._books.host_left_mib:
            return False
        self._begin(lease, targets, "move.grow", f"it goes where {format_memory(need_mib)} are free for it")
        return True

    def aside(self, victim: Lease, lease: Lease) -> bool:
        """A lease makes room: have it go where there is room for it now; an idle one only if the beneficiary need not wait for that."""
        if victim.count > 1 or victim.ticket is not None or victim.revoked:
            return False
        if not self._books.policy(victim).move_busy if victim.busy else lease.state is LeaseState.SUSPENDED:
            return False
        targets = self._room.pick(elsewhere(self._books, victim), victim.held_mib)
        if targets is None:
            return False
        why = f"it fits there as well, and makes room for {named_for(victim, lease)}"
        self._begin(victim, targets, "move.defragment", why, lease)
        return True

    def plan_busy(self, lease: Lease, devices: Sequence[str], need_mib: int) -> Plan | None:
        """Return a busy lease that fits elsewhere and whose room is what the ticket lacks; None: there is none."""
        pool = self._books.policy(lease)
        if not (pool.move_busy and pool.may_move) or lease.count > 1 or not self._changes.channel_free:
            return None
        best: tuple[int, str, Plan] | None = None
        for device_id in devices:
            short_mib = need_mib - self._room.total_mib(device_id)
            for other in self._books.holders(device_id):
                if other.footing is not Footing.WORKING or other.held_mib < short_mib or not self._may_move(other):
                    continue
                cost = (swap_ms(self._books, other), other.lease_id)
                if best is None or cost < best[:2]:
                    best = (*cost, Plan((device_id,), (other,)))
        return None if best is None else best[2]

    def _may_move(self, lease: Lease) -> bool:
        pool, from_ms = self._books.policy(lease), preemptible_from_ms(self._books, lease)
        if not (pool.move_busy and pool.may_move) or from_ms is None or lease.count > 1 or lease.ticket is not None:
            return False
        if lease.revoked:
            return False
        if self._room.pick(elsewhere(self._books, lease), lease.held_mib) is None:
            return False
        if from_ms > self._books.now_ms:
            self._victims.hint(from_ms)
            return False
        return lease.host_need_mib <= self._books.host_left_mib

    def _begin(
        self, lease: Lease, target_ids: Sequence[str], reason: str, sentence: str, beneficiary: Lease | None = None
    ) -> None:
        begin_move(self._changes, lease, target_ids, reason, sentence, beneficiary=beneficiary)
        for device_id in target_ids:
            self._room.keep(device_id, max(kept_mib(lease), lease.held_mib))
        self._room.changed(lease.device_ids)


def begin_move(
    changes: Changes,
    lease: Lease,
    target_ids: Sequence[str],
    reason: str,
    sentence: str,
    *,
    beneficiary: Lease | None = None,
) -> None:
    """Suspend the lease, for a `beneficiary` that gets its room, and have it wait, before all others, for its targets."""
    ticket = lease.ticket  # it may have one already, to grow
    if ticket is None:
        ticket = changes.new_ticket(first=True)
        ticket.preempted = lease.busy
        changes.books.enqueue(lease, ticket)
        changes.requeued.add(lease.spec.pool)
    ticket.then = ticket.then or changes.new_ticket()
    ticket.kept_on = tuple(target_ids)
    changes.books.set_target(lease, target_ids)
    changes.begin_suspend(lease, reason, sentence, beneficiary=beneficiary)
