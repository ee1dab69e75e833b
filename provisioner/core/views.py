"""Read-only pictures of the books, for status, for the ledger and for whoever waits."""

from provisioner.core.explaining import explain
from provisioner.core.model import DeviceView, LeaseView, TicketView
from provisioner.core.state import Books, Lease

__all__ = ["device_views", "lease_view", "ticket_view", "ticket_views"]


def lease_view(lease: Lease) -> LeaseView:
    """Return the lease as others see it."""
    return LeaseView(
        spec=lease.spec,
        state=lease.state,
        generation=lease.generation,
        device_id=lease.device_id,
        saved_mib=lease.saved_mib,
        used_mib=lease.used_mib,
        busy=lease.busy,
        since_ms=lease.since_ms,
        last_active_ms=lease.last_active_ms,
        operation_id=lease.operation_id,
        reason=lease.reason,
        sentence=lease.sentence,
        reserved_mib=lease.held_mib,
        host_reserved_mib=lease.host_mib,
        suspend_asked=lease.asked_to_suspend,
        device_ids=lease.device_ids,
        pinned_until_ms=lease.pinned_until_ms,
        stays=lease.stays,
    )


def ticket_view(books: Books, lease: Lease, position: int | None = None) -> TicketView | None:
    """Return the lease's place in its pool's queue, or None."""
    ticket = lease.ticket
    if ticket is None:
        return None
    wait = explain(books, lease, ticket)
    return TicketView(
        lease_id=lease.lease_id,
        position=position if position is not None else books.queue.place(lease),
        asked_ms=ticket.asked_ms,
        passed_over=ticket.passed_over,
        reason=wait.reason,
        sentence=wait.sentence,
        blockers=wait.blockers,
        urgent=ticket.urgent,
        need_mib=lease.bucket.key.need_mib if lease.bucket is not None else lease.need_mib,
        kept_on=ticket.kept_on,
        expected=ticket.expected,
    )


def ticket_views(books: Books, pool: str) -> list[TicketView]:
    """Return the pool's queue in order."""
    views = (ticket_view(books, lease, position) for position, lease in enumerate(books.queue.line(pool), 1))
    return [view for view in views if view is not None]


def device_views(books: Books) -> list[DeviceView]:
    """Return every device."""
    return [
        DeviceView(
            device_id=device.spec.device_id,
            name=device.spec.name,
            pool=books.pool_of(device.spec.device_id),
            memory_mib=device.spec.memory_mib,
            leasable_mib=device.spec.leasable_mib,
            reserved_mib=device.reserved_mib,
            stranger_mib=device.stranger_mib,
            over_committed=device.reserved_mib + device.stranger_mib > device.spec.leasable_mib,
            lost=device.lost,
            draining=device.draining,
            why_not=device.spec.why_not,
        )
        for device in books.devices.values()
    ]
