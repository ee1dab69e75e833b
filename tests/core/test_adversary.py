"""Attacks on the arbiter: make it swap for no benefit, never come to rest, starve a lease, or keep state for ever.

The bounds are per lease and per cell, so that more load allows no more:

- a resume brings back only a lease that asked for it and then runs: no more resumes than cells that had to wait;
- once all activity stops, the arbiter comes to rest after a few swaps per lease;
- finished kernels are forgotten: the arbiter is no larger after a hundred times as many.
"""

import pickle
from random import Random

import pytest

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Resume, Suspend
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    DeviceSeen,
    HostMemorySeen,
    LeaseReleased,
    LeaseRequested,
    PoolConfigured,
    Tick,
    Unwanted,
    Wanted,
)
from fractional_gpu.core.model import LeaseSpec, LeaseState
from tests.core.driving import Hand, device, pool
from tests.core.simulation import World
from tests.core.theatre import Actor, Theatre

pytestmark = pytest.mark.promise("fairness")

DAY_MS = 86_400_000


def _lease(name: str, reserve_mib: int = 600, owner: str = "ann") -> LeaseSpec:
    return LeaseSpec(lease_id=name, pool="p", owner=owner, fraction_milli=reserve_mib, reserve_mib=reserve_mib)


@pytest.mark.parametrize("seed", range(10))
def test_a_world_that_is_left_alone_comes_to_rest(seed: int) -> None:
    world = World(Random(seed))
    for _ in range(600):
        world.step()
    world.settle(most=4 * len(world.observer.leases) + 4)
    world.observer.see(Tick(at_ms=world.now), [])
    world.check_rest()


@pytest.mark.parametrize("idle_after_ms", [None, 0, 400])
def test_no_lease_is_resumed_for_nothing(idle_after_ms: int | None) -> None:
    random = Random(2)
    play = Theatre(
        [device("d0"), device("d1")], [pool("d0", "d1", idle_after_ms=idle_after_ms)], swap_ms=lambda mib: 20 + mib // 4
    )
    actors = [
        play.enter(
            Actor(_lease(f"k{number}", size), lambda: random.randrange(1, 800), lambda: random.randrange(1, 1_500)),
            at_ms=number,
        )
        for number, size in enumerate([900, 700, 600, 500, 500, 400, 250, 250, 125])
    ]
    play.run(50_000)
    waited = sum(1 for actor in actors for wait_ms in actor.waits_ms if wait_ms > 0)
    unfinished = len(actors)
    assert play.swaps["resume"] <= waited + unfinished
    assert play.swaps["suspend"] <= play.swaps["resume"] + unfinished
    assert waited > 150


def test_two_kernels_that_want_one_place_all_the_time_swap_once_a_cell() -> None:
    play = Theatre([device("d0")], [pool()], swap_ms=lambda _: 50)
    pair = [play.enter(Actor(_lease(name), lambda: 10)) for name in ("a", "b")]
    play.run(20_000)
    cells = sum(len(actor.waits_ms) for actor in pair)
    assert cells > 100
    assert play.swaps["resume"] <= cells


def test_changing_host_memory_moves_no_lease_more_often_than_it_changes() -> None:
    hand = Hand(device("d0", 1000), pools=[pool(idle_after_ms=1_000)], host_mib=10_000)
    for name in ("a", "b", "c"):
        hand.idle(name, 300)
    moved = 0
    for turn in range(50):
        effects = hand.send(HostMemorySeen(at_ms=hand.now, budget_mib=10_000 if turn % 2 else 0))
        effects += hand.wait(1_500)
        while operations := [effect for effect in effects if isinstance(effect, Suspend | Resume)]:
            moved += len(operations)
            suspends = [effect for effect in operations if isinstance(effect, Suspend)]
            effects = hand.saved(effects) if suspends else hand.restored(effects)
    assert moved <= 50 * 3


def _small(arbiter: Arbiter) -> int:
    return len(pickle.dumps(arbiter))


def test_what_is_over_is_forgotten() -> None:
    arbiter = Arbiter()
    arbiter.handle(DeviceSeen(at_ms=0, device=device("d0")))
    arbiter.handle(PoolConfigured(at_ms=0, pool=pool()))
    arbiter.handle(HostMemorySeen(at_ms=0, budget_mib=10_000))
    sizes = []
    for number in range(1_200):
        name, at_ms = f"k{number:05}", number * DAY_MS
        arbiter.handle(LeaseRequested(at_ms=at_ms, spec=_lease(name, owner=f"user{number:05}")))
        arbiter.handle(Attached(at_ms=at_ms, lease_id=name, gated=True))
        arbiter.handle(Wanted(at_ms=at_ms + 1, lease_id=name))
        arbiter.handle(BusyChanged(at_ms=at_ms + 2, lease_id=name, busy=True))
        arbiter.handle(BusyChanged(at_ms=at_ms + 5_000, lease_id=name, busy=False))
        arbiter.handle(LeaseReleased(at_ms=at_ms + 6_000, lease_id=name))
        if number % 600 == 599:  # by then the record of recent cells is full (512 requests per pool)
            sizes.append(_small(arbiter))
    assert arbiter.leases() == []
    assert sizes[-1] <= sizes[0] + 2_000, sizes


def test_asking_again_and_again_costs_the_arbiter_nothing() -> None:
    hand = Hand()
    hand.run("a")
    hand.start("b")
    hand.want("b")
    sizes = []
    for number in range(2_000):
        effects = hand.send((Wanted if number % 2 else Unwanted)(at_ms=hand.now, lease_id="b"))
        assert len(effects) <= 4
        hand.now += 1
        if number % 1_000 == 999:  # by then the pool's record of recent requests is full
            hand.arbiter.run_deferred_work()
            sizes.append(_small(hand.arbiter))
    assert sizes[-1] <= sizes[0] + 100, "numbers that grew take a few bytes more"
    assert hand.state("a") is LeaseState.RESIDENT
