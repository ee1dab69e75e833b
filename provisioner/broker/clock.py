"""The broker's two clocks."""

import time

__all__ = ["now_ms", "wall_ms"]


def now_ms() -> int:
    """Return the arbiter's time: monotonic milliseconds."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Return the ledger's time: wall-clock milliseconds, which survive a reboot."""
    return time.time_ns() // 1_000_000
