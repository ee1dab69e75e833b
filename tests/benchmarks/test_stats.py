"""The benchmarks' intervals contain the truth as often as they say, and say nothing where too little was measured."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.stats import midmean
from tests.benchmarks.stats import CONFIDENCE, compare_percentiles, median, median_estimate, percentile

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(SAMPLES)
def test_the_median_is_the_standard_library_s(samples: list[float]) -> None:
    assert median(samples) == pytest.approx(statistics.median(samples))


@given(SAMPLES, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_grow_from_the_least_sample_to_the_greatest(samples: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert percentile(samples, low) <= percentile(samples, high) + 1e-6
    assert percentile(samples, 0) == min(samples)
    assert percentile(samples, 100) == max(samples)


def test_a_percentile_between_two_samples_is_interpolated() -> None:
    assert percentile([10, 20], 25) == 12.5


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0], math.nan)])
def test_a_percentile_that_makes_no_sense_is_refused(samples: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match=r"no samples|not a percentage"):
        percentile(samples, percent)


@given(SAMPLES, st.floats(1, 1e9))
def test_the_middle_lies_between_the_quartiles_and_ignores_how_far_off_the_others_are(
    samples: list[float], far: float
) -> None:
    ordered = sorted(samples)
    cut = len(ordered) // 4
    assert ordered[cut] - 1e-6 <= midmean(samples) <= ordered[-1 - cut] + 1e-6
    outliers = [one - far for one in ordered[:cut]] + ordered[cut : len(ordered) - cut]
    assert midmean([*outliers, *(one + far for one in ordered[len(ordered) - cut :])]) == midmean(samples)


def test_nothing_has_no_middle() -> None:
    with pytest.raises(ValueError, match="no middle"):
        midmean([])


@given(SAMPLES)
def test_an_interval_contains_its_median(samples: list[float]) -> None:
    found = median_estimate(samples)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("count", [1, 5])
def test_too_few_samples_say_nothing_of_the_median(count: int) -> None:
    found = median_estimate(list(range(count)))
    assert (found.low, found.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(("count", "skipped"), [(6, 0), (8, 0), (9, 1), (20, 5), (40, 13), (100, 39)])
def test_the_interval_ends_at_the_sign_test_s_order_statistics(count: int, skipped: int) -> None:
    # The tables of the sign test (for example Conover, Practical Nonparametric Statistics, table A3) give these.
    found = median_estimate(list(range(count)))
    assert (found.low, found.high) == (skipped, count - 1 - skipped)


@pytest.mark.parametrize(("count", "bounded"), [(6, False), (7, True)])
def test_an_interval_that_is_surer_takes_more_samples(count: int, bounded: bool) -> None:
    assert math.isfinite(median_estimate(list(range(count)), 0.98).low) == bounded


def test_the_interval_of_a_skewed_distribution_contains_its_median_as_often_as_it_says() -> None:
    draw, truth = random.Random(7), math.log(2)
    found = [median_estimate([draw.expovariate(1) for _ in range(40)]) for _ in range(2000)]
    covered = sum(one.low <= truth <= one.high for one in found) / len(found)
    assert covered >= CONFIDENCE - 0.01
    assert covered < 0.99  # an interval that always contains it would say nothing


def test_a_quotient_s_interval_contains_the_true_one_as_often_as_it_says() -> None:
    draw = random.Random(11)
    trials = 60
    covered = 0
    for _ in range(trials):
        ours, theirs = [2 * draw.expovariate(1) for _ in range(80)], [draw.expovariate(1) for _ in range(80)]
        found = compare_percentiles(ours, theirs, 50)
        covered += found.low <= 2 <= found.high
    assert covered >= 0.85 * trials


def test_a_quotient_is_the_same_for_the_same_samples() -> None:
    assert compare_percentiles([2, 4, 6], [1, 2, 3], 50) == compare_percentiles([2, 4, 6], [1, 2, 3], 50)
    assert compare_percentiles([2, 4, 6], [1, 2, 3], 50).value == 2


def test_nothing_is_compared_with_zero() -> None:
    with pytest.raises(ValueError, match="zero"):
        compare_percentiles([1.0], [0.0], 50)
