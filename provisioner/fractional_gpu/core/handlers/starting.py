"""Reservations for kernels that are about to start: an ungated lease asks for its room before a process stands behind it.

Nothing proves that such a process ever comes, so what leases without a process hold or ask for is bounded:

- Of the leases of one owner (a user, or the hub's user of a seat), as many hold or queue for room as take `unattached_share` of the pool's
  memory, and at least one. It is only one while such leases alone keep out a ticket of another owner. The others are `parked`: they have no
  ticket, and file one when an earlier lease has its process, ends or loses its room. So their place in the queue is behind the tickets
  that other owners have filed meanwhile.
- Room is kept for `unattached_hold_ms`. After that it goes to a ticket that needs it. While no ticket waits in the pool the lease keeps the
  room: a kernel that starts slowly on an idle machine loses nothing.

Admission checks how many leases without a process an owner may have.
"""

from fractional_gpu.core.books.books import Books, Lease
from fractional_gpu.core.books.records import OccupancyKind
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.wait_reasons import allowed_devices
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_duration, format_memory

__all__ = ["StartReservations"]

_Owner = tuple[str, str]  # pool, owner


class StartReservations:
    """Decides which leases hold, or queue for, room before their start."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._lapsed: dict[str, Lease] = {}  # their hold is over, and they still have the room

    def request(self, lease: Lease, *, urgent: bool = False) -> None:
        """File a ticket for a lease that wants room before its start, or park it behind others of its owner."""
        books = self._books
        if lease.ticket is None and lease.lease_id not in books.parked:
            books.parked[lease.lease_id] = lease
            self.file_parked()
            if lease.lease_id in books.parked:
                pool = books.policy(lease)
                self._changes.record(
                    lease.lease_id,
                    "wait.unattached",
                    f"other kernels of {lease.spec.owner!r} are starting, and leases without a process may hold "
                    f"{pool.unattached_share_milli / 10:g} % of pool {pool.name!r}: it asks for room when one of them has started",
                )
        if lease.ticket is not None:
            self._changes.file_ticket(lease, before_start=True, urgent=urgent)

    def file_parked(self) -> None:
        """File tickets of parked leases, in the order of asking, as far as what their owners hold and ask for allows."""
        if not self._books.parked:
            return
        taken = self._taken_mib()
        full: set[_Owner] = set()
        for lease in list(self._books.parked.values()):
            owner = _owner(lease)
            there_mib, need_mib = taken.get(owner, 0), lease.need_mib * lease.count
            may = not there_mib or (
                there_mib + need_mib <= share_mib(self._books, lease) and not self._keep_out_others(lease)
            )
            if owner in full or not may:
                full.add(owner)  # a smaller lease of the owner does not pass it
                continue
            taken[owner] = there_mib + need_mib
            del self._books.parked[lease.lease_id]
            self._changes.file_ticket(lease, before_start=True)

    def _keep_out_others(self, lease: Lease) -> bool:
        """Return whether only leases without a process keep out a ticket of another owner, which more of them could pass one by one."""
        starting: dict[str, int] = {}
        for other in self._books.by_state[LeaseState.UNATTACHED].values():
            for device_id in other.occupied_ids:
                starting[device_id] = starting.get(device_id, 0) + other.occupied_mib
        return any(
            bucket.key.pool == lease.spec.pool
            and any(member.spec.owner != lease.spec.owner for member in bucket.members)
            and sum(
                self._free_or_idle_mib(device_id)
                < bucket.key.need_mib
                <= self._free_or_idle_mib(device_id) + starting.get(device_id, 0)
                for device_id in allowed_devices(self._books, bucket.members[0])
            )
            for bucket in self._books.queue.buckets.values()
        )

    def _free_or_idle_mib(self, device_id: str) -> int:
        """Return what is free on a device, or would be without its idle leases."""
        device = self._books.devices[device_id]
        return (
            device.free_mib
            + device.mib_by_occupancy[OccupancyKind.IDLE]
            + device.mib_by_occupancy[OccupancyKind.SUSPENDING]
        )

    def _taken_mib(self) -> dict[_Owner, int]:
        taken: dict[_Owner, int] = {}
        for lease in self._books.by_state[LeaseState.UNATTACHED].values():
            mib = lease.held_mib
            if not mib and lease.ticket is not None and lease.ticket.before_start:
                mib = lease.need_mib
            if mib:
                taken[_owner(lease)] = taken.get(_owner(lease), 0) + mib * lease.count
        return taken

    def mark_lapsed(self, lease: Lease) -> None:
        """Note that the lease's hold is over, if it is."""
        if _may_lapse(lease, self._books.now_ms):
            self._lapsed[lease.lease_id] = lease
            self._books.mark_changed(lease)  # its next deadline is its end

    def reclaim_lapsed(self) -> bool:
        """Free room whose hold is over, in pools where a ticket waits for room. Returns whether any was freed."""
        freed = False
        for lease in list(self._lapsed.values()):
            if not _may_lapse(lease, self._books.now_ms):
                del self._lapsed[lease.lease_id]
            elif self._is_wanted(lease):
                del self._lapsed[lease.lease_id]
                self._lapse(lease)
                freed = True
        return freed

    def _is_wanted(self, lease: Lease) -> bool:
        """Return whether a ticket that waits for room, or a parked lease, could use the lease's room."""
        pool = lease.spec.pool
        line = self._books.queue.lines.get(pool, ())
        return any(other.bucket is not None and other is not lease for other in line) or any(
            other.spec.pool == pool for other in self._books.parked.values()
        )

    def _lapse(self, lease: Lease) -> None:
        kept, mib = self._books.policy(lease).unattached_hold_ms, lease.held_mib
        self._changes.withdraw_ticket(lease)  # of one that waited to grow
        self._books.set_reservation(lease, ())
        self._changes.change_state(
            lease,
            Cause.LAPSED,
            "grant.lapsed",
            f"no process came within {format_duration(kept)}, and another kernel waits: its {format_memory(mib)} are free",
        )


def share_mib(books: Books, lease: Lease) -> int:
    """Return what one owner's leases without a process may hold together in the lease's pool, MiB."""
    pool = books.policy(lease)
    sizes = [books.devices[device_id].spec.leasable_mib for device_id in pool.devices if device_id in books.devices]
    return sum(sizes) * pool.unattached_share_milli // 1000


def _owner(lease: Lease) -> _Owner:
    return lease.spec.pool, lease.spec.owner


def _may_lapse(lease: Lease, now_ms: int) -> bool:
    return lease.state is LeaseState.UNATTACHED and lease.has_reservation and lease.hold_until_ms <= now_ms
