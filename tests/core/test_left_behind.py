"""The leftovers of an ended kernel keep its room, wait in the queue, and are named to the tickets that wait for them."""

from dataclasses import replace

import pytest

from fractional_gpu.core.events import Attached, LeftBehind, ProcessExited
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, pool

pytestmark = pytest.mark.promise("left-behind")

WHAT = "process 7 (train)"
NEVER = replace(pool(), preempt_equals=False, preempt_priorities=False)
FAIR = replace(pool(min_residency_ms=1_000), preempt_equals=True, min_residency_swaps_milli=0)


def left(hand: Hand, name: str) -> None:
    hand.send(LeftBehind(at_ms=hand.now, lease_id=name, what=WHAT))


def test_the_room_is_not_given_away_before_it_is_gone_and_whose_it_is_is_told() -> None:
    hand = Hand(pools=[NEVER])
    hand.idle("a")
    left(hand, "a")
    hand.start("b")
    hand.want("b")
    hand.wait(3_600_000)
    ticket = hand.ticket("b")
    assert (ticket.reason, ticket.blockers) == ("wait.busy-neighbour", ("a",))
    assert f"left {WHAT}" in ticket.sentence
    assert "`jupyter gpu end a`" in ticket.sentence
    hand.send(ProcessExited(at_ms=hand.now, lease_id="a"))
    assert (hand.state("a"), hand.state("b")) == (LeaseState.UNATTACHED, LeaseState.RESIDENT)


def test_saved_leftovers_ask_for_room_and_their_ticket_cannot_be_withdrawn() -> None:
    hand = Hand(pools=[NEVER])
    hand.idle("a")
    hand.start("b")
    hand.saved(hand.want("b"))
    hand.work("b")
    left(hand, "a")
    hand.give_up("a")
    assert hand.ticket("a").position == 1
    hand.restored(hand.saved(hand.rest("b")))
    assert (hand.state("a"), hand.view("a").busy, hand.view("a").left_behind) == (LeaseState.RESIDENT, True, WHAT)


def test_it_takes_turns_where_the_pool_is_fair() -> None:
    hand = Hand(pools=[FAIR])
    hand.run("a")
    left(hand, "a")
    hand.start("b")
    effects = [*hand.want("b"), *hand.wait(600_000)]
    assert hand.suspends(effects) == ["a"]
    hand.saved(effects)
    assert hand.state("b") is LeaseState.RESIDENT
    assert hand.ticket("a").position == 1


def test_a_new_kernel_of_the_lease_has_the_room_at_once() -> None:
    hand = Hand(pools=[NEVER])
    hand.run("a")
    left(hand, "a")
    effects = hand.send(Attached(at_ms=hand.now, lease_id="a", gated=True))
    assert hand.granted(effects) == [("a", "d0")]
    assert hand.view("a").left_behind == ""
    hand.rest("a")
    hand.start("b")
    assert hand.suspends(hand.want("b")) == ["a"], "it is a kernel like others again"
