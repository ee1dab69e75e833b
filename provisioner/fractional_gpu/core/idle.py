"""When an idle lease is suspended though no ticket needs its room.

A pool says after how long (`idle_after_ms`), or that the arbiter decides (`idle_auto`). Then a lease holds its devices for as long as
that is expected to cost less than to come back. Coming back costs a person the time of a resume; in a pool that names no price for
holding, more if that is a long wait there, and with what it waits for a swap channel on average (`wait_prices`). Holding costs

- the lease's share of a device for each hour, by the pool's price, and
- what cells lose because idle leases hold memory, as learnt (`HoldCosts`): tickets wait until an idle lease is saved for them, and cells
  share a device with busy neighbours because idle leases hold the memory of a less busy one (`crowding_ms`). Each MiB that idle leases of
  the pool hold bears its part.

While holding costs nothing, no lease leaves: what a ticket needs it takes anyway. In a pool where tickets find room at once, that is so.

This is the ski-rental problem with a known distribution (Karlin et al., "Competitive randomized algorithms for non-uniform problems",
1990): of all times t after which the lease might leave, the one is chosen at which E[min(gap, t)] x holding + P(gap > t) x coming back is
least, with the gaps as learnt for this lease. What is best later in a gap is what was best at its start, so it is chosen once for each gap,
and again when what cells lose has changed. What a lease saves when it leaves takes host memory that tickets may need for others, so no
lease leaves in this way where more than half of host memory would be in use.
"""

from fractional_gpu.core.forecasts.forecasts import RESUME, SUSPEND
from fractional_gpu.core.forecasts.wait_prices import LENGTH, WaitPrice
from fractional_gpu.core.model import LeaseState, PoolSpec
from fractional_gpu.core.place import crowding_ms
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, OccupancyKind, Operation, Ticket
from fractional_gpu.core.suspend import is_expected, lacks_device, suspendable_from_ms

_ASKED_AGAIN_MS = 60_000  # while host memory is kept for tickets


def idle_due_ms(books: Books, lease: Lease) -> int | None:
    """Return when an idle lease is suspended though no ticket needs its room; None: never, or nothing can be saved."""
    if lease.busy or lease.gate.ticket is not None or lease.state is not LeaseState.RESIDENT:
        return None
    pool = books.policy(lease)
    idle_ms = pool.idle_after_ms
    if idle_ms is None and pool.idle_auto:
        idle_ms = _leaves_after_ms(books, pool, lease)
    if idle_ms is None:
        return None
    willing_ms = suspendable_from_ms(pool, lease)
    if willing_ms is None or lacks_device(books, lease):
        return None
    due_ms = max(lease.last_active_ms + idle_ms, willing_ms)
    if not spares_host_memory(books, lease):
        due_ms = max(due_ms, books.now_ms + _ASKED_AGAIN_MS)
    if lease.expectation is not None and is_expected(books, lease):
        due_ms = max(due_ms, lease.expectation.until_ms)
    return due_ms


def wait_price(books: Books, pool: PoolSpec) -> WaitPrice:
    """Return what waits cost in the pool: their length where holding has a price, as an hour of any wait has its own price then."""
    return LENGTH if pool.hold_price_milli else books.forecasts.wait_prices.of(pool.name)


def spares_host_memory(books: Books, lease: Lease) -> bool:
    """Return whether half of host memory is left to tickets if a lease leaves for its cost alone."""
    if books.policy(lease).idle_after_ms is not None:
        return True
    return books.host_left_mib - lease.host_need_mib >= books.host_budget_mib // 2


def _leaves_after_ms(books: Books, pool: PoolSpec, lease: Lease) -> int | None:
    """Return after how long in this gap the lease leaves; None while holding costs nothing."""
    prices = pool.hold_price_milli, pool.wait_price_milli, wait_price(books, pool).limit_ms
    key = (lease.last_active_ms, *prices, books.forecasts.hold_rate(pool.name))
    if lease.leaves[1:] != key:
        lease.leaves = (_best_ms(books, pool, lease), *key)
    return lease.leaves[0]


def _best_ms(books: Books, pool: PoolSpec, lease: Lease) -> int | None:
    """Return after how long it costs least to leave; None: holding costs nothing. Costs are in millionths of the currency an hour."""
    forecasts, wait = books.forecasts, pool.wait_price_milli * 1000
    hold = pool.hold_price_milli * lease.milli
    hold += forecasts.hold_cost(pool.name, lease.held_mib * lease.count, wait)
    if not hold:
        return None
    device = books.devices.get(lease.device_id or "")
    name = device.spec.name if device is not None else ""
    price = wait_price(books, pool)
    back = wait * (price.of(forecasts.swap_ms(RESUME, name, lease.used_mib)) + price.queued_ms)
    return forecasts.leave_after_ms(lease.lease_id, hold=hold, back=back)


# -- what idle leases cost ---------------------------------------------------------------------------------------------
# What cells lose because idle leases hold memory, learnt pool by pool, and the idle leases that leave sooner, or later, for it.
#
# At each grant it is learnt (`HoldCosts`) what the ticket's wait cost because idle leases were saved for it (`wait_prices`), what the
# cell that gets room loses beside busy neighbours because idle leases hold the memory of a less busy device (`crowding_ms`), and what
# idle leases held since. `idle` says what follows for one lease; all are looked at again when the loss has changed, not at each grant.
#
# A ticket for N of the D devices of its pool counts only as far as its wait is a long one, and by the part (D - 2N) / D: one for half of
# the devices or more waits for busy leases as a rule, and idle ones that have left before spare it little.


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
            for lease in books.in_state(LeaseState.RESIDENT):
                if lease.occupancy is OccupancyKind.IDLE and lease.spec.pool == pool:
                    books.mark_changed(lease)
