"""The clock of what the ledger keeps until a certain moment: pins and unconfirmed seats.

Such a moment must survive a restart of the broker and a reboot, so it is written in milliseconds since 1970; and nobody may change it by
setting the wall clock. So this clock is the time since boot, plus a start that is measured by the wall clock once for each boot and kept
in the ledger. Only over a reboot does the wall clock count.
"""

import json
import logging
from collections.abc import Callable
from typing import Final, Self

from fractional_gpu.broker.clock import wall_ms
from fractional_gpu.host.clock import since_boot_ns
from fractional_gpu.host.process import boot_id
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError

__all__ = ["DeadlineClock"]

log = logging.getLogger(__name__)

_NAME: Final = "deadline-clock"


class DeadlineClock:
    """Milliseconds since 1970 by a clock that nobody sets. `start_ms`: what it showed at boot; `since_boot`: nanoseconds."""

    def __init__(self, start_ms: int, since_boot: Callable[[], int] = since_boot_ns) -> None:
        self._start_ms = start_ms
        self._since_boot = since_boot

    @classmethod
    def of(
        cls, ledger: Ledger, wall: Callable[[], int] = wall_ms, since_boot: Callable[[], int] = since_boot_ns
    ) -> Self:
        """Return the clock of this boot: the one that the ledger knows, or a new one, which is written. Raises LedgerError."""
        boot = boot_id()
        if (start_ms := _kept(ledger, boot)) is None:
            start_ms = wall() - since_boot() // 1_000_000
            try:
                ledger.keep(_NAME, json.dumps({"boot_id": boot, "start_ms": start_ms}))
            except LedgerError as error:  # a full disk: the next broker measures it anew
                log.warning("the clock of pins and seats was not written: %s", error)
        return cls(start_ms, since_boot)

    def now_ms(self) -> int:
        """Return what it shows."""
        return self._start_ms + self._since_boot() // 1_000_000


def _kept(ledger: Ledger, boot: str) -> int | None:
    """Return the start that was kept for this boot, None if there is none that makes sense."""
    text = ledger.kept(_NAME)
    try:
        kept = json.loads(text) if text is not None else {}
        return int(kept["start_ms"]) if kept.get("boot_id") == boot else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
