"""Writes down the turns of leases on their devices, once a minute, for `jupyter gpu simulate --from-ledger`.

Turns that took less than `_LEAST_MS`, and waited for less, are left out: they are requests of front ends and cells that use no GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect, Granted, LeaseEnded, StateChanged
from fractional_gpu.core.events import BusyChanged, Event, Wanted
from fractional_gpu.core.metering.turns import TurnRecorder

_LEAST_MS: Final = 100


class Turns:
    """The turns of one broker's leases; for its loop."""

    def __init__(
        self,
        arbiter: Arbiter,
        writer: LedgerWriter,
        *,
        now: Callable[[], int] = now_ms,
        wall: Callable[[], int] = wall_ms,
    ) -> None:
        self._recorder = TurnRecorder()
        self._arbiter = arbiter
        self._writer = writer
        self._now = now
        self._wall = wall

    def saw(self, event: Event, effects: Sequence[Effect]) -> None:
        touched = {getattr(event, "lease_id", "")}
        touched |= {one.lease_id for one in effects if isinstance(one, StateChanged | LeaseEnded | Granted)}
        for lease_id in touched - {""}:
            view = self._arbiter.lease(lease_id)
            holding = self._arbiter.holding(lease_id)
            use, busy = (view.demand_milli, view.busy) if view is not None else (0, False)
            asks = lease_id == getattr(event, "lease_id", "") and (
                isinstance(event, Wanted) or (isinstance(event, BusyChanged) and event.busy)
            )
            waits = busy or self._arbiter.waits(lease_id)
            self._recorder.saw(event.at_ms, lease_id, holding, asks=asks, busy=waits, use_milli=use)

    def write(self) -> None:
        shift = self._wall() - self._now()  # from the arbiter's clock to dates
        fresh, self._recorder.turns = self._recorder.turns, []
        rows = [
            replace(one, asked_ms=one.asked_ms + shift, begun_ms=one.begun_ms + shift, ended_ms=one.ended_ms + shift)
            for one in fresh
            if one.ended_ms - one.asked_ms >= _LEAST_MS
        ]
        if rows:
            self._writer.submit(partial(self._writer.ledger.add_turns, rows), again=True)
