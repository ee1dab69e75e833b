"""One pass over the queue: tickets are served in order, bucket by bucket.

A ticket that fits is granted. One that does not, but would if idle leases stepped aside, makes them do so one after another, and the
room they make is promised to it. One that would not fit even then waits, and nobody is suspended for it in vain (law 3). Whoever is
behind may overtake a ticket that cannot be served at most K times; then room is kept for that one (law 4).

Room only shrinks on the way: where one ticket of a bucket finds none, the rest of the bucket is left out, and so are buckets of the
same family with larger needs. What is said about those is looked up when somebody asks (`explaining`).
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise

from fractional_gpu.core.books.records import (
    Bucket,
    BucketKey,
    BucketShape,
    Lease,
    Reason,
    Ticket,
)
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.handlers.resize import Resizer
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.fairness import overtakes_at_ms, patience_ms
from fractional_gpu.core.rules.limits import over_limit, victims_of_same_user
from fractional_gpu.core.rules.wait_reasons import allowed_devices, name_for, reason_code, wait_reason
from fractional_gpu.core.scheduler.capacity import Capacity, Plan
from fractional_gpu.core.scheduler.migration import Migrations, kept_mib
from fractional_gpu.core.scheduler.victims import Victims
from fractional_gpu.core.scheduler.yielding import Yielding
from fractional_gpu.core.units import format_memory

__all__ = ["QueuePass"]

_MOST_PLANS = 2  # while no swap can begin anyway: room is promised to so many tickets ahead
_MOVED_FIRST = Reason("wait.swap-channel", "other kernels are being moved first, one after another")
_IDLE_MAKES_ROOM = "an idle kernel is being suspended to make room"
_OWED_AT_A_TIME = 8  # keep room before it is looked whether there is any left
_BEFORE_SHARES = 4  # of what makes a turn: the rest is virtual time and age
_OLDEST = 3  # the place in a turn where the oldest ticket of its pool stands
_FIRST, _DUE, _USUAL = range(3)  # tickets of one priority: urgent, due by a promise or by their wait, and all others
_Turn = tuple[tuple[int, ...], int, Bucket]


class QueuePass:
    """What is promised on the way counts against everybody behind. `hint_ms`: when time alone may change a decision."""

    def __init__(self, changes: Changes, resizing: Resizer) -> None:
        self._changes = changes
        self._resizer = resizing
        self._books = changes.books
        self._queue = changes.books.queue
        self._victims = Victims(changes.books)
        self._capacity = Capacity(changes.books, self._victims)
        self._migrations = Migrations(changes, self._capacity, self._victims)
        self._cell_yields = Yielding(changes, self._capacity, self._victims)
        self._promised: list[Lease] = []  # for whom somebody begins to leave
        self._unservable_mib: dict[tuple[object, ...], int] = {}  # by family: so much is too much
        self._kept: set[tuple[str, str]] = set()  # lease and device: room is kept or promised there already
        self._latest_urgent: dict[int, int] = {}  # by priority
        self._overdue: dict[str, Lease] = {}  # were passed over as often as may be in this pass
        self._visited: set[str] = set()
        self._order_changed = False  # somebody comes earlier than when the order was made
        self._oldest: dict[str, int] = {}  # ticket of each pool that serves by shares
        self._turn_now: tuple[int, ...] = ()
        self._by_share: list[tuple[tuple[int, ...], Lease]] = []  # whose turn it was by virtual time, in order
        self._plans = self._owed = 0
        self._special = 0  # of the turns to come, those of buckets without a shape
        self._known = 0  # buckets from this number on are not in this pass
        self._refused = -1  # with the room as it was then, the rest could not be left out
        self.needs_another = False  # room grew on the way: somebody who was looked at before may fit now

    @property
    def expected_victims(self) -> set[str]:
        """Idle leases whose room tickets were promised, or would have been if there were more host memory."""
        return self._capacity.planned | self._capacity.short_of_host_memory

    @property
    def short_of_host_memory(self) -> set[str]:
        """Leases that would step aside if there were more host memory, or if they had less to save."""
        return self._capacity.short_of_host_memory

    @property
    def recheck_ms(self) -> int | None:
        """When to look again though nothing happens."""
        return self._victims.recheck_ms

    def serve(self) -> None:
        """Serve everybody once, in order."""
        turns = self._begin()
        while turns:
            self._turn_now, cursor, bucket = heappop(turns)
            self._special -= bucket.shape is None
            if cursor >= len(bucket.members):
                bucket.exhausted_in_pass = self._books.passes
                continue
            if bucket.shape is not None and not self._changes.channel_free and self._leaves_out_the_rest():
                break
            lease = bucket.members[cursor]
            if bucket.key.fair:
                self._by_share.append((self._turn_now[:_BEFORE_SHARES], lease))
            goes_on = lease.lease_id in self._visited or self._visit(bucket, lease)
            if not self._order_changed:
                self._visited.add(lease.lease_id)
            if lease.bucket is bucket:
                cursor += 1
            if self._order_changed:
                turns, self._order_changed = self._turns(list(self._queue.buckets.values())), False
                self._by_share, self._special = [], len(turns) + 1  # tickets that were visited are left out one by one
            elif not goes_on:
                bucket.closed_in_pass = self._books.passes
            elif cursor < len(bucket.members):
                heappush(turns, (self._turn(bucket, bucket.members[cursor]), cursor, bucket))
                self._special += bucket.shape is None
            else:
                bucket.exhausted_in_pass = self._books.passes
        self._rebucket_overdue()
        self._mark_due_by_promise()
        self._cell_yields.open_others()
        self._recheck_at_overtaking()
        self._record_new_reasons()

    def _rebucket_overdue(self) -> None:
        for lease in self._overdue.values():
            self._queue.rebucket(lease)
            if lease.bucket is not None:
                self._keep_waiting(lease, _ticket(lease), allowed_devices(self._books, lease))

    def _mark_due_by_promise(self) -> None:
        """Where virtual time decides, whoever leaves for a ticket would often go before it again: the ticket is due from now on."""
        for lease in self._promised:
            if lease.ticket is not None and not lease.ticket.is_due and self._books.shares_by_time(lease):
                lease.ticket.is_due = True
                self._queue.rebucket(lease)

    def _recheck_at_overtaking(self) -> None:
        """A ticket that goes first by virtual time does so only until the next one has had less; then another one may fit.

        While the swap channel is in use nobody is made to leave, and the pass after the swap looks again.
        """
        if not self._changes.channel_free:
            return
        waiting = [one for one in self._by_share if one[1].bucket is not None]
        for (rank, first), (next_rank, second) in pairwise(waiting):
            at_ms = overtakes_at_ms(self._books, first, second) if rank == next_rank else None
            if at_ms is not None:
                self._victims.recheck_at(at_ms)

    def _begin(self) -> list[_Turn]:
        self._books.passes += 1
        self._mark_due_by_wait()
        buckets = list(self._queue.buckets.values())
        if self._queue.urgent:
            self._find_latest_urgent(buckets)
        for mover in self._books.moving.values():
            for device_id in mover.target_ids:
                self._keep_for(mover, device_id, kept_mib(mover))
        self._known = self._queue.created
        if self._nothing_can_begin():
            buckets = [one for one in buckets if one.shape is None and not self._waits_in_any_order(one)]
            self._leave_out(self._queue.shapes.values())
        return self._turns(buckets)

    def _nothing_can_begin(self) -> bool:
        """Whether no swap can begin and no room is free, so that it does not matter whose turn it is."""
        books = self._books
        if self._changes.channel_free or self._queue.urgent or books.moving:
            return False
        return not self._capacity.any_free(books.devices)

    def _waits_in_any_order(self, bucket: Bucket) -> bool:
        """Where nothing can begin: visit a bucket whose tickets need room that is not there. Returns whether it is one, and keeps none.

        `_visit` does the same at its turn. With a bucket for each owner (`Key.who`), making the order costs more than all visits.
        """
        key, lease = bucket.key, bucket.members[0]
        if key.room_kept or key.targets or key.milli or not key.need_mib or lease.lease_id in self._overdue:
            return False
        if not key.paused:
            devices = allowed_devices(self._books, lease)
            if self._capacity.idle_could_free(devices, key.need_mib):
                bucket.wait, bucket.wait_pass = _MOVED_FIRST, self._books.passes
        bucket.closed_in_pass = self._books.passes
        return True

    def _leaves_out_the_rest(self) -> bool:
        """Whether all that is left to visit only waits for the swap channel, in whatever order: then it is noted once for each shape.

        Visits one by one would find the same. They are needed where a ticket fits, keeps room or may be promised some.
        """
        if self._special or self._overdue or self._latest_urgent or self._refused == self._capacity.version:
            return False
        shapes = self._queue.shapes.values()
        if not all(map(self._comes_later_whole, shapes)):
            self._refused = self._capacity.version
            return False
        for family, need_mib in self._unservable_mib.items():
            for other in self._queue.buckets_of(family):
                if (
                    other.key.need_mib >= need_mib
                    and other.number < self._known
                    and other.exhausted_in_pass != self._books.passes
                ):
                    other.closed_in_pass = self._books.passes
        self._leave_out(shapes)
        return True

    def _comes_later_whole(self, shape: BucketShape) -> bool:
        """Whether no ticket of a shape can have anything begun for it, or kept, before other swaps have ended."""
        devices, key = self._devices_of(shape)
        if not self._capacity.any_free(devices):
            return True
        return self._plans >= _MOST_PLANS and key.devices == 1 and self._capacity.pick(devices, key.need_mib) is None

    def _leave_out(self, shapes: Iterable[BucketShape]) -> None:
        """Note that all buckets that were not visited wait for the swap channel."""
        for shape in shapes:
            devices, key = self._devices_of(shape)
            shape.skipped_in_pass, shape.first_unskipped = self._books.passes, self._known
            shape.wait = _MOVED_FIRST if self._capacity.idle_could_free(devices, key.need_mib) else None

    def _devices_of(self, shape: BucketShape) -> tuple[tuple[str, ...], BucketKey]:
        one = next(iter(shape.buckets.values()))
        if shape.devices is None:
            shape.devices = allowed_devices(self._books, one.members[0])
        return shape.devices, one.key

    def _mark_due_by_wait(self) -> None:
        """Where virtual time decides: tickets that waited for longer than their shares explain are due.

        Room is kept for them, too: neighbours that leave and come back one by one would never all have had their turn.
        """
        now_ms, first_ms = self._books.now_ms, 0
        for bucket in list(self._queue.buckets.values()):
            key = bucket.key
            if not key.fair or key.due or key.pool not in self._books.pools:
                continue  # without its pool it waits for that to be configured again, not for others
            while bucket.due_ms <= now_ms and bucket.members:
                lease = min(bucket.members, key=_order)
                ticket = _ticket(lease)
                if ticket.due_ms <= now_ms:
                    ticket.due_ms = ticket.asked_ms + patience_ms(self._books, lease)
                if ticket.due_ms > now_ms:
                    bucket.due_ms = ticket.due_ms
                else:
                    ticket.is_due = True
                    ticket.passed_over = max(ticket.passed_over, self._books.policy(lease).max_passed_over)
                    self._queue.rebucket(lease)
            if bucket.members and not 0 < first_ms <= bucket.due_ms:
                first_ms = bucket.due_ms
        if first_ms:
            self._victims.recheck_at(first_ms)

    def _turns(self, buckets: list[Bucket]) -> list[_Turn]:
        oldest = self._oldest = dict[str, int]()
        self._known = self._queue.created
        self._special = sum([bucket.shape is None for bucket in buckets])
        for bucket in buckets:
            if bucket.key.fair:
                first, pool = bucket.oldest_order, bucket.key.pool
                if first is None:
                    first = bucket.oldest_order = min(map(_order, bucket.members))
                if pool not in oldest or first < oldest[pool]:
                    oldest[pool] = first
        turns: list[_Turn] = [
            (self._turn(bucket, bucket.members[0]) if bucket.shape is None else self._first_turn(bucket), 0, bucket)
            for bucket in buckets
        ]
        heapify(turns)
        return turns

    def _first_turn(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the turn of the first ticket of a bucket with a shape: it is kept for as long as no lease of its owner is at work."""
        account, turn = bucket.account, bucket.turn
        if (
            turn is None
            or account is None
            or account.busy_milli
            or bucket.turn_version != account.version
            or turn[_OLDEST] != self._oldest.get(bucket.key.pool, 0)
        ):
            account = bucket.account = self._books.accounts.of(bucket.members[0])
            turn = bucket.turn = self._turn(bucket, bucket.members[0])
            bucket.turn_version = account.version
        return turn

    def _turn(self, bucket: Bucket, lease: Lease) -> tuple[int, ...]:
        """When it is a ticket's turn. A pool that serves by shares has the turn of its oldest ticket, and gives it to who is behind."""
        key, order = bucket.key, _ticket(lease).order
        goes_first = key.urgent or (key.room_kept and order < self._latest_urgent.get(key.priority, 0))
        rank = _FIRST if goes_first else _DUE if key.due else _USUAL
        if not key.fair or key.due:
            return (not key.targets, -key.priority, rank, order, 0, 0, order)
        owner, own = self._books.share(lease)
        return (not key.targets, -key.priority, rank, self._oldest.get(key.pool, 0), owner, own, order)

    def _find_latest_urgent(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.key.urgent:
                latest = max(_ticket(lease).order for lease in bucket.members)
                priority = bucket.key.priority
                self._latest_urgent[priority] = max(latest, self._latest_urgent.get(priority, 0))

    def _record_new_reasons(self) -> None:
        """Write into the stories why those wait whose tickets are new, or wait for something else than before."""
        fresh, self._queue.unexplained = list(self._queue.unexplained.values()), {}
        for lease in fresh:
            if lease.ticket is not None:
                self._changes.record_wait_reason(lease, wait_reason(self._books, lease, lease.ticket))

    # -- one ticket ------------------------------------------------------------------------------------------------------

    def _visit(self, bucket: Bucket, lease: Lease) -> bool:
        """Serve one ticket as far as it can be now. Returns whether to go on with the bucket."""
        ticket, key = _ticket(lease), bucket.key
        devices = allowed_devices(self._books, lease)
        over = over_limit(self._books, lease, key.milli) if key.milli else None
        if key.targets:
            return self._arrive_at_targets(lease, ticket, key.targets, over)
        if over is not None:
            self._free_own_share(bucket, lease, over)
            return False
        if key.paused or key.need_mib >= self._unservable_mib.get(bucket.family, key.need_mib + 1):
            return self._keep_waiting(lease, ticket, devices)
        full = not self._capacity.any_free(devices)
        chosen = self._pick(lease, devices, key.need_mib) if not full or not key.need_mib else None
        if chosen is not None:
            return self._serve_at_once(lease, ticket, chosen)
        if not self._changes.channel_free and (full or self._plans >= _MOST_PLANS):
            return self._await_channel(bucket, lease, ticket, devices)
        return self._make_or_await_room(bucket, lease, ticket, devices)

    def _await_channel(self, bucket: Bucket, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> bool:
        """Nothing can be begun for the ticket before other swaps have ended. Returns whether to go on with the bucket."""
        if self._capacity.idle_could_free(devices, bucket.key.need_mib):
            bucket.wait, bucket.wait_pass = _MOVED_FIRST, self._books.passes
        return self._keep_waiting(lease, ticket, devices)

    def _make_or_await_room(self, bucket: Bucket, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> bool:
        """The ticket fits nowhere now: have room made for it, if that helps. Returns whether to go on with the bucket."""
        key = bucket.key
        plan = self._capacity.plan(lease, devices, key.need_mib, key.devices)
        if plan is None and not lease.is_growing:
            plan = self._migrations.plan_busy_move(lease, devices, key.need_mib)
        if isinstance(plan, Plan):
            self._make_room(lease, plan)
            self._keep_waiting(lease, ticket, devices)
            return True
        if ticket.resize_to is not None and self._migrations.move_to_grow(lease, ticket.resize_to):
            return True
        if plan is None:
            self._cell_yields.ask(lease, devices, key)
        self._unservable_mib[bucket.family] = key.need_mib
        if plan is not None:
            bucket.wait, bucket.wait_pass = plan, self._books.passes
        self._record_reason(lease, plan, devices)
        return self._keep_waiting(lease, ticket, devices)

    def _arrive_at_targets(self, lease: Lease, ticket: Ticket, targets: tuple[str, ...], over: Reason | None) -> bool:
        """A lease that is being moved goes on to its targets, where room is kept for it, if they, and its limits, can still have it."""
        there = allowed_devices(self._books, lease)
        if not over and all(one in there and self._books.devices[one].free_mib >= lease.need_mib for one in targets):
            if not self._changes.channel_free:
                self._record_reason(
                    lease, Reason("wait.swap-channel", "it is being moved; another kernel is moved before it")
                )
                return True
            self._grant(lease, targets)
            for device_id in targets:  # what was kept for it, it has
                self._unkeep(lease, device_id)
            self._capacity.refresh(targets)
            return True
        for device_id in targets:
            self._unkeep(lease, device_id)
        ticket.kept_on = ()
        self._books.set_target(lease, ())
        self._order_changed = True
        return True

    def _pick(self, lease: Lease, devices: tuple[str, ...], need_mib: int) -> tuple[str, ...] | None:
        """Return where the need fits now; saved state goes home if it can. Who grows by nothing but its share needs no room."""
        if lease.is_growing:
            return devices if devices and (not need_mib or self._capacity.fits(devices, need_mib)) else None
        home = lease.home_ids if lease.state is LeaseState.SUSPENDED and len(devices) > 1 else ()
        if home and set(home) <= set(devices) and self._capacity.fits(home, need_mib):
            return home
        return self._capacity.pick(devices, need_mib, lease.count)

    def _serve_at_once(self, lease: Lease, ticket: Ticket, chosen: tuple[str, ...]) -> bool:
        if lease.state is LeaseState.SUSPENDED and not self._changes.channel_free:
            for device_id in chosen:
                self._keep(lease, device_id)
            self._record_reason(lease, Reason("wait.swap-channel", "another kernel is being moved; this one is next"))
            return True
        urgent, held_mib = ticket.urgent or bool(self._latest_urgent), lease.held_mib
        # Whoever went before others only because it did not wait for the urgent one does no more.
        self.needs_another |= ticket.urgent
        if ticket.resize_to is not None:
            milli = lease.milli
            self._resizer.grow_in_place(lease)
            # A larger share with less memory, or the other way.
            self.needs_another |= lease.held_mib < held_mib or lease.milli < milli
            # Its user, or group, may have as much as may be now: tickets ahead that keep room keep it no more.
            self.needs_another |= bool(self._kept) and lease.milli > milli
            if lease.is_growing:  # it lacks more by now than when it asked
                self.needs_another = True
                return True
        else:
            self._grant(lease, chosen)
        self._capacity.refresh(chosen)
        if lease.held_mib > held_mib:
            self._count_passed_over(lease, ticket, chosen, urgent=urgent)
        return True

    def _grant(self, lease: Lease, device_ids: tuple[str, ...]) -> None:
        """Whoever keeps room, but has as much as may be from now on because of this one, keeps it no more."""
        self.needs_another |= bool(self._kept) and lease.bucket is not None and bool(lease.bucket.key.milli)
        self._changes.grant(lease, device_ids)

    def _free_own_share(self, bucket: Bucket, lease: Lease, over: Reason) -> None:
        """Its user (group) has as much as may be: have its own idle leases step aside, if it fits then."""
        bucket.wait, bucket.wait_pass = over, self._books.passes
        self._record_reason(lease, over)
        own, devices, key = (
            victims_of_same_user(self._books, lease, bucket.key.milli, self._victims.recheck_at),
            allowed_devices(self._books, lease),
            bucket.key,
        )
        if not own or key.paused:
            return
        fits = self._pick(lease, devices, key.need_mib)
        plan = (
            Plan(fits, own)
            if fits is not None
            else self._capacity.plan(lease, devices, key.need_mib, key.devices, also=own)
        )
        if not isinstance(plan, Plan) or self._capacity.short_of_host(plan) is not None:
            return
        for victim in plan.victims:
            if not self._changes.channel_free:
                break
            mine = "suspend.user-limit", f"idle, and its user needs its share for {name_for(victim, lease)}"
            self.needs_another |= victim.is_growing
            why = mine if victim in own else _why_it_leaves(victim, lease)
            self._changes.begin_suspend(victim, *why, beneficiary=lease)
            self._capacity.refresh(victim.device_ids)

    def _make_room(self, lease: Lease, plan: Plan) -> None:
        need_mib = _needs(lease)
        self._plans += 1
        self._capacity.promise(plan, need_mib, firm=self._is_owed(lease))
        if lease.is_growing:
            self._capacity.protect(lease)
        self._kept.update((lease.lease_id, device_id) for device_id in plan.device_ids)
        victims = tuple(victim.lease_id for victim in plan.victims)
        preempts = any(victim.is_working for victim in plan.victims)
        for victim in plan.victims:
            if not self._changes.channel_free:
                break
            self.needs_another |= victim.is_growing  # room was kept for it where it was
            if not self._migrations.move_aside(victim, lease):
                self._changes.begin_suspend(victim, *_why_it_leaves(victim, lease), beneficiary=lease)
            self._capacity.suspend_begun(victim)
            self._promised.append(lease)
        what = "a busy kernel has to make room" if preempts else _IDLE_MAKES_ROOM
        self._record_reason(lease, Reason("wait.making-room", what, victims))

    def _record_reason(self, lease: Lease, wait: Reason | None, devices: tuple[str, ...] = ()) -> None:
        """Note why a ticket that was looked at by itself waits; a new kind of reason is a line of its story."""
        ticket = _ticket(lease)
        if wait is not None:
            ticket.wait, ticket.wait_pass = wait, self._books.passes
            self._changes.record_wait_reason(lease, wait)
        elif lease.bucket is not None and ticket.reason != reason_code(
            self._books, lease, devices, lease.bucket.key.need_mib
        ):
            self._queue.unexplained[lease.lease_id] = lease

    # -- law 4 -----------------------------------------------------------------------------------------------------------

    def _is_owed(self, lease: Lease) -> bool:
        return (lease.bucket is not None and lease.bucket.key.room_kept) or lease.lease_id in self._overdue

    def _keep_waiting(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> bool:
        """The ticket waits; one that was passed over too often keeps room. Returns whether others of its bucket may keep some, too."""
        if not self._is_owed(lease):
            return False
        self._keep_what_is_due(lease, ticket, devices)
        self._gather_kept_room(lease, ticket)
        self._owed += 1
        return bool(self._owed % _OWED_AT_A_TIME) or not self._capacity.is_exhausted(devices)

    def _gather_kept_room(self, lease: Lease, ticket: Ticket) -> None:
        """Have idle neighbours of the room that is kept for a ticket step aside one by one: they may never be idle all at once.

        Only where the room would suffice if everybody did who can.
        """
        if len(ticket.kept_on) < lease.count or not self._changes.channel_free:
            return
        need_mib = _needs(lease)
        victims: list[str] = []
        for device_id in ticket.kept_on:
            if not self._capacity.could_serve(device_id, need_mib, lease):
                continue
            for victim in self._capacity.victims_for_kept_room(device_id, need_mib, lease):
                if self._changes.channel_free and victim.host_need_mib <= self._books.host_left_mib:
                    why = f"idle, and {format_memory(need_mib)} are gathered for {name_for(victim, lease)}"
                    self.needs_another |= victim.is_growing
                    self._changes.begin_suspend(victim, "suspend.needed-by", why, beneficiary=lease)
                    self._capacity.refresh(victim.device_ids)
                    victims.append(victim.lease_id)
            if lease.is_growing and (leaving := self._capacity.suspending_leases(device_id)):
                self._capacity.protect(lease)
                victims += [lease_id for lease_id in leaving if lease_id not in victims]
        if victims:
            self._record_reason(lease, Reason("wait.making-room", _IDLE_MAKES_ROOM, tuple(victims)))

    def _count_passed_over(self, winner: Lease, winning: Ticket, device_ids: tuple[str, ...], *, urgent: bool) -> None:
        """Count it for everybody who could have used the room that was just given away, finds none there now, and came earlier."""
        behind: list[Lease] = []
        for bucket in self._deprived_buckets(winner, device_ids):
            devices = allowed_devices(self._books, bucket.members[0])
            for lease in bucket.members:
                if not self._came_before(bucket, lease, winner, winning):
                    break
                if not self._add_passed_over(lease, _ticket(lease)):
                    continue
                if urgent and lease.lease_id not in self._visited:
                    behind.append(lease)
                else:
                    self._keep_what_is_due(lease, _ticket(lease), devices)
        for lease in (
            behind
        ):  # an urgent ticket, or one that was owed more, went before them: from now on they go before the urgent
            self._queue.rebucket(lease)
            self._order_changed = True

    def _deprived_buckets(self, winner: Lease, device_ids: tuple[str, ...]) -> list[Bucket]:
        """Return whose tickets could have used the room that was just given away, and find none there now."""
        left_mib = {device_id: self._books.devices[device_id].free_mib for device_id in device_ids}
        least_mib, found = min(left_mib.values()), list[Bucket]()
        shapes = [next(iter(shape.buckets.values())) for shape in self._queue.shapes.values()]
        for bucket in [*self._queue.unshaped.values(), *shapes]:
            key = bucket.key
            if key.priority < winner.spec.priority or key.need_mib <= least_mib or key.targets:
                continue
            if key.milli and over_limit(self._books, bucket.members[0], key.milli) is not None:
                continue
            devices = allowed_devices(self._books, bucket.members[0])
            for one in device_ids:
                if left_mib[one] < key.need_mib and one in devices:
                    found += [bucket] if bucket.shape is None else bucket.shape.buckets.values()
                    break
        return sorted(found, key=lambda bucket: bucket.number)

    def _came_before(self, bucket: Bucket, lease: Lease, winner: Lease, winning: Ticket) -> bool:
        if bucket.shape is not None and lease is bucket.members[0]:
            return self._first_turn(bucket) <= self._turn_now
        if bucket.key.fair:
            return self._turn(bucket, lease) <= self._turn_now
        return bucket.key.priority > winner.spec.priority or _ticket(lease).order < winning.order

    def _add_passed_over(self, lease: Lease, ticket: Ticket) -> bool:
        """Count one more; return whether that is as often as a ticket may be passed over."""
        most = self._books.policy(lease).max_passed_over
        if ticket.passed_over < most:
            ticket.passed_over += 1
            if ticket.passed_over == most:
                self._overdue[lease.lease_id] = lease
        else:
            ticket.passed_over_elsewhere += 1
        return ticket.passed_over >= most

    def _keep_what_is_due(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> None:
        """Keep room where a ticket that was passed over K times needs it, and on one more device for every K times since.

        The devices stay the same while they can serve, so that the room there can grow to what is needed.
        """
        need_mib, room = _needs(lease), self._capacity
        due = lease.count + ticket.passed_over_elsewhere // max(1, self._books.policy(lease).max_passed_over)
        if len(ticket.kept_on) == due and all(
            room.can_ever_serve(one, need_mib) and one in devices for one in ticket.kept_on
        ):
            for device_id in ticket.kept_on:
                self._keep(lease, device_id)
            return
        able = [device_id for device_id in devices if self._capacity.closest_device([device_id], need_mib) is not None]
        if len(able) < lease.count:  # not all that it needs can serve it now: what is kept on some would be of no use
            able = []
        promised = [device_id for device_id in able if (lease.lease_id, device_id) in self._kept]
        kept = list(dict.fromkeys([*(device_id for device_id in ticket.kept_on if device_id in able), *promised]))[:due]
        while len(kept) < due:
            nearest = self._capacity.closest_device(
                [device_id for device_id in able if device_id not in kept], need_mib
            )
            if nearest is None:
                break
            kept.append(nearest)
        ticket.kept_on = tuple(kept)
        for device_id in kept:
            self._keep(lease, device_id)

    def _keep(self, lease: Lease, device_id: str) -> None:
        self._keep_for(lease, device_id, _needs(lease))

    def _keep_for(self, lease: Lease, device_id: str, need_mib: int) -> None:
        if device_id in self._books.devices and (lease.lease_id, device_id) not in self._kept:
            self._kept.add((lease.lease_id, device_id))
            self._capacity.keep(device_id, need_mib)

    def _unkeep(self, lease: Lease, device_id: str) -> None:
        if (lease.lease_id, device_id) in self._kept:
            self._kept.discard((lease.lease_id, device_id))
            self._capacity.keep(device_id, -kept_mib(lease))


def _ticket(lease: Lease) -> Ticket:
    if lease.ticket is None:
        raise ValueError(f"lease {lease.lease_id} has no ticket")
    return lease.ticket


def _order(lease: Lease) -> int:
    return _ticket(lease).order


def _why_it_leaves(victim: Lease, lease: Lease) -> tuple[str, str]:
    need, who = format_memory(_needs(lease)), name_for(victim, lease)
    if victim.gate.ticket is not None:
        return "suspend.needed-by", f"between two cells, and {who} needed {need} before the next one"
    if not victim.busy:
        return "suspend.needed-by", f"idle, and {who} needs {need}"
    right = "has a higher priority" if victim.spec.priority < lease.spec.priority else "has had less than its share"
    return "suspend.preempted", f"{who} {right} and needs {need}"


def _needs(lease: Lease) -> int:
    """What the ticket takes on each device, MiB."""
    return lease.bucket.key.need_mib if lease.bucket is not None else lease.need_mib
