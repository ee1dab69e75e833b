"""The benchmarks' intervals contain the truth as often as claimed, and are absent if too little was measured."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.stats import centre_estimate
from tests.benchmarks.stats import CONFIDENCE, compare_percentiles, median_estimate, percentile


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0], math.nan)])
def test_a_percentile_that_makes_no_sense_is_refused(samples: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match=r"without samples|percent must be"):
        percentile(samples, percent)


@pytest.mark.parametrize("count", [1, 5])
def test_too_few_samples_say_nothing_of_the_median(count: int) -> None:
    found = median_estimate(list(range(count)))
    assert (found.low, found.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(("count", "skipped"), [(6, 0), (8, 0), (9, 1), (20, 5), (40, 13), (100, 39)])
def test_the_interval_ends_at_the_sign_test_s_order_statistics(count: int, skipped: int) -> None:
    # The tables of the sign test (for example Conover, Practical Nonparametric Statistics, table A3) give these.
    found = median_estimate(list(range(count)))
    assert (found.low, found.high) == (skipped, count - 1 - skipped)


def test_the_interval_of_a_skewed_distribution_contains_its_median_as_often_as_it_says() -> None:
    draw, truth = random.Random(7), math.log(2)
    found = [median_estimate([draw.expovariate(1) for _ in range(40)]) for _ in range(2000)]
    covered = sum(one.low <= truth <= one.high for one in found) / len(found)
    assert covered >= CONFIDENCE - 0.01
    assert covered < 0.99  # an interval that always contains it would say nothing


def test_a_quotient_s_interval_contains_the_true_one_as_often_as_it_says() -> None:
    draw = random.Random(11)
    trials = 25
    covered = 0
    for _ in range(trials):
        ours, theirs = [2 * draw.expovariate(1) for _ in range(80)], [draw.expovariate(1) for _ in range(80)]
        found = compare_percentiles(ours, theirs, 50)
        covered += found.low <= 2 <= found.high
    assert covered >= 0.85 * trials


def test_nothing_is_compared_with_zero() -> None:
    with pytest.raises(ValueError, match="zero"):
        compare_percentiles([1.0], [0.0], 50)


# -- the centre of symmetric samples -----------------------------------------------------------------------------------

FEW = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9)


def by_enumeration(samples: list[float], confidence: float) -> tuple[float, float]:
    """The interval by its definition: every assignment of signs is as likely as any other."""
    count = len(samples)
    sums = sorted(sum(rank + 1 for rank in range(count) if signs >> rank & 1) for signs in range(2**count))
    allowed = (1 - confidence) / 2 * len(sums)
    skipped = max((one for one in set(sums) if sum(other <= one for other in sums) <= allowed), default=None)
    if skipped is None:
        return -math.inf, math.inf
    averages = sorted((samples[one] + samples[other]) / 2 for one in range(count) for other in range(one + 1))
    return averages[skipped], averages[-1 - skipped]


@given(FEW, st.sampled_from([0.8, 0.95, 0.98]))
def test_the_centre_s_interval_is_the_narrower_of_signed_rank_by_enumeration_and_sign_test(
    samples: list[float], confidence: float
) -> None:
    found = centre_estimate(samples, confidence)
    low, high = by_enumeration(samples, confidence)
    sign = median_estimate(samples, confidence)
    assert found.high - found.low == pytest.approx(min(high - low, sign.high - sign.low)) or found.high == math.inf
    assert (found.low, found.high) in ((pytest.approx(low), pytest.approx(high)), (sign.low, sign.high))


@pytest.mark.parametrize(("count", "skipped"), [(6, 0), (7, 2), (8, 3), (10, 8), (20, 52), (30, 137), (50, 434)])
def test_the_signed_rank_interval_skips_what_the_tables_say(count: int, skipped: int) -> None:
    # Critical values at 5 %, two-sided (Wilcoxon and Wilcox, Some Rapid Approximate Statistical Procedures, 1964).
    samples = [float(2**number) if count < 11 else number**1.5 for number in range(count)]
    averages = sorted((one + other) / 2 for at, one in enumerate(samples) for other in samples[: at + 1])
    sign = median_estimate(samples)
    found = centre_estimate(samples)
    low, high = averages[skipped], averages[-1 - skipped]
    assert (found.low, found.high) == ((low, high) if high - low <= sign.high - sign.low else (sign.low, sign.high))


@pytest.mark.parametrize("noise", ["normal", "fat-tailed", "uniform", "difference of skewed ones"])
def test_the_centre_s_interval_contains_it_as_often_as_it_says_and_is_mostly_narrower(noise: str) -> None:
    draw = random.Random(5)
    samplers: dict[str, Callable[[], float]] = {
        "normal": lambda: draw.gauss(0, 1),
        "fat-tailed": lambda: draw.gauss(0, 1) / max(0.1, abs(draw.gauss(0, 1))),
        "uniform": lambda: draw.uniform(-1, 1),
        "difference of skewed ones": lambda: draw.expovariate(1) - draw.expovariate(1),
    }
    sample = samplers[noise]
    covered = narrower = 0
    for _ in range(600):
        samples = [sample() for _ in range(12)]
        found, sign = centre_estimate(samples, 0.985), median_estimate(samples, 0.985)
        covered += found.low <= 0 <= found.high
        narrower += found.high - found.low < sign.high - sign.low
    assert covered >= CONFIDENCE * 600
    assert narrower >= 0.5 * 600
