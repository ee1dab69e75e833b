"""Who may take the device from a busy lease, and from when on.

Across priorities, where the pool allows it: a ticket of a higher one from a lease of a lower one. Between equals, where the pool
shares by virtual time (`accounts`): one that is behind from one that is ahead; of another owner by the owners' virtual times, of the
same owner by the leases' own. Nobody is preempted before its minimum residency, which is a multiple of what its swap is expected to
take: however close the virtual times are, a device is not given to and fro.
"""

from provisioner.core.forecasts import RESUME, SUSPEND
from provisioner.core.model import LeaseState
from provisioner.core.scheduling import is_lost
from provisioner.core.state import Books, Lease

__all__ = ["goes_before_from_ms", "overtakes_at_ms", "preemptible_from_ms", "swap_ms"]


def swap_ms(books: Books, lease: Lease) -> int:
    """Return how long suspending a lease and bringing it back are expected to take, ms."""
    device = books.devices.get(lease.device_id or "")
    name = device.spec.name if device is not None else ""
    forecasts, mib = books.forecasts, lease.used_mib
    return forecasts.swap_ms(SUSPEND, name, mib) + forecasts.swap_ms(RESUME, name, mib)


def preemptible_from_ms(books: Books, lease: Lease) -> int | None:
    """Return when a busy lease has had its minimum residency; None for one that cannot be saved, or is not resident."""
    if lease.state is not LeaseState.RESIDENT or lease.staying or is_lost(books, lease):
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
    behind, _, _ = mine = _clock(books, lease, victim)
    ahead, _, _ = theirs = _clock(books, victim, lease)
    if ahead > behind:
        return 0
    closes = _closes(theirs, mine)
    if closes <= 0:
        return None
    return books.now_ms + (behind - ahead) * mine[2] * theirs[2] // closes + 1


def overtakes_at_ms(books: Books, first: Lease, second: Lease) -> int | None:
    """Return when the second of two tickets whose pool shares by virtual time comes before the first; None: not by time alone.

    Virtual times are rounded down, so that may be a little early, and is to be asked again then.
    """
    sooner, later = _clock(books, first, second), _clock(books, second, first)
    closes = _closes(sooner, later)
    if closes <= 0:
        return None
    return books.now_ms + max(1, max(1, later[0] - sooner[0]) * sooner[2] * later[2] // closes)


def _clock(books: Books, lease: Lease, other: Lease) -> tuple[int, int, int]:
    """Return the virtual time by which the two are compared, what it counts a millisecond, and the weight that divides that."""
    owner, own = books.share(lease)
    if lease.spec.owner == other.spec.owner:
        return own, lease.milli if lease.metered else 0, max(1, lease.spec.weight)
    account = books.accounts.of(lease)
    return owner, account.rate, max(1, account.weight)


def _closes(gains: tuple[int, int, int], loses: tuple[int, int, int]) -> int:
    """Return by how much the first virtual time gains on the second a millisecond, times both weights."""
    return 100 * (gains[1] * loses[2] - loses[1] * gains[2])  # it grows by 100 x rate / weight
