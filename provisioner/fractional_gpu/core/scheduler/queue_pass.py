"""One pass over the queue: tickets are served in order, bucket by bucket.

**What can happen to a ticket.** A ticket that fits is granted. One that does not, but would if idle leases left (or, where the pool
preempts, busy ones), makes them leave, and the room they free is promised to it. One that would not fit even then waits, and no lease is
suspended for it in vain (law 3); it may close the gates of busy leases, which then leave at the end of their cells (`yielding`). A later
ticket may overtake one that cannot be served, but at most K times; from then on room is kept for that one (law 4, `KeptRoom`).

**Buckets.** The tickets of a bucket have the same need, may go to the same devices and count against the same limits. `capacity` only
shrinks during a pass, so if one ticket of a bucket finds no room, none behind it does: the bucket is closed for this pass, and so is
every bucket of its family with a larger need. The reasons why those tickets wait are computed when they are read (`wait_reasons`).
A pass visits the next ticket of each bucket by its turn (`queue`), from a heap.

**Shapes.** In a pool that shares by virtual time each owner has buckets of its own, so there may be thousands. Most of the time the swap
channel is in use, and the pass could begin nothing for any of them. Buckets that differ only in their owner have a common shape; where
the order of visits cannot matter, the pass notes the outcome once per shape instead of visiting each bucket.

**When room grows.** Some steps give room back in the middle of a pass (a lease that grew left, a share became free, a kept place was given
up). Tickets that were visited before might fit now, so the pass asks for another one (`needs_another`). If a ticket moves ahead of its
turn, the heap is built anew; tickets that were visited are not visited again.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise

from fractional_gpu.core.books.records import Bucket, BucketKey, BucketShape, Lease, Reason, Ticket
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.handlers.resize import Resizer
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.admission import over_limit, victims_of_same_user
from fractional_gpu.core.rules.fairness import (
    BEFORE_SHARES,
    Turn,
    TurnOrder,
    order_of,
    overtakes_at_ms,
    patience_ms,
    ticket_of,
)
from fractional_gpu.core.rules.wait_reasons import allowed_devices, name_for, reason_code, wait_reason
from fractional_gpu.core.scheduler.capacity import Capacity, Plan
from fractional_gpu.core.scheduler.migration import KeptRoom, Migrations, ticket_need_mib
from fractional_gpu.core.scheduler.victims import Victims
from fractional_gpu.core.scheduler.yielding import CellYields
from fractional_gpu.core.units import format_memory

_MOST_PLANS = 2  # tickets ahead that are promised room while no swap can begin anyway
_CHANNEL_IN_USE = Reason("wait.swap-channel", "other kernels are being moved first, one after another")
_IDLE_MAKES_ROOM = "an idle kernel is being suspended to make room"
_KEEPERS_BETWEEN_CHECKS = 8  # tickets of a bucket that keep room before the pass checks whether any is left


class QueuePass:
    """One pass. What it promises to a ticket counts against all tickets behind."""

    def __init__(self, changes: Changes, resizer: Resizer) -> None:
        self._changes = changes
        self._resizer = resizer
        self._books = changes.books
        self._queue = changes.books.queue
        self._victims = Victims(changes.books)
        self._capacity = Capacity(changes.books, self._victims)
        self._migrations = Migrations(changes, self._capacity, self._victims)
        self._cell_yields = CellYields(changes, self._capacity, self._victims)
        self._order = TurnOrder(changes.books)
        self._kept = KeptRoom(changes.books, self._capacity)
        self._promised: list[Lease] = []  # leases that other leases begin to leave for
        self._unservable_mib: dict[tuple[object, ...], int] = {}  # by family: a need that found no room
        self._overdue: dict[str, Lease] = {}  # leases that were passed over K times, the last time in this pass
        self._visited: set[str] = set()
        self._order_changed = False  # a ticket comes earlier than when the heap was built
        self._turn_now: tuple[int, ...] = ()
        self._by_share: list[tuple[tuple[int, ...], Lease]] = []  # leases whose turn came by virtual time, in order
        self._plans = self._keepers = 0
        self._unshaped = 0  # of the turns to come, those of buckets without a shape
        self._known = 0  # buckets from this number on were created during the pass
        self._unskippable_version = -1  # of the capacity, when the rest could not be skipped
        self.needs_another = False  # see the module

    @property
    def expected_victims(self) -> set[str]:
        """Idle leases whose room was promised to tickets, or would have been with more host memory."""
        return self._capacity.planned | self._capacity.short_of_host_memory

    @property
    def short_of_host_memory(self) -> set[str]:
        """Leases that would leave if there were more host memory, or if they had less to save."""
        return self._capacity.short_of_host_memory

    @property
    def recheck_ms(self) -> int | None:
        """When time alone may change a decision of this pass."""
        return self._victims.recheck_ms

    def settle_gates(self) -> None:
        """Close and open gates as the pass found right. Called for the last pass of an event."""
        self._cell_yields.settle()

    def serve(self) -> None:
        """Visit every ticket that may be served, once, in order."""
        turns = self._begin()
        while turns:
            self._turn_now, cursor, bucket = heappop(turns)
            self._unshaped -= bucket.shape is None
            if cursor >= len(bucket.members):
                bucket.exhausted_in_pass = self._books.passes
                continue
            if bucket.shape is not None and not self._changes.channel_free and self._skip_rest():
                break
            lease = bucket.members[cursor]
            if bucket.key.fair:
                self._by_share.append((self._turn_now[:BEFORE_SHARES], lease))
            goes_on = lease.lease_id in self._visited or self._visit(bucket, lease)
            if not self._order_changed:  # else the visit may have been cut short, and is repeated in the new order
                self._visited.add(lease.lease_id)
            if lease.bucket is bucket:  # a lease that was served has left the bucket, and the next one has its place
                cursor += 1
            if self._order_changed:
                turns, self._order_changed = self._turns(list(self._queue.buckets.values())), False
                # One more than there are, so that the rest is never skipped: visited tickets are passed one by one.
                self._by_share, self._unshaped = [], len(turns) + 1
            elif not goes_on:
                bucket.closed_in_pass = self._books.passes
            elif cursor < len(bucket.members):
                heappush(turns, (self._order.turn(bucket, bucket.members[cursor]), cursor, bucket))
                self._unshaped += bucket.shape is None
            else:
                bucket.exhausted_in_pass = self._books.passes
        self._rebucket_overdue()
        self._mark_due_by_promise()
        self._cell_yields.choose_openings()
        self._recheck_at_overtaking()
        self._record_new_reasons()

    # -- before the visits -----------------------------------------------------------------------------------------------

    def _begin(self) -> list[Turn]:
        self._books.passes += 1
        self._mark_due_by_wait()
        buckets = list(self._queue.buckets.values())
        if self._queue.urgent:
            self._order.find_urgent(buckets)
        for mover in self._books.moving.values():
            self._kept.keep_targets(mover)
        self._known = self._queue.created
        if self._nothing_can_begin():
            buckets = [one for one in buckets if one.shape is None and not self._close_unvisited(one)]
            self._skip_shapes(self._queue.shapes.values())
        return self._turns(buckets)

    def _turns(self, buckets: list[Bucket]) -> list[Turn]:
        self._known = self._queue.created
        self._unshaped = sum([bucket.shape is None for bucket in buckets])
        return self._order.turns(buckets)

    def _mark_due_by_wait(self) -> None:
        """Mark tickets due that waited longer than their shares explain; room is kept, as neighbours may never all be gone at once."""
        now_ms, first_ms = self._books.now_ms, 0
        for bucket in list(self._queue.buckets.values()):
            key = bucket.key
            if not key.fair or key.due or key.pool not in self._books.pools:
                continue  # without its pool a ticket waits for the pool's configuration, not for other leases
            while bucket.due_ms <= now_ms and bucket.members:
                lease = min(bucket.members, key=order_of)
                ticket = ticket_of(lease)
                # The estimate is renewed only when its time has come: shares, and with them the patience, change meanwhile.
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

    # -- tickets that need no visit --------------------------------------------------------------------------------------

    def _nothing_can_begin(self) -> bool:
        """Return whether no swap can begin and no room is free, so that the order of visits does not matter."""
        books = self._books
        if self._changes.channel_free or self._queue.urgent or books.moving:
            return False
        return not self._capacity.any_free(books.devices)

    def _close_unvisited(self, bucket: Bucket) -> bool:
        """Close a bucket that can only wait, where nothing can begin, as `_visit` would at a higher cost; return whether it is one."""
        key, lease = bucket.key, bucket.members[0]
        if key.room_kept or key.targets or key.milli or not key.need_mib or lease.lease_id in self._overdue:
            return False
        if not key.paused:
            devices = allowed_devices(self._books, lease)
            if self._capacity.idle_could_free(devices, key.need_mib):
                bucket.wait, bucket.wait_pass = _CHANNEL_IN_USE, self._books.passes
        bucket.closed_in_pass = self._books.passes
        return True

    def _skip_rest(self) -> bool:
        """Skip all tickets to come if they can only wait for the swap channel; return whether that is so."""
        if self._unshaped or self._overdue or self._order.has_urgent:
            return False
        if self._unskippable_version == self._capacity.version:
            return False  # nothing has changed since the last attempt
        shapes = self._queue.shapes.values()
        if not all(map(self._only_awaits_channel, shapes)):
            self._unskippable_version = self._capacity.version
            return False
        passes = self._books.passes
        for family, need_mib in self._unservable_mib.items():
            for other in self._queue.buckets_of(family):
                too_large = other.key.need_mib >= need_mib and other.number < self._known
                if too_large and other.exhausted_in_pass != passes:
                    other.closed_in_pass = passes
        self._skip_shapes(shapes)
        return True

    def _only_awaits_channel(self, shape: BucketShape) -> bool:
        """Return whether nothing can begin, or be kept, for any ticket of a shape before other swaps have ended."""
        devices, key = self._devices_of(shape)
        if not self._capacity.any_free(devices):
            return True
        return (
            self._plans >= _MOST_PLANS and key.devices == 1 and not self._capacity.fits_somewhere(devices, key.need_mib)
        )

    def _skip_shapes(self, shapes: Iterable[BucketShape]) -> None:
        """Note that all buckets of the shapes that were not visited wait for the swap channel."""
        for shape in shapes:
            devices, key = self._devices_of(shape)
            shape.skipped_in_pass, shape.first_unskipped = self._books.passes, self._known
            shape.wait = _CHANNEL_IN_USE if self._capacity.idle_could_free(devices, key.need_mib) else None

    def _devices_of(self, shape: BucketShape) -> tuple[tuple[str, ...], BucketKey]:
        one = next(iter(shape.buckets.values()))
        if shape.devices is None:
            shape.devices = allowed_devices(self._books, one.members[0])
        return shape.devices, one.key

    # -- after the visits ------------------------------------------------------------------------------------------------

    def _rebucket_overdue(self) -> None:
        for lease in self._overdue.values():
            self._queue.rebucket(lease)
            if lease.bucket is not None:
                self._keep_waiting(lease, ticket_of(lease), allowed_devices(self._books, lease))

    def _mark_due_by_promise(self) -> None:
        """Mark tickets due that leases begin to leave for: one that leaves would often precede the ticket again by its virtual time."""
        for lease in self._promised:
            if lease.ticket is not None and not lease.ticket.is_due and self._books.shares_by_time(lease):
                lease.ticket.is_due = True
                self._queue.rebucket(lease)

    def _recheck_at_overtaking(self) -> None:
        """Ask for a pass when the virtual time of a waiting ticket overtakes that of the next one: then that one may fit."""
        if not self._changes.channel_free:
            return
        waiting = [one for one in self._by_share if one[1].bucket is not None]
        for (rank, first), (next_rank, second) in pairwise(waiting):
            at_ms = overtakes_at_ms(self._books, first, second) if rank == next_rank else None
            if at_ms is not None:
                self._victims.recheck_at(at_ms)

    def _record_new_reasons(self) -> None:
        """Write the reasons of tickets that are new, or wait for something else than before, into their stories."""
        unexplained, self._queue.unexplained = list(self._queue.unexplained.values()), {}
        for lease in unexplained:
            if lease.ticket is not None:
                self._changes.record_wait_reason(lease, wait_reason(self._books, lease, lease.ticket))

    # -- one ticket ------------------------------------------------------------------------------------------------------

    def _visit(self, bucket: Bucket, lease: Lease) -> bool:
        """Serve one ticket as far as possible. Returns whether to go on with the bucket."""
        ticket, key = ticket_of(lease), bucket.key
        devices = allowed_devices(self._books, lease)
        over = over_limit(self._books, lease, key.milli) if key.milli else None
        if key.targets:
            return self._arrive_at_targets(lease, ticket, key.targets, over)
        if over is not None:
            self._free_own_share(bucket, lease, over)
            return False
        # A bucket of the same family with a smaller need has found no room in this pass, so this one finds none.
        if key.paused or key.need_mib >= self._unservable_mib.get(bucket.family, key.need_mib + 1):
            return self._keep_waiting(lease, ticket, devices)
        full = not self._capacity.any_free(devices)
        chosen = self._pick(lease, devices, key.need_mib) if not full or not key.need_mib else None
        if chosen is not None:
            return self._serve_at_once(lease, ticket, chosen)
        # While no swap can begin, a plan only promises room. That is worth its cost for the next few tickets.
        if not self._changes.channel_free and (full or self._plans >= _MOST_PLANS):
            return self._await_channel(bucket, lease, ticket, devices)
        return self._make_or_await_room(bucket, lease, ticket, devices)

    def _await_channel(self, bucket: Bucket, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> bool:
        """Leave a ticket for which nothing can begin before other swaps have ended. Returns whether to go on with the bucket."""
        if self._capacity.idle_could_free(devices, bucket.key.need_mib):
            bucket.wait, bucket.wait_pass = _CHANNEL_IN_USE, self._books.passes
        return self._keep_waiting(lease, ticket, devices)

    def _make_or_await_room(self, bucket: Bucket, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> bool:
        """Have room made for a ticket that fits nowhere now, if that helps. Returns whether to go on with the bucket."""
        key = bucket.key
        # In this order, least disruptive first: suspend idle leases (or preempt), move a busy lease elsewhere, move the growing
        # lease itself, ask busy leases to leave at the end of their cells.
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
        """Resume a moved lease on its targets, where room is kept for it; end the move if targets or limits forbid it by now."""
        there = allowed_devices(self._books, lease)
        if not over and all(one in there and self._books.devices[one].free_mib >= lease.need_mib for one in targets):
            if not self._changes.channel_free:
                self._record_reason(
                    lease, Reason("wait.swap-channel", "it is being moved; another kernel is moved before it")
                )
                return True
            self._grant(lease, targets)
            self._kept.release_targets(lease, targets)  # it has that room now
            self._capacity.refresh(targets)
            return True
        self._kept.release_targets(lease, targets)
        ticket.kept_on = ()
        self._books.set_target(lease, ())
        self._order_changed = True
        return True

    def _pick(self, lease: Lease, devices: tuple[str, ...], need_mib: int) -> tuple[str, ...] | None:
        """Return where the need fits now; saved state goes home if it can. A growing share alone needs no room."""
        if lease.is_growing:
            return devices if devices and (not need_mib or self._capacity.fits(devices, need_mib)) else None
        return self._capacity.pick_for(lease, devices, need_mib)

    def _serve_at_once(self, lease: Lease, ticket: Ticket, chosen: tuple[str, ...]) -> bool:
        """Serve a ticket that fits; one that needs the swap channel while it is in use keeps the room. Returns True."""
        if lease.state is LeaseState.SUSPENDED and not self._changes.channel_free:
            for device_id in chosen:
                self._kept.keep(lease, device_id)
            self._record_reason(lease, Reason("wait.swap-channel", "another kernel is being moved; this one is next"))
            return True
        urgent, held_mib = ticket.urgent or self._order.has_urgent, lease.held_mib
        # A ticket that preceded others only because an urgent one waited behind it has lost that place.
        self.needs_another |= ticket.urgent
        if ticket.resize_to is not None:
            milli = lease.milli
            self._resizer.grow_in_place(lease)
            # It may have grown its share and given memory back, or the other way round.
            self.needs_another |= lease.held_mib < held_mib or lease.milli < milli
            # Its user or group may have reached a limit by it: tickets of theirs that keep room must give that up.
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
        """If this grant brings the owner to its limit, another pass releases the room kept for its other tickets."""
        self.needs_another |= bool(self._kept) and lease.bucket is not None and bool(lease.bucket.key.milli)
        self._changes.grant(lease, device_ids)

    def _free_own_share(self, bucket: Bucket, lease: Lease, over: Reason) -> None:
        """Have idle leases of the same user (group), which is at its limit, leave for the ticket if it fits then."""
        bucket.wait, bucket.wait_pass = over, self._books.passes
        self._record_reason(lease, over)
        key, devices = bucket.key, allowed_devices(self._books, lease)
        own = victims_of_same_user(self._books, lease, key.milli, self._victims.recheck_at)
        if not own or key.paused:
            return
        fits = self._pick(lease, devices, key.need_mib)
        plan: Plan | Reason | None = Plan(fits, own) if fits is not None else None
        if plan is None:
            plan = self._capacity.plan(lease, devices, key.need_mib, key.devices, also=own)
        if not isinstance(plan, Plan) or self._capacity.short_of_host(plan) is not None:
            return
        for victim in plan.victims:
            if not self._may_begin(victim):
                break
            mine = "suspend.user-limit", f"idle, and its user needs its share for {name_for(victim, lease)}"
            self.needs_another |= victim.is_growing
            why = mine if victim in own else _why_it_leaves(victim, lease)
            self._changes.begin_suspend(victim, *why, beneficiary=lease)
            self._capacity.refresh(victim.device_ids)

    def _may_begin(self, victim: Lease) -> bool:
        """Return whether a planned suspend can begin now: a suspend begun before it may have its host memory, as margin, till its end."""
        return self._changes.channel_free and victim.host_need_mib <= self._books.host_left_mib

    def _make_room(self, lease: Lease, plan: Plan) -> None:
        """Promise the ticket the room of its plan, and begin the suspends (or moves) that swap channels are free for."""
        need_mib = ticket_need_mib(lease)
        self._plans += 1
        self._capacity.promise(plan, need_mib, firm=self._is_owed(lease))
        if lease.is_growing:
            self._capacity.protect(lease)
        self._kept.count_promised(lease, plan.device_ids)
        victims = tuple(victim.lease_id for victim in plan.victims)
        preempts = any(victim.is_working for victim in plan.victims)
        for victim in plan.victims:
            if not self._may_begin(victim):
                break
            self.needs_another |= victim.is_growing  # room was kept for it where it was
            if not preempts:  # else it would wait for busy leases anyway
                self._changes.idle_costs.saved_for_ticket(victim, ticket_of(lease))
            if not self._migrations.move_aside(victim, lease):
                self._changes.begin_suspend(victim, *_why_it_leaves(victim, lease), beneficiary=lease)
            self._capacity.suspend_begun(victim)
            self._promised.append(lease)
        what = "a busy kernel has to make room" if preempts else _IDLE_MAKES_ROOM
        self._record_reason(lease, Reason("wait.making-room", what, victims))

    def _record_reason(self, lease: Lease, wait: Reason | None, devices: tuple[str, ...] = ()) -> None:
        """Note why a ticket that was visited by itself waits; a new kind of reason becomes a line of its story."""
        ticket = ticket_of(lease)
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
        """Keep room for a waiting ticket that was passed over K times. Returns whether others of its bucket may keep some, too."""
        if not self._is_owed(lease):
            return False
        self._kept.keep_owed(lease, ticket, devices)
        self._gather_kept_room(lease, ticket)
        self._keepers += 1
        return bool(self._keepers % _KEEPERS_BETWEEN_CHECKS) or not self._capacity.is_exhausted(devices)

    def _gather_kept_room(self, lease: Lease, ticket: Ticket) -> None:
        """Have idle leases leave the devices where room is kept, one by one, where all that ever may leave would suffice."""
        if len(ticket.kept_on) < lease.count or not self._changes.channel_free:
            return
        need_mib = ticket_need_mib(lease)
        victims: list[str] = []
        for device_id in ticket.kept_on:
            if not self._capacity.could_serve(device_id, need_mib, lease):
                continue
            for victim in self._capacity.victims_for_kept_room(device_id, need_mib, lease):
                if self._may_begin(victim):
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
        """Count the grant for each earlier ticket that could have used the room and finds none there now."""
        behind: list[Lease] = []
        for bucket in self._deprived_buckets(winner, device_ids):
            devices = allowed_devices(self._books, bucket.members[0])
            for lease in bucket.members:
                if not self._came_before(bucket, lease, winner, winning):
                    break
                if not self._add_passed_over(lease, ticket_of(lease)):
                    continue
                if urgent and lease.lease_id not in self._visited:
                    behind.append(lease)
                else:
                    self._kept.keep_owed(lease, ticket_of(lease), devices)
        for lease in behind:  # urgent tickets went first so far; tickets that keep room precede those from now on
            self._queue.rebucket(lease)
            self._order_changed = True

    def _deprived_buckets(self, winner: Lease, device_ids: tuple[str, ...]) -> list[Bucket]:
        """Return the buckets whose tickets could have used the granted room and find none there now, in order of creation."""
        left_mib = {device_id: self._books.devices[device_id].free_mib for device_id in device_ids}
        # Buckets of one shape have the same need and devices: one of them answers for all.
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
            return self._order.first_turn(bucket) <= self._turn_now
        if bucket.key.fair:
            return self._order.turn(bucket, lease) <= self._turn_now
        return bucket.key.priority > winner.spec.priority or ticket_of(lease).order < winning.order

    def _add_passed_over(self, lease: Lease, ticket: Ticket) -> bool:
        """Count one more; return whether the ticket was passed over as often as the pool allows."""
        most = self._books.policy(lease).max_passed_over
        ticket.passed_over += 1
        if ticket.passed_over == most:
            self._overdue[lease.lease_id] = lease
        return ticket.passed_over >= most


def _why_it_leaves(victim: Lease, lease: Lease) -> tuple[str, str]:
    need, who = format_memory(ticket_need_mib(lease)), name_for(victim, lease)
    if victim.gate.ticket is not None:
        return "suspend.needed-by", f"between two cells, and {who} needed {need} before the next one"
    if not victim.busy:
        return "suspend.needed-by", f"idle, and {who} needs {need}"
    right = "has a higher priority" if victim.spec.priority < lease.spec.priority else "has had less than its share"
    return "suspend.preempted", f"{who} {right} and needs {need}"
