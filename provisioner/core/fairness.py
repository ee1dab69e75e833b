"""Who may take the device from a busy lease, and from when on.

Across priorities, where the pool allows it: a ticket of a higher one from a lease of a lower one. Between equals, where the pool
shares by virtual time (`accounts`): one that is behind from one that is ahead; of another owner by the owners' virtual times, of the
same owner by the leases' own. Nobody is preempted before its minimum residency, which is a multiple of what its swap is expected to
take: however close the virtual times are, a device is not given to and fro.
"""

from provisioner.core.forecasts import RESUME, SUSPEND
from provisioner.core.model import LeaseState
from provisioner.core.state import Books, Lease

__all__ = ["goes_before_from_ms", "preemptible_from_ms", "swap_ms"]


def swap_ms(books: Books, lease: Lease) -> int:
    """Return how long suspending a lease and bringing it back are expected to take, ms."""
    device = books.devices.get(lease.device_id or "")
    name = device.spec.name if device is not None else ""
    forecasts, mib = books.forecasts, lease.used_mib
    return forecasts.swap_ms(SUSPEND, name, mib) + forecasts.swap_ms(RESUME, name, mib)


def preemptible_from_ms(books: Books, lease: Lease) -> int | None:
    """Return when a busy lease has had its minimum residency; None for one that cannot be saved, or is not resident."""
    if lease.state is not LeaseState.RESIDENT or lease.staying:
        return None
    pool = books.policy(lease)
    least_ms = max(1, pool.min_residency_ms, pool.min_residency_swaps_milli * swap_ms(books, lease) // 1000)
    return max(lease.since_ms + least_ms, lease.retry_ms, lease.pinned_until_ms)


def goes_before_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return from when on a lease that waits may have the busy one preempted by its standing; None: not by time alone."""
    if victim.spec.pool != lease.spec.pool or victim.spec.priority > lease.spec.priority:
        return None
    pool = books.policy(lease)
    if victim.spec.priority < lease.spec.priority:
        return 0 if pool.preempt_priorities else None
    if not pool.preempt_equals:
        return None
    mine, theirs = books.share(lease), books.share(victim)
    if victim.spec.owner == lease.spec.owner:
        ahead, gains = theirs[1] - mine[1], (victim.milli, victim.spec.weight)
        loses = (0, 1)
    else:
        ahead = theirs[0] - mine[0]
        gains, loses = (
            (account.rate, account.weight) for account in (books.accounts.of(victim), books.accounts.of(lease))
        )
    if ahead > 0:
        return 0
    # virtual time grows by 100 x rate / weight a millisecond
    closes = 100 * (gains[0] * loses[1] - loses[0] * gains[1])
    if closes <= 0:
        return None
    return books.now_ms + -ahead * max(1, gains[1]) * max(1, loses[1]) // closes + 1
