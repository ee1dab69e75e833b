"""Who may take the device from a busy lease, and from when on.

Across priorities, where the pool allows it: a ticket of a higher one from a lease of a lower one. Between equals, where the pool
shares by virtual time (`accounts`): one that is behind from one that is ahead; of another owner by the owners' virtual times, of the
same owner by the leases' own. Virtual time alone does not bound a wait: an owner's two leases of different sizes, say, may have as much
as another owner for ever while the larger one waits. So a ticket that waited for twice as long as its share explains (`patience_ms`) is
due: it goes before all that are not, and preempts whatever virtual time says.

Nobody is preempted before its minimum residency, which is a multiple of what its swap is expected to take: however close the virtual
times are, a device is not given to and fro.
"""

from fractional_gpu.core.books.books import Books, Lease
from fractional_gpu.core.forecasts.forecasts import RESUME, SUSPEND
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.eligibility import lacks_device

__all__ = [
    "gate_opens_ms",
    "goes_before_from_ms",
    "had_residency_ms",
    "overtakes_at_ms",
    "patience_ms",
    "preemptible_from_ms",
    "residency_ms",
    "swap_ms",
]

_TOGETHER_MS = 1_000  # so long at least a cell waits at its gate for others to leave, too
_PATIENCE = 2  # times the wait that a ticket's share explains


def swap_ms(books: Books, lease: Lease) -> int:
    """Return how long suspending a lease and bringing it back are expected to take, ms."""
    device = books.devices.get(lease.device_id or "")
    name = device.spec.name if device is not None else ""
    forecasts, mib = books.forecasts, lease.used_mib
    return forecasts.swap_ms(SUSPEND, name, mib) + forecasts.swap_ms(RESUME, name, mib)


def residency_ms(books: Books, lease: Lease) -> int:
    """Return the minimum residency of a lease on a device: its turn, where others want the device, too."""
    pool = books.policy(lease)
    return max(1, pool.min_residency_ms, pool.min_residency_swaps_milli * swap_ms(books, lease) // 1000)


def gate_opens_ms(books: Books, lease: Lease, asked_ms: int) -> int:
    """Return when the gate of a lease is opened again whose next cell asked then, if the others that have to leave with it do not."""
    return asked_ms + max(_TOGETHER_MS, swap_ms(books, lease))


def patience_ms(books: Books, lease: Lease) -> int:
    """Return how long a ticket of a pool that shares by virtual time waits before it is due, ms.

    That is twice as long as its share explains: a turn of one lease of its size, and the swap, over the part that its owner has of the
    pool and the lease of its owner's, by the weights of those who contend.
    """
    pool = books.policy(lease)
    name = next((books.devices[one].spec.name for one in pool.devices if one in books.devices), "")
    mib = lease.need_mib * lease.count
    swap = books.forecasts.swap_ms(SUSPEND, name, mib) + books.forecasts.swap_ms(RESUME, name, mib)
    turn_ms = max(1, pool.min_residency_ms, pool.min_residency_swaps_milli * swap // 1000) + swap
    owners, own = books.accounts.contending_weights(lease)
    account = books.accounts.of(lease)
    return -(-_PATIENCE * turn_ms * owners * own // (max(1, account.weight) * max(1, lease.spec.weight)))


def preemptible_from_ms(books: Books, lease: Lease) -> int | None:
    """Return when a busy lease has had its minimum residency; None for one that cannot be saved, or is not resident."""
    if lease.state is not LeaseState.RESIDENT or lease.is_unsuspendable or lacks_device(books, lease):
        return None
    return had_residency_ms(books, lease)


def had_residency_ms(books: Books, lease: Lease) -> int:
    """Return the same for a busy lease that is resident and can be saved."""
    return max(lease.since_ms + residency_ms(books, lease), lease.retries.suspend_after_ms, lease.pinned_until_ms)


def goes_before_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return from when on a lease that waits may have the busy one preempted by its standing; None: not by time alone."""
    if victim.spec.pool != lease.spec.pool or victim.spec.priority > lease.spec.priority:
        return None
    pool = books.policy(lease)
    if victim.spec.priority < lease.spec.priority:
        return 0 if pool.preempt_priorities else None
    if not pool.preempt_equals:
        return None
    return 0 if lease.ticket is not None and lease.ticket.is_due else _is_behind_from_ms(books, lease, victim)


def _is_behind_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return from when on a lease has had less than another of its priority; None: not by time alone."""
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
        return own, lease.milli if lease.meter.is_running else 0, max(1, lease.spec.weight)
    account = books.accounts.of(lease)
    return owner, account.busy_milli, max(1, account.weight)


def _closes(gains: tuple[int, int, int], loses: tuple[int, int, int]) -> int:
    """Return by how much the first virtual time gains on the second a millisecond, times both weights."""
    return 100 * (gains[1] * loses[2] - loses[1] * gains[2])  # it grows by 100 x rate / weight
