"""A slow cell's explanation gives an estimate in words and hides the names of other users' kernels."""

from dataclasses import replace

from fractional_gpu.core.model import LeaseState, Slowdown
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease
from fractional_gpu.core.time_slicing import slowed_milli, stretch_milli
from fractional_gpu.core.words import describe_slowdown
from tests.core.driving import device, spec
from tests.core.test_compute import busy, hand

SMALL, LARGE = 100, 900  # MiB of 1000


def described(*demands_milli: int, state: LeaseState = LeaseState.RESIDENT) -> Slowdown:
    """Return the explanation for the first of these busy leases on one device; the first two have the same owner."""
    books = Books()
    books.add_device(Device(spec=device()))
    for number, milli in enumerate(demands_milli):
        asked = replace(
            spec(f"k{number}", SMALL), owner="ada" if number < 2 else "bob", label=f"/home/ada/{number}.ipynb"
        )
        lease = Lease(spec=asked, state=LeaseState.RESIDENT if number else state, busy=True, let_in=True)
        books.add(lease)
        lease.demand_milli = milli
        books.set_reservation(lease, ("d0",), SMALL)
    return describe_slowdown(books, books.leases["k0"])


def test_the_neighbours_are_said_with_what_they_need_and_only_ones_own_by_name() -> None:
    assert described(600, 500, 700) == Slowdown(
        milli=1792,
        low_milli=1478,
        high_milli=2105,
        brief="runs next to another user's kernel and 1 more, about 1.8 times as long as alone (1.5 to 2.1)",
    )


def test_many_neighbours_are_counted() -> None:
    found = described(600, *[300] * 5)
    assert found.brief == "runs next to 1.ipynb and 4 more, about 2.8 times as long as alone (2.3 to 3.3)"


def test_nothing_is_said_of_a_cell_that_is_not_slowed_down() -> None:
    assert described(600, 400) == Slowdown()
    assert described(600, 430) == Slowdown(), "4 %: less than the estimate is worth"
    assert described(1000) == Slowdown()


def test_a_kernel_that_waits_is_told_of_no_neighbour_that_has_to_leave_for_it() -> None:
    world = hand("d0", "d1")
    for name, milli in (("a", 900), ("b", 600)):
        busy(world, name, milli, LARGE)
    assert world.arbiter.slowdown("a") == Slowdown(), "each is alone"
    world.start("c", SMALL + 1)
    world.want("c")
    assert world.arbiter.slowdown("c") == Slowdown(), "neither of them can stay"


def test_a_kernel_that_waits_is_told_of_the_neighbours_that_can_stay() -> None:
    world = hand("d0")
    for name, milli, mib in (("b", 600, 300), ("a", 900, 600)):
        busy(world, name, milli, mib)
    world.start("c", 600)
    world.want("c")
    needs_milli, least_milli = world.view("c").demand_milli, 600  # what the cell of "b" itself shows
    found = world.arbiter.slowdown("c")
    assert found.milli == slowed_milli(needs_milli, stretch_milli([needs_milli, least_milli]))
    assert found.sentence == f"its cell {found.brief}"
    assert found.brief.startswith("would run next to kernel b, about 1."), found.brief


def test_a_kernel_that_is_being_resumed_for_a_cell_is_told_of_the_device_to_which_it_comes() -> None:
    found = described(600, 900, state=LeaseState.RESUMING)
    assert found.milli == 1390
    assert found.brief == "would run next to 1.ipynb, about 1.4 times as long as alone (1.1 to 1.6)"
    assert described(600, 300, state=LeaseState.RESUMING) == Slowdown()


def test_of_a_lease_that_is_over_nothing_is_said() -> None:
    assert hand("d0").arbiter.slowdown("nobody") == Slowdown()
