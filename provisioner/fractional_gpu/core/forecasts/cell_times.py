"""How long a lease's cells, and the gaps between them, last: for one lease and for all together.

A lease's own observations are mixed with those of all leases, which count for a few: a new lease is like all others, a lease with a history
is like itself. Both fade, so habits may change.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add

from fractional_gpu.core.forecasts.histograms import (
    STEP,
    Histogram,
    Scale,
    shaped_weights,
    value_at,
    weight_below,
)

__all__ = ["DURATIONS", "CommonDurations", "LeaseDurations", "rest_ms"]

DURATIONS = Scale(bits=2, shift=6, most=1 << 30)
"""Durations in ms, from 64 ms to 12 days."""
_PRIOR_WEIGHT = 64  # observations that the published distribution counts for
_COMMON_WEIGHT = 6  # observations that all leases together count for in a lease's own distribution
_REFRESH = 32  # the common distribution is brought up to date after so many observations


class CommonDurations:
    """Durations of all leases. Starts from `points`: (ms, permille of durations that are shorter)."""

    __slots__ = ("_due", "histogram", "totals", "weights")

    def __init__(self, points: Sequence[tuple[int, int]], *, weights: Iterable[int] = ()) -> None:
        start = list(weights) or shaped_weights(DURATIONS, points, _PRIOR_WEIGHT * STEP)
        self.histogram = Histogram(DURATIONS, memory=1024, weights=start)
        self._due = 0
        self._refresh()

    def add(self, duration_ms: int) -> None:
        """Count a duration of one of the leases."""
        self.histogram.add(duration_ms)
        self._due -= 1
        if self._due <= 0:
            self._refresh()

    def _refresh(self) -> None:
        self._due = _REFRESH
        self.weights = self.histogram.scaled(_COMMON_WEIGHT * STEP)
        self.totals = array("q", accumulate(self.weights))


class LeaseDurations:
    """Durations of one lease. `totals`: of its own observations and the common ones."""

    __slots__ = ("_common", "histogram", "totals")

    def __init__(self, common: CommonDurations, *, weights: Iterable[int] = ()) -> None:
        self._common = common
        self.histogram = Histogram(DURATIONS, memory=12, weights=weights)
        self._mix()

    def add(self, duration_ms: int) -> None:
        """Count one more."""
        self._common.add(duration_ms)
        self.histogram.add(duration_ms)
        self._mix()

    def _mix(self) -> None:
        self.totals = array("q", accumulate(map(add, self.histogram.weights, self._common.weights)))


def rest_ms(totals: Sequence[int], elapsed_ms: int, permille: int) -> int:
    """Return the quantile (in thousandths) of the remaining time of something that has lasted `elapsed_ms`.

    What has lasted longer than anything known is assumed to last about as long again (half of such cases longer, half shorter).
    """
    total = totals[-1]
    gone = weight_below(DURATIONS, totals, elapsed_ms)
    left = total - gone
    if left * 2048 <= total:
        return elapsed_ms * permille // (1000 - permille)
    return max(0, value_at(DURATIONS, totals, gone + left * permille // 1000) - elapsed_ms)
