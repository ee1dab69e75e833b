"""Moves: leases move to other devices so that a waiting one fits, and what happens to the moved ones."""

import dataclasses

from fractional_gpu.core.effects import Effect, Suspend
from fractional_gpu.core.events import (
    DeviceLost,
    DeviceSeen,
    LeaseReleased,
    ResizeRequested,
    SuspendOutcome,
    SuspendRequested,
)
from fractional_gpu.core.model import LeaseState, Limits, PoolSpec
from tests.core.driving import Hand, device, pool

MINIMUM_MS = 10_000


def _pool(*, move_busy: bool = False, may_move: bool = True, count: int = 2) -> PoolSpec:
    ids = [f"d{number}" for number in range(count)]
    plain = pool(*ids, may_move=may_move, min_residency_ms=MINIMUM_MS)
    return dataclasses.replace(plain, move_busy=move_busy, min_residency_swaps_milli=0)


def _hand(policy: PoolSpec, kinds: str = "HHHH") -> Hand:
    return Hand(*(device(name, kind=kind) for name, kind in zip(policy.devices, kinds, strict=False)), pools=[policy])


def _fragmented(hand: Hand) -> None:
    """Leave 400 MiB free on each of two devices next to two busy kernels."""
    for name in ("a", "b"):
        hand.run(name, 600)
    assert {hand.view("a").device_id, hand.view("b").device_id} == {"d0", "d1"}


def _moved(effects: list[Effect]) -> list[tuple[str, bool]]:
    return [(effect.lease_id, effect.preempt) for effect in effects if isinstance(effect, Suspend)]


def _crowded(hand: Hand) -> None:
    """Leave 400 MiB free on each of two devices next to busy kernels: b and c on d0, a on d1; 700 MiB are wanted."""
    for name, mib in (("b", 300), ("c", 300), ("a", 600)):
        hand.run(name, mib)
    if hand.arbiter.lease("large") is None:
        hand.start("large", 700)
    hand.want("large")


def test_a_busy_kernel_is_moved_where_that_lets_another_in() -> None:
    hand = _hand(_pool(move_busy=True))
    _crowded(hand)
    assert hand.observer.wake == MINIMUM_MS
    assert _moved(hand.wait(MINIMUM_MS - 1)) == []
    effects = hand.wait(1)
    assert _moved(effects) == [("b", True)]
    assert "move.defragment" in hand.reasons(effects, "b")


def test_the_one_that_is_moved_is_brought_back_at_once_on_its_target() -> None:
    hand = _hand(_pool(move_busy=True))
    _crowded(hand)
    effects = hand.wait(MINIMUM_MS)
    ticket = hand.ticket("b")
    assert (ticket.position, ticket.kept_on) == (1, ("d1",))
    hand.start("late", 200)  # the room kept on the target is not given away
    assert hand.granted(hand.want("late")) == []
    effects = hand.saved(effects)
    assert hand.resumes(effects) == [("b", "d1")]
    assert hand.granted(effects) == [("large", "d0")]
    hand.restored(effects)
    assert (hand.state("b"), hand.view("b").busy) == (LeaseState.RESIDENT, True)


def test_an_idle_kernel_that_makes_room_goes_where_there_is_room_for_it() -> None:
    hand = _hand(_pool())
    hand.run("x", 600)
    hand.idle("a", 300)
    hand.run("y", 650)
    assert (hand.view("a").device_id, hand.view("y").device_id) == ("d0", "d1")
    hand.start("b", 400)
    effects = hand.want("b")
    assert "move.defragment" in hand.reasons(effects, "a")
    effects = hand.saved(effects)
    assert hand.granted(effects) == [("b", "d0")]
    assert hand.resumes(effects) == [("a", "d1")]


def test_no_busy_lease_is_moved_unless_the_pool_allows_it() -> None:
    for policy in (_pool(), _pool(move_busy=True, may_move=False)):
        hand = _hand(policy)
        _crowded(hand)
        assert _moved(hand.wait(100 * MINIMUM_MS)) == []


def test_no_lease_is_moved_to_another_kind_of_device() -> None:
    hand = _hand(_pool(move_busy=True), kinds="HA")
    _crowded(hand)
    assert _moved(hand.wait(100 * MINIMUM_MS)) == []


def test_no_lease_is_moved_for_nothing() -> None:
    hand = _hand(_pool(move_busy=True))
    _fragmented(hand)
    hand.start("large", 800)
    hand.want("large")
    assert _moved(hand.wait(100 * MINIMUM_MS)) == []


def test_a_moved_lease_whose_target_is_gone_goes_back() -> None:
    hand = _hand(_pool(move_busy=True))
    _crowded(hand)
    effects = hand.wait(MINIMUM_MS)
    hand.send(DeviceLost(at_ms=hand.now, device_id="d1"))
    effects = hand.saved(effects)
    assert hand.resumes(effects) == [("b", "d0")]
    hand.restored(effects)
    assert hand.state("b") is LeaseState.RESIDENT
    assert hand.arbiter.ticket("b") is None


def test_a_move_that_is_rolled_back_leaves_everything_as_it_was_and_another_is_moved() -> None:
    hand = _hand(_pool(move_busy=True))
    _crowded(hand)
    effects = hand.saved(hand.wait(MINIMUM_MS), SuspendOutcome.ABORTED)
    assert (hand.state("b"), hand.arbiter.ticket("b")) == (LeaseState.RESIDENT, None)
    assert _moved(effects) == [("c", True)]


def test_a_busy_kernel_is_moved_for_a_saved_one_too_and_not_merely_preempted() -> None:
    hand = _hand(_pool(move_busy=True))
    hand.idle("large", 700)
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="large")))
    # The request is for 700 MiB, so small leases would avoid two gaps of that size; moving one lease joins the gaps.
    for name, mib in (("a", 600), ("filler", 300), ("b", 300), ("c", 300)):
        hand.run(name, mib)
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="filler"))
    assert [hand.view(name).device_id for name in "abc"] == ["d0", "d1", "d1"]
    hand.want("large")
    effects = hand.wait(MINIMUM_MS)
    assert _moved(effects) == [("b", True)]
    assert "move.defragment" in hand.reasons(effects, "b")
    effects = hand.saved(effects)
    assert hand.resumes(effects) == [("b", "d0")]
    assert hand.resumes(hand.restored(effects)) == [("large", "d1")]


def test_a_moved_lease_whose_users_share_is_taken_waits_like_others() -> None:
    hand = _hand(dataclasses.replace(_pool(), user_limits=Limits(resident_milli=1000)))
    hand.run("x", 600)
    hand.idle("a", 400)
    effects = hand.send(
        ResizeRequested(at_ms=hand.now, lease_id="a", fraction_milli=500, reserve_mib=700, request_mib=None)
    )
    assert "move.grow" in hand.reasons(effects, "a")
    for name in ("y", "z"):  # meanwhile they use up the rest of the share
        hand.run(name, 100)
    effects = hand.saved(effects)
    assert hand.resumes(effects) == []
    assert (hand.ticket("a").reason, hand.ticket("a").kept_on) == ("wait.user-limit", ())
    assert hand.resumes(hand.send(LeaseReleased(at_ms=0, lease_id="z"))) == [("a", "d1")]


def test_no_lease_is_moved_off_a_device_that_does_not_respond() -> None:
    hand = _hand(_pool())
    hand.run("x", 600)
    hand.idle("a", 400)
    hand.send(DeviceLost(at_ms=0, device_id="d0"))
    claim = ResizeRequested(at_ms=0, lease_id="a", fraction_milli=250, reserve_mib=700, request_mib=None)
    assert _moved(hand.send(claim)) == []
    assert _moved(hand.send(DeviceSeen(at_ms=0, device=device("d0")))) == [("a", False)]
