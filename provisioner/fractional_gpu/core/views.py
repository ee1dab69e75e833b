"""Read-only views of the books, for status, for the ledger and for waiting cells."""

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease, Ticket
from fractional_gpu.core.changes.queue_wait import ForecastRecorder, shown_span
from fractional_gpu.core.model import DeviceView, LeaseState, LeaseView, Span, TicketView
from fractional_gpu.core.rules.wait_reasons import FormatTime, wait_reason
from fractional_gpu.core.scheduler.migration import kept_mib


def lease_view(lease: Lease, foresight: ForecastRecorder) -> LeaseView:
    """Return the view of a lease."""
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
        operation_id=lease.operation.operation_id if lease.operation is not None else None,
        reason=lease.reason,
        sentence=lease.sentence,
        reserved_mib=lease.held_mib,
        host_reserved_mib=lease.host_mib,
        suspend_requested=lease.suspend_requested,
        device_ids=lease.device_ids,
        pinned_until_ms=lease.pinned_until_ms,
        unsuspendable_reason=lease.unsuspendable_reason,
        left_behind=lease.left_behind,
        revoked=lease.revoked,
        ends_ms=lease.ends_ms,
        resume_ms=foresight.resume_ms(lease),
        gate_closed=lease.gate.closed,
        at_gate=lease.gate.ticket is not None,
    )


def ticket_view(
    books: Books, lease: Lease, foresight: ForecastRecorder, format_time: FormatTime | None = None
) -> TicketView | None:
    """Return the lease's place in its pool's queue, or None. `format_time` writes times of day in its sentence."""
    if lease.ticket is None:
        return None
    place = books.queue.place(lease)
    served = sum(
        other.ticket is not None and other.spec.pool == lease.spec.pool and books.queue.place(other) < place
        for other in books.by_state[LeaseState.RESUMING].values()
    )
    return _ticket_view(books, lease, lease.ticket, place - served, foresight.ticket_wait(lease), format_time)


def _ticket_view(  # noqa: PLR0917 - one caller's loop, and one more
    books: Books, lease: Lease, ticket: Ticket, position: int, expected: Span | None, format_time: FormatTime | None
) -> TicketView:
    wait = wait_reason(books, lease, ticket, format_time)
    return TicketView(
        lease_id=lease.lease_id,
        position=position,
        asked_ms=ticket.asked_ms,
        passed_over=ticket.passed_over,
        reason=wait.code,
        sentence=wait.sentence,
        blockers=wait.blockers,
        urgent=ticket.urgent,
        need_mib=lease.bucket.key.need_mib if lease.bucket is not None else kept_mib(lease),
        kept_on=ticket.kept_on,
        expected=None if expected is None else shown_span(ticket, lease, expected, books.now_ms),
    )


def ticket_views(
    books: Books, pool: str, foresight: ForecastRecorder, format_time: FormatTime | None = None
) -> list[TicketView]:
    """Return the pool's queue in order."""
    waits = foresight.queue_waits.waits_of_pool(pool)
    views, served = [], 0
    for place, (lease, wait) in enumerate(zip(books.queue.line(pool), waits, strict=True), 1):
        if lease.ticket is not None:
            views.append(_ticket_view(books, lease, lease.ticket, place - served, wait, format_time))
        served += lease.state is LeaseState.RESUMING  # it has its room, so tickets behind do not wait for it
    return views


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
