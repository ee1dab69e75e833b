"""Moves requested by an administrator: the kernel moves at once, or stays and the reason is given."""

import dataclasses

import pytest

from fractional_gpu.core.effects import Declined, Effect, Suspend
from fractional_gpu.core.events import DeviceDrained, MoveRequested, PinRequested, SuspendOutcome, SuspendRequested
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, device, pool


def _hand(*, may_move: bool = True, kinds: str = "HHL") -> Hand:
    ids = [f"d{number}" for number in range(len(kinds))]
    policy = dataclasses.replace(pool(*ids, may_move=may_move), max_pin_ms=60_000)
    return Hand(*(device(name, kind=kind) for name, kind in zip(ids, kinds, strict=True)), pools=[policy])


def _ask(hand: Hand, name: str, to: str | None = None) -> list[Effect]:
    return hand.send(MoveRequested(at_ms=hand.now, lease_id=name, device_id=to))


def _refused(effects: list[Effect]) -> str:
    (declined,) = [effect for effect in effects if isinstance(effect, Declined)]
    assert declined.about == "move"
    assert not [effect for effect in effects if isinstance(effect, Suspend)]
    return declined.reason


@pytest.mark.parametrize("to", ["d1", None])
def test_an_idle_kernel_goes_and_comes_back_on_its_target_by_itself(to: str | None) -> None:
    hand = _hand(kinds="HH")
    hand.idle("a", 600)
    effects = _ask(hand, "a", to)
    assert hand.suspends(effects) == ["a"]
    assert "move.asked" in hand.reasons(effects, "a")
    effects = hand.saved(effects)
    assert hand.resumes(effects) == [("a", "d1")]
    hand.restored(effects)
    assert (hand.state("a"), hand.view("a").device_id) == (LeaseState.RESIDENT, "d1")


def test_room_on_the_target_is_kept_while_it_is_on_its_way() -> None:
    hand = _hand(kinds="HH")
    hand.idle("a", 600)
    moving = _ask(hand, "a", "d1")
    hand.start("late", 600)
    assert hand.granted(hand.want("late")) == [], "what becomes free behind it is not free yet"
    moving = hand.saved(moving)
    assert hand.resumes(moving) == [("a", "d1")]
    assert hand.granted(moving) == [("late", "d0")]


def test_a_move_ends_a_pin_and_says_so() -> None:
    hand = _hand()
    hand.idle("a", 600)
    hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=60_000))
    effects = _ask(hand, "a", "d1")
    assert "pin.ended" in hand.reasons(effects, "a")
    assert hand.view("a").pinned_until_ms == 0


def test_what_cannot_be_moved_stays_with_the_reason() -> None:
    hand = _hand()
    hand.idle("a", 600)
    assert _refused(_ask(hand, "a", "d0")) == "there-already"
    assert _refused(_ask(hand, "a", "d2")) == "other-kind"
    assert _refused(_ask(hand, "a", "elsewhere")) == "other-pool"
    hand.work("a")
    assert _refused(_ask(hand, "a", "d1")) == "busy"
    hand.rest("a")
    hand.run("b", 600)
    assert hand.view("b").device_id == "d1"
    assert _refused(_ask(hand, "a", "d1")) == "no-room"
    assert _refused(_ask(hand, "a")) == "no-room"
    hand.send(DeviceDrained(at_ms=hand.now, device_id="d1"))
    assert _refused(_ask(hand, "a", "d1")) == "device-closed"
    assert hand.view("a").device_id == "d0"


def test_a_pool_whose_driver_cannot_move_refuses() -> None:
    hand = _hand(may_move=False)
    hand.idle("a", 600)
    assert _refused(_ask(hand, "a", "d1")) == "may-not-move"


def test_one_that_is_on_no_device_is_refused() -> None:
    hand = _hand()
    hand.start("a", 600)
    assert _refused(_ask(hand, "a", "d1")) == "not-resident"


def test_while_another_is_under_way_it_is_refused_for_the_moment() -> None:
    hand = _hand()
    hand.idle("a", 400)
    hand.idle("b", 400)
    first = _ask(hand, "a", "d1")
    assert _refused(_ask(hand, "b", "d1")) == "swap-channel"
    hand.restored(hand.saved(first))
    assert hand.suspends(_ask(hand, "b", "d1")) == ["b"]


def test_one_whose_suspend_is_rolled_back_stays_and_waits_for_nothing() -> None:
    hand = _hand()
    hand.idle("a", 600)
    hand.saved(_ask(hand, "a", "d1"), outcome=SuspendOutcome.ABORTED)
    assert (hand.state("a"), hand.view("a").device_id) == (LeaseState.RESIDENT, "d0")
    assert hand.observer.arbiter.ticket("a") is None


@pytest.mark.parametrize("why_no_move", ["", "the driver restores kernels on their own device only"])
def test_a_suspended_kernel_comes_back_elsewhere_only_where_the_driver_can(why_no_move: str) -> None:
    devices = [dataclasses.replace(device(name), why_no_move=why_no_move) for name in ("d0", "d1")]
    hand = Hand(*devices, pools=[pool("d0", "d1", may_move=True)])
    hand.idle("a", 600)
    if why_no_move:
        (declined,) = [effect for effect in _ask(hand, "a", "d1") if isinstance(effect, Declined)]
        assert (declined.reason, declined.sentence) == ("may-not-move", why_no_move)
    hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")))
    hand.run("b", 600)  # takes the first device, which was a's
    assert hand.view("b").device_id == "d0"
    assert hand.resumes(hand.want("a")) == ([] if why_no_move else [("a", "d1")])
