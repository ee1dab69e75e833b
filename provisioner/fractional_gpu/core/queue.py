"""Makes one pass over the queue, in which each ticket that is waiting for room is visited once, in order, and served if possible.

`Turns` defines the order, and `QueuePass._visit` the cases. If a ticket wouldn't fit even after every lease that can leave has left, it
waits, and nothing is suspended for it (law 3). Once a ticket has been passed over K times (`max_passed_over`), room is kept for it (law 4).

**Patience.** Virtual time alone does not bound a wait, because a small lease can keep using up its owner's share while a large lease of the
same owner waits forever. So a ticket becomes due once it has waited twice as long as its share justifies (`patience_ms`). A due ticket goes
ahead of ordinary tickets of its priority, and preempts regardless of virtual time.

**Room at the end of a cell.** A kernel that runs cells back to back is never idle for long, but still has to make room, whatever the pool's
preemption policy. If idle leases cannot make enough room for a ticket, the pass closes the gates of busy leases that can:

- A lease is asked to leave only after its minimum residency, and only for a ticket of at least its own priority. It is not asked while
  pinned, nor soon after a failed suspend. The cell it is running continues.
- Its next cell has to ask before it runs, and queues behind the ticket. Until that cell is let in, the kernel runs nothing, so the lease
  can be suspended like an idle one.
- If several leases must leave, the first to finish its cell waits for the others. One of them might be running a cell that never ends, so
  it waits no longer than its own swap takes, or one second if that is longer (`gate_opens_ms`). Then it is left alone for another minimum
  residency.

Each pass chooses which gates to close or open, but only an event's last pass acts on this (`settle_gates`), because an earlier pass may ask
leases to yield room that the same event frees later. If a step frees room that a ticket visited earlier might use, another pass follows
(`needs_another`).
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

_MOST_PLANS = 2  # tickets to plan for while no swap can begin anyway
_CHANNEL_IN_USE = Reason("wait.swap-channel", "other kernels are being moved first, one after another")
_IDLE_MAKES_ROOM = "an idle kernel is being suspended to make room"
_FIRST, _DUE, _USUAL = range(3)


def patience_ms(books: Books, lease: Lease) -> int:
    """Return how long a ticket waits before it is due, in ms, in a pool that shares by virtual time.

    This is twice the wait the lease's share justifies, which is the time one lease of its size takes for a turn and a swap, divided by its
    owner's share of the pool and by its own share among its owner's leases. Shares are based on the contenders' weights.
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
    """Return how long the pool's tickets have waited, as of `books.now_ms`. Tickets of leases that are being resumed are left out.

    A ticket is over its bound if it has waited longer than its patience plus a turn and a swap for each lease that has or wants a device in
    the pool. Only pools that share by virtual time have a bound.
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
    """The order in which a pass serves the tickets that are waiting for room:

    1. Leases on their way to another device.
    2. Higher priorities.
    3. Urgent tickets, and tickets with room kept for them that are older than an urgent one.
    4. Due tickets: busy leases are leaving to make room for them, or they have waited twice as long as their share justifies.
    5. In a fair pool, the ticket that has had the least of its share. In other pools, and for ties, the oldest ticket.

    Shares are compared only within a pool. In a fair pool, the turn of the oldest ticket goes to the owner with the least virtual time, and
    among that owner's leases to the one with the least virtual time.
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
        # An older ticket for which room is kept goes first along with an urgent one.
        is_owed = ticket.passed_over >= pool.max_passed_over
        goes_first = ticket.urgent or (is_owed and ticket.order < self._latest_urgent.get(priority, ticket.order))
        is_due = ticket.is_due and pool.preempt_equals
        before = not lease.target_ids, -priority, _FIRST if goes_first else _DUE if is_due else _USUAL
        if is_due or not pool.preempt_equals:
            return (*before, ticket.order, 0, 0, ticket.order)
        return (*before, self._oldest[lease.spec.pool], *self._books.share(lease), ticket.order)


def ticket_of(lease: Lease) -> Ticket:
    """Return the ticket of a queued lease. Raise ValueError if the lease is not queued."""
    if lease.ticket is None:
        raise ValueError(f"lease {lease.lease_id} has no ticket")
    return lease.ticket


class QueuePass:
    """One pass over the queue. Room promised to one ticket is not available to later tickets."""

    def __init__(self, changes: Changes, resizer: Resizer) -> None:
        self._changes = changes
        self._resizer = resizer
        self._books = changes.books
        self.capacity = Capacity(changes.books)
        self._migrations = Migrations(changes, self.capacity)
        self._line: list[Lease] = []  # leases waiting for room, in order of their turns
        self._visited: set[str] = set()
        self._unservable: dict[tuple[object, ...], tuple[int, Reason | None]] = {}  # least need without room, and why
        self._plans = 0
        self._overdue: list[Lease] = []  # leases passed over for the K-th time in this pass
        self._promised: list[Lease] = []  # leases for which others have begun to leave
        self._closes: list[Lease] = []  # leases whose gates `settle_gates` closes
        self._opens: list[Lease] = []
        self.needs_another = False  # room was freed that tickets visited earlier might use

    def serve(self) -> None:
        """Visit each ticket that is waiting for room, once and in order."""
        books = self._books
        waiting = list(books.waiting.values())
        self._line = [lease for lease in waiting if lease.waits_for_room]
        for lease in waiting:
            ticket_of(lease).wait = None
            if not lease.waits_for_room and not lease.target_ids:
                ticket_of(lease).kept_on = ()
        self._mark_due_by_wait()
        for mover in waiting:
            if mover.state is not LeaseState.RESUMING:  # a resuming lease already has its room
                for device_id in mover.target_ids:
                    self.capacity.keep(mover, device_id, kept_mib(mover))
        to_visit = self._by_turn()
        while to_visit:
            lease = to_visit.pop(0)
            if not lease.waits_for_room:
                continue  # it has meanwhile been suspended for another ticket
            self._visited.add(lease.lease_id)
            if self._visit(lease, ticket_of(lease)):  # the order has changed
                to_visit = [one for one in self._by_turn() if one.lease_id not in self._visited]
        for lease in self._overdue:
            if lease.waits_for_room:
                self._keep_waiting(lease, ticket_of(lease), allowed_devices(books, lease))
        for lease in waiting:
            if lease.ticket is not None and books.shares_by_time(lease):
                # A promise ends when another ticket takes the room. While no channel is free, the pass cannot tell, so the promise stays.
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
        """Mark tickets that have waited too long for their share as due, in pools that share by virtual time.

        Room is kept for them, too. Otherwise neighbours might leave and return in turn, so that the device is never free of them all.
        """
        books = self._books
        for lease in self._line:
            ticket, pool = ticket_of(lease), books.policy(lease)
            if ticket.waited_long or not pool.preempt_equals or lease.spec.pool not in books.pools:
                continue  # a ticket whose pool is gone waits for the pool's configuration, not for other leases
            # Shares, and so the patience, change. Recompute the estimate only when it has run out.
            if ticket.due_ms <= books.now_ms:
                ticket.due_ms = ticket.asked_ms + patience_ms(books, lease)
            if ticket.due_ms > books.now_ms:
                self._books.recheck_at(ticket.due_ms)
            else:
                ticket.waited_long = True
                ticket.passed_over = max(ticket.passed_over, pool.max_passed_over)

    # -- one ticket ------------------------------------------------------------------------------------------------------

    def _visit(self, lease: Lease, ticket: Ticket) -> bool:
        """Serve one ticket, or do what can be done for it now. Return whether the order of the tickets behind it has changed.

        The first of these cases that applies is used:

        1. If the kernel is moving to devices where room is kept for it, resume it there or cancel the move.
        2. If the kernel's user or group is at its limit, suspend idle leases of the same user, provided that the ticket then fits.
        3. If the kernel must pause after a failed resume, or a similar ticket that needs no more room has found none, the ticket waits.
        4. If the ticket fits, serve it.
        5. If no suspend or resume can begin, the ticket waits for a swap channel.
        6. If the ticket fits once other leases leave, suspend idle leases, preempt busy ones, or move a busy one elsewhere.
        7. If the kernel wants to grow and is idle, move it to a device where it can.
        8. Otherwise the ticket waits, and busy leases are asked to yield at the end of their cells.

        In cases 3, 5, 6 and 8, room is kept for a ticket that was passed over K times. In case 5, the first few tickets still get a plan
        as in case 6.
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
        """Return the properties of a ticket, besides its need and its devices, that determine which leases may leave for it."""
        if lease.is_growing or lease.count > 1:  # new leases get several devices of one kind, saved ones their own
            return (lease.lease_id,)
        by_owner = milli or self._books.shares_by_time(lease)
        return (lease.spec.owner, lease.spec.group, milli) if by_owner else ()

    def _pick(self, lease: Lease, devices: tuple[str, ...], need_mib: int) -> tuple[str, ...] | None:
        """Return devices the lease fits on now, or None. If only the lease's share grows and not its memory, it needs no more room."""
        if lease.is_growing:
            return devices if devices and (not need_mib or self.capacity.fits(devices, need_mib)) else None
        return self.capacity.pick_for(lease, devices, need_mib)

    def _arrive_at_targets(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...], over: Reason | None) -> bool:
        """Resume a moving lease on its target devices. Cancel the move if the devices or a limit no longer allow it."""
        targets = lease.target_ids
        if over or not all(one in devices and self._books.devices[one].free_mib >= lease.need_mib for one in targets):
            self.capacity.release(lease, targets)
            ticket.kept_on = ()
            lease.target_ids = ()
            self._visited.discard(lease.lease_id)  # from now on it is an ordinary ticket
            return True
        if self._changes.channel_free:
            self._grant(lease, targets)
            self.capacity.release(lease, targets)  # it has that room now
        else:
            sentence = "this kernel will be moved after another one"
            self._set_wait(lease, ticket, Reason("wait.swap-channel", sentence))
        return False

    def _serve_at_once(self, lease: Lease, ticket: Ticket, chosen: tuple[str, ...]) -> bool:
        """Serve a ticket that fits, or keep room for it until a swap channel is free. Return whether the order of later tickets changes."""
        if lease.state is LeaseState.SUSPENDED and not self._changes.channel_free:
            for device_id in chosen:
                self.capacity.keep(lease, device_id, lease.ask_mib)
            sentence = "another kernel is being moved; this one is next"
            self._set_wait(lease, ticket, Reason("wait.swap-channel", sentence))
            return False
        held_mib, milli = lease.held_mib, lease.milli
        urgent_waits = any(ticket_of(one).urgent for one in self._line if one.waits_for_room)
        # Tickets that went first only because this urgent one waited behind them now lose that place.
        self.needs_another |= ticket.urgent
        if ticket.resize_to is None:
            self._grant(lease, chosen)
        else:
            self._resizer.grow_in_place(lease)
            # It may have grown its share while returning memory, or vice versa, and reached a limit.
            gave_back = lease.held_mib < held_mib or lease.milli < milli
            reached_limit = lease.milli > milli and self.capacity.keeps_any
            self.needs_another |= gave_back or reached_limit or lease.is_growing
            if lease.is_growing:  # its use has risen since it asked, so it still lacks memory
                return False
        return lease.held_mib > held_mib and self._count_passed_over(lease, ticket, chosen, urgent=urgent_waits)

    def _grant(self, lease: Lease, device_ids: tuple[str, ...]) -> None:
        """Grant the devices to the lease, and ask for another pass if this can free room.

        If the owner reaches a limit, the room kept for the owner's other tickets becomes free. If the lease has been using its devices
        without a reservation, the grant can free room there, and other tickets bound to those devices may then need more or go elsewhere.
        """
        if lease.bound_ids or (self.capacity.keeps_any and added_milli(self._books, lease)):
            self.needs_another = True
        self._changes.grant(lease, device_ids)
        self.capacity.victims.forget(device_ids)

    def _free_own_share(self, lease: Lease, devices: tuple[str, ...], milli: int, over: Reason) -> None:
        """Suspend idle leases of a user or group that is at its limit, provided that the ticket then fits."""
        self._set_wait(lease, ticket_of(lease), over)
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
            mine = "suspend.user-limit", f"idle, and its user needs this share for {name_for(victim, lease)}"
            self._begin_suspend(victim, lease, mine if victim in own else _suspend_reason(victim, lease))

    def _make_room(self, lease: Lease, ticket: Ticket, plan: Plan) -> None:
        """Promise the ticket the room its plan will free, and begin as many of the plan's suspends and moves as swap channels allow."""
        self._plans += 1
        self.capacity.promise(lease, plan, lease.ask_mib)
        if lease.is_growing:
            self.capacity.stays.add(lease.lease_id)
        preempts = any(victim.is_working for victim in plan.victims)
        for victim in plan.victims:
            if not self._may_begin(victim):
                break
            if not preempts:  # otherwise it waits for busy leases anyway
                saved_for_ticket(self._books, victim, ticket)
            if self._migrations.move_aside(victim, lease):
                self.needs_another |= victim.is_growing  # frees the room kept for it on its old device
            else:
                self._begin_suspend(victim, lease, _suspend_reason(victim, lease))
            self._promised.append(lease)
        what = "a busy kernel must make room" if preempts else _IDLE_MAKES_ROOM
        wait = Reason("wait.making-room", what, tuple(victim.lease_id for victim in plan.victims))
        self._set_wait(lease, ticket, wait)

    def _may_begin(self, victim: Lease) -> bool:
        """Return whether a planned suspend can begin now, which requires a free swap channel and enough unreserved host memory."""
        return self._changes.channel_free and victim.host_need_mib <= self._books.host_left_mib

    def _begin_suspend(self, victim: Lease, lease: Lease, why: tuple[str, str]) -> None:
        self.needs_another |= victim.is_growing  # frees the room kept for it on its device
        self._changes.begin_suspend(victim, *why, beneficiary=lease)

    # -- law 4 -----------------------------------------------------------------------------------------------------------

    def _is_overdue(self, lease: Lease) -> bool:
        return ticket_of(lease).passed_over >= self._books.policy(lease).max_passed_over

    def _keep_waiting(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> None:
        """Keep room for a waiting ticket that has been passed over as often as its pool allows.

        Idle leases are suspended one by one, because they might never all be idle at the same time. This is done only on devices that could
        serve the ticket once every lease that can leave has left.
        """
        if not self._is_overdue(lease):
            return
        self._keep_room(lease, ticket, devices)
        if len(ticket.kept_on) < lease.count or not self._changes.channel_free:
            return
        need_mib, blockers = lease.ask_mib, list[str]()
        for device_id in ticket.kept_on:
            if not self.capacity.could_serve(device_id, need_mib, lease):
                continue
            for victim in self.capacity.victims_for_kept_room(device_id, need_mib, lease):
                if self._may_begin(victim):
                    why = f"idle, and {format_memory(need_mib)} is being freed for {name_for(victim, lease)}"
                    self._begin_suspend(victim, lease, ("suspend.needed-by", why))
                    blockers.append(victim.lease_id)
            if lease.is_growing:
                there = self._books.holders(device_id)
                leaving = [other.lease_id for other in there if other.occupancy is OccupancyKind.SUSPENDING]
                if leaving:
                    self.capacity.stays.add(lease.lease_id)
                blockers += leaving
        if blockers:
            self._set_wait(lease, ticket, Reason("wait.making-room", _IDLE_MAKES_ROOM, tuple(dict.fromkeys(blockers))))

    def _keep_room(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> None:
        """Keep room for a ticket on as many devices as it needs, plus one for each further `max_passed_over` times it is passed over."""
        most = self._books.policy(lease).max_passed_over
        number = lease.count + max(0, ticket.passed_over - most) // max(1, most)
        ticket.kept_on = self.capacity.devices_to_keep(lease, devices, lease.ask_mib, number)
        for device_id in ticket.kept_on:
            self.capacity.keep(lease, device_id, lease.ask_mib)

    def _count_passed_over(self, winner: Lease, winning: Ticket, device_ids: tuple[str, ...], *, urgent: bool) -> bool:
        """Add one to `passed_over` for each earlier ticket that could have used the granted room and no longer fits.

        Return whether any ticket moves ahead as a result. `urgent` is true if an urgent ticket is waiting.
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
                self._keep_room(lease, ticket, devices)
            else:  # its own visit will keep room for it, and from now on it precedes urgent tickets
                moves_ahead |= urgent
        return moves_ahead

    def _came_before(self, lease: Lease, winner: Lease, winning: Ticket) -> bool:
        if self._books.shares_by_time(lease):
            return lease.lease_id in self._visited
        return lease.spec.priority > winner.spec.priority or ticket_of(lease).order < winning.order

    # -- room at the end of a cell ---------------------------------------------------------------------------------------

    def _ask_to_yield(self, lease: Lease, devices: tuple[str, ...], need_mib: int) -> None:
        """Ask busy leases to yield at the end of their cells, if that would make enough room for the ticket."""
        plan = self.capacity.plan(lease, devices, need_mib, between_cells=True)
        for victim in plan.victims if isinstance(plan, Plan) else ():
            self.capacity.asked_to_yield.add(victim.lease_id)
            if victim.occupancy is OccupancyKind.BUSY:
                self._closes.append(victim)

    def _choose_openings(self) -> None:
        """Choose which gates to open: the ones no ticket needs closed any longer, and the ones that have been closed for too long."""
        if not self._changes.channel_free:
            return  # without a swap channel the pass made no complete plan, so the gates stay as they are until a swap ends
        for lease in self._books.gates_closed:
            asked, planned = lease.lease_id in self.capacity.asked_to_yield, lease.lease_id in self.capacity.planned
            if not planned and (not asked or self._has_waited_enough(lease)):
                self._opens.append(lease)

    def _has_waited_enough(self, lease: Lease) -> bool:
        """Return whether the lease's held-back cell has waited long enough for other leases to leave. If not, schedule a later pass."""
        if lease.gate.ticket is None:
            return False
        return self._books.is_time(gate_opens_ms(self._books, lease, lease.gate.ticket.asked_ms))

    def settle_gates(self) -> None:
        """Close and open the gates that the pass chose. Call this only on the last pass of an event."""
        for lease in self._opens:
            if not lease.gate.closed:
                continue  # its suspend has begun
            if lease.lease_id in self.capacity.asked_to_yield:  # it has waited long enough for the others
                lease.gate.open_until_ms = self._books.now_ms + residency_ms(self._books, lease)
            self._changes.open_gate(lease)
        for lease in self._closes:
            if lease.occupancy is OccupancyKind.BUSY:  # otherwise it has already made room for another ticket
                self._changes.close_gate(lease)

    # -- afterwards ------------------------------------------------------------------------------------------------------

    def _set_wait(self, lease: Lease, ticket: Ticket, wait: Reason) -> None:
        """Set the reason a ticket is waiting, and record it in the lease's history if it is new."""
        ticket.wait = wait
        self._changes.record_wait_reason(lease, wait)

    def _explain(self, lease: Lease, ticket: Ticket) -> None:
        """If the wait reason has changed, record it in the lease's history. Waits for a swap channel are too frequent to record."""
        code = wait_code(self._books, lease, ticket)
        if code != ticket.reason and (ticket.wait is not _CHANNEL_IN_USE or ticket.reason == "wait.new"):
            self._changes.record_wait_reason(lease, wait_reason(self._books, lease, ticket))


def _suspend_reason(victim: Lease, lease: Lease) -> tuple[str, str]:
    need, who = format_memory(lease.ask_mib), name_for(victim, lease)
    if victim.gate.ticket is not None:
        return "suspend.needed-by", f"between two cells, and {who} needed {need} before the next one"
    if not victim.busy:
        return "suspend.needed-by", f"idle, and {who} needs {need}"
    right = "has a higher priority" if victim.spec.priority < lease.spec.priority else "has had less than its share"
    return "suspend.preempted", f"{who} {right} and needs {need}"
