"""Room that one pass keeps for tickets, so that no later ticket takes it (law 4).

Room is kept for a ticket that was passed over K times, for a lease on its way to a target, for the ticket that is next for the swap
channel, and for a ticket that other leases make room for. Each lease keeps room on a device at most once in a pass.
"""

from collections.abc import Iterable

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease, Ticket
from fractional_gpu.core.scheduler.capacity import Capacity
from fractional_gpu.core.scheduler.migration import kept_mib

__all__ = ["KeptRoom", "ticket_need_mib"]


def ticket_need_mib(lease: Lease) -> int:
    """Return what the lease's ticket takes on each device, MiB."""
    return lease.bucket.key.need_mib if lease.bucket is not None else lease.need_mib


class KeptRoom:
    """The room kept in one pass. False while none is."""

    def __init__(self, books: Books, capacity: Capacity) -> None:
        self._books = books
        self._capacity = capacity
        self._kept: set[tuple[str, str]] = set()  # lease, device

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, lease: Lease, device_id: str) -> None:
        """Keep what the lease's ticket needs on a device."""
        self._keep(lease, device_id, ticket_need_mib(lease))

    def keep_targets(self, mover: Lease) -> None:
        """Keep the room of a lease on its way to other devices."""
        for device_id in mover.target_ids:
            self._keep(mover, device_id, kept_mib(mover))

    def release_targets(self, mover: Lease, device_ids: Iterable[str]) -> None:
        """Keep that room no longer: the lease has it, or will not get it."""
        for device_id in device_ids:
            if (mover.lease_id, device_id) in self._kept:
                self._kept.discard((mover.lease_id, device_id))
                self._capacity.keep(device_id, -kept_mib(mover))

    def count_promised(self, lease: Lease, device_ids: Iterable[str]) -> None:
        """Count room as kept that a plan has promised to the lease already (`Capacity.promise`)."""
        self._kept.update((lease.lease_id, device_id) for device_id in device_ids)

    def keep_owed(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> None:
        """Keep room for a ticket that was passed over K times, and on one more device for every K times since.

        The devices stay the same while they can serve the ticket, so that the room there can grow to what is needed.
        """
        need_mib, capacity = ticket_need_mib(lease), self._capacity
        owed = lease.count + ticket.passed_over_elsewhere // max(1, self._books.policy(lease).max_passed_over)
        if len(ticket.kept_on) == owed and all(
            capacity.can_ever_serve(one, need_mib) and one in devices for one in ticket.kept_on
        ):
            for device_id in ticket.kept_on:
                self.keep(lease, device_id)
            return
        able = [device_id for device_id in devices if capacity.closest_device([device_id], need_mib) is not None]
        if len(able) < lease.count:  # too few devices can ever serve it: room kept on some of them would be of no use
            able = []
        promised = [device_id for device_id in able if (lease.lease_id, device_id) in self._kept]
        kept = list(dict.fromkeys([*(one for one in ticket.kept_on if one in able), *promised]))[:owed]
        while len(kept) < owed:
            closest = capacity.closest_device([device_id for device_id in able if device_id not in kept], need_mib)
            if closest is None:
                break
            kept.append(closest)
        ticket.kept_on = tuple(kept)
        for device_id in kept:
            self.keep(lease, device_id)

    def _keep(self, lease: Lease, device_id: str, need_mib: int) -> None:
        if device_id in self._books.devices and (lease.lease_id, device_id) not in self._kept:
            self._kept.add((lease.lease_id, device_id))
            self._capacity.keep(device_id, need_mib)
