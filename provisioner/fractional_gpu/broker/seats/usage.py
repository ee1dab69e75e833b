"""Records how much each user uses each pool: sampled, summed by day in the ledger, and passed to the forecasts.

A sample counts for the time since the one before. A user is live in a pool while they have a kernel there, and busy while one of these
kernels is busy on a device; the memory is what the user's busy kernels use together.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from fractional_gpu.broker.broker import Broker, now_ms, wall_ms
from fractional_gpu.broker.seats.offers import HISTORY_DAYS, PoolForecasts
from fractional_gpu.core.model import LeaseState
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import UsageRecord

__all__ = ["UsageRecorder"]

_EVERY_S = 2.0
_LONGEST_STEP_MS = 10_000  # the machine slept: that is no use
_WRITE_EVERY_MS = 60_000
_DAY_MS = 86_400_000


class UsageRecorder:
    """Samples the usage of one broker's leases. `wall` and `now` return milliseconds."""

    def __init__(
        self,
        broker: Broker,
        forecasts: PoolForecasts,
        *,
        wall: Callable[[], int] = wall_ms,
        now: Callable[[], int] = now_ms,
    ) -> None:
        self._broker = broker
        self._forecasts = forecasts
        self._wall, self._now = wall, now
        self._last_ms = now()
        self._written_ms = now()
        self._unwritten: dict[tuple[str, str, int], UsageRecord] = {}

    def recover(self, ledger: Ledger) -> None:
        """Give the forecasts the usage and the durations of seats that the ledger has."""
        self._forecasts.learn(ledger.usage(self._wall() // _DAY_MS - HISTORY_DAYS))
        for pool in self._broker.arbiter.pools():
            self._forecasts.lasted_ms[pool] = ledger.seat_times_ms(pool)

    async def run(self) -> None:
        """Sample every `_EVERY_S` and write every minute until cancelled; then write the rest."""
        try:
            while True:
                await asyncio.sleep(_EVERY_S)
                self.sample()
                if self._now() - self._written_ms >= _WRITE_EVERY_MS:
                    self.write()
        finally:
            self.sample()
            self.write()

    def sample(self) -> None:
        """Count the time since the last sample."""
        step_ms = min(max(0, self._now() - self._last_ms), _LONGEST_STEP_MS)
        self._last_ms = self._now()
        seen: dict[tuple[str, str], tuple[bool, int]] = {}
        for kernel, view in self._broker.views():
            if kernel.identity is None:
                continue
            key = (view.spec.owner, view.spec.pool)
            busy = view.busy and view.state is LeaseState.RESIDENT
            was_busy, mib = seen.get(key, (False, 0))
            seen[key] = (was_busy or busy, mib + (view.used_mib if busy else 0))
        for (owner, pool), (busy, mib) in seen.items():
            self._count(owner, pool, step_ms, busy=busy, mib=mib)

    def _count(self, owner: str, pool: str, step_ms: int, *, busy: bool, mib: int) -> None:
        day = self._wall() // _DAY_MS
        busy_ms = step_ms if busy else 0
        more = UsageRecord(
            owner=owner, pool=pool, day=day, live_ms=step_ms, busy_ms=busy_ms, busy_mib_ms=busy_ms * mib, peak_mib=mib
        )
        known = self._unwritten.get((owner, pool, day))
        if known is not None:
            more = UsageRecord(
                owner=owner,
                pool=pool,
                day=day,
                live_ms=known.live_ms + more.live_ms,
                busy_ms=known.busy_ms + more.busy_ms,
                busy_mib_ms=known.busy_mib_ms + more.busy_mib_ms,
                peak_mib=max(known.peak_mib, more.peak_mib),
            )
        self._unwritten[owner, pool, day] = more

    def write(self) -> None:
        """Write what was counted since the last write, and pass it to the forecasts."""
        fresh, self._unwritten = list(self._unwritten.values()), {}
        self._written_ms = self._now()
        self._forecasts.learn(fresh)
        for usage in fresh:
            self._broker.writer.submit(partial(self._broker.writer.ledger.add_usage, usage))
