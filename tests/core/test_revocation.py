"""A lease whose seat has ended leaves its device, waits for nothing, and ends on time unless a new seat takes it over."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fractional_gpu.core.effects import Declined, Effect, EndProcesses, LeaseEnded, LeaseRefused
from fractional_gpu.core.events import (
    Attached,
    Checkpointable,
    HostMemorySeen,
    LeaseRequested,
    LeftBehind,
    MoveRequested,
    PinRequested,
    PoolConfigured,
    ProcessExited,
    ResizeRequested,
    ResumeOutcome,
    SeatEnded,
    SeatRenewed,
    SuspendOutcome,
    SuspendRequested,
)
from fractional_gpu.core.model import LeaseState, Limits, ReserveBy
from tests.core.driving import Hand, device, lease_measured, pool, spec

pytestmark = pytest.mark.promise("live-seat")

DAY_MS = 86_400_000


def revoke(hand: Hand, name: str, *, ago_ms: int = 0) -> list[Effect]:
    return hand.send(SeatEnded(at_ms=hand.now, lease_id=name, since_ms=hand.now - ago_ms))


def renew(hand: Hand, name: str) -> list[Effect]:
    return hand.send(SeatRenewed(at_ms=hand.now, lease_id=name, seat="next"))


def test_an_idle_lease_is_suspended_at_once_though_no_ticket_needs_its_room() -> None:
    hand = Hand()
    hand.idle("a")
    effects = revoke(hand, "a")
    assert hand.suspends(effects) == ["a"]
    hand.saved(effects)
    assert hand.state("a") is LeaseState.SUSPENDED


def test_a_running_cell_and_a_pin_keep_it_on_no_device() -> None:
    hand = Hand()
    hand.run("a")
    hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=60_000))
    assert hand.view("a").pinned_until_ms
    effects = revoke(hand, "a")
    assert hand.suspends(effects) == ["a"], "in the middle of its cell, and before its minimum residency is over"
    hand.saved(effects)
    assert hand.arbiter.ticket("a") is None, "its cell waits for no turn"
    assert not hand.view("a").pinned_until_ms


def test_whatever_it_asks_for_it_gets_nothing() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[replace(pool("d0", "d1"), may_move=True)])
    hand.idle("a")
    hand.saved(revoke(hand, "a"))
    assert not hand.resumes(hand.want("a"))
    assert not hand.resumes(hand.want("a", urgent=True))
    for event in (
        PinRequested(at_ms=hand.now, lease_id="a", duration_ms=1_000),
        ResizeRequested(at_ms=hand.now, lease_id="a", fraction_milli=500, reserve_mib=900),
        MoveRequested(at_ms=hand.now, lease_id="a", device_id="d1"),
    ):
        (declined,) = [effect for effect in hand.send(event) if isinstance(effect, Declined)]
        assert declined.reason == "seat-ended", event
    assert hand.state("a") is LeaseState.SUSPENDED


def test_host_memory_that_runs_short_brings_others_back_and_not_this_one() -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(revoke(hand, "a"))
    assert not hand.resumes(hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=1)))


def test_it_counts_for_its_user_and_the_pool_promises_it_nothing() -> None:
    limited = replace(pool(oversubscription_milli=1_000), user_limits=Limits(leases=1))
    hand = Hand(pools=[limited])
    hand.idle("a")
    hand.saved(revoke(hand, "a"))
    (refused,) = [effect for effect in hand.request("b") if isinstance(effect, LeaseRefused)]
    assert refused.reason == "user-limit"
    of_another = LeaseRequested(at_ms=hand.now, spec=replace(spec("c"), owner="bob"))
    assert not [effect for effect in hand.send(of_another) if isinstance(effect, LeaseRefused)]
    renew(hand, "a")
    of_a_third = LeaseRequested(at_ms=hand.now, spec=replace(spec("d"), owner="eve"))
    (full,) = [effect for effect in hand.send(of_a_third) if isinstance(effect, LeaseRefused)]
    assert full.reason == "pool-full", "what was taken over is promised again"


@pytest.mark.parametrize("attached", [False, True])
def test_it_ends_with_its_process(attached: bool) -> None:
    hand = Hand()
    if attached:
        hand.start("a")
        revoke(hand, "a")
        effects = hand.send(ProcessExited(at_ms=hand.now, lease_id="a"))
    else:
        hand.request("a")
        effects = revoke(hand, "a")
    assert [effect.reason for effect in effects if isinstance(effect, LeaseEnded)] == ["seat-ended"]
    assert hand.arbiter.lease("a") is None


def test_what_its_kernel_left_behind_is_suspended_too_and_takes_no_turns() -> None:
    hand = Hand()
    hand.idle("a")
    hand.send(LeftBehind(at_ms=hand.now, lease_id="a", what="process 7 (train)"))
    hand.saved(revoke(hand, "a"))
    assert hand.arbiter.ticket("a") is None
    assert hand.state("a") is LeaseState.SUSPENDED
    assert hand.resumes(renew(hand, "a")) == [("a", "d0")], "with a seat it takes its turns again"


def test_the_next_seat_takes_it_over_and_the_cell_that_was_preempted_goes_on() -> None:
    hand = Hand()
    hand.run("a")
    hand.saved(revoke(hand, "a"))
    effects = renew(hand, "a")
    assert hand.resumes(effects) == [("a", "d0")]
    assert hand.view("a").spec.seat == "next"
    assert not hand.view("a").revoked
    assert hand.view("a").ends_ms is None


def suspending(hand: Hand) -> list[Effect]:
    hand.idle("a")
    effects = hand.send(SuspendRequested(at_ms=hand.now, lease_id="a"))
    hand.work("a")
    hand.want("a")
    return effects


def resuming(hand: Hand) -> list[Effect]:
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")))
    hand.work("a")
    return hand.want("a")


def resuming_what_was_left_behind(hand: Hand) -> list[Effect]:
    effects = resuming(hand)
    hand.send(LeftBehind(at_ms=hand.now, lease_id="a", what="process 7 (train)"))
    return effects


def quarantined(hand: Hand) -> list[Effect]:
    return hand.saved(suspending(hand), SuspendOutcome.UNKNOWN)


def unarmed(hand: Hand) -> list[Effect]:
    hand.run("b", 900)
    hand.start("a")
    hand.work("a")
    return hand.want("a")


@pytest.mark.parametrize("begin", [suspending, resuming, resuming_what_was_left_behind, quarantined, unarmed])
def test_a_busy_one_that_is_taken_over_at_once_waits_again_whatever_it_was_doing(
    begin: Callable[[Hand], list[Effect]],
) -> None:
    hand = Hand()
    effects = begin(hand)
    assert hand.arbiter.ticket("a") is not None
    revoke(hand, "a")
    assert hand.arbiter.ticket("a") is None
    renew(hand, "a")
    if hand.state("a") is LeaseState.SUSPENDING:
        hand.saved(effects)
    elif hand.state("a") is LeaseState.RESUMING:
        hand.restored(effects, ResumeOutcome.NOT_STARTED)
    assert hand.arbiter.ticket("a") is not None


def test_an_idle_one_that_was_taken_over_comes_back_with_its_next_cell() -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(revoke(hand, "a"))
    assert not hand.resumes(renew(hand, "a"))
    assert hand.resumes(hand.want("a")) == [("a", "d0")]


def test_its_processes_are_ended_when_its_time_is_over_and_again_while_they_live() -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(revoke(hand, "a", ago_ms=DAY_MS - 10_000))

    def ends(effects: list[Effect]) -> list[str]:
        return [effect.lease_id for effect in effects if isinstance(effect, EndProcesses)]

    assert not ends(hand.wait(9_999))
    assert ends(hand.wait(1)) == ["a"]
    assert ends(hand.wait(60_000)) == ["a"]
    hand.send(ProcessExited(at_ms=hand.now, lease_id="a"))
    assert not ends(hand.wait(DAY_MS))


def test_one_that_could_not_be_suspended_is_tried_again() -> None:
    hand = Hand(host_mib=0)
    hand.idle("a")
    assert not hand.suspends(revoke(hand, "a"))
    assert hand.state("a") is LeaseState.RESIDENT
    assert hand.suspends(hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=10_000))) == ["a"]


def test_one_that_could_not_leave_waits_again_for_what_it_lacked_when_it_is_taken_over() -> None:
    by_use = replace(pool(), reserve_by=ReserveBy.USE, headroom_mib=0)
    hand = Hand(pools=[by_use])
    hand.run("b", 600)
    hand.send(lease_measured(hand.now, "b", 600))
    hand.send(LeaseRequested(at_ms=hand.now, spec=replace(spec("a", 900), request_mib=100)))
    hand.send(Attached(at_ms=hand.now, lease_id="a", gated=True))
    hand.want("a")
    hand.work("a")
    hand.send(lease_measured(hand.now, "a", 100))
    hand.send(PoolConfigured(at_ms=hand.now, pool=pool()))
    assert hand.arbiter.ticket("a") is not None, (
        "the pool reserves whole caps now, and 400 MiB are there for one of 900"
    )
    hand.send(Checkpointable(at_ms=hand.now, lease_id="a", why_not="it has managed memory"))
    revoke(hand, "a")
    assert (hand.state("a"), hand.arbiter.ticket("a")) == (LeaseState.RESIDENT, None)
    renew(hand, "a")
    assert hand.arbiter.ticket("a") is not None
