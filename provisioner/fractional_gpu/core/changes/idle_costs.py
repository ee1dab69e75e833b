"""What cells lose because idle leases hold memory, learnt pool by pool, and the idle leases that leave sooner, or later, for it.

At each grant two things are learnt (`HoldCosts`): what tickets waited since the last one until idle leases were saved for them, and what
the cell that gets room loses beside busy neighbours because idle leases hold the memory of a less busy device (`crowding_ms`); and what
idle leases held meanwhile. `idling` says what follows for one lease.

When the loss has changed, the idle leases of the pool are looked at again: not at each grant, as there may be hundreds of them.
"""

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease, OccupancyKind
from fractional_gpu.core.forecasts.forecasts import SUSPEND
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.contention import crowding_ms

_BETWEEN_REVIEWS_MS = 10_000  # of a pool; each of its idle leases takes some 10 µs of a decision


class IdleCosts:
    """Learns what idle leases cost."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._waited_ms: dict[str, int] = {}  # by pool: for idle leases to be saved, since its last grant
        self._reviewed_ms: dict[str, int] = {}  # by pool: when its idle leases were last looked at again ...
        self._next_review_ms: dict[str, int] = {}  # ... and when they are to be

    @property
    def recheck_ms(self) -> int | None:
        """When a review is due, or None."""
        return min(self._next_review_ms.values(), default=None)

    def saved_for_ticket(self, lease: Lease) -> None:
        """Note that an idle lease is about to be saved for a ticket, which waits for that."""
        books, pool = self._books, lease.spec.pool
        device = books.devices.get(lease.device_id or "")
        save_ms = books.forecasts.swap_ms(SUSPEND, device.spec.name if device is not None else "", lease.used_mib)
        self._waited_ms[pool] = self._waited_ms.get(pool, 0) + save_ms

    def granted(self, lease: Lease) -> None:
        """Learn from a ticket that has got room."""
        books, forecasts, pool = self._books, self._books.forecasts, lease.spec.pool
        holds = books.idle_holds.get(pool)
        held = holds.take(books.now_ms) if holds is not None else 0
        before = forecasts.hold_rate(pool)
        forecasts.hold_seen(pool, self._waited_ms.pop(pool, 0) + crowding_ms(books, lease), held)
        if forecasts.hold_rate(pool) != before:
            last_ms = self._reviewed_ms.get(pool, -_BETWEEN_REVIEWS_MS)
            self._next_review_ms.setdefault(pool, max(books.now_ms + 1, last_ms + _BETWEEN_REVIEWS_MS))

    def review(self) -> None:
        """Have the idle leases looked at again whose review is due."""
        books = self._books
        for pool in [pool for pool, at_ms in self._next_review_ms.items() if at_ms <= books.now_ms]:
            del self._next_review_ms[pool]
            self._reviewed_ms[pool] = books.now_ms
            for lease in books.by_state[LeaseState.RESIDENT].values():
                if lease.occupancy is OccupancyKind.IDLE and lease.spec.pool == pool:
                    books.mark_changed(lease)
