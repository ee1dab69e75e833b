"""A missed forecast is widened at once, by more the longer the wait lasts, and no wait outlasts many forecasts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.forecasts.forecasts import Forecasts, WaitSpan
from fractional_gpu.core.model import LeaseState, PoolSpec, Span, TicketView
from fractional_gpu.core.queue_wait import shown_span
from fractional_gpu.core.state.leases import Lease, Ticket
from tests.core.driving import device, spec
from tests.core.theatre import FOR_EVER, Actor, Theatre

pytestmark = pytest.mark.promise("overdue")

SLACK_MS = 1_000
STEP_MS = 500


def span(high_ms: int) -> WaitSpan:
    return WaitSpan(expected_ms=high_ms // 2, low_ms=high_ms // 4, high_ms=high_ms, kind="busy", basis_ms=high_ms // 2)


class Law:
    """Checks the forecasts shown during one wait.

    Until one is missed, they are shown as computed. Once one was missed, after `missed` ms of waiting, each forecast's upper
    end is at least the time waited, times one more for each doubling since; the expected value is at least half the time waited.
    """

    def __init__(self) -> None:
        self.misses = 0
        self.missed_ms = 0
        self._until_ms: int | None = None

    def see(self, now_ms: int, waited_ms: int, told: Span) -> None:
        if self._until_ms is not None and now_ms > self._until_ms + SLACK_MS:
            self.misses += 1
            self.missed_ms = self.missed_ms or waited_ms
        if self.missed_ms:
            doublings = (waited_ms // self.missed_ms).bit_length() - 1
            assert told.high_ms >= waited_ms * (1 + doublings), (waited_ms, self.missed_ms, told)
            assert told.expected_ms >= waited_ms // 2
            assert told.low_ms >= waited_ms // 10
        assert told.low_ms <= told.expected_ms <= told.high_ms
        self._until_ms = now_ms + told.high_ms


@given(
    first=st.integers(0, 60_000),
    steps=st.lists(st.tuples(st.integers(1, 60_000), st.integers(0, 10_000)), min_size=1, max_size=60),
)
def test_whatever_is_worked_out_what_is_shown_keeps_the_law(first: int, steps: list[tuple[int, int]]) -> None:
    lease = Lease(spec=spec("a"), state=LeaseState.NO_CONTEXT)
    ticket = lease.ticket = Ticket(order=1, asked_ms=0, expected=span(first))
    law, now_ms = Law(), 0
    law.see(0, 0, span(first))
    for pause_ms, high_ms in steps:
        now_ms += pause_ms
        law.see(now_ms, now_ms, shown_span(ticket, lease, span(high_ms), now_ms))
    # Each further miss needs a wait longer than all forecasts before it: twice, then three times the time of the previous
    # miss.
    assert law.misses <= 2 + max(0, now_ms // max(1, law.missed_ms or 1)).bit_length()


def test_a_resume_is_a_wait_of_its_own() -> None:
    lease = Lease(spec=spec("a"), state=LeaseState.SUSPENDED)
    ticket = lease.ticket = Ticket(order=1, asked_ms=0, expected=span(1_000))
    assert shown_span(ticket, lease, span(1_000), 60_000).high_ms >= 60_000
    lease.state, lease.since_ms = LeaseState.RESUMING, 61_000
    assert shown_span(ticket, lease, span(2_000), 61_000) == span(2_000), "the room is there: only time is needed"
    assert shown_span(ticket, lease, span(500), 70_000).high_ms >= 9_000, "but it hangs"


@pytest.mark.parametrize(
    ("cell_ms", "until_ms"),
    [(lambda: 20, 300_000), (lambda: 700, 600_000), (lambda: 400_000, 1_800_000), (lambda: FOR_EVER, 1_800_000)],
    ids=["tiny", "short", "long", "endless"],
)
def test_beside_every_kind_of_neighbour_the_forecasts_shown_keep_the_law(
    cell_ms: Callable[[], int], until_ms: int
) -> None:
    """A neighbour that always wants its device, in a pool that does not preempt."""
    policy = PoolSpec(name="p", devices=("d0",), fractions_milli=(), idle_after_ms=None, preempt_priorities=False)
    theatre = Theatre([device()], [replace(policy, min_residency_ms=10_000)])
    neighbour = theatre.enter(Actor(spec=spec("a"), cell_ms=cell_ms, gap_ms=lambda: 50))
    theatre.run(30_000)
    waiting = theatre.enter(Actor(spec=spec("b"), cell_ms=lambda: 1_000, gap_ms=lambda: 3_000), at_ms=30_000)
    law, looks = Law(), 0
    asked_ms = -1
    while theatre.now < until_ms:
        theatre.run(theatre.now + STEP_MS)
        ticket: TicketView | None = theatre.arbiter.ticket(waiting.spec.lease_id)
        if ticket is None or ticket.expected is None or theatre.state(waiting) is LeaseState.RESUMING:
            law, asked_ms = Law(), -1
            continue
        if ticket.asked_ms != asked_ms:
            law, asked_ms = Law(), ticket.asked_ms
        law.see(theatre.now, theatre.now - asked_ms, ticket.expected)
        looks += 1
    assert looks or neighbour.suspends, "it waited, or the neighbour made room"


def test_waits_that_are_given_up_teach_that_the_forecast_was_short() -> None:
    forecasts = Forecasts()
    before = forecasts.wait_span("swap", 1_000)
    for _ in range(40):
        given_up = forecasts.wait_span("swap", 1_000)
        forecasts.wait_ended(given_up, 60_000, given_up=True)
    assert forecasts.wait_span("swap", 1_000).high_ms > 5 * before.high_ms
    calm = Forecasts()
    calm.wait_ended(
        WaitSpan(expected_ms=900, low_ms=500, high_ms=2_000, kind="swap", basis_ms=1_000), 1_500, given_up=True
    )
    assert calm.wait_span("swap", 1_000) == before, "it might still have been right"
