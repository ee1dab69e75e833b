"""What is learnt of swaps, cells, gaps between cells, waits and demands, and what follows for the next ones.

A forecast is a quantile over the last outcomes of its kind; what people see has bounds, which `outcomes` learns from misses. Decisions go
by expected values, which bounds do not move. What is saved before a device goes away, where too short a time costs state, goes by the wider
of two bounds (`widest_swap_span`).

- Swaps: a line through the last swaps of a kind on a type of device.
- Cells and gaps: a lease's last ones, mixed with a few typical ones of all leases.
- Waits: `queue_wait` works one out from the queue; here it is corrected by how the last ones of its kind and length turned out.
- Slowdowns by busy neighbours: what the model of contention says, corrected by how the last cells turned out.
- Demands, and how often a sign of a coming cell is right: decayed means, for each lease; a new lease starts from the mean of all.
- What cells lose because idle leases hold memory (`HoldCosts`), what leases ask for (`sizes`).

Memory is bounded: a lease costs a few kilobytes from its first cell until `forget`. Times are the arbiter's, in ms; there is no clock here.
The same calls give the same results, so the arbiter may decide by them.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Self

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
    ErrorView,
    Parts,
    Side,
    TrackRecord,
    checked,
    kept,
    quantile,
    read_parts,
)
from fractional_gpu.core.forecasts.sizes import NO_ASKS, AskMix
from fractional_gpu.core.model import Sign, Span

_MOST_POOLS = 64


# -- swap times --------------------------------------------------------------------------------------------------------
# How long a suspend or resume takes: a fixed time plus the bytes over the bandwidth.
#
# The line through the last swaps minimizes relative errors by least squares. Swaps far off the line weigh less, so one outlier does not
# spoil the forecast, and a change is believed once it has been seen about as often as the old times. What is known beforehand counts as
# half a swap, scaled to how quick the swaps are: if it is ten times too slow, the first swap corrects that for all sizes.


_PRIOR_SWAPS = {SUSPEND: (300.0, 1 / 1.8), RESUME: (300.0, 1 / 4.0)}  # fixed ms, ms a MiB
_SWAPS = 12  # that the line is fitted to
_ANCHORS_MIB = (0, 8192)  # at which the prior counts ...
_ANCHOR_WEIGHT = 0.25  # ... as this many swaps
_FAR = 0.5  # relative errors beyond this weigh less
_ROUNDS = 8
_MOST_LINES = 64


class SwapTimes:
    def __init__(self, kind: str, swaps: Iterable[tuple[int, int]] = ()) -> None:
        self._prior = _PRIOR_SWAPS[kind]
        self.swaps = deque(swaps, _SWAPS)  # (MiB, ms)
        self.fixed_ms, self.ms_per_mib = self._fitted() if self.swaps else self._prior

    def expected_ms(self, mib: int) -> int:
        """Return how long a swap of this many MiB is expected to take, ms."""
        return int(self.fixed_ms + self.ms_per_mib * mib + 0.5)

    def span(self, mib: int) -> Span:
        """Return the same with bounds: about four of five swaps of a steady device lie between them."""
        expected_ms = self.expected_ms(mib)
        return Span(expected_ms=expected_ms, low_ms=expected_ms * 2 // 3, high_ms=expected_ms * 4 // 3)

    def learn(self, mib: int, took_ms: int) -> None:
        self.swaps.append((max(0, mib), max(0, took_ms)))
        self.fixed_ms, self.ms_per_mib = self._fitted()

    def _fitted(self) -> tuple[float, float]:
        fixed, slope = self._prior
        level = quantile(sorted(took / (fixed + slope * mib) for mib, took in self.swaps), 0.5)
        fixed, slope = fixed * level, slope * level
        points = [(mib, float(took), 1.0) for mib, took in self.swaps]
        points += [(mib, fixed + slope * mib, _ANCHOR_WEIGHT) for mib in _ANCHORS_MIB]
        for _ in range(_ROUNDS):
            fixed, slope = _line(points, fixed, slope)
        return fixed, slope


def _line(points: Sequence[tuple[int, float, float]], fixed: float, slope: float) -> tuple[float, float]:
    """Return the best line, with points (MiB, ms, weight) far from the present one weighing less; neither part of it is negative."""
    aa = ab = bb = ay = by = 0.0
    for mib, took, weight in points:
        expected = max(1.0, fixed + slope * mib)
        off = abs(took - expected) / max(1.0, min(took, expected))
        share = weight * min(1.0, _FAR / max(off, _FAR)) / (expected * expected)
        aa, ab, bb = aa + share, ab + share * mib, bb + share * mib * mib
        ay, by = ay + share * took, by + share * took * mib
    det = aa * bb - ab * ab
    fixed, slope = (ay * bb - by * ab) / det, (aa * by - ab * ay) / det
    if fixed < 0:
        return 0.0, by / bb
    return (fixed, slope) if slope >= 0 else (ay / aa, 0.0)


_PRIOR_TIMES = {kind: SwapTimes(kind) for kind in _PRIOR_SWAPS}


# -- durations ---------------------------------------------------------------------------------------------------------
# How long cells, and the gaps between them, last. A lease's own outcomes are mixed with a few typical ones of all leases: a new lease is
# like all others, a lease with a history is like itself. Both are the last ones, so habits may change.


_NEVER_MS = 1 << 30
"""A gap that no cell ended: the kernel ended first. The longest duration, 12 days, too."""
_OWN, _COMMON, _TYPICAL = 32, 1024, 9
_REFRESH = 32  # what is typical is looked up again after this many outcomes
# Sixteen quantiles of published traces of notebook use, seconds: cells of 2 minutes at the median, gaps of 3 minutes.
_CELLS_S = (8, 19, 31, 42, 57, 75, 93, 111, 143, 188, 233, 278, 380, 545, 830, 2_150)
_GAPS_S = (12, 26, 39, 53, 75, 105, 135, 165, 218, 293, 368, 443, 893, 1_718, 3_110, _NEVER_MS // 1000)


class Durations:
    def __init__(self, start_s: Sequence[int]) -> None:
        self.common = deque((4 * [1000 * one for one in start_s]), _COMMON)
        self.own: dict[str, list[int]] = {}
        self._mixed: dict[str, list[int]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look up what is typical of all leases."""
        ordered = sorted(self.common)
        self._typical = [int(quantile(ordered, (2 * one + 1) / (2 * _TYPICAL))) for one in range(_TYPICAL)]
        self._left = _REFRESH

    def add(self, lease_id: str, duration_ms: int) -> None:
        self.add_common(duration_ms)
        self.own[lease_id] = [*self.own.get(lease_id, ()), min(duration_ms, _NEVER_MS)][-_OWN:]
        self._mixed[lease_id] = sorted([*self.own[lease_id], *self._typical])

    def add_common(self, duration_ms: int) -> None:
        """Count one that says nothing of a single lease."""
        self.common.append(min(duration_ms, _NEVER_MS))
        self._left -= 1
        if self._left <= 0:
            self.refresh()

    def of(self, lease_id: str) -> Sequence[int]:
        """Return the lease's durations, sorted, with those that are typical of all."""
        return self._mixed.get(lease_id, self._typical)

    def restore(self, own: dict[str, list[int]], common: Iterable[int]) -> None:
        """Take what was learnt before."""
        self.common = deque((min(one, _NEVER_MS) for one in common), _COMMON) or self.common
        self.refresh()
        self.own = {lease_id: [min(one, _NEVER_MS) for one in last[-_OWN:]] for lease_id, last in own.items()}
        self._mixed = {lease_id: sorted([*durations, *self._typical]) for lease_id, durations in self.own.items()}

    def forget(self, lease_id: str) -> None:
        self.own.pop(lease_id, None)
        self._mixed.pop(lease_id, None)


def rest_ms(durations: Sequence[int], elapsed_ms: int, part: float) -> int:
    """Return the quantile of the remaining time of what has lasted `elapsed_ms`; beyond anything known, about as long again."""
    longer = durations[bisect_left(durations, elapsed_ms) :]
    if not longer:
        return int(elapsed_ms * part / (1 - part))
    return int(quantile(longer, part)) - elapsed_ms


def chance_milli(durations: Sequence[int], elapsed_ms: int, within_ms: int) -> int:
    """Return how likely something that has lasted `elapsed_ms` ends within this many ms more, thousandths."""
    gone = bisect_right(durations, elapsed_ms)
    if gone == len(durations):
        return 0
    return 1000 * (bisect_right(durations, elapsed_ms + within_ms) - gone) // (len(durations) - gone)


def _span(durations: Sequence[int], elapsed_ms: int) -> Span:
    """Return what is left of a cell that has run for this long."""
    low, middle, high = (rest_ms(durations, elapsed_ms, part) for part in (0.1, 0.5, 0.9))
    return Span(expected_ms=middle, low_ms=low, high_ms=high)


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


class Means:
    """Shares that are learnt for each lease, and for what a new lease starts from: its pool, or a kind of sign."""

    _OWN, _COMMON = 16, 256  # samples that a mean remembers, about

    def __init__(self, first_milli: int) -> None:
        self._first_milli = first_milli
        self.own: dict[str, Mean] = {}
        self.common: dict[str, Mean] = {}

    def milli(self, own: str, common: str) -> int:
        """Return the mean, thousandths."""
        known = self.own.get(own) or self.common.get(common)
        return self._first_milli if known is None else int(known.value)

    def learn(self, own: str, common: str, milli: int) -> None:
        self.own.setdefault(own, Mean(self.milli(own, common))).learn(milli, self._OWN)
        kept(self.common, common, lambda: Mean(self._first_milli), _MOST_POOLS).learn(milli, self._COMMON)


RATE_BITS = 40
_STEP = 1024
_HOLD_CELLS = 64  # that a cost is remembered for, about
_PRIOR_HELD = (
    40_000 * 3_600_000
)  # MiB times ms held without a loss before the first: 40,000 MiB for an hour, so one loss says little


class HoldCosts:
    """What cells lose because idle leases hold memory that they need: ms per MiB and ms held. It fades with cells, not with time."""

    def __init__(self, lost: int = 0, held: int = _PRIOR_HELD) -> None:
        self.lost = lost  # ms, in parts of 1 / _STEP
        self.held = held  # MiB times ms

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
_RATIOS = 64  # of outcome and model, or outcome and worked-out wait, that are kept of each kind
_MOST_RATIOS = 256


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
    device_name: str = ""  # the kind of device that the ticket is expected to get


@dataclass(slots=True)
class _Times:
    """When a lease's cell began, or its last one ended: at most one is set."""

    began_ms: int | None = None
    ended_ms: int | None = None
    device_name: str = ""  # the kind of device where the cell runs


# The parts of the stored state: records of so many numbers, and lists in which so many numbers belong together.
_VERSION = 2
_RECORDS = {"demands": 2, "pool_demands": 2, "signs": 2, "lease_signs": 2, "holds": 2, "bands": 4}
_LISTS = {
    "swaps": 2,
    "cells": 1,
    "gaps": 1,
    "common": 1,
    "asks": 2,
    "waits": 1,
    "alone": 1,
    "slowdowns": 1,
    "accuracy": 1,
}


class Forecasts:
    """The forecasts. A driver may keep `state()` and start the next arbiter from it."""

    def __init__(self) -> None:
        self._swaps: dict[str, SwapTimes] = {}  # by kind and device
        self._cells, self._gaps = Durations(_CELLS_S), Durations(_GAPS_S)
        self._times: dict[str, _Times] = {}  # by lease
        self._demands, self._signs = Means(300), Means(700)
        self._holds: dict[str, HoldCosts] = {}  # by pool
        self._asks: dict[str, AskMix] = {}  # by pool
        self._waits: dict[str, deque[float]] = {}  # ratios, by kind and length
        self._alone: dict[str, list[int]] = {}  # ms of cells that ran alone, by lease
        self._slowdowns: dict[str, deque[float]] = {}  # ratios, by the number of neighbours and the device's name
        self.record = TrackRecord()

    def errors(self) -> tuple[ErrorView, ...]:
        """Return how accurate each kind of forecast was lately."""
        return self.record.errors()

    def forget(self, lease_id: str) -> None:
        """Forget a lease that is over. If it idled, its last gap never ended."""
        self._demands.own.pop(lease_id, None)
        for sign in Sign:
            self._signs.own.pop(f"{sign} {lease_id}", None)
        self._alone.pop(lease_id, None)
        self._cells.forget(lease_id)
        self._gaps.forget(lease_id)
        times = self._times.pop(lease_id, None)
        if times is not None and times.ended_ms is not None:
            self._gaps.add_common(_NEVER_MS)

    # -- swaps ---------------------------------------------------------------------------------------------------------

    def swap_finished(self, kind: str, device_name: str, mib: int, took_ms: int) -> None:
        """Learn from a successful `SUSPEND` or `RESUME` of this many MiB."""
        self.record.judge(kind, device_name, self._swap_times(kind, device_name).span(mib), took_ms)
        kept(self._swaps, f"{kind} {device_name}", lambda: SwapTimes(kind), _MOST_LINES).learn(mib, took_ms)

    def swap_ms(self, kind: str, device_name: str, mib: int) -> int:
        """Return how long a swap of this many MiB is expected to take, ms. Cheap."""
        return self._swap_times(kind, device_name).expected_ms(mib)

    def swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        """Return how long a swap is expected to take, with its bounds."""
        return self.record.stated(kind, device_name, self._swap_times(kind, device_name).span(mib))

    def widest_swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        """Return the same, with bounds no narrower than before anything was learnt: for times that are too short at the cost of state."""
        span, stated = self._swap_times(kind, device_name).span(mib), self.swap_span(kind, device_name, mib)
        low, high = min(span.low_ms, stated.low_ms), max(span.high_ms, stated.high_ms)
        return Span(expected_ms=span.expected_ms, low_ms=low, high_ms=high)

    def _swap_times(self, kind: str, device_name: str) -> SwapTimes:
        return self._swaps.get(f"{kind} {device_name}") or _PRIOR_TIMES[kind]

    # -- cells and gaps ------------------------------------------------------------------------------------------------

    def cell_began(self, lease_id: str, at_ms: int, device_name: str = "") -> None:
        """Note that a cell of the lease began on such a device, which ends the gap before it; again (after a wait), it restarts."""
        times = self._times.setdefault(lease_id, _Times())
        if times.ended_ms is not None:
            self._gaps.add(lease_id, max(0, at_ms - times.ended_ms))
        times.began_ms, times.ended_ms, times.device_name = at_ms, None, device_name

    def cell_ended(self, lease_id: str, at_ms: int) -> None:
        """Note that the lease is idle again; compare the cell with its forecasts, at its beginning and when half of that time was over."""
        times = self._times.get(lease_id)
        if times is None or times.began_ms is None:
            return
        lasted_ms, name = max(0, at_ms - times.began_ms), times.device_name
        durations = self._cells.of(lease_id)
        whole = _span(durations, 0)
        self.record.judge(CELL, name, whole, lasted_ms, lease_id=lease_id)
        half_ms = whole.expected_ms // 2
        if lasted_ms > half_ms:
            rest = _span(durations, half_ms)
            self.record.judge(REST, name, rest, lasted_ms - half_ms, lease_id=lease_id)
        self._cells.add(lease_id, lasted_ms)
        times.began_ms, times.ended_ms = None, at_ms

    def cell_left_ms(self, lease_id: str, now_ms: int) -> int:
        """Return the median of what is left of the lease's cell, ms; 0 if none runs."""
        times = self._times.get(lease_id)
        if times is None or times.began_ms is None:
            return 0
        return rest_ms(self._cells.of(lease_id), max(0, now_ms - times.began_ms), 0.5)

    def next_cell_ms(self, lease_id: str) -> int:
        """Return the median length of the lease's cells, ms."""
        return rest_ms(self._cells.of(lease_id), 0, 0.5)

    def gap_left_ms(self, lease_id: str, now_ms: int) -> int:
        """Return the median time until the lease's next cell, ms, at most about 12 days; 0 while one runs."""
        idle_ms = self._idle_ms(lease_id, now_ms)
        return 0 if idle_ms is None else rest_ms(self._gaps.of(lease_id), idle_ms, 0.5)

    def chance_milli(self, lease_id: str, now_ms: int, within_ms: int) -> int:
        """Return how likely the lease's next cell comes within this many ms, by its gaps, thousandths; 1000 while one runs."""
        idle_ms = self._idle_ms(lease_id, now_ms)
        return 1000 if idle_ms is None else chance_milli(self._gaps.of(lease_id), idle_ms, within_ms)

    def rhythm(self, lease_id: str, now_ms: int) -> Rhythm | None:
        """Return when, from now on, the lease's own gaps make its next cell likely (in the arbiter's time); None if they do not."""
        idle_ms, own = self._idle_ms(lease_id, now_ms), sorted(self._gaps.own.get(lease_id, ()))
        if idle_ms is None or len(own) < _RHYTHM_GAPS:
            return None
        for gap_ms in own[bisect_right(own, idle_ms) :]:
            from_ms = max(idle_ms, gap_ms - gap_ms // 8)
            window_ms = max(_SHORTEST_WINDOW_MS, gap_ms // 4)
            milli = chance_milli(self._gaps.of(lease_id), from_ms, window_ms)
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

    def wait_span(self, kind: str, basis_ms: int, device_name: str = "") -> WaitSpan:
        """Return a wait that was worked out as `basis_ms`, corrected by how waits of the kind and about that length turned out."""
        span = self.record.stated(WAIT, f"{kind} {device_name}", self._corrected(kind, basis_ms))
        return WaitSpan(
            expected_ms=span.expected_ms,
            low_ms=span.low_ms,
            high_ms=span.high_ms,
            kind=kind,
            basis_ms=basis_ms,
            device_name=device_name,
        )

    def wait_ended(self, expected: WaitSpan, waited_ms: int) -> None:
        """Learn from a wait, `waited_ms` from the forecast on, that ended in what was waited for."""
        span = self._corrected(expected.kind, expected.basis_ms)
        self.record.judge(WAIT, f"{expected.kind} {expected.device_name}", span, waited_ms, stated=expected)
        self._correct(expected, waited_ms)

    def wait_given_up(self, expected: WaitSpan, waited_ms: int) -> None:
        """Learn from a wait given up after it had outlasted its forecast: without these, forecasts would stay short."""
        if waited_ms > expected.high_ms:
            span = self._corrected(expected.kind, expected.basis_ms)
            self.record.band(WAIT, f"{expected.kind} {expected.device_name}").outlasted(span, waited_ms)
            self._correct(expected, waited_ms)

    def _corrected(self, kind: str, basis_ms: int) -> Span:
        ratios = sorted(self._waits.get(_wait_class(kind, basis_ms), _FIRST_WAITS))
        low, middle, high = (max(0, int(quantile(ratios, part) * (basis_ms + EVEN)) - EVEN) for part in (0.1, 0.5, 0.9))
        return Span(expected_ms=middle, low_ms=low, high_ms=high)

    def _correct(self, expected: WaitSpan, waited_ms: int) -> None:
        name = _wait_class(expected.kind, expected.basis_ms)
        ratios = kept(self._waits, name, lambda: deque(_FIRST_WAITS, _RATIOS), _MOST_RATIOS)
        ratios.append((waited_ms + EVEN) / (expected.basis_ms + EVEN))

    # -- slowdowns -----------------------------------------------------------------------------------------------------

    def slowdown_span(self, lease_id: str, device_name: str, others: int, model_milli: int) -> Span:
        """Return how many times as long as alone a cell takes next to busy neighbours, thousandths; `model_milli`: by `place.beside`."""
        stated = self.record.stated(SLOWDOWN, device_name, self._slowed(lease_id, device_name, others, model_milli))
        low, high = max(_WHOLE, stated.low_ms), max(_WHOLE, stated.high_ms)
        return Span(expected_ms=max(low, min(high, stated.expected_ms)), low_ms=low, high_ms=high)

    def _slowed(self, lease_id: str, device_name: str, others: int, model_milli: int) -> Span:
        ratios = sorted(self._slowdowns.get(_company(device_name, others), _FIRST_SLOWDOWNS))
        expected = max(_WHOLE, int(model_milli * quantile(ratios, 0.5)))
        alone = sorted(self._alone.get(lease_id, ()))
        if len(alone) < _LEAST_ALONE:  # by the model alone: half of what it adds is taken to be uncertain
            more = (expected - _WHOLE) // 2
            return Span(expected_ms=expected, low_ms=expected - more, high_ms=expected + more)
        usual = max(1, quantile(alone, 0.5))
        low, high = (int(expected * quantile(alone, part) / usual) for part in (0.1, 0.9))
        return Span(expected_ms=expected, low_ms=min(expected, max(_WHOLE, low)), high_ms=max(expected, high))

    def cell_in_company(self, lease_id: str, company: Company, lasted_ms: int, mean_others_milli: int) -> None:
        """Learn from a cell that began in this company, and had this many busy neighbours on average, thousandths of one."""
        name, others, model_milli, stated = company
        if lasted_ms < _LEAST_CELL_MS:
            return
        alone = self._alone.get(lease_id, [])
        if stated is None:
            if mean_others_milli <= _ALONE_MILLI:
                self._alone[lease_id] = [*alone, lasted_ms][-_ALONE_CELLS:]
            return
        if len(alone) < _LEAST_ALONE:
            return
        took_milli = min(_SLOWEST, int(lasted_ms * _WHOLE / max(1, quantile(sorted(alone), 0.5))))
        span = self._slowed(lease_id, name, others, model_milli)
        self.record.judge(SLOWDOWN, name, span, max(_WHOLE, took_milli), lease_id=lease_id, stated=stated)
        ratios = kept(self._slowdowns, _company(name, others), lambda: deque(_FIRST_SLOWDOWNS, _RATIOS), _MOST_RATIOS)
        ratios.append(took_milli / model_milli)  # not held above 1000: half of the errors are below

    # -- seats ---------------------------------------------------------------------------------------------------------

    def seat_span(self, pool: str, worked_out: Span) -> Span:
        """Return the wait for a seat of the pool, which was worked out from the seats that ended, with the bounds to state."""
        return self.record.stated(SEAT, pool, worked_out)

    def seat_given(self, pool: str, worked_out: Span, stated: Span, waited_ms: int) -> None:
        """Learn from a wait for a seat that ended in one; both forecasts are those of its beginning."""
        self.record.judge(SEAT, pool, worked_out, waited_ms, stated=stated)

    # -- demands, signs, memory held, asks -----------------------------------------------------------------------------

    def demand_milli(self, lease_id: str, pool: str) -> int:
        """Return what the lease uses of a device while it is busy, thousandths: as learnt, else the mean of its pool. Cheap."""
        return self._demands.milli(lease_id, pool)

    def demand_seen(self, lease_id: str, pool: str, milli: int, *, most_milli: int | None = None) -> int:
        """Learn from a sample of a busy lease's use, thousandths: from `milli` to `most_milli` on a full device; return its demand."""
        if most_milli is not None:
            before = self.demand_milli(lease_id, pool)
            if milli <= before <= most_milli:
                return before
            milli = max(milli, min(before, most_milli))
        self._demands.learn(lease_id, pool, milli)
        return self.demand_milli(lease_id, pool)

    def sign_milli(self, lease_id: str, sign: Sign) -> int:
        """Return how often a sign of the lease's next cell is right, thousandths. Cheap."""
        return self._signs.milli(f"{sign} {lease_id}", sign)

    def sign_settled(self, lease_id: str, sign: Sign, *, true: bool) -> None:
        """Learn whether a cell followed a sign in time."""
        self._signs.learn(f"{sign} {lease_id}", sign, 1000 if true else 0)

    def hold_cost(self, pool: str, mib: int, wait: int) -> int:
        """Return what cells of the pool lose in a ms for which an idle lease holds this much memory, if a ms of waiting costs `wait`."""
        return mib * wait * self.hold_rate(pool) >> RATE_BITS

    def hold_rate(self, pool: str) -> int:
        """Return what `hold_cost` grows with."""
        known = self._holds.get(pool)
        return 0 if known is None else known.rate

    def hold_seen(self, pool: str, lost_ms: int, held: int) -> None:
        """Learn what a cell of the pool lost because idle leases held memory, and the MiB times ms held since the cell before."""
        kept(self._holds, pool, HoldCosts, _MOST_POOLS).learn(lost_ms, held)

    def asked(self, pool: str, mib: int, devices: int) -> None:
        """Learn that a lease of the pool asks for this much memory on each of this many devices."""
        kept(self._asks, pool, AskMix, _MOST_POOLS).add(mib, devices)

    def asks(self, pool: str) -> AskMix:
        return self._asks.get(pool, NO_ASKS)

    # -- stored state --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """Return what was learnt as plain data (JSON can hold it): the cells and gaps under way are not in it."""
        parts = {
            "swaps": {name: list(chain(*times.swaps)) for name, times in self._swaps.items()},
            "cells": self._cells.own,
            "gaps": self._gaps.own,
            "common": {CELL: list(self._cells.common), "gap": list(self._gaps.common)},
            "demands": _state(self._demands.own),
            "pool_demands": _state(self._demands.common),
            "signs": _state(self._signs.common),
            "lease_signs": _state(self._signs.own),
            "holds": {pool: [one.lost, one.held] for pool, one in self._holds.items()},
            "asks": {pool: list(chain(*mix.recent)) for pool, mix in self._asks.items()},
            "waits": {name: list(ratios) for name, ratios in self._waits.items()},
            "alone": self._alone,
            "slowdowns": {name: list(ratios) for name, ratios in self._slowdowns.items()},
            "bands": {
                f"{kind} {name}": [band.low.factor, band.low.run, band.high.factor, band.high.run]
                for (kind, name), band in self.record.bands.items()
            },
            "accuracy": {kind: [one.count, *one.recent] for kind, one in self.record.accuracy.items()},
        }
        return {"version": _VERSION, **parts}

    @classmethod
    def from_state(cls, state: object) -> Self:
        """Return forecasts that continue from what `state` returned. Raises ValueError that says what is wrong with anything else."""
        found = cls()
        found._take(read_parts(state, _VERSION, records=_RECORDS, lists=_LISTS))
        return found

    def _take(self, parts: Parts) -> None:
        for name, numbers in parts["swaps"].items():
            kind = checked(name.partition(" ")[0], _PRIOR_SWAPS)
            self._swaps[name] = SwapTimes(kind, _pairs(numbers))
        for durations, own, common in ((self._cells, "cells", CELL), (self._gaps, "gaps", "gap")):
            whole = {name: _whole(numbers) for name, numbers in parts[own].items()}
            durations.restore(whole, _whole(parts["common"].get(common, ())))
        for means, own, common in (
            (self._demands, "demands", "pool_demands"),
            (self._signs, "lease_signs", "signs"),
        ):
            means.own = _means(parts[own])
            means.common = _means(parts[common])
        self._holds = {pool: HoldCosts(*_whole(numbers)) for pool, numbers in parts["holds"].items()}
        for pool, numbers in parts["asks"].items():
            if not all(_whole(numbers)):
                raise ValueError(
                    f"{numbers!r:.60} was given as asks of {pool!r:.60}; allowed: from 1 MiB and 1 device up"
                )
            self._asks[pool] = AskMix(_pairs(numbers))
        self._waits = {name: deque(numbers, _RATIOS) for name, numbers in parts["waits"].items()}
        self._alone = {lease_id: _whole(numbers)[-_ALONE_CELLS:] for lease_id, numbers in parts["alone"].items()}
        self._slowdowns = {name: deque(numbers, _RATIOS) for name, numbers in parts["slowdowns"].items()}
        for key, (low, low_run, high, high_run) in parts["bands"].items():
            kind, _, name = key.partition(" ")
            sides = Side.restored(low, low_run), Side.restored(high, high_run)
            self.record.bands[checked(kind, KINDS), name] = Band(*sides)
        for kind, numbers in parts["accuracy"].items():
            count, *recent = _whole(numbers) or [0]
            self.record.accuracy[checked(kind, KINDS)] = Accuracy(count, recent)


# Ratios before any wait or slowdown was seen.
_FIRST_WAITS = (0.15, 0.5, 0.75, 1.0, 1.0, 1.4, 2.0, 4.0)
_FIRST_SLOWDOWNS = (1.0,) * 8


def _wait_class(kind: str, basis_ms: int) -> str:
    """Return the class of a wait: its kind, and its length in steps of four times, from a quarter of a second on."""
    return f"{kind} {min(15, (basis_ms >> 8).bit_length() + 1 >> 1)}"


def _company(device_name: str, others: int) -> str:
    return f"{min(others, _MOST_OTHERS)} {device_name}"


def _whole(numbers: Iterable[float]) -> list[int]:
    return [int(one) for one in numbers]


def _pairs(numbers: Sequence[float]) -> list[tuple[int, int]]:
    whole = _whole(numbers)
    return list(zip(whole[::2], whole[1::2], strict=True))


def _state(means: dict[str, Mean]) -> dict[str, list[float]]:
    return {name: [mean.value, mean.count] for name, mean in means.items()}


def _means(records: Mapping[str, Sequence[float]]) -> dict[str, Mean]:
    return {name: Mean(min(value, 1000.0), max(2, int(count))) for name, (value, count) in records.items()}
