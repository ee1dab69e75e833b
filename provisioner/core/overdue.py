"""Forecasts of waits that have turned out too short are shown wider.

A forecast says how long a ticket still waits. If the wait outlasts the upper end of what was shown, whatever that was worked out from
has been wrong for this ticket, and the next forecast worked out the same way deserves less trust the longer that goes on. So from then on:

- the upper end is at least the time waited so far, times n; n is 1, and grows by one whenever the wait has doubled since the miss;
- what is expected is at least half of the time waited, and the lower end a tenth: a wait of unknown cause that has lasted for t ends
  within the next t/10 in about one case of ten (as if its length were distributed by Pareto's law with exponent 1).

A resume under way is a wait of its own: the ticket has its room, so only time is needed. If the resume outlasts its forecast, the same
holds for it. Nothing here decides anything: it is about what is shown.
"""

from dataclasses import replace

from provisioner.core.model import LeaseState, Span
from provisioner.core.records import Lease, Promise, Ticket

__all__ = ["shown", "widened"]

_SLACK_MS = 1_000  # a forecast is shown in seconds, and may be a second old


def shown(ticket: Ticket, lease: Lease, worked_out: Span, now_ms: int) -> Span:
    """Return the forecast to show now, and note its upper end. `worked_out`: what is left of the wait as the queue stands."""
    since_ms = lease.since_ms if lease.state is LeaseState.RESUMING else ticket.asked_ms
    promise, waited_ms = ticket.promise, max(0, now_ms - since_ms)
    if promise is None or promise.since_ms != since_ms:
        first_ms = now_ms
        if since_ms == ticket.asked_ms and ticket.expected is not None:
            first_ms = since_ms + ticket.expected.high_ms  # as it was foreseen
        promise = ticket.promise = Promise(since_ms=since_ms, until_ms=first_ms)
    if not promise.missed_ms and now_ms > promise.until_ms + _SLACK_MS:
        promise.missed_ms = max(1, waited_ms)
    span = widened(worked_out, waited_ms, promise.missed_ms) if promise.missed_ms else worked_out
    promise.until_ms = now_ms + span.high_ms
    return span


def widened(span: Span, waited_ms: int, missed_ms: int) -> Span:
    """Return what is shown of a wait that has lasted so long, and was found to outlast its forecast when it had lasted `missed_ms`."""
    times = max(1, (waited_ms // missed_ms).bit_length())
    return replace(
        span,
        low_ms=max(span.low_ms, waited_ms // 10),
        expected_ms=max(span.expected_ms, waited_ms // 2),
        high_ms=max(span.high_ms, waited_ms * times),
    )
