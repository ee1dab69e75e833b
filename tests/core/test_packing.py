"""The forecast wait agrees with enumeration, grows with every seat, and devices fill up one after another."""

import time
from fractions import Fraction
from itertools import product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.seat_packing import (
    CELL_MEDIAN_MS,
    PRIOR_USAGE,
    SeatDevice,
    SeatLoad,
    Usage,
    admissible_milli,
    choose_device,
    estimated_usage,
    least_waiting,
    more_seats,
    more_seats_in,
    still_waiting_milli,
    wait_chance_with,
    wait_quantile_ms,
)

LOADS = st.builds(SeatLoad, mib=st.integers(1, 1000), duty_milli=st.integers(1, 1000))


def _enumerated(loads: list[SeatLoad], capacity: int) -> Fraction:
    """The same probability by definition: sum over every combination of active seats, weighted by probability."""
    waiting = expected = Fraction(0)
    for active in product((False, True), repeat=len(loads)):
        chance = Fraction(1)
        for load, on in zip(loads, active, strict=True):
            chance *= Fraction(load.duty_milli if on else 1000 - load.duty_milli, 1000)
        need = sum(load.mib for load, on in zip(loads, active, strict=True) if on)
        expected += chance * sum(active)
        waiting += chance * sum(active) * (need > capacity)
    return waiting / expected


def waiting(loads: list[SeatLoad], capacity: int) -> int:
    *there, last = loads
    return wait_chance_with(last, [SeatDevice(device_id="0", capacity_mib=capacity, loads=tuple(there))], "0")


@given(loads=st.lists(LOADS, min_size=1, max_size=7))
def test_it_is_what_enumeration_gives(loads: list[SeatLoad]) -> None:
    exact = _enumerated(loads, 1000)  # a device of 1000 MiB: a thousandth is a MiB, and nothing is rounded
    forecast = Fraction(waiting(loads, 1000), 1_000_000)
    assert exact <= forecast <= exact + Fraction(2, 1_000_000)


@given(loads=st.lists(LOADS, max_size=12), more=LOADS, capacity=st.integers(1, 2000))
def test_more_memory_never_makes_the_wait_longer(loads: list[SeatLoad], more: SeatLoad, capacity: int) -> None:
    seats = [*loads, more]
    assert waiting(seats, capacity + 500) <= waiting(seats, capacity)


@given(loads=st.lists(LOADS, min_size=2, max_size=12), more=LOADS, capacity=st.integers(1, 2000))
def test_the_order_of_the_seats_does_not_matter(loads: list[SeatLoad], more: SeatLoad, capacity: int) -> None:
    assert waiting([*loads, more], capacity) == waiting([*reversed(loads), more], capacity)


@given(load=LOADS, count=st.integers(1, 20))
def test_one_more_like_the_others_never_makes_the_wait_shorter(load: SeatLoad, count: int) -> None:
    before = waiting([load] * count, 1000)
    assert waiting([load] * (count + 1), 1000) >= before - 1


@given(load=LOADS)
def test_who_is_alone_on_a_device_that_is_large_enough_never_waits(load: SeatLoad) -> None:
    assert waiting([load], load.mib) == 0


@given(loads=st.lists(LOADS, min_size=1, max_size=8))
def test_seats_whose_sum_fits_never_wait(loads: list[SeatLoad]) -> None:
    assert waiting(loads, 1000 * len(loads) + 1000) == 0


def test_without_memory_every_seat_waits() -> None:
    assert waiting([SeatLoad(mib=1, duty_milli=1)], 0) == 1_000_000


def test_half_of_those_who_wait_still_wait_after_the_median_of_a_cell() -> None:
    assert [still_waiting_milli(number * CELL_MEDIAN_MS) for number in range(4)] == [1000, 500, 250, 125]
    assert still_waiting_milli(100 * CELL_MEDIAN_MS) == 0
    waits = [still_waiting_milli(ms) for ms in range(0, 12 * CELL_MEDIAN_MS, 7000)]
    assert waits == sorted(waits, reverse=True)


def test_a_longer_target_is_kept_more_often() -> None:
    crowd = [SeatLoad(mib=250, duty_milli=400)] * 12
    place = SeatDevice(device_id="0", capacity_mib=1000, loads=tuple(crowd[1:]))
    at_once, later = (choose_device(crowd[0], [place], target_ms=ms, bound_milli=1000)[1] for ms in (0, 240_000))
    assert at_once == waiting(crowd, 1000)
    assert later == -(-at_once // 4)


def test_a_new_user_gets_the_prior_and_a_known_user_their_history() -> None:
    assert estimated_usage(live_ms=0, busy_ms=0, busy_mib_ms=0) == PRIOR_USAGE
    hour = 3_600_000
    seen = estimated_usage(live_ms=4000 * hour, busy_ms=400 * hour, busy_mib_ms=400 * hour * 9000)
    assert seen == Usage(duty_milli=100, active_mib=8994)


@given(live=st.integers(0, 10**10), busy=st.integers(0, 10**10), mib=st.integers(0, 200_000))
def test_habits_stay_between_what_was_seen_and_the_prior(live: int, busy: int, mib: int) -> None:
    busy = min(busy, live)
    habits = estimated_usage(live_ms=live, busy_ms=busy, busy_mib_ms=busy * mib)
    seen = busy * 1000 // live if live else PRIOR_USAGE.duty_milli
    assert min(seen, PRIOR_USAGE.duty_milli) <= habits.duty_milli <= max(seen, PRIOR_USAGE.duty_milli) + 1
    assert 1 <= habits.active_mib <= max(mib, PRIOR_USAGE.active_mib)


def test_devices_are_filled_one_after_the_other_up_to_the_bound() -> None:
    loads: dict[str, list[SeatLoad]] = {"a": [], "b": []}
    seat = SeatLoad(mib=10_000, duty_milli=100)
    order = []
    while True:
        places = [SeatDevice(device_id=name, capacity_mib=80_000, loads=tuple(on)) for name, on in loads.items()]
        device_id, chance = choose_device(seat, places, target_ms=30_000, bound_milli=50)
        if device_id is None:
            break
        assert chance <= 50_000
        loads[device_id].append(seat)
        order.append(device_id)
    assert chance > 50_000
    each = len(order) // 2
    assert each > 8, "more seats than the caps alone would allow"
    assert order == ["a"] * each + ["b"] * each


def test_a_seat_that_no_device_can_hold_has_no_place() -> None:
    empty = SeatDevice(device_id="a", capacity_mib=1000, loads=())
    assert choose_device(SeatLoad(mib=1001, duty_milli=1), [empty], target_ms=0, bound_milli=1000) == (None, 1_000_000)
    assert choose_device(SeatLoad(mib=1, duty_milli=1), [], target_ms=0, bound_milli=1000) == (None, 1_000_000)


@pytest.mark.parametrize("seats", [200])
def test_a_forecast_for_a_full_device_takes_little_time(seats: int) -> None:
    crowd = [SeatLoad(mib=400 + number, duty_milli=100) for number in range(seats)]
    begun = time.process_time()
    waiting(crowd, 81_920)
    assert time.process_time() - begun < 2.0  # takes about 0.1 s; the bound only catches a worse order of growth


@given(loads=st.lists(LOADS, max_size=8), load=LOADS, bound=st.integers(0, 1000))
def test_one_device_takes_as_many_more_seats_as_it_does_one_by_one(
    loads: list[SeatLoad], load: SeatLoad, bound: int
) -> None:
    most, counted = 12, 0
    there = list(loads)
    while counted < most:
        place = SeatDevice(device_id="0", capacity_mib=1000, loads=tuple(there))
        if choose_device(load, [place], target_ms=30_000, bound_milli=bound)[0] is None:
            break
        there.append(load)
        counted += 1
    found = more_seats(tuple(sorted(loads)), load, 1000, target_ms=30_000, bound_milli=bound, most=most)
    assert abs(found - counted) <= 1, "the order of additions rounds by a hair"


@given(counts=st.dictionaries(st.sampled_from([100, 125, 250, 300, 500, 1000]), st.integers(0, 40), min_size=1))
def test_what_is_admissible_may_be_divided_into_any_fractions_on_offer(counts: dict[int, int]) -> None:
    milli = admissible_milli(counts)
    assert milli % min(counts) == 0
    assert all(milli // fraction <= count for fraction, count in counts.items())
    more = milli + min(counts)
    assert any(more // fraction > count for fraction, count in counts.items()), "no more is"


@given(waiting=st.integers(0, 1_000_000), milli=st.integers(1, 999))
def test_so_many_cells_begin_within_the_quantile(waiting: int, milli: int) -> None:
    wait_ms = wait_quantile_ms(waiting, milli)
    late = -(-waiting * still_waiting_milli(wait_ms) // 1000)
    assert late <= 1_000_000 - 1000 * milli
    if wait_ms:
        assert -(-waiting * still_waiting_milli(wait_ms - 1) // 1000) > 1_000_000 - 1000 * milli, "and not sooner"


def test_a_seat_that_must_be_placed_goes_where_the_fewest_cells_wait() -> None:
    load = SeatLoad(mib=600, duty_milli=500)
    crowded, calm = (
        SeatDevice(device_id=name, capacity_mib=1000, loads=(load,) * count) for name, count in (("a", 3), ("b", 1))
    )
    place, chance = least_waiting(load, [crowded, calm])
    assert place is calm
    assert chance == waiting([load, load], 1000)
    assert least_waiting(SeatLoad(mib=1001, duty_milli=1), [crowded, calm]) == (None, 1_000_000)


def like(*loads: tuple[SeatLoad, ...], kind: str = "gpu", mib: int = 1000) -> list[SeatDevice]:
    return [SeatDevice(device_id=str(at), capacity_mib=mib, loads=there, kind=kind) for at, there in enumerate(loads)]


@given(duty=st.integers(1, 1000), count=st.integers(0, 6), devices=st.integers(2, 3))
def test_whole_seats_on_like_devices_wait_as_enumeration_says(duty: int, count: int, devices: int) -> None:
    load = SeatLoad(mib=1000, duty_milli=duty)
    places = like((load,) * count, *[()] * (devices - 1))
    chance, active = Fraction(duty, 1000), count + 1
    counted = sum(
        one * comb(active, one) * chance**one * (1 - chance) ** (active - one) for one in range(devices + 1, active + 1)
    )
    expected = counted / (active * chance)
    found = Fraction(wait_chance_with(load, places, "0"), 1_000_000)
    assert 0 <= found - expected <= Fraction(1, 100_000)


@given(mib=st.integers(1, 1000), bound=st.integers(0, 500), devices=st.integers(1, 3))
def test_a_share_that_does_not_divide_a_device_counts_as_one_that_does(mib: int, bound: int, devices: int) -> None:
    sizes = {mib, 1000 // (1000 // mib)}
    counts = {
        more_seats_in(like(*[()] * devices), SeatLoad(mib=one, duty_milli=300), target_ms=0, bound_milli=bound, most=4)
        for one in sizes
    }
    assert len(counts) == 1 or devices == 1
    assert min(counts) >= min(4, 1000 // mib) * devices - devices, "those that always fit, but for the width of a bin"


def test_devices_of_no_kind_are_forecast_one_by_one_and_those_of_a_kind_together() -> None:
    load = SeatLoad(mib=1000, duty_milli=250)
    apart, together = (like(*[(load,)] * 4, kind=kind) for kind in ("", "gpu"))
    asked = {"target_ms": 30_000, "bound_milli": 50}
    assert choose_device(load, apart, **asked)[0] is None
    device_id, chance = choose_device(load, together, **asked)
    assert device_id == "0"
    assert chance <= 50_000
    more = {"most": 8, **asked}
    assert more_seats_in(apart, load, **more) == 0
    assert more_seats_in(together, load, **more) > 0


def test_among_like_devices_a_seat_goes_to_the_emptiest_that_is_large_enough() -> None:
    load = SeatLoad(mib=600, duty_milli=100)
    places = [*like((load,), ()), SeatDevice(device_id="small", capacity_mib=500, loads=(), kind="gpu")]
    assert choose_device(load, places, target_ms=0, bound_milli=1000)[0] == "1"
    assert (
        choose_device(SeatLoad(mib=400, duty_milli=1), like((load,), kind=""), target_ms=0, bound_milli=1000)[0] == "0"
    )
