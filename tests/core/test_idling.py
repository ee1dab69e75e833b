"""When an idle lease leaves although no ticket needs its room: after a fixed time, or when holding costs more than coming back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.effects import Effect, Recorded
from fractional_gpu.core.events import Attached, LeaseRequested, ResizeRequested
from fractional_gpu.core.forecasts.forecasts import RATE_BITS, HoldCosts
from fractional_gpu.core.idle import learn_cost
from fractional_gpu.core.model import Foresight, LeaseState, PoolSpec
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, Ticket
from tests.core.driving import Hand, device, pool, spec

HOUR_MS = 3_600_000
MINUTE_MS = 60_000


def auto(*, hold: float = 0, wait: float = 40) -> PoolSpec:
    """Return a pool with these prices for an hour."""
    hold_milli, wait_milli = int(hold * 1000), int(wait * 1000)
    return replace(
        pool("d0"), idle_auto=True, foresight=Foresight.OFF, hold_price_milli=hold_milli, wait_price_milli=wait_milli
    )


def stay(world: Hand, most_ms: int) -> tuple[int, list[Effect]]:
    """End the cell of "a"; return how long "a" stays after it and the effects of its suspend (none if it never leaves)."""
    began_ms, effects = world.now, world.rest("a")
    if world.suspends(effects):
        return 0, effects
    while world.observer.wake is not None and world.observer.wake - began_ms <= most_ms:
        effects = world.wait(max(1, world.observer.wake - world.now))
        if world.suspends(effects):
            return world.now - began_ms, effects
    world.wait(began_ms + most_ms - world.now)
    return most_ms, []


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


def test_a_kernel_that_grew_and_asks_leaves_sooner_also_if_it_runs_nothing_then() -> None:
    world = Hand(pools=[auto(hold=1, wait=40_000)])
    world.idle("a", 600)
    world.send(ResizeRequested(at_ms=world.now, lease_id="a", fraction_milli=1000, reserve_mib=600))
    late_ms = world.observer.wake or 0
    world.wait(1)
    world.want("a")
    assert world.observer.wake is not None
    assert world.observer.wake < late_ms


@pytest.mark.parametrize(("host_mib", "leaves"), [(1200, True), (1198, False)])
def test_a_kernel_leaves_automatically_only_if_half_of_the_host_memory_stays_free(
    *, host_mib: int, leaves: bool
) -> None:
    world = Hand(pools=[auto(hold=1_000_000, wait=1)], host_mib=host_mib)
    world.run("a", 600)
    assert bool(stay(world, HOUR_MS)[1]) is leaves


def test_a_fixed_time_is_kept_whatever_holding_costs() -> None:
    for idle_after_ms in (5_000, 50 * MINUTE_MS):
        policy = replace(auto(hold=1_000_000, wait=1), idle_after_ms=idle_after_ms, min_residency_ms=0)
        world = Hand(pools=[policy])
        world.run("a")
        assert stay(world, HOUR_MS)[0] == idle_after_ms


# -- what cells lose because idle leases hold memory -------------------------------------------------------------------------


def take_turns(world: Hand, *names: str, times: int, pause_ms: int = 10 * MINUTE_MS) -> list[str]:
    """Let each kernel run a short cell in turn; return the reasons for the suspends."""
    reasons: list[str] = []

    def note(effects: list[Effect]) -> None:
        reasons.extend(one.reason for one in effects if isinstance(one, Recorded) and one.reason.startswith("suspend."))
        if world.suspends(effects):
            note(world.saved(effects))
        elif world.resumes(effects):
            note(world.restored(effects))

    for number in range(times):
        note(world.want(names[number % len(names)]))
        world.work(names[number % len(names)])
        world.wait(1000)
        note(world.rest(names[number % len(names)]))
        until_ms = world.now + pause_ms
        while world.observer.wake is not None and world.observer.wake < until_ms:
            note(world.wait(max(1, world.observer.wake - world.now)))
        note(world.wait(until_ms - world.now))
    return reasons


def started(world: Hand, *names: str) -> Hand:
    for name in names:
        world.start(name)
    return world


def test_kernels_that_take_each_others_room_leave_before_the_next_asks() -> None:
    reasons = take_turns(started(Hand(pools=[auto()]), "a", "b"), "a", "b", times=60)
    assert reasons.count("suspend.needed-by") > 1
    assert "suspend.needed-by" not in reasons[-10:]
    assert reasons[-1] == "suspend.idle"


def test_half_of_host_memory_is_kept_for_tickets() -> None:
    saved_mib = 600  # assumed need of an idle kernel until it was saved once
    for host_mib, leaves in ((4 * saved_mib, True), (saved_mib + 10, False)):
        world = started(Hand(pools=[auto()], host_mib=host_mib), "a", "b")
        reasons = take_turns(world, "a", "b", times=60)
        assert ("suspend.idle" in reasons) is leaves
        assert "suspend.needed-by" in reasons


def test_kernels_that_have_room_beside_each_other_stay() -> None:
    roomy = started(Hand(device(memory_mib=2000), pools=[auto()]), "a", "b")
    assert take_turns(roomy, "a", "b", times=60) == []
    alone = started(Hand(pools=[auto()]), "a")
    assert take_turns(alone, "a", times=60) == []


def test_what_another_pools_kernels_take_from_each_other_makes_no_kernel_leave() -> None:
    world = Hand(device("d0"), device("d1"), pools=[auto(), replace(auto(), name="q", devices=("d1",))])
    world.send(LeaseRequested(at_ms=0, spec=spec("c", in_pool="q"), needs_reservation=False))
    world.send(Attached(at_ms=0, lease_id="c", gated=True))
    world.want("c")
    world.work("c")
    world.rest("c")
    reasons = take_turns(started(world, "a", "b"), "a", "b", times=60)
    assert reasons[-1] == "suspend.idle"
    assert world.state("c") is LeaseState.RESIDENT


def rate_after_a_ticket(count: int, saves_ms: int) -> int:
    """Return `hold_rate` after a ticket for that many devices waited 40 s, partly for idle leases to be saved."""
    books = Books()
    books.pools["p"] = auto()
    lease = Lease(spec=replace(spec("a"), devices=count, fraction_milli=1000), state=LeaseState.RESIDENT)
    books.add(lease)
    books.now_ms = 40_000
    learn_cost(books, lease, Ticket(order=1, asked_ms=0, saves_ms=saves_ms))
    return books.forecasts.hold_rate("p")


def test_only_waits_for_idle_leases_count_and_those_for_several_devices_less() -> None:
    one, two, four = (rate_after_a_ticket(count, 30_000) for count in (1, 2, 4))
    assert one > two > four > rate_after_a_ticket(1, 0) == 0


def leaves_after_ms(lost_ms: int) -> int:
    """Return how long "a" stays if the same idle memory delays every other cell by this much."""
    world = Hand(pools=[auto()])
    world.run("a")
    for _ in range(200):
        world.arbiter.forecasts.hold_seen("p", lost_ms, 40_000 * MINUTE_MS)
    return stay(world, 1000 * HOUR_MS)[0]


def test_a_kernel_leaves_sooner_the_more_others_lose_by_the_memory_of_idle_ones() -> None:
    rarely, often = leaves_after_ms(100), leaves_after_ms(10_000)
    assert 1000 * HOUR_MS > rarely > 50 * often > 0


def test_losses_fade_with_cells_and_are_not_made_of_one() -> None:
    costs = HoldCosts()
    assert costs.rate == 0
    costs.learn(10_000, 1000 * MINUTE_MS)
    first = costs.rate
    for _ in range(100):
        costs.learn(10_000, 1000 * MINUTE_MS)
    often = costs.rate
    for _ in range(1500):
        costs.learn(0, 1000 * MINUTE_MS)
    assert often > 20 * first > 0
    assert costs.rate == 0


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**12)), max_size=50))
def test_a_rate_is_rounded_down_by_less_than_a_quarter(cells: list[tuple[int, int]]) -> None:
    costs = HoldCosts()
    for lost_ms, held in cells:
        costs.learn(lost_ms, held)
    exact = (costs.lost << RATE_BITS) // (1024 * costs.held)
    assert costs.rate <= exact <= costs.rate + (costs.rate >> 2)
