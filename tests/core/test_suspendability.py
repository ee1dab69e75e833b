"""Leases that cannot be checkpointed stay resident: they are never victims, each reports its reason, and retries are limited."""

from dataclasses import replace

import pytest

from fractional_gpu.core.effects import Declined, Effect, Suspend
from fractional_gpu.core.events import (
    Attached,
    Checkpointable,
    DeviceSeen,
    LeaseReleased,
    LeaseRequested,
    ProcessExited,
    SuspendOutcome,
    SuspendRequested,
)
from fractional_gpu.core.model import DeviceSpec, LeaseState, PoolSpec, Sharing
from tests.core.driving import Hand, device, lease_measured, pool, spec

MINUTE_MS = 60_000
WHY = "it uses managed memory"


def using(hand: Hand, name: str, mib: int = 300) -> list[Effect]:
    """Measure a kernel that uses its device."""
    return hand.send(lease_measured(hand.now, name, mib))


def told(effects: list[Effect]) -> list[str]:
    return [effect.sentence for effect in effects if isinstance(effect, Declined)]


def shared(sharing: Sharing, *devices: str) -> PoolSpec:
    return PoolSpec(name="p", devices=devices or ("d0",), fractions_milli=(), idle_after_ms=0, sharing=sharing)


def test_a_process_that_cannot_be_checkpointed_is_no_victim_until_it_ends() -> None:
    hand = Hand()
    hand.idle("a")
    using(hand, "a")
    hand.send(Checkpointable(at_ms=hand.now, lease_id="a", why_not=WHY))
    hand.start("b")
    hand.want("b")
    effects = hand.wait(10 * MINUTE_MS)
    assert hand.suspends(effects) == []
    assert hand.view("a").unsuspendable_reason == WHY
    ticket = hand.ticket("b")
    assert (ticket.reason, ticket.blockers) == ("wait.cannot-be-suspended", ("a",))
    assert WHY in ticket.sentence
    hand.send(ProcessExited(at_ms=hand.now, lease_id="a"))
    assert hand.state("b") is LeaseState.RESIDENT
    assert hand.view("a").unsuspendable_reason == ""


def test_a_pool_may_keep_kernels_whose_use_is_not_known() -> None:
    hand = Hand(pools=[replace(pool(), suspend_unseen=False)])
    for name, gated in (("seen", True), ("unseen", False)):
        hand.send(LeaseRequested(at_ms=hand.now, spec=spec(name, 300, gated=gated)))
        hand.send(Attached(at_ms=hand.now, lease_id=name, gated=gated))
        hand.want(name)
    assert hand.view("seen").unsuspendable_reason == ""
    assert "our extension is not loaded" in hand.view("unseen").unsuspendable_reason


def test_who_asks_for_its_suspend_is_told_why_it_stays() -> None:
    hand = Hand()
    hand.idle("a")
    using(hand, "a")
    hand.send(Checkpointable(at_ms=hand.now, lease_id="a", why_not=WHY))
    assert told(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a"))) == [WHY]
    hand.send(Checkpointable(at_ms=hand.now, lease_id="a"))
    assert hand.suspends(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a"))) == ["a"]


def test_a_suspend_that_proves_impossible_is_not_tried_again_while_the_process_lives() -> None:
    hand = Hand(pools=[pool(idle_after_ms=1000)])
    hand.idle("a")
    using(hand, "a")
    hand.saved(hand.wait(10 * MINUTE_MS), SuspendOutcome.IMPOSSIBLE)
    assert hand.state("a") is LeaseState.RESIDENT
    for _ in range(100):
        assert hand.suspends(hand.wait(MINUTE_MS)) == []
    hand.send(ProcessExited(at_ms=hand.now, lease_id="a"))
    hand.idle_again("a")
    using(hand, "a")
    assert hand.suspends(hand.wait(10 * MINUTE_MS)) == ["a"]


@pytest.mark.parametrize("outcome", [SuspendOutcome.REFUSED, SuspendOutcome.IMPOSSIBLE])
def test_a_process_that_can_be_checkpointed_again_makes_room_at_once(outcome: SuspendOutcome) -> None:
    """A stopped process cannot answer the driver; when it continues, its neighbour does not wait for the next scheduled attempt."""
    hand = Hand()
    hand.idle("a")
    using(hand, "a")
    hand.start("b")
    hand.now += 60_000
    hand.saved(hand.want("b"), outcome)
    hand.send(Checkpointable(at_ms=hand.now, lease_id="a", why_not=WHY))
    assert hand.suspends(hand.wait(1_000)) == []
    assert hand.suspends(hand.send(Checkpointable(at_ms=hand.now, lease_id="a"))) == ["a"]


def test_a_process_that_could_be_checkpointed_all_the_time_is_left_alone_after_a_refusal() -> None:
    hand = Hand()
    hand.idle("a")
    using(hand, "a")
    hand.start("b")
    hand.now += 60_000
    hand.saved(hand.want("b"), SuspendOutcome.REFUSED)
    assert hand.suspends(hand.send(Checkpointable(at_ms=hand.now, lease_id="a"))) == []
    assert hand.suspends(hand.wait(29_999)) == []
    assert hand.suspends(hand.wait(1)) == ["a"]


@pytest.mark.parametrize("sharing", [Sharing.MPS, Sharing.MIG])
def test_a_pool_with_another_way_of_sharing_suspends_no_lease(sharing: Sharing) -> None:
    hand = Hand(pools=[shared(sharing)])
    hand.run("a")
    using(hand, "a")
    hand.rest("a")
    assert hand.suspends(hand.wait(MINUTE_MS)) == []
    (sentence,) = told(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")))
    assert sharing.value.upper() in sentence


def test_a_device_that_cannot_checkpoint_keeps_its_leases_until_it_can() -> None:
    bad = DeviceSpec(device_id="d0", name="H", memory_mib=1000, why_not="the driver is too old")
    hand = Hand(bad, pools=[pool(idle_after_ms=1000)])
    hand.idle("a")
    using(hand, "a")
    assert hand.suspends(hand.wait(MINUTE_MS)) == []
    assert hand.view("a").unsuspendable_reason == "the driver is too old"
    assert hand.suspends(hand.send(DeviceSeen(at_ms=hand.now, device=device()))) == ["a"]


def test_a_reservation_without_a_context_can_be_taken_back_all_the_same() -> None:
    hand = Hand(pools=[shared(Sharing.MPS)])
    hand.run("a")
    effects = hand.rest("a")
    assert any(isinstance(effect, Suspend) for effect in effects)
    hand.saved(effects, SuspendOutcome.NOTHING_TO_SAVE)
    assert hand.state("a") is LeaseState.NO_CONTEXT


def test_a_mig_instance_is_one_lease_s_however_little_that_asks_for() -> None:
    hand = Hand(device("d0"), device("d1"), pools=[shared(Sharing.MIG, "d0", "d1")])
    for name in ("a", "b", "c"):
        hand.start(name, 100)
        hand.want(name)
        using(hand, name, 50)
    assert {hand.view("a").device_id, hand.view("b").device_id} == {"d0", "d1"}
    assert hand.ticket("c").reason == "wait.cannot-be-suspended"
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="a"))
    assert hand.state("c") is LeaseState.RESIDENT
