"""What the arbiter learns about swaps, cells, gaps between cells, waits and demands, and the forecasts for the next ones.

A forecast is the median of the last outcomes of its kind. Forecasts shown to people have bounds, which a `Band` corrects. Decisions use
expected values. One exception: saving kernels before a device goes away uses bounds, because too short a forecast loses state
(`widest_swap_span`).

- Swaps: a line through the last swaps of a kind on a type of device.
- Cells and gaps: a lease's last ones, mixed with a few typical ones of all leases.
- Waits: `queue_wait` computes them from the queue; the last waits of that kind and length correct them here.
- Slowdowns by busy neighbours: the model of contention, corrected by the last cells.
- Demands, and how often a sign of a coming cell is right: decaying means for each lease; a new lease starts from the mean of all.
- What cells lose because idle leases hold memory (`HoldCosts`), and what leases ask for (`AskMix`).

Memory is bounded: a lease costs a few kilobytes from its first cell until `forget`. Times are the arbiter's, in ms; there is no clock here.
The same calls give the same results, so the arbiter may decide by them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Literal, NamedTuple

from fractional_gpu.core.forecasts.asks import NO_ASKS, AskMix
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
from fractional_gpu.core.model import Sign, Span


def _span(expected: float, low: float, high: float) -> Span:
    return Span(expected_ms=int(expected), low_ms=int(low), high_ms=int(high))


# -- swap times --------------------------------------------------------------------------------------------------------
# How long a suspend or resume takes: a fixed time plus the bytes over the bandwidth.
#
# The slope is the median slope between any two swaps of different sizes, the fixed time the median of the rest (Theil 1950, Sen 1968). A
# few outliers do not move the line, and a device that has become slower is known once half of the swaps are slower. Published times count
# as two more swaps, scaled to the device: if they are ten times too slow, the first swap corrects that for all sizes.


_FIRST_LINES = {SUSPEND: (300.0, 1 / 1.8), RESUME: (300.0, 1 / 4.0)}  # fixed ms, ms a MiB
_SWAPS = 12
_FIRST_SIZES_MIB = (0, 8192)  # of the two swaps with published times


def _line(first: tuple[float, float], swaps: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Fit (MiB, ms) swaps: return the fixed ms and the ms per MiB, neither negative."""
    fixed, slope = first
    if not swaps:
        return first
    level = quantile(sorted(took / (fixed + slope * mib) for mib, took in swaps), 0.5)
    known = [*swaps, *((mib, level * (fixed + slope * mib)) for mib in _FIRST_SIZES_MIB)]
    slopes = [
        (took - other_took) / (mib - other_mib)
        for (mib, took), (other_mib, other_took) in combinations(known, 2)
        if abs(mib - other_mib) > max(mib, other_mib) // 3  # between similar sizes the slope is noise
    ]
    slope = max(0.0, quantile(sorted(slopes), 0.5))
    fixed = max(0.0, quantile(sorted(took - slope * mib for mib, took in known), 0.5))
    return fixed, slope


# -- durations ---------------------------------------------------------------------------------------------------------
# How long cells, and the gaps between them, last. A lease's last outcomes are mixed with a few typical ones of all leases, so a new lease
# starts with the typical ones.


_NEVER_MS = 1 << 30  # 12 days: a gap that the kernel's end ended, and the longest duration
_OWN, _COMMON, _TYPICAL = 32, 256, 9
# Sixteen quantiles of published traces of notebook use, seconds: cells of 2 minutes at the median, gaps of 3 minutes.
_CELLS_S = (8, 19, 31, 42, 57, 75, 93, 111, 143, 188, 233, 278, 380, 545, 830, 2_150)
_GAPS_S = (12, 26, 39, 53, 75, 105, 135, 165, 218, 293, 368, 443, 893, 1_718, 3_110, _NEVER_MS // 1000)


@dataclass
class Durations:
    """The last durations, ms, of each lease and of all."""

    common: list[int]
    own: dict[str, list[int]] = field(default_factory=dict)

    @cached_property
    def typical(self) -> list[int]:
        ordered = sorted(self.common) or [0]
        return [int(quantile(ordered, (2 * one + 1) / (2 * _TYPICAL))) for one in range(_TYPICAL)]

    def add(self, lease_id: str | None, duration_ms: int) -> None:
        """Count a duration. `lease_id`: None if the lease is over."""
        duration_ms = min(duration_ms, _NEVER_MS)
        if lease_id is not None:
            add_last(self.own.setdefault(lease_id, []), duration_ms, _OWN)
        add_last(self.common, duration_ms, _COMMON)
        self.__dict__.pop("typical", None)

    def of(self, lease_id: str) -> Sequence[int]:
        """Return the lease's durations and the typical ones, sorted."""
        return sorted([*self.own.get(lease_id, ()), *self.typical])


def rest_ms(durations: Sequence[int], elapsed_ms: int, part: float) -> int:
    """Return a quantile of the time left after `elapsed_ms`. If nothing lasted longer, the median is `elapsed_ms` again."""
    longer = durations[bisect_left(durations, elapsed_ms) :]
    if not longer:
        return int(elapsed_ms * part / (1 - part))
    return int(quantile(longer, part)) - elapsed_ms


def _rest_span(durations: Sequence[int], elapsed_ms: int) -> Span:
    low, expected, high = (rest_ms(durations, elapsed_ms, part) for part in (0.1, 0.5, 0.9))
    return _span(expected, low, high)


def chance_milli(durations: Sequence[int], elapsed_ms: int, within_ms: int) -> int:
    """Return the probability that what has lasted `elapsed_ms` ends within the next `within_ms`, thousandths."""
    gone = bisect_right(durations, elapsed_ms)
    if gone == len(durations):
        return 0
    return 1000 * (bisect_right(durations, elapsed_ms + within_ms) - gone) // (len(durations) - gone)


class Rhythm(NamedTuple):
    """When a lease's next cell is likely, and with what probability, thousandths."""

    from_ms: int
    until_ms: int
    chance_milli: int


_RHYTHM_GAPS = 6  # a lease with fewer gaps has no rhythm
_RHYTHM_MILLI = 500  # the least probability of a cell in the window
_SHORTEST_WINDOW_MS = 20_000


# -- means -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Mean:
    """A mean, thousandths: at first of all samples, later with decaying weights. The first value counts twice."""

    value: float
    count: int = 2

    def learn(self, milli: int, memory: int) -> None:
        self.count = min(self.count + 1, memory)
        self.value += (milli - self.value) / self.count


_OWN_SAMPLES, _COMMON_SAMPLES = 16, 256  # after which weights decay


@dataclass(slots=True)
class Means:
    """A mean for each lease, and common ones (by pool or kind of sign) that new leases start from."""

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
_HOLD_CELLS = 64  # after which a loss counts about a third
# 40,000 MiB for an hour without a loss, so that the first loss counts little.
_FIRST_HELD = 40_000 * 3_600_000


@dataclass(slots=True)
class HoldCosts:
    """The ms that cells lose because idle leases hold memory, per MiB and ms held. Old losses fade with each cell, not with time."""

    lost: int = 0  # ms, in parts of 1 / _STEP
    held: int = _FIRST_HELD  # MiB times ms

    def learn(self, lost_ms: int, held: int) -> None:
        """Learn what a cell lost, and the MiB times ms that idle leases held since the previous cell."""
        self.lost += lost_ms * _STEP - -(-self.lost // _HOLD_CELLS)  # rounded up: in the end nothing is left
        self.held += held - self.held // _HOLD_CELLS

    @property
    def rate(self) -> int:
        """The loss per MiB and ms, times 1 << RATE_BITS, rounded down to its three highest bits so that it seldom changes."""
        rate = (self.lost << RATE_BITS) // (_STEP * self.held) if self.held else 0
        low = max(0, rate.bit_length() - 3)
        return rate >> low << low


# -- slowdowns ---------------------------------------------------------------------------------------------------------
# How much longer a cell takes next to busy neighbours than alone: a factor in thousandths, at least 1000, because no neighbour makes a cell
# faster.
#
# The time that a cell would have taken alone is unknown. Its lease's usual time stands for it: the median of the last cells that began and
# ended without a busy neighbour on their device. All other cells are classified by the neighbours that they began with, not by those they
# met: a long cell meets more neighbours, so that would make neighbours look slow.


_WHOLE = 1000  # the time that a cell takes alone
_SLOWEST = 1_000_000
_ALONE_CELLS, _LEAST_ALONE = 16, 4  # the last ones of a lease; with fewer, its usual time is unknown
_LEAST_CELL_MS = 1_000  # shorter cells depend more on the CPU than on the device
_MOST_OTHERS = 4  # more neighbours are in the same class
_RATIOS = 64  # of outcomes to computed values, the last ones of each class
# Ratios before the first outcome:
_FIRST_WAITS = (0.15, 0.5, 0.75, 1.0, 1.0, 1.4, 2.0, 4.0)
_FIRST_SLOWDOWNS = (0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.1, 1.2)


class Company(NamedTuple):
    """A cell's neighbours when it began, and the slowdown forecast then."""

    device_name: str
    others: int
    model_milli: int  # the slowdown by the model
    stated: Span | None  # None: it began alone


# -- the forecasts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpan(Span):
    """The forecast of a wait, and what it was computed from."""

    kind: str  # "swap", or "busy" if a busy lease must leave first
    basis_ms: int  # as computed by `queue_wait`


@dataclass(slots=True)
class _Times:
    """When a lease's cell began, or its last one ended; one is None."""

    began_ms: int | None = None
    ended_ms: int | None = None
    device_name: str = ""


@dataclass
class Forecasts:
    """All forecasts. A driver may save the fields and start the next arbiter with them; they do not include cells and gaps under way."""

    version: Literal[3] = 3
    swaps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # (MiB, ms), by kind and device
    cells: Durations = field(default_factory=lambda: Durations([1000 * one for one in 4 * _CELLS_S]))
    gaps: Durations = field(default_factory=lambda: Durations([1000 * one for one in 4 * _GAPS_S]))
    demands: Means = field(default_factory=lambda: Means(300))
    signs: Means = field(default_factory=lambda: Means(700))
    holds: dict[str, HoldCosts] = field(default_factory=dict)  # by pool
    asked_sizes: dict[str, AskMix] = field(default_factory=dict)  # by pool
    ratios: dict[str, list[float]] = field(default_factory=dict)  # of waits and slowdowns, by class
    alone: dict[str, list[int]] = field(default_factory=dict)  # ms of the last cells that ran alone, by lease
    bands: dict[str, Band] = field(default_factory=dict)  # by kind and name (`Judged`)
    accuracy: dict[str, Accuracy] = field(default_factory=dict)  # by kind

    def __post_init__(self) -> None:
        self.watch: Callable[[Judged], None] | None = None  # gets every forecast and its outcome
        self._times: dict[str, _Times] = {}  # by lease
        self._lines: dict[str, tuple[float, float]] = {}  # through `swaps`

    def errors(self) -> tuple[ForecastError, ...]:
        """Return the recent accuracy of each kind of forecast."""
        return tuple(self.accuracy.get(kind, Accuracy()).error(kind) for kind in KINDS)

    def forget(self, lease_id: str) -> None:
        """Forget a lease that is over. If it was idle, its last gap never ended."""
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
        """Return an estimator's forecast with corrected bounds."""
        band = self.bands.get(f"{kind} {name}")
        return span if band is None else band.spread(span)

    def _judge(
        self, kind: str, name: str, span: Span, happened: int, *, lease_id: str = "", stated: Span | None = None
    ) -> None:
        """Compare a forecast with its outcome, and learn its bounds. `stated`: the forecast that was shown, if different."""
        happened = max(0, happened)
        stated = stated or self._stated(kind, name, span)
        self.accuracy.setdefault(kind, Accuracy()).compare(stated, happened)
        if self.watch is not None:
            self.watch(Judged(kind, name, lease_id, stated, happened))
        self._band(kind, name).learn(span, happened)

    def _band(self, kind: str, name: str) -> Band:
        return kept(self.bands, f"{kind} {name}", Band)

    def _corrected(self, name: str, first: Sequence[float], basis: int) -> Span:
        """Correct a computed value by the ratios of the last outcomes to their computed values."""
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
        """Return `swap_span` with bounds at least as wide as the initial ones, for saves that lose state if too late."""
        first, stated = self._swap_span(kind, device_name, mib), self.swap_span(kind, device_name, mib)
        return _span(stated.expected_ms, min(first.low_ms, stated.low_ms), max(first.high_ms, stated.high_ms))

    # -- cells and gaps ------------------------------------------------------------------------------------------------

    def cell_began(self, lease_id: str, at_ms: int, device_name: str = "") -> None:
        """Note that a cell of the lease began, which ends the gap before it. A second call after a wait restarts it."""
        times = self._times.setdefault(lease_id, _Times())
        if times.ended_ms is not None:
            self.gaps.add(lease_id, max(0, at_ms - times.ended_ms))
        times.began_ms, times.ended_ms, times.device_name = at_ms, None, device_name

    def cell_ended(self, lease_id: str, at_ms: int) -> None:
        """Note that the lease is idle. Compare its cell with two forecasts: at its start, and after half the time expected then."""
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
        """Return the median time left of the lease's cell, ms; 0 if none runs."""
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
        """Return the probability of a cell within the next `within_ms`, thousandths; 1000 while one runs."""
        idle_ms = self._idle_ms(lease_id, now_ms)
        return 1000 if idle_ms is None else chance_milli(self.gaps.of(lease_id), idle_ms, within_ms)

    def rhythm(self, lease_id: str, now_ms: int) -> Rhythm | None:
        """Return when the lease's next cell is likely, from its own gaps; None if they are too few or too irregular."""
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
        """Return how long the lease has been idle: 0 if it never ran a cell, None while one runs."""
        times = self._times.get(lease_id)
        if times is None:
            return 0
        return None if times.ended_ms is None else max(0, now_ms - times.ended_ms)

    # -- waits ---------------------------------------------------------------------------------------------------------

    def wait_span(self, kind: str, basis_ms: int) -> WaitSpan:
        """Correct a wait that was computed as `basis_ms` by the last waits of its kind and about its length."""
        span = self._stated(WAIT, kind, self._corrected(_wait_class(kind, basis_ms), _FIRST_WAITS, basis_ms))
        return WaitSpan(**asdict(span), kind=kind, basis_ms=basis_ms)

    def wait_ended(self, expected: WaitSpan, waited_ms: int, *, given_up: bool = False) -> None:
        """Learn from a wait. An abandoned wait counts only if it exceeded its forecast; otherwise its length is unknown."""
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
        """Return the slowdown by this number of busy neighbours, thousandths."""
        corrected = self._corrected(_company(device_name, others), _FIRST_SLOWDOWNS, model_milli)
        span = self._stated(SLOWDOWN, device_name, corrected)
        return _span(max(_WHOLE, span.expected_ms), max(_WHOLE, span.low_ms), max(_WHOLE, span.high_ms))

    def cell_in_company(self, lease_id: str, company: Company, lasted_ms: int, *, ended_alone: bool) -> None:
        """Learn from a cell that began with these neighbours."""
        device_name, others, model_milli, stated = company
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
        name = _company(device_name, others)
        span = self._corrected(name, _FIRST_SLOWDOWNS, model_milli)
        self._judge(SLOWDOWN, device_name, span, max(_WHOLE, took_milli), lease_id=lease_id, stated=stated)
        self._turned_out(
            name, _FIRST_SLOWDOWNS, model_milli, took_milli
        )  # may be below 1000, as half of the errors are

    # -- seats ---------------------------------------------------------------------------------------------------------

    def seat_span(self, pool: str, worked_out: Span) -> Span:
        """Return a computed wait for a seat of the pool with corrected bounds."""
        return self._stated(SEAT, pool, worked_out)

    def seat_given(self, pool: str, worked_out: Span, stated: Span, waited_ms: int) -> None:
        """Learn from a wait for a seat. Both forecasts were made when it began."""
        self._judge(SEAT, pool, worked_out, waited_ms, stated=stated)

    # -- demands, signs, memory held, asks -----------------------------------------------------------------------------

    def demand_milli(self, lease_id: str, pool: str) -> int:
        """Return how much of a device the lease uses while it is busy, thousandths; for a new lease, the mean of its pool. Cheap."""
        return self.demands.milli(lease_id, pool)

    def demand_seen(self, lease_id: str, pool: str, milli: int, *, most_milli: int | None = None) -> int:
        """Learn from a busy lease's use, thousandths; return its demand, which on a full device is between `milli` and `most_milli`."""
        if most_milli is not None:
            before = self.demand_milli(lease_id, pool)
            if milli <= before <= most_milli:
                return before
            milli = max(milli, min(before, most_milli))
        self.demands.learn(lease_id, pool, milli)
        return self.demand_milli(lease_id, pool)

    def sign_milli(self, lease_id: str, sign: Sign) -> int:
        """Return how often this sign of the lease's next cell was right, thousandths. Cheap."""
        return self.signs.milli(f"{sign} {lease_id}", sign)

    def sign_settled(self, lease_id: str, sign: Sign, *, true: bool) -> None:
        """Learn whether a cell came in time after a sign."""
        self.signs.learn(f"{sign} {lease_id}", sign, 1000 if true else 0)

    def hold_cost(self, pool: str, mib: int, wait: int) -> int:
        """Return what an idle lease with this much memory costs the pool's cells per ms, if a ms of waiting costs `wait`."""
        return mib * wait * self.hold_rate(pool) >> RATE_BITS

    def hold_rate(self, pool: str) -> int:
        """Return the learnt factor in `hold_cost`."""
        known = self.holds.get(pool)
        return 0 if known is None else known.rate

    def hold_seen(self, pool: str, lost_ms: int, held: int) -> None:
        """Learn what a cell of the pool lost because idle leases held memory, and the MiB times ms that they held since the last cell."""
        kept(self.holds, pool, HoldCosts).learn(lost_ms, held)

    def asked(self, pool: str, mib: int, devices: int) -> None:
        """Learn that a lease of the pool asks for this memory on each of its devices."""
        kept(self.asked_sizes, pool, AskMix).add(mib, devices)

    def asks(self, pool: str) -> AskMix:
        return self.asked_sizes.get(pool, NO_ASKS)


def _wait_class(kind: str, basis_ms: int) -> str:
    """Return the class of a wait: its kind, and its length in powers of four from a quarter of a second on."""
    return f"{kind} {min(15, (basis_ms >> 8).bit_length() + 1 >> 1)}"


def _company(device_name: str, others: int) -> str:
    return f"{min(others, _MOST_OTHERS)} {device_name}"
