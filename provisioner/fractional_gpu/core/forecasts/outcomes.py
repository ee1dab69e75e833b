"""Forecasts against outcomes: quantiles over the last outcomes, bounds that are learnt from misses, and how good the last forecasts were.

An estimator states an expected value with bounds of its own. A `Band` moves these bounds, so that about a tenth of the outcomes lies above
the upper one and a tenth below the lower one, whatever the estimator leaves out: an outcome beyond a bound moves that bound outward at
once, further with each miss in a row; any other outcome moves it back a little. That is quantile tracking by a fixed step (Gibbs and
Candès, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021). A miss moves a bound by as much as eight other outcomes
move it back, so in the long run at most one outcome in nine is beyond each bound, however they come.

Times are in ms, slowdowns in thousandths. Floats here use only + - * / and comparisons, so every machine computes the same.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

from fractional_gpu.core.model import Span

SUSPEND, RESUME = "suspend", "resume"
WAIT, CELL, REST, SLOWDOWN, SEAT = "wait", "cell", "rest", "slowdown", "seat"
KINDS = (WAIT, SUSPEND, RESUME, CELL, REST, SLOWDOWN, SEAT)
"""What is forecast. `REST` is of a running cell."""
EVEN = 50
"""Added to both sides of a ratio, so that very short times do not matter."""
_KEPT = 256  # forecasts of a kind whose error is known
_LEAST_MS = 100  # errors are relative to what happened, or to this
_MOST_PERMILLE = 30_000
_MOST_BANDS = 512
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the value that this part of the sorted outcomes, at least one, lies below; between two of them by a straight line."""
    place = min(max(part * len(ordered) - 0.5, 0.0), len(ordered) - 1.0)
    before = int(place)
    after = min(before + 1, len(ordered) - 1)
    return ordered[before] + (ordered[after] - ordered[before]) * (place - before)


def kept(known: dict[_Key, _Value], key: _Key, make: Callable[[], _Value], most: int) -> _Value:
    """Return what is known of the key, made if it is new; the oldest of more than `most` is forgotten."""
    if key not in known:
        if len(known) >= most:
            del known[next(iter(known))]
        known[key] = make()
    return known[key]


# -- bounds ------------------------------------------------------------------------------------------------------------


_WIDER = (1.064, 1.133, 1.284, 1.648, 2.717)  # by the number of misses before this one in a row
_NARROWER = 1.0078  # of which eight undo the first of these
_LEAST_FACTOR, _MOST_FACTOR = 1 / 400, 1_000_000.0


@dataclass(slots=True)
class Side:
    """One side of a band: the factor by which it moves the bound outward, and how many misses in a row there were."""

    factor: float = 1.0
    run: int = 0

    @classmethod
    def restored(cls, factor: float, run: float) -> Self:
        """Return a side that was stored; what is beyond its range is brought into it."""
        return cls(min(_MOST_FACTOR, max(_LEAST_FACTOR, factor)), min(int(run), len(_WIDER) - 1))

    def learn(self, *, missed: bool, at_expected: bool) -> None:
        """Move outward after a miss, else inward. A bound at the expected value stays there, so that it can leave at once."""
        if missed:
            self.factor = min(_MOST_FACTOR, self.factor * _WIDER[self.run])
            self.run = min(self.run + 1, len(_WIDER) - 1)
        else:
            self.run = 0
            if not at_expected:
                self.factor = max(_LEAST_FACTOR, self.factor / _NARROWER)


class Band:
    """What one kind of forecast has learnt about its bounds."""

    def __init__(self, low: Side | None = None, high: Side | None = None) -> None:
        self.low, self.high = low or Side(), high or Side()

    def spread(self, span: Span) -> Span:
        """Return the estimator's forecast with the bounds to state. Its expected value is not moved, and lies between them."""
        low = int((span.low_ms + EVEN) / self.low.factor) - EVEN
        high = int((span.high_ms + EVEN) * self.high.factor) - EVEN
        return replace(span, low_ms=max(0, min(span.expected_ms, low)), high_ms=max(span.expected_ms, high))

    def learn(self, span: Span, happened: int) -> None:
        """Learn from an outcome; `span` is the estimator's, before `spread`."""
        stated = self.spread(span)
        self.low.learn(missed=happened < stated.low_ms, at_expected=stated.low_ms == span.expected_ms)
        self.high.learn(missed=happened > stated.high_ms, at_expected=stated.high_ms == span.expected_ms)

    def outlasted(self, span: Span, lasted: int) -> None:
        """Learn from something that was given up after so long: a miss if that is beyond the bound, else nothing is known."""
        if lasted > self.spread(span).high_ms:
            self.high.learn(missed=True, at_expected=False)


# -- the record --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorView:
    """The error of one kind of forecast over the last 256 of them, thousandths."""

    what: str  # one of `KINDS`
    count: int  # forecasts that were compared, ever
    median_error_permille: int  # median of |expected - happened| / happened
    covered_permille: int  # lay between their bounds; 800 is what the bounds promise


class Accuracy:
    """Compares one kind of forecast with what happened."""

    def __init__(self, count: int = 0, recent: Iterable[int] = ()) -> None:
        self.count = count
        self.recent = deque(recent, _KEPT)  # twice the error in thousandths, and 1 if between the bounds

    def compare(self, stated: Span, happened: int) -> None:
        off = abs(stated.expected_ms - happened) * 1000 // max(_LEAST_MS, happened)
        covered = stated.low_ms <= happened <= stated.high_ms
        self.recent.append(2 * min(off, _MOST_PERMILLE) + covered)
        self.count += 1

    def view(self, what: str) -> ErrorView:
        errors = sorted(entry // 2 for entry in self.recent)
        inside = sum(entry % 2 for entry in self.recent)
        return ErrorView(
            what=what,
            count=self.count,
            median_error_permille=errors[len(errors) // 2] if errors else 0,
            covered_permille=inside * 1000 // len(errors) if errors else 0,
        )


class Judged(NamedTuple):
    """A stated forecast and what happened. `lease_id`: empty if the estimator knows of no lease."""

    kind: str
    name: str  # what its bounds are learnt for: a kind of device; of waits, what decides them and that; of seats, the pool
    lease_id: str
    stated: Span
    happened: int


class TrackRecord:
    """The bounds and the accuracy of all kinds of forecasts."""

    def __init__(self) -> None:
        self.watch: Callable[[Judged], None] | None = None  # sees every forecast that is compared with what happened
        self.bands: dict[tuple[str, str], Band] = {}  # by kind and name (`Judged`)
        self.accuracy = {kind: Accuracy() for kind in KINDS}

    def stated(self, kind: str, name: str, span: Span) -> Span:
        """Return an estimator's forecast with the bounds to state."""
        band = self.bands.get((kind, name))
        return span if band is None else band.spread(span)

    def judge(
        self, kind: str, name: str, span: Span, happened: int, *, lease_id: str = "", stated: Span | None = None
    ) -> None:
        """Compare a forecast with what happened, and learn its bounds. `stated`: as it was stated, if that was some time ago."""
        happened = max(0, happened)
        stated = stated or self.stated(kind, name, span)
        self.accuracy[kind].compare(stated, happened)
        if self.watch is not None:
            self.watch(Judged(kind, name, lease_id, stated, happened))
        self.band(kind, name).learn(span, happened)

    def band(self, kind: str, name: str) -> Band:
        return kept(self.bands, (kind, name), Band, _MOST_BANDS)

    def errors(self) -> tuple[ErrorView, ...]:
        """Return how accurate each kind was lately."""
        return tuple(accuracy.view(kind) for kind, accuracy in self.accuracy.items())


# -- stored state ------------------------------------------------------------------------------------------------------


Parts = Mapping[str, Mapping[str, Sequence[float]]]
"""State as stored: lists of numbers by name, in named parts."""
_LARGEST = 1 << 53  # JSON readers elsewhere keep whole numbers up to here
_MOST_ITEMS = 100_000


def read_parts(state: object, version: int, *, records: Mapping[str, int], lists: Mapping[str, int]) -> Parts:
    """Return the parts of a stored state. Raises ValueError for anything else: a damaged file must not influence decisions.

    `records` are parts with so many numbers for each name; `lists` have any count of numbers, of which so many belong together.
    """
    if not isinstance(state, dict):
        raise ValueError(f"{state!r:.60} was given; allowed: an object such as the state of forecasts")  # noqa: TRY004
    if state.get("version") != version:
        raise ValueError(f"forecasts of version {state.get('version')!r:.60} were given; allowed: {version}")
    for part, length in {**records, **lists}.items():
        found = state.get(part)
        if not isinstance(found, dict) or len(found) > _MOST_ITEMS or not all(isinstance(name, str) for name in found):
            raise ValueError(f"{found!r:.60} was given as {part}; allowed: an object of lists of numbers")
        for name, numbers in found.items():
            given = f"as {part} of {name!r:.60}"
            if not isinstance(numbers, list) or len(numbers) > _MOST_ITEMS or len(numbers) % length:
                raise ValueError(f"{numbers!r:.60} was given {given}; allowed: a list of numbers, {length} each")
            if part in records and len(numbers) != length:
                raise ValueError(f"{numbers!r:.60} was given {given}; allowed: a list of {length}")
            for number in numbers:
                if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= _LARGEST:
                    raise ValueError(f"{number!r:.60} was given {given}; allowed: a number from 0 to {_LARGEST}")
    return state


def checked(name: str, allowed: Iterable[str]) -> str:
    """Return the name if it is one of those. Raises ValueError."""
    names = list(allowed)
    if name not in names:
        raise ValueError(f"{name!r:.60} was given; allowed: {', '.join(names)}")
    return name
