"""What is learnt of swaps, cells, gaps between cells, waits and demands, and what follows for the next ones.

A forecast is the median of the last outcomes of its kind; what people see has bounds, which a `Band` learns from misses. Decisions go by
expected values, which bounds do not move. The exception is what is saved before a device goes away, where too short a time costs state
(`widest_swap_span`).

- Swaps: the median line through the last swaps of a kind on a type of device.
- Cells and gaps: a lease's last ones, mixed with a few typical ones of all leases.
- Waits: `queue_wait` works one out from the queue; here it is corrected by how the last ones of its kind and length turned out.
- Slowdowns by busy neighbours: what the model of contention says, corrected by how the last cells turned out.
- Demands, and how often a sign of a coming cell is right: decayed means, for each lease; a new lease starts from the mean of all.
- What cells lose because idle leases hold memory (`HoldCosts`), what leases ask for (`AskMix`).

Memory is bounded: a lease costs a few kilobytes from its first cell until `forget`. Times are the arbiter's, in ms; there is no clock here.
The same calls give the same results, so the arbiter may decide by them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Literal, NamedTuple

from fractional_gpu.core.forecasts.outcomes import (
    CELL,
    EVEN,
    KINDS,
    REST,
    RESUME,
    SEAT,
    SLOWDOWN,
    SUSPEND,
    WAIT,
    Accuracy,
    Band,
    ForecastError,
    Judged,
    add_last,
    kept,
    quantile,
)
from fractional_gpu.core.forecasts.sizes import NO_ASKS, AskMix
from fractional_gpu.core.model import Sign, Span


def _span(expected: float, low: float, high: float) -> Span:
    return Span(expected_ms=int(expected), low_ms=int(low), high_ms=int(high))


# -- swap times --------------------------------------------------------------------------------------------------------
# How long a suspend or resume takes: a fixed time plus the bytes over the bandwidth.
#
# The slope is the median of those between any two of the last swaps of different sizes, the fixed time the median of what is left (Theil
# 1950, Sen 1968). So a few outliers do not move the line, and a change is believed once it makes up half of the swaps. What is known
# beforehand counts as two swaps, scaled to how quick the swaps are: if it is ten times too slow, the first swap corrects that for all
# sizes.


_FIRST_LINES = {SUSPEND: (300.0, 1 / 1.8), RESUME: (300.0, 1 / 4.0)}  # fixed ms, ms a MiB
_SWAPS = 12
_FIRST_SIZES_MIB = (0, 8192)  # of the swaps that stand for what is known beforehand


def _line(first: tuple[float, float], swaps: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the fixed ms and the ms a MiB of such swaps, (MiB, ms); neither is negative."""
    fixed, slope = first
    if not swaps:
        return first
    level = quantile(sorted(took / (fixed + slope * mib) for mib, took in swaps), 0.5)
    known = [*swaps, *((mib, level * (fixed + slope * mib)) for mib in _FIRST_SIZES_MIB)]
    slopes = [
        (took - other_took) / (mib - other_mib)
        for (mib, took), (other_mib, other_took) in combinations(known, 2)
        if abs(mib - other_mib) > max(mib, other_mib) // 3  # between similar sizes there is nothing but noise
    ]
    slope = max(0.0, quantile(sorted(slopes), 0.5))
    fixed = max(0.0, quantile(sorted(took - slope * mib for mib, took in known), 0.5))
    return fixed, slope


# -- durations ---------------------------------------------------------------------------------------------------------
# How long cells, and the gaps between them, last. A lease's own outcomes are mixed with a few typical ones of all leases: a new lease is
# like all others, a lease with a history is like itself. Both are the last ones, so habits may change.


_NEVER_MS = 1 << 30
"""A gap that no cell ended: the kernel ended first. The longest duration, 12 days, too."""
_OWN, _COMMON, _TYPICAL = 32, 256, 9
# Sixteen quantiles of published traces of notebook use, seconds: cells of 2 minutes at the median, gaps of 3 minutes.
_CELLS_S = (8, 19, 31, 42, 57, 75, 93, 111, 143, 188, 233, 278, 380, 545, 830, 2_150)
_GAPS_S = (12, 26, 39, 53, 75, 105, 135, 165, 218, 293, 368, 443, 893, 1_718, 3_110, _NEVER_MS // 1000)


@dataclass
class Durations:
    """The last durations, ms: of each lease, and of all."""

    common: list[int]
    own: dict[str, list[int]] = field(default_factory=dict)

    @cached_property
    def typical(self) -> list[int]:
        ordered = sorted(self.common) or [0]
        return [int(quantile(ordered, (2 * one + 1) / (2 * _TYPICAL))) for one in range(_TYPICAL)]

    def add(self, lease_id: str | None, duration_ms: int) -> None:
        """Count a duration; None: it says nothing of a single lease."""
        duration_ms = min(duration_ms, _NEVER_MS)
        if lease_id is not None:
            add_last(self.own.setdefault(lease_id, []), duration_ms, _OWN)
        add_last(self.common, duration_ms, _COMMON)
        self.__dict__.pop("typical", None)

    def of(self, lease_id: str) -> Sequence[int]:
        """Return the lease's durations, sorted, with those that are typical of all."""
        return sorted([*self.own.get(lease_id, ()), *self.typical])


def rest_ms(durations: Sequence[int], elapsed_ms: int, part: float) -> int:
    """Return the quantile of the remaining time of what has lasted `elapsed_ms`; beyond anything known, about as long again."""
    longer = durations[bisect_left(durations, elapsed_ms) :]
    if not longer:
        return int(elapsed_ms * part / (1 - part))
    return int(quantile(longer, part)) - elapsed_ms


def _rest_span(durations: Sequence[int], elapsed_ms: int) -> Span:
    low, expected, high = (rest_ms(durations, elapsed_ms, part) for part in (0.1, 0.5, 0.9))
    return _span(expected, low, high)


def chance_milli(durations: Sequence[int], elapsed_ms: int, within_ms: int) -> int:
    """Return how likely something that has lasted `elapsed_ms` ends within this many ms more, thousandths."""
    gone = bisect_right(durations, elapsed_ms)
    if gone == len(durations):
        return 0
    return 1000 * (bisect_right(durations, elapsed_ms + within_ms) - gone) // (len(durations) - gone)


class Rhythm(NamedTuple):
    """When a lease's next cell is likely, and how likely it is, thousandths."""

    from_ms: int
    until_ms: int
    chance_milli: int


_RHYTHM_GAPS = 6  # a lease's rhythm is read from at least this many of its gaps
_RHYTHM_MILLI = 500  # of its gaps that reach so far, those that end in the window
_SHORTEST_WINDOW_MS = 20_000


# -- means -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Mean:
    """A mean of shares, thousandths: of all samples at first, then one that decays with the last ones. The prior counts for two."""

    value: float
    count: int = 2

    def learn(self, milli: int, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.value += (milli - self.value) / self.count


_OWN_SAMPLES, _COMMON_SAMPLES = 16, 256  # that a mean remembers, about


@dataclass(slots=True)
class Means:
    """Shares that are learnt for each lease, and for what a new lease starts from: its pool, or a kind of sign."""

    first_milli: int
    own: dict[str, Mean] = field(default_factory=dict)
    common: dict[str, Mean] = field(default_factory=dict)

    def milli(self, own: str, common: str) -> int:
        """Return the mean, thousandths."""
        known = self.own.get(own) or self.common.get(common)
        return self.first_milli if known is None else int(known.value)

    def learn(self, own: str, common: str, milli: int) -> None:
        self.own.setdefault(own, Mean(self.milli(own, common))).learn(milli, _OWN_SAMPLES)
        kept(self.common, common, lambda: Mean(self.first_milli)).learn(milli, _COMMON_SAMPLES)


RATE_BITS = 40
_STEP = 1024
_HOLD_CELLS = 64  # that a cost is remembered for, about
_FIRST_HELD = (
    40_000 * 3_600_000
)  # held without a loss before the first: 40,000 MiB for an hour, so one loss says little


@dataclass(slots=True)
class HoldCosts:
    """What cells lose because idle leases hold memory that they need: ms per MiB and ms held. It fades with cells, not with time."""

    lost: int = 0  # ms, in parts of 1 / _STEP
    held: int = _FIRST_HELD  # MiB times ms

    def learn(self, lost_ms: int, held: int) -> None:
        """Learn what a cell lost, and the MiB times ms that idle leases held since the cell before it."""
        self.lost += lost_ms * _STEP - -(-self.lost // _HOLD_CELLS)  # rounded up: in the end nothing is left
        self.held += held - self.held // _HOLD_CELLS

    @property
    def rate(self) -> int:
        """The loss for each MiB and ms, in parts of 1 << RATE_BITS; rounded down to its three highest bits, so that it seldom changes."""
        rate = (self.lost << RATE_BITS) // (_STEP * self.held) if self.held else 0
        low = max(0, rate.bit_length() - 3)
        return rate >> low << low


# -- slowdowns ---------------------------------------------------------------------------------------------------------
# How many times as long as alone a cell takes next to busy neighbours, thousandths, at least 1000: no neighbour makes a cell faster.
#
# What a cell would have taken alone is not known. It is compared with the usual one of its lease: the median of its last cells that began
# without a busy neighbour on their device and had one for at most half of their time. Cells are divided by how they began, not by whom
# they met: a long cell meets more neighbours, so that division would call neighbours slow that are not.


_WHOLE = 1000  # as long as alone
_SLOWEST = 1_000_000
_ALONE_CELLS, _LEAST_ALONE = 16, 4  # that are kept of a lease; fewer say nothing
_LEAST_CELL_MS = 1_000  # shorter cells say more of what runs next to the GPU's work than of the device
_ALONE_MILLI = 500  # busy neighbours on average that a cell had at most that counts as alone
_MOST_OTHERS = 4  # so many neighbours and more are alike
_RATIOS = 64  # of what happened and what was worked out, that are kept of each kind
# Before any wait or slowdown was seen:
_FIRST_WAITS = (0.15, 0.5, 0.75, 1.0, 1.0, 1.4, 2.0, 4.0)
_FIRST_SLOWDOWNS = (0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.1, 1.2)


class Company(NamedTuple):
    """How a cell began on a device: the busy neighbours, what the model makes of them, and the forecast that was stated."""

    device_name: str
    others: int
    model_milli: int
    stated: Span | None  # None: it began alone


# -- the forecasts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpan(Span):
    """The forecast of a wait, and its basis, by which later ones are corrected."""

    kind: str  # what decides it: "swap" or "busy"
    basis_ms: int  # as worked out by `queue_wait`


@dataclass(slots=True)
class _Times:
    """When a lease's cell began, or its last one ended: at most one is set."""

    began_ms: int | None = None
    ended_ms: int | None = None
    device_name: str = ""  # the kind of device where the cell runs


@dataclass
class Forecasts:
    """The forecasts. A driver may keep the fields, and start the next arbiter from them; cells and gaps under way are not in them."""

    version: Literal[3] = 3
    swaps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # (MiB, ms), by kind and device
    cells: Durations = field(default_factory=lambda: Durations([1000 * one for one in 4 * _CELLS_S]))
    gaps: Durations = field(default_factory=lambda: Durations([1000 * one for one in 4 * _GAPS_S]))
    demands: Means = field(default_factory=lambda: Means(300))
    signs: Means = field(default_factory=lambda: Means(700))
    holds: dict[str, HoldCosts] = field(default_factory=dict)  # by pool
    asked_sizes: dict[str, AskMix] = field(default_factory=dict)  # by pool
    ratios: dict[str, list[float]] = field(default_factory=dict)  # of waits by kind and length, of slowdowns by company
    alone: dict[str, list[int]] = field(default_factory=dict)  # ms of cells that ran alone, by lease
    bands: dict[str, Band] = field(default_factory=dict)  # by kind and name (`Judged`)
    accuracy: dict[str, Accuracy] = field(default_factory=dict)  # by kind

    def __post_init__(self) -> None:
        self.watch: Callable[[Judged], None] | None = None  # sees every forecast that is compared with what happened
        self._times: dict[str, _Times] = {}  # by lease
        self._lines: dict[str, tuple[float, float]] = {}  # through `swaps`

    def errors(self) -> tuple[ForecastError, ...]:
        """Return how accurate each kind of forecast was lately."""
        return tuple(self.accuracy.get(kind, Accuracy()).error(kind) for kind in KINDS)

    def forget(self, lease_id: str) -> None:
        """Forget a lease that is over. If it idled, its last gap never ended."""
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
        """Return an estimator's forecast with the bounds to state."""
        band = self.bands.get(f"{kind} {name}")
        return span if band is None else band.spread(span)

    def _judge(
        self, kind: str, name: str, span: Span, happened: int, *, lease_id: str = "", stated: Span | None = None
    ) -> None:
        """Compare a forecast with what happened, and learn its bounds. `stated`: as it was stated, if that was some time ago."""
        happened = max(0, happened)
        stated = stated or self._stated(kind, name, span)
        self.accuracy.setdefault(kind, Accuracy()).compare(stated, happened)
        if self.watch is not None:
            self.watch(Judged(kind, name, lease_id, stated, happened))
        self._band(kind, name).learn(span, happened)

    def _band(self, kind: str, name: str) -> Band:
        return kept(self.bands, f"{kind} {name}", Band)

    def _corrected(self, name: str, first: Sequence[float], basis: int) -> Span:
        """Return a value that was worked out, corrected by the ratios of the last outcomes to what had been worked out for them."""
        ratios = sorted(self.ratios.get(name, first))
        low, expected, high = (max(0.0, quantile(ratios, part) * (basis + EVEN) - EVEN) for part in (0.1, 0.5, 0.9))
        return _span(expected, low, high)

    def _turned_out(self, name: str, first: Sequence[float], basis: int, happened: int) -> None:
        add_last(kept(self.ratios, name, lambda: list(first)), (happened + EVEN) / (basis + EVEN), _RATIOS)

    # -- swaps ---------------------------------------------------------------------------------------------------------

    def swap_finished(self, kind: str, device_name: str, mib: int, took_ms: int) -> None:
        """Learn from a successful `SUSPEND` or `RESUME` of this many MiB."""
        self._judge(kind, device_name, self._swap_span(kind, device_name, mib), took_ms)
        name = f"{kind} {device_name}"
        add_last(kept(self.swaps, name, list), (max(0, mib), max(0, took_ms)), _SWAPS)
        self._lines.pop(name, None)

    def swap_ms(self, kind: str, device_name: str, mib: int) -> int:
        """Return how long a swap of this many MiB is expected to take, ms. Cheap."""
        name = f"{kind} {device_name}"
        if name not in self._lines:
            self._lines[name] = _line(_FIRST_LINES[kind], self.swaps.get(name, ()))
        fixed, slope = self._lines[name]
        return int(fixed + slope * mib + 0.5)

    def _swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        expected_ms = self.swap_ms(kind, device_name, mib)
        return _span(expected_ms, expected_ms * 2 // 3, expected_ms * 4 // 3)

    def swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        """Return how long a swap is expected to take, with its bounds."""
        return self._stated(kind, device_name, self._swap_span(kind, device_name, mib))

    def widest_swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        """Return the same, with bounds no narrower than before anything was learnt: for times that are too short at the cost of state."""
        first, stated = self._swap_span(kind, device_name, mib), self.swap_span(kind, device_name, mib)
        return _span(stated.expected_ms, min(first.low_ms, stated.low_ms), max(first.high_ms, stated.high_ms))

    # -- cells and gaps ------------------------------------------------------------------------------------------------

    def cell_began(self, lease_id: str, at_ms: int, device_name: str = "") -> None:
        """Note that a cell of the lease began on such a device, which ends the gap before it; again (after a wait), it restarts."""
        times = self._times.setdefault(lease_id, _Times())
        if times.ended_ms is not None:
            self.gaps.add(lease_id, max(0, at_ms - times.ended_ms))
        times.began_ms, times.ended_ms, times.device_name = at_ms, None, device_name

    def cell_ended(self, lease_id: str, at_ms: int) -> None:
        """Note that the lease is idle again; compare the cell with its forecasts, at its beginning and when half of that time was over."""
        times = self._times.get(lease_id)
        if times is None or times.began_ms is None:
            return
        lasted_ms, name = max(0, at_ms - times.began_ms), times.device_name
        durations = self.cells.of(lease_id)
        whole = _rest_span(durations, 0)
        self._judge(CELL, name, whole, lasted_ms, lease_id=lease_id)
        half_ms = whole.expected_ms // 2
        if lasted_ms > half_ms:
            self._judge(REST, name, _rest_span(durations, half_ms), lasted_ms - half_ms, lease_id=lease_id)
        self.cells.add(lease_id, lasted_ms)
        times.began_ms, times.ended_ms = None, at_ms

    def cell_left_ms(self, lease_id: str, now_ms: int) -> int:
        """Return the median of what is left of the lease's cell, ms; 0 if none runs."""
        times = self._times.get(lease_id)
        if times is None or times.began_ms is None:
            return 0
        return rest_ms(self.cells.of(lease_id), max(0, now_ms - times.began_ms), 0.5)

    def next_cell_ms(self, lease_id: str) -> int:
        """Return the median length of the lease's cells, ms."""
        return rest_ms(self.cells.of(lease_id), 0, 0.5)

    def gap_left_ms(self, lease_id: str, now_ms: int) -> int:
        """Return the median time until the lease's next cell, ms, at most about 12 days; 0 while one runs."""
        idle_ms = self._idle_ms(lease_id, now_ms)
        return 0 if idle_ms is None else rest_ms(self.gaps.of(lease_id), idle_ms, 0.5)

    def chance_milli(self, lease_id: str, now_ms: int, within_ms: int) -> int:
        """Return how likely the lease's next cell comes within this many ms, by its gaps, thousandths; 1000 while one runs."""
        idle_ms = self._idle_ms(lease_id, now_ms)
        return 1000 if idle_ms is None else chance_milli(self.gaps.of(lease_id), idle_ms, within_ms)

    def rhythm(self, lease_id: str, now_ms: int) -> Rhythm | None:
        """Return when, from now on, the lease's own gaps make its next cell likely (in the arbiter's time); None if they do not."""
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
        """Return for how long the lease has idled; 0 if it never ran; None while a cell runs."""
        times = self._times.get(lease_id)
        if times is None:
            return 0
        return None if times.ended_ms is None else max(0, now_ms - times.ended_ms)

    # -- waits ---------------------------------------------------------------------------------------------------------

    def wait_span(self, kind: str, basis_ms: int) -> WaitSpan:
        """Return a wait that was worked out as `basis_ms`, corrected by how waits of the kind and about that length turned out."""
        span = self._stated(WAIT, kind, self._corrected(_wait_class(kind, basis_ms), _FIRST_WAITS, basis_ms))
        return WaitSpan(
            expected_ms=span.expected_ms, low_ms=span.low_ms, high_ms=span.high_ms, kind=kind, basis_ms=basis_ms
        )

    def wait_ended(self, expected: WaitSpan, waited_ms: int, *, given_up: bool = False) -> None:
        """Learn from a wait, `waited_ms` from the forecast on.

        One that was given up says something only if it had outlasted its forecast: without these, forecasts would stay short.
        """
        name = _wait_class(expected.kind, expected.basis_ms)
        span = self._corrected(name, _FIRST_WAITS, expected.basis_ms)
        if not given_up:
            self._judge(WAIT, expected.kind, span, waited_ms, stated=expected)
        elif waited_ms > expected.high_ms:
            self._band(WAIT, expected.kind).outlasted(span, waited_ms)
        else:
            return
        self._turned_out(name, _FIRST_WAITS, expected.basis_ms, waited_ms)

    # -- slowdowns -----------------------------------------------------------------------------------------------------

    def slowdown_span(self, device_name: str, others: int, model_milli: int) -> Span:
        """Return how many times as long as alone a cell takes next to busy neighbours, thousandths; `model_milli`: by `place.beside`."""
        corrected = self._corrected(_company(device_name, others), _FIRST_SLOWDOWNS, model_milli)
        span = self._stated(SLOWDOWN, device_name, corrected)
        return _span(max(_WHOLE, span.expected_ms), max(_WHOLE, span.low_ms), max(_WHOLE, span.high_ms))

    def cell_in_company(self, lease_id: str, company: Company, lasted_ms: int, mean_others_milli: int) -> None:
        """Learn from a cell that began in this company, and had this many busy neighbours on average, thousandths of one."""
        device_name, others, model_milli, stated = company
        if lasted_ms < _LEAST_CELL_MS:
            return
        alone = self.alone.setdefault(lease_id, [])
        if stated is None:
            if mean_others_milli <= _ALONE_MILLI:
                add_last(alone, lasted_ms, _ALONE_CELLS)
            return
        if len(alone) < _LEAST_ALONE:
            return
        took_milli = min(_SLOWEST, int(lasted_ms * _WHOLE / max(1, quantile(sorted(alone), 0.5))))
        name = _company(device_name, others)
        span = self._corrected(name, _FIRST_SLOWDOWNS, model_milli)
        self._judge(SLOWDOWN, device_name, span, max(_WHOLE, took_milli), lease_id=lease_id, stated=stated)
        self._turned_out(name, _FIRST_SLOWDOWNS, model_milli, took_milli)  # also below 1000: half of the errors are

    # -- seats ---------------------------------------------------------------------------------------------------------

    def seat_span(self, pool: str, worked_out: Span) -> Span:
        """Return the wait for a seat of the pool, which was worked out from the seats that ended, with the bounds to state."""
        return self._stated(SEAT, pool, worked_out)

    def seat_given(self, pool: str, worked_out: Span, stated: Span, waited_ms: int) -> None:
        """Learn from a wait for a seat that ended in one; both forecasts are those of its beginning."""
        self._judge(SEAT, pool, worked_out, waited_ms, stated=stated)

    # -- demands, signs, memory held, asks -----------------------------------------------------------------------------

    def demand_milli(self, lease_id: str, pool: str) -> int:
        """Return what the lease uses of a device while it is busy, thousandths: as learnt, else the mean of its pool. Cheap."""
        return self.demands.milli(lease_id, pool)

    def demand_seen(self, lease_id: str, pool: str, milli: int, *, most_milli: int | None = None) -> int:
        """Learn from a sample of a busy lease's use, thousandths: from `milli` to `most_milli` on a full device; return its demand."""
        if most_milli is not None:
            before = self.demand_milli(lease_id, pool)
            if milli <= before <= most_milli:
                return before
            milli = max(milli, min(before, most_milli))
        self.demands.learn(lease_id, pool, milli)
        return self.demand_milli(lease_id, pool)

    def sign_milli(self, lease_id: str, sign: Sign) -> int:
        """Return how often a sign of the lease's next cell is right, thousandths. Cheap."""
        return self.signs.milli(f"{sign} {lease_id}", sign)

    def sign_settled(self, lease_id: str, sign: Sign, *, true: bool) -> None:
        """Learn whether a cell followed a sign in time."""
        self.signs.learn(f"{sign} {lease_id}", sign, 1000 if true else 0)

    def hold_cost(self, pool: str, mib: int, wait: int) -> int:
        """Return what cells of the pool lose in a ms for which an idle lease holds this much memory, if a ms of waiting costs `wait`."""
        return mib * wait * self.hold_rate(pool) >> RATE_BITS

    def hold_rate(self, pool: str) -> int:
        """Return what `hold_cost` grows with."""
        known = self.holds.get(pool)
        return 0 if known is None else known.rate

    def hold_seen(self, pool: str, lost_ms: int, held: int) -> None:
        """Learn what a cell of the pool lost because idle leases held memory, and the MiB times ms held since the cell before."""
        kept(self.holds, pool, HoldCosts).learn(lost_ms, held)

    def asked(self, pool: str, mib: int, devices: int) -> None:
        """Learn that a lease of the pool asks for this much memory on each of this many devices."""
        kept(self.asked_sizes, pool, AskMix).add(mib, devices)

    def asks(self, pool: str) -> AskMix:
        return self.asked_sizes.get(pool, NO_ASKS)


def _wait_class(kind: str, basis_ms: int) -> str:
    """Return the class of a wait: its kind, and its length in steps of four times, from a quarter of a second on."""
    return f"{kind} {min(15, (basis_ms >> 8).bit_length() + 1 >> 1)}"


def _company(device_name: str, others: int) -> str:
    return f"{min(others, _MOST_OTHERS)} {device_name}"
