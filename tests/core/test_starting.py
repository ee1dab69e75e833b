"""What leases without a process may hold and ask for: never for long what other users wait for, and never more than their share."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.effects import Effect, LeaseRefused
from fractional_gpu.core.events import Attached, LeaseReleased, LeaseRequested
from fractional_gpu.core.model import LeaseState, PoolSpec
from tests.core.driving import Hand, device, pool, spec

pytestmark = pytest.mark.promise("unstarted")

HOLD_MS = PoolSpec(name="p", devices=()).unattached_hold_ms


def ask(hand: Hand, name: str, mib: int = 1000, *, owner: str = "eve", gated: bool = False) -> list[Effect]:
    """Ask for a lease; an ungated one wants its room before it starts."""
    what = replace(spec(name, mib, gated=gated), owner=owner)
    return hand.send(LeaseRequested(at_ms=hand.now, spec=what, needs_reservation=not gated))


def holds(hand: Hand, name: str) -> bool:
    view = hand.arbiter.lease(name)
    return view is not None and view.reserved_mib > 0


def test_leases_that_never_attach_keep_another_user_out_for_no_longer_than_room_is_kept() -> None:
    hand = Hand()
    for number in range(6):
        ask(hand, f"eve{number}")
    ask(hand, "bob", owner="bob")
    assert holds(hand, "eve0")
    hand.wait(HOLD_MS - 1)
    assert not holds(hand, "bob")
    hand.wait(1)
    assert holds(hand, "bob")
    assert hand.view("eve0").reserved_mib == 0


def begin_to_use(*, fair: bool = True) -> Hand:
    """Eve asks for six leases; Bob gets the device after her first hold, uses it 9 s, and asks again. `fair`: the pool shares by time."""
    hand = Hand(pools=[pool(preempt_equals=fair)])
    for number in range(6):
        ask(hand, f"eve{number}")
    ask(hand, "bob", owner="bob")
    hand.wait(HOLD_MS)
    hand.send(Attached(at_ms=hand.now, lease_id="bob", gated=False))
    hand.work("bob")
    hand.wait(9_000)
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="bob"))
    ask(hand, "bob-again", owner="bob")
    return hand


def test_one_who_has_used_the_gpu_is_kept_out_for_no_longer_than_one_who_has_not() -> None:
    hand = begin_to_use()
    assert not holds(hand, "bob-again")
    hand.wait(HOLD_MS)
    assert holds(hand, "bob-again"), "eve, whose kernels never run, has paid for what she kept"


def test_one_who_releases_before_the_hold_is_over_has_paid_for_its_time() -> None:
    hand = begin_to_use()
    begun, number = hand.now, 6
    while not holds(hand, "bob-again"):
        assert hand.now - begun <= 9_000 + HOLD_MS, "as long as bob used it while she waited, and one hold"
        ask(hand, f"eve{number}")
        number += 1
        hand.wait(HOLD_MS - 1_000)
        (held,) = [name for name in (f"eve{at}" for at in range(number)) if holds(hand, name)] or [""]
        if held:
            hand.send(LeaseReleased(at_ms=hand.now, lease_id=held))


def test_releasing_and_asking_again_does_not_help_to_keep_another_user_out() -> None:
    hand = Hand()
    for number in range(6):
        ask(hand, f"eve{number}")
    ask(hand, "bob", owner="bob")
    hand.wait(1_000)
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="eve0"))
    assert holds(hand, "bob"), "eve's next lease asks for room after bob did"


def test_a_slow_start_loses_nothing_where_no_other_kernel_waits() -> None:
    hand = Hand()
    ask(hand, "eve0")
    hand.wait(HOLD_MS * 4)
    assert holds(hand, "eve0")
    ask(hand, "bob", owner="bob")
    assert (holds(hand, "eve0"), holds(hand, "bob")) == (False, True)
    hand.send(Attached(at_ms=hand.now, lease_id="eve0", gated=False))
    assert hand.state("eve0") is LeaseState.NO_CONTEXT, "it waits for room like any other"
    assert hand.ticket("eve0").position == 1


def test_a_lease_ends_though_it_has_kept_its_room_for_longer_than_it_had_to() -> None:
    hand = Hand()
    ask(hand, "eve0")
    hand.wait(HOLD_MS)
    hand.wait(120_000 - HOLD_MS)
    assert hand.arbiter.lease("eve0") is None


def test_leases_without_a_process_hold_half_of_a_pool_at_most_and_one_always() -> None:
    devices = [device(f"d{number}") for number in range(4)]
    hand = Hand(*devices, pools=[pool(*(one.device_id for one in devices))])
    for number in range(4):
        ask(hand, f"eve{number}")
    assert [number for number in range(4) if holds(hand, f"eve{number}")] == [0, 1]
    ask(hand, "bob", owner="bob")
    assert holds(hand, "bob")
    hand.send(Attached(at_ms=hand.now, lease_id="eve0", gated=False))
    assert holds(hand, "eve2")
    small = Hand()
    ask(small, "eve0")
    assert holds(small, "eve0")


@pytest.mark.parametrize(("owner", "parked"), [("bob", True), ("eve", False)])
def test_a_lease_is_parked_for_another_users_ticket_and_not_for_its_owners(owner: str, *, parked: bool) -> None:
    hand = Hand()
    ask(hand, "eve0", 300)
    ask(hand, "big", 900, owner=owner, gated=True)
    hand.send(Attached(at_ms=hand.now, lease_id="big", gated=True))
    hand.want("big")
    assert ("wait.unattached" in hand.reasons(ask(hand, "eve1", 100), "eve1")) == parked
    assert holds(hand, "eve1") != parked


def test_a_parked_lease_says_why_and_is_served_when_an_earlier_one_ends() -> None:
    hand = Hand(device(memory_mib=2000))
    ask(hand, "a")
    assert "wait.unattached" in hand.reasons(ask(hand, "b"), "b")
    assert hand.arbiter.ticket("b") is None
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert holds(hand, "b")


def test_a_class_starts_together() -> None:
    hand = Hand(*[device(f"d{number}", 8000) for number in range(2)], pools=[pool("d0", "d1")])
    for number in range(30):
        ask(hand, f"k{number}", 500, owner="hub")
    for number in range(30):
        assert holds(hand, f"k{number}"), "each has its room by the time those before it have started"
        hand.send(Attached(at_ms=hand.now, lease_id=f"k{number}", gated=False))


@pytest.mark.parametrize("gated", [False, True])
def test_a_user_has_so_many_leases_without_a_process_and_no_more(*, gated: bool) -> None:
    hand = Hand(pools=[replace(pool(), unattached_leases=3)])
    for number in range(3):
        ask(hand, f"eve{number}", 10, gated=gated)
    (refused,) = [one for one in ask(hand, "eve3", 10, gated=gated) if isinstance(one, LeaseRefused)]
    assert refused.reason == "unattached-limit"
    assert "'eve' has 3 leases in pool 'p' whose kernels have not started (at most 3 allowed)" in refused.sentence
    assert not [one for one in ask(hand, "bob", 10, owner="bob", gated=gated) if isinstance(one, LeaseRefused)]
    hand.send(Attached(at_ms=0, lease_id="eve0", gated=gated))
    assert not [one for one in ask(hand, "eve4", 10, gated=gated) if isinstance(one, LeaseRefused)]


def test_what_a_pool_may_promise_is_not_all_promised_to_leases_without_a_process() -> None:
    hand = Hand(pools=[pool(oversubscription_milli=2000)])
    for number in range(2):
        ask(hand, f"eve{number}", 500, gated=True)
    (refused,) = [one for one in ask(hand, "eve2", 500, gated=True) if isinstance(one, LeaseRefused)]
    assert refused.reason == "unattached-limit"
    assert (
        "was promised 1000 MiB of pool 'p' for kernels that have not started (at most 1000 MiB allowed)"
        in refused.sentence
    )
    assert not [one for one in ask(hand, "bob", 1000, owner="bob", gated=True) if isinstance(one, LeaseRefused)]


@given(st.data(), st.booleans())
def test_whatever_leases_without_a_process_do_another_user_is_in_within_one_hold(
    data: st.DataObject, fair: bool
) -> None:
    """Eve asks, releases and waits at random, and never starts a process; Bob, who used the GPU before, asks once and waits."""
    hand = begin_to_use(fair=fair)
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="bob-again"))
    names = [f"eve{number}" for number in range(6)]
    asked_ms: int | None = None
    moves = data.draw(st.lists(st.sampled_from(["ask", "release", "wait", "bob"]), min_size=5, max_size=40))
    for move in [*moves, "bob", *["ask", "wait"] * 40]:
        live = [name for name in names if hand.arbiter.lease(name) is not None]
        if move == "ask":
            names.append(f"eve{len(names)}")
            ask(hand, names[-1], data.draw(st.sampled_from([100, 500, 1000])))
        elif move == "release" and live:
            hand.send(LeaseReleased(at_ms=hand.now, lease_id=data.draw(st.sampled_from(live))))
        elif move == "wait":
            hand.wait(data.draw(st.sampled_from([500, 900, 5_000])))
        elif move == "bob" and asked_ms is None:
            asked_ms = hand.now
            ask(hand, "bob", 1000, owner="bob")
        if asked_ms is not None and holds(hand, "bob"):
            return
        assert asked_ms is None or hand.now < asked_ms + HOLD_MS, f"asked at {asked_ms}, waits at {hand.now}"
    raise AssertionError("time did not pass")
