"""A record of days in which a notebook used little of its share, from which the broker advises a smaller one."""

import time
from getpass import getuser
from pathlib import Path

from fractional_gpu.core.forecasts.habits import HabitKey, HabitKind, Share, ShareDay
from fractional_gpu.ledger.ledger import Ledger

__all__ = ["days_of_little_use", "keep_days"]

_DAY_S = 86_400
_HOUR_MS = 3_600_000


def days_of_little_use(share: Share, peak_mib: int, days: int = 8) -> list[ShareDay]:
    """Return the last days until yesterday, each with two hours, one of them in cells."""
    today = int(time.time()) // _DAY_S
    return [
        ShareDay(day=today - ago, share=share, peak_mib=peak_mib, held_ms=2 * _HOUR_MS, busy_ms=_HOUR_MS, gaps=4)
        for ago in range(days, 0, -1)
    ]


def keep_days(ledger: Path, notebook: str, share: Share, peak_mib: int, pool: str = "default") -> None:
    """Write such days of a notebook of this machine's user into a ledger that no broker has open."""
    key = HabitKey(pool, getuser(), False, HabitKind.NOTEBOOK, notebook)
    with Ledger.open(ledger) as opened:
        opened.save_share_days([(key, one) for one in days_of_little_use(share, peak_mib)], 0)
