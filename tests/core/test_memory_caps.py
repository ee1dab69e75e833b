"""The backstop: a user over the cap is told, and after a short grace the pool's policy is applied."""

from unittest.mock import Mock

import pytest

from fractional_gpu.core.effects import CapBreached, Effect
from fractional_gpu.core.events import DeviceSeen, LeasesMeasured, Measurement, SuspendOutcome, Wanted
from fractional_gpu.core.model import Breach, LeaseState, PoolSpec
from fractional_gpu.core.resize import GRACE_MS, SLACK_MIB
from tests.core.driving import Hand, device, lease_measured

CAP = 600


def hand_of(breach: Breach, memory_mib: int = 1000) -> Hand:
    policy = PoolSpec(name="p", devices=("d0",), fractions_milli=(), idle_after_ms=None, breach=breach)
    return Hand(device(memory_mib=memory_mib), pools=[policy])


def use(hand: Hand, mib: int, name: str = "a") -> list[Effect]:
    return hand.send(lease_measured(hand.now, name, mib))


def breaches(effects: list[Effect]) -> list[Breach]:
    return [effect.action for effect in effects if isinstance(effect, CapBreached)]


def test_a_kernel_over_its_cap_is_told_once_for_each_time() -> None:
    hand = hand_of(Breach.WARN)
    hand.run("a", CAP)
    assert breaches(use(hand, CAP + 100)) == []
    assert breaches(hand.wait(GRACE_MS)) == [Breach.WARN]
    assert breaches(use(hand, CAP + 200)) == []
    assert breaches(hand.wait(10 * GRACE_MS)) == []
    use(hand, CAP)
    use(hand, CAP + 100)
    assert breaches(hand.wait(GRACE_MS)) == [Breach.WARN]
    assert hand.state("a") is LeaseState.RESIDENT


def test_a_sample_counts_for_all_its_leases_and_skips_those_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = hand_of(Breach.WARN, 2000)
    hand.run("a", CAP)
    hand.run("b", CAP)
    scheduler = Mock(wraps=hand.arbiter._scheduler)
    monkeypatch.setattr(hand.arbiter, "_scheduler", scheduler)
    sample = [Measurement(lease_id=name, used_mib=CAP + 100) for name in ("a", "gone", "b")]
    hand.send(LeasesMeasured(at_ms=hand.now, measurements=tuple(sample)))
    scheduler.serve.assert_called_once_with()
    assert breaches(hand.wait(GRACE_MS)) == [Breach.WARN, Breach.WARN]


def test_the_alarm_is_set_for_the_end_of_the_grace() -> None:
    hand = hand_of(Breach.WARN)
    hand.run("a", CAP)
    use(hand, CAP + 100)
    assert hand.observer.wake == hand.now + GRACE_MS


def test_a_moment_over_the_cap_and_what_rounding_adds_are_forgiven() -> None:
    hand = hand_of(Breach.KILL)
    hand.run("a", CAP)
    use(hand, CAP + 100)
    hand.wait(GRACE_MS - 1)
    use(hand, CAP)
    assert breaches(hand.wait(GRACE_MS)) == []
    use(hand, CAP + SLACK_MIB)
    assert breaches(hand.wait(10 * GRACE_MS)) == []


def test_it_is_suspended_as_soon_as_it_is_idle_and_comes_back_where_all_of_it_fits() -> None:
    hand = hand_of(Breach.SUSPEND)
    hand.run("a", CAP)
    use(hand, CAP + 100)
    effects = hand.wait(GRACE_MS)
    assert breaches(effects) == [Breach.SUSPEND]
    assert hand.suspends(effects) == [], "a cell runs"
    effects = hand.rest("a")
    assert hand.suspends(effects) == ["a"], "no ticket needs the room, and minimum residency does not protect"
    assert hand.view("a").reason == "suspend.breach"
    hand.saved(effects, saved_mib=CAP + 100)
    hand.send(DeviceSeen(at_ms=hand.now, device=device(), stranger_mib=350))
    hand.want("a")
    assert hand.state("a") is LeaseState.SUSPENDED, "650 MiB are free and 700 are needed"
    hand.send(DeviceSeen(at_ms=hand.now, device=device(), stranger_mib=0))
    assert hand.state("a") is LeaseState.RESUMING


def test_a_suspend_that_met_a_bad_moment_is_tried_again() -> None:
    hand = hand_of(Breach.SUSPEND)
    hand.run("a", CAP)
    use(hand, CAP + 100)
    hand.wait(GRACE_MS)
    hand.saved(hand.rest("a"), SuspendOutcome.ABORTED)
    assert hand.observer.wake is not None
    assert hand.suspends(hand.wait(hand.observer.wake - hand.now)) == ["a"]


def test_it_is_ended_and_ended_again_if_it_survives() -> None:
    hand = hand_of(Breach.KILL)
    hand.run("a", CAP)
    use(hand, CAP + 100)
    assert breaches(hand.wait(GRACE_MS)) == [Breach.KILL]
    assert breaches(hand.wait(GRACE_MS)) == [Breach.KILL]


def test_what_was_measured_before_a_suspend_does_not_count_after_it() -> None:
    hand = hand_of(Breach.KILL)
    hand.idle("a", CAP)
    use(hand, CAP + 100)
    hand.start("b", CAP)
    hand.now += 1
    hand.saved(hand.send(Wanted(at_ms=hand.now, lease_id="b")), saved_mib=CAP + 100)
    assert breaches(hand.wait(10 * GRACE_MS)) == []
