"""What one user or group may have of a pool: excess is refused at admission, or waits without blocking others."""

import dataclasses

import pytest

from fractional_gpu.core.effects import Effect, LeaseRefused
from fractional_gpu.core.events import Attached, LeaseReleased, LeaseRequested, ProcessExited, ResizeRequested
from fractional_gpu.core.model import LeaseState, Limits, PoolSpec
from tests.core.driving import Hand, device, pool, spec


def _pool(*, user: Limits | None = None, group: Limits | None = None) -> PoolSpec:
    plain = pool(max_passed_over=0)
    groups = (("students", group),) if group is not None else ()
    return dataclasses.replace(plain, user_limits=user or Limits(), group_limits=groups)


def _start(
    hand: Hand, name: str, reserve_mib: int = 100, *, owner: str = "ann", group: str = "", milli: int = 250
) -> list[Effect]:
    what = dataclasses.replace(spec(name, reserve_mib, milli=milli), owner=owner, group=group)
    effects = hand.send(LeaseRequested(at_ms=hand.now, spec=what))
    hand.send(Attached(at_ms=hand.now, lease_id=name, gated=True))
    return effects


def _refusal(effects: list[Effect]) -> LeaseRefused | None:
    return next((effect for effect in effects if isinstance(effect, LeaseRefused)), None)


@pytest.mark.parametrize(
    ("limits", "said"),
    [(Limits(leases=2), "2 of at most 2 kernels"), (Limits(milli=600), "1/2 GPU of at most 3/5 GPU")],
    ids=["leases", "fraction"],
)
def test_a_user_is_refused_more_than_a_user_may_have(limits: Limits, said: str) -> None:
    hand = Hand(pools=[_pool(user=limits)])
    assert _refusal(_start(hand, "a")) is None
    assert _refusal(_start(hand, "b")) is None
    refused = _refusal(_start(hand, "c"))
    assert refused is not None
    assert refused.reason == "user-limit"
    assert said in refused.sentence
    assert _refusal(_start(hand, "d", owner="bob")) is None
    hand.send(LeaseReleased(at_ms=0, lease_id="a"))
    assert _refusal(_start(hand, "c")) is None


def test_kernels_that_do_not_run_are_counted_and_told_apart() -> None:
    hand = Hand(pools=[_pool(user=Limits(leases=2), group=Limits(leases=2))])
    _start(hand, "a", group="students")
    _start(hand, "b", group="students")
    hand.send(ProcessExited(at_ms=hand.now, lease_id="b"))
    apart = "2 of at most 2 kernels in pool 'p', among them a kernel that has not started or has ended (counted for up to 2 min more): shut"
    for refused in (_refusal(_start(hand, "c")), _refusal(_start(hand, "c", owner="bob", group="students"))):
        assert refused is not None
        assert apart in refused.sentence


def test_a_group_is_refused_more_than_it_may_have_together() -> None:
    hand = Hand(pools=[_pool(group=Limits(leases=1))])
    assert _refusal(_start(hand, "a", group="students")) is None
    refused = _refusal(_start(hand, "b", owner="bob", group="students"))
    assert refused is not None
    assert refused.reason == "group-limit"
    assert "'students'" in refused.sentence
    assert _refusal(_start(hand, "c", owner="bob", group="staff")) is None


def test_a_user_at_the_limit_waits_without_blocking_others() -> None:
    hand = Hand(pools=[_pool(user=Limits(resident_milli=300))])
    for name, owner in (("a", "ann"), ("b", "ann"), ("c", "bob")):
        _start(hand, name, owner=owner)
        hand.want(name)
        hand.work(name)
    ticket = hand.ticket("b")
    assert (ticket.reason, ticket.blockers, ticket.kept_on) == ("wait.user-limit", ("a",), ())
    assert "1/4 GPU of at most 3/10 GPU" in ticket.sentence
    assert hand.state("c") is LeaseState.RESIDENT
    for number in range(5):  # no room is kept for it, although the pool lets no ticket be passed over
        name = f"s{number}"
        _start(hand, name, owner="bob" if number == 9 else name)
        hand.want(name)
        assert hand.state(name) is LeaseState.RESIDENT
    assert hand.ticket("b").passed_over == 0
    assert hand.granted(hand.send(LeaseReleased(at_ms=0, lease_id="a"))) == [("b", "d0")]


def test_a_user_s_own_idle_kernel_steps_aside_within_the_limit() -> None:
    hand = Hand(device(memory_mib=10_000), pools=[_pool(user=Limits(resident_milli=300))])
    _start(hand, "a")
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    _start(hand, "b")
    effects = hand.want("b")
    assert hand.suspends(effects) == ["a"]
    assert "suspend.user-limit" in hand.reasons(effects, "a")
    assert hand.granted(hand.saved(effects)) == [("b", "d0")]


def test_a_users_own_kernels_do_not_make_room_for_nothing() -> None:
    hand = Hand(pools=[_pool(user=Limits(resident_milli=300))])
    _start(hand, "x", 900, owner="bob")
    hand.want("x")
    hand.work("x")
    _start(hand, "a", 100)
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    _start(hand, "b", 200)
    assert hand.suspends(hand.want("b")) == []
    assert hand.state("a") is LeaseState.RESIDENT


def test_a_group_s_kernels_on_devices_are_limited_together() -> None:
    hand = Hand(pools=[_pool(group=Limits(resident_milli=250))])
    for name, owner in (("a", "ann"), ("b", "bob")):
        _start(hand, name, owner=owner, group="students")
        hand.want(name)
        hand.work(name)
    assert hand.ticket("b").reason == "wait.group-limit"
    hand.rest("a")
    assert hand.state("a") is LeaseState.SUSPENDING


def test_a_busy_kernel_that_is_preempted_beside_a_user_s_own_is_told_the_reason() -> None:
    policy = dataclasses.replace(_pool(user=Limits(resident_milli=300)), min_residency_swaps_milli=0)
    hand = Hand(pools=[policy], parallel_swaps=2)
    _start(hand, "x", 600, owner="bob")
    hand.want("x")
    hand.work("x")
    _start(hand, "a", 100)
    hand.want("a")
    hand.work("a")
    hand.rest("a")
    hand.start("b", 800, priority=1)
    assert hand.suspends(hand.want("b")) == []
    effects = hand.wait(policy.min_residency_ms)
    assert hand.suspends(effects) == ["a", "x"]
    assert hand.reasons(effects, "a")[:1] == ["suspend.user-limit"]
    assert hand.reasons(effects, "x")[:1] == ["suspend.preempted"]


def test_a_share_that_shrinks_while_its_memory_grows_lets_the_user_s_next_kernel_in() -> None:
    hand = Hand(pools=[_pool(user=Limits(resident_milli=750))])
    _start(hand, "a", milli=500)
    hand.want("a")
    hand.work("a")
    _start(hand, "b", milli=500)
    hand.want("b")
    assert hand.ticket("b").reason == "wait.user-limit"
    effects = hand.send(
        ResizeRequested(at_ms=hand.now, lease_id="a", fraction_milli=125, reserve_mib=600, request_mib=None)
    )
    assert hand.view("a").reserved_mib == 600
    assert hand.granted(effects) == [("b", "d0")]


def test_who_may_not_come_any_more_because_another_one_did_keeps_no_room() -> None:
    limited = dataclasses.replace(_pool(group=Limits(resident_milli=500)), devices=("d0", "d1"))
    hand = Hand(device(), device("d1"), pools=[limited])
    hand.run("x", 600)
    hand.run("y", 400)
    hand.run("z", 400)
    hand.run("w", 100)  # d0 has x and y, d1 has z and w
    _start(hand, "large", 990, group="students", milli=500)
    hand.want("large")  # keeps what is free
    _start(hand, "small", 400, group="students")
    hand.want("small")
    hand.start("free", 450)
    hand.want("free")
    assert hand.granted(hand.send(LeaseReleased(at_ms=0, lease_id="y"))) == [("small", "d0"), ("free", "d1")]
    assert hand.ticket("large").reason == "wait.group-limit"
