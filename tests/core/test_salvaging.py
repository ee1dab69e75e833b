"""A device that goes away: what can be saved is saved in time, and the users of everything else are told at once."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.effects import Effect, Suspend, UserNotice, WakeAt
from fractional_gpu.core.events import (
    Checkpointable,
    DeviceDrained,
    DeviceUndrained,
    PinRequested,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
)
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.revoke import LEAST_RETRY_MS, MARGIN_MS
from tests.core.driving import Hand, device, lease_measured, pool

pytestmark = pytest.mark.promise("revocation")

LONG = 120_000


def _revoked(hand: Hand, after_ms: int | None, name: str = "d0", *, evict_busy: bool = False) -> list[Effect]:
    deadline_ms = None if after_ms is None else hand.now + after_ms
    return hand.send(DeviceDrained(at_ms=hand.now, device_id=name, evict_busy=evict_busy, deadline_ms=deadline_ms))


def _told(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(effect.lease_id, effect.reason) for effect in effects if isinstance(effect, UserNotice)]


def _uses(hand: Hand, name: str, mib: int) -> None:
    hand.send(lease_measured(hand.now, name, mib))


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
    (told,) = [effect for effect in effects if isinstance(effect, UserNotice)]
    assert "Save what you need to disk now" in told.sentence
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


def test_views_say_what_becomes_of_each_lease_until_the_notice_is_withdrawn() -> None:
    hand = Hand()
    hand.idle("fresh", 450)
    hand.run("worked", 450)
    hand.wait(3_600_000)
    hand.rest("worked")
    for name in ("fresh", "worked"):
        _uses(hand, name, 450)
    deadline_ms = hand.now + MARGIN_MS + _takes_ms(hand, 450) * 3 // 2
    _revoked(hand, deadline_ms - hand.now)
    assert [hand.view(name).deadline_ms for name in ("fresh", "worked")] == [deadline_ms] * 2
    assert hand.view("worked").lost_because == "", "it is being saved"
    assert "is expected to take" in hand.view("fresh").lost_because
    hand.send(DeviceUndrained(at_ms=hand.now, device_id="d0"))
    for name in ("fresh", "worked"):
        assert (hand.view(name).deadline_ms, hand.view(name).lost_because) == (None, "")


def test_a_lease_in_doubt_counts_as_lost_and_one_that_is_saved_has_no_deadline_any_more() -> None:
    hand = Hand()
    hand.idle("doubt", 300)
    hand.idle("saved", 300)
    effects = hand.saved(_revoked(hand, LONG), SuspendOutcome.UNKNOWN)
    hand.saved(effects)
    assert hand.view("doubt").lost_because == "the state of its GPU memory is unknown"
    assert (hand.view("saved").deadline_ms, hand.view("saved").lost_because) == (None, "")


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
    (told,) = [effect for effect in _revoked(hand, LONG) if isinstance(effect, UserNotice)]
    assert told.reason == "revocation.lost"
    assert "it shares memory with another process" in told.sentence


def test_what_host_memory_does_not_hold_is_told_so() -> None:
    hand = Hand(host_mib=100)
    hand.idle("a")
    (told,) = [effect for effect in _revoked(hand, LONG) if isinstance(effect, UserNotice)]
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


@pytest.mark.parametrize("outcome", [SuspendOutcome.REFUSED, SuspendOutcome.ABORTED])
def test_a_suspend_that_failed_is_tried_again_after_a_second_then_after_two_though_the_pool_would_wait_longer(
    outcome: SuspendOutcome,
) -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), retry_refused_ms=600_000)])
    hand.idle("a")
    _uses(hand, "a", 100)
    effects = hand.saved(_revoked(hand, LONG), outcome)
    for pause_ms in (1_000, 2_000, 4_000):
        assert (hand.suspends(effects), _told(effects)) == ([], [])
        assert hand.suspends(hand.wait(pause_ms - 1)) == []
        effects = hand.wait(1)
        assert hand.suspends(effects) == ["a"], "by the alarm alone"
        effects = hand.saved(effects, outcome)


def test_the_last_attempt_comes_while_there_is_just_time_for_it_and_then_its_user_is_told() -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), retry_refused_ms=600_000)])
    hand.idle("a")
    _uses(hand, "a", 100)
    after_ms = MARGIN_MS + _takes_ms(hand, 100) + 1_600
    deadline_ms = hand.now + after_ms
    effects, begun = _revoked(hand, after_ms), []
    while hand.now < deadline_ms and not _told(effects):
        if hand.suspends(effects):
            begun.append(deadline_ms - hand.now)
            effects = hand.saved(effects, SuspendOutcome.REFUSED)
        else:
            effects = hand.wait(1)
    assert begun[:3] == [after_ms, after_ms - 800, after_ms - 1_200]
    assert begun[-1] >= MARGIN_MS + _takes_ms(hand, 100), "none that cannot end in time"
    assert begun[-1] - MARGIN_MS - _takes_ms(hand, 100) < 2 * LEAST_RETRY_MS
    (told,) = [effect for effect in effects if isinstance(effect, UserNotice)]
    assert told.reason == "revocation.lost"
    assert f"saving it failed {len(begun)} times" in told.sentence


def test_a_pause_that_began_before_the_deadline_was_announced_is_cut_short() -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), retry_refused_ms=600_000)])
    hand.idle("a")
    _uses(hand, "a", 100)
    hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")), SuspendOutcome.REFUSED)
    hand.wait(5_000)
    assert hand.suspends(_revoked(hand, LONG)) == []
    assert hand.suspends(hand.wait(1_000)) == ["a"]


@given(
    spare_ms=st.integers(0, 60_000),
    refused=st.lists(st.sampled_from([SuspendOutcome.REFUSED, SuspendOutcome.ABORTED]), min_size=1, max_size=40),
    takes_ms=st.integers(0, 2_000),
)
def test_attempts_before_a_deadline_are_bounded_and_none_begins_that_cannot_end_in_time(
    spare_ms: int, refused: list[SuspendOutcome], takes_ms: int
) -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), retry_refused_ms=600_000)])
    hand.idle("a")
    _uses(hand, "a", 100)
    need_ms = MARGIN_MS + _takes_ms(hand, 100)
    deadline_ms = hand.now + need_ms + spare_ms
    effects, attempts = _revoked(hand, need_ms + spare_ms), 0
    for outcome in refused:
        while not hand.suspends(effects) and not _told(effects):
            at_ms = next(one.at_ms for one in reversed(effects) if isinstance(one, WakeAt) and one.at_ms is not None)
            effects = hand.wait(at_ms - hand.now)
        if _told(effects):
            break
        attempts += 1
        assert hand.now + need_ms <= deadline_ms
        hand.now += takes_ms
        effects = hand.saved(effects, outcome)
        if hand.now >= deadline_ms:
            return
    assert attempts <= 2 + (spare_ms // LEAST_RETRY_MS).bit_length() + (spare_ms // 1_000).bit_length()


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
