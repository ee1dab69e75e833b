"""Which ticket comes first, which may overtake it and how often, and what room is kept for which ticket."""

import dataclasses

import pytest

from fractional_gpu.core.effects import Effect, Granted
from fractional_gpu.core.events import (
    Attached,
    LeaseReleased,
    LeaseRequested,
    SuspendOutcome,
    SuspendRequested,
    Unwanted,
)
from fractional_gpu.core.model import LeaseState, Limits
from tests.core.driving import Hand, device, pool, spec


def _small(hand: Hand, name: str, reserve_mib: int = 100) -> bool:
    """Make a small kernel want the GPU; return whether it was let in at once."""
    hand.start(name, reserve_mib)
    effects: list[Effect] = hand.want(name)
    hand.work(name)
    return any(isinstance(effect, Granted) and effect.lease_id == name for effect in effects)


def test_first_come_first_served() -> None:
    hand = Hand()
    hand.run("a")
    for name in ("b", "c"):
        hand.start(name)
        hand.want(name)
    assert [(view.lease_id, view.position) for view in hand.arbiter.tickets("p")] == [("b", 1), ("c", 2)]
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert (hand.state("b"), hand.state("c")) == (LeaseState.RESIDENT, LeaseState.NO_CONTEXT)


def test_asking_again_keeps_the_place() -> None:
    hand = Hand()
    hand.run("a")
    for name in ("b", "c", "b"):
        if name not in [view.spec.lease_id for view in hand.arbiter.leases()]:
            hand.start(name)
        hand.want(name)
    assert [view.lease_id for view in hand.arbiter.tickets("p")] == ["b", "c"]


def test_a_higher_priority_comes_first() -> None:
    hand = Hand()
    hand.run("a")
    hand.start("b")
    hand.want("b")
    hand.start("c", priority=1)
    hand.want("c")
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("c") is LeaseState.RESIDENT


def test_an_urgent_ticket_goes_before_others_of_its_priority() -> None:
    hand = Hand()
    hand.run("a")
    for name in ("b", "c"):
        hand.start(name)
        hand.want(name)
    hand.want("c", urgent=True)
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("c") is LeaseState.RESIDENT


@pytest.mark.parametrize("most", [0, 1, 2])
def test_urgent_tickets_pass_another_over_no_more_often_than_may_be(most: int) -> None:
    hand = Hand(pools=[pool(max_passed_over=most)])
    hand.run("a")
    hand.start("old")
    hand.want("old")
    last = "a"
    for number in range(most):
        name = f"u{number}"
        hand.start(name)
        hand.want(name, urgent=True)
        hand.send(LeaseReleased(at_ms=0, lease_id=last))
        assert hand.state(name) is LeaseState.RESIDENT
        hand.work(name)
        last = name
    hand.start("late")
    hand.want("late", urgent=True)
    hand.send(LeaseReleased(at_ms=0, lease_id=last))
    assert hand.state("old") is LeaseState.RESIDENT


def test_urgent_tickets_that_are_served_at_once_pass_another_over_no_more_often_either() -> None:
    hand = Hand(pools=[pool(max_passed_over=1)])
    hand.run("a", 1000)
    hand.start("old", 700)
    hand.want("old")
    for number in range(3):
        hand.start(f"u{number}", 300)
        hand.want(f"u{number}", urgent=True)
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert [hand.state(f"u{number}") is LeaseState.RESIDENT for number in range(3)] == [True, True, False]
    assert hand.ticket("old").kept_on == ("d0",)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_small_ticket_may_overtake_a_large_one_that_many_times(most: int) -> None:
    hand = Hand(pools=[pool(max_passed_over=most)])
    hand.run("a", 600)
    hand.start("large", 1000)
    hand.want("large")
    assert [_small(hand, f"s{number}") for number in range(4)] == [number < most for number in range(4)]
    assert hand.ticket("large").passed_over == most
    if most < 3:
        assert hand.ticket("s3").reason == "wait.older-ticket"


def test_room_that_comes_is_kept_for_a_ticket_passed_over_too_often() -> None:
    hand = Hand(pools=[pool(max_passed_over=1)])
    hand.run("a", 500)
    hand.start("large", 1000)
    hand.want("large")
    assert _small(hand, "s0", 100)
    assert not _small(hand, "s1", 100)
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("s1") is LeaseState.NO_CONTEXT
    hand.send(LeaseReleased(at_ms=0, lease_id="s0"))
    assert hand.state("large") is LeaseState.RESIDENT


def test_several_grants_of_one_event_count_one_by_one() -> None:
    hand = Hand(pools=[pool(max_passed_over=2)])
    hand.run("a", 400)
    hand.run("b", 600)
    hand.start("large", 1000)
    hand.want("large")
    for number in range(4):
        hand.start(f"s{number}", 100)
        hand.want(f"s{number}")
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert [hand.state(f"s{number}") is LeaseState.RESIDENT for number in range(4)] == [True, True, False, False]


def test_room_is_kept_on_one_device_and_the_others_serve_on() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", max_passed_over=1)])
    hand.run("a", 700)
    hand.run("b", 600)
    hand.start("large", 1000)
    hand.want("large")
    assert _small(hand, "s0", 100)
    assert hand.ticket("large").kept_on == ("d1",)
    assert _small(hand, "s1", 100)
    assert hand.view("s1").device_id == "d0"


def test_the_device_where_room_is_kept_stays_the_same() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", max_passed_over=1)])
    hand.run("a", 600)
    hand.run("b", 300)
    hand.run("c", 600)
    hand.start("large", 1000)
    hand.want("large")
    assert _small(hand, "s0", 100)
    assert hand.ticket("large").kept_on == ("d1",)
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))  # now the other device has more room
    assert hand.ticket("large").kept_on == ("d1",)
    assert _small(hand, "s1", 100)
    assert hand.view("s1").device_id == "d0"


def test_a_ticket_that_makes_room_keeps_all_that_it_needs() -> None:
    hand = Hand()
    hand.idle("a", 600)
    hand.start("b", 700)
    effects = hand.want("b")
    assert hand.suspends(effects) == ["a"]
    hand.start("c", 300)
    hand.want("c")
    assert hand.ticket("c").reason == "wait.swap-channel"
    hand.saved(effects)
    assert (hand.state("b"), hand.state("c")) == (LeaseState.RESIDENT, LeaseState.RESIDENT)


def test_two_tickets_do_not_count_on_the_same_victim() -> None:
    hand = Hand()
    hand.idle("a", 500)
    hand.run("x", 500)
    hand.start("b", 500)
    hand.start("c", 500)
    effects = hand.want("b")
    hand.want("c")
    assert hand.ticket("c").reason != "wait.making-room"
    hand.saved(effects)
    assert (hand.state("b"), hand.state("c")) == (LeaseState.RESIDENT, LeaseState.NO_CONTEXT)


def test_room_is_kept_for_a_saved_kernel_that_waits_for_the_channel() -> None:
    hand = Hand()
    hand.idle("a", 400)
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")))
    hand.idle("b", 300)
    hand.send(SuspendRequested(at_ms=0, lease_id="b"))
    hand.want("a")
    assert hand.ticket("a").reason == "wait.swap-channel"
    assert not _small(hand, "c", 400)


def test_a_victim_that_aborts_does_not_cost_a_place() -> None:
    hand = Hand()
    hand.idle("a")
    hand.start("b")
    effects = hand.want("b")
    hand.start("c")
    hand.want("c")
    hand.saved(effects, SuspendOutcome.ABORTED)
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("b") is LeaseState.RESIDENT


def test_a_lease_that_left_the_queue_starts_over() -> None:
    hand = Hand(pools=[pool(max_passed_over=1)])
    hand.run("a", 600)
    hand.start("large", 1000)
    hand.want("large")
    assert _small(hand, "s0")
    hand.send(Unwanted(at_ms=0, lease_id="large"))
    hand.want("large")
    assert (hand.ticket("large").passed_over, hand.ticket("large").kept_on) == (0, ())


def test_no_room_is_kept_where_there_can_never_be_enough() -> None:
    hand = Hand(device("d0", 1000), device("d1", 500), pools=[pool("d0", "d1", max_passed_over=0)])
    hand.run("a", 600)
    hand.start("large", 1000)
    hand.want("large")
    assert hand.ticket("large").kept_on == ("d0",)
    assert _small(hand, "s0", 500)
    assert hand.view("s0").device_id == "d1"


def test_a_ticket_passed_over_often_enough_keeps_free_room_even_while_room_is_made_for_it() -> None:
    hand = Hand(pools=[pool(max_passed_over=1)])
    hand.run("a", 500)
    hand.start("large", 800)
    hand.want("large")
    assert _small(hand, "s0")
    effects = hand.rest("a")
    assert (hand.suspends(effects), hand.ticket("large").reason) == (["a"], "wait.making-room")
    assert not _small(hand, "s1")  # or an abort would cost the large one its room again
    hand.saved(effects)
    assert hand.state("large") is LeaseState.RESIDENT
    assert hand.state("s1") is LeaseState.RESIDENT


def test_an_urgent_ticket_leaves_the_room_that_is_kept_for_an_older_one() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", max_passed_over=1)])
    hand.run("a", 600)
    hand.run("b", 700)
    hand.start("large", 1000)
    hand.want("large")
    assert _small(hand, "s0", 50)
    (kept_on,) = hand.ticket("large").kept_on
    hand.start("u", 250)
    hand.want("u", urgent=True)
    assert hand.view("u").device_id != kept_on


def test_an_urgent_ticket_and_one_that_it_may_not_pass_do_not_block_each_other() -> None:
    hand = Hand(pools=[pool(max_passed_over=0)])
    hand.run("a")
    hand.start("old")
    hand.want("old")
    hand.start("late")
    hand.want("late", urgent=True)
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("old") is LeaseState.RESIDENT
    hand.send(LeaseReleased(at_ms=0, lease_id="old"))
    assert hand.state("late") is LeaseState.RESIDENT


def test_room_is_kept_from_an_older_ticket_no_longer_than_an_urgent_one_waits() -> None:
    hand = Hand(pools=[pool(max_passed_over=1)])
    hand.run("x", 600)
    hand.run("a", 400)
    for name, mib in (("old", 250), ("late", 400), ("urgent", 50)):
        hand.start(name, mib)
        hand.want(name, urgent=name == "urgent")
    effects = hand.send(LeaseReleased(at_ms=0, lease_id="a"))  # the urgent one passes the late one
    assert hand.granted(effects) == [("urgent", "d0"), ("old", "d0")]


def test_an_urgent_ticket_that_is_withdrawn_gives_an_older_one_its_turn_back() -> None:
    policy = dataclasses.replace(pool(max_passed_over=1), user_limits=Limits(resident_milli=300))
    hand = Hand(pools=[policy])

    def ask(name: str, mib: int, *, owner: str = "", urgent: bool = False) -> None:
        what = dataclasses.replace(spec(name, mib), owner=owner or name)
        hand.send(LeaseRequested(at_ms=0, spec=what))
        hand.send(Attached(at_ms=0, lease_id=name, gated=True))
        hand.want(name, urgent=urgent)
        hand.work(name)

    for name, mib, owner in (
        ("first", 20, "ann"),
        ("x", 580, ""),
        ("a", 400, ""),
        ("old", 250, "ann"),
        ("late", 400, ""),
    ):
        ask(name, mib, owner=owner)
    ask("small", 50, urgent=True)
    ask("urgent", 1000, urgent=True)
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))  # only the small one is let in, and the late one was passed over
    assert (hand.ticket("old").reason, hand.ticket("late").passed_over) == ("wait.user-limit", 1)
    assert hand.granted(hand.send(LeaseReleased(at_ms=0, lease_id="first"))) == []
    assert hand.granted(hand.send(Unwanted(at_ms=0, lease_id="urgent"))) == [("old", "d0")]


def test_neighbours_for_which_there_is_no_host_memory_keep_no_other_from_stepping_aside_bit_by_bit() -> None:
    hand = Hand(pools=[pool(max_passed_over=0)], host_mib=75)
    hand.run("x", 600)
    hand.idle("larger", 100)
    hand.wait(600_000)
    hand.idle("smaller", 50)
    for _ in range(20):  # it keeps becoming busy again: the longest-idle lease is the cheapest victim
        hand.now += 1000
        hand.work("smaller")
        hand.rest("smaller")
    hand.start("wide", 800)
    effects = hand.want("wide")
    assert hand.suspends(effects) == ["smaller"]
    assert "is being freed" in hand.view("smaller").sentence


def test_a_lease_that_is_being_resumed_has_no_place_and_is_not_counted_before_those_that_wait() -> None:
    hand = Hand()
    hand.idle("a")
    hand.start("b")
    hand.saved(hand.want("b"))
    hand.work("b")
    hand.want("a")
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="b"))
    assert hand.state("a") is LeaseState.RESUMING
    for name in ("c", "d"):
        hand.start(name)
        hand.want(name)
    views = hand.arbiter.tickets("p")
    assert [(view.lease_id, view.position) for view in views] == [("a", None), ("c", 1), ("d", 2)]
    assert [hand.ticket(name).position for name in "acd"] == [None, 1, 2]
    assert hand.arbiter.queue_lengths() == {"p": 2}
