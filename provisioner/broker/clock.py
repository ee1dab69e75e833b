"""The broker's clocks."""

import time
from collections.abc import Callable
from typing import Final

__all__ = ["WallClock", "now_ms", "since_boot_ns", "time_of_day", "wall_ms"]

_STEP_US: Final = 100_000


def now_ms() -> int:
    """Return the arbiter's time: monotonic milliseconds."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Return the ledger's time: wall-clock milliseconds, which survive a reboot."""
    return time.time_ns() // 1_000_000


def time_of_day(at_ms: int) -> str:
    """Return a moment of the arbiter's time as people here write it: `12:45`, or `Mon 12:45` on another day."""
    wall_s = (wall_ms() + at_ms - now_ms()) / 1000
    at, today = time.localtime(wall_s), time.localtime()
    same_day = (at.tm_year, at.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M" if same_day else "%a %H:%M", at)


def since_boot_ns() -> int:
    """Return nanoseconds since boot, in which nobody sets the clock and a machine that sleeps counts."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class WallClock:
    """Notices when the wall clock is set. `wall_ns` and `steady_ns` return the wall clock and the time since boot, for tests."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = since_boot_ns) -> None:
        self._wall_ns = wall_ns
        self._steady_ns = steady_ns
        self._offset_us = self._measured_us()

    def stepped_us(self) -> int:
        """Return by how much the clock was set forward since the last call, microseconds; negative: back; 0: it was not.

        A step of less than a tenth of a second, or a clock that is slewed, counts once it adds up to that.
        """
        offset_us = self._measured_us()
        step_us = offset_us - self._offset_us
        if abs(step_us) < _STEP_US:
            return 0
        self._offset_us = offset_us
        return step_us

    def _measured_us(self) -> int:
        return (self._wall_ns() - self._steady_ns()) // 1000
