"""The broker's clocks. Decisions are made by `now_ms`; the wall clock is for what people read, and for dates."""

import time

__all__ = ["now_ms", "time_of_day", "wall_ms"]


def now_ms() -> int:
    """Return the arbiter's time: monotonic milliseconds."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Return the ledger's time: wall-clock milliseconds, which survive a reboot. It can be set at any moment: decide nothing by it."""
    return time.time_ns() // 1_000_000


def time_of_day(at_ms: int) -> str:
    """Return a moment of the arbiter's time as people here write it: `12:45`, or `Mon 12:45` on another day."""
    wall_s = (wall_ms() + at_ms - now_ms()) / 1000
    at, today = time.localtime(wall_s), time.localtime()
    same_day = (at.tm_year, at.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M" if same_day else "%a %H:%M", at)
