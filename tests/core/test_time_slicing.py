"""The contention model: laws for any kernels on a device, and cases that can be worked out by hand."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.time_slicing import WHOLE_MILLI, most_wanted_milli, slowed_milli, stretch_milli

WANTS = st.lists(st.integers(0, 1000), max_size=12)
CAPACITIES = st.sampled_from((1000, 1000, 2000, 3300))


def used(wants: list[int], k_milli: int) -> Fraction:
    """Return the utilisation of the device by all its kernels."""
    k = Fraction(k_milli, 1000)
    return sum((Fraction(u, 1000) / (1 - Fraction(u, 1000) + Fraction(u, 1000) * k) for u in wants), Fraction(0))


@given(wants=WANTS, capacity=CAPACITIES)
def test_no_more_than_the_device_is_used_and_none_is_left(wants: list[int], capacity: int) -> None:
    k_milli, most = stretch_milli(wants, capacity), Fraction(capacity, 1000)
    assert used(wants, k_milli) <= most + Fraction(len(wants), 10**9)
    if k_milli > WHOLE_MILLI:
        assert used(wants, k_milli - 1) > most, "a thousandth less is not enough"


@given(wants=WANTS, capacity=CAPACITIES)
def test_kernels_that_fit_do_not_slow_each_other_down_and_others_do(wants: list[int], capacity: int) -> None:
    assert (stretch_milli(wants, capacity) == WHOLE_MILLI) == (sum(wants) <= capacity)


@given(wants=WANTS, more=st.integers(0, 1000), at=st.integers(0, 11), capacity=CAPACITIES)
def test_a_kernel_that_comes_or_wants_more_never_shortens_anything(
    wants: list[int], more: int, at: int, capacity: int
) -> None:
    before = stretch_milli(wants, capacity)
    assert stretch_milli([*wants, more], capacity) >= before
    if at < len(wants):
        wants[at] = max(wants[at], more)
        assert stretch_milli(wants, capacity) >= before


@given(wants=WANTS, more=st.integers(0, 1000))
def test_the_order_of_kernels_does_not_matter_nor_one_that_wants_nothing(wants: list[int], more: int) -> None:
    assert stretch_milli([*wants, more]) == stretch_milli([more, 0, *reversed(wants)])


@given(wants=WANTS.filter(any))
def test_k_lies_between_the_sum_of_the_wants_and_the_number_of_kernels(wants: list[int]) -> None:
    assert max(WHOLE_MILLI, sum(wants)) <= stretch_milli(wants) <= WHOLE_MILLI * len(wants)


@given(want=st.integers(0, 1000), k_milli=st.integers(1000, 50_000))
def test_a_cell_is_slowed_down_by_its_part_on_the_device_only(want: int, k_milli: int) -> None:
    exact = 1000 - want + Fraction(want * k_milli, 1000)
    assert 0 <= slowed_milli(want, k_milli) - exact < 1


@given(wants=WANTS.filter(any))
def test_what_is_used_of_a_full_device_bounds_what_is_wanted(wants: list[int]) -> None:
    k = Fraction(stretch_milli(wants), 1000)
    uses = [Fraction(u) / (1 - Fraction(u, 1000) * (1 - k)) for u in wants]
    largest = int(max(uses))  # rounded down: k may exceed the model's value, never fall below it
    for want, use in zip(wants, uses, strict=True):
        assert want <= most_wanted_milli(-(-use // 1), largest)


@pytest.mark.parametrize(
    ("use", "largest", "most"),
    [
        (99, 901, 101),  # a light kernel next to a full one
        (500, 500, 1000),  # two equal ones may each want anything from half of the device
        (300, 700, 345),
        (0, 1000, 0),
    ],
)
def test_what_a_kernel_wants_at_most_by_hand(use: int, largest: int, most: int) -> None:
    assert most_wanted_milli(use, largest) == most


@pytest.mark.parametrize(
    ("wants", "k_milli", "slowed"),
    [
        ([600, 600], 1334, [1201, 1201]),  # work for 1.2 devices on one device: 1.2 times as long
        ([800, 800], 1750, [1600, 1600]),
        ([1000, 1000, 1000], 3000, [3000, 3000, 3000]),
        ([500, 1000], 1619, [1310, 1619]),  # 1/k + 1/(1 + k) = 1: the golden ratio
        ([400, 600], 1000, [1000, 1000]),
    ],
)
def test_cases_by_hand(wants: list[int], k_milli: int, slowed: list[int]) -> None:
    assert stretch_milli(wants) == k_milli
    assert [slowed_milli(want, k_milli) for want in wants] == slowed


def test_kernels_that_fill_half_a_device_each_run_two_at_a_time() -> None:
    assert stretch_milli([1000, 1000], 2000) == WHOLE_MILLI
    assert stretch_milli([1000, 1000, 1000], 2000) == 1500
