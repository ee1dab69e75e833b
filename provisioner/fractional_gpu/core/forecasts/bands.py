"""How wide the interval around a forecast must be, learnt on line from what it missed, on each side by itself.

A forecast comes with bounds that its estimator believes in. A `Band` moves each bound by a factor of its own, so that a tenth of the
outcomes lie above the upper one and a tenth below the lower one, whatever the estimator got wrong:

- An outcome outside widens that side at once, by `MISS` levels; a second one in a row by twice as many, a third by four times as many,
  up to `MISS << MOST_DOUBLINGS`.
- An outcome that is not outside narrows that side by one level. A side may narrow past the estimator's bound, so one that is too wide
  comes back, too; it stops at the expected value. A level is a factor of 129/128.

This is the tracking of a quantile by a fixed step, as in adaptive conformal inference (Gibbs and Candès, "Adaptive Conformal Inference
Under Distribution Shift", NeurIPS 2021; as quantile tracking: Angelopoulos, Candès and Tibshirani, "Conformal PID Control for Time Series
Prediction", NeurIPS 2023), on the logarithm of the ratio of outcome and bound. The doubling in a run of misses is ours.

**The law.** It needs no assumption about the outcomes, only that no ratio is beyond the largest factor (a million). A level rises by 8 or
more with each miss and falls by 1 at most otherwise. So a side that went from level a to level b has at most (n + b - a) / 9 misses in n
outcomes: in the long run one in nine of each side, and at least seven ninths of the outcomes lie within. Where outcomes are independent
and alike, about a tenth are outside on each side: if p are, runs of misses make the mean step of a miss 8 (1 - p) / (1 - 2p), and p times
that balances the steps of the others, 1 - p, just when p is a tenth. (Where the expected value itself is higher, or lower, than nine
outcomes of ten, that side has fewer misses than a tenth.) Forecasts that overlap in time (waits) are learnt from as they
end, by the band of that moment: many that were made before the first miss do not all widen it.

Integers only: levels, and values in whole units of one kind (ms, or thousandths).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from fractional_gpu.core.model import Span

MISS = 8
"""Levels by which a miss widens its side; a hit narrows it by one."""
MOST_DOUBLINGS = 4
MOST_LEVEL, LEAST_LEVEL = 1792, -768
"""Factors of about 1.1 million and 1/400."""
_WHOLE = 1 << 20  # a factor of 1


def _factors() -> tuple[int, ...]:
    """Return the factors of the levels from 0 up, in parts of `_WHOLE`."""
    found = [_WHOLE]
    while len(found) <= MOST_LEVEL:
        found.append(found[-1] + (found[-1] >> 7))
    return tuple(found)


_FACTORS = _factors()


class Side(NamedTuple):
    """One side of a band: how far out it is, in levels (0: where the estimator puts it), and how many misses in a row there were."""

    level: int = 0
    run: int = 0

    def outward(self, value: int) -> int:
        """Return the value times the side's factor."""
        if self.level >= 0:
            return value * _FACTORS[self.level] // _WHOLE
        return value * _WHOLE // _FACTORS[-self.level]

    def inward(self, value: int) -> int:
        """Return the value over the side's factor."""
        if self.level >= 0:
            return value * _WHOLE // _FACTORS[self.level]
        return value * _FACTORS[-self.level] // _WHOLE

    def wider(self) -> "Side":
        """Return the side after a miss."""
        return Side(min(MOST_LEVEL, self.level + (MISS << self.run)), min(self.run + 1, MOST_DOUBLINGS))

    def narrower(self) -> "Side":
        """Return the side after an outcome that was no miss."""
        return Side(max(LEAST_LEVEL, self.level - 1))


_AS_ESTIMATED = Side()


@dataclass(frozen=True, slots=True)
class Band:
    """What one kind of forecast has learnt about its bounds. `even`: added to values before factors, at least 1."""

    low: Side = _AS_ESTIMATED
    high: Side = _AS_ESTIMATED
    even: int = 50

    def spread(self, span: Span) -> Span:
        """Return the estimator's forecast with the bounds that are stated; its expected value is not moved, and lies between them."""
        low, high = self._below(span, self.low), self._above(span, self.high)
        return replace(span, low_ms=span.expected_ms - low, high_ms=span.expected_ms + high)

    def learnt(self, span: Span, happened: int) -> "Band":
        """Return the band after the outcome of a forecast; `span` is the estimator's, before `spread`."""
        below, above = partial(self._below, span), partial(self._above, span)
        off = max(0, happened) - span.expected_ms
        low = _after(self.low, below, missed=-off > below(self.low))
        return replace(self, low=low, high=_after(self.high, above, missed=off > above(self.high)))

    def outlasted(self, span: Span, lasted: int) -> "Band":
        """Return the band after something that was given up after so long: a miss if that is beyond the bound, else nothing is known."""
        above = partial(self._above, span)
        missed = lasted - span.expected_ms > above(self.high)
        return replace(self, high=_after(self.high, above, missed=True)) if missed else self

    def _below(self, span: Span, side: Side) -> int:
        """Return how far below the expected value the side puts its bound, at least 0."""
        return max(0, span.expected_ms - max(0, side.inward(span.low_ms + self.even) - self.even))

    def _above(self, span: Span, side: Side) -> int:
        """Return how far above the expected value the side puts its bound, at least 0."""
        return max(0, side.outward(span.high_ms + self.even) - self.even - span.expected_ms)

    def state(self) -> list[int]:
        """Return four whole numbers from 0 up."""
        return [self.low.level - LEAST_LEVEL, self.low.run, self.high.level - LEAST_LEVEL, self.high.run]

    @staticmethod
    def from_state(state: Sequence[int], even: int) -> "Band":
        """Return the band of such numbers; what is beyond its range is brought into it."""
        low, high = (
            Side(min(MOST_LEVEL, max(LEAST_LEVEL, level + LEAST_LEVEL)), min(run, MOST_DOUBLINGS))
            for level, run in (state[:2], state[2:])
        )
        return Band(low, high, even)


def _after(side: Side, margin: Callable[[Side], int], *, missed: bool) -> Side:
    """Return the side after an outcome; `margin`: how far from the expected value it puts the bound of this forecast."""
    before = margin(side)
    if not missed:
        # A bound at the expected value goes no nearer. Its level stays, so that it can leave at once.
        return side.narrower() if before > 0 else Side(side.level)
    wider = side.wider()
    while margin(wider) <= before and wider.level < MOST_LEVEL:  # the bound was held by the expected value
        wider = Side(min(MOST_LEVEL, wider.level + MISS), wider.run)
    return wider
