"""A lease over time, for `%gpu history`: a point where its state or its memory changes, and never so many that they grow for ever.

Every change of state is a point. Between them a change of memory is one if it is worth it (`_STEP_MIB`, or a twentieth), and if the
last point is older than two seconds, or than a 200th of the lease's age in this broker's life: a day has a thousand points at most.
"""

from dataclasses import dataclass
from functools import partial

from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.core.model import LeaseView
from fractional_gpu.ledger.records import PointRecord

__all__ = ["History"]

_STEP_MIB = 32
_PAUSE_MS = 2000
_PARTS = 200


@dataclass(slots=True)
class _Noted:
    first_ms: int
    last_ms: int
    state: str
    used_mib: int


class History:
    """Notes what leases are. One per broker."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self._noted: dict[str, _Noted] = {}

    def note(self, view: LeaseView) -> None:
        """Write a point if it tells something new."""
        lease_id, at_ms = view.spec.lease_id, now_ms()
        noted = self._noted.get(lease_id)
        if noted is not None and not _is_news(noted, view, at_ms):
            return
        first_ms = at_ms if noted is None else noted.first_ms
        self._noted[lease_id] = _Noted(first_ms, at_ms, view.state.value, view.used_mib)
        point = PointRecord(
            lease_id=lease_id,
            at_ms=wall_ms(),
            state=view.state.value,
            used_mib=view.used_mib,
            saved_mib=view.saved_mib,
        )
        self._writer.submit(partial(self._writer.ledger.add_point, point))

    def forget(self, lease_id: str) -> None:
        """The lease is over; its points stay in the ledger as long as its story does."""
        self._noted.pop(lease_id, None)


def _is_news(noted: _Noted, view: LeaseView, at_ms: int) -> bool:
    if noted.state != view.state.value:
        return True
    if at_ms - noted.last_ms < max(_PAUSE_MS, (at_ms - noted.first_ms) // _PARTS):
        return False
    return abs(view.used_mib - noted.used_mib) >= max(_STEP_MIB, noted.used_mib // 20)
