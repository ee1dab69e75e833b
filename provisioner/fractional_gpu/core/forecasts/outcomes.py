"""Compares forecasts with outcomes. Provides quantiles, bounds that adapt to misses, and figures for the accuracy of recent forecasts.

An estimator provides an expected value with bounds. A `Band` corrects these bounds so that about a tenth of outcomes fall above the upper
bound and a tenth below the lower bound. An outcome outside a bound immediately moves that bound outward, and by a larger step with each
consecutive miss. Any other outcome moves the bound back a little. This is quantile tracking with a fixed step (Gibbs and Candès, "Adaptive
Conformal Inference Under Distribution Shift", NeurIPS 2021). It takes eight outcomes within a bound to undo one miss, so in the long run at
most one outcome in nine falls outside each bound, in whatever order they come.

Times are in ms, and slowdowns in thousandths. Floats are only compared, added, subtracted, multiplied and divided, so results are the same
on every machine. Drivers save the fields of these dataclasses and check their types when loading them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from fractional_gpu.core.model import Span

SUSPEND, RESUME = "suspend", "resume"
WAIT, CELL, REST, SLOWDOWN, SEAT = "wait", "cell", "rest", "slowdown", "seat"
KINDS = (WAIT, SUSPEND, RESUME, CELL, REST, SLOWDOWN, SEAT)
"""The kinds of forecasts. `REST` is how much longer a running cell will take."""
PAD = 50  # added to both terms of a ratio, so that very short times have no influence
_MOST_NAMES = 256  # limit on pools, device models and the like; the oldest is dropped
_COMPARED = 256  # number of last forecasts in the accuracy of a kind
_LEAST_MS = 100  # errors are relative to the outcome, or to this if it is larger
_MOST_PERMILLE = 30_000
_Item = TypeVar("_Item")


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of the sorted outcomes by linear interpolation. There must be at least one outcome."""
    place = min(max(part * len(ordered) - 0.5, 0.0), len(ordered) - 1.0)
    before = int(place)
    after = min(before + 1, len(ordered) - 1)
    return ordered[before] + (ordered[after] - ordered[before]) * (place - before)


def add_last(window: list[_Item], outcome: _Item, most: int) -> None:
    """Append an outcome, then drop all but the last `most` outcomes."""
    window.append(outcome)
    del window[:-most]


def entry_of(known: dict[str, _Item], name: str, make: Callable[[], _Item]) -> _Item:
    """Return the entry for a name, creating it if necessary. If there are too many entries, the oldest is dropped."""
    if name not in known:
        if len(known) >= _MOST_NAMES:
            del known[next(iter(known))]
        known[name] = make()
    return known[name]


# -- bounds ------------------------------------------------------------------------------------------------------------


_WIDER = (1.064, 1.133, 1.284, 1.648, 2.717)  # by the number of earlier misses in a row
_NARROWER = 1.0078  # eight of these steps undo the first wider one
_LEAST_FACTOR, _MOST_FACTOR = 1 / 400, 1_000_000.0


@dataclass(slots=True)
class BoundCorrection:
    """The correction applied to one bound of a `Band`."""

    factor: float = 1.0  # how far the bound moves outward
    run: int = 0  # misses in a row

    def __post_init__(self) -> None:
        self.factor = min(_MOST_FACTOR, max(_LEAST_FACTOR, self.factor))
        self.run = min(self.run, len(_WIDER) - 1)

    def learn(self, *, missed: bool, at_expected: bool) -> None:
        """Move the bound outward after a miss, or back inward if there was no miss.

        It never moves inward past the expected value, so the next miss moves it outward straight away.
        """
        if missed:
            self.factor = min(_MOST_FACTOR, self.factor * _WIDER[self.run])
            self.run = min(self.run + 1, len(_WIDER) - 1)
        else:
            self.run = 0
            if not at_expected:
                self.factor = max(_LEAST_FACTOR, self.factor / _NARROWER)


@dataclass(slots=True)
class Band:
    """The corrections applied to the two bounds of one kind of forecast."""

    low: BoundCorrection = field(default_factory=BoundCorrection)
    high: BoundCorrection = field(default_factory=BoundCorrection)

    def spread(self, span: Span) -> Span:
        """Return the estimator's forecast with its bounds corrected. The expected value stays the same."""
        low = int((span.low_ms + PAD) / self.low.factor) - PAD
        high = int((span.high_ms + PAD) * self.high.factor) - PAD
        return replace(span, low_ms=max(0, min(span.expected_ms, low)), high_ms=max(span.expected_ms, high))

    def learn(self, span: Span, happened: int) -> None:
        """Update the corrections after an outcome. `span` is the estimator's original forecast, before `spread`."""
        stated = self.spread(span)
        self.low.learn(missed=happened < stated.low_ms, at_expected=stated.low_ms == span.expected_ms)
        self.high.learn(missed=happened > stated.high_ms, at_expected=stated.high_ms == span.expected_ms)

    def outlasted(self, span: Span, lasted: int) -> None:
        """Update the upper bound's correction after an abandoned wait. It is a miss if it had exceeded the bound. If not, it is ignored."""
        if lasted > self.spread(span).high_ms:
            self.high.learn(missed=True, at_expected=False)


# -- errors ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastError:
    """The recent accuracy of one kind of forecast, across all users."""

    what: str  # one of `KINDS`
    count: int  # number of forecasts that were compared with their outcomes
    median_error_permille: int  # over the last 256, relative to the outcome
    covered_permille: int  # outcomes between the bounds, of the last 256
    stated_permille: int = 800  # outcomes that should be between the bounds


@dataclass(slots=True)
class Accuracy:
    """The recent forecasts of one kind, compared with their outcomes."""

    count: int = 0
    recent: list[int] = field(default_factory=list)  # twice the error in thousandths, plus 1 if between the bounds

    def compare(self, stated: Span, happened: int) -> None:
        off = abs(stated.expected_ms - happened) * 1000 // max(_LEAST_MS, happened)
        covered = stated.low_ms <= happened <= stated.high_ms
        add_last(self.recent, 2 * min(off, _MOST_PERMILLE) + covered, _COMPARED)
        self.count += 1

    def error(self, what: str) -> ForecastError:
        errors = sorted(entry // 2 for entry in self.recent) or [0]
        inside = sum(entry % 2 for entry in self.recent)
        return ForecastError(
            what=what,
            count=self.count,
            median_error_permille=errors[len(errors) // 2],
            covered_permille=inside * 1000 // len(errors),
        )


class ForecastOutcome(NamedTuple):
    """A forecast and its outcome."""

    kind: str
    name: str  # selects the bounds, and is a device model, a kind of wait or, for seats, a pool
    lease_id: str  # empty if the forecast is not about one lease
    stated: Span
    happened: int
