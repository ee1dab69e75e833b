"""Pins protect a lease for a time, at the cost of a budget that refills."""

import dataclasses

import pytest

from fractional_gpu.core.effects import Declined, Effect, Pinned
from fractional_gpu.core.events import (
    DeviceDrained,
    LeaseRecovered,
    LeaseReleased,
    PinRequested,
    ProcessExited,
    SuspendRequested,
    UnpinRequested,
)
from fractional_gpu.core.model import LeaseState, PoolSpec
from tests.core.driving import Hand, pool, spec

HOUR_MS = 3_600_000


def _pool(
    *, max_pin_ms: int = 4 * HOUR_MS, budget_ms: int | None = 8 * HOUR_MS, idle_after_ms: int | None = None
) -> PoolSpec:
    return dataclasses.replace(pool(idle_after_ms=idle_after_ms), max_pin_ms=max_pin_ms, pin_budget_ms=budget_ms)


def _pin(hand: Hand, name: str, duration_ms: int = HOUR_MS) -> list[Effect]:
    return hand.send(PinRequested(at_ms=hand.now, lease_id=name, duration_ms=duration_ms))


def _until(effects: list[Effect]) -> int | None:
    return next((effect.until_ms for effect in effects if isinstance(effect, Pinned)), None)


def _declined(effects: list[Effect]) -> Declined | None:
    return next((effect for effect in effects if isinstance(effect, Declined)), None)


def test_a_pinned_kernel_is_no_victim_until_its_pin_ends() -> None:
    hand = Hand(pools=[_pool()])
    hand.idle("a")
    effects = _pin(hand, "a")
    assert _until(effects) == hand.view("a").pinned_until_ms == HOUR_MS
    assert "pin.begun" in hand.reasons(effects, "a")
    hand.start("b")
    assert hand.suspends(hand.want("b")) == []
    assert hand.suspends(hand.wait(HOUR_MS - 1)) == []
    effects = hand.wait(1)
    assert (hand.suspends(effects), _until(effects)) == (["a"], 0)
    assert "pin.over" in hand.reasons(effects, "a")


def test_a_pinned_kernel_is_not_suspended_for_being_idle() -> None:
    hand = Hand(pools=[_pool(idle_after_ms=1_000)])
    hand.idle("a")
    _pin(hand, "a")
    assert hand.suspends(hand.wait(HOUR_MS - 1)) == []
    assert hand.observer.wake == HOUR_MS
    assert hand.suspends(hand.wait(1)) == ["a"]


def test_an_unpinned_kernel_can_leave_at_once() -> None:
    hand = Hand(pools=[_pool(idle_after_ms=0)])
    hand.run("a")
    _pin(hand, "a")
    assert hand.suspends(hand.rest("a")) == []
    assert hand.suspends(hand.send(UnpinRequested(at_ms=hand.now, lease_id="a"))) == ["a"]
    assert hand.view("a").pinned_until_ms == 0


def test_unpinning_what_is_not_pinned_is_answered_all_the_same() -> None:
    hand = Hand()
    hand.idle("a")
    assert _until(hand.send(UnpinRequested(at_ms=hand.now, lease_id="a"))) == 0


def test_a_person_s_suspend_ends_the_pin() -> None:
    hand = Hand(pools=[_pool()])
    hand.idle("a")
    _pin(hand, "a")
    effects = hand.send(SuspendRequested(at_ms=hand.now, lease_id="a"))
    assert (hand.suspends(effects), _until(effects)) == (["a"], 0)


def test_an_emptied_device_ignores_pins() -> None:
    hand = Hand(pools=[_pool()])
    hand.idle("a")
    _pin(hand, "a")
    assert hand.suspends(hand.send(DeviceDrained(at_ms=hand.now, device_id="d0"))) == ["a"]


def test_the_pin_of_a_suspended_kernel_asks_for_nothing_and_counts_once_it_is_back() -> None:
    hand = Hand(pools=[_pool(idle_after_ms=0)])
    hand.run("a")
    hand.saved(hand.rest("a"))
    effects = _pin(hand, "a")
    assert (hand.resumes(effects), hand.arbiter.ticket("a")) == ([], None)
    hand.restored(hand.want("a"))
    assert hand.suspends(hand.wait(HOUR_MS - 1)) == []
    assert hand.suspends(hand.wait(1 + 10_000)) == ["a"]


@pytest.mark.parametrize(
    ("duration_ms", "max_pin_ms", "reason", "said"),
    [
        (5 * HOUR_MS, 4 * HOUR_MS, "pin-too-long", "allows at most 4 h"),
        (HOUR_MS, 0, "pin-too-long", "allows no pins"),
        (0, HOUR_MS, "pin-too-short", "at least a second"),
    ],
)
def test_a_pin_that_cannot_be_is_declined_with_what_is_allowed(
    duration_ms: int, max_pin_ms: int, reason: str, said: str
) -> None:
    hand = Hand(pools=[_pool(max_pin_ms=max_pin_ms)])
    hand.idle("a")
    declined = _declined(_pin(hand, "a", duration_ms))
    assert declined is not None
    assert (declined.reason, declined.about) == (reason, "pin")
    assert said in declined.sentence
    assert hand.view("a").pinned_until_ms == 0


def test_a_kernel_without_a_process_cannot_be_pinned() -> None:
    hand = Hand()
    hand.request("a")
    declined = _declined(_pin(hand, "a"))
    assert declined is not None
    assert declined.reason == "not-alive"


def test_the_budget_is_the_owner_s_and_comes_back_evenly_over_a_day() -> None:
    hand = Hand(pools=[_pool(budget_ms=4 * HOUR_MS)])
    for name in ("a", "b"):
        hand.idle(name, 100)
    assert _declined(_pin(hand, "a", 3 * HOUR_MS)) is None
    declined = _declined(_pin(hand, "b", 2 * HOUR_MS))
    assert declined is not None
    assert declined.reason == "pin-budget"
    assert "1 h left of the 4 h allowed a day" in declined.sentence
    hand.wait(6 * HOUR_MS - 1000)  # a quarter of a day restores a quarter of the budget
    assert _declined(_pin(hand, "b", 2 * HOUR_MS)) is not None
    hand.wait(2000)
    assert _declined(_pin(hand, "b", 2 * HOUR_MS)) is None


def test_what_is_left_of_a_pin_comes_back_when_it_ends_early() -> None:
    hand = Hand(pools=[_pool(budget_ms=4 * HOUR_MS)])
    for name in ("a", "b", "c"):
        hand.idle(name, 100)
    ends = (
        UnpinRequested(at_ms=0, lease_id="a"),
        ProcessExited(at_ms=0, lease_id="b"),
        LeaseReleased(at_ms=0, lease_id="c"),
    )
    for end in ends:
        assert _declined(_pin(hand, end.lease_id, 4 * HOUR_MS)) is None
        hand.send(end)
    hand.idle("d", 100)
    assert _declined(_pin(hand, "d", 4 * HOUR_MS)) is None


def test_a_new_pin_replaces_the_old_one_at_the_price_of_the_difference() -> None:
    hand = Hand(pools=[_pool(budget_ms=4 * HOUR_MS)])
    hand.idle("a")
    _pin(hand, "a", 3 * HOUR_MS)
    assert _until(_pin(hand, "a", 4 * HOUR_MS)) == 4 * HOUR_MS
    assert _until(_pin(hand, "a", HOUR_MS)) == HOUR_MS
    hand.idle("b", 100)
    assert _declined(_pin(hand, "b", 3 * HOUR_MS)) is None


def test_a_pin_that_is_declined_leaves_the_one_there_was() -> None:
    hand = Hand(pools=[_pool(budget_ms=2 * HOUR_MS)])
    hand.idle("a")
    _pin(hand, "a", HOUR_MS)
    assert _declined(_pin(hand, "a", 3 * HOUR_MS)) is not None
    assert hand.view("a").pinned_until_ms == HOUR_MS


def test_a_pin_outlives_the_broker_and_is_still_paid_for() -> None:
    hand = Hand(pools=[_pool(budget_ms=4 * HOUR_MS)])
    hand.send(
        LeaseRecovered(
            at_ms=0,
            spec=spec("a"),
            state=LeaseState.RESIDENT,
            generation=3,
            device_id="d0",
            pinned_until_ms=3 * HOUR_MS,
        )
    )
    assert hand.view("a").pinned_until_ms == 3 * HOUR_MS
    hand.idle("b", 100)
    declined = _declined(_pin(hand, "b", 2 * HOUR_MS))
    assert declined is not None
    assert "1 h left" in declined.sentence
