"""A claim keeps room for a program that the broker does not know, until its time is over."""

import dataclasses

from fractional_gpu.core.effects import Declined, Effect, LeaseEnded, LeaseRefused
from fractional_gpu.core.events import (
    Attached,
    DeviceDrained,
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    PinRequested,
    SuspendRequested,
    UnpinRequested,
)
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec
from tests.core.driving import Hand, lease_measured, pool, spec

HOUR_MS = 3_600_000


def _pool(*, longest_ms: int = HOUR_MS, budget_ms: int | None = 8 * HOUR_MS) -> PoolSpec:
    return dataclasses.replace(pool(idle_after_ms=0), longest_claim_ms=longest_ms, pin_budget_ms=budget_ms)


def _spec(name: str, claim_ms: int = HOUR_MS) -> LeaseSpec:
    return dataclasses.replace(spec(name, gated=False), claim_ms=claim_ms)


def _request(hand: Hand, name: str, claim_ms: int = HOUR_MS) -> LeaseRefused | None:
    effects = hand.send(LeaseRequested(at_ms=hand.now, spec=_spec(name, claim_ms)))
    return next((effect for effect in effects if isinstance(effect, LeaseRefused)), None)


def _claim(hand: Hand, name: str, claim_ms: int = HOUR_MS) -> None:
    """Request a claim, and wait for it."""
    assert _request(hand, name, claim_ms) is None
    hand.send(Attached(at_ms=hand.now, lease_id=name, gated=True))
    hand.want(name)


def _ended(effects: list[Effect]) -> list[str]:
    return [effect.lease_id for effect in effects if isinstance(effect, LeaseEnded)]


def test_a_claim_keeps_its_room_until_its_time_is_over() -> None:
    hand = Hand(pools=[_pool()])
    _claim(hand, "a")
    hand.start("b")
    hand.want("b")
    effects = hand.wait(HOUR_MS - 1)
    assert (_ended(effects), hand.suspends(effects), hand.granted(effects)) == ([], [], [])
    assert "is claimed for" in hand.ticket("b").sentence
    effects = hand.wait(1)
    assert (_ended(effects), hand.granted(effects)) == (["a"], [("b", "d0")])


def test_neither_a_request_nor_a_drain_suspends_a_claim() -> None:
    hand = Hand(pools=[_pool()])
    _claim(hand, "a")
    effects = hand.send(SuspendRequested(at_ms=0, lease_id="a"))
    assert [effect.reason for effect in effects if isinstance(effect, Declined)] == ["not-checkpointable"]
    effects = hand.send(DeviceDrained(at_ms=0, device_id="d0", evict_busy=True))
    assert hand.suspends(effects) == []
    assert hand.state("a") is LeaseState.RESIDENT


def test_a_claim_that_waits_for_room_loses_no_time() -> None:
    hand = Hand(pools=[_pool()])
    hand.run("b")
    _claim(hand, "a")
    hand.wait(2 * HOUR_MS)
    assert hand.state("a") is LeaseState.NO_CONTEXT
    hand.saved(hand.rest("b"))
    assert hand.view("a").pinned_until_ms == 3 * HOUR_MS


def test_a_claim_that_is_longer_than_the_pool_allows_is_refused() -> None:
    hand = Hand(pools=[_pool()])
    refused = _request(hand, "a", HOUR_MS + 1)
    assert refused is not None
    assert "allows at most 1 h" in refused.sentence
    refused = _request(Hand(pools=[_pool(longest_ms=0)]), "a", 1000)
    assert refused is not None
    assert "allows no claims (longest_claim is 0)" in refused.sentence


def test_a_claim_is_paid_from_its_user_s_budget_of_pins_and_returns_what_is_left() -> None:
    hand = Hand(pools=[_pool(budget_ms=HOUR_MS)])
    _claim(hand, "a")
    refused = _request(hand, "b", 60_000)
    assert refused is not None
    assert refused.reason == "pin-budget"
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert _request(hand, "c") is None


def test_claims_that_wait_count_for_the_budget_too() -> None:
    hand = Hand(pools=[_pool(budget_ms=HOUR_MS)])
    assert _request(hand, "a") is None
    refused = _request(hand, "b", 60_000)
    assert refused is not None
    assert refused.reason == "pin-budget"
    hand.run("c")
    hand.rest("c")
    effects = hand.send(PinRequested(at_ms=hand.now, lease_id="c", duration_ms=60_000))
    assert [effect.reason for effect in effects if isinstance(effect, Declined)] == ["pin-budget"]


def test_a_renewal_moves_the_end_and_an_unpin_is_the_end() -> None:
    hand = Hand(pools=[_pool()])
    _claim(hand, "a", 60_000)
    hand.wait(30_000)
    hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=HOUR_MS))
    assert hand.view("a").pinned_until_ms == HOUR_MS + 30_000
    effects = hand.send(PinRequested(at_ms=hand.now, lease_id="a", duration_ms=HOUR_MS + 1))
    assert [effect.reason for effect in effects if isinstance(effect, Declined)] == ["claim-too-long"]
    assert _ended(hand.wait(60_000)) == []
    assert _ended(hand.send(UnpinRequested(at_ms=hand.now, lease_id="a"))) == ["a"]


def test_what_programs_still_use_when_a_claim_ends_is_given_to_nobody() -> None:
    hand = Hand(pools=[_pool()])
    _claim(hand, "a")
    hand.send(lease_measured(0, "a", 700))  # 100 MiB more than it claimed, which count as strangers' already
    hand.start("b")
    hand.want("b")
    effects = hand.wait(HOUR_MS)
    assert (_ended(effects), hand.granted(effects)) == (["a"], [])
    assert hand.arbiter.devices()[0].stranger_mib == 600


def test_a_claim_outlives_the_broker_with_its_end_but_not_after_it() -> None:
    hand = Hand(pools=[_pool()])
    for name, until_ms in (("a", 1000), ("b", 0)):
        hand.send(
            LeaseRecovered(
                at_ms=0,
                spec=_spec(name),
                state=LeaseState.RESIDENT,
                generation=3,
                device_id="d0",
                pinned_until_ms=until_ms,
            )
        )
    assert [view.spec.lease_id for view in hand.arbiter.leases()] == ["a"]
    assert _ended(hand.wait(999)) == []
    assert _ended(hand.wait(1)) == ["a"]
