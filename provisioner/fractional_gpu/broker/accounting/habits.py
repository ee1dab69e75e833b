"""Records how notebooks and seats use their shares each day, and bases advice to users on these records (`core.forecasts.advice`).

- Leases are sampled along with the devices, every second or two while there are kernels. Peaks between samples are missed.
- Each day's record is rewritten once a minute and kept for `WINDOW_DAYS` days. A broker that is killed loses at most one minute of data.
- Advice is computed at most once a minute per notebook. The day it was first given is recorded, so that its effect can be checked.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from fractional_gpu.broker.clock import CLOCKS, Clocks
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.forecasts.advice import Advice, GivenAdvice, Verdict, advise, brief, sentence
from fractional_gpu.core.forecasts.habits import WINDOW_DAYS, HabitKey, HabitKind, Sample, Share, UseRecorder
from fractional_gpu.core.model import LeaseSpec, LeaseState, LeaseView, PoolSpec, Sharing
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.protocol.status import ShareAdvice

log = logging.getLogger(__name__)

_DAY_MS: Final = 86_400_000
_FRESH_MS: Final = 60_000
_AT_ONCE: Final = 20  # notebooks between two yields; together they take some milliseconds
_ANY_FRACTIONS: Final = (125, 250, 500, 750, 1000)  # suggested in a pool that allows any fraction
_NOTHING: Final[Mapping[str, int]] = {}


def offered_shares(arbiter: Arbiter, pool: PoolSpec) -> list[Share]:
    sizes = [one.leasable_mib for one in arbiter.devices() if one.device_id in pool.devices and not one.lost]
    if not sizes:
        return []
    return [Share(milli, max(1, min(sizes) * milli // 1000)) for milli in pool.fractions_milli or _ANY_FRACTIONS]


@dataclass(slots=True)
class _LastAdvice:
    share: Share
    at_ms: int
    advice: ShareAdvice | None


class ShareHabits:
    """Records how one broker's notebooks use their shares. For use on the broker's event loop. `kernels` maps lease ids to live kernels."""

    def __init__(
        self, arbiter: Arbiter, writer: LedgerWriter, kernels: Mapping[str, Kernel], clocks: Clocks = CLOCKS
    ) -> None:
        self.recorder = UseRecorder()
        self.seat_share: Callable[[str], Share | None] = lambda _seat: None  # replaced by the code for seats
        self._arbiter = arbiter
        self._writer = writer
        self._kernels = kernels
        self._clocks = clocks
        self._holders: dict[str, HabitKey] = {}  # leases and seats at the last sample
        self._given: dict[HabitKey, GivenAdvice] = {}
        self._told: dict[HabitKey, _LastAdvice] = {}

    def begin(self, ledger: Ledger) -> None:
        for key, day in ledger.share_days(self._today() - WINDOW_DAYS):
            self.recorder.load(key, day)
        self._given = ledger.given_advice()

    def sampled(self, utilisation: Mapping[str, int] = _NOTHING) -> None:
        """Record how much of its share each lease is using.

        `utilisation` is in thousandths of a device, and covers only leases that have been running a single cell since the last sample.
        """
        holders: dict[str, HabitKey] = {}
        seats: dict[str, tuple[LeaseSpec, list[Sample]]] = {}
        for lease_id in self._kernels:
            view = self._arbiter.lease(lease_id)
            if view is None or view.state is not LeaseState.RESIDENT or not view.used_mib:
                continue
            spec = view.spec
            sample = _sample(view, utilisation.get(lease_id))
            if spec.seat:
                seats.setdefault(spec.seat, (spec, []))[1].append(sample)
            holders[lease_id] = key = self._key(view)
            self.recorder.observe(self._clocks.now(), self._today(), lease_id, key, sample)
        for seat, (spec, samples) in seats.items():
            share = self.seat_share(seat)
            if share is not None:
                key = HabitKey(spec.pool, spec.owner, True, HabitKind.SEAT, "")
                holders[seat] = key
                self.recorder.observe(self._clocks.now(), self._today(), seat, key, _together(share, samples))
        for holder, key in self._holders.items():
            if holder not in holders:
                self.recorder.observe(self._clocks.now(), self._today(), holder, key, None)
        self._holders = holders

    def write(self) -> None:
        self.recorder.forget(self._today() - WINDOW_DAYS)
        self._told = {key: told for key, told in self._told.items() if self._is_fresh(told)}
        if rows := list(self.recorder.take_changed()):
            add = partial(self._writer.ledger.save_share_days, rows, self._today() - WINDOW_DAYS)
            self._writer.submit(add, again=True)

    def of_lease(self, view: LeaseView) -> ShareAdvice | None:
        return self._advice(self._key(view), _share(view)) if view.spec.devices == 1 else None

    def of_seats(self, pool: str, owner: str) -> ShareAdvice | None:
        """Return advice for a hub user's servers, based on their most recent share, or None if nothing is recorded."""
        key = HabitKey(pool, owner, True, HabitKind.SEAT, "")
        days = self.recorder.days(key)
        return self._advice(key, days[-1].share) if days else None

    async def of_notebooks(
        self, pool: str | None, owner: str | None, *, seated: bool | None = None
    ) -> list[ShareAdvice]:
        """Return all useful advice on notebooks. If `owner` or `pool` is given, only that owner's or pool's notebooks are considered.

        Yields to other tasks from time to time, because a hub can have thousands of notebooks.
        """
        keys = [
            key
            for key in sorted(self.recorder.keys())
            if key.kind is HabitKind.NOTEBOOK
            and (pool in (None, key.pool))
            and (owner in (None, key.owner))
            and (seated in (None, key.seated))
        ]
        found = []
        for number, key in enumerate(keys, 1):
            if days := self.recorder.days(key):  # empty if the notebook was forgotten in the meantime
                advice = self._advice(key, days[-1].share)
                if advice is not None and advice.sentence:
                    found.append(advice)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return found

    def _advice(self, key: HabitKey, share: Share) -> ShareAdvice | None:
        told = self._told.get(key)
        if told is None or told.share != share or not self._is_fresh(told):
            told = self._told[key] = _LastAdvice(share, self._clocks.now(), self._worked_out(key, share))
        return told.advice

    def _is_fresh(self, told: _LastAdvice) -> bool:
        return self._clocks.now() - told.at_ms < _FRESH_MS

    def _worked_out(self, key: HabitKey, share: Share) -> ShareAdvice | None:
        pool = self._arbiter.pools().get(key.pool)
        if pool is None or pool.sharing is Sharing.MIG:
            return None  # a MIG instance is indivisible
        bounded = pool.sharing is Sharing.MPS
        offers = offered_shares(self._arbiter, pool)
        days = self.recorder.days(key)
        advice = advise(days, share, offers, bounded=bounded, given=self._given.get(key))
        if advice.verdict in (Verdict.SMALLER, Verdict.LARGER):
            given = GivenAdvice(day=self._today(), before_milli=share.milli, milli=advice.risk.share.milli)
            before = self._given.get(key)
            if before is None or replace(before, day=given.day) != given:  # not suggested before
                self._given[key] = given
                self._writer.submit(partial(self._writer.ledger.save_given_advice, key, given))
        return _message(key, advice)

    def _key(self, view: LeaseView) -> HabitKey:
        spec = view.spec
        return self.recorder.key(spec.pool, spec.owner, spec.label, seated=bool(spec.seat))

    def _today(self) -> int:
        return self._clocks.wall() // _DAY_MS


def _message(key: HabitKey, advice: Advice) -> ShareAdvice:
    return ShareAdvice(
        pool=key.pool,
        owner=key.owner,
        seated=key.seated,
        notebook=key.label,
        figures=advice,
        sentence=sentence(advice),
        brief=brief(advice),
    )


def _share(view: LeaseView) -> Share:
    return Share(view.spec.fraction_milli, view.spec.reserve_mib)


def _sample(view: LeaseView, use_milli: int | None) -> Sample:
    """Return how much of its share the lease is using.

    Memory is averaged over the lease's devices. If utilisation was not measured, the figure the broker has learned for the lease is used.
    """
    count = max(1, view.spec.devices)
    learnt = view.demand_milli or None
    return Sample(_share(view), -(-view.used_mib // count), view.busy, use_milli if use_milli is not None else learnt)


def _together(share: Share, samples: list[Sample]) -> Sample:
    uses = [one.use_milli for one in samples if one.busy and one.use_milli is not None]
    return Sample(
        share,
        sum(one.used_mib for one in samples),
        any(one.busy for one in samples),
        min(1000, sum(uses)) if uses else None,
    )
