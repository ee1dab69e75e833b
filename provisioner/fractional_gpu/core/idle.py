"""Decides when to suspend an idle lease even though no ticket needs its room.

A pool either sets a fixed time (`idle_after_ms`) or lets the arbiter decide (`idle_auto`). The arbiter suspends a lease once holding its
room has cost as much as restoring it will. This is the ski-rental problem: no matter when the next cell runs, the total cost is at most
twice the cost of the better choice in hindsight.

- The cost of restoring is the time the resume takes.
- The cost of holding is the time other cells lose. The arbiter learns this cost (`HoldCosts`): it divides the time that tickets spent
  waiting for idle leases to leave by the memory that the pool's idle leases held in the meantime. Lost time is weighted by `_LOST_COUNTS`.
- A pool can also put a price on holding a device (`hold_price`), in addition to the price of waiting (`wait_price`).

If holding costs nothing, no lease is suspended, because a ticket that needs the room gets it anyway. Saved leases use host memory, which
may be needed later to suspend leases for tickets. So `idle_auto` suspends a lease only if half of host memory stays free.
"""

from typing import TYPE_CHECKING

from fractional_gpu.core.effects import SuspendAnnounced
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.model import LeaseState, PoolSpec
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, Ticket
from fractional_gpu.core.suspend import is_expected, lacks_device, suspendable_from_ms
from fractional_gpu.core.units import format_duration

if TYPE_CHECKING:
    from fractional_gpu.core.changes import Changes

# Cells wait longest when idle leases must first be saved for them, and users remember long waits. With 1, kernels are hardly ever suspended
# before a ticket needs their room, and the p95 wait on scarce devices is about a third higher.
_LOST_COUNTS = 10


def idle_due_ms(books: Books, lease: Lease) -> int | None:
    """Return the time at which to suspend an idle lease even if no ticket needs its room, or None if it shouldn't or can't be suspended."""
    if lease.busy or lease.gate.ticket is not None or lease.state is not LeaseState.RESIDENT:
        return None
    pool = books.policy(lease)
    idle_ms = pool.idle_after_ms
    if idle_ms is None and pool.idle_auto:
        idle_ms = _leaves_after_ms(books, pool, lease)
    if idle_ms is None:
        return None
    willing_ms = suspendable_from_ms(pool, lease)
    if willing_ms is None or lacks_device(books, lease) or not _spares_host_memory(books, lease):
        return None
    due_ms = max(lease.last_active_ms + idle_ms, willing_ms)
    if lease.expectation is not None and is_expected(books, lease):
        due_ms = max(due_ms, lease.expectation.until_ms)
    return due_ms


def _spares_host_memory(books: Books, lease: Lease) -> bool:
    """Return whether suspending the lease would leave half of the host memory free. Pools with `idle_after_ms` do not require this."""
    if books.policy(lease).idle_after_ms is not None:
        return True
    return books.host_left_mib - lease.host_need_mib >= books.host_budget_mib // 2


def suspend_idle(changes: "Changes") -> bool:
    """Suspend leases that have been idle long enough, and schedule a recheck for the others.

    Return whether any of the suspended leases was waiting to grow, because the room kept for it is now free.
    """
    books, kept = changes.books, False
    for lease in books.in_state(LeaseState.RESIDENT):
        due_ms = idle_due_ms(books, lease)
        if due_ms is None:
            continue
        if due_ms > books.now_ms:
            _await_suspend(changes, lease, due_ms)
            continue
        if not changes.channel_free or _neighbours_leave_for(lease):
            continue  # an event follows when the swap or suspends end
        if lease.host_need_mib > books.host_left_mib:
            changes.ask_to_shrink(lease)
            continue
        kept |= lease.is_growing
        why = f"idle for {format_duration(books.now_ms - lease.last_active_ms)}"
        if books.policy(lease).idle_after_ms is None:
            why += ", and keeping its memory costs others more than restoring it"
        changes.begin_suspend(lease, "suspend.idle", why)
    return kept


def _neighbours_leave_for(lease: Lease) -> bool:
    """Return whether neighbours are being suspended to let the lease grow. If the lease left as well, their suspends would be wasted."""
    wait = lease.ticket.wait if lease.ticket is not None else None
    return lease.is_growing and wait is not None and wait.code == "wait.making-room"


def _await_suspend(changes: "Changes", lease: Lease, due_ms: int) -> None:
    """Schedule a check at `due_ms`, when the idle lease is due to be suspended. If its pool gives warnings, warn the kernel once."""
    books, now_ms = changes.books, changes.now_ms
    warn_ms = books.policy(lease).warn_before_ms
    is_warned = lease.announced_ms and due_ms <= lease.announced_ms + warn_ms
    if is_warned or not warn_ms:
        books.recheck_at(due_ms)
    elif now_ms < due_ms - warn_ms:
        books.recheck_at(due_ms - warn_ms)
    else:
        lease.announced_ms = due_ms
        books.recheck_at(due_ms)
        changes.effects.append(SuspendAnnounced(lease_id=lease.lease_id, at_ms=due_ms))
        left = format_duration(due_ms - now_ms)
        changes.record(lease.lease_id, "suspend.announced", f"idle: will be suspended in {left} unless it runs a cell")


def _leaves_after_ms(books: Books, pool: PoolSpec, lease: Lease) -> int | None:
    """Return how many ms after its last activity the lease should be suspended. Return None if keeping its room costs nothing."""
    # The result is cached for this gap, so that a later forecast of the resume does not needlessly move the time and its warning.
    key = (lease.last_active_ms, pool.hold_price_milli, pool.wait_price_milli, books.forecasts.hold_rate(pool.name))
    if lease.leaves[1:] != key:
        lease.leaves = (_break_even_ms(books, pool, lease), *key)
    return lease.leaves[0]


def _break_even_ms(books: Books, pool: PoolSpec, lease: Lease) -> int | None:
    """Return how many ms the lease's room can be held for the price of one resume. Prices are in millionths of the currency per hour."""
    wait = pool.wait_price_milli * 1000
    lost = books.forecasts.hold_cost(pool.name, lease.held_mib * lease.count, wait)
    hold = pool.hold_price_milli * lease.milli + _LOST_COUNTS * lost
    return wait * _swap_ms(books, RESUME, lease) // hold if hold else None


def _swap_ms(books: Books, kind: str, lease: Lease) -> int:
    return books.forecasts.swap_ms(kind, books.kind_of(lease.device_id), lease.used_mib)


def saved_for_ticket(books: Books, lease: Lease, ticket: Ticket) -> None:
    """Add the expected time for saving this idle lease to the ticket that needs its room. Call this before the lease is saved."""
    ticket.saves_ms += _swap_ms(books, SUSPEND, lease)


def learn_cost(books: Books, lease: Lease, ticket: Ticket | None) -> None:
    """Learn what holding room costs from how long idle leases delayed `lease` (0 without a ticket). Call this when it gets room."""
    pool = lease.spec.pool
    # If one idle lease had left earlier, a ticket for N devices would have waited about one N-th less.
    lost_ms = ticket.saves_ms // lease.count if ticket is not None else 0
    books.forecasts.hold_seen(pool, lost_ms, books.idle_held.pop(pool, 0))
