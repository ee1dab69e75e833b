"""Choosing a device by the compute that busy leases need, in a pool that spreads."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import LeasesMeasured, PoolConfigured, SuspendRequested
from fractional_gpu.core.model import Compute, LeaseState, Slowdown
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease
from fractional_gpu.core.time_slicing import slowed_milli, stretch_milli
from fractional_gpu.core.words import describe_slowdown
from tests.core.driving import Hand, device, lease_measured, pool, spec
from tests.core.simulation import simulate

SMALL = 100  # MiB, so that ten fit on a device


def hand(*names: str, compute: Compute = Compute.SPREAD, may_move: bool = False) -> Hand:
    """Return the devices of one pool, on which a small lease never waits for memory."""
    names = names or ("d0", "d1")
    policy = replace(pool(*names, may_move=may_move), compute=compute)
    return Hand(*map(device, names), pools=[policy])


def seen(world: Hand, name: str, milli: int, *, times: int = 30) -> None:
    """Measure a busy kernel at this utilisation until the arbiter knows its demand."""
    for _ in range(times):
        world.send(lease_measured(world.now, name, 50, util_milli=milli))


def known(world: Hand, name: str, milli: int, reserve_mib: int = SMALL) -> None:
    """Start a kernel that is known to need this much while busy, end its cell, and shut it down."""
    world.run(name, reserve_mib)
    seen(world, name, milli)
    world.rest(name)


def busy(world: Hand, name: str, milli: int, reserve_mib: int = SMALL) -> str:
    """Run a cell in a kernel that needs this much; return its device."""
    world.run(name, reserve_mib)
    seen(world, name, milli)
    return place(world, name)


def place(world: Hand, name: str) -> str:
    found = world.view(name).device_id
    assert found is not None
    return found


def demand(world: Hand, device_id: str) -> int:
    return next(one.demand_milli for one in world.arbiter.devices() if one.device_id == device_id)


# -- what is learnt -----------------------------------------------------------------------------------------------------


def test_a_lease_is_known_by_what_it_used_while_it_was_busy() -> None:
    world = hand()
    world.run("a", SMALL)
    assert world.view("a").demand_milli == 300
    seen(world, "a", 800)
    assert world.view("a").demand_milli == pytest.approx(800, abs=60)
    world.rest("a")
    at_rest = world.view("a").demand_milli
    seen(world, "a", 0)
    assert world.view("a").demand_milli == at_rest
    world.work("a")
    seen(world, "a", 100, times=100)
    assert world.view("a").demand_milli == pytest.approx(100, abs=20)


def test_a_new_lease_starts_from_the_mean_of_its_pool() -> None:
    world = hand()
    busy(world, "a", 900)
    world.start("b", SMALL)
    assert world.view("b").demand_milli == pytest.approx(840, abs=60)


def test_a_lease_that_neighbours_keep_from_the_device_is_not_taken_for_a_light_one() -> None:
    world = hand("d0")
    busy(world, "a", 1000)
    alone = world.view("a").demand_milli
    world.run("b", SMALL)
    for _ in range(50):  # each gets half of the device
        seen(world, "a", 500, times=1)
        seen(world, "b", 500, times=1)
    assert world.view("a").demand_milli == alone
    assert world.view("b").demand_milli >= 500


def test_a_lease_whose_neighbour_leaves_it_enough_may_become_a_light_one() -> None:
    world = hand("d0")
    busy(world, "a", 1000)
    world.run("b", SMALL)
    for _ in range(100):
        seen(world, "a", 200, times=1)
        seen(world, "b", 300, times=1)
    assert world.view("a").demand_milli == pytest.approx(200, abs=30)


def test_a_light_kernel_beside_a_full_one_is_learnt_as_a_light_one() -> None:
    world = hand("d0")
    busy(world, "full", 1000)
    world.run("light", SMALL)
    assert world.view("light").demand_milli > 800, "as its pool, of which nothing else is known"
    for _ in range(100):  # a tenth and a whole device need 1.1: cells there take 1.11 times as long
        seen(world, "full", 901, times=1)
        seen(world, "light", 99, times=1)
    assert 99 <= world.view("light").demand_milli <= 130
    assert 901 <= world.view("full").demand_milli <= 1000
    assert 1000 <= demand(world, "d0") <= 1130


def test_samples_of_different_times_lower_no_demand() -> None:
    world = hand("d0")
    busy(world, "a", 1000)
    world.run("b", SMALL)
    before = world.view("b").demand_milli
    seen(world, "b", 400, times=50)  # what is known about "a" is from before "b" came
    assert world.view("b").demand_milli == before
    world.run("c", SMALL)
    seen(world, "a", 400, times=1)
    seen(world, "b", 300, times=50)  # "c" has not been measured yet
    assert world.view("b").demand_milli == before


@given(wants=st.lists(st.integers(20, 1000), min_size=2, max_size=6))
def test_however_neighbours_slow_a_kernel_down_it_is_not_taken_for_a_lighter_one(wants: list[int]) -> None:
    books, k_milli = Books(), stretch_milli(wants)
    books.add_device(Device(spec=device()))
    for number, want in enumerate(wants):
        lease = Lease(spec=spec(f"k{number}", SMALL), state=LeaseState.RESIDENT, busy=True)
        books.add(lease)
        books.set_reservation(lease, ("d0",), SMALL)
        lease.seen_milli = want * 1000 // slowed_milli(want, k_milli)
    used = [lease.seen_milli or 0 for lease in books.leases.values()]
    most = [books.devices["d0"].most_needed_milli(milli) for milli in used]
    if sum(used) < 900:
        assert most == used == wants
    else:
        assert all(use <= want <= bound for use, want, bound in zip(used, wants, most, strict=True)), most


def test_a_device_sums_up_what_is_busy_there() -> None:
    world = hand("d0")
    for name, milli in (("a", 200), ("b", 350)):
        busy(world, name, milli)
    assert demand(world, "d0") == 550, "each cell counts with what it shows itself"
    world.rest("a")
    assert demand(world, "d0") == 350
    world.rest("b")
    assert demand(world, "d0") == 0


# -- where ---------------------------------------------------------------------------------------------------------------


def test_two_that_need_more_than_half_go_to_different_devices_and_the_third_where_less_is_needed() -> None:
    world = hand()
    assert busy(world, "a", 900) == "d0"
    assert busy(world, "b", 600) == "d1"
    assert busy(world, "c", 700) == "d1"


@pytest.mark.parametrize(("compute", "second"), [(Compute.SPREAD, "d1"), (Compute.PACK, "d0")])
def test_a_busy_neighbour_counts_where_the_pool_spreads(compute: Compute, second: str) -> None:
    world = hand(compute=compute)
    assert busy(world, "a", 900) == "d0"
    assert busy(world, "b", 900) == second


@pytest.mark.parametrize(("compute", "places"), [(Compute.SPREAD, ("d1", "d0")), (Compute.PACK, ("d0", "d0"))])
def test_a_cell_that_was_let_in_counts_before_it_begins(compute: Compute, places: tuple[str, str]) -> None:
    world = hand(compute=compute)
    busy(world, "a", 900)  # so that the arbiter knows the pool's cells
    world.send(lease_measured(world.now, "a", 50))
    world.rest("a")
    for name in ("b", "c"):
        world.start(name, SMALL)
        world.want(name)
    assert (place(world, "b"), place(world, "c")) == places, "the idle kernel on d0 counts for less than a cell to come"


def test_a_cell_that_was_given_up_before_it_began_counts_no_more() -> None:
    world = hand()
    busy(world, "a", 900)
    world.rest("a")
    world.start("b", SMALL)
    world.want("b")
    world.give_up("b")
    world.start("c", SMALL)
    world.want("c")
    assert place(world, "c") == "d0"


def test_small_differences_do_not_take_another_device() -> None:
    world = hand()
    assert {busy(world, f"k{number}", 10) for number in range(6)} == {"d0"}


def test_kernels_spread_while_devices_are_empty() -> None:
    world = hand()
    assert {busy(world, f"k{number}", 200) for number in range(2)} == {"d0", "d1"}


def test_idle_kernels_count_for_a_part_of_what_their_next_cells_will_need() -> None:
    world = hand()
    for number in range(4):
        world.idle(f"k{number}", SMALL)
    assert {place(world, f"k{number}") for number in range(4)} == {"d0", "d1"}


def test_where_all_are_too_full_the_least_excess_comes_first() -> None:
    world = hand()
    assert busy(world, "a", 1000) == "d0"
    assert busy(world, "b", 1000) == "d1"
    world.rest("b")
    known(world, "light", 10)
    world.work("b")
    assert busy(world, "c", 500) in ("d0", "d1")
    other = "d1" if place(world, "c") == "d0" else "d0"
    assert busy(world, "d", 900) == other


def test_a_ticket_never_waits_for_compute() -> None:
    world = hand("d0")
    for number in range(9):
        assert busy(world, f"k{number}", 1000) == "d0"


def test_where_all_are_too_full_a_neighbour_that_ends_soon_counts_for_what_is_left_of_its_cell() -> None:
    world = hand()
    world.start("short", SMALL)
    world.start("long", 2 * SMALL)  # by memory alone it would go to that device
    for name in ("short", "long"):
        world.want(name)
        world.work(name)
        seen(world, name, 1000)
    assert (place(world, "short"), place(world, "long")) == ("d0", "d1")
    for _ in range(40):
        for name, cell_ms in (("short", 500), ("long", 3_600_000)):
            world.wait(cell_ms)
            world.rest(name)
            world.work(name)
    assert busy(world, "c", 600) == "d0"


def test_saved_state_goes_home_unless_home_is_too_busy_and_another_device_is_not() -> None:
    for home_is_full in (False, True):
        world = hand(may_move=True)
        known(world, "a", 900, 600)
        suspending = world.send(SuspendRequested(at_ms=world.now, lease_id="a"))
        world.saved(suspending)
        assert busy(world, "b", 900 if home_is_full else 50) == "d0"
        resuming = world.want("a")
        assert world.resumes(resuming) == [("a", "d1" if home_is_full else "d0")]


def test_saved_state_that_may_not_move_goes_home_however_busy_that_is() -> None:
    world = hand()
    known(world, "a", 900, 600)
    world.saved(world.send(SuspendRequested(at_ms=world.now, lease_id="a")))
    busy(world, "b", 900)
    assert world.resumes(world.want("a")) == [("a", "d0")]


def test_room_is_made_where_compute_is_left() -> None:
    world = hand()
    world.idle("x", 600)
    world.idle("y", 600)
    assert (place(world, "x"), place(world, "y")) == ("d0", "d1")
    known(world, "b", 900)
    assert place(world, "b") == "d0"
    world.wait(60_000)
    world.work("b")
    world.start("c", 600)
    assert world.suspends(world.want("c")) == ["y"]


# -- what does not change ------------------------------------------------------------------------------------------------


def test_in_a_pool_that_packs_utilisation_decides_nothing() -> None:
    for seed in range(3, 9):
        world = simulate(seed, 600)
        packing, plain = Arbiter(), Arbiter()
        for event in world.log:
            if isinstance(event, PoolConfigured):
                event = replace(event, pool=replace(event.pool, compute=Compute.PACK))  # noqa: PLW2901
            unseen = event
            if isinstance(event, LeasesMeasured):
                unseen = replace(event, measurements=tuple(replace(one, util_milli=None) for one in event.measurements))
            assert packing.handle(event) == plain.handle(unseen)


def test_a_whole_device_is_free_for_a_large_lease_while_few_small_ones_rest() -> None:
    world = hand()
    for number in range(2):
        world.idle(f"small{number}", SMALL)
    world.start("whole", 1000)
    effects = world.want("whole")
    assert world.granted(effects) == [("whole", "d1")]


def test_small_kernels_that_were_spread_make_room_for_one_that_needs_a_whole_device() -> None:
    world = hand()
    for name in ("a", "b"):
        busy(world, name, 900)
    assert {place(world, name) for name in ("a", "b")} == {"d0", "d1"}
    for name in ("a", "b"):
        world.rest(name)
    world.wait(60_000)
    world.start("whole", 1000)
    effects = world.want("whole")
    assert len(world.suspends(effects)) == 1, "one swap is the price"
    world.saved(effects)
    assert world.state("whole") is LeaseState.RESIDENT


# -- what is shown -------------------------------------------------------------------------------------------------------


def test_the_slowdown_of_a_cell_names_the_neighbours_that_cause_it() -> None:
    books = Books()
    books.add_device(Device(spec=device()))
    for number, milli in enumerate((600, 200, 400)):
        lease = Lease(spec=spec(f"k{number}", SMALL), state=LeaseState.RESIDENT, busy=True)
        books.add(lease)
        lease.demand_milli = milli
        books.set_reservation(lease, ("d0",), SMALL)
    leases = list(books.leases.values())
    # All three need 1.2 devices: cells there take 1.437 times as long, so a cell that needs 0.6 takes 0.4 + 0.6 * 1.437.
    found = describe_slowdown(books, leases[0])
    assert found.milli == 1263
    assert "next to kernel k2 and 1 more" in found.sentence, "the larger one first"
    books.set_busy(leases[1], busy=False)
    assert describe_slowdown(books, leases[0]) == Slowdown()
