"""When an idle lease leaves though no ticket needs its room: after a fixed time, or when holding costs more than coming back."""

from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.effects import Effect
from fractional_gpu.core.forecasts.estimators import DURATIONS, leave_after_ms
from fractional_gpu.core.model import Foresight, PoolSpec
from tests.core.driving import Hand, pool

HOUR_MS = 3_600_000
MINUTE_MS = 60_000


def auto(*, hold: float = 0, wait: float = 40) -> PoolSpec:
    """A pool with these prices for an hour."""
    hold_milli, wait_milli = int(hold * 1000), int(wait * 1000)
    return replace(
        pool("d0"), idle_auto=True, foresight=Foresight.OFF, hold_price_milli=hold_milli, wait_price_milli=wait_milli
    )


def stay(world: Hand, most_ms: int) -> tuple[int, list[Effect]]:
    """Have the cell of "a" end; return how long "a" stays then, and the effects of its suspend: none if it stays all along."""
    began_ms, effects = world.now, world.rest("a")
    if world.suspends(effects):
        return 0, effects
    while world.observer.wake is not None and world.observer.wake - began_ms <= most_ms:
        effects = world.wait(max(1, world.observer.wake - world.now))
        if world.suspends(effects):
            return world.now - began_ms, effects
    world.wait(began_ms + most_ms - world.now)
    return most_ms, []


def habit(world: Hand, gap_ms: int, times: int = 30) -> None:
    """Have "a" run a cell again and again, with gaps of that length between them."""
    for _ in range(times):
        stayed_ms, effects = stay(world, gap_ms)
        if effects:
            world.saved(effects)
            world.wait(gap_ms - stayed_ms)
        effects = world.want("a")
        if world.resumes(effects):
            world.restored(effects)
        world.work("a")


def test_no_kernel_leaves_while_holding_costs_nothing() -> None:
    world = Hand(pools=[auto()])
    world.run("a")
    assert not stay(world, 100 * HOUR_MS)[1]


def test_a_kernel_leaves_sooner_the_dearer_its_share_and_the_cheaper_a_persons_time() -> None:
    stays = []
    for hold, wait in ((1, 1_000_000), (1, 40_000), (1, 400), (100, 40), (100, 1)):
        world = Hand(pools=[auto(hold=hold, wait=wait)])
        world.run("a")
        stays.append(stay(world, 1000 * HOUR_MS)[0])
    assert stays == sorted(stays, reverse=True)
    assert stays[0] > stays[2] > stays[-1]


def test_a_kernel_is_held_over_the_gaps_that_it_usually_makes_and_not_much_longer() -> None:
    world = Hand(pools=[auto(hold=2.5, wait=2000)])  # a resume is worth some 16 minutes
    world.run("a")
    habit(world, 5 * MINUTE_MS)
    assert 4 * MINUTE_MS <= stay(world, HOUR_MS)[0] <= 9 * MINUTE_MS


def test_a_kernel_whose_gaps_are_all_long_leaves_soon() -> None:
    usual, sparse = (Hand(pools=[auto(hold=2.5, wait=2000)]) for _ in range(2))
    for world in (usual, sparse):
        world.run("a")
    habit(sparse, 8 * HOUR_MS, times=20)
    assert stay(sparse, HOUR_MS)[0] < stay(usual, HOUR_MS)[0]


@given(
    weights=st.lists(st.integers(0, 50), min_size=DURATIONS.size, max_size=DURATIONS.size),
    hold=st.integers(0, 10**9),
    back=st.integers(0, 10**13),
)
def test_the_chosen_time_costs_no_more_than_any_other(weights: list[int], hold: int, back: int) -> None:
    totals, lows = list(accumulate(weights)), DURATIONS.lows

    def cost(leaves_ms: int) -> float:
        spent = 0.0
        for place, weight in enumerate(weights[:-1]):
            low, high = lows[place], lows[place + 1]
            held = leaves_ms if high > leaves_ms else (low + high) / 2
            spent += weight * (hold * held + (back if high > leaves_ms else 0))
        return spent + weights[-1] * (hold * leaves_ms + back)

    chosen = cost(leave_after_ms(totals, hold=hold, back=back))
    assert chosen <= min(map(cost, lows[:-1])) * (1 + 1e-9) + DURATIONS.size * hold


def test_a_fixed_time_is_kept_whatever_holding_costs() -> None:
    for idle_after_ms in (5_000, 50 * MINUTE_MS):
        policy = replace(auto(hold=1_000_000, wait=1), idle_after_ms=idle_after_ms, min_residency_ms=0)
        world = Hand(pools=[policy])
        world.run("a")
        assert stay(world, HOUR_MS)[0] == idle_after_ms
