"""When an idle lease leaves though no ticket needs its room: after a fixed time, or when holding costs more than coming back."""

from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.effects import Effect, Recorded
from fractional_gpu.core.events import Attached, LeaseRequested
from fractional_gpu.core.forecasts.estimators import DURATIONS, OCTAVES, RATE_BITS, STEP, HoldCosts, leave_after_ms
from fractional_gpu.core.forecasts.wait_prices import LEAST_WAITS, MOST_WAITS
from fractional_gpu.core.idle import IdleCosts
from fractional_gpu.core.model import Compute, Foresight, LeaseState, PoolSpec
from fractional_gpu.core.place import crowding_ms
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease, Ticket
from tests.core.driving import Hand, device, pool, spec

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
    totals, lows, times = list(accumulate(weights)), DURATIONS.lows, (0, *OCTAVES)
    reach = [totals[-1], *(totals[-1] - totals[DURATIONS.bucket(at) - 1] for at in OCTAVES)]  # gaps at least so long

    def cost(leaves_ms: int) -> int:
        """Twice the cost of all gaps: those that end between two times end halfway, on average."""
        last = times.index(leaves_ms)
        held = sum((reach[at] + reach[at + 1]) * (times[at + 1] - times[at]) for at in range(last))
        return hold * held + 2 * back * reach[last]

    def exact(leaves_ms: int) -> float:
        """The cost of all gaps, with every time that the histogram tells apart."""
        spent = 0.0
        for place, weight in enumerate(weights[:-1]):
            low, high = lows[place], lows[place + 1]
            held = leaves_ms if high > leaves_ms else (low + high) / 2
            spent += weight * (hold * held + (back if high > leaves_ms else 0))
        return spent + weights[-1] * (hold * leaves_ms + back)

    chosen = leave_after_ms(totals, hold=hold, back=back)
    assert cost(chosen) == min(map(cost, times))
    assert exact(chosen) <= 2 * min(map(exact, lows[:-1])) + OCTAVES[0] * hold * sum(weights)  # the price of octaves


def test_a_fixed_time_is_kept_whatever_holding_costs() -> None:
    for idle_after_ms in (5_000, 50 * MINUTE_MS):
        policy = replace(auto(hold=1_000_000, wait=1), idle_after_ms=idle_after_ms, min_residency_ms=0)
        world = Hand(pools=[policy])
        world.run("a")
        assert stay(world, HOUR_MS)[0] == idle_after_ms


# -- what cells lose because idle leases hold memory -------------------------------------------------------------------------


def take_turns(world: Hand, *names: str, times: int, pause_ms: int = 10 * MINUTE_MS) -> list[str]:
    """Have each kernel run a short cell in turn; return why leases were suspended."""
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
    saved_mib = 600  # what an idle kernel is taken to need there until it was saved once
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


def lost_ms(elsewhere_mib: int, policy: PoolSpec) -> int:
    """What is lost by a cell beside a busy one on d0 while an idle lease holds so much of the 1000 MiB of d1."""
    books = Books()
    books.pools[policy.name] = policy
    for name in policy.devices:
        books.add_device(Device(spec=device(name)))
    for name, device_id, mib, busy in (
        ("a", "d0", 100, True),
        ("b", "d1", elsewhere_mib, False),
        ("c", "d0", 200, True),
    ):
        lease = Lease(spec=spec(name, mib), state=LeaseState.RESIDENT, busy=busy, let_in=busy)
        books.add(lease)
        lease.demand_milli = 900
        books.set_reservation(lease, (device_id,), mib)
    return crowding_ms(books, books.leases["c"])


def test_a_cell_beside_a_busy_one_loses_time_by_idle_memory_on_a_free_device() -> None:
    policy = replace(auto(), devices=("d0", "d1"), compute=Compute.SPREAD, may_move=True)
    assert lost_ms(900, policy) > 0
    assert lost_ms(100, policy) == 0  # d1 had room: memory was not the reason
    assert lost_ms(900, replace(policy, compute=Compute.PACK)) == 0  # no pool that spreads


def rate_after_a_ticket(count: int, *, devices: int = 10, usual_wait_ms: int = 1000) -> int:
    """What `hold_rate` is after a ticket for so many devices waited 40 s, 30 s of them for idle leases to be saved."""
    books = Books()
    names = tuple(f"d{number}" for number in range(devices))
    books.pools["p"] = replace(auto(), devices=names, compute=Compute.PACK)
    for name in names:
        books.add_device(Device(spec=device(name)))
    lease = Lease(spec=replace(spec("a"), devices=count, fraction_milli=1000), state=LeaseState.RESIDENT)
    books.add(lease)
    for _ in range(LEAST_WAITS):
        books.forecasts.wait_prices.learn("p", usual_wait_ms)
    books.now_ms = 40_000
    IdleCosts(books).granted(lease, Ticket(order=1, asked_ms=0, saves_ms=30_000))
    return books.forecasts.hold_rate("p")


def test_a_long_wait_counts_more_than_one_of_the_usual_length() -> None:
    usual, long = rate_after_a_ticket(1, usual_wait_ms=60_000), rate_after_a_ticket(1)
    assert long > 5 * usual > 0


def test_long_waits_for_several_devices_count_where_that_is_less_than_half_of_the_pool() -> None:
    one, two, four, five = (rate_after_a_ticket(count) for count in (1, 2, 4, 5))
    assert one > two > four > five == 0
    assert rate_after_a_ticket(2, usual_wait_ms=60_000) == 0
    assert rate_after_a_ticket(2, devices=2) == 0


def leaves_after_ms(policy: PoolSpec, usual_wait_ms: int, *, channel_ms: int = 0) -> int:
    """How long "a" stays in a pool with such waits, also for a swap channel, where holding is known to cost others time."""
    world = Hand(pools=[policy])
    world.run("a")
    forecasts = world.arbiter.forecasts
    for _ in range(MOST_WAITS):
        forecasts.wait_prices.learn("p", usual_wait_ms)
        forecasts.wait_prices.learn_return("p", 1000, channel_ms)
        forecasts.hold_seen("p", 1000, 40_000 * MINUTE_MS)
    return stay(world, 100 * HOUR_MS)[0]


def test_an_idle_kernel_stays_longer_where_its_own_return_would_be_a_long_wait() -> None:
    assert leaves_after_ms(auto(), 60_000) < leaves_after_ms(auto(), 10)


def test_an_idle_kernel_stays_longer_where_returns_wait_for_a_swap_channel() -> None:
    assert leaves_after_ms(auto(), 60_000) < leaves_after_ms(auto(), 60_000, channel_ms=60_000)


def test_a_wait_includes_the_restore_of_what_was_saved() -> None:
    waits = []
    for saved_mib in (100, 10_000):
        books = Books()
        books.pools["p"] = auto()
        lease = Lease(spec=spec("a"), state=LeaseState.SUSPENDED, saved_mib=saved_mib)
        books.add(lease)
        books.now_ms = 5000
        IdleCosts(books).granted(lease, Ticket(order=1, asked_ms=1000))
        waits.append(books.forecasts.wait_prices.of("p").recent[0])
    assert 4000 < waits[0] < waits[1]


def queued_ms(*, asks_during_the_save: bool) -> int:
    """What queueing for a channel is taken to cost after "a" has come back, that asked while it was saved for "b" or later."""
    world = started(Hand(pools=[auto()]), "b")
    world.idle("a")
    world.wait(10 * MINUTE_MS)
    saving = world.want("b")
    if asks_during_the_save:
        world.want("a")
    world.wait(500)
    world.saved(saving)
    world.work("b")
    world.wait(10 * MINUTE_MS)
    effects = world.rest("b")
    if not asks_during_the_save:
        effects = world.want("a")
    assert world.resumes(world.saved(effects)) == [("a", "d0")]
    return world.arbiter.forecasts.wait_prices.of("p").queued_ms


def test_a_return_is_seen_to_wait_for_the_swap_channel_if_that_is_in_use_when_it_is_asked_for() -> None:
    assert queued_ms(asks_during_the_save=True) > 0
    assert queued_ms(asks_during_the_save=False) == 0


def test_with_a_price_for_holding_all_waits_count_alike() -> None:
    priced = auto(hold=0.01)
    assert leaves_after_ms(priced, 60_000) == leaves_after_ms(priced, 10)


def test_cells_that_find_room_at_once_are_waits_of_no_time() -> None:
    world = started(Hand(device(memory_mib=2000), pools=[auto()]), "a", "b")
    take_turns(world, "a", "b", times=30)
    assert list(world.arbiter.forecasts.wait_prices.of("p").recent) == [0] * 30


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
    exact = (costs.lost << RATE_BITS) // (STEP * costs.held)
    assert costs.rate <= exact <= costs.rate + (costs.rate >> 2)
