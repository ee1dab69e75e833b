"""Medians, percentiles and the 95 % intervals of medians, without assumptions about distributions. Figures in, figures out.

Times of programs have long tails and drift with the machine's load: so medians, never means, with the interval of the sign test. Samples
that scatter symmetrically about their middle say more: `centre_estimate` has the narrower interval of Wilcoxon's signed-rank test (Hodges
and Lehmann, 1963; Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, section 3.3).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations_with_replacement
from statistics import NormalDist

CONFIDENCE = 0.95
_MOST_EXACT = 50  # samples: beyond, the rank sum is so close to normal that counting is not worth its time


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the interval that has the true one with at least CONFIDENCE; infinite where too few samples say anything."""

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
        raise ValueError(f"{percent} is not a percentage; expected 0 to 100")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def midmean(samples: Sequence[float]) -> float:
    """Return the mean of the middle half of the samples: what is typical, whatever a quarter at each end does. Raises ValueError."""
    ordered = sorted(samples)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    if not middle:
        raise ValueError("there are no samples, so no middle of them")
    return math.fsum(middle) / len(middle)


def median_estimate(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median and its sign-test interval. The samples must be independent. Raises ValueError without any."""
    ordered = sorted(samples)
    skipped = _skipped(len(ordered), confidence)
    if skipped is None:
        return Estimate(median(ordered), -math.inf, math.inf)
    return Estimate(median(ordered), ordered[skipped], ordered[-1 - skipped])


def _skipped(count: int, confidence: float) -> int | None:
    """Return how many samples to leave out at each end, at most; None if even all of them are too few.

    The number of samples below the median is binomial: the median lies outside the interval when at most `skipped` are on one side.
    """
    allowed = (1 - confidence) / 2
    skipped, tail = -1, 0.0
    while (tail := tail + math.comb(count, skipped + 1) / 2**count) <= allowed:
        skipped += 1
    return skipped if skipped >= 0 else None


def centre_estimate(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the centre of samples that scatter symmetrically about it, with its interval. Raises ValueError without any.

    The value is the median of the averages of all pairs (each sample with itself, too), and the interval lies between two such averages.
    Samples that are far off widen it, but hardly that of the sign test: the narrower one counts, the latter with the median. The samples
    must be independent, and their distribution symmetric; that of differences of two alike quantities is.
    """
    by_sign = median_estimate(samples, confidence)
    averages = sorted((one + other) / 2 for one, other in combinations_with_replacement(sorted(samples), 2))
    skipped = _skipped_averages(len(samples), confidence)
    if skipped is None:
        return by_sign
    by_rank = Estimate(median(averages), averages[skipped], averages[-1 - skipped])
    return by_rank if by_rank.high - by_rank.low <= by_sign.high - by_sign.low else by_sign


@lru_cache(maxsize=256)
def _skipped_averages(count: int, confidence: float) -> int | None:
    """Return how many averages of pairs to leave out at each end, at most; None if even all of them are too few.

    As many lie below the true centre as the ranks of the samples below it add up to: that sum is distributed as that of a random part of 1
    to `count`.
    """
    allowed = (1 - confidence) / 2
    if count <= _MOST_EXACT:
        return bisect_right(_rank_sums(count), allowed * 2**count) - 1 if allowed * 2**count >= 1 else None
    mean, spread = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return math.floor(NormalDist(mean, spread).inv_cdf(allowed) - 0.5)  # half a rank: the sum is a whole number


@lru_cache(maxsize=64)
def _rank_sums(count: int) -> list[int]:
    """Return, for each sum, how many parts of the numbers 1 to `count` add up to no more than it."""
    parts = [1]
    for rank in range(1, count + 1):
        parts = [
            (parts[total] if total < len(parts) else 0) + (parts[total - rank] if total >= rank else 0)
            for total in range(len(parts) + rank)
        ]
    return list(accumulate(parts))
