"""A kernel is warned once before it is suspended for being idle, if the pool says so."""

import dataclasses

from fractional_gpu.core.effects import Effect, SuspendAnnounced
from fractional_gpu.core.events import PinRequested
from fractional_gpu.core.model import PoolSpec
from tests.core.driving import Hand, pool


def _pool(*, idle_after_ms: int = 60_000, warn_before_ms: int = 10_000) -> PoolSpec:
    return dataclasses.replace(pool(idle_after_ms=idle_after_ms), warn_before_ms=warn_before_ms)


def _announced(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(one.lease_id, one.at_ms) for one in effects if isinstance(one, SuspendAnnounced)]


def test_the_warning_comes_once_in_its_time_and_the_suspension_when_it_said() -> None:
    hand = Hand(pools=[_pool()])
    hand.idle("a")
    assert hand.observer.wake == 50_000
    effects = hand.wait(50_000)
    assert _announced(effects) == [("a", 60_000)]
    assert "suspend.announced" in hand.reasons(effects, "a")
    assert _announced(hand.wait(9_999)) == []
    assert hand.suspends(hand.wait(1)) == ["a"]


def test_a_kernel_that_runs_after_the_warning_is_warned_again() -> None:
    hand = Hand(pools=[_pool()])
    hand.idle("a")
    hand.wait(50_000)
    hand.work("a")
    hand.rest("a")
    assert hand.suspends(hand.wait(10_000)) == []
    assert _announced(hand.wait(40_000)) == [("a", 110_000)]


def test_a_kernel_pinned_after_the_warning_stays() -> None:
    hand = Hand(pools=[_pool()])
    hand.idle("a")
    hand.wait(50_000)
    hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=600_000))
    assert hand.suspends(hand.wait(590_000)) == []
    assert hand.view("a").pinned_until_ms == 650_000
    assert hand.suspends(hand.wait(10_000)) == ["a"]


def test_a_pause_shorter_than_the_warning_is_announced_at_once() -> None:
    hand = Hand(pools=[_pool(idle_after_ms=5_000)])
    hand.run("a")
    assert _announced(hand.rest("a")) == [("a", 5_000)]


def test_no_warning_comes_from_a_pool_without_warnings_or_one_that_suspends_at_once() -> None:
    for policy in (_pool(warn_before_ms=0), _pool(idle_after_ms=0)):
        hand = Hand(pools=[policy])
        hand.run("a")
        effects = hand.rest("a") + hand.wait(60_000)
        assert _announced(effects) == []
        assert hand.suspends(effects) == ["a"]
