"""The time since boot, by which everything is decided, and the wall clock, which is for showing and can be set at any moment."""

import time
from collections.abc import Callable
from typing import Final

__all__ = ["WallClock", "since_boot_ns", "since_boot_us"]

_STEP_US: Final = 100_000


def since_boot_ns() -> int:
    """Return nanoseconds since boot, in which nobody sets the clock and a machine that sleeps counts."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def since_boot_us() -> int:
    """Return the same in microseconds."""
    return since_boot_ns() // 1000


class WallClock:
    """The wall clock against the time since boot: for time stamps that others took from it. Both functions return nanoseconds."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = since_boot_ns) -> None:
        self._wall_ns = wall_ns
        self._steady_ns = steady_ns
        self._offset_us = self.offset_us()

    def since_boot_us(self) -> int:
        """Return the time since boot, microseconds."""
        return self._steady_ns() // 1000

    def offset_us(self) -> int:
        """Return what is to be subtracted from a wall-clock stamp of this moment, microseconds, to have the time since boot."""
        return (self._wall_ns() - self._steady_ns()) // 1000

    def stepped_us(self) -> int:
        """Return by how much the clock was set forward since the last call, microseconds; negative: back; 0: it was not.

        A step of less than a tenth of a second, or a clock that is slewed, counts once it adds up to that.
        """
        offset_us = self.offset_us()
        step_us = offset_us - self._offset_us
        if abs(step_us) < _STEP_US:
            return 0
        self._offset_us = offset_us
        return step_us
