"""Medians, percentiles and the 95 % intervals of medians, without assumptions about distributions. Figures in, figures out.

Times of programs have long tails and drift with the machine's load. So: medians, never means, and the interval of a median is that of the
sign test: the order statistics between which the true median lies with the stated probability, whatever the distribution. With fewer than
six samples nothing can be said, so the interval is infinite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


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

    Each sample is below the median with probability 1/2, so the number of those that are is binomial: the median lies outside the
    interval when at most `skipped` are on one side.
    """
    allowed = (1 - confidence) / 2
    skipped, tail = -1, 0.0
    while (tail := tail + math.comb(count, skipped + 1) / 2**count) <= allowed:
        skipped += 1
    return skipped if skipped >= 0 else None
