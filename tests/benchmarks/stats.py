"""The statistics of the benchmarks: medians, percentiles and their 95 % intervals, without assumptions about distributions.

Times of programs have long tails and drift with the machine's load. So: medians, never means; what is compared is measured in turns
and compared pair by pair, so that drift cancels; the interval of a median comes from the sign test (the order statistics between
which the true median lies with the stated probability, whatever the distribution), that of a quotient of percentiles from a bootstrap
with a fixed seed.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = [
    "CONFIDENCE",
    "Estimate",
    "SignTest",
    "compare_percentiles",
    "median",
    "median_estimate",
    "percentile",
    "sign_test",
]

CONFIDENCE = 0.95
_RESAMPLES = 1000
_SEED = 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the interval that contains the true one with a probability of at least CONFIDENCE.

    An end is infinite where there are too few samples to say anything: fewer than six, for a median.
    """

    value: float
    low: float
    high: float


def median(samples: Sequence[float]) -> float:
    """Return the middle of the samples. Raises ValueError without any."""
    return percentile(samples, 50)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the samples lie, interpolated between neighbours. Raises ValueError."""
    if not samples:
        raise ValueError("there are no samples, so no percentile of them")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} is not a percentage; allowed: 0 to 100")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median_estimate(samples: Sequence[float]) -> Estimate:
    """Return the median and its sign-test interval. The samples must be independent. Raises ValueError without any."""
    ordered = sorted(samples)
    skipped = _skipped(len(ordered))
    if skipped is None:
        return Estimate(median(ordered), -math.inf, math.inf)
    return Estimate(median(ordered), ordered[skipped], ordered[-1 - skipped])


def compare_percentiles(ours: Sequence[float], theirs: Sequence[float], percent: float) -> Estimate:
    """Return the quotient of a percentile of `ours` and the same one of `theirs`, with its bootstrap interval.

    Raises ValueError when there are no samples or theirs is zero.
    """
    draw = random.Random(_SEED)

    def quotient(resample: Callable[[Sequence[float]], Sequence[float]]) -> float:
        below = percentile(resample(theirs), percent)
        if below == 0:
            raise ValueError("a percentile of zero cannot be compared with")
        return percentile(resample(ours), percent) / below

    value = quotient(lambda samples: samples)
    drawn = [quotient(lambda samples: draw.choices(samples, k=len(samples))) for _ in range(_RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2 * 100
    return Estimate(value, percentile(drawn, tail), percentile(drawn, 100 - tail))


@dataclass(frozen=True, slots=True)
class SignTest:
    """In how many pairs one of two is lower, and in how many it is higher; pairs of equals say nothing."""

    lower: int
    higher: int

    def luck(self, tries: int = 1) -> float:
        """Return the chance that one of so many things that are compared is so often lower where none is (Bonferroni)."""
        differ = self.lower + self.higher
        of_one = sum(math.comb(differ, count) for count in range(self.lower, differ + 1)) / float(2**differ)
        return min(1.0, of_one * tries)


def sign_test(ours: Sequence[float], theirs: Sequence[float]) -> SignTest:
    """Compare pair by pair. Raises ValueError where there are not as many of both."""
    pairs = list(zip(ours, theirs, strict=True))
    return SignTest(sum(one < other for one, other in pairs), sum(one > other for one, other in pairs))


def _skipped(count: int) -> int | None:
    """Return how many samples to leave out at each end, at most; None if even all of them are too few.

    Each sample is below the median with probability 1/2, so the number of those that are is binomial: the median lies outside the
    interval when at most `skipped` are on one side.
    """
    allowed = (1 - CONFIDENCE) / 2
    skipped, tail = -1, 0.0
    while (tail := tail + math.comb(count, skipped + 1) / 2**count) <= allowed:
        skipped += 1
    return skipped if skipped >= 0 else None
