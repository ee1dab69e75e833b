"""The order of tickets, which busy leases a waiting one may preempt, and from when on.

**Priorities.** Where the pool allows it (`preempt_priorities`), a ticket may preempt leases of a lower priority.

**Fair shares.** Where the pool shares by virtual time (`preempt_equals`, `accounts`), a ticket may preempt a lease of its own priority
that is ahead of it: leases of different owners compare the owners' virtual times, leases of one owner their own. Virtual times move while
leases work, so each question here is answered with a time *from* which it holds, by extrapolating both clocks; the scheduler wakes up
then.

**Patience.** Virtual time alone does not bound a wait. For example, the small lease of an owner with two leases of different size may use
all that the owner is entitled to for ever, while the large one waits. So a ticket that has waited twice as long as its share explains
(`patience_ms`) is due: it precedes all tickets that are not, and preempts whatever the virtual times are.

**No thrashing.** No lease is preempted before its minimum residency, a multiple of what its swap is expected to take. However close two
virtual times are, a device does not go to and fro between them (law 5).
"""

from collections.abc import Iterable

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Lease, Ticket
from fractional_gpu.core.forecasts.forecasts import RESUME, SUSPEND
from fractional_gpu.core.model import LeaseState, QueueDelay
from fractional_gpu.core.rules.eligibility import lacks_device

_TOGETHER_MS = 1_000  # at least so long a cell waits at its gate for other leases that have to leave, too
_PATIENCE = 2  # in multiples of the wait that a ticket's share explains


def swap_ms(books: Books, lease: Lease) -> int:
    """Return how long a suspend and a resume of the lease are expected to take together, ms."""
    device = books.devices.get(lease.device_id or "")
    name = device.spec.name if device is not None else ""
    forecasts, mib = books.forecasts, lease.used_mib
    return forecasts.swap_ms(SUSPEND, name, mib) + forecasts.swap_ms(RESUME, name, mib)


def residency_ms(books: Books, lease: Lease) -> int:
    """Return the minimum residency of a lease, ms: the length of its turn where other leases want the device, too."""
    pool = books.policy(lease)
    return max(1, pool.min_residency_ms, pool.min_residency_swaps_milli * swap_ms(books, lease) // 1000)


def gate_opens_ms(books: Books, lease: Lease, asked_ms: int) -> int:
    """Return when a lease's gate opens again, at which its next cell has waited since `asked_ms`, if the others do not leave."""
    return asked_ms + max(_TOGETHER_MS, swap_ms(books, lease))


def patience_ms(books: Books, lease: Lease) -> int:
    """Return how long a ticket of a pool that shares by virtual time waits before it is due, ms.

    That is twice as long as its share explains: a turn of one lease of its size, and the swap, divided by the part that its owner has of
    the pool and by the part that the lease has of its owner's, by the weights of the leases that contend.
    """
    pool = books.policy(lease)
    name = next((books.devices[one].spec.name for one in pool.devices if one in books.devices), "")
    mib = lease.need_mib * lease.count
    swap = books.forecasts.swap_ms(SUSPEND, name, mib) + books.forecasts.swap_ms(RESUME, name, mib)
    turn_ms = max(1, pool.min_residency_ms, pool.min_residency_swaps_milli * swap // 1000) + swap
    owners, own = books.accounts.contending_weights(lease)
    account = books.accounts.of(lease)
    return -(-_PATIENCE * turn_ms * owners * own // (max(1, account.weight) * max(1, lease.spec.weight)))


def queue_delay(books: Books, pool_name: str) -> QueueDelay:
    """Return how long the pool's tickets have waited, as of `books.now_ms`. Leases that are being resumed wait no more.

    A ticket is over its bound if it has waited longer than its patience and then a turn and a swap for each lease of the pool that has a
    device or wants one. Pools that do not share by virtual time bound no wait, so none of their tickets is over it.
    """
    line = [
        (lease, books.now_ms - lease.ticket.asked_ms)
        for lease in books.line(pool_name)
        if lease.ticket is not None and lease.state is not LeaseState.RESUMING
    ]
    pool, over = books.pools.get(pool_name), 0
    if line and pool is not None and pool.preempt_equals:
        contend = [one for one in books.leases.values() if one.spec.pool == pool_name and (one.held_mib or one.ticket)]
        turns_ms = sum(residency_ms(books, one) + swap_ms(books, one) for one in contend)
        over = sum(waited_ms > turns_ms + patience_ms(books, lease) for lease, waited_ms in line)
    return QueueDelay(longest_ms=max((waited_ms for _, waited_ms in line), default=0), over_bound=over)


def preemptible_from_ms(books: Books, lease: Lease) -> int | None:
    """Return when a busy lease has had its minimum residency; None if it cannot be saved or is not resident."""
    if lease.state is not LeaseState.RESIDENT or lease.is_unsuspendable or lacks_device(books, lease):
        return None
    return had_residency_ms(books, lease)


def had_residency_ms(books: Books, lease: Lease) -> int:
    """Return when a busy lease has had its minimum residency. The caller knows that it is resident and can be saved."""
    return max(lease.since_ms + residency_ms(books, lease), lease.retries.suspend_after_ms, lease.pinned_until_ms)


def goes_before_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return from when on the waiting lease precedes the busy `victim`; None: time alone does not bring that about."""
    if victim.spec.pool != lease.spec.pool or victim.spec.priority > lease.spec.priority:
        return None
    pool = books.policy(lease)
    if victim.spec.priority < lease.spec.priority:
        return 0 if pool.preempt_priorities else None
    if not pool.preempt_equals:
        return None
    return 0 if lease.ticket is not None and lease.ticket.is_due else _is_behind_from_ms(books, lease, victim)


def preempts_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return from when on the lease may preempt the busy `victim`, whose turn ends then; None: time alone does not bring that about."""
    before_ms = goes_before_from_ms(books, lease, victim)
    had_turn_ms = preemptible_from_ms(books, victim) if before_ms is not None else None
    return None if before_ms is None or had_turn_ms is None else max(before_ms, had_turn_ms)


def _is_behind_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return from when on a lease has used less than another of its priority; None: time alone does not bring that about."""
    behind, _, _ = mine = _clock(books, lease, victim)
    ahead, _, _ = theirs = _clock(books, victim, lease)
    if ahead > behind:
        return 0
    closes = _closes(theirs, mine)
    if closes <= 0:
        return None
    return books.now_ms + (behind - ahead) * mine[2] * theirs[2] // closes + 1


def _clock(books: Books, lease: Lease, other: Lease) -> tuple[int, int, int]:
    """Return the virtual time of the first by which the two compare, the milli-GPU it grows by, and the weight that divides them."""
    owner, own = books.share(lease)
    if lease.spec.owner == other.spec.owner:
        return own, lease.milli if lease.meter.is_running else 0, max(1, lease.spec.weight)
    account = books.accounts.of(lease)
    return owner, account.busy_milli, max(1, account.weight)


def _closes(gains: tuple[int, int, int], loses: tuple[int, int, int]) -> int:
    """Return how fast the first virtual time gains on the second, per millisecond and multiplied by both weights."""
    return 100 * (gains[1] * loses[2] - loses[1] * gains[2])  # a virtual time grows by 100 x milli-GPU / weight


_FIRST, _DUE, _USUAL = range(3)


class Turns:
    """The order in which a pass serves the tickets that wait for room:

    1. Leases on their way to another device.
    2. Higher priorities.
    3. Urgent tickets, and older ones for which room is kept.
    4. Due tickets: leases leave for them, or they have waited for twice as long as their share explains.
    5. In a pool that is fair, the one who has had least of its share; otherwise, and among equals, the oldest.

    Shares decide only inside a pool: one that is fair takes the turn of its oldest ticket and gives it to the owner, and among the owner's
    leases to the lease, with the least virtual time.
    """

    def __init__(self, books: Books, waiting: Iterable[Lease]) -> None:
        self._books = books
        self._oldest: dict[str, int] = {}  # order of the oldest ticket of each pool
        self._latest_urgent: dict[int, int] = {}  # order of the latest urgent ticket of each priority
        for lease in waiting:
            ticket, pool, priority = ticket_of(lease), lease.spec.pool, lease.spec.priority
            self._oldest[pool] = min(ticket.order, self._oldest.get(pool, ticket.order))
            if ticket.urgent:
                self._latest_urgent[priority] = max(ticket.order, self._latest_urgent.get(priority, ticket.order))

    def turn(self, lease: Lease) -> tuple[int, ...]:
        """Return what sorts a ticket."""
        ticket, pool, priority = ticket_of(lease), self._books.policy(lease), lease.spec.priority
        # An older ticket for which room is kept goes first together with an urgent one.
        is_owed = ticket.passed_over >= pool.max_passed_over
        goes_first = ticket.urgent or (is_owed and ticket.order < self._latest_urgent.get(priority, ticket.order))
        is_due = ticket.is_due and pool.preempt_equals
        before = not lease.target_ids, -priority, _FIRST if goes_first else _DUE if is_due else _USUAL
        if is_due or not pool.preempt_equals:
            return (*before, ticket.order, 0, 0, ticket.order)
        return (*before, self._oldest[lease.spec.pool], *self._books.share(lease), ticket.order)


def ticket_of(lease: Lease) -> Ticket:
    """Return the ticket of a lease in the queue. Raises ValueError for any other lease."""
    if lease.ticket is None:
        raise ValueError(f"lease {lease.lease_id} has no ticket")
    return lease.ticket
