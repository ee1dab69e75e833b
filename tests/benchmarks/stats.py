"""What the benchmarks compare, in addition to the medians and intervals of `fractional_gpu.stats`.

Measurements take turns and are compared pair by pair, so that drift cancels. The interval of a quotient of percentiles comes from a
bootstrap with a fixed seed.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fractional_gpu.stats import CONFIDENCE, Estimate, median, median_estimate, percentile

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

_RESAMPLES = 1000
_SEED = 20


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
        """Return the chance that one of `tries` comparisons looks this good by luck (Bonferroni)."""
        differ = self.lower + self.higher
        of_one = sum(math.comb(differ, count) for count in range(self.lower, differ + 1)) / float(2**differ)
        return min(1.0, of_one * tries)


def sign_test(ours: Sequence[float], theirs: Sequence[float]) -> SignTest:
    """Compare pair by pair. Raises ValueError if there are not as many of both."""
    pairs = list(zip(ours, theirs, strict=True))
    return SignTest(sum(one < other for one, other in pairs), sum(one > other for one, other in pairs))
