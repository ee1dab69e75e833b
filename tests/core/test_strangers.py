"""Idle leases leave a device for programs without a lease, and come back when these have gone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.effects import Effect, Recorded, Resume, Suspend
from fractional_gpu.core.events import DeviceSeen, PinRequested
from fractional_gpu.core.model import LeaseState, Strangers
from tests.core.driving import Hand, device, pool

RESIDENCY_MS = 10_000


def hand(policy: Strangers = Strangers.YIELD, *, parallel_swaps: int = 1, residency_ms: int = RESIDENCY_MS) -> Hand:
    one = replace(pool(min_residency_ms=residency_ms), strangers=policy, min_residency_swaps_milli=0)
    return Hand(pools=[one], parallel_swaps=parallel_swaps)


def stranger(world: Hand, mib: int) -> list[Effect]:
    return world.send(DeviceSeen(at_ms=world.now, device=device(), stranger_mib=mib))


def test_idle_leases_leave_the_least_recently_used_first_until_a_margin_is_free() -> None:
    world = hand()
    for name in ("a", "b", "c"):
        world.idle(name, 300)
        world.wait(1_000)
    world.wait(RESIDENCY_MS)
    assert world.suspends(stranger(world, 100)) == [], "what was free is enough"
    effects = stranger(world, 250)
    assert world.suspends(effects) == ["a"]
    assert world.reasons(effects, "a")[-1] == "suspend.stranger"
    assert world.suspends(world.saved(effects)) == [], "150 of 1000 MiB are free, the margin is 62"
    effects = stranger(world, 350)
    assert world.suspends(effects) == [], "the sum fits"
    effects = stranger(world, 401)
    assert world.suspends(effects) == ["b"]
    world.saved(effects)
    assert world.state("c") is LeaseState.RESIDENT


def test_leases_go_on_leaving_until_the_margin_is_free_though_the_sum_fits_by_then() -> None:
    world = hand()
    for name in ("a", "b", "c"):
        world.idle(name, 300)
        world.wait(1_000)
    world.wait(RESIDENCY_MS)
    effects = world.saved(stranger(world, 390))
    assert world.suspends(effects) == ["b"], "10 MiB are free after the first"


def test_a_lease_that_left_comes_back_with_its_next_cell_when_the_stranger_has_gone() -> None:
    world = hand()
    world.idle("a")
    world.wait(RESIDENCY_MS)
    world.saved(stranger(world, 700))
    assert world.resumes(world.want("a")) == []
    assert world.ticket("a").reason == "wait.stranger"
    assert world.resumes(stranger(world, 0)) == [("a", "d0")]


@pytest.mark.parametrize("policy", list(Strangers))
def test_a_busy_lease_leaves_only_if_its_pool_says_so_and_then_after_its_minimum_residency(policy: Strangers) -> None:
    world = hand(policy)
    world.run("a")
    world.wait(RESIDENCY_MS - 1)
    assert world.suspends(stranger(world, 700)) == []
    assert world.suspends(world.wait(1)) == (["a"] if policy is Strangers.YIELD_BUSY else [])


def test_a_busy_lease_stays_if_the_sum_fits_without_the_margin() -> None:
    world = hand(Strangers.YIELD_BUSY)
    world.idle("a", 300)
    world.run("b", 300)
    world.run("c", 300)
    world.wait(RESIDENCY_MS)
    effects = stranger(world, 390)
    assert world.suspends(effects) == ["a"], "idle ones first"
    assert world.suspends(world.saved(effects)) == []


@pytest.mark.parametrize("policy", [Strangers.IGNORE, Strangers.REFUSE])
def test_no_lease_leaves_for_strangers_that_its_pool_ignores_or_refuses(policy: Strangers) -> None:
    world = hand(policy)
    world.idle("a")
    world.wait(RESIDENCY_MS)
    assert world.suspends(stranger(world, 900)) == []


def test_pinned_leases_and_those_in_their_minimum_residency_stay() -> None:
    world = hand()
    world.idle("a", 400)
    world.idle("b", 400)
    world.send(PinRequested(at_ms=world.now, lease_id="a", duration_ms=60_000))
    assert world.suspends(stranger(world, 300)) == []
    assert world.suspends(world.wait(RESIDENCY_MS - 1)) == []
    assert world.suspends(world.wait(1)) == ["b"]


def test_a_lease_that_host_memory_cannot_take_stays_and_a_smaller_one_leaves() -> None:
    world = Hand(pools=[replace(pool(), strangers=Strangers.YIELD)], host_mib=250)
    world.idle("a", 500)
    world.wait(1_000)
    world.idle("b", 200)
    world.wait(100_000)
    assert world.suspends(stranger(world, 400)) == ["b"]


@given(st.lists(st.tuples(st.sampled_from([0, 100, 300, 500, 700, 990]), st.integers(1, 3_000)), max_size=60))
def test_an_oscillating_stranger_costs_a_lease_one_swap_for_each_minimum_residency_at_most(
    course: list[tuple[int, int]],
) -> None:
    world, came_ms = hand(parallel_swaps=2), {"a": 0, "b": 0}

    def carry_out(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Recorded) and effect.reason == "suspend.stranger":
                assert world.now - came_ms[effect.lease_id] >= RESIDENCY_MS
            elif isinstance(effect, Suspend):
                carry_out(world.saved([effect]))
            elif isinstance(effect, Resume):
                came_ms[effect.lease_id] = world.now
                carry_out(world.restored([effect]))
                carry_out([*world.work(effect.lease_id), *world.rest(effect.lease_id)])

    for name in came_ms:
        world.idle(name, 300)
    for mib, ms in course:
        carry_out(stranger(world, mib))
        for name in came_ms:  # each runs cells all the time
            if world.state(name) is LeaseState.SUSPENDED and not world.arbiter.waits(name):
                carry_out(world.want(name))
        carry_out(world.wait(ms))
