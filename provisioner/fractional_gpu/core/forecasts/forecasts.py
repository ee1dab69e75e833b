"""Forecasts, learnt on line: how long swaps, cells, gaps and waits take, what cells use of a device, and how accurate forecasts were.

- Swaps: a line per kind and type of device (`SwapTimes`), with a prior for devices never seen.
- Cells, and the gaps between them: decayed histograms per lease, mixed with those of all leases (`LeaseDurations`). They start from
  published traces of notebook use: cells of 2 min at the median and 5 min at the 75th percentile, gaps of 1, 3, 8 and 41 min at the 25th
  to 90th. What is left of a gap or cell is conditional on how long it has lasted. A kernel that ends while it idles had no next cell: some
  gaps never end, and the longer one lasts, the likelier it is such a one.
- Demands: what a lease uses of a device while it is busy, a decayed mean. A new lease starts from the mean of its pool.
- Memory that idle leases hold: what cells lose by it, per pool (`HoldCosts`).
- Signs of a coming cell: how often each kind was right, for each lease. A new lease starts from the mean of all.
- Asks: which sizes the leases of a pool ask for (`asks`).
- Waits: `queue_wait` computes a wait from the queue and the devices. It is corrected here by how earlier ones turned out.
- Slowdowns: how many times as long as alone cells take beside neighbours (`company`).
- Seats: the time until a hub's server gets a seat, which the broker computes.

**Bounds.** The bounds of all of these are moved by a band for each kind of forecast and of device (`bands`), so that four of five outcomes
lie between them whatever the estimators leave out. Decisions go by expected values, which are not moved; what is saved before a device
goes away, where too short a time costs state, goes by the wider one of both bounds (`widest_swap_span`).

Every forecast that was stated is later compared with what happened (`errors`). Memory is bounded: a lease costs a few kilobytes from its
first cell until `forget`. Times are the arbiter's, in ms; there is no clock here. The same calls give the same results on every machine, so
the arbiter may decide by them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Self

from fractional_gpu.core.forecasts.asks import NO_ASKS, AskMix
from fractional_gpu.core.forecasts.company import ALONE_MILLI, LEAST_MS, Company, Slowdowns
from fractional_gpu.core.forecasts.estimators import (
    DURATIONS,
    FIRST_DEMAND_MILLI,
    FIRST_SIGN_MILLI,
    LEASE_SAMPLES,
    ONE,
    POOL_SAMPLES,
    RATE_BITS,
    RATIOS,
    CommonDurations,
    DecayedMean,
    ErrorView,
    Histogram,
    HoldCosts,
    LeaseDurations,
    Rhythm,
    SwapTimes,
    chance_milli,
    ratio,
    rest_ms,
    rhythm_of,
    shaped_weights,
    value_at,
)
from fractional_gpu.core.forecasts.snapshot import ForecastState, StateReader, sparse
from fractional_gpu.core.forecasts.track_record import (
    CELL,
    EVEN_MS,
    REST,
    RESUME,
    SEAT,
    SLOWDOWN,
    SUSPEND,
    WAIT,
    TrackRecord,
)
from fractional_gpu.core.model import Sign, Span

__all__ = ["RESUME", "SUSPEND", "Company", "Forecasts", "WaitSpan"]

_VERSION = 1
_PRIOR_SWAPS = {SUSPEND: (300, 1_800), RESUME: (300, 4_000)}  # fixed ms, MiB a second
_MOST_LINES = 64
_MOST_POOLS = 64
_CELLS = (
    (2_000, 0),
    (48_000, 250),
    (120_000, 500),
    (300_000, 750),
    (690_000, 900),
    (2_800_000, 990),
    (7_200_000, 1000),
)
_GAPS = ((5_000, 0), (60_000, 250), (180_000, 500), (480_000, 750), (2_460_000, 900), (9_000_000, 960))
_NEVER_MS = 1 << 40
_WAIT_MEMORY = 32
_WHOLE_MILLI = 1000  # as long as alone
_MOST_ENDED = 64  # cells that await their judgement
_WAITS = shaped_weights(RATIOS, ((64, 0), (300, 100), (ONE, 500), (2600, 900), (12_000, 1000)), 8 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpan(Span):
    """The forecast of a wait, and its basis, by which later ones are corrected."""

    kind: str  # what decides it: "swap" or "busy"
    basis_ms: int  # as computed by `queue_wait`
    device_name: str = ""  # the kind of device that the ticket is expected to get


class _EndedCell(NamedTuple):
    """A cell that is over, and what was known of the durations of its lease's cells while it ran."""

    lease_id: str
    totals: Sequence[int]
    device_name: str
    lasted_ms: int


@dataclass(slots=True)
class _Lease:
    """The cells and gaps of a lease. At most one of the first two times is set."""

    began_ms: int | None = None  # of the cell that runs
    ended_ms: int | None = None  # of the last cell
    ends_ms: int = 0  # when the cell that runs is expected to end ...
    known_until_ms: int = -1  # ... which is good enough until then
    device_name: str = ""  # the kind of device where it runs
    cells: LeaseDurations | None = None
    gaps: LeaseDurations | None = None


class Forecasts:
    """The forecasts. A driver may keep `state()` and start the next arbiter from it."""

    def __init__(self) -> None:
        self._swaps: dict[tuple[str, str], SwapTimes] = {}
        self.swaps_learnt = 0  # grows whenever results of `swap_ms` may change
        self._cells, self._gaps = CommonDurations(_CELLS), CommonDurations(_GAPS)
        self._leases: dict[str, _Lease] = {}
        self._demands: dict[str, DecayedMean] = {}  # by lease
        self._pool_demands: dict[str, DecayedMean] = {}
        self._holds: dict[str, HoldCosts] = {}  # by pool
        self._asks: dict[str, AskMix] = {}  # by pool
        self._signs: dict[str, DecayedMean] = {}  # by kind
        self._lease_signs: dict[str, dict[str, DecayedMean]] = {}  # by lease and kind
        self._waits: dict[tuple[str, int], Histogram] = {}
        self._wait_totals: dict[tuple[str, int], Sequence[int]] = {}
        self._slowdowns = Slowdowns()
        self._ended: list[_EndedCell] = []
        self.record = TrackRecord()

    def errors(self) -> tuple[ErrorView, ...]:
        """Return how accurate each kind of forecast was lately."""
        self.settle()
        return self.record.errors()

    def state(self) -> ForecastState:
        """Return what was learnt as plain data (JSON can hold it): the cells and gaps under way are not in it."""
        self.settle()
        return {
            "version": _VERSION,
            "swaps": {
                f"{kind} {name}": [
                    list(chain(*line.swaps)),
                    sparse(line.ratios.weights),
                    [line.fixed_ms, line.ms_per_mib],
                ]
                for (kind, name), line in self._swaps.items()
            },
            "cells": sparse(self._cells.histogram.weights),
            "gaps": sparse(self._gaps.histogram.weights),
            "leases": {
                lease_id: [sparse(own.histogram.weights if own else ()) for own in (lease.cells, lease.gaps)]
                for lease_id, lease in self._leases.items()
            },
            "demands": {lease_id: [one.count, one.fine] for lease_id, one in self._demands.items()},
            "pool_demands": {pool: [one.count, one.fine] for pool, one in self._pool_demands.items()},
            "holds": {pool: [one.lost, one.held] for pool, one in self._holds.items()},
            "asks": {
                pool: [list(chain.from_iterable((*size, weight) for size, weight in mix.weights.items()))]
                for pool, mix in self._asks.items()
            },
            "signs": {sign: [one.count, one.fine] for sign, one in self._signs.items()},
            "lease_signs": {
                f"{sign} {lease_id}": [one.count, one.fine]
                for lease_id, own in self._lease_signs.items()
                for sign, one in own.items()
            },
            "waits": {f"{kind} {length}": [sparse(one.weights)] for (kind, length), one in self._waits.items()},
            **self.record.state(),
            **self._slowdowns.state(),
        }

    @classmethod
    def from_state(cls, state: object) -> Self:
        """Return forecasts that go on from what `state` returned. Raises ValueError that says what is wrong with anything else."""
        forecasts = cls()
        forecasts.take_state(StateReader(state, _VERSION))
        return forecasts

    def take_state(self, read: StateReader) -> None:
        """Replace what is known by what was learnt before. After a ValueError the forecasts must not be used."""
        for name, (swaps, ratios, line) in read.named("swaps", 3):
            kind, _, device_name = name.partition(" ")
            fixed_ms, mib_per_s = read.known(kind, _PRIOR_SWAPS)
            fixed, slope = read.numbers(line, 2)
            self._swaps[kind, device_name] = SwapTimes(
                fixed_ms=fixed_ms,
                mib_per_s=mib_per_s,
                swaps=read.couples(swaps),
                ratios=read.weights(ratios, RATIOS),
                line=(fixed, slope),
            )
        self._cells = CommonDurations(_CELLS, weights=read.weights(read.part("cells"), DURATIONS))
        self._gaps = CommonDurations(_GAPS, weights=read.weights(read.part("gaps"), DURATIONS))
        for lease_id, (cells, gaps) in read.named("leases", 2):
            self._leases[lease_id] = _Lease(
                cells=LeaseDurations(self._cells, weights=read.weights(cells, DURATIONS)),
                gaps=LeaseDurations(self._gaps, weights=read.weights(gaps, DURATIONS)),
            )
        for part, demands, memory in (
            ("demands", self._demands, LEASE_SAMPLES),
            ("pool_demands", self._pool_demands, POOL_SAMPLES),
        ):
            for name, (count, fine) in read.named(part, 2):
                demands[name] = DecayedMean(memory=memory).restore(read.whole(count), read.whole(fine))
        for name, (lost, held) in read.named("holds", 2):
            self._holds[name] = HoldCosts(read.whole(lost), read.whole(held))
        for name, (sizes,) in read.named("asks", 1):
            self._asks[name] = AskMix(read.sizes(sizes))
        for name, (count, fine) in read.named("signs", 2):
            read.known(name, _SIGNS)
            self._signs[name] = DecayedMean(memory=POOL_SAMPLES).restore(read.whole(count), read.whole(fine))
        for name, (count, fine) in read.named("lease_signs", 2):
            sign, _, lease_id = name.partition(" ")
            read.known(sign, _SIGNS)
            own = self._lease_signs.setdefault(lease_id, {})
            own[sign] = DecayedMean(memory=LEASE_SAMPLES).restore(read.whole(count), read.whole(fine))
        for name, (ratios,) in read.named("waits", 1):
            kind, _, length = name.partition(" ")
            corrected = Histogram(RATIOS, memory=_WAIT_MEMORY, weights=read.weights(ratios, RATIOS))
            self._waits[kind, read.whole(length)] = corrected
            self._wait_totals[kind, read.whole(length)] = corrected.totals()
        self.record.take_state(read)
        self._slowdowns.take_state(read)

    # -- swaps --------------------------------------------------------------------------------------------------------

    def swap_finished(self, kind: str, device_name: str, mib: int, took_ms: int) -> None:
        """Learn from a successful `SUSPEND` or `RESUME` of so many MiB."""
        line = self._line(kind, device_name)
        self.swaps_learnt += 1
        self.record.judge(kind, device_name, _span(line, mib), took_ms)
        line.learn(mib, took_ms)
        if (kind, device_name) not in self._swaps:
            if len(self._swaps) >= _MOST_LINES:
                del self._swaps[next(iter(self._swaps))]
            self._swaps[kind, device_name] = line

    def swap_ms(self, kind: str, device_name: str, mib: int) -> int:
        """Return how long a swap of so many MiB is expected to take, ms. Cheap."""
        return self.swaps_ms(kind, device_name)(mib)

    def swaps_ms(self, kind: str, device_name: str) -> Callable[[int], int]:
        """Return a function of MiB for many such swaps, valid until the next one has finished."""
        return (self._swaps.get((kind, device_name)) or _PRIOR_LINES[kind]).expected_ms

    def swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        """Return how long a swap is expected to take, with its bounds."""
        return self.record.stated(kind, device_name, self._estimated_swap(kind, device_name, mib))

    def widest_swap_span(self, kind: str, device_name: str, mib: int) -> Span:
        """Return the same with the wider one of the estimated and the stated bounds on each side: where too short a time costs state."""
        span = self._estimated_swap(kind, device_name, mib)
        stated = self.record.stated(kind, device_name, span)
        low, high = min(span.low_ms, stated.low_ms), max(span.high_ms, stated.high_ms)
        return Span(expected_ms=span.expected_ms, low_ms=low, high_ms=high)

    def _estimated_swap(self, kind: str, device_name: str, mib: int) -> Span:
        return _span(self._swaps.get((kind, device_name)) or _PRIOR_LINES[kind], mib)

    def _line(self, kind: str, device_name: str) -> SwapTimes:
        return self._swaps.get((kind, device_name)) or _prior_line(kind)

    # -- cells and gaps -------------------------------------------------------------------------------------------------

    def cell_began(self, lease_id: str, at_ms: int, device_name: str = "") -> None:
        """Note that a cell of the lease began on such a device, which ends the gap before it; again (after a wait), it begins anew."""
        lease = self._leases.get(lease_id)
        if lease is None:
            lease = self._leases[lease_id] = _Lease()
        if lease.ended_ms is not None:
            lease.gaps = lease.gaps or LeaseDurations(self._gaps)
            lease.gaps.add(max(0, at_ms - lease.ended_ms))
        lease.began_ms, lease.ended_ms, lease.known_until_ms = at_ms, None, -1
        lease.device_name = device_name

    def cell_ended(self, lease_id: str, at_ms: int) -> None:
        """Note that the lease is idle again."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.began_ms is None:
            return
        lasted_ms = max(0, at_ms - lease.began_ms)
        # The totals are replaced, never changed, so the judgement can wait until the effects of the event are out.
        self._ended.append(_EndedCell(lease_id, self._cell_totals(lease), lease.device_name, lasted_ms))
        if len(self._ended) >= _MOST_ENDED:
            self.settle()
        lease.cells = lease.cells or LeaseDurations(self._cells)
        lease.cells.add(lasted_ms)
        lease.began_ms, lease.ended_ms = None, at_ms

    def settle(self) -> None:
        """Compare the cells that have ended with their forecasts at the moment when half of the expected time was over."""
        ended, self._ended = self._ended, []
        for lease_id, totals, device_name, lasted_ms in ended:
            whole = _cell_span(totals, 0)
            self.record.judge(CELL, device_name, whole, lasted_ms, lease_id=lease_id)
            half_ms = whole.expected_ms // 2
            if lasted_ms > half_ms:
                self.record.judge(
                    REST, device_name, _cell_span(totals, half_ms), lasted_ms - half_ms, lease_id=lease_id
                )

    def gap_left_ms(self, lease_id: str, now_ms: int) -> int:
        """Return the median time until the lease's next cell, ms, at most about 12 days; 0 while one runs."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return rest_ms(self._gaps.totals, 0, 500)
        if lease.ended_ms is None:
            return 0
        totals = self._gaps.totals if lease.gaps is None else lease.gaps.totals
        return rest_ms(totals, max(0, now_ms - lease.ended_ms), 500)

    def cell_left_ms(self, lease_id: str, now_ms: int) -> int:
        """Return the median of what is left of the lease's cell, ms; 0 if none runs. Kept for an eighth of the time that it has run."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.began_ms is None:
            return 0
        if now_ms >= lease.known_until_ms:
            elapsed_ms = max(0, now_ms - lease.began_ms)
            lease.ends_ms = now_ms + rest_ms(self._cell_totals(lease), elapsed_ms, 500)
            lease.known_until_ms = now_ms + max(1_000, elapsed_ms >> 3)
        return max(0, lease.ends_ms - now_ms)

    def cell_left(self, lease_id: str, now_ms: int) -> Span:
        """Return what is left of the lease's cell; 0 if none runs."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.began_ms is None:
            return Span(expected_ms=0, low_ms=0, high_ms=0)
        span = _cell_span(self._cell_totals(lease), max(0, now_ms - lease.began_ms))
        return self.record.stated(REST, lease.device_name, span)

    def next_cell(self, lease_id: str) -> Span:
        """Return how long a cell of the lease takes."""
        lease = self._leases.get(lease_id, _UNKNOWN_LEASE)
        return self.record.stated(CELL, lease.device_name, _cell_span(self._cell_totals(lease), 0))

    def next_cell_ms(self, lease_id: str) -> int:
        """Return the median length of the lease's cells, ms."""
        return rest_ms(self._cell_totals(self._leases.get(lease_id, _UNKNOWN_LEASE)), 0, 500)

    def forget(self, lease_id: str) -> None:
        """Forget a lease that is over. If it idled, its last gap never ended."""
        self._demands.pop(lease_id, None)
        self._lease_signs.pop(lease_id, None)
        self._slowdowns.forget(lease_id)
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.ended_ms is not None:
            self._gaps.add(_NEVER_MS)

    def _cell_totals(self, lease: _Lease) -> Sequence[int]:
        return self._cells.totals if lease.cells is None else lease.cells.totals

    # -- slowdowns ------------------------------------------------------------------------------------------------------

    def slowdown_span(self, lease_id: str, device_name: str, others: int, model_milli: int) -> Span:
        """Return how many times as long as alone a cell takes beside busy neighbours, thousandths; `model_milli`: by `place`."""
        span = self._slowdowns.span(lease_id, device_name, others, model_milli)
        stated = self.record.stated(SLOWDOWN, device_name, span)
        low, high = max(_WHOLE_MILLI, stated.low_ms), max(_WHOLE_MILLI, stated.high_ms)
        return Span(expected_ms=max(low, min(high, stated.expected_ms)), low_ms=low, high_ms=high)

    def cell_in_company(self, lease_id: str, company: Company, lasted_ms: int, mean_others_milli: int) -> None:
        """Learn from a cell that began in this company, and had so many busy neighbours on average, thousandths of one."""
        if lasted_ms < LEAST_MS:
            return
        if company.stated is None:
            if mean_others_milli <= ALONE_MILLI:
                self._slowdowns.ran_alone(lease_id, lasted_ms)
            return
        name, others, model_milli = company.device_name, company.others, company.model_milli
        outcome = self._slowdowns.outcome(lease_id, lasted_ms)
        if outcome is None:
            return
        span = self._slowdowns.span(lease_id, name, others, model_milli)
        self.record.judge(SLOWDOWN, name, span, outcome, lease_id=lease_id, stated=company.stated)
        self._slowdowns.ran_beside(lease_id, name, others, model_milli, lasted_ms)

    # -- seats ----------------------------------------------------------------------------------------------------------

    def seat_span(self, pool: str, worked_out: Span) -> Span:
        """Return the wait for a seat of the pool, which was worked out from the seats that ended, with the bounds that are stated."""
        return self.record.stated(SEAT, pool, worked_out)

    def seat_given(self, pool: str, worked_out: Span, stated: Span, waited_ms: int) -> None:
        """Learn from a wait for a seat that ended in one; both forecasts are those of its beginning."""
        self.record.judge(SEAT, pool, worked_out, waited_ms, stated=stated)

    # -- demands --------------------------------------------------------------------------------------------------------

    def demand_milli(self, lease_id: str, pool: str) -> int:
        """Return what the lease uses of a device while it is busy, thousandths: as learnt, else the mean of its pool. Cheap."""
        known = self._demands.get(lease_id) or self._pool_demands.get(pool)
        return FIRST_DEMAND_MILLI if known is None else known.milli

    def demand_seen(self, lease_id: str, pool: str, milli: int, *, most_milli: int | None = None) -> int:
        """Learn from a sample of a busy lease's use, thousandths: from `milli` to `most_milli` on a full device; return its demand."""
        before = self.demand_milli(lease_id, pool)
        if most_milli is not None:
            if milli <= before <= most_milli:
                return before
            milli = max(milli, min(before, most_milli))
        own, common = self._demands.get(lease_id), self._pool_demands.get(pool)
        if own is None:
            own = self._demands[lease_id] = DecayedMean(memory=LEASE_SAMPLES, prior_milli=before)
        if common is None:
            if len(self._pool_demands) >= _MOST_POOLS:
                del self._pool_demands[next(iter(self._pool_demands))]
            common = self._pool_demands[pool] = DecayedMean(memory=POOL_SAMPLES)
        own.learn(milli)
        common.learn(milli)
        return own.milli

    # -- memory that idle leases hold -----------------------------------------------------------------------------------------

    def hold_cost(self, pool: str, mib: int, wait: int) -> int:
        """Return what cells of the pool lose in a ms for which an idle lease holds so much memory, where a ms of waiting costs `wait`."""
        known = self._holds.get(pool)
        return 0 if known is None else mib * wait * known.rate >> RATE_BITS

    def hold_rate(self, pool: str) -> int:
        """Return what `hold_cost` grows with."""
        known = self._holds.get(pool)
        return 0 if known is None else known.rate

    def hold_seen(self, pool: str, lost_ms: int, held: int) -> None:
        """Learn what a cell of the pool lost because idle leases held memory, and the MiB times ms held since the cell before."""
        if pool not in self._holds:
            if len(self._holds) >= _MOST_POOLS:
                del self._holds[next(iter(self._holds))]
            self._holds[pool] = HoldCosts()
        self._holds[pool].learn(lost_ms, held)

    # -- asks --------------------------------------------------------------------------------------------------------------

    def asked(self, pool: str, mib: int, devices: int) -> None:
        """Learn that a lease of the pool asks for so much memory on each of so many devices."""
        mix = self._asks.get(pool)
        if mix is None:
            if len(self._asks) >= _MOST_POOLS:
                del self._asks[next(iter(self._asks))]
            mix = self._asks[pool] = AskMix()
        mix.add(mib, devices)

    def asks(self, pool: str) -> AskMix:
        """Return what the leases of the pool ask for. Cheap."""
        return self._asks.get(pool, NO_ASKS)

    def broken(self) -> Iterator[str]:
        """Yield what cannot be true of what is known of asks."""
        for pool, mix in self._asks.items():
            for what in mix.broken():
                yield f"pool {pool}: {what}"

    # -- signs of a coming cell --------------------------------------------------------------------------------------------

    def chance_milli(self, lease_id: str, now_ms: int, within_ms: int) -> int:
        """Return how likely the lease's next cell comes within so many ms, by its gaps, thousandths; 1000 while one runs."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return chance_milli(self._gaps.totals, 0, within_ms)
        if lease.ended_ms is None:
            return 1000
        totals = self._gaps.totals if lease.gaps is None else lease.gaps.totals
        return chance_milli(totals, max(0, now_ms - lease.ended_ms), within_ms)

    def rhythm(self, lease_id: str, now_ms: int) -> Rhythm | None:
        """Return when, from now on, the lease's own gaps make its next cell likely (in the arbiter's time); None if they do not."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.ended_ms is None or lease.gaps is None:
            return None
        found = rhythm_of(lease.gaps, max(0, now_ms - lease.ended_ms))
        if found is None:
            return None
        return Rhythm(lease.ended_ms + found.from_ms, lease.ended_ms + found.until_ms, found.chance_milli)

    def sign_milli(self, lease_id: str, sign: Sign) -> int:
        """Return how often a sign of the lease's next cell is right, thousandths. Cheap."""
        known = self._lease_signs.get(lease_id, {}).get(sign) or self._signs.get(sign)
        return FIRST_SIGN_MILLI if known is None else known.milli

    def sign_settled(self, lease_id: str, sign: Sign, *, true: bool) -> None:
        """Learn whether a cell followed a sign in time."""
        own = self._lease_signs.setdefault(lease_id, {})
        if sign not in own:
            own[sign] = DecayedMean(memory=LEASE_SAMPLES, prior_milli=self.sign_milli(lease_id, sign))
        if sign not in self._signs:
            self._signs[sign] = DecayedMean(memory=POOL_SAMPLES, prior_milli=FIRST_SIGN_MILLI)
        for known in (own[sign], self._signs[sign]):
            known.learn(1000 if true else 0)

    # -- waits ------------------------------------------------------------------------------------------------------------

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

    def _corrected(self, kind: str, basis_ms: int) -> Span:
        totals = self._wait_totals.get((kind, _octaves(basis_ms)), _WAIT_TOTALS)
        low, middle, high = (
            max(0, value_at(RATIOS, totals, totals[-1] * permille // 1000) * (basis_ms + EVEN_MS) // ONE - EVEN_MS)
            for permille in (100, 500, 900)
        )
        return Span(expected_ms=middle, low_ms=low, high_ms=high)

    def wait_ended(self, expected: WaitSpan, waited_ms: int) -> None:
        """Learn from a wait, `waited_ms` from the forecast on, that ended in what was waited for."""
        span = self._corrected(expected.kind, expected.basis_ms)
        self.record.judge(WAIT, f"{expected.kind} {expected.device_name}", span, waited_ms, stated=expected)
        self._correct(expected, waited_ms)

    def wait_given_up(self, expected: WaitSpan, waited_ms: int) -> None:
        """Learn from a wait given up after it had outlasted its forecast: without these, forecasts would stay short."""
        if waited_ms > expected.high_ms:
            name, span = f"{expected.kind} {expected.device_name}", self._corrected(expected.kind, expected.basis_ms)
            self.record.outlasted(WAIT, name, span, waited_ms)
            self._correct(expected, waited_ms)

    def _correct(self, expected: WaitSpan, waited_ms: int) -> None:
        key = (expected.kind, _octaves(expected.basis_ms))
        if key not in self._waits:
            self._waits[key] = Histogram(RATIOS, memory=_WAIT_MEMORY, weights=_WAITS)
        self._waits[key].add(ratio(waited_ms + EVEN_MS, expected.basis_ms + EVEN_MS))
        self._wait_totals[key] = self._waits[key].totals()


_SIGNS = {str(sign): sign for sign in Sign}
_UNKNOWN_LEASE = _Lease()
_WAIT_TOTALS = Histogram(RATIOS, memory=1, weights=_WAITS).totals()


def _prior_line(kind: str) -> SwapTimes:
    fixed_ms, mib_per_s = _PRIOR_SWAPS[kind]
    return SwapTimes(fixed_ms=fixed_ms, mib_per_s=mib_per_s)


_PRIOR_LINES = {kind: _prior_line(kind) for kind in _PRIOR_SWAPS}


def _cell_span(totals: Sequence[int], elapsed_ms: int) -> Span:
    """Return what is left of a cell that has run for so long."""
    low, middle, high = (rest_ms(totals, elapsed_ms, permille) for permille in (100, 500, 900))
    return Span(expected_ms=middle, low_ms=low, high_ms=high)


def _octaves(basis_ms: int) -> int:
    """Return the class of a wait's length: each is four times as long as the one before, from a quarter of a second on."""
    return min(15, (basis_ms >> 8).bit_length() + 1 >> 1)


def _span(line: SwapTimes, mib: int) -> Span:
    low_ms, high_ms = line.bounds_ms(mib)
    return Span(expected_ms=line.expected_ms(mib), low_ms=low_ms, high_ms=high_ms)
