"""How many times as long as alone cells take beside busy neighbours, learnt from what cells took with and without them.

What a cell would have taken alone is not known. It is compared with the usual one of its lease: the median of the last `KEPT` cells that
began without a busy neighbour on their device and had one for at most half of their time. Cells are divided by how they began, not by
whom they met: a long cell meets more neighbours, so that division would call neighbours slow that are not.

The model of contention says how much slower a cell ought to be (`place`). How far it is off is a decayed histogram for each
kind of device and number of neighbours: caches and switching, which the model leaves out, are in it. How far the lease's cells differ
among themselves is taken from its own cells. Values are thousandths of the time alone, at least 1000: no neighbour makes a cell faster.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fractional_gpu.core.forecasts.estimators import ONE, RATIOS, STEP, Histogram, ratio, value_at
from fractional_gpu.core.forecasts.snapshot import ForecastState, StateReader, sparse
from fractional_gpu.core.model import Span

KEPT = 16
"""Cells that began alone, by which the later ones of a lease are judged."""
LEAST = 4
"""Fewer cells alone say nothing."""
LEAST_MS = 1_000
"""Shorter cells say more of what runs beside the GPU's work than of the device, and are left out."""
ALONE_MILLI = 500
"""A cell that began alone counts as such if it had no more neighbours than this on average, thousandths of one."""
_WHOLE = 1000  # as long as alone
_LARGEST = 1_000_000
_MOST_OTHERS = 4  # so many neighbours and more are alike
_MEMORY = 32
_MOST_LINES = 256
_START = [8 * STEP if place == RATIOS.bucket(ONE) else 0 for place in range(RATIOS.size)]
_START_TOTALS = Histogram(RATIOS, memory=1, weights=_START).totals()


class Company(NamedTuple):
    """How a cell began on a device: the busy neighbours, what the model makes of them, and the forecast that was stated."""

    device_name: str
    others: int
    model_milli: int
    stated: Span | None  # None: it began alone


class Slowdowns:
    """What is known of slowdowns."""

    def __init__(self) -> None:
        self._alone: dict[str, list[int]] = {}  # by lease: ms, the last one last
        self._ratios: dict[tuple[str, int], Histogram] = {}  # by the device's name and the number of neighbours
        self._totals: dict[tuple[str, int], Sequence[int]] = {}

    def span(self, lease_id: str, device_name: str, others: int, model_milli: int) -> Span:
        """Return the forecast, thousandths of the time alone, where the model says `model_milli` beside so many busy neighbours."""
        totals = self._totals.get((device_name, min(others, _MOST_OTHERS)), _START_TOTALS)
        expected = max(_WHOLE, model_milli * value_at(RATIOS, totals, totals[-1] // 2) // ONE)
        alone = self._alone.get(lease_id, ())
        if len(alone) < LEAST:  # by the model alone: half of what it adds is taken to be uncertain
            more = (expected - _WHOLE) // 2
            return Span(expected_ms=expected, low_ms=expected - more, high_ms=expected + more)
        ordered = sorted(alone)
        tenth, usual = len(ordered) // 10, _usual(ordered)
        low, high = expected * ordered[tenth] // usual, expected * ordered[-1 - tenth] // usual
        return Span(expected_ms=expected, low_ms=min(expected, max(_WHOLE, low)), high_ms=max(expected, high))

    def outcome(self, lease_id: str, lasted_ms: int) -> int | None:
        """Return how many times as long as a usual cell of the lease alone one took, thousandths; None: too few ran alone."""
        alone = self._alone.get(lease_id, ())
        if len(alone) < LEAST:
            return None
        return min(_LARGEST, max(_WHOLE, lasted_ms * _WHOLE // _usual(sorted(alone))))

    def ran_alone(self, lease_id: str, lasted_ms: int) -> None:
        """Learn from a cell that ran alone."""
        alone = self._alone.setdefault(lease_id, [])
        alone.append(lasted_ms)
        del alone[:-KEPT]

    def ran_beside(self, lease_id: str, device_name: str, others: int, model_milli: int, lasted_ms: int) -> None:
        """Learn from a cell that began beside so many busy neighbours. Nothing, if too few of the lease's cells ran alone."""
        alone = self._alone.get(lease_id, ())
        if len(alone) < LEAST:
            return
        key = device_name, min(others, _MOST_OTHERS)
        if key not in self._ratios:
            if len(self._ratios) >= _MOST_LINES:
                oldest = next(iter(self._ratios))
                del self._ratios[oldest], self._totals[oldest]
            self._ratios[key] = Histogram(RATIOS, memory=_MEMORY, weights=_START)
        took = min(
            _LARGEST, lasted_ms * _WHOLE // _usual(sorted(alone))
        )  # not held above 1000: half of the errors are below
        self._ratios[key].add(ratio(took, model_milli))
        self._totals[key] = self._ratios[key].totals()

    def forget(self, lease_id: str) -> None:
        """Forget a lease that is over."""
        self._alone.pop(lease_id, None)

    def state(self) -> ForecastState:
        """Return the parts of the forecasts' state, for JSON."""
        return {
            "alone": {lease_id: [list(alone)] for lease_id, alone in self._alone.items()},
            "company": {f"{others} {name}": [sparse(one.weights)] for (name, others), one in self._ratios.items()},
        }

    def take_state(self, read: StateReader) -> None:
        """Take what was learnt before; releases that did not learn it wrote nothing. Raises ValueError."""
        for lease_id, (alone,) in read.named("alone", 1):
            self._alone[lease_id] = read.wholes(alone)[-KEPT:]
        for name, (weights,) in read.named("company", 1):
            others, _, device_name = name.partition(" ")
            key = device_name, read.whole(others)
            self._ratios[key] = Histogram(RATIOS, memory=_MEMORY, weights=read.weights(weights, RATIOS))
            self._totals[key] = self._ratios[key].totals()


def _usual(ordered: Sequence[int]) -> int:
    """Return the median, at least 1 ms."""
    middle = len(ordered) // 2
    return max(1, sum(ordered[middle - 1 + len(ordered) % 2 : middle + 1]) // (2 - len(ordered) % 2))
