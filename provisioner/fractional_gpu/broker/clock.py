"""The broker's clocks and rate limits.

Use `now_ms` for decisions, `wall_ms` for dates, and `DeadlineClock` for deadlines that outlast the broker.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from fractional_gpu.host.clock import since_boot_ns
from fractional_gpu.host.process import boot_id
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError

log = logging.getLogger(__name__)

_DEADLINE_CLOCK: Final = "deadline-clock"  # its name in the ledger


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Return the wall-clock time in ms since 1970. The ledger records this time because it stays meaningful after a reboot.

    Decisions must not depend on it, because the wall clock can be changed.
    """
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks used by a recorder, in milliseconds: `now` and `wall` are as above, and `boot` is the time since boot."""

    now: Callable[[], int] = now_ms
    wall: Callable[[], int] = wall_ms
    boot: Callable[[], int] = lambda: since_boot_ns() // 1_000_000


CLOCKS: Final = Clocks()


async def within(seconds: float, event: asyncio.Event) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    return event.is_set()


class _BootStart(msgspec.Struct, frozen=True, kw_only=True):
    boot_id: str = ""
    start_ms: int = 0


class DeadlineClock:
    """The clock for the deadlines of pins and unconfirmed seats. It keeps running across broker restarts and reboots.

    Its time is in milliseconds since 1970. The wall clock is read only once per boot, so that later changes to it cannot end a pin.
    `start_ms` is the boot time according to that reading, and is kept in the ledger.
    """

    def __init__(self, start_ms: int, clocks: Clocks = CLOCKS) -> None:
        self._start_ms = start_ms
        self._clocks = clocks

    @classmethod
    def of(cls, ledger: Ledger, clocks: Clocks = CLOCKS) -> Self:
        """Return this boot's clock from the ledger. If there is none, create and save one. Raises LedgerError."""
        start = ledger.kept_as(_DEADLINE_CLOCK, _BootStart, _BootStart())
        if start.boot_id != boot_id():
            start = _BootStart(boot_id=boot_id(), start_ms=clocks.wall() - clocks.boot())
            try:
                ledger.keep(_DEADLINE_CLOCK, msgspec.json.encode(start).decode())
            except LedgerError as error:  # such as a full disk; the next broker measures the start again
                log.warning("cannot save this boot's time, so pins and seats may later end early or late: %s", error)
        return cls(start.start_ms, clocks)

    def now_ms(self) -> int:
        return self._start_ms + self._clocks.boot()


# Rate limits use a token bucket per key, which is refilled over time.


_KEPT = 1024  # buckets; full ones are dropped beyond this number, which changes nothing


class TokenBucket:
    """Limits events to `per_s` a second in the long run, with bursts of up to `burst`. Each key has its own limit."""

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._buckets: dict[Hashable, tuple[float, float]] = {}  # key -> (tokens left, time of the last update)

    def take(self, key: Hashable) -> float:
        """Take a token and return 0. If none is left, return the seconds until one is available."""
        now_s = self._clock()
        left = self._left(self._buckets.get(key, (self._burst, now_s)), now_s)
        if left < 1:
            return (1 - left) / self._per_s
        if len(self._buckets) >= _KEPT and key not in self._buckets:
            self._forget(now_s)
        self._buckets[key] = (left - 1, now_s)
        return 0.0

    def _left(self, bucket: tuple[float, float], now_s: float) -> float:
        tokens, at_s = bucket
        return min(self._burst, tokens + (now_s - at_s) * self._per_s)

    def _forget(self, now_s: float) -> None:
        self._buckets = {
            key: bucket for key, bucket in self._buckets.items() if self._left(bucket, now_s) < self._burst
        }
