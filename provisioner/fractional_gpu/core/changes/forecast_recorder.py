"""Feeds the forecasts with what happens to leases, and records what was forecast when a ticket was filed.

There is one method per thing that happens. Work that takes long and changes no effect of its event is deferred until the effects are on
their way (`run_deferred_work`): swap times are learnt, and a new ticket's wait is forecast once, if it still waits. What people see is
computed anew whenever it is read.

**Forecasts that turned out too short are shown wider.** A forecast says how long a ticket still waits. If the wait outlasts the upper end
of what was shown, the basis of that forecast is wrong for this ticket, and the next one on the same basis deserves less trust the longer
that goes on. From then on:

- the upper end is at least the time waited so far, times n; n is 1, and grows by one whenever the wait has doubled since the miss;
- the expected value is at least half of the time waited, and the lower end a tenth: a wait of unknown cause that has lasted for t ends
  within the next t/10 in about one case of ten (as if its length were distributed by Pareto's law with exponent 1).

A resume under way is a wait of its own: the ticket has its room, and only time is needed. If it outlasts its forecast, the same holds.
All of this is about display and decides nothing.
"""

from dataclasses import replace

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease, ShownForecast, Ticket
from fractional_gpu.core.changes.queue_wait import QueueWaitForecast
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.model import LeaseState, Span

__all__ = ["ForecastRecorder", "shown_span", "widened_span"]


class ForecastRecorder:
    """The forecasts, and the deferred work on them."""

    def __init__(self, books: Books, forecasts: Forecasts, *, parallel_swaps: int = 1) -> None:
        self.forecasts = forecasts
        self.queue_waits = QueueWaitForecast(books, forecasts, parallel_swaps=parallel_swaps)
        self._books = books
        self._filed: list[Lease] = []
        self._swaps: list[tuple[str, str, int, int]] = []  # arguments of `Forecasts.swap_finished`, deferred

    def busy_changed(self, lease: Lease, *, busy: bool) -> None:
        """Note that the lease began, or ended, to run something."""
        if busy:
            self.forecasts.cell_began(lease.lease_id, self._books.now_ms)
        else:
            self.forecasts.cell_ended(lease.lease_id, self._books.now_ms)

    def became_resident(self, lease: Lease) -> None:
        """Note that the lease is resident: a cell that waited for that begins now."""
        if lease.busy:
            self.forecasts.cell_began(lease.lease_id, self._books.now_ms)

    def swap_finished(self, kind: str, lease: Lease, mib: int, took_ms: int) -> None:
        """Note that an operation of the lease succeeded, moving `mib` in `took_ms`."""
        device = self._books.devices.get((lease.home_id if kind == "suspend" else lease.device_id) or "")
        if device is not None and mib > 0:
            self._swaps.append((kind, device.spec.name, mib, took_ms))

    def ticket_filed(self, lease: Lease) -> None:
        """Note that the lease has a new ticket."""
        self._filed.append(lease)

    def ticket_served(self, lease: Lease) -> None:
        """Note that the lease got what its ticket was for."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_ended(ticket.expected, self._books.now_ms - ticket.asked_ms)

    def ticket_given_up(self, lease: Lease) -> None:
        """Note that the lease stopped waiting without having got what its ticket was for."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_given_up(ticket.expected, self._books.now_ms - ticket.asked_ms)

    def lease_ended(self, lease: Lease) -> None:
        """Forget a lease that is over."""
        self.forecasts.forget(lease.lease_id)

    def run_deferred_work(self) -> bool:
        """Learn from the swaps of the last event, and forecast the waits of its new tickets. Returns whether anything was learnt."""
        learns = bool(self._swaps)
        for swap in self._swaps:
            self.forecasts.swap_finished(*swap)
        self._swaps.clear()
        for lease in self._filed:
            if lease.ticket is not None and lease.ticket.expected is None:
                lease.ticket.expected = self.queue_waits.wait_of(lease)
        self._filed.clear()
        return learns

    def resume_ms(self, lease: Lease) -> int | None:
        """Return how long the resume of a suspended lease is expected to take, ms; None for any other."""
        device = self._books.devices.get(lease.home_id or "")
        if device is None or not lease.saved_mib:
            return None
        return self.forecasts.swap_ms("resume", device.spec.name, lease.saved_mib)

    def ticket_wait(self, lease: Lease) -> Span | None:
        """Return how long the lease's ticket will still wait."""
        return self.queue_waits.wait_of(lease)


_SLACK_MS = 1_000  # a forecast is shown in seconds, and may be a second old


def shown_span(ticket: Ticket, lease: Lease, worked_out: Span, now_ms: int) -> Span:
    """Return the forecast to show now, and note its upper end. `worked_out`: the rest of the wait as the queue stands."""
    since_ms = lease.since_ms if lease.state is LeaseState.RESUMING else ticket.asked_ms
    promise, waited_ms = ticket.shown, max(0, now_ms - since_ms)
    if promise is None or promise.since_ms != since_ms:
        first_ms = now_ms
        if since_ms == ticket.asked_ms and ticket.expected is not None:
            first_ms = since_ms + ticket.expected.high_ms  # as it was foreseen
        promise = ticket.shown = ShownForecast(since_ms=since_ms, until_ms=first_ms)
    if not promise.missed_ms and now_ms > promise.until_ms + _SLACK_MS:
        promise.missed_ms = max(1, waited_ms)
    span = widened_span(worked_out, waited_ms, promise.missed_ms) if promise.missed_ms else worked_out
    promise.until_ms = now_ms + span.high_ms
    return span


def widened_span(span: Span, waited_ms: int, missed_ms: int) -> Span:
    """Return what is shown of a wait of `waited_ms` that first outlasted its forecast after `missed_ms`."""
    times = max(1, (waited_ms // missed_ms).bit_length())
    return replace(
        span,
        low_ms=max(span.low_ms, waited_ms // 10),
        expected_ms=max(span.expected_ms, waited_ms // 2),
        high_ms=max(span.high_ms, waited_ms * times),
    )
