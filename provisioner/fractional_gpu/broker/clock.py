"""The broker's clocks: `now_ms` for decisions, `wall_ms` for dates, `DeadlineClock` for moments that survive a restart."""

import json
import logging
import time
from collections.abc import Callable
from typing import Final, Self

from fractional_gpu.host.clock import since_boot_ns
from fractional_gpu.host.process import boot_id
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError

log = logging.getLogger(__name__)

_DEADLINE_CLOCK: Final = "deadline-clock"  # its name in the ledger


def now_ms() -> int:
    """Return the arbiter's time: monotonic milliseconds."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """Return the ledger's time: wall-clock milliseconds, which survive a reboot. It can be set: no decision may depend on it."""
    return time.time_ns() // 1_000_000


def time_of_day(at_ms: int) -> str:
    """Return a moment of the arbiter's time as local time of day: `12:45`, or `Mon 12:45` on another day."""
    wall_s = (wall_ms() + at_ms - now_ms()) / 1000
    at, today = time.localtime(wall_s), time.localtime()
    same_day = (at.tm_year, at.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M" if same_day else "%a %H:%M", at)


class DeadlineClock:
    """The clock of pins and unconfirmed seats, whose ends must survive a restart of the broker and a reboot.

    It shows milliseconds since 1970, like the ledger's dates, but setting the wall clock must not end a pin. So it is the time since
    boot, plus a start that is measured by the wall clock once for each boot and kept in the ledger: the wall clock counts over a
    reboot only. `start_ms`: what it showed at boot; `since_boot`: nanoseconds.
    """

    def __init__(self, start_ms: int, since_boot: Callable[[], int] = since_boot_ns) -> None:
        self._start_ms = start_ms
        self._since_boot = since_boot

    @classmethod
    def of(
        cls, ledger: Ledger, wall: Callable[[], int] = wall_ms, since_boot: Callable[[], int] = since_boot_ns
    ) -> Self:
        """Return the clock of this boot: the ledger's, or else a new one, which is saved. Raises LedgerError."""
        boot = boot_id()
        if (start_ms := _saved_start_ms(ledger, boot)) is None:
            start_ms = wall() - since_boot() // 1_000_000
            try:
                ledger.keep(_DEADLINE_CLOCK, json.dumps({"boot_id": boot, "start_ms": start_ms}))
            except LedgerError as error:  # such as a full disk: the next broker measures the start again
                log.warning("the clock of pins and seats was not written: %s", error)
        return cls(start_ms, since_boot)

    def now_ms(self) -> int:
        """Return the present time by this clock."""
        return self._start_ms + self._since_boot() // 1_000_000


def _saved_start_ms(ledger: Ledger, boot: str) -> int | None:
    """Return the start that the ledger has for this boot, None if there is none or it cannot be read."""
    text = ledger.kept(_DEADLINE_CLOCK)
    try:
        kept = json.loads(text) if text is not None else {}
        return int(kept["start_ms"]) if kept.get("boot_id") == boot else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
