"""Computes medians, percentiles and 95 % confidence intervals of medians, without assumptions about distributions.

Programs' run times have long tails and drift with the machine's load. This module therefore uses medians rather than means, and computes
sign-test intervals for them. For samples that scatter symmetrically, `centre_estimate` can return a narrower interval, from Wilcoxon's
signed-rank test (Hodges and Lehmann, 1963; Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, section 3.3).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations_with_replacement
from statistics import NormalDist

CONFIDENCE = 0.95
_MOST_EXACT = 50  # with more samples, the rank sum is so close to normal that counting is not worth its time


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, and an interval that contains the true value with a confidence of at least CONFIDENCE.

    With too few samples, the interval is infinite.
    """

    value: float
    low: float
    high: float


def median(samples: Sequence[float]) -> float:
    """Return the median. Raises ValueError if there are no samples."""
    return percentile(samples, 50)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` % of the samples lie, interpolated between neighbours.

    Raises ValueError if there are no samples or if `percent` is out of range.
    """
    if not samples:
        raise ValueError("cannot compute a percentile without samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be from 0 to 100, not {percent}")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def midmean(samples: Sequence[float]) -> float:
    """Return the mean of the middle half of the samples, so that outliers are ignored. Raises ValueError if there are no samples."""
    ordered = sorted(samples)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    if not middle:
        raise ValueError("cannot compute a mean without samples")
    return math.fsum(middle) / len(middle)


def median_estimate(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median and its sign-test interval. The samples must be independent. Raises ValueError if there are no samples."""
    ordered = sorted(samples)
    skipped = _skipped(len(ordered), confidence)
    if skipped is None:
        return Estimate(median(ordered), -math.inf, math.inf)
    return Estimate(median(ordered), ordered[skipped], ordered[-1 - skipped])


def _skipped(count: int, confidence: float) -> int | None:
    """Return the largest number of samples that can be left out at each end, or None if there are too few samples.

    The number of samples below the true median has a binomial distribution. The interval spans the remaining samples. It misses the true
    median if at most `skipped` samples lie on one side of the true median.
    """
    allowed = (1 - confidence) / 2
    skipped, tail = -1, 0.0
    while (tail := tail + math.comb(count, skipped + 1) / 2**count) <= allowed:
        skipped += 1
    return skipped if skipped >= 0 else None


def centre_estimate(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the centre of samples that scatter symmetrically about it, with its interval.

    The centre is the median of the averages of all pairs, including each sample paired with itself. The ends of the interval are also two
    of these averages. Outliers widen this interval, but hardly affect the sign test's, so the narrower of the two is returned. With the
    sign test's interval, the median is returned as the value. The samples must be independent and symmetrically distributed, as differences
    between two similar quantities are. Raises ValueError if there are no samples.
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
    """Return the largest number of averages of pairs that can be left out at each end, or None if there are too few samples.

    The number of averages below the true centre is the sum of the ranks of the samples below it. This sum is distributed like the sum of a
    random subset of the numbers from 1 to `count`.
    """
    allowed = (1 - confidence) / 2
    if count <= _MOST_EXACT:
        return bisect_right(_rank_sums(count), allowed * 2**count) - 1 if allowed * 2**count >= 1 else None
    mean, spread = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return math.floor(NormalDist(mean, spread).inv_cdf(allowed) - 0.5)  # half a rank: the sum is a whole number


@lru_cache(maxsize=64)
def _rank_sums(count: int) -> list[int]:
    """For each possible sum, return how many subsets of the numbers from 1 to `count` add up to that sum or less."""
    parts = [1]
    for rank in range(1, count + 1):
        parts = [
            (parts[total] if total < len(parts) else 0) + (parts[total - rank] if total >= rank else 0)
            for total in range(len(parts) + rank)
        ]
    return list(accumulate(parts))
