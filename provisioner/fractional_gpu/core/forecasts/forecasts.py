"""Forecasts swaps, cells, gaps between cells, waits and demands from earlier outcomes.

A forecast is the median of the most recent outcomes of its kind. Forecasts shown to people have bounds, which a `Band` corrects. Decisions
use expected values, with one exception. If a device will become unavailable, its kernels are saved early enough to finish even if saving
takes as long as the upper bound (`widest_swap_span`). Otherwise, their state could be lost.

- The duration of swaps is forecast from a line fitted to recent swaps of the same kind on the same device model.
- The duration of cells and gaps is forecast from the lease's most recent ones, and a few typical ones from all leases.
- Waits are computed from the queue by `queue_wait`, and corrected here using recent waits of the same kind and similar length.
- Slowdowns caused by busy neighbours are computed from a model of contention, and corrected using recent cells.
- A lease's demand, and how often signs of its next cell are right, are decaying means. New leases start with the means of earlier ones.
- Two more things are learnt: the time that cells lose because idle leases hold memory (`HoldCosts`), and the sizes that leases request
  (`RequestedSizes`).

Memory use is bounded. Each lease uses a few kilobytes from its first cell until `forget` is called. Times are in ms on the arbiter's clock.
Results are deterministic, so that the arbiter can base decisions on them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Literal, NamedTuple

from fractional_gpu.core.forecasts.asks import NO_REQUESTS, RequestedSizes
from fractional_gpu.core.forecasts.outcomes import (
    CELL,
    KINDS,
    PAD,
    REST,
    RESUME,
    SEAT,
    SLOWDOWN,
    SUSPEND,
    WAIT,
    Accuracy,
    Band,
    ForecastError,
    ForecastOutcome,
    add_last,
    entry_of,
    quantile,
)
from fractional_gpu.core.model import Sign, Span


def _span(expected: float, low: float, high: float) -> Span:
    return Span(expected_ms=int(expected), low_ms=int(low), high_ms=int(high))


# -- swap times --------------------------------------------------------------------------------------------------------
# A suspend or resume takes a fixed time plus the size divided by the bandwidth.
#
# The slope is the median slope between any two swaps of different sizes, and the fixed time is the median remainder (Theil 1950, Sen 1968).
# A few outliers do not move the line, and a slower device is noticed once half of the swaps are slower. Published times count as two more
# swaps, and are scaled to the device. If they are ten times too slow, the first swap corrects that for all sizes.


_FIRST_LINES = {SUSPEND: (300.0, 1 / 1.8), RESUME: (300.0, 1 / 4.0)}  # fixed ms, ms per MiB
_SWAPS = 12
_FIRST_SIZES_MIB = (0, 8192)  # of the two swaps with published times


def _line(first: tuple[float, float], swaps: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Fit a line to (MiB, ms) pairs. Return the fixed time in ms and the slope in ms per MiB. Neither is negative."""
    fixed, slope = first
    if not swaps:
        return first
    level = quantile(sorted(took / (fixed + slope * mib) for mib, took in swaps), 0.5)
    known = [*swaps, *((mib, level * (fixed + slope * mib)) for mib in _FIRST_SIZES_MIB)]
    slopes = [
        (took - other_took) / (mib - other_mib)
        for (mib, took), (other_mib, other_took) in combinations(known, 2)
        if abs(mib - other_mib) > max(mib, other_mib) // 3  # the slope between similar sizes is noise
    ]
    slope = max(0.0, quantile(sorted(slopes), 0.5))
    fixed = max(0.0, quantile(sorted(took - slope * mib for mib, took in known), 0.5))
    return fixed, slope


# -- durations ---------------------------------------------------------------------------------------------------------
# How long cells and the gaps between them last. A lease's last durations are mixed with a few typical ones of all leases, so a new lease
# starts with the typical ones.


_NEVER_MS = 1 << 30  # 12 days, the longest duration; it also stands for a gap that lasted until the kernel ended
_OWN, _COMMON, _TYPICAL = 32, 256, 9
# Sixteen quantiles from published traces of notebook use, seconds. The medians are 2 minutes for cells and 3 minutes for gaps.
_CELLS_S = (8, 19, 31, 42, 57, 75, 93, 111, 143, 188, 233, 278, 380, 545, 830, 2_150)
_GAPS_S = (12, 26, 39, 53, 75, 105, 135, 165, 218, 293, 368, 443, 893, 1_718, 3_110, _NEVER_MS // 1000)


@dataclass
class Durations:
    """The most recent durations, for each lease and for all leases together, in ms."""

    common: list[int]
    own: dict[str, list[int]] = field(default_factory=dict)

    @cached_property
    def typical(self) -> list[int]:
        ordered = sorted(self.common) or [0]
        return [int(quantile(ordered, (2 * one + 1) / (2 * _TYPICAL))) for one in range(_TYPICAL)]

    def add(self, lease_id: str | None, duration_ms: int) -> None:
        """Record a duration. `lease_id` is None if the lease has ended."""
        duration_ms = min(duration_ms, _NEVER_MS)
        if lease_id is not None:
            add_last(self.own.setdefault(lease_id, []), duration_ms, _OWN)
        add_last(self.common, duration_ms, _COMMON)
        self.__dict__.pop("typical", None)

    def of(self, lease_id: str) -> Sequence[int]:
        """Return the lease's own durations and the typical ones, sorted together."""
        return sorted([*self.own.get(lease_id, ()), *self.typical])


def rest_ms(durations: Sequence[int], elapsed_ms: int, part: float) -> int:
    """Return the `part` quantile of the time remaining, in ms, when `elapsed_ms` has passed.

    If no recorded duration was longer, the median remaining time is taken to be `elapsed_ms`.
    """
    longer = durations[bisect_left(durations, elapsed_ms) :]
    if not longer:
        return int(elapsed_ms * part / (1 - part))
    return int(quantile(longer, part)) - elapsed_ms


def _rest_span(durations: Sequence[int], elapsed_ms: int) -> Span:
    low, expected, high = (rest_ms(durations, elapsed_ms, part) for part in (0.1, 0.5, 0.9))
    return _span(expected, low, high)


def chance_milli(durations: Sequence[int], elapsed_ms: int, within_ms: int) -> int:
    """Return the probability, in thousandths, that what has lasted `elapsed_ms` so far ends within the next `within_ms`."""
    gone = bisect_right(durations, elapsed_ms)
    if gone == len(durations):
        return 0
    return 1000 * (bisect_right(durations, elapsed_ms + within_ms) - gone) // (len(durations) - gone)


class Rhythm(NamedTuple):
    """The period in which a lease's next cell is likely to start, and the probability of this in thousandths."""

    from_ms: int
    until_ms: int
    chance_milli: int


_RHYTHM_GAPS = 6  # a lease with fewer gaps has no rhythm
_RHYTHM_MILLI = 500  # minimum probability of a cell in the window
_SHORTEST_WINDOW_MS = 20_000


# -- means -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Mean:
    """A mean in thousandths. Samples have equal weight at first. Later, older ones count less. The initial value counts as two samples."""

    value: float
    count: int = 2

    def learn(self, milli: int, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.value += (milli - self.value) / self.count


_OWN_SAMPLES, _COMMON_SAMPLES = 16, 256  # number of samples after which weights decay


@dataclass(slots=True)
class LeaseMeans:
    """A mean for each lease, and common means (for each pool or sign) as the initial values for new leases."""

    first_milli: int
    own: dict[str, Mean] = field(default_factory=dict)
    common: dict[str, Mean] = field(default_factory=dict)

    def milli(self, own: str, common: str) -> int:
        known = self.own.get(own) or self.common.get(common)
        return self.first_milli if known is None else int(known.value)

    def learn(self, own: str, common: str, milli: int) -> None:
        self.own.setdefault(own, Mean(self.milli(own, common))).learn(milli, _OWN_SAMPLES)
        entry_of(self.common, common, lambda: Mean(self.first_milli)).learn(milli, _COMMON_SAMPLES)


RATE_BITS = 40
_STEP = 1024
_HOLD_CELLS = 64  # number of cells after which a loss counts about a third
# An hour of 40,000 MiB without a loss, so that the first loss counts little.
_FIRST_HELD = 40_000 * 3_600_000


@dataclass(slots=True)
class HoldCosts:
    """The time that cells lose because idle leases hold memory, per MiB and ms. Each new cell reduces the weight of earlier losses."""

    lost: int = 0  # ms times _STEP
    held: int = _FIRST_HELD  # MiB times ms

    def learn(self, lost_ms: int, held: int) -> None:
        """Record the time a cell lost, and the memory idle leases have held since the previous cell, in MiB times ms."""
        self.lost += lost_ms * _STEP - -(-self.lost // _HOLD_CELLS)  # rounded up, so that it decays to 0
        self.held += held - self.held // _HOLD_CELLS

    @property
    def rate(self) -> int:
        """The loss per MiB and ms, times 1 << RATE_BITS. It is rounded down to three significant bits, so that it rarely changes."""
        rate = (self.lost << RATE_BITS) // (_STEP * self.held) if self.held else 0
        low = max(0, rate.bit_length() - 3)
        return rate >> low << low


# -- slowdowns ---------------------------------------------------------------------------------------------------------
# A slowdown is the time of a cell with busy neighbours divided by its time alone, in thousandths. It is at least 1000, because no neighbour
# makes a cell faster.
#
# The time that a cell would have taken alone is unknown. The lease's usual time is used instead, which is the median of the last cells that
# started and ended without a busy neighbour on their device. Other cells are classified by their neighbours at the start, not by all that
# they met. Long cells meet more neighbours, so that neighbours would seem to slow cells down more than they do.


_WHOLE = 1000  # the time that a cell takes alone
_SLOWEST = 1_000_000
_ALONE_CELLS, _LEAST_ALONE = 16, 4  # the last cells of a lease, and how many are needed to know its usual time
_LEAST_CELL_MS = 1_000  # shorter cells depend more on the CPU than on the device
_MOST_OTHERS = 4  # larger numbers of neighbours are in the same class
_RATIOS = 64  # the last ratios of outcomes to computed values, for each class
# Ratios before the first outcome:
_FIRST_WAITS = (0.15, 0.5, 0.75, 1.0, 1.0, 1.4, 2.0, 4.0)
_FIRST_SLOWDOWNS = (0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.1, 1.2)


class Neighbours(NamedTuple):
    """A cell's busy neighbours at its start, and the slowdown that was forecast."""

    device_name: str
    others: int
    model_milli: int  # the slowdown according to the model
    stated: Span | None  # None if it started alone


# -- the forecasts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpan(Span):
    """The forecast of a wait, with the kind of wait and the computed wait it was corrected from."""

    kind: str  # "swap", or "busy" if a busy lease must leave first
    basis_ms: int  # as computed by `queue_wait`


@dataclass(slots=True)
class _CellTimes:
    """When a lease's cell started or, if the lease is idle, when its last cell ended. The other time is None."""

    began_ms: int | None = None
    ended_ms: int | None = None
    device_name: str = ""


@dataclass
class Forecasts:
    """All forecasts. A driver can save the fields and pass them to the next arbiter. They do not include cells and gaps in progress."""

    version: Literal[3] = 3
    swaps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # (MiB, ms), by kind and device
    cells: Durations = field(default_factory=lambda: Durations([1000 * one for one in 4 * _CELLS_S]))
    gaps: Durations = field(default_factory=lambda: Durations([1000 * one for one in 4 * _GAPS_S]))
    demands: LeaseMeans = field(default_factory=lambda: LeaseMeans(300))
    signs: LeaseMeans = field(default_factory=lambda: LeaseMeans(700))
    holds: dict[str, HoldCosts] = field(default_factory=dict)  # by pool
    asked_sizes: dict[str, RequestedSizes] = field(default_factory=dict)  # by pool
    ratios: dict[str, list[float]] = field(default_factory=dict)  # of waits and slowdowns, by class
    alone: dict[str, list[int]] = field(default_factory=dict)  # ms of the last cells that ran alone, by lease
    bands: dict[str, Band] = field(default_factory=dict)  # by kind and name (`ForecastOutcome`)
    accuracy: dict[str, Accuracy] = field(default_factory=dict)  # by kind

    def __post_init__(self) -> None:
        self.watch: Callable[[ForecastOutcome], None] | None = None  # called with each forecast and its outcome
        self._times: dict[str, _CellTimes] = {}  # by lease
        self._lines: dict[str, tuple[float, float]] = {}  # through `swaps`

    def errors(self) -> tuple[ForecastError, ...]:
        """Return the recent accuracy of each kind of forecast."""
        return tuple(self.accuracy.get(kind, Accuracy()).error(kind) for kind in KINDS)

    def forget(self, lease_id: str) -> None:
        """Remove a lease that has ended. If it was idle, its last gap is recorded as one that never ended."""
        self.demands.own.pop(lease_id, None)
        for sign in Sign:
            self.signs.own.pop(f"{sign} {lease_id}", None)
        for known in (self.alone, self.cells.own, self.gaps.own):
            known.pop(lease_id, None)
        times = self._times.pop(lease_id, None)
        if times is not None and times.ended_ms is not None:
            self.gaps.add(None, _NEVER_MS)

    # -- bounds and errors ---------------------------------------------------------------------------------------------

    def _stated(self, kind: str, name: str, span: Span) -> Span:
        """Return the estimate with its bounds corrected by the `Band` of this kind and name, if there is one."""
        band = self.bands.get(f"{kind} {name}")
        return span if band is None else band.spread(span)

    def _record_outcome(
        self, kind: str, name: str, span: Span, happened: int, *, lease_id: str = "", stated: Span | None = None
    ) -> None:
        """Compare a forecast with its outcome, and adjust the bounds. `stated` is the forecast shown to the user, if it was not `span`."""
        happened = max(0, happened)
        stated = stated or self._stated(kind, name, span)
        self.accuracy.setdefault(kind, Accuracy()).compare(stated, happened)
        if self.watch is not None:
            self.watch(ForecastOutcome(kind, name, lease_id, stated, happened))
        self._band(kind, name).learn(span, happened)

    def _band(self, kind: str, name: str) -> Band:
        return entry_of(self.bands, f"{kind} {name}", Band)

    def _corrected(self, name: str, first: Sequence[float], basis: int) -> Span:
        """Return a forecast with bounds, by scaling the computed value `basis` by recent ratios of outcomes to computed values."""
        ratios = sorted(self.ratios.get(name, first))
        low, expected, high = (max(0.0, quantile(ratios, part) * (basis + PAD) - PAD) for part in (0.1, 0.5, 0.9))
        return _span(expected, low, high)

    def _learn_ratio(self, name: str, first: Sequence[float], basis: int, happened: int) -> None:
        add_last(entry_of(self.ratios, name, lambda: list(first)), (happened + PAD) / (basis + PAD), _RATIOS)

    # -- swaps ---------------------------------------------------------------------------------------------------------

    def swap_finished(self, kind: str, device_name: str, mib: int, took_ms: int) -> None:
        """Update the forecasts with how long a successful `SUSPEND` or `RESUME` of this many MiB took."""
        self._record_outcome(kind, device_name, self._swap_span(kind, device_name, mib), took_ms)
        name = f"{kind} {device_name}"
        add_last(entry_of(self.swaps, name, list), (max(0, mib), max(0, took_ms)), _SWAPS)
        self._lines.pop(name, None)

    def swap_ms(self, kind: str, device_name: str, mib: int) -> int:
        """Return the expected time for suspending or resuming this many MiB, in ms. Cheap to call."""
        name = f"{kind} {device_name}"
        if name not in self._lines:
            self._lines[name] = _line(_FIRST_LINES[kind], self.swaps.get(name, ()))
        fixed, slope = self._lines[name]
        return int(fixed + slope * mib + 0.5)

    def _swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        expected_ms = self.swap_ms(kind, device_name, mib)
        return _span(expected_ms, expected_ms * 2 // 3, expected_ms * 4 // 3)

    def swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        """Return the expected time for suspending or resuming this many MiB, with bounds."""
        return self._stated(kind, device_name, self._swap_span(kind, device_name, mib))

    def widest_swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        """Return `swap_span`, with bounds at least as wide as the initial ones. Use this if state would be lost by saving too late."""
        first, stated = self._swap_span(kind, device_name, mib), self.swap_span(kind, device_name, mib)
        return _span(stated.expected_ms, min(first.low_ms, stated.low_ms), max(first.high_ms, stated.high_ms))

    # -- cells and gaps ------------------------------------------------------------------------------------------------

    def cell_began(self, lease_id: str, at_ms: int, device_name: str = "") -> None:
        """Record the start of a cell and the end of the gap before it. If the cell then waits, call this again to update the start time."""
        times = self._times.setdefault(lease_id, _CellTimes())
        if times.ended_ms is not None:
            self.gaps.add(lease_id, max(0, at_ms - times.ended_ms))
        times.began_ms, times.ended_ms, times.device_name = at_ms, None, device_name

    def cell_ended(self, lease_id: str, at_ms: int) -> None:
        """Record the end of a cell. Compare its duration with the forecasts made at its start and halfway through the expected time."""
        times = self._times.get(lease_id)
        if times is None or times.began_ms is None:
            return
        lasted_ms, name = max(0, at_ms - times.began_ms), times.device_name
        durations = self.cells.of(lease_id)
        whole = _rest_span(durations, 0)
        self._record_outcome(CELL, name, whole, lasted_ms, lease_id=lease_id)
        half_ms = whole.expected_ms // 2
        if lasted_ms > half_ms:
            self._record_outcome(REST, name, _rest_span(durations, half_ms), lasted_ms - half_ms, lease_id=lease_id)
        self.cells.add(lease_id, lasted_ms)
        times.began_ms, times.ended_ms = None, at_ms

    def cell_left_ms(self, lease_id: str, now_ms: int) -> int:
        """Return the median remaining time of the lease's cell in ms, or 0 if no cell is running."""
        times = self._times.get(lease_id)
        if times is None or times.began_ms is None:
            return 0
        return rest_ms(self.cells.of(lease_id), max(0, now_ms - times.began_ms), 0.5)

    def next_cell_ms(self, lease_id: str) -> int:
        """Return the median duration of the lease's cells, in ms."""
        return rest_ms(self.cells.of(lease_id), 0, 0.5)

    def gap_left_ms(self, lease_id: str, now_ms: int) -> int:
        """Return the median time until the lease's next cell in ms, at most about 12 days, or 0 while a cell is running."""
        idle_ms = self._idle_ms(lease_id, now_ms)
        return 0 if idle_ms is None else rest_ms(self.gaps.of(lease_id), idle_ms, 0.5)

    def chance_milli(self, lease_id: str, now_ms: int, within_ms: int) -> int:
        """Return the probability in thousandths that a cell starts within the next `within_ms`, or 1000 if one is running."""
        idle_ms = self._idle_ms(lease_id, now_ms)
        return 1000 if idle_ms is None else chance_milli(self.gaps.of(lease_id), idle_ms, within_ms)

    def rhythm(self, lease_id: str, now_ms: int) -> Rhythm | None:
        """Predict from earlier gaps when the lease's next cell is likely, or return None if the gaps are too few or too irregular."""
        idle_ms, own = self._idle_ms(lease_id, now_ms), sorted(self.gaps.own.get(lease_id, ()))
        if idle_ms is None or len(own) < _RHYTHM_GAPS:
            return None
        for gap_ms in own[bisect_right(own, idle_ms) :]:
            from_ms = max(idle_ms, gap_ms - gap_ms // 8)
            window_ms = max(_SHORTEST_WINDOW_MS, gap_ms // 4)
            milli = chance_milli(self.gaps.of(lease_id), from_ms, window_ms)
            if milli >= _RHYTHM_MILLI:
                at_ms = now_ms - idle_ms
                return Rhythm(at_ms + from_ms, at_ms + from_ms + window_ms, milli)
        return None

    def _idle_ms(self, lease_id: str, now_ms: int) -> int | None:
        """Return how long the lease has been idle, in ms (0 if it has never run a cell). Return None while a cell is running."""
        times = self._times.get(lease_id)
        if times is None:
            return 0
        return None if times.ended_ms is None else max(0, now_ms - times.ended_ms)

    # -- waits ---------------------------------------------------------------------------------------------------------

    def wait_span(self, kind: str, basis_ms: int) -> WaitSpan:
        """Forecast a wait by correcting the computed wait, using recent waits of the same kind and similar length."""
        span = self._stated(WAIT, kind, self._corrected(_wait_class(kind, basis_ms), _FIRST_WAITS, basis_ms))
        return WaitSpan(**asdict(span), kind=kind, basis_ms=basis_ms)

    def wait_ended(self, expected: WaitSpan, waited_ms: int, *, given_up: bool = False) -> None:
        """Update the forecasts with how long a wait took. Ignore an abandoned wait unless it exceeded its upper bound."""
        name = _wait_class(expected.kind, expected.basis_ms)
        span = self._corrected(name, _FIRST_WAITS, expected.basis_ms)
        if not given_up:
            self._record_outcome(WAIT, expected.kind, span, waited_ms, stated=expected)
        elif waited_ms > expected.high_ms:
            self._band(WAIT, expected.kind).outlasted(span, waited_ms)
        else:
            return
        self._learn_ratio(name, _FIRST_WAITS, expected.basis_ms, waited_ms)

    # -- slowdowns -----------------------------------------------------------------------------------------------------

    def slowdown_span(self, device_name: str, others: int, model_milli: int) -> Span:
        """Forecast a cell's slowdown with this number of busy neighbours, in thousandths."""
        corrected = self._corrected(_neighbour_class(device_name, others), _FIRST_SLOWDOWNS, model_milli)
        span = self._stated(SLOWDOWN, device_name, corrected)
        return _span(max(_WHOLE, span.expected_ms), max(_WHOLE, span.low_ms), max(_WHOLE, span.high_ms))

    def learn_slowdown(self, lease_id: str, neighbours: Neighbours, lasted_ms: int, *, ended_alone: bool) -> None:
        """Update the slowdown forecasts with a cell that started with these neighbours."""
        device_name, others, model_milli, stated = neighbours
        if lasted_ms < _LEAST_CELL_MS:
            return
        alone = self.alone.setdefault(lease_id, [])
        if stated is None:
            if ended_alone:
                add_last(alone, lasted_ms, _ALONE_CELLS)
            return
        if len(alone) < _LEAST_ALONE:
            return
        took_milli = min(_SLOWEST, int(lasted_ms * _WHOLE / max(1, quantile(sorted(alone), 0.5))))
        name = _neighbour_class(device_name, others)
        span = self._corrected(name, _FIRST_SLOWDOWNS, model_milli)
        self._record_outcome(SLOWDOWN, device_name, span, max(_WHOLE, took_milli), lease_id=lease_id, stated=stated)
        # The outcome may be below 1000, because half of the errors make it too small.
        self._learn_ratio(name, _FIRST_SLOWDOWNS, model_milli, took_milli)

    # -- seats ---------------------------------------------------------------------------------------------------------

    def seat_span(self, pool: str, worked_out: Span) -> Span:
        """Return the computed wait for a seat, with corrected bounds."""
        return self._stated(SEAT, pool, worked_out)

    def seat_given(self, pool: str, worked_out: Span, stated: Span, waited_ms: int) -> None:
        """Update the forecasts with how long the wait for a seat took. `worked_out` and `stated` were forecast when it began."""
        self._record_outcome(SEAT, pool, worked_out, waited_ms, stated=stated)

    # -- demands, signs, memory held, sizes ----------------------------------------------------------------------------

    def demand_milli(self, lease_id: str, pool: str) -> int:
        """Return how many thousandths of a device the lease uses while busy, or the pool's mean for a new lease. Cheap to call."""
        return self.demands.milli(lease_id, pool)

    def demand_seen(self, lease_id: str, pool: str, milli: int, *, most_milli: int | None = None) -> int:
        """Record that a busy lease uses `milli` thousandths of a device, and return its updated demand.

        If the device is fully used, all that is known is that the demand lies between `milli` and `most_milli`.
        """
        if most_milli is not None:
            before = self.demand_milli(lease_id, pool)
            if milli <= before <= most_milli:
                return before
            milli = max(milli, min(before, most_milli))
        self.demands.learn(lease_id, pool, milli)
        return self.demand_milli(lease_id, pool)

    def sign_milli(self, lease_id: str, sign: Sign) -> int:
        """Return how often this sign has correctly predicted the lease's next cell, in thousandths. Cheap to call."""
        return self.signs.milli(f"{sign} {lease_id}", sign)

    def sign_settled(self, lease_id: str, sign: Sign, *, true: bool) -> None:
        """Record whether this sign was followed by a cell in time."""
        self.signs.learn(f"{sign} {lease_id}", sign, 1000 if true else 0)

    def hold_cost(self, pool: str, mib: int, wait: int) -> int:
        """Return the cost to the pool's cells, per ms, of an idle lease that holds this much memory. A ms of waiting costs `wait`."""
        return mib * wait * self.hold_rate(pool) >> RATE_BITS

    def hold_rate(self, pool: str) -> int:
        """Return the pool's learnt rate of time lost per MiB and ms held, as used by `hold_cost`."""
        known = self.holds.get(pool)
        return 0 if known is None else known.rate

    def hold_seen(self, pool: str, lost_ms: int, held: int) -> None:
        """Record how much time a cell lost because idle leases held memory.

        `held` is the memory they have held since the last cell, in MiB times ms.
        """
        entry_of(self.holds, pool, HoldCosts).learn(lost_ms, held)

    def asked(self, pool: str, mib: int, devices: int) -> None:
        """Record the size of a lease that is requesting room."""
        entry_of(self.asked_sizes, pool, RequestedSizes).add(mib, devices)

    def asks(self, pool: str) -> RequestedSizes:
        return self.asked_sizes.get(pool, NO_REQUESTS)


def _wait_class(kind: str, basis_ms: int) -> str:
    """Return the class of a wait, which combines its kind and the order of magnitude of its length. Each class is corrected separately."""
    return f"{kind} {min(15, (basis_ms >> 8).bit_length() + 1 >> 1)}"


def _neighbour_class(device_name: str, others: int) -> str:
    return f"{min(others, _MOST_OTHERS)} {device_name}"
