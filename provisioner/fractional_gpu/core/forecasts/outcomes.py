"""Forecasts against outcomes: quantiles of the last outcomes, bounds that adapt to misses, and the accuracy of recent forecasts.

An estimator gives an expected value with bounds. A `Band` corrects these bounds so that about a tenth of the outcomes lie above the upper
bound and a tenth below the lower one. An outcome beyond a bound moves that bound outward at once, and further with each miss in a row; any
other outcome moves it back a little. This is quantile tracking with a fixed step (Gibbs and Candès, "Adaptive Conformal Inference Under
Distribution Shift", NeurIPS 2021). Eight other outcomes undo one miss, so in the long run at most one outcome in nine lies beyond each
bound, whatever the order of the outcomes.

Times are in ms, slowdowns in thousandths. Floats are only combined with + - * / and compared, so results are the same on every machine.
The dataclasses are stored as they are: a driver saves their fields and reads them back with checked types.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from fractional_gpu.core.model import Span

SUSPEND, RESUME = "suspend", "resume"
WAIT, CELL, REST, SLOWDOWN, SEAT = "wait", "cell", "rest", "slowdown", "seat"
KINDS = (WAIT, SUSPEND, RESUME, CELL, REST, SLOWDOWN, SEAT)
"""What is forecast. `REST` is the rest of a running cell."""
EVEN = 50  # added to both sides of a ratio, so that very short times do not matter
_MOST_NAMES = 256  # of pools, kinds of devices and the like; the oldest is forgotten
_COMPARED = 256  # forecasts of a kind whose error is known
_LEAST_MS = 100  # errors are relative to what happened, or to this
_MOST_PERMILLE = 30_000
_Item = TypeVar("_Item")


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of sorted outcomes (at least one), interpolated linearly."""
    place = min(max(part * len(ordered) - 0.5, 0.0), len(ordered) - 1.0)
    before = int(place)
    after = min(before + 1, len(ordered) - 1)
    return ordered[before] + (ordered[after] - ordered[before]) * (place - before)


def add_last(window: list[_Item], outcome: _Item, most: int) -> None:
    """Add an outcome; keep the last `most`."""
    window.append(outcome)
    del window[:-most]


def kept(known: dict[str, _Item], name: str, make: Callable[[], _Item]) -> _Item:
    """Return a name's entry. A new name gets a new entry, which replaces the oldest if there are too many."""
    if name not in known:
        if len(known) >= _MOST_NAMES:
            del known[next(iter(known))]
        known[name] = make()
    return known[name]


# -- bounds ------------------------------------------------------------------------------------------------------------


_WIDER = (1.064, 1.133, 1.284, 1.648, 2.717)  # by the number of misses before this one in a row
_NARROWER = 1.0078  # eight of these undo the first of those
_LEAST_FACTOR, _MOST_FACTOR = 1 / 400, 1_000_000.0


@dataclass(slots=True)
class Side:
    """One side of a band."""

    factor: float = 1.0  # by which the bound moves outward
    run: int = 0  # misses in a row

    def __post_init__(self) -> None:
        self.factor = min(_MOST_FACTOR, max(_LEAST_FACTOR, self.factor))
        self.run = min(self.run, len(_WIDER) - 1)

    def learn(self, *, missed: bool, at_expected: bool) -> None:
        """Move outward after a miss, else inward. A bound at the expected value stays, so that the next miss moves it at once."""
        if missed:
            self.factor = min(_MOST_FACTOR, self.factor * _WIDER[self.run])
            self.run = min(self.run + 1, len(_WIDER) - 1)
        else:
            self.run = 0
            if not at_expected:
                self.factor = max(_LEAST_FACTOR, self.factor / _NARROWER)


@dataclass(slots=True)
class Band:
    """The corrections of the bounds of one kind of forecast."""

    low: Side = field(default_factory=Side)
    high: Side = field(default_factory=Side)

    def spread(self, span: Span) -> Span:
        """Return the estimator's forecast with corrected bounds around the same expected value."""
        low = int((span.low_ms + EVEN) / self.low.factor) - EVEN
        high = int((span.high_ms + EVEN) * self.high.factor) - EVEN
        return replace(span, low_ms=max(0, min(span.expected_ms, low)), high_ms=max(span.expected_ms, high))

    def learn(self, span: Span, happened: int) -> None:
        """Learn from an outcome. `span`: the estimator's forecast, before `spread`."""
        stated = self.spread(span)
        self.low.learn(missed=happened < stated.low_ms, at_expected=stated.low_ms == span.expected_ms)
        self.high.learn(missed=happened > stated.high_ms, at_expected=stated.high_ms == span.expected_ms)

    def outlasted(self, span: Span, lasted: int) -> None:
        """Learn from an abandoned wait: a miss if it exceeded the bound; otherwise the outcome is unknown."""
        if lasted > self.spread(span).high_ms:
            self.high.learn(missed=True, at_expected=False)


# -- errors ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastError:
    """The recent accuracy of one kind of forecast, over all users."""

    what: str  # one of `KINDS`
    count: int  # forecasts that were compared with what happened, ever
    median_error_permille: int  # of the last 256: the error as a share of what happened
    covered_permille: int  # of the last 256: how many lay between their bounds
    stated_permille: int = 800  # that the bounds promise to cover


@dataclass(slots=True)
class Accuracy:
    """The recent forecasts of one kind, compared with what happened."""

    count: int = 0
    recent: list[int] = field(default_factory=list)  # twice the error in thousandths, and 1 if between the bounds

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


class Judged(NamedTuple):
    """A stated forecast and what happened."""

    kind: str
    name: str  # whose bounds these are: a kind of device; for waits, what decides them; for seats, the pool
    lease_id: str  # empty if the forecast is not about one lease
    stated: Span
    happened: int
