"""What cells lose because idle leases hold memory, learnt pool by pool, and the idle leases that leave sooner, or later, for it.

At each grant it is learnt (`HoldCosts`) what the ticket's wait cost because idle leases were saved for it (`wait_prices`), what the cell
that gets room loses beside busy neighbours because idle leases hold the memory of a less busy device (`crowding_ms`), and what idle leases
held since. `idling` says what follows for one lease; all are looked at again when the loss has changed, not at each grant.

A ticket for N of the D devices of its pool counts only as far as its wait is a long one, and by the part (D - 2N) / D: one for half of the
devices or more waits for busy leases as a rule, and idle ones that have left before spare it little.
"""

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease, OccupancyKind, Operation, Ticket
from fractional_gpu.core.forecasts.forecasts import RESUME, SUSPEND
from fractional_gpu.core.forecasts.wait_prices import WaitPrice
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.contention import crowding_ms
from fractional_gpu.core.rules.idling import wait_price

_BETWEEN_REVIEWS_MS = 10_000  # of a pool; each of its idle leases takes some 10 µs of a decision


class IdleCosts:
    """Learns what idle leases cost."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._reviewed_ms: dict[str, int] = {}  # by pool: when its idle leases were last looked at again ...
        self._next_review_ms: dict[str, int] = {}  # ... and when they are to be

    @property
    def recheck_ms(self) -> int | None:
        """When a review is due, or None."""
        return min(self._next_review_ms.values(), default=None)

    def saved_for_ticket(self, lease: Lease, ticket: Ticket) -> None:
        """Note that an idle lease is about to be saved for a ticket, which waits for that."""
        ticket.saves_ms += self._swap_ms(SUSPEND, lease)

    def ran_at_once(self, lease: Lease) -> None:
        """Note that a cell began on a lease that has its room: it did not wait."""
        self._books.forecasts.wait_prices.learn(lease.spec.pool, 0)

    def swap_left_ms(self, operation: Operation) -> int:
        """Return how long a swap under way is still expected to take; 0 if its lease has ended."""
        lease = self._books.leases.get(operation.lease_id)
        if lease is None:
            return 0
        return max(0, operation.began_ms + self._swap_ms(operation.kind, lease) - self._books.now_ms)

    def granted(self, lease: Lease, ticket: Ticket | None) -> None:
        """Learn from a lease that has got room, for its ticket if it had one."""
        books, forecasts, pool = self._books, self._books.forecasts, lease.spec.pool
        held = books.idle_held.pop(pool, 0)
        price = wait_price(books, books.policy(lease))
        before = forecasts.hold_rate(pool), price.limit_ms
        lost_ms = crowding_ms(books, lease)
        if ticket is not None:
            lost_ms += self._wait_ended(lease, ticket, price)
        forecasts.hold_seen(pool, lost_ms, held)
        if (forecasts.hold_rate(pool), price.limit_ms) != before:
            last_ms = self._reviewed_ms.get(pool, -_BETWEEN_REVIEWS_MS)
            self._next_review_ms.setdefault(pool, max(books.now_ms + 1, last_ms + _BETWEEN_REVIEWS_MS))

    def _wait_ended(self, lease: Lease, ticket: Ticket, price: WaitPrice) -> int:
        """Learn how long the ticket's cell waits in all; return what of the wait's price is due to idle leases that were saved for it."""
        waited_ms, saves_ms = self._books.now_ms - ticket.asked_ms, ticket.saves_ms
        resume_ms = self._swap_ms(RESUME, lease) if lease.state is LeaseState.SUSPENDED else 0
        with_saves_ms = max(waited_ms, saves_ms) + resume_ms
        lost_ms = price.of(with_saves_ms) - price.of(with_saves_ms - saves_ms)
        prices = self._books.forecasts.wait_prices
        prices.learn(lease.spec.pool, waited_ms + resume_ms)
        if lease.count == 1:
            if lease.state is LeaseState.SUSPENDED:
                prices.learn_return(lease.spec.pool, resume_ms, min(ticket.channel_ms, waited_ms))
            return lost_ms
        devices = len(self._books.policy(lease).devices)
        return (lost_ms - saves_ms) * max(0, devices - 2 * lease.count) // max(1, devices)

    def _swap_ms(self, kind: str, lease: Lease) -> int:
        device = self._books.devices.get(lease.device_id or "")
        mib = lease.saved_mib if kind == RESUME else lease.used_mib
        return self._books.forecasts.swap_ms(kind, device.spec.name if device is not None else "", mib)

    def review(self) -> None:
        """Have the idle leases looked at again whose review is due."""
        books = self._books
        for pool in [pool for pool, at_ms in self._next_review_ms.items() if at_ms <= books.now_ms]:
            del self._next_review_ms[pool]
            self._reviewed_ms[pool] = books.now_ms
            for lease in books.by_state[LeaseState.RESIDENT].values():
                if lease.occupancy is OccupancyKind.IDLE and lease.spec.pool == pool:
                    books.mark_changed(lease)
