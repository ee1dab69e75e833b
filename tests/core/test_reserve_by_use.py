"""Reservations that follow a kernel's use, between its guaranteed amount and its cap."""

import dataclasses

from fractional_gpu.core.effects import Declined, Effect, Granted, Resized
from fractional_gpu.core.events import (
    Attached,
    DeviceSeen,
    LeaseReleased,
    LeaseRequested,
    PoolConfigured,
    ResizeRequested,
    SuspendOutcome,
    SuspendRequested,
    TruthFound,
)
from fractional_gpu.core.model import LeaseState, Limits, PoolSpec, ReserveBy
from tests.core.driving import Hand, device, lease_measured, pool, spec


def _pool(*, headroom_mib: int = 100, oversubscription_milli: int | None = None) -> PoolSpec:
    plain = pool(oversubscription_milli=oversubscription_milli)
    return dataclasses.replace(plain, reserve_by=ReserveBy.USE, headroom_mib=headroom_mib)


def _start(hand: Hand, name: str, request_mib: int, cap_mib: int) -> list[Effect]:
    what = dataclasses.replace(spec(name, cap_mib), request_mib=request_mib)
    effects = hand.send(LeaseRequested(at_ms=hand.now, spec=what))
    hand.send(Attached(at_ms=hand.now, lease_id=name, gated=True))
    return effects


def _runs(hand: Hand, name: str, request_mib: int, cap_mib: int) -> list[Effect]:
    _start(hand, name, request_mib, cap_mib)
    effects = hand.want(name)
    hand.work(name)
    return effects


def _uses(hand: Hand, name: str, mib: int) -> list[Effect]:
    return hand.send(lease_measured(hand.now, name, mib))


def _sizes(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(one.lease_id, one.reserved_mib) for one in effects if isinstance(one, Resized)]


def test_a_kernel_begins_with_what_it_is_guaranteed_and_is_told_its_limit() -> None:
    hand = Hand(pools=[_pool()])
    (granted,) = [effect for effect in _runs(hand, "a", 300, 900) if isinstance(effect, Granted)]
    assert granted.reserved_mib == hand.view("a").reserved_mib == 300


def test_no_less_than_the_headroom_is_reserved_and_no_more_than_the_cap() -> None:
    hand = Hand(pools=[_pool(headroom_mib=400)])
    _runs(hand, "a", 100, 900)
    assert hand.view("a").reserved_mib == 400
    _runs(hand, "b", 100, 200)
    assert hand.view("b").reserved_mib == 200


def test_the_reservation_grows_with_use_before_the_headroom_is_used_up() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "a", 300, 900)
    assert _sizes(_uses(hand, "a", 250)) == []
    assert _sizes(_uses(hand, "a", 251)) == [("a", 352)]
    assert _sizes(_uses(hand, "a", 850)) == [("a", 900)]
    assert hand.arbiter.devices()[0].reserved_mib == 900


def test_a_kernel_that_grows_steadily_has_room_though_a_measurement_is_missed() -> None:
    hand = Hand(device(memory_mib=10_000), pools=[_pool(headroom_mib=100)])
    _runs(hand, "a", 100, 5000)
    used, missed = 0, 0
    for turn in range(40):
        used += 90  # between one measurement and the next
        assert turn < 3 or used <= hand.view("a").reserved_mib, f"it fails to allocate in turn {turn}"
        if turn < 3 or missed:
            _uses(hand, "a", used)
            missed = 0
        else:
            missed = 1
    assert hand.view("a").reserved_mib <= used + 2 * 100
    _uses(hand, "a", used)
    assert hand.view("a").reserved_mib <= used + 2 * 100 - 1, (
        "what it does not grow into is given back, but for a headroom"
    )


def test_nothing_is_kept_ahead_of_a_kernel_that_came_back() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "a", 300, 900)
    _uses(hand, "a", 250)
    _uses(hand, "a", 400)
    assert hand.view("a").reserved_mib == 600
    hand.rest("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), saved_mib=400)
    hand.restored(hand.want("a"))
    assert hand.view("a").reserved_mib == 500


def test_it_shrinks_only_where_that_gives_back_as_much_as_the_headroom() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "a", 300, 900)
    _uses(hand, "a", 700)
    assert hand.view("a").reserved_mib == 800
    assert _sizes(_uses(hand, "a", 601)) == []
    assert _sizes(_uses(hand, "a", 600)) == [("a", 700)]
    assert _sizes(_uses(hand, "a", 0)) == [("a", 300)]


def test_what_a_kernel_gives_back_lets_another_in() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "a", 300, 900)
    _uses(hand, "a", 800)
    _start(hand, "b", 300, 300)
    assert hand.granted(hand.want("b")) == []
    assert hand.granted(_uses(hand, "a", 200)) == [("b", "d0")]


def test_idle_neighbours_step_aside_for_a_kernel_that_uses_more() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "b", 500, 500)
    hand.rest("b")
    _runs(hand, "a", 300, 900)
    effects = _uses(hand, "a", 600)
    assert (hand.suspends(effects), _sizes(effects)) == (["b"], [])
    assert hand.ticket("a").need_mib == 400
    assert _sizes(hand.saved(effects)) == [("a", 700)]


def test_a_kernel_that_cannot_grow_keeps_its_limit_and_waits_for_room_in_its_place() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "b", 500, 500)
    _runs(hand, "a", 300, 900)
    assert _sizes(_uses(hand, "a", 600)) == []
    assert (hand.view("a").reserved_mib, hand.ticket("a").reason) == (300, "wait.busy-neighbour")
    _uses(hand, "a", 500)
    assert hand.ticket("a").need_mib == 300
    _uses(hand, "a", 100)
    assert hand.arbiter.ticket("a") is None


def test_what_comes_back_needs_what_was_saved_and_the_headroom() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "a", 300, 900)
    _uses(hand, "a", 600)
    hand.rest("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), saved_mib=600)
    hand.restored(hand.want("a"))
    assert hand.view("a").reserved_mib == 700


def test_a_pool_promises_what_is_guaranteed_not_the_caps() -> None:
    hand = Hand(pools=[_pool(oversubscription_milli=1000)])
    for name in ("a", "b", "c"):
        _start(hand, name, 300, 900)
    assert len(hand.arbiter.leases()) == 3
    _start(hand, "d", 300, 900)
    assert len(hand.arbiter.leases()) == 3


def test_a_pool_that_reserves_caps_from_now_on_has_its_kernels_ask_for_the_rest() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "a", 300, 600)
    _runs(hand, "b", 300, 600)
    effects = hand.send(PoolConfigured(at_ms=0, pool=pool()))
    assert _sizes(effects) == [("a", 600)]
    assert hand.ticket("b").need_mib == 300
    hand.rest("a")
    assert hand.state("a") is LeaseState.SUSPENDING


def test_a_kernel_whose_claim_is_declined_at_last_asks_for_what_its_pool_wants_by_now() -> None:
    hand = Hand(pools=[_pool()])
    hand.run("x", 400)
    _runs(hand, "a", 100, 700)
    hand.request("b", 100)
    hand.send(ResizeRequested(at_ms=0, lease_id="a", fraction_milli=500, reserve_mib=900))
    hand.send(PoolConfigured(at_ms=0, pool=dataclasses.replace(pool(), user_limits=Limits(milli=600))))
    assert hand.view("a").reserved_mib == 100, "it waits for room for its new size, whatever its pool wants"
    effects = hand.send(LeaseReleased(at_ms=0, lease_id="x"))
    assert [one.reason for one in effects if isinstance(one, Declined)] == ["user-limit"]
    assert hand.view("a").reserved_mib == 700


def test_a_kernel_that_has_not_started_waits_for_the_rest_that_its_pool_wants() -> None:
    hand = Hand(pools=[_pool()])
    hand.run("x", 500)
    what = dataclasses.replace(spec("a", 900, gated=False), request_mib=100)
    hand.send(LeaseRequested(at_ms=0, spec=what, needs_reservation=True))
    assert hand.view("a").reserved_mib == 100
    hand.send(PoolConfigured(at_ms=0, pool=pool()))
    assert (hand.view("a").state, hand.ticket("a").need_mib) == (LeaseState.UNATTACHED, 800)
    assert _sizes(hand.send(LeaseReleased(at_ms=0, lease_id="x"))) == [("a", 900)]


def test_a_kernel_found_on_its_device_is_told_what_it_has_and_then_what_it_waited_for() -> None:
    hand = Hand(pools=[_pool()])
    hand.run("x", 800)
    _runs(hand, "a", 100, 200)
    hand.rest("a")
    hand.send(ResizeRequested(at_ms=0, lease_id="a", fraction_milli=250, reserve_mib=400, request_mib=300))
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), SuspendOutcome.UNKNOWN)
    hand.send(LeaseReleased(at_ms=0, lease_id="x"))
    found = TruthFound(
        at_ms=0, lease_id="a", generation=hand.view("a").generation, state=LeaseState.RESIDENT, device_id="d0"
    )
    told = [one.reserved_mib for one in hand.send(found) if isinstance(one, Granted | Resized)]
    assert told == [200, 300]


def test_a_kernel_whose_headroom_finds_no_place_beside_a_stranger_waits_for_the_stranger() -> None:
    hand = Hand(pools=[_pool()])
    _runs(hand, "a", 100, 900)
    _uses(hand, "a", 450)
    hand.rest("a")
    hand.saved(hand.send(SuspendRequested(at_ms=0, lease_id="a")), saved_mib=450)
    hand.send(DeviceSeen(at_ms=0, device=device(), stranger_mib=500))
    hand.want("a")
    for number in range(10):
        hand.run(f"b{number}", 300)
        hand.send(LeaseReleased(at_ms=0, lease_id=f"b{number}"))
        assert hand.ticket("a").reason == "wait.stranger"
    hand.send(DeviceSeen(at_ms=0, device=device()))
    assert hand.state("a") is LeaseState.RESUMING


def test_a_claim_is_as_large_as_its_pool_wants_it_by_now() -> None:
    hand = Hand(pools=[pool()])
    _runs(hand, "a", 50, 100)
    _uses(hand, "a", 50)
    _runs(hand, "x", 900, 900)
    hand.send(ResizeRequested(at_ms=hand.now, lease_id="a", fraction_milli=250, reserve_mib=125, request_mib=50))
    assert hand.ticket("a").need_mib == 25
    effects = hand.send(PoolConfigured(at_ms=hand.now, pool=_pool(headroom_mib=50)))
    assert _sizes(effects) == [("a", 100)], "what it uses and the headroom, which it has"
