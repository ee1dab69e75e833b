"""Resizing an existing kernel: at once if possible, otherwise in the queue while the kernel stays in place."""

import dataclasses

import pytest

from fractional_gpu.core.effects import Declined, Effect, Resized
from fractional_gpu.core.events import (
    Attached,
    DeviceSeen,
    HostMemorySeen,
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    ProcessExited,
    ResizeRequested,
    SuspendOutcome,
    SuspendRequested,
)
from fractional_gpu.core.model import LeaseState, Limits
from tests.core.driving import Hand, device, lease_measured, pool, spec


def _resize(hand: Hand, name: str, reserve_mib: int, milli: int = 250) -> list[Effect]:
    return hand.send(
        ResizeRequested(at_ms=hand.now, lease_id=name, fraction_milli=milli, reserve_mib=reserve_mib, request_mib=None)
    )


def _sizes(effects: list[Effect]) -> list[tuple[str, int, int]]:
    return [(one.lease_id, one.reserve_mib, one.reserved_mib) for one in effects if isinstance(one, Resized)]


def _declined(effects: list[Effect]) -> Declined:
    (declined,) = [effect for effect in effects if isinstance(effect, Declined)]
    return declined


def test_a_kernel_without_a_device_has_its_new_size_at_once() -> None:
    hand = Hand()
    hand.start("a", 300)
    effects = _resize(hand, "a", 700, milli=500)
    assert _sizes(effects) == [("a", 700, 0)]
    assert "resize.done" in hand.reasons(effects, "a")
    hand.want("a")
    assert (hand.view("a").reserved_mib, hand.view("a").spec.fraction_milli) == (700, 500)


def test_a_kernel_that_waits_waits_for_its_new_size() -> None:
    hand = Hand()
    hand.run("x", 600)
    hand.start("a", 700)
    hand.want("a")
    assert hand.granted(_resize(hand, "a", 400)) == [("a", "d0")]


def test_smaller_is_at_once_and_lets_others_in() -> None:
    hand = Hand()
    hand.run("a", 800)
    hand.start("b", 500)
    hand.want("b")
    effects = _resize(hand, "a", 500)
    assert _sizes(effects) == [("a", 500, 500)]
    assert hand.granted(effects) == [("b", "d0")]


def test_smaller_than_what_is_used_is_declined_with_the_number() -> None:
    hand = Hand()
    hand.run("a", 800)
    hand.send(lease_measured(0, "a", 600))
    declined = _declined(_resize(hand, "a", 500))
    assert (declined.reason, declined.about) == ("in-use", "resize")
    assert "600 MiB" in declined.sentence
    assert hand.view("a").spec.reserve_mib == 800


def test_smaller_than_what_is_saved_is_declined() -> None:
    hand = Hand()
    hand.idle("a", 800)
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), saved_mib=700)
    assert _declined(_resize(hand, "a", 500)).reason == "in-use"


def test_larger_is_at_once_where_there_is_room() -> None:
    hand = Hand()
    hand.run("a", 300)
    assert _sizes(_resize(hand, "a", 900)) == [("a", 900, 900)]
    assert hand.arbiter.ticket("a") is None
    assert hand.arbiter.devices()[0].reserved_mib == 900


def test_idle_neighbours_step_aside_for_a_kernel_that_grows() -> None:
    hand = Hand()
    hand.idle("b", 600)
    hand.run("a", 300)
    effects = _resize(hand, "a", 700)
    assert (_sizes(effects), hand.suspends(effects)) == ([], ["b"])
    assert hand.ticket("a").reason == "wait.making-room"
    assert _sizes(hand.saved(effects)) == [("a", 700, 700)]


def test_a_kernel_that_grows_has_its_place_in_the_line() -> None:
    hand = Hand(pools=[pool(max_passed_over=0)])
    hand.run("x", 500)
    hand.run("a", 300)
    _resize(hand, "a", 700)
    assert hand.ticket("a").position == 1
    hand.start("b", 200)
    hand.want("b")
    assert hand.ticket("b").reason == "wait.older-ticket"
    effects = hand.send(LeaseReleased(at_ms=0, lease_id="x"))
    assert _sizes(effects) == [("a", 700, 700)]
    assert hand.granted(effects) == [("b", "d0")]


def test_an_idle_kernel_that_may_move_goes_where_it_can_grow() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.run("x", 600)
    hand.idle("a", 400)
    assert hand.view("a").device_id == "d0"
    effects = _resize(hand, "a", 700)
    assert hand.suspends(effects) == ["a"]
    assert "move.grow" in hand.reasons(effects, "a")
    hand.start("late", 400)  # the room there is kept
    assert hand.granted(hand.want("late")) == []
    effects = hand.saved(effects)
    assert _sizes(effects) == [("a", 700, 0)]
    assert hand.resumes(effects) == [("a", "d1")]
    assert hand.view("a").reserved_mib == 700


def test_a_move_that_fails_leaves_the_claim_in_the_line() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.run("x", 600)
    hand.idle("a", 400)
    hand.saved(_resize(hand, "a", 700), SuspendOutcome.REFUSED)
    assert (hand.state("a"), hand.view("a").reserved_mib) == (LeaseState.RESIDENT, 400)
    assert hand.ticket("a").position == 1
    assert _sizes(hand.send(LeaseReleased(at_ms=0, lease_id="x"))) == [("a", 700, 700)]


def test_a_claim_is_true_at_once_when_the_kernel_leaves_its_device_for_other_reasons() -> None:
    hand = Hand()
    hand.run("x", 600)
    hand.idle("a", 400)
    _resize(hand, "a", 700)
    effects = hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")))
    assert _sizes(effects) == [("a", 700, 0)]
    assert hand.arbiter.ticket("a") is None


def test_a_kernel_that_is_wanted_while_its_claim_leaves_with_it_comes_back() -> None:
    hand = Hand()
    hand.run("x", 300)
    hand.idle("a", 400)
    _resize(hand, "a", 701)
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.want("a")
    hand.saved(effects)
    assert hand.ticket("a").need_mib == 701


@pytest.mark.parametrize("end", [ProcessExited, LeaseReleased])
def test_a_claim_ends_with_its_kernel(end: type[ProcessExited | LeaseReleased]) -> None:
    hand = Hand()
    hand.run("x", 600)
    hand.run("a", 300)
    _resize(hand, "a", 700)
    hand.send(end(at_ms=0, lease_id="a"))
    assert hand.arbiter.tickets("p") == []


def test_a_newer_request_replaces_one_that_waits() -> None:
    hand = Hand()
    hand.run("x", 600)
    hand.run("a", 300)
    _resize(hand, "a", 700)
    effects = _resize(hand, "a", 350)
    assert "resize.withdrawn" in hand.reasons(effects, "a")
    assert _sizes(effects) == [("a", 350, 350)]
    assert hand.arbiter.ticket("a") is None


def test_what_can_never_be_is_declined() -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), fractions_milli=(250, 500), user_limits=Limits(milli=400))])
    hand.run("a", 300)
    assert _declined(_resize(hand, "a", 1001)).reason == "larger-than-device"
    assert _declined(_resize(hand, "a", 300, milli=300)).reason == "fraction-not-offered"
    assert _declined(_resize(hand, "a", 300, milli=500)).reason == "user-limit"
    assert _declined(_resize(hand, "a", 0)).reason == "bad-size"


def test_growing_keeps_to_what_the_user_may_have_on_devices() -> None:
    hand = Hand(pools=[dataclasses.replace(pool(), user_limits=Limits(resident_milli=500))])
    hand.run("a", 100)
    hand.run("b", 100)
    assert _sizes(_resize(hand, "a", 200, milli=500)) == []
    assert hand.ticket("a").reason == "wait.user-limit"
    assert _sizes(hand.send(LeaseReleased(at_ms=0, lease_id="b"))) == [("a", 200, 200)]


def test_a_kernel_under_way_is_not_resized() -> None:
    hand = Hand()
    hand.idle("a")
    hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    assert _declined(_resize(hand, "a", 300)).reason == "in-operation"


def test_room_made_for_another_to_grow_is_never_wasted() -> None:
    hand = Hand(pools=[pool(idle_after_ms=60_000)], parallel_swaps=2, host_mib=0)
    hand.idle("a", 400)
    hand.now += 1
    hand.idle("b", 500)
    _resize(hand, "a", 900)
    assert hand.ticket("a").reason == "wait.host-memory"
    hand.wait(60_001)  # both have been idle for this long
    effects = hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=10_000))
    assert hand.suspends(effects) == ["b"], "a is to grow where it is"
    effects = hand.saved(effects)
    assert _sizes(effects) == [("a", 900, 900)]
    assert hand.suspends(effects) == ["a"], "it has idled for long enough, too"


def test_a_larger_share_without_more_memory_needs_no_room_that_is_kept_for_others() -> None:
    hand = Hand(pools=[pool(max_passed_over=0)])
    hand.run("a", 600)
    hand.start("large", 1000)
    hand.want("large")
    assert hand.ticket("large").kept_on == ("d0",)
    assert _sizes(_resize(hand, "a", 600, milli=500)) == [("a", 600, 600)]
    assert hand.view("a").spec.fraction_milli == 500


def test_a_kernel_on_unlike_devices_grows_where_it_is() -> None:
    hand = Hand(device("d0"), device("d1", kind="A"), device("d2", kind="A"), pools=[pool("d0", "d1", "d2")])
    found = dataclasses.replace(spec("a", 200, milli=1000), devices=2)
    both = ("d0", "d1")
    hand.send(
        LeaseRecovered(
            at_ms=0, spec=found, state=LeaseState.RESIDENT, generation=1, device_id="d0", device_ids=both, busy=True
        )
    )
    assert _sizes(_resize(hand, "a", 250, milli=1000)) == [("a", 250, 250)]
    assert hand.arbiter.ticket("a") is None


def test_a_larger_share_that_had_to_wait_for_its_user_takes_no_room_either() -> None:
    hand = Hand(pools=[dataclasses.replace(pool(max_passed_over=0), user_limits=Limits(resident_milli=1000))])
    hand.run("x", 500)
    hand.run("old", 200)
    hand.run("a", 100)
    hand.run("y", 50)
    _resize(hand, "a", 100, milli=500)
    assert hand.ticket("a").reason == "wait.user-limit"
    _resize(hand, "old", 500)
    assert hand.ticket("old").kept_on == ("d0",), "it keeps more than there is"
    assert _sizes(hand.send(LeaseReleased(at_ms=0, lease_id="y"))) == [("a", 100, 100)]


def test_room_that_was_kept_for_a_kernel_is_free_when_it_leaves() -> None:
    hand = Hand(pools=[pool(max_passed_over=0)])
    hand.run("x", 450)
    hand.idle("old", 300)
    hand.run("a", 100)
    _resize(hand, "old", 500)
    effects = _resize(hand, "a", 250)
    assert (hand.suspends(effects), _sizes(effects)) == (["old"], [("a", 250, 250)])


def test_no_lease_leaves_while_room_is_made_for_it_to_grow() -> None:
    hand = Hand(pools=[pool(max_passed_over=0)], parallel_swaps=2, host_mib=0)
    hand.start("a", 100, priority=1)
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    hand.idle("b", 700)
    hand.start("c", 990)
    hand.want("c")
    _resize(hand, "a", 990)
    effects = hand.send(HostMemorySeen(at_ms=0, budget_mib=10_000))
    assert hand.suspends(effects) == ["b"], "a kernel that has waited for long collects room, but not from a"
    assert _sizes(hand.saved(effects)) == [("a", 990, 990)]


def test_a_kernel_that_leaves_while_it_waits_to_grow_has_its_place_from_when_it_was_wanted() -> None:
    hand = Hand()
    hand.run("x", 600)
    hand.idle("a", 400)
    _resize(hand, "a", 700)
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.start("early", 700)
    hand.want("early")
    hand.now = 5
    hand.want("a")
    hand.start("late", 700)
    hand.want("late")
    hand.saved(effects)
    assert [view.lease_id for view in hand.arbiter.tickets("p")] == ["early", "a", "late"]
    assert hand.ticket("a").asked_ms == 5


def test_a_kernel_that_leaves_while_it_waits_to_grow_may_come_back_urgently() -> None:
    hand = Hand()
    hand.run("x", 600)
    hand.idle("a", 400)
    _resize(hand, "a", 700)
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    hand.want("a", urgent=True)
    hand.saved(effects)
    assert hand.ticket("a").urgent


def test_claims_that_make_room_for_each_other_are_all_served_however_many_wait_in_the_wrong_order() -> None:
    hand = Hand(device(memory_mib=910), pools=[dataclasses.replace(pool(), user_limits=Limits(resident_milli=800))])
    hand.send(LeaseRequested(at_ms=0, spec=dataclasses.replace(spec("full", 10), owner="bob")))
    hand.send(Attached(at_ms=0, lease_id="full", gated=True))
    hand.want("full")
    hand.work("full")
    sizes = [
        (200, 100, 190, 110),
        (100, 300, 110, 280),
        (200, 100, 180, 120),
        (100, 300, 120, 270),
        (200, 100, 170, 130),
    ]
    for number, (milli, mib, _, _) in enumerate(sizes):
        hand.start(f"k{number}", mib)
        _resize(hand, f"k{number}", mib, milli=milli)
        hand.want(f"k{number}")
        hand.work(f"k{number}")
    for number, (_, _, milli, mib) in reversed(
        [*enumerate(sizes)]
    ):  # each frees what the one before it in the queue lacks
        assert _sizes(_resize(hand, f"k{number}", mib, milli=milli)) == []
    grown = _sizes(hand.send(LeaseReleased(at_ms=0, lease_id="full")))
    assert grown == [(f"k{number}", mib, mib) for number, (_, _, _, mib) in enumerate(sizes)]


def test_room_that_was_kept_for_an_idle_kernel_to_grow_serves_others_as_soon_as_it_leaves() -> None:
    hand = Hand(pools=[pool(idle_after_ms=60_000, max_passed_over=0, min_residency_ms=120_000)])
    hand.run("x", 700)
    hand.idle("a", 100)
    _resize(hand, "a", 350)
    hand.start("b", 60)
    hand.want("b")
    assert hand.ticket("b").reason == "wait.older-ticket"
    effects = hand.wait(60_000)
    assert hand.suspends(effects) == ["a"]
    assert hand.granted(effects) == [("b", "d0")]


def test_a_kernel_for_which_room_is_gathered_is_not_suspended_for_idling_meanwhile() -> None:
    hand = Hand(pools=[pool(idle_after_ms=60_000, max_passed_over=0)], parallel_swaps=2, host_mib=0)
    hand.idle("a", 300)
    hand.now += 1
    hand.idle("b", 300)
    hand.run("x", 300)
    _resize(hand, "a", 900)
    hand.wait(60_001)  # both have been idle for this long
    effects = hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=10_000))
    assert hand.suspends(effects) == ["b"], "a is to grow where it is, as soon as x is idle, too"
    assert hand.ticket("a").reason == "wait.making-room"


def test_a_kernel_that_room_is_collected_for_makes_no_room_for_later_tickets() -> None:
    rules = dataclasses.replace(pool(max_passed_over=0), preempt_priorities=True)
    hand = Hand(device("d0", 2000), pools=[rules], parallel_swaps=2, host_mib=0)
    for name, reserve_mib in (("a", 400), ("b", 600)):
        hand.start(name, reserve_mib, priority=1)
        hand.want(name)
        hand.work(name)
        hand.rest(name)
        hand.now += 1
    hand.run("x", 700)
    _resize(hand, "a", 990)
    hand.start("behind", 50, priority=1)
    hand.want("behind")
    hand.send(DeviceSeen(at_ms=hand.now, device=device("d0", 1000)))
    effects = hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=10_000))
    assert hand.suspends(effects)[0] == "b"
    assert "a" not in hand.suspends(effects), "b has left for it"
    assert hand.ticket("a").reason == "wait.making-room"
