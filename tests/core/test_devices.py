"""Devices that are lost, found again, used by other processes or moved between pools; leases that a new broker finds."""

from dataclasses import replace

import pytest

from fractional_gpu.core.effects import Resume
from fractional_gpu.core.events import (
    DeviceLost,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseRecovered,
    LeaseReleased,
    PoolConfigured,
    ProcessExited,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
    Tick,
)
from fractional_gpu.core.model import LeaseState
from tests.core.driving import Hand, device, lease_measured, pool, spec


def _recovered(name: str, state: LeaseState, *, in_pool: str = "p", device_id: str | None = "d0") -> Event:
    return LeaseRecovered(
        at_ms=0, spec=spec(name, in_pool=in_pool), state=state, generation=7, device_id=device_id, saved_mib=200
    )


def test_a_lost_device_admits_no_lease_until_it_is_seen_again() -> None:
    hand = Hand()
    hand.send(DeviceLost(at_ms=0, device_id="d0"))
    hand.start("a")
    hand.want("a")
    assert hand.ticket("a").reason == "wait.device-lost"
    hand.send(DeviceSeen(at_ms=0, device=device()))
    assert hand.state("a") is LeaseState.RESIDENT


def test_nothing_is_suspended_on_a_lost_device() -> None:
    hand = Hand(pools=[pool(idle_after_ms=1_000)])
    hand.idle("a")
    hand.send(DeviceLost(at_ms=0, device_id="d0"))
    assert hand.suspends(hand.wait(1_000)) == []
    effects = hand.send(SuspendRequested(at_ms=hand.now, lease_id="a"))
    assert hand.reasons(effects, "a") == ["declined.device-lost"]
    assert hand.suspends(hand.send(DeviceSeen(at_ms=hand.now, device=device()))) == ["a"]


def test_a_stranger_over_commits_a_device_and_no_lease_is_admitted_until_it_fits() -> None:
    hand = Hand()
    hand.run("a", 300)
    hand.send(DeviceSeen(at_ms=0, device=device(), stranger_mib=800))
    assert hand.arbiter.devices()[0].over_committed
    hand.start("b", 100)
    hand.want("b")
    assert hand.state("b") is LeaseState.NO_CONTEXT
    hand.send(DeviceSeen(at_ms=0, device=device(), stranger_mib=600))
    assert hand.state("b") is LeaseState.RESIDENT


def test_a_ticket_that_only_strangers_keep_out_says_so() -> None:
    hand = Hand()
    hand.send(DeviceSeen(at_ms=0, device=device(), stranger_mib=800))
    hand.start("a")
    hand.want("a")
    assert hand.ticket("a").reason == "wait.stranger"


def test_a_device_that_leaves_its_pool_takes_no_newcomers_and_keeps_its_leases() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1")])
    hand.run("a")
    hand.send(PoolConfigured(at_ms=0, pool=pool("d1")))
    hand.run("b")
    assert (hand.view("a").device_id, hand.view("b").device_id) == ("d0", "d1")
    hand.start("c")
    hand.want("c")
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("c") is LeaseState.NO_CONTEXT


def test_saved_state_goes_home_though_its_home_has_left_the_pool() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1")])
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")))
    hand.send(PoolConfigured(at_ms=0, pool=pool("d1")))
    assert hand.resumes(hand.want("a")) == [("a", "d0")]


def test_saved_state_that_may_move_leaves_a_home_that_has_left_the_pool() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", may_move=True)])
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")))
    hand.send(PoolConfigured(at_ms=0, pool=pool("d1", may_move=True)))
    assert hand.resumes(hand.want("a")) == [("a", "d1")]


def test_an_idle_kernel_of_the_old_pool_steps_aside_for_one_of_the_new() -> None:
    hand = Hand(device("d0"), pools=[pool("d0"), pool("d9", name="q")])
    hand.idle("a")
    hand.send(PoolConfigured(at_ms=0, pool=pool("d9")))
    hand.send(PoolConfigured(at_ms=0, pool=pool("d0", name="q")))
    hand.send(_recovered("b", LeaseState.NO_CONTEXT, in_pool="q"))
    assert hand.suspends(hand.want("b")) == ["a"]


# -- what a new broker finds -----------------------------------------------------------------------------------------------------------


def test_a_recovery_may_over_commit_a_device_and_then_no_lease_is_admitted() -> None:
    hand = Hand()
    hand.send(_recovered("a", LeaseState.RESIDENT))
    hand.send(_recovered("b", LeaseState.RESIDENT))
    assert hand.arbiter.devices()[0].over_committed
    hand.start("c", 1)
    hand.want("c")
    assert hand.state("c") is LeaseState.NO_CONTEXT
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert hand.state("c") is LeaseState.RESIDENT


def test_an_over_committed_device_is_relieved_enough_for_a_ticket() -> None:
    hand = Hand()
    hand.send(_recovered("a", LeaseState.RESIDENT))
    hand.send(_recovered("b", LeaseState.RESIDENT))
    hand.wait(10_000)
    hand.start("c", 500)
    effects = hand.want("c")
    assert hand.suspends(effects) == ["a"]
    effects = hand.saved(effects)
    assert hand.suspends(effects) == ["b"]
    hand.saved(effects)
    assert hand.state("c") is LeaseState.RESIDENT


def test_a_recovered_reservation_counts_when_its_device_is_seen_later() -> None:
    hand = Hand(pools=[pool("d0", "d1")])
    hand.send(_recovered("a", LeaseState.RESIDENT, device_id="d1"))
    hand.send(DeviceSeen(at_ms=0, device=device("d1")))
    assert [view.reserved_mib for view in hand.arbiter.devices()] == [0, 600]


@pytest.mark.parametrize("state", [LeaseState.RESIDENT, LeaseState.SUSPENDED])
def test_a_resident_or_saved_lease_without_a_device_is_rejected(state: LeaseState) -> None:
    hand = Hand()
    hand.send(_recovered("a", state, device_id=None))
    assert hand.state("a") is LeaseState.QUARANTINED


@pytest.mark.parametrize("state", [LeaseState.SUSPENDING, LeaseState.RESUMING, LeaseState.ENDED])
def test_a_recovery_in_a_state_that_cannot_be_found_is_refused_and_changes_nothing(state: LeaseState) -> None:
    hand = Hand()
    with pytest.raises(ValueError, match="expected quarantined, resident, suspended, unarmed, unattached"):
        hand.arbiter.handle(_recovered("a", state))
    assert hand.arbiter.leases() == []
    hand.wait(1)


def test_a_second_recovery_of_a_lease_is_ignored() -> None:
    hand = Hand()
    hand.send(_recovered("a", LeaseState.RESIDENT))
    assert hand.send(_recovered("a", LeaseState.SUSPENDED)) == []


def test_generations_go_on_where_the_ledger_was() -> None:
    hand = Hand()
    hand.send(_recovered("a", LeaseState.SUSPENDED))
    assert hand.view("a").generation == 8


def test_a_saved_kernel_whose_pool_is_gone_still_comes_home() -> None:
    hand = Hand()
    hand.send(_recovered("a", LeaseState.SUSPENDED, in_pool="gone"))
    assert hand.resumes(hand.want("a")) == [("a", "d0")]


def test_an_unarmed_kernel_whose_pool_is_gone_is_told_so() -> None:
    hand = Hand()
    hand.send(_recovered("a", LeaseState.NO_CONTEXT, in_pool="gone"))
    hand.want("a")
    assert hand.ticket("a").reason == "wait.no-pool"


def test_a_kernel_whose_pool_is_gone_survives_a_suspend_that_is_aborted() -> None:
    hand = Hand()
    hand.send(_recovered("a", LeaseState.RESIDENT, in_pool="gone"))
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), SuspendOutcome.ABORTED)
    assert hand.state("a") is LeaseState.RESIDENT


def test_an_unattached_kernel_whose_pool_is_gone_has_time_to_come_back() -> None:
    hand = Hand()
    hand.send(_recovered("a", LeaseState.UNATTACHED, in_pool="gone"))
    assert hand.state("a") is LeaseState.UNATTACHED


def test_time_never_goes_back() -> None:
    hand = Hand(pools=[pool(idle_after_ms=5_000)])
    hand.send(Tick(at_ms=1_000))
    hand.idle("a")
    hand.send(Tick(at_ms=0))
    assert hand.suspends(hand.send(Tick(at_ms=5_999))) == []
    assert hand.suspends(hand.send(Tick(at_ms=6_000))) == ["a"]


def test_an_event_of_another_version_is_refused() -> None:
    with pytest.raises(TypeError, match="does not recognise the event Event"):
        Hand().arbiter.handle(Event(at_ms=0))


def test_host_memory_that_shrinks_takes_nothing_away() -> None:
    hand = Hand()
    hand.idle("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), saved_mib=500)
    hand.run("b")
    hand.send(HostMemorySeen(at_ms=0, budget_mib=0))
    assert (hand.state("a"), hand.arbiter.host_saved_mib) == (LeaseState.SUSPENDED, 500)
    hand.send(ProcessExited(at_ms=0, lease_id="b"))
    assert hand.state("a") is LeaseState.RESUMING, "a device has room and the host has none: it comes back early"


@pytest.mark.promise("race-size")
@pytest.mark.parametrize("bigger", [False, True], ids=["grew", "overhead-was-raised"])
def test_what_grew_into_the_overhead_comes_back_to_a_device_of_its_own(bigger: bool) -> None:
    """Its old device had that much memory, so the kernel must not wait for ever just because a lease may now have less."""
    before, after = (0, 100) if bigger else (100, 100)
    hand = Hand(replace(device("d0", 1000), overhead_mib=before))
    hand.idle("a", 1000 - before)
    hand.send(lease_measured(0, "a", 980))
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), saved_mib=980)
    hand.send(DeviceSeen(at_ms=0, device=replace(device("d0", 1000), overhead_mib=after)))
    hand.idle("b", 100)
    assert hand.suspends(hand.want("a")) == ["b"], "it needs the device for itself"
    effects = hand.send(
        SuspendFinished(
            at_ms=0, lease_id="b", operation_id=2, generation=hand.view("b").generation, outcome=SuspendOutcome.SAVED
        )
    )
    (resume,) = [effect for effect in effects if isinstance(effect, Resume)]
    assert (resume.lease_id, resume.reserve_mib) == ("a", 900)


def test_what_no_device_ever_had_the_memory_for_waits_and_says_so() -> None:
    hand = Hand(replace(device("d0", 1000), overhead_mib=100))
    hand.idle("a", 900)
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), saved_mib=1001)
    hand.want("a")
    assert hand.ticket("a").reason == "wait.too-large"
