"""A lease whose priority changes during its life: which is served first, and what it keeps."""

import pytest

from fractional_gpu.core.events import PriorityChanged, ProcessExited, ResizeRequested
from fractional_gpu.core.metering.budgets import LAST_PRIORITY
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, device, pool

pytestmark = pytest.mark.promise("budgets")


def change(hand: Hand, name: str, priority: int | None) -> None:
    hand.send(PriorityChanged(at_ms=hand.now, lease_id=name, priority=priority, sentence="its budget"))


def waiting(*names: str) -> Hand:
    """Return a world with one busy kernel and these waiting, in this order."""
    hand = Hand()
    hand.run("holder")
    for name in names:
        hand.start(name)
        hand.want(name)
    return hand


def leave_and_serve(hand: Hand) -> str:
    """End the busy kernel; return the leases let in."""
    effects = hand.rest("holder")
    ((name, _),) = hand.granted(hand.saved(effects))
    return name


@pytest.mark.parametrize("priority", [-1, LAST_PRIORITY])
def test_others_that_asked_later_go_first(priority: int) -> None:
    hand = waiting("over", "other")
    change(hand, "over", priority)
    assert [hand.ticket(name).position for name in ("other", "over")] == [1, 2]
    hand.wait(20_000)
    assert leave_and_serve(hand) == "other"


def test_its_place_by_age_is_its_own_again() -> None:
    hand = waiting("over", "other")
    change(hand, "over", LAST_PRIORITY)
    change(hand, "over", None)
    assert (hand.view("over").spec.priority, hand.view("over").spec.own_priority) == (0, None)
    hand.wait(20_000)
    assert leave_and_serve(hand) == "over"


def test_it_is_served_at_once_while_no_other_waits() -> None:
    hand = Hand()
    hand.start("over")
    change(hand, "over", LAST_PRIORITY)
    assert hand.granted(hand.want("over")) == [("over", "d0")]


def test_a_busy_one_is_no_longer_protected_from_others_of_the_pool() -> None:
    hand = Hand(pools=(pool(min_residency_ms=0),))
    hand.run("over")
    hand.wait(60_000)
    hand.start("other")
    assert hand.suspends(hand.want("other")) == []
    hand.send(PriorityChanged(at_ms=hand.now, lease_id="over", priority=-1, sentence="its budget"))
    assert hand.state("over") is LeaseState.SUSPENDING


def test_the_same_priority_again_is_no_change() -> None:
    hand = Hand()
    hand.start("a")
    change(hand, "a", -1)
    effects = hand.send(PriorityChanged(at_ms=hand.now, lease_id="a", priority=-1, sentence="again"))
    assert hand.reasons(effects, "a") == []
    effects = hand.send(PriorityChanged(at_ms=hand.now, lease_id="a", priority=0, sentence="its own"))
    assert hand.reasons(effects, "a") == ["budget.own-priority"]
    assert hand.view("a").spec.own_priority is None


def test_a_larger_size_that_it_waits_for_keeps_the_new_priority() -> None:
    hand = Hand(device("d0"), device("d1"), pools=(pool("d0", "d1"),))
    hand.run("a", 600)
    hand.send(ResizeRequested(at_ms=hand.now, lease_id="a", fraction_milli=500, reserve_mib=900))
    change(hand, "a", -1)
    hand.wait(1_000)
    assert hand.view("a").spec.priority == -1
    assert hand.view("a").spec.own_priority == 0
    hand.arbiter.validate()


@pytest.mark.parametrize("state", ["no context", "resident", "suspending", "suspended", "resuming"])
def test_it_changes_in_every_state_and_nothing_is_lost(state: str) -> None:
    hand = Hand()
    hand.start("a")
    if state != "no context":
        hand.want("a")
        hand.work("a")
        hand.rest("a")
        hand.wait(60_000)
    if state in {"suspending", "suspended", "resuming"}:
        hand.start("b")
        leaves = hand.want("b")
    if state in {"suspended", "resuming"}:
        hand.saved(leaves)
    if state == "resuming":
        hand.send(ProcessExited(at_ms=hand.now, lease_id="b"))
        comes = hand.want("a")
        assert hand.state("a") is LeaseState.RESUMING
    before = hand.view("a")
    change(hand, "a", LAST_PRIORITY)
    after = hand.view("a")
    assert (after.state, after.saved_mib, after.reserved_mib) == (before.state, before.saved_mib, before.reserved_mib)
    hand.arbiter.validate()
    if state == "suspending":
        hand.saved(leaves)
        assert hand.view("a").saved_mib == 100
    if state == "resuming":
        hand.restored(comes)
        assert hand.state("a") is LeaseState.RESIDENT
