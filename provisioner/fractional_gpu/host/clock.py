"""Reads clocks. Decisions use the time since boot. The wall clock is only for display, because it can be changed at any moment."""

import time
from collections.abc import Callable
from typing import Final

_STEP_US: Final = 100_000


def since_boot_ns() -> int:
    """Return the time since boot in nanoseconds. This clock cannot be set, and it keeps running while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def since_boot_us() -> int:
    return since_boot_ns() // 1000


class WallClock:
    """A converter from other programs' wall-clock timestamps to the time since boot. `wall_ns` and `steady_ns` read the two clocks."""

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = since_boot_ns) -> None:
        self._wall_ns = wall_ns
        self._steady_ns = steady_ns
        self._offset_us = self.offset_us()

    def since_boot_us(self) -> int:
        return self._steady_ns() // 1000

    def offset_us(self) -> int:
        """Return the wall-clock time minus the time since boot."""
        return (self._wall_ns() - self._steady_ns()) // 1000

    def stepped_us(self) -> int:
        """Return how far the wall clock was set forward since the last call (negative if set back). Changes below 0.1 s return 0."""
        offset_us = self.offset_us()
        step_us = offset_us - self._offset_us
        if abs(step_us) < _STEP_US:
            return 0
        self._offset_us = offset_us
        return step_us
