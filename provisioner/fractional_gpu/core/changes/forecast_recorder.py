"""Has the forecasts learn from what happens to leases, and writes down what was foreseen when a ticket was filed.

One method per thing that happens; `changes`, `lifecycle` and `answers` call them. What takes long and changes no effect of the event it
belongs to is put off until the effects are out: the times of swaps are learnt, and a ticket's wait is foreseen once, if it still waits
after the event that filed it. What is shown to people is worked out anew whenever they ask.

Forecasts of waits that have turned out too short are shown wider.

A forecast says how long a ticket still waits. If the wait outlasts the upper end of what was shown, whatever that was worked out from
has been wrong for this ticket, and the next forecast worked out the same way deserves less trust the longer that goes on. So from then on:

- the upper end is at least the time waited so far, times n; n is 1, and grows by one whenever the wait has doubled since the miss;
- what is expected is at least half of the time waited, and the lower end a tenth: a wait of unknown cause that has lasted for t ends
  within the next t/10 in about one case of ten (as if its length were distributed by Pareto's law with exponent 1).

A resume under way is a wait of its own: the ticket has its room, so only time is needed. If the resume outlasts its forecast, the same
holds for it. Nothing here decides anything: it is about what is shown.
"""

from dataclasses import replace

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease, ShownForecast, Ticket
from fractional_gpu.core.changes.queue_wait import QueueWaitForecast
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.model import LeaseState, Span

__all__ = ["ForecastRecorder", "shown_span", "widened_span"]


class ForecastRecorder:
    """See the module."""

    def __init__(self, books: Books, forecasts: Forecasts, *, parallel_swaps: int = 1) -> None:
        self.forecasts = forecasts
        self.queue_waits = QueueWaitForecast(books, forecasts, parallel_swaps=parallel_swaps)
        self._books = books
        self._filed: list[Lease] = []
        self._swaps: list[tuple[str, str, int, int]] = []  # what `swap_finished` is to be told

    def busy_changed(self, lease: Lease, *, busy: bool) -> None:
        """The lease began or ended to run something."""
        if busy:
            self.forecasts.cell_began(lease.lease_id, self._books.now_ms)
        else:
            self.forecasts.cell_ended(lease.lease_id, self._books.now_ms)

    def became_resident(self, lease: Lease) -> None:
        """The lease is resident from now on: a cell that waited for it begins now."""
        if lease.busy:
            self.forecasts.cell_began(lease.lease_id, self._books.now_ms)

    def swap_finished(self, kind: str, lease: Lease, mib: int, took_ms: int) -> None:
        """The lease's operation ended as it should; it moved so many MiB."""
        device = self._books.devices.get((lease.home_id if kind == "suspend" else lease.device_id) or "")
        if device is not None and mib > 0:
            self._swaps.append((kind, device.spec.name, mib, took_ms))

    def ticket_filed(self, lease: Lease) -> None:
        """The lease has a new ticket."""
        self._filed.append(lease)

    def ticket_served(self, lease: Lease) -> None:
        """The lease has got what its ticket was for."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_ended(ticket.expected, self._books.now_ms - ticket.asked_ms)

    def ticket_given_up(self, lease: Lease) -> None:
        """The lease does not wait any more, and has not got what its ticket was for."""
        ticket = lease.ticket
        if ticket is not None and ticket.expected is not None:
            self.forecasts.wait_given_up(ticket.expected, self._books.now_ms - ticket.asked_ms)

    def lease_ended(self, lease: Lease) -> None:
        """The lease is over."""
        self.forecasts.forget(lease.lease_id)

    def run_deferred_work(self) -> bool:
        """The event is dealt with: learn from its swaps, and foresee the waits of those who asked in it and still wait.

        Returns whether anything was learnt.
        """
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
        """Return how long bringing a suspended lease back is expected to take, ms; None for any other."""
        device = self._books.devices.get(lease.home_id or "")
        if device is None or not lease.saved_mib:
            return None
        return self.forecasts.swap_ms("resume", device.spec.name, lease.saved_mib)

    def ticket_wait(self, lease: Lease) -> Span | None:
        """Return how long the lease's ticket will still wait."""
        return self.queue_waits.wait_of(lease)


_SLACK_MS = 1_000  # a forecast is shown in seconds, and may be a second old


def shown_span(ticket: Ticket, lease: Lease, worked_out: Span, now_ms: int) -> Span:
    """Return the forecast to show now, and note its upper end. `worked_out`: what is left of the wait as the queue stands."""
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
    """Return what is shown of a wait that has lasted so long, and was found to outlast its forecast when it had lasted `missed_ms`."""
    times = max(1, (waited_ms // missed_ms).bit_length())
    return replace(
        span,
        low_ms=max(span.low_ms, waited_ms // 10),
        expected_ms=max(span.expected_ms, waited_ms // 2),
        high_ms=max(span.high_ms, waited_ms * times),
    )
