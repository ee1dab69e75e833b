"""Suspended leases come back before their cells ask for them: if there is room, if the swap is short, and never at a ticket's cost."""

from dataclasses import replace

import pytest

from fractional_gpu.core.effects import Effect, WakeAt
from fractional_gpu.core.events import (
    BusyChanged,
    DeviceDrained,
    DeviceUndrained,
    Expected,
    LeaseReleased,
    PinRequested,
    PoolConfigured,
    ProcessExited,
    SuspendRequested,
)
from fractional_gpu.core.model import Foresight, LeaseState, PoolSpec, Sign
from tests.core.driving import Hand, device, lease_measured, pool

S = LeaseState
SOON_MS = 60_000


def policy(*devices: str, foresight: Foresight = Foresight.FREE) -> PoolSpec:
    return replace(pool(*devices), foresight=foresight)


def saved(hand: Hand, name: str, saved_mib: int = 100) -> None:
    """Suspend an idle lease by draining its device for a moment."""
    device_id = hand.view(name).device_id or ""
    hand.saved(hand.send(DeviceDrained(at_ms=hand.now, device_id=device_id)), saved_mib=saved_mib)
    assert hand.state(name) is S.SUSPENDED
    hand.send(DeviceUndrained(at_ms=hand.now, device_id=device_id))


def expect(
    hand: Hand, name: str, *, ms: int = SOON_MS, sign: Sign = Sign.TYPING, confidence_milli: int = 1000
) -> list[Effect]:
    return hand.send(
        Expected(at_ms=hand.now, lease_id=name, until_ms=hand.now + ms, sign=sign, confidence_milli=confidence_milli)
    )


def lapse(hand: Hand) -> list[Effect]:
    return hand.wait(SOON_MS + 1)


@pytest.fixture
def alone() -> Hand:
    """Return one suspended lease, and an empty device."""
    hand = Hand(pools=[policy()])
    hand.idle("a")
    saved(hand, "a")
    return hand


def test_an_expected_lease_comes_back_where_there_is_room_and_its_cell_does_not_wait(alone: Hand) -> None:
    effects = expect(alone, "a")
    assert alone.resumes(effects) == [("a", "d0")]
    assert "resume.expected" in alone.reasons(effects, "a")
    alone.restored(effects)
    assert alone.view("a").came_early
    assert alone.view("a").expected_by == "typing"
    assert alone.granted(alone.want("a")) == [("a", "d0")], "it runs at once"
    assert not alone.view("a").came_early


def test_a_pool_without_foresight_waits_for_the_cell(alone: Hand) -> None:
    alone.send(PoolConfigured(at_ms=0, pool=policy(foresight=Foresight.OFF)))
    assert not alone.resumes(expect(alone, "a"))
    assert not alone.view("a").expected_until_ms


def test_a_sign_that_is_not_sure_enough_does_nothing(alone: Hand) -> None:
    assert not alone.resumes(expect(alone, "a", confidence_milli=200))


def test_no_early_swap_begins_that_takes_longer_than_the_pool_allows(alone: Hand) -> None:
    alone.send(PoolConfigured(at_ms=0, pool=replace(policy(), foresight_swap_ms=100)))
    assert not alone.resumes(expect(alone, "a"))
    assert alone.resumes(alone.send(PoolConfigured(at_ms=0, pool=policy()))) == [("a", "d0")]


def test_nothing_comes_back_early_while_a_ticket_waits() -> None:
    hand = Hand(device("d0"), device("d1", 500), pools=[policy("d0", "d1")])
    hand.idle("a", 300)
    saved(hand, "a")
    hand.run("x")
    hand.start("t")
    hand.want("t")
    assert hand.ticket("t").position == 1
    assert not hand.resumes(expect(hand, "a"))
    assert hand.resumes(hand.give_up("t")) == [("a", "d1")], "as soon as none waits any more"


def test_a_ticket_that_comes_meanwhile_waits_for_the_rest_of_the_swap_and_takes_the_room_at_once(alone: Hand) -> None:
    effects = expect(alone, "a")
    alone.start("t")
    assert alone.want("t")
    effects = alone.restored(effects)
    assert alone.suspends(effects) == ["a"], "no minimum residency keeps a lease that nothing has used"
    alone.saved(effects)
    assert alone.state("t") is S.RESIDENT


def test_a_lease_whose_cell_came_in_the_middle_of_its_early_resume_keeps_its_minimum_residency(alone: Hand) -> None:
    effects = expect(alone, "a")
    alone.want("a")
    alone.start("t")
    alone.want("t")
    assert not alone.suspends(alone.restored(effects))


def test_an_idle_lease_makes_room_only_in_a_pool_that_displaces() -> None:
    for foresight in Foresight:
        hand = Hand(pools=[policy(foresight=foresight)])
        hand.idle("a")
        saved(hand, "a")
        hand.idle("b")
        hand.wait(20_000)
        effects = expect(hand, "a")
        assert bool(hand.suspends(effects)) == (foresight is Foresight.DISPLACE)
    assert "suspend.expected" in hand.reasons(effects, "b")
    assert hand.resumes(hand.saved(effects)) == [("a", "d0")]


def test_a_lease_that_is_expected_itself_makes_no_room() -> None:
    hand = Hand(pools=[policy(foresight=Foresight.DISPLACE)])
    hand.idle("a")
    saved(hand, "a")
    hand.idle("b")
    hand.wait(20_000)
    expect(hand, "b")
    assert not hand.suspends(expect(hand, "a"))


def test_a_busy_or_pinned_lease_keeps_its_room() -> None:
    hand = Hand(pools=[policy(foresight=Foresight.DISPLACE)])
    hand.idle("a")
    saved(hand, "a")
    hand.idle("b")
    hand.wait(20_000)
    hand.send(PinRequested(at_ms=hand.now, lease_id="b", duration_ms=600_000))
    assert not hand.suspends(expect(hand, "a"))
    hand.wait(700_000)
    hand.work("b")
    assert not hand.suspends(expect(hand, "a"))


def test_a_large_lease_makes_no_room_as_its_own_swap_would_take_too_long() -> None:
    hand = Hand(pools=[policy(foresight=Foresight.DISPLACE)])
    hand.idle("a")
    saved(hand, "a")
    hand.idle("b")
    hand.send(lease_measured(hand.now, "b", 20_000))
    hand.wait(20_000)
    assert not hand.suspends(expect(hand, "a"))


def test_wasted_swaps_within_an_hour_are_bounded() -> None:
    hand = Hand(pools=[replace(policy(), foresight_vain_mib=450)])
    hand.idle("a")
    for _ in range(2):  # 100 MiB out and back each time
        saved(hand, "a")
        hand.restored(expect(hand, "a", sign=Sign.HOVER))
        lapse(hand)
    saved(hand, "a")
    assert not hand.resumes(expect(hand, "a"))
    hand.wait(3_600_000)
    assert hand.resumes(expect(hand, "a"))


def test_a_lease_that_the_bound_holds_back_comes_without_another_sign_when_the_hour_is_over() -> None:
    hand = Hand(pools=[replace(policy(), foresight_vain_mib=450)])
    hand.idle("a")
    began_ms = hand.now
    for _ in range(2):
        saved(hand, "a")
        hand.restored(expect(hand, "a", sign=Sign.HOVER))
        lapse(hand)
    saved(hand, "a")
    hand.wait(began_ms + 3_600_000 - SOON_MS // 2 - hand.now)
    assert not hand.resumes(expect(hand, "a"))
    assert hand.observer.wake == began_ms + 3_600_000
    assert hand.resumes(hand.wait(hand.observer.wake - hand.now))


def test_an_early_resume_that_a_cell_follows_costs_nothing_of_the_bound() -> None:
    hand = Hand(pools=[replace(policy(), foresight_vain_mib=200)])
    hand.idle("a")
    for _ in range(5):
        saved(hand, "a")
        hand.restored(expect(hand, "a"))
        hand.want("a")
        hand.work("a")
        hand.rest("a")


def test_a_sign_that_deceives_loses_its_weight_and_can_win_it_back(alone: Hand) -> None:
    for _ in range(20):
        effects = expect(alone, "a", sign=Sign.WIDGET)
        if alone.state("a") is S.RESUMING:
            alone.restored(effects)
        lapse(alone)
        if alone.state("a") is S.RESIDENT:
            saved(alone, "a")
    assert not alone.resumes(expect(alone, "a", sign=Sign.WIDGET)), "it was never right"
    effects = expect(alone, "a", sign=Sign.TYPING)
    assert alone.resumes(effects), "which says nothing of other signs"
    alone.restored(effects)
    for _ in range(20):
        alone.work("a")
        alone.rest("a")
        expect(alone, "a", sign=Sign.WIDGET)
    alone.work("a")
    alone.rest("a")
    saved(alone, "a")
    assert alone.resumes(expect(alone, "a", sign=Sign.WIDGET))


@pytest.mark.parametrize("sign", list(Sign))
def test_a_lease_whose_user_sent_it_away_stays_away_until_a_cell_asks(sign: Sign) -> None:
    hand = Hand(pools=[policy()])
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")))
    assert hand.resumes(expect(hand, "a", sign=sign)) == []
    hand.wait(SOON_MS // 2)
    assert (hand.state("a"), hand.view("a").expected_until_ms) == (S.SUSPENDED, 0)
    assert hand.resumes(hand.want("a")) == [("a", "d0")]


def test_an_expected_lease_is_not_suspended_for_being_idle_meanwhile() -> None:
    hand = Hand(pools=[replace(policy(), idle_after_ms=1_000, min_residency_ms=0)])
    hand.idle("a")
    expect(hand, "a")
    assert not hand.suspends(hand.wait(30_000))
    assert hand.suspends(hand.wait(40_000)) == ["a"]


def test_a_cell_that_is_asked_for_and_never_runs_does_not_put_the_alarm_off() -> None:
    hand = Hand(pools=[replace(policy(), idle_after_ms=1_000, min_residency_ms=0)])
    hand.idle("a")
    expect(hand, "a")
    hand.wait(5_000)
    (wake,) = [effect for effect in hand.want("a") if isinstance(effect, WakeAt)]
    assert wake.at_ms == hand.now + 1_000, "not when the expectation would have lapsed"


def test_an_expected_lease_is_the_dearer_victim() -> None:
    hand = Hand(device("d0", 1300), pools=[policy()])
    hand.idle("a")
    hand.idle("b")
    hand.wait(20_000)
    expect(hand, "a")
    hand.start("t")
    assert hand.suspends(hand.want("t")) == ["b"], "though the other was used less recently"


def test_a_lease_with_a_rhythm_is_back_when_its_next_cell_is_likely() -> None:
    hand = Hand(pools=[policy()])
    hand.idle("a")
    for _ in range(14):
        hand.wait(300_000)
        hand.want("a")
        hand.work("a")
        hand.rest("a")
    hand.start("b")
    hand.saved(hand.want("b"))
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="b"))
    began_ms, effects = hand.now, list[Effect]()
    while not hand.resumes(effects) and hand.observer.wake is not None:
        effects = hand.wait(hand.observer.wake - hand.now)
    assert "resume.expected" in hand.reasons(effects, "a")
    assert 200_000 <= hand.now - began_ms <= 300_000
    hand.restored(effects)
    assert hand.view("a").expected_by == "rhythm"


def test_a_lease_whose_process_ends_is_expected_no_more(alone: Hand) -> None:
    alone.send(PoolConfigured(at_ms=0, pool=replace(policy(), foresight_swap_ms=1)))
    expect(alone, "a")
    alone.send(ProcessExited(at_ms=alone.now, lease_id="a"))
    assert not alone.view("a").expected_until_ms
    lapse(alone)


def test_a_cell_behind_a_completion_is_the_expected_one_and_the_completion_is_not(alone: Hand) -> None:
    effects = expect(alone, "a", sign=Sign.COMPLETION)
    alone.send(BusyChanged(at_ms=alone.now, lease_id="a", busy=True, by_cell=False))
    alone.restored(effects)
    assert alone.view("a").came_early
    alone.send(BusyChanged(at_ms=alone.now, lease_id="a", busy=True))
    assert not alone.view("a").came_early
    assert not alone.view("a").expected_until_ms


def test_a_sign_that_is_taken_back_lets_an_idle_lease_leave_at_once() -> None:
    hand = Hand(pools=[replace(policy(), idle_after_ms=1_000, min_residency_ms=0)])
    hand.idle("a")
    expect(hand, "a")
    assert not hand.suspends(hand.wait(30_000))
    assert hand.suspends(expect(hand, "a", confidence_milli=0)) == ["a"]
