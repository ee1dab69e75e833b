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

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease
from fractional_gpu.core.forecasts.forecasts import RESUME
from fractional_gpu.core.forecasts.wait_prices import LENGTH, WaitPrice
from fractional_gpu.core.model import LeaseState, PoolSpec
from fractional_gpu.core.rules.eligibility import lacks_device, suspendable_from_ms
from fractional_gpu.core.rules.likelihood import is_expected

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
