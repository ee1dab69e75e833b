"""A device that goes away: what can be saved is saved in time, and the users of the rest are told at once."""

import dataclasses

from fractional_gpu.core.effects import Effect, Suspend, UserTold
from fractional_gpu.core.events import (
    Checkpointable,
    DeviceDrained,
    DeviceUndrained,
    LeaseMeasured,
    PinRequested,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
)
from fractional_gpu.core.handlers.salvaging import MARGIN_MS
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, device, pool

LONG = 120_000


def _revoked(hand: Hand, after_ms: int | None, name: str = "d0", *, evict_busy: bool = False) -> list[Effect]:
    deadline_ms = None if after_ms is None else hand.now + after_ms
    return hand.send(DeviceDrained(at_ms=hand.now, device_id=name, evict_busy=evict_busy, deadline_ms=deadline_ms))


def _told(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(effect.lease_id, effect.reason) for effect in effects if isinstance(effect, UserTold)]


def _uses(hand: Hand, name: str, mib: int) -> None:
    hand.send(LeaseMeasured(at_ms=hand.now, lease_id=name, used_mib=mib))


def _takes_ms(hand: Hand, mib: int) -> int:
    span = hand.arbiter.forecasts.swap_span("suspend", "H", mib)
    return span.expected_ms + (span.high_ms - span.expected_ms) // 2


def _at_most_ms(hand: Hand, mib: int) -> int:
    span = hand.arbiter.forecasts.swap_span("suspend", "H", mib)
    return span.expected_ms + 2 * (span.high_ms - span.expected_ms) + span.expected_ms // 4


def test_idle_kernels_are_saved_at_once() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    effects = _revoked(hand, LONG)
    assert hand.suspends(effects) == ["a"]
    assert "suspend.drain" in hand.reasons(effects, "a")
    effects = hand.saved(effects)
    assert hand.suspends(effects) == ["b"]
    assert _told(effects) == []


def test_a_busy_kernel_runs_on_as_long_as_its_save_allows_and_its_user_is_told() -> None:
    hand = Hand()
    hand.run("a")
    _uses(hand, "a", 500)
    effects = _revoked(hand, LONG)
    assert hand.suspends(effects) == []
    assert _told(effects) == [("a", "revocation.interrupts")]
    latest_ms = LONG - MARGIN_MS - _at_most_ms(hand, 500)
    assert hand.suspends(hand.wait(latest_ms - 1)) == []
    effects = hand.wait(1)
    (suspend,) = [effect for effect in effects if isinstance(effect, Suspend)]
    assert (suspend.lease_id, suspend.preempt) == ("a", True)


def test_a_busy_kernel_whose_cell_ends_before_is_not_interrupted() -> None:
    hand = Hand()
    hand.run("a")
    _revoked(hand, LONG)
    hand.wait(5_000)
    (suspend,) = [effect for effect in hand.rest("a") if isinstance(effect, Suspend)]
    assert not suspend.preempt


def test_a_kernel_that_begins_to_work_meanwhile_is_planned_as_a_busy_one() -> None:
    hand = Hand()
    hand.idle("a", 300)
    hand.idle("b", 300)
    first = _revoked(hand, LONG)
    effects = hand.work("b")
    assert _told(effects) == [("b", "revocation.interrupts")]
    assert hand.suspends(hand.saved(first)) == []
    assert hand.suspends(hand.rest("b")) == ["b"]


def test_a_deadline_that_is_too_short_saves_the_work_and_tells_the_other_user_at_once() -> None:
    hand = Hand()
    hand.idle("fresh", 450)
    hand.run("worked", 450)
    hand.wait(3_600_000)
    hand.rest("worked")
    for name in ("fresh", "worked"):
        _uses(hand, name, 450)
    effects = _revoked(hand, MARGIN_MS + _takes_ms(hand, 450) * 3 // 2)
    assert hand.suspends(effects) == ["worked"]
    assert _told(effects) == [("fresh", "revocation.lost")]
    assert "revocation.lost" in hand.reasons(effects, "fresh")
    (told,) = [effect for effect in effects if isinstance(effect, UserTold)]
    assert "Save to disk now" in told.sentence
    assert _told(hand.wait(1)) == [], "once is enough"


def test_a_kernel_that_cannot_be_saved_in_time_is_left_to_its_user_until_the_deadline_and_leaves_if_the_device_is_still_there() -> (
    None
):
    hand = Hand()
    hand.idle("a")
    _uses(hand, "a", 500)
    assert hand.suspends(_revoked(hand, 600)) == []
    assert hand.suspends(hand.wait(599)) == []
    assert hand.suspends(hand.wait(1)) == ["a"], "by the alarm alone"


def test_priority_goes_before_work() -> None:
    hand = Hand()
    hand.start("high", 450, priority=9)
    hand.want("high")
    hand.work("high")
    hand.rest("high")
    hand.run("worked", 450)
    hand.wait(3_600_000)
    hand.rest("worked")
    for name in ("high", "worked"):
        _uses(hand, name, 450)
    effects = _revoked(hand, MARGIN_MS + _takes_ms(hand, 450) * 3 // 2)
    assert (hand.suspends(effects), _told(effects)) == (["high"], [("worked", "revocation.lost")])


def test_a_kernel_that_cannot_be_checkpointed_is_told_so() -> None:
    hand = Hand()
    hand.idle("a")
    _uses(hand, "a", 100)
    hand.send(Checkpointable(at_ms=0, lease_id="a", why_not="it shares memory with another process"))
    (told,) = [effect for effect in _revoked(hand, LONG) if isinstance(effect, UserTold)]
    assert told.reason == "revocation.lost"
    assert "it shares memory with another process" in told.sentence


def test_what_host_memory_does_not_hold_is_told_so() -> None:
    hand = Hand(host_mib=100)
    hand.idle("a")
    (told,) = [effect for effect in _revoked(hand, LONG) if isinstance(effect, UserTold)]
    assert "600 MiB of host memory" in told.sentence


def test_a_notice_that_is_withdrawn_leaves_the_kernels_where_they_are_and_says_so() -> None:
    hand = Hand()
    hand.run("a")
    _revoked(hand, LONG)
    hand.wait(10_000)
    effects = hand.send(DeviceUndrained(at_ms=hand.now, device_id="d0"))
    assert _told(effects) == [("a", "revocation.withdrawn")]
    assert hand.suspends(hand.wait(LONG)) == []
    assert hand.state("a") is LeaseState.RESIDENT
    assert _told(hand.rest("a")) == []


def test_a_drain_without_a_deadline_replaces_one_with_it() -> None:
    hand = Hand()
    hand.run("a")
    _revoked(hand, LONG)
    assert _told(_revoked(hand, None)) == [("a", "revocation.withdrawn")]
    assert hand.suspends(hand.wait(LONG)) == []
    assert hand.suspends(hand.rest("a")) == ["a"]


def test_an_earlier_deadline_replaces_a_later_one() -> None:
    hand = Hand()
    hand.run("a")
    _uses(hand, "a", 100)
    _revoked(hand, LONG)
    _revoked(hand, 10_000)
    assert hand.suspends(hand.wait(10_000 - MARGIN_MS - _at_most_ms(hand, 100))) == ["a"]


def test_busy_kernels_leave_at_once_where_the_administrator_says_so() -> None:
    hand = Hand()
    hand.run("a")
    assert hand.suspends(_revoked(hand, LONG, evict_busy=True)) == ["a"]


def test_a_pin_does_not_hold_a_kernel_on_a_device_that_goes_away() -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), max_pin_ms=3_600_000)])
    hand.idle("a")
    hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=3_600_000))
    assert hand.suspends(_revoked(hand, LONG)) == ["a"]


def test_a_kernel_whose_suspend_failed_is_tried_again_in_its_time() -> None:
    hand = Hand()
    hand.idle("a")
    _uses(hand, "a", 100)
    effects = hand.saved(_revoked(hand, LONG), SuspendOutcome.REFUSED)
    assert hand.suspends(effects) == []
    assert hand.suspends(hand.wait(30_000)) == ["a"]


def test_a_saved_kernel_goes_on_elsewhere_but_not_while_the_channel_is_needed() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.idle("a", 450)
    asked = hand.send(SuspendRequested(at_ms=hand.now, lease_id="a"))
    hand.now += _takes_ms(hand, 450)
    hand.saved(asked, saved_mib=450)
    hand.run("b", 450)
    _uses(hand, "b", 450)
    _revoked(hand, MARGIN_MS + _at_most_ms(hand, 450) + 50)
    assert hand.resumes(hand.want("a")) == [], "its resume would make b too late"
    (suspend,) = [effect for effect in hand.wait(50) if isinstance(effect, Suspend)]
    assert suspend.lease_id == "b"
    done = SuspendFinished(
        at_ms=hand.now,
        lease_id="b",
        operation_id=suspend.operation_id,
        generation=suspend.generation,
        outcome=SuspendOutcome.SAVED,
        saved_mib=450,
    )
    assert hand.resumes(hand.send(done)) == [("a", "d1")]


def test_a_swap_elsewhere_goes_on_while_there_is_time_for_it() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.idle("a", 450)
    hand.run("b", 450)
    first = _revoked(hand, LONG)
    hand.want("a")
    assert hand.resumes(hand.saved(first)) == [("a", "d1")]
