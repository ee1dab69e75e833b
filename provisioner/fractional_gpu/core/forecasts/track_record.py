"""What forecasts stated, and what happened: bounds that are learnt from it (`bands`), and how accurate each kind was lately.

A forecast passes through here twice. `stated` gives it the bounds that people see; `judge` is told of the outcome.
"""

from collections.abc import Callable
from typing import NamedTuple

from fractional_gpu.core.forecasts.bands import Band
from fractional_gpu.core.forecasts.estimators import Accuracy, ErrorView
from fractional_gpu.core.forecasts.snapshot import ForecastState, StateReader
from fractional_gpu.core.model import Span

SUSPEND, RESUME = "suspend", "resume"
WAIT, CELL, REST, SLOWDOWN, SEAT = "wait", "cell", "rest", "slowdown", "seat"
KINDS = (WAIT, SUSPEND, RESUME, CELL, REST, SLOWDOWN, SEAT)
"""What is forecast. `REST` is of a running cell; slowdowns are in thousandths, all others in ms."""
EVEN_MS = 50
"""Added to both sides of a ratio of times, so that shorter ones do not matter."""
_MOST_BANDS = 512


class Judged(NamedTuple):
    """A stated forecast and what happened. `lease_id`: empty where the estimator knows of no lease."""

    kind: str
    name: str  # what its bounds are learnt for: a kind of device; of waits, what decides them and that; of seats, the pool
    lease_id: str
    stated: Span
    happened: int


class TrackRecord:
    """The bounds and the accuracy of all kinds of forecasts."""

    def __init__(self) -> None:
        self.watch: Callable[[Judged], None] | None = None  # sees every forecast that is compared with what happened
        self._bands: dict[tuple[str, str], Band] = {}  # by kind and name (`Judged`)
        self._accuracy = {kind: Accuracy(kind) for kind in KINDS}

    def stated(self, kind: str, name: str, span: Span) -> Span:
        """Return an estimator's forecast with the bounds that are stated."""
        return self._band(kind, name).spread(span)

    def judge(
        self, kind: str, name: str, span: Span, happened: int, *, lease_id: str = "", stated: Span | None = None
    ) -> None:
        """Compare a forecast with what happened, and learn about its bounds. `stated`: as it was stated, where that was some time ago."""
        stated = stated or self.stated(kind, name, span)
        self._accuracy[kind].compare(stated, happened)
        if self.watch is not None:
            self.watch(Judged(kind, name, lease_id, stated, happened))
        self._keep(kind, name, self._band(kind, name).learnt(span, happened))

    def outlasted(self, kind: str, name: str, span: Span, lasted: int) -> None:
        """Learn from something that was given up after so long."""
        self._keep(kind, name, self._band(kind, name).outlasted(span, lasted))

    def errors(self) -> tuple[ErrorView, ...]:
        """Return how accurate each kind was lately."""
        return tuple(accuracy.view() for accuracy in self._accuracy.values())

    def _band(self, kind: str, name: str) -> Band:
        return self._bands.get((kind, name)) or _FIRST_BANDS[kind]

    def _keep(self, kind: str, name: str, band: Band) -> None:
        if (kind, name) not in self._bands and len(self._bands) >= _MOST_BANDS:
            del self._bands[next(iter(self._bands))]
        self._bands[kind, name] = band

    def state(self) -> ForecastState:
        """Return the parts of the forecasts' state, for JSON."""
        return {
            "accuracy": {kind: [one.count, one.recent] for kind, one in self._accuracy.items()},
            "bands": {f"{kind} {name}": band.state() for (kind, name), band in self._bands.items()},
        }

    def take_state(self, read: StateReader) -> None:
        """Take what was learnt before. Raises ValueError."""
        for kind, (count, recent) in read.named("accuracy", 2):
            read.known(kind, self._accuracy)
            self._accuracy[kind] = Accuracy(kind, count=read.whole(count), recent=read.wholes(recent))
        for key, levels in read.named("bands", 4):
            kind, _, name = key.partition(" ")
            self._bands[kind, name] = Band.from_state(read.wholes(levels), read.known(kind, _FIRST_BANDS).even)


_FIRST_BANDS = {kind: Band(even=1 if kind == SLOWDOWN else EVEN_MS) for kind in KINDS}
