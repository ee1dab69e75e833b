"""Records a lease over time, for `%gpu history`: a point for each change of its state, and for larger changes of its memory.

A change of memory is a point if it exceeds `_STEP_MIB` and a twentieth of the last value, and if the last point is older than two seconds
and than a 200th of the time since this broker's first point. The pauses grow with the lease's age, so that the number of points stays
bounded: a thousand a day at most.
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
class _Point:
    first_ms: int
    last_ms: int
    state: str
    used_mib: int


class History:
    """Records points of leases. One per broker."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self._points: dict[str, _Point] = {}

    def note(self, view: LeaseView) -> None:
        """Write a point if state or memory changed enough."""
        lease_id, at_ms = view.spec.lease_id, now_ms()
        last = self._points.get(lease_id)
        if last is not None and not _is_worth_a_point(last, view, at_ms):
            return
        first_ms = at_ms if last is None else last.first_ms
        self._points[lease_id] = _Point(first_ms, at_ms, view.state.value, view.used_mib)
        point = PointRecord(
            lease_id=lease_id,
            at_ms=wall_ms(),
            state=view.state.value,
            used_mib=view.used_mib,
            saved_mib=view.saved_mib,
        )
        self._writer.submit(partial(self._writer.ledger.add_point, point))

    def forget(self, lease_id: str) -> None:
        """Forget a lease that has ended; its points stay in the ledger as long as its story."""
        self._points.pop(lease_id, None)


def _is_worth_a_point(last: _Point, view: LeaseView, at_ms: int) -> bool:
    if last.state != view.state.value:
        return True
    if at_ms - last.last_ms < max(_PAUSE_MS, (at_ms - last.first_ms) // _PARTS):
        return False
    return abs(view.used_mib - last.used_mib) >= max(_STEP_MIB, last.used_mib // 20)
