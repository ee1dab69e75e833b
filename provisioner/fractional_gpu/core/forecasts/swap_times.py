"""How long a suspend or resume takes: a fixed time plus the bytes over the bandwidth, learnt from past swaps.

The line through the last swaps of a kind minimizes relative errors by least squares. Swaps far off the line weigh less, so one outlier does
not spoil the forecast, and a change is believed once it has been seen about as often as the old times. A prior line stands beside the
swaps, scaled to how quick they are: a prior that is ten times too slow is corrected by the first swap whatever its size, and the ratio of
the two parts is that of the prior until swaps of different sizes were seen. Floats, with only + - * / and comparisons, so every machine
learns the same.
"""

from collections.abc import Iterable, Sequence

from fractional_gpu.core.forecasts.histograms import (
    Histogram,
    Scale,
    shaped_weights,
    value_at,
)

__all__ = ["KEPT", "ONE", "RATIOS", "SwapTimes", "ratio"]

RATIOS = Scale(bits=3, shift=0, most=1 << 20)
"""Ratios of what was to what was expected."""
ONE = 1088
"""The ratio of what was just as expected: the middle of its bucket, so that the half below and the half above of it are alike."""
KEPT = 12  # swaps that the line is fitted to
_ANCHORS = (0, 8192)  # MiB at which the prior counts ...
_ANCHOR_WEIGHT = 0.25  # ... as this many swaps
_ROUNDS = 3
_FEW = 4  # swaps
_FAR = 0.5  # relative errors beyond this weigh less
# Ratios that 10, 50 and 90 % of swaps stay under, before any was seen.
_PRIOR = tuple(shaped_weights(RATIOS, ((400, 0), (700, 100), (ONE, 500), (1500, 900), (4000, 1000)), 8 * 1024))


def ratio(was: int, expected: int) -> int:
    """Return how the one compares with the other, on the scale `RATIOS`."""
    return was * ONE // max(1, expected)


class SwapTimes:
    """One kind of swap on one kind of device. The prior: `fixed_ms` and MiB a second."""

    def __init__(
        self,
        *,
        fixed_ms: int,
        mib_per_s: int,
        swaps: Iterable[tuple[int, int]] = (),
        ratios: Sequence[int] = (),
        line: tuple[float, float] | None = None,
    ) -> None:
        self._prior = (float(fixed_ms), 1000 / mib_per_s)
        self.swaps = list(swaps)[-KEPT:]  # (MiB, ms), the last ones; the constructor takes them
        self.ratios = Histogram(RATIOS, memory=32, weights=ratios or _PRIOR)
        self._totals = self.ratios.totals()
        self.fixed_ms, self.ms_per_mib = line or self._prior

    def expected_ms(self, mib: int) -> int:
        """Return how long a swap of so many MiB is expected to take, ms."""
        return int(self.fixed_ms + self.ms_per_mib * mib + 0.5)

    def bounds_ms(self, mib: int) -> tuple[int, int]:
        """Return the bounds that four of five such swaps lie between, ms."""
        expected, total = self.expected_ms(mib), self._totals[-1]
        low = value_at(RATIOS, self._totals, total // 10)
        high = value_at(RATIOS, self._totals, total * 9 // 10)
        return min(expected, expected * low // ONE), max(expected, expected * high // ONE)

    def learn(self, mib: int, took_ms: int) -> None:
        """Learn from a swap."""
        mib, took_ms = max(0, mib), max(0, took_ms)
        surprising = _off(took_ms, self.fixed_ms + self.ms_per_mib * mib) > _FAR
        self.ratios.add(ratio(took_ms, self.expected_ms(mib)))
        self._totals = self.ratios.totals()
        self.swaps = [*self.swaps[1 - KEPT :], (mib, took_ms)]
        self._fit(anew=surprising or len(self.swaps) <= _FEW)

    def _fit(self, *, anew: bool) -> None:
        """Fit the line; `anew`: starting from the prior scaled to the median swap, else from the present line."""
        fixed, slope = self._prior
        levels = sorted(took / max(1.0, fixed + slope * mib) for mib, took in self.swaps)
        level = (levels[(len(levels) - 1) // 2] + levels[len(levels) // 2]) / 2
        fixed, slope = fixed * level, slope * level
        anchors = [(mib, max(1.0, fixed + slope * mib)) for mib in _ANCHORS]
        if not anew:
            fixed, slope = self.fixed_ms, self.ms_per_mib
        for _ in range(_ROUNDS if anew else 1):
            fixed, slope = _line(self.swaps, anchors, fixed, slope)
        self.fixed_ms, self.ms_per_mib = fixed, slope


def _off(took: float, expected: float) -> float:
    """Return how far the two are apart, as a share of the smaller."""
    return abs(took - expected) / max(1.0, min(took, expected))


def _line(
    swaps: Sequence[tuple[int, int]], anchors: Sequence[tuple[int, float]], fixed: float, slope: float
) -> tuple[float, float]:
    """Return the best line, with each swap weighted by its distance from the present one; neither part of it is negative."""
    aa = ab = bb = ay = by = 0.0
    scale = _ANCHOR_WEIGHT
    for points in (anchors, swaps):
        for mib, took in points:
            expected = fixed + slope * mib
            expected = max(expected, 1.0)
            less, more = (took, expected) if took < expected else (expected, took)
            far = less * (1 + _FAR)  # further than that it weighs less
            weight = scale / (expected * expected)
            if more > far:
                weight *= _FAR * max(1.0, less) / (more - less)
            size = weight * mib
            aa, ab, bb, ay, by = aa + weight, ab + size, bb + size * mib, ay + weight * took, by + size * took
        scale = 1.0
    det = aa * bb - ab * ab
    fixed, slope = (ay * bb - by * ab) / det, (aa * by - ab * ay) / det
    if fixed < 0:
        return 0.0, by / bb
    return (fixed, slope) if slope >= 0 else (ay / aa, 0.0)
