"""The order in which one pass visits tickets.

A turn is a tuple that sorts tickets. First come leases that are being moved to a target, then higher priorities, then within a priority
urgent tickets, due ones (by a promise or by their long wait) and all others. Among those, a pool without fair shares goes by age. A pool
that shares by virtual time takes the turn of its *oldest* ticket and gives it to the owner, and among the owner's leases to the lease,
with the least virtual time. So pools stay in the order of asking among each other, and shares decide only inside a pool.
"""

from heapq import heapify

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Bucket, Lease, Ticket

Turn = tuple[tuple[int, ...], int, Bucket]
"""When it is a ticket's turn, the ticket's place in its bucket, the bucket."""
BEFORE_SHARES = 4  # elements of a turn before the virtual times
_OLDEST = 3  # the element with the oldest ticket of the pool
_FIRST, _DUE, _USUAL = range(3)


class TurnOrder:
    """The turns of one pass."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._oldest: dict[str, int] = {}  # order of the oldest ticket of each pool that shares by virtual time
        self._latest_urgent: dict[int, int] = {}  # order of the latest urgent ticket, by priority

    @property
    def has_urgent(self) -> bool:
        """Whether urgent tickets were found."""
        return bool(self._latest_urgent)

    def find_urgent(self, buckets: list[Bucket]) -> None:
        """Find the urgent tickets: an older ticket for which room is kept goes first together with them."""
        for bucket in buckets:
            if bucket.key.urgent:
                priority, latest = bucket.key.priority, max(map(order_of, bucket.members))
                self._latest_urgent[priority] = max(latest, self._latest_urgent.get(priority, 0))

    def turns(self, buckets: list[Bucket]) -> list[Turn]:
        """Return the turns of the buckets' first tickets, as a heap."""
        oldest = self._oldest = dict[str, int]()
        for bucket in buckets:
            if bucket.key.fair:
                first, pool = bucket.oldest_order, bucket.key.pool
                if first is None:
                    first = bucket.oldest_order = min(map(order_of, bucket.members))
                if pool not in oldest or first < oldest[pool]:
                    oldest[pool] = first
        turns: list[Turn] = [
            (self.turn(bucket, bucket.members[0]) if bucket.shape is None else self.first_turn(bucket), 0, bucket)
            for bucket in buckets
        ]
        heapify(turns)
        return turns

    def first_turn(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the turn of the first ticket of a bucket with a shape.

        It is kept with the bucket. It changes with its owner's account, which has a version, and with time while the owner's leases work.
        """
        account, turn = bucket.account, bucket.turn
        if (
            turn is None
            or account is None
            or account.busy_milli
            or bucket.turn_version != account.version
            or turn[_OLDEST] != self._oldest.get(bucket.key.pool, 0)
        ):
            account = bucket.account = self._books.accounts.of(bucket.members[0])
            turn = bucket.turn = self.turn(bucket, bucket.members[0])
            bucket.turn_version = account.version
        return turn

    def turn(self, bucket: Bucket, lease: Lease) -> tuple[int, ...]:
        """Return when it is a ticket's turn."""
        key, order = bucket.key, ticket_of(lease).order
        goes_first = key.urgent or (key.room_kept and order < self._latest_urgent.get(key.priority, 0))
        rank = _FIRST if goes_first else _DUE if key.due else _USUAL
        if not key.fair or key.due:
            return (not key.targets, -key.priority, rank, order, 0, 0, order)
        owner, own = self._books.share(lease)
        return (not key.targets, -key.priority, rank, self._oldest.get(key.pool, 0), owner, own, order)


def ticket_of(lease: Lease) -> Ticket:
    """Return the ticket of a lease in the queue. Raises ValueError for any other lease."""
    if lease.ticket is None:
        raise ValueError(f"lease {lease.lease_id} has no ticket")
    return lease.ticket


def order_of(lease: Lease) -> int:
    """Return the place of the lease's ticket in the order of asking."""
    return ticket_of(lease).order
