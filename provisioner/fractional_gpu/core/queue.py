"""Who is served next: one pass over the queue visits every ticket that waits for room once, in the order of its turn.

`Turns` has the order, `QueuePass._visit` the cases. If a ticket would not fit even if all leases left that may, it waits, and no lease is
suspended in vain (law 3). A ticket that cannot be served may be overtaken at most K times; then room is kept for it (law 4).

**Patience.** Virtual time alone does not bound a wait: an owner's small lease may use up the owner's share for ever while a large one
waits. So a ticket that has waited twice as long as its share explains (`patience_ms`) is due: it precedes all tickets that are not, and
preempts whatever the virtual times are.

**Room at the end of a cell.** A kernel that runs one cell after another is never idle for long, and still makes room, whatever the pool's
`preempt` policy. If idle leases cannot make room for a ticket, the pass closes the gates of busy leases whose leaving would let it in:

- A lease is asked only after its minimum residency, for a ticket of at least its own priority, and not while it is pinned or after a
  failed suspend. The running cell continues.
- Its next cell asks before it runs, and queues behind the ticket. Until it is let in, its kernel runs nothing, so the lease can be
  suspended at once like an idle one.
- If several leases have to leave, the first to end its cell waits for the others, but only for as long as its own swap takes, or a second
  if longer (`gate_opens_ms`): another may run a cell that never ends. It is not asked again before another minimum residency has passed.

A pass only chooses gates; the last pass of an event carries its choice out (`settle_gates`), because an earlier pass may ask for room that
the same event frees later. Some steps free room in the middle of a pass, so tickets visited before might fit now: then the pass asks for
another (`needs_another`).
"""

from collections.abc import Iterable

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.idle import saved_for_ticket
from fractional_gpu.core.limits import added_milli, over_limit, victims_of_same_user
from fractional_gpu.core.model import LeaseState, QueueDelay
from fractional_gpu.core.move import Migrations, kept_mib
from fractional_gpu.core.place import allowed_devices
from fractional_gpu.core.resize import Resizer
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, OccupancyKind, Reason, Ticket
from fractional_gpu.core.suspend import Capacity, Plan, gate_opens_ms, residency_ms, swap_ms
from fractional_gpu.core.units import format_memory
from fractional_gpu.core.words import name_for, wait_code, wait_reason

_MOST_PLANS = 2  # tickets ahead that are promised room while no swap can begin anyway
_CHANNEL_IN_USE = Reason("wait.swap-channel", "other kernels are being moved first, one after another")
_IDLE_MAKES_ROOM = "an idle kernel is being suspended to make room"
_FIRST, _DUE, _USUAL = range(3)


def patience_ms(books: Books, lease: Lease) -> int:
    """Return how long a ticket of a pool that shares by virtual time waits before it is due, ms.

    That is twice what its share explains: a turn of one lease of its size, plus the swap, divided by its owner's part of the pool and by
    the lease's part of its owner's, according to the weights of contenders.
    """
    pool = books.policy(lease)
    name = next((books.devices[one].spec.name for one in pool.devices if one in books.devices), "")
    mib = lease.need_mib * lease.count
    swap = books.forecasts.swap_ms(SUSPEND, name, mib) + books.forecasts.swap_ms(RESUME, name, mib)
    turn_ms = max(1, pool.min_residency_ms, pool.min_residency_swaps_milli * swap // 1000) + swap
    owners, own = books.accounts.contending_weights(lease)
    account = books.accounts.of(lease)
    return -(-2 * turn_ms * owners * own // (max(1, account.weight) * max(1, lease.spec.weight)))


def queue_delay(books: Books, pool_name: str) -> QueueDelay:
    """Return how long the pool's tickets have waited, as of `books.now_ms`. Leases being resumed no longer wait.

    A ticket is over its bound if it has waited longer than its patience plus a turn and a swap for each lease of the pool that has or wants
    a device. Pools that do not share by virtual time bound no wait, so they have no such tickets.
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


class Turns:
    """The order in which a pass serves the tickets that wait for room:

    1. Leases on their way to another device.
    2. Higher priorities.
    3. Urgent tickets, and older ones for which room is kept.
    4. Due tickets: leases leave for them, or they have waited for twice what their share explains.
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


class QueuePass:
    """One pass. What it promises to a ticket counts against all later ones."""

    def __init__(self, changes: Changes, resizer: Resizer) -> None:
        self._changes = changes
        self._resizer = resizer
        self._books = changes.books
        self.capacity = Capacity(changes.books)
        self._migrations = Migrations(changes, self.capacity)
        self._line: list[Lease] = []  # all that waited for room at the beginning, by their turns
        self._visited: set[str] = set()
        self._unservable: dict[tuple[object, ...], tuple[int, Reason | None]] = {}  # a need that found no room, and why
        self._plans = 0
        self._overdue: list[Lease] = []  # leases that were passed over K times, the last time in this pass
        self._promised: list[Lease] = []  # leases that other leases begin to leave for
        self._closes: list[Lease] = []  # gates
        self._opens: list[Lease] = []
        self.needs_another = False  # room was given back

    def serve(self) -> None:
        """Visit every ticket that may be served, once, in order."""
        books = self._books
        waiting = list(books.waiting.values())
        self._line = [lease for lease in waiting if lease.waits_for_room]
        for lease in waiting:
            ticket_of(lease).wait = None
            if not lease.waits_for_room and not lease.target_ids:
                ticket_of(lease).kept_on = ()
        self._mark_due_by_wait()
        for mover in waiting:
            if mover.state is not LeaseState.RESUMING:  # else it has that room
                for device_id in mover.target_ids:
                    self.capacity.keep(mover, device_id, kept_mib(mover))
        to_visit = self._by_turn()
        while to_visit:
            lease = to_visit.pop(0)
            if not lease.waits_for_room:
                continue  # it has left for another one
            self._visited.add(lease.lease_id)
            if self._visit(lease, ticket_of(lease)):  # the order has changed
                to_visit = [one for one in self._by_turn() if one.lease_id not in self._visited]
        for lease in self._overdue:
            if lease.waits_for_room:
                self._keep_waiting(lease, ticket_of(lease), allowed_devices(books, lease))
        for lease in waiting:
            if lease.ticket is not None and books.shares_by_time(lease):
                # A promise ends when another ticket has taken the room; while no channel is free, the pass did not look that far.
                stands = lease.ticket.wait is not None and lease.ticket.wait.code == "wait.making-room"
                stands |= not self._changes.channel_free
                lease.ticket.is_promised = stands and (lease.ticket.is_promised or lease in self._promised)
        self._choose_openings()
        for lease in waiting:
            if lease.ticket is not None:
                self._explain(lease, lease.ticket)

    def _by_turn(self) -> list[Lease]:
        self._line = [lease for lease in self._line if lease.waits_for_room]
        self._line.sort(key=Turns(self._books, self._line).turn)
        return self._line.copy()

    def _mark_due_by_wait(self) -> None:
        """Mark as due tickets that waited longer than their shares explain, in pools that share by virtual time.

        Room is kept for them, too: neighbours that leave and come back one by one would never all be gone at once.
        """
        books = self._books
        for lease in self._line:
            ticket, pool = ticket_of(lease), books.policy(lease)
            if ticket.waited_long or not pool.preempt_equals or lease.spec.pool not in books.pools:
                continue  # without its pool a ticket waits for the pool's configuration, not for other leases
            # The estimate is renewed only when its time has come: shares, and with them the patience, change.
            if ticket.due_ms <= books.now_ms:
                ticket.due_ms = ticket.asked_ms + patience_ms(books, lease)
            if ticket.due_ms > books.now_ms:
                self._books.recheck_at(ticket.due_ms)
            else:
                ticket.waited_long = True
                ticket.passed_over = max(ticket.passed_over, pool.max_passed_over)

    # -- one ticket ------------------------------------------------------------------------------------------------------

    def _visit(self, lease: Lease, ticket: Ticket) -> bool:
        """Serve one ticket as far as possible. Returns whether the order of the tickets behind has changed.

        The first of these cases that holds:

        1. It is on its way to devices where room is kept for it: it arrives, or the move ends.
        2. Its user or group is at its limit: idle leases of the same user leave, if it fits then.
        3. Its resume pauses after a failure, or a ticket like it with no larger need has found no room: it waits.
        4. It fits: it is served.
        5. No swap can begin: it waits for a swap channel.
        6. It fits if others leave: idle leases, or those it preempts, or a busy one that fits elsewhere.
        7. It is to grow, and is idle: it goes where it can.
        8. It waits, and asks busy leases to leave at the end of their cells.

        In 3, 5, 6 and 8 room is kept for a ticket that was passed over K times. In 5 the first few are promised room.
        """
        books, capacity = self._books, self.capacity
        devices, need_mib, milli = allowed_devices(books, lease), lease.ask_mib, added_milli(books, lease)
        over = over_limit(books, lease, milli) if milli else None
        if lease.target_ids:
            return self._arrive_at_targets(lease, ticket, devices, over)
        if over is not None:
            self._free_own_share(lease, devices, milli, over)
            return False

        is_paused = lease.retries.resume_after_ms > books.now_ms
        like = (devices, lease.count, lease.spec.pool, lease.spec.priority, self._competes_as(lease, milli))
        unservable_mib, why = self._unservable.get(like, (need_mib + 1, None))
        if is_paused or need_mib >= unservable_mib:
            ticket.wait = None if is_paused else why
            self._keep_waiting(lease, ticket, devices)
            return False

        chosen = self._pick(lease, devices, need_mib)
        if chosen is not None:
            return self._serve_at_once(lease, ticket, chosen)

        full = not any(capacity.free_mib(device_id) > 0 for device_id in devices)
        if not self._changes.channel_free and (full or self._plans >= _MOST_PLANS):
            ticket.wait = _CHANNEL_IN_USE if capacity.idle_could_free(devices, need_mib) else None
            self._keep_waiting(lease, ticket, devices)
            return False

        plan = capacity.plan(lease, devices, need_mib)
        if plan is None and not lease.is_growing:
            plan = self._migrations.plan_busy_move(lease, devices, need_mib)
        if isinstance(plan, Plan):
            self._make_room(lease, ticket, plan)
            self._keep_waiting(lease, ticket, devices)
            return False

        if ticket.resize_to is not None and self._migrations.move_to_grow(lease, ticket.resize_to):
            return False

        if plan is None:
            self._ask_to_yield(lease, devices, need_mib)
        self._unservable[like] = need_mib, plan
        ticket.wait = plan
        self._keep_waiting(lease, ticket, devices)
        return False

    def _competes_as(self, lease: Lease, milli: int) -> tuple[object, ...]:
        """Return what decides, besides its need and devices, which leases leave for a ticket."""
        if lease.is_growing:
            return (lease.lease_id,)
        by_owner = milli or self._books.shares_by_time(lease)
        return (lease.spec.owner, lease.spec.group, milli) if by_owner else ()

    def _pick(self, lease: Lease, devices: tuple[str, ...], need_mib: int) -> tuple[str, ...] | None:
        """Return where the need fits now; saved state goes home if it can. To grow a share needs no room."""
        if lease.is_growing:
            return devices if devices and (not need_mib or self.capacity.fits(devices, need_mib)) else None
        return self.capacity.pick_for(lease, devices, need_mib)

    def _arrive_at_targets(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...], over: Reason | None) -> bool:
        """Resume a moved lease on its targets, where room is kept for it; end the move if targets or limits now forbid it."""
        targets = lease.target_ids
        if over or not all(one in devices and self._books.devices[one].free_mib >= lease.need_mib for one in targets):
            self.capacity.release(lease, targets)
            ticket.kept_on = ()
            lease.target_ids = ()
            self._visited.discard(lease.lease_id)  # from now on it is a ticket like any other
            return True
        if self._changes.channel_free:
            self._grant(lease, targets)
            self.capacity.release(lease, targets)  # it has that room now
        else:
            sentence = "it is being moved; another kernel is moved before it"
            self._tell(lease, ticket, Reason("wait.swap-channel", sentence))
        return False

    def _serve_at_once(self, lease: Lease, ticket: Ticket, chosen: tuple[str, ...]) -> bool:
        """Serve a ticket that fits; if it needs a swap channel and none is free, keep its room. Returns as `_visit`."""
        if lease.state is LeaseState.SUSPENDED and not self._changes.channel_free:
            for device_id in chosen:
                self.capacity.keep(lease, device_id, lease.ask_mib)
            sentence = "another kernel is being moved; this one is next"
            self._tell(lease, ticket, Reason("wait.swap-channel", sentence))
            return False
        held_mib, milli = lease.held_mib, lease.milli
        urgent_waits = any(ticket_of(one).urgent for one in self._line if one.waits_for_room)
        # A ticket that preceded others only because an urgent one waited behind it has lost that place.
        self.needs_another |= ticket.urgent
        if ticket.resize_to is None:
            self._grant(lease, chosen)
        else:
            self._resizer.grow_in_place(lease)
            # It may have grown its share and returned memory, or vice versa, and so reached a limit.
            gave_back = lease.held_mib < held_mib or lease.milli < milli
            reached_limit = lease.milli > milli and self.capacity.keeps_any
            self.needs_another |= gave_back or reached_limit or lease.is_growing
            if lease.is_growing:  # it lacks more now than when it asked
                return False
        return lease.held_mib > held_mib and self._count_passed_over(lease, ticket, chosen, urgent=urgent_waits)

    def _grant(self, lease: Lease, device_ids: tuple[str, ...]) -> None:
        """Grant the devices. If the owner reaches its limit, another pass frees room kept for its other tickets.

        Ask for another pass, too, if the lease was a stranger on its devices: it may have freed room there, and other tickets bound to them
        may need more or go elsewhere.
        """
        if lease.bound_ids or (self.capacity.keeps_any and added_milli(self._books, lease)):
            self.needs_another = True
        self._changes.grant(lease, device_ids)
        self.capacity.victims.forget(device_ids)

    def _free_own_share(self, lease: Lease, devices: tuple[str, ...], milli: int, over: Reason) -> None:
        """Suspend idle leases of the user (group), which is at its limit, if the ticket fits then."""
        self._tell(lease, ticket_of(lease), over)
        own = victims_of_same_user(self._books, lease, milli)
        if not own or lease.retries.resume_after_ms > self._books.now_ms:
            return
        fits = self._pick(lease, devices, lease.ask_mib)
        plan = Plan(fits, own) if fits is not None else self.capacity.plan(lease, devices, lease.ask_mib, also=own)
        if not isinstance(plan, Plan) or self.capacity.short_of_host(plan) is not None:
            return
        for victim in plan.victims:
            if not self._may_begin(victim):
                break
            mine = "suspend.user-limit", f"idle, and its user needs its share for {name_for(victim, lease)}"
            self._begin_suspend(victim, lease, mine if victim in own else _why_it_leaves(victim, lease))

    def _make_room(self, lease: Lease, ticket: Ticket, plan: Plan) -> None:
        """Promise the ticket the room of its plan, and begin the suspends (or moves) that swap channels are free for."""
        self._plans += 1
        self.capacity.promise(lease, plan, lease.ask_mib)
        if lease.is_growing:
            self.capacity.stays.add(lease.lease_id)
        preempts = any(victim.is_working for victim in plan.victims)
        for victim in plan.victims:
            if not self._may_begin(victim):
                break
            if not preempts:  # else it would wait for busy leases anyway
                saved_for_ticket(self._books, victim, ticket)
            if self._migrations.move_aside(victim, lease):
                self.needs_another |= victim.is_growing  # room was kept for it where it was
            else:
                self._begin_suspend(victim, lease, _why_it_leaves(victim, lease))
            self._promised.append(lease)
        what = "a busy kernel has to make room" if preempts else _IDLE_MAKES_ROOM
        self._tell(lease, ticket, Reason("wait.making-room", what, tuple(victim.lease_id for victim in plan.victims)))

    def _may_begin(self, victim: Lease) -> bool:
        """Return whether a planned suspend can begin now: the margin of an earlier one may hold its host memory until that ends."""
        return self._changes.channel_free and victim.host_need_mib <= self._books.host_left_mib

    def _begin_suspend(self, victim: Lease, lease: Lease, why: tuple[str, str]) -> None:
        self.needs_another |= victim.is_growing  # room was kept for it where it was
        self._changes.begin_suspend(victim, *why, beneficiary=lease)

    # -- law 4 -----------------------------------------------------------------------------------------------------------

    def _is_owed(self, lease: Lease) -> bool:
        return ticket_of(lease).passed_over >= self._books.policy(lease).max_passed_over

    def _keep_waiting(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> None:
        """Keep room for a waiting ticket that was passed over K times.

        Idle leases leave one by one, as they may never all be idle at once, but only where the room would suffice if every lease left that
        ever can.
        """
        if not self._is_owed(lease):
            return
        self._keep_owed(lease, ticket, devices)
        if len(ticket.kept_on) < lease.count or not self._changes.channel_free:
            return
        need_mib, blockers = lease.ask_mib, list[str]()
        for device_id in ticket.kept_on:
            if not self.capacity.could_serve(device_id, need_mib, lease):
                continue
            for victim in self.capacity.victims_for_kept_room(device_id, need_mib, lease):
                if self._may_begin(victim):
                    why = f"idle, and {format_memory(need_mib)} are gathered for {name_for(victim, lease)}"
                    self._begin_suspend(victim, lease, ("suspend.needed-by", why))
                    blockers.append(victim.lease_id)
            if lease.is_growing:
                there = self._books.holders(device_id)
                leaving = [other.lease_id for other in there if other.occupancy is OccupancyKind.SUSPENDING]
                if leaving:
                    self.capacity.stays.add(lease.lease_id)
                blockers += leaving
        if blockers:
            self._tell(lease, ticket, Reason("wait.making-room", _IDLE_MAKES_ROOM, tuple(dict.fromkeys(blockers))))

    def _keep_owed(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> None:
        """Keep room for a ticket that was passed over K times, and on one more device for every K times since."""
        most = self._books.policy(lease).max_passed_over
        number = lease.count + max(0, ticket.passed_over - most) // max(1, most)
        ticket.kept_on = self.capacity.devices_to_keep(lease, devices, lease.ask_mib, number)
        for device_id in ticket.kept_on:
            self.capacity.keep(lease, device_id, lease.ask_mib)

    def _count_passed_over(self, winner: Lease, winning: Ticket, device_ids: tuple[str, ...], *, urgent: bool) -> bool:
        """Count the grant for each earlier ticket that could have used the room and now finds none.

        Return whether any moves ahead. `urgent`: some ticket is urgent.
        """
        books, moves_ahead = self._books, False
        left_mib = {device_id: books.devices[device_id].free_mib for device_id in device_ids}
        for lease in self._line:
            if not lease.waits_for_room or lease.target_ids or lease.spec.priority < winner.spec.priority:
                continue
            if lease.ask_mib <= min(left_mib.values()) or not self._came_before(lease, winner, winning):
                continue
            devices, milli = allowed_devices(books, lease), added_milli(books, lease)
            if not any(one in devices and left_mib[one] < lease.ask_mib for one in device_ids):
                continue
            if milli and over_limit(books, lease, milli) is not None:
                continue
            ticket, most = ticket_of(lease), books.policy(lease).max_passed_over
            ticket.passed_over += 1
            if ticket.passed_over == most:
                self._overdue.append(lease)
            if ticket.passed_over < most:
                continue
            if lease.lease_id in self._visited:
                self._keep_owed(lease, ticket, devices)
            else:  # its visit keeps room; urgent tickets went first so far, and those that keep room precede them from now on
                moves_ahead |= urgent
        return moves_ahead

    def _came_before(self, lease: Lease, winner: Lease, winning: Ticket) -> bool:
        if self._books.shares_by_time(lease):
            return lease.lease_id in self._visited
        return lease.spec.priority > winner.spec.priority or ticket_of(lease).order < winning.order

    # -- room at the end of a cell ---------------------------------------------------------------------------------------

    def _ask_to_yield(self, lease: Lease, devices: tuple[str, ...], need_mib: int) -> None:
        """Choose leases that can make enough room for the ticket at the end of their cells, if any."""
        plan = self.capacity.plan(lease, devices, need_mib, between_cells=True)
        for victim in plan.victims if isinstance(plan, Plan) else ():
            self.capacity.asked_to_yield.add(victim.lease_id)
            if victim.occupancy is OccupancyKind.BUSY:
                self._closes.append(victim)

    def _choose_openings(self) -> None:
        """Choose the gates that no ticket needs closed, and those closed for too long."""
        if not self._changes.channel_free:
            return  # the pass did not look that far: gates stay as they are until the swap has ended
        for lease in self._books.gates_closed:
            asked, planned = lease.lease_id in self.capacity.asked_to_yield, lease.lease_id in self.capacity.planned
            if not planned and (not asked or self._has_waited(lease)):
                self._opens.append(lease)

    def _has_waited(self, lease: Lease) -> bool:
        """Return whether a lease whose cell has ended has waited for the others long enough; if not, ask for a pass when it has."""
        if lease.gate.ticket is None:
            return False
        return self._books.is_time(gate_opens_ms(self._books, lease, lease.gate.ticket.asked_ms))

    def settle_gates(self) -> None:
        """Close and open the gates that the pass chose. Called for the last pass of an event."""
        for lease in self._opens:
            if not lease.gate.closed:
                continue  # its suspend has begun
            if lease.lease_id in self.capacity.asked_to_yield:  # it has waited for the others long enough
                lease.gate.open_until_ms = self._books.now_ms + residency_ms(self._books, lease)
            self._changes.open_gate(lease)
        for lease in self._closes:
            if lease.occupancy is OccupancyKind.BUSY:  # else it has left, or begun to leave, for another ticket
                self._changes.close_gate(lease)

    # -- afterwards ------------------------------------------------------------------------------------------------------

    def _tell(self, lease: Lease, ticket: Ticket, wait: Reason) -> None:
        """Note why a ticket waits, with a line in its story if that is new."""
        ticket.wait = wait
        self._changes.record_wait_reason(lease, wait)

    def _explain(self, lease: Lease, ticket: Ticket) -> None:
        """Write a new reason into the ticket's story, except that the swap channel is in use, which flips with every swap."""
        code = wait_code(self._books, lease, ticket)
        if code != ticket.reason and (ticket.wait is not _CHANNEL_IN_USE or ticket.reason == "wait.new"):
            self._changes.record_wait_reason(lease, wait_reason(self._books, lease, ticket))


def _why_it_leaves(victim: Lease, lease: Lease) -> tuple[str, str]:
    need, who = format_memory(lease.ask_mib), name_for(victim, lease)
    if victim.gate.ticket is not None:
        return "suspend.needed-by", f"between two cells, and {who} needed {need} before the next one"
    if not victim.busy:
        return "suspend.needed-by", f"idle, and {who} needs {need}"
    right = "has a higher priority" if victim.spec.priority < lease.spec.priority else "has had less than its share"
    return "suspend.preempted", f"{who} {right} and needs {need}"
