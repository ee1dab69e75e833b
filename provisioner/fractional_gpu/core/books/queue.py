"""The queue: which leases wait, in which order, and in which bucket.

A pool's line is sorted by priority, then urgency, then the order of asking; where a pool shares by virtual time, that comes before the
order of asking. Tickets that only need room also lie in buckets: all in one bucket have the same need, may go to the same devices, and
count against the same limits. A pass over the queue visits buckets, not lines.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from fractional_gpu.core.books.records import Bucket, BucketKey, BucketShape, Lease, Ticket
from fractional_gpu.core.model import LeaseState, PoolSpec

_Policy = Callable[[Lease], PoolSpec]
_Share = Callable[[Lease], tuple[int, int]]
by_rank: Callable[[Lease], tuple[int, bool, int]] = attrgetter("ticket.rank")  # the order of a pool's line
_by_place: Callable[[Lease], tuple[int, int]] = attrgetter("ticket.bucket_rank")  # the order of a bucket


class Queue:
    """Tickets by pool and by bucket. `policy` returns a lease's pool; `share` its owner's and its own virtual time."""

    def __init__(self, policy: _Policy, share: _Share) -> None:
        self._policy = policy
        self._share = share
        self.lines: dict[str, list[Lease]] = {}  # sorted, except by virtual time
        self.buckets: dict[tuple[object, ...], Bucket] = {}
        self.shapes: dict[tuple[object, ...], BucketShape] = {}
        self.unshaped: dict[int, Bucket] = {}  # without a shape, by number
        self.created = 0  # buckets so far
        self.waiting = 0
        self.urgent = 0
        self.unexplained: dict[str, Lease] = {}  # leases whose ticket is new, or in another bucket than before

    # -- tickets ---------------------------------------------------------------------------------------------------------

    def enqueue(self, lease: Lease, ticket: Ticket) -> None:
        """Put a lease without a ticket in its place."""
        lease.ticket = ticket
        ticket.rank = (-lease.spec.priority, not ticket.urgent, ticket.order)
        insort(self.lines.setdefault(lease.spec.pool, []), lease, key=by_rank)
        self.waiting += 1
        self.urgent += ticket.urgent
        self.rebucket(lease)
        self.unexplained[lease.lease_id] = lease

    def dequeue(self, lease: Lease) -> Ticket | None:
        """Take the lease out; return its ticket, if it had one."""
        ticket = lease.ticket
        if ticket is not None:
            self._leave_bucket(lease)
            line = self.lines[lease.spec.pool]
            del line[bisect_left(line, ticket.rank, key=by_rank)]
            if not line:
                del self.lines[lease.spec.pool]
            lease.ticket = None
            self.waiting -= 1
            self.urgent -= ticket.urgent
            self.unexplained.pop(lease.lease_id, None)
        return ticket

    def line(self, pool: str) -> list[Lease]:
        """Return the waiting leases of a pool, in order."""
        line = self.lines.get(pool, [])
        if not line or not self._policy(line[0]).preempt_equals:
            return line
        return sorted(line, key=self._fair_rank)

    def place(self, lease: Lease) -> int:
        """Return the place of a lease with a ticket in its pool's line, from 1."""
        line = self.line(lease.spec.pool)
        if self._policy(lease).preempt_equals:
            return line.index(lease) + 1
        return bisect_left(line, by_rank(lease), key=by_rank) + 1

    def _fair_rank(self, lease: Lease) -> tuple[int, bool, bool, int, int, int]:
        priority, calm, order = by_rank(lease)
        if lease.ticket is not None and lease.ticket.is_due:
            return (priority, calm, False, 0, 0, order)
        return (priority, calm, True, *self._share(lease), order)

    # -- buckets ---------------------------------------------------------------------------------------------------------

    def rebucket(self, lease: Lease) -> None:
        """Put the lease's ticket into the bucket where it belongs now, if any."""
        ticket, bucket = lease.ticket, lease.bucket
        if ticket is None:
            return
        key = self._key(lease, ticket)
        if bucket is not None and bucket.key == key:
            return
        # Room was kept where the old bucket could be served; another home means other devices. A lease on its way keeps its targets.
        if bucket is not None and (key is None or key.home != bucket.key.home) and not lease.target_ids:
            ticket.kept_on = ()
        self._leave_bucket(lease)
        self.unexplained[lease.lease_id] = lease
        if key is None:
            return
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self._create(key)
        ticket.bucket_rank = (self._share(lease)[1] if key.fair else 0, ticket.order)
        insort(bucket.members, lease, key=_by_place)
        bucket.due_ms, bucket.oldest_order, bucket.turn = 0, None, None
        lease.bucket = bucket

    def _leave_bucket(self, lease: Lease) -> None:
        bucket = lease.bucket
        if bucket is not None:
            del bucket.members[bisect_left(bucket.members, _by_place(lease), key=_by_place)]
            bucket.due_ms, bucket.oldest_order, bucket.turn = 0, None, None
            if not bucket.members:
                self._delete(bucket)
            lease.bucket = None

    def _create(self, key: BucketKey) -> Bucket:
        bucket = self.buckets[key] = Bucket(key, number=self.created)
        self.created += 1
        if _is_plain(key):
            bucket.shape = self.shapes.setdefault(_shape(key), BucketShape())
            bucket.shape.buckets[bucket.number] = bucket
        else:
            self.unshaped[bucket.number] = bucket
        return bucket

    def buckets_of(self, family: tuple[object, ...]) -> Iterator[Bucket]:
        """Return the buckets of a family (`Bucket.family`) that have a shape."""
        pool, where, _, many, priority, *_ = family
        for shape in self.shapes:
            if shape[:4] == (pool, where, many, priority):
                bucket = self.buckets.get((*family, shape[4], False, False, False, (), False))
                if bucket is not None:
                    yield bucket

    def _delete(self, bucket: Bucket) -> None:
        del self.buckets[bucket.key]
        if bucket.shape is None:
            del self.unshaped[bucket.number]
            return
        del bucket.shape.buckets[bucket.number]
        if not bucket.shape.buckets:
            del self.shapes[_shape(bucket.key)]

    def rebucket_all(self) -> None:
        """Put all tickets into their buckets after policies changed; room is kept anew, perhaps elsewhere."""
        for line in self.lines.values():
            for lease in line:
                self.rebucket(lease)
                if lease.ticket is not None and not lease.target_ids:
                    lease.ticket.kept_on = ()

    def _key(self, lease: Lease, ticket: Ticket) -> BucketKey | None:
        spec, state = lease.spec, lease.state
        saved = state is LeaseState.SUSPENDED
        grows = lease.is_growing
        # Only these can be served by room alone; a lease in an operation or in doubt waits for that to end, without a bucket.
        if not (saved or grows or state is LeaseState.NO_CONTEXT):
            before_start = state is LeaseState.UNATTACHED and ticket.before_start
            if not before_start or lease.held_mib:
                return None
        pool = self._policy(lease)
        limited = _limited(pool, spec.group)
        return BucketKey(
            pool=spec.pool,
            home=_where(lease, grows=grows, saved=saved),
            accounts=(spec.owner, spec.group) if limited else (spec.owner,) if pool.preempt_equals else (),
            devices=lease.count,
            priority=spec.priority,
            fair=pool.preempt_equals,
            milli=_milli(lease, ticket) if limited else 0,
            need_mib=ticket.extra_mib if grows else lease.need_mib,
            urgent=ticket.urgent,
            room_kept=ticket.passed_over >= pool.max_passed_over,
            paused=lease.retries.resume_paused,
            targets=lease.target_ids if saved else (),
            due=ticket.is_due and pool.preempt_equals,
        )


def _where(
    lease: Lease, *, grows: bool, saved: bool
) -> tuple[str, ...] | str | tuple[tuple[str, ...] | None, tuple[str, ...]] | None:
    """Return `BucketKey.home`: leases that agree in it may go to the same devices of their pool."""
    home = lease.home_ids if saved else None
    if grows:
        return lease.spec.lease_id
    only = lease.bound_ids or lease.spec.allowed_devices
    return (home, only) if only else home


def _is_plain(key: BucketKey) -> bool:
    """Return whether the tickets of a bucket wait for room and their owner's turn only, so that it has a shape."""
    grows = isinstance(key.home, str)
    special = key.urgent or key.room_kept or key.paused or key.targets or key.due or key.milli or grows
    return key.fair and bool(key.need_mib) and not special


def _shape(key: BucketKey) -> tuple[object, ...]:
    return key.pool, key.home, key.devices, key.priority, key.need_mib


def _milli(lease: Lease, ticket: Ticket) -> int:
    """Return what the ticket adds to what its owner has on devices, milli-GPU."""
    if ticket.resize_to is None:
        return lease.milli
    return max(0, ticket.resize_to.fraction_milli * ticket.resize_to.devices - lease.milli)


def _limited(pool: PoolSpec, group: str) -> bool:
    if pool.user_limits.resident_milli is not None:
        return True
    return any(name == group and limits.resident_milli is not None for name, limits in pool.group_limits)
