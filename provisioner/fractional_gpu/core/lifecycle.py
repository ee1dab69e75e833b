"""Events of a lease's life: it is requested, recovered, starts, is attached; it wants the GPU, runs, rests, and ends."""

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import LeaseAdmitted, LeaseRefused, LookAgain
from fractional_gpu.core.events import LeaseRecovered, LeaseRequested, Shrunk
from fractional_gpu.core.foresight import Expectations
from fractional_gpu.core.limits import Pins, refusal
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.place import allowed_devices
from fractional_gpu.core.resize import MemoryCaps, Resizer
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease
from fractional_gpu.core.suspend import update_suspendability
from fractional_gpu.core.transitions import Cause, next_state
from fractional_gpu.core.units import format_duration, format_memory

# -- starting ----------------------------------------------------------------------------------------------------------
# Reservations for kernels that are about to start: an ungated lease asks for its room before a process stands behind it.
#
# Nothing proves that such a process ever comes, so what leases without a process hold or ask for is bounded:
#
# - Of the leases of one owner (a user, or the hub's user of a seat), as many hold or queue for room as take `unattached_share` of the
#   pool's memory, and at least one. It is only one while such leases alone keep out a ticket of another owner. The others are `parked`:
#   they have no ticket, and file one when an earlier lease has its process, ends or loses its room. So their place in the queue is behind
#   the tickets that other owners have filed meanwhile.
# - Room is kept for `unattached_hold_ms`. After that it goes to a ticket that needs it. While no ticket waits in the pool the lease keeps
#   the room: a kernel that starts slowly on an idle machine loses nothing.
#
# Admission checks how many leases without a process an owner may have.
_Owner = tuple[str, str]  # pool, owner


class StartReservations:
    """Decides which leases hold, or queue for, room before their start."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._lapsed: dict[str, Lease] = {}  # their hold is over, and they still have the room

    def request(self, lease: Lease, *, urgent: bool = False) -> None:
        """File a ticket for a lease that wants room before its start, or park it behind others of its owner."""
        books = self._books
        if lease.ticket is None and lease.lease_id not in books.parked:
            books.parked[lease.lease_id] = lease
            self.file_parked()
            if lease.lease_id in books.parked:
                pool = books.policy(lease)
                self._changes.record(
                    lease.lease_id,
                    "wait.unattached",
                    f"other kernels of {lease.spec.owner!r} are starting, and leases without a process may hold "
                    f"{pool.unattached_share_milli / 10:g} % of pool {pool.name!r}: it asks for room when one of them has started",
                )
        if lease.ticket is not None:
            self._changes.file_ticket(lease, before_start=True, urgent=urgent)

    def file_parked(self) -> None:
        """File tickets of parked leases, in the order of asking, as far as what their owners hold and ask for allows."""
        if not self._books.parked:
            return
        taken = self._taken_mib()
        full: set[_Owner] = set()
        for lease in list(self._books.parked.values()):
            owner = _owner(lease)
            there_mib, need_mib = taken.get(owner, 0), lease.need_mib * lease.count
            may = not there_mib or (
                there_mib + need_mib <= share_mib(self._books, lease) and not self._keep_out_others(lease)
            )
            if owner in full or not may:
                full.add(owner)  # a smaller lease of the owner does not pass it
                continue
            taken[owner] = there_mib + need_mib
            del self._books.parked[lease.lease_id]
            self._changes.file_ticket(lease, before_start=True)

    def _keep_out_others(self, lease: Lease) -> bool:
        """Return whether only leases without a process keep out a ticket of another owner, which more of them could pass one by one."""
        starting: dict[str, int] = {}
        for other in self._books.in_state(LeaseState.UNATTACHED):
            for device_id in other.occupied_ids:
                starting[device_id] = starting.get(device_id, 0) + other.held_mib
        for other in self._books.waiting.values():
            if other.spec.pool != lease.spec.pool or other.spec.owner == lease.spec.owner or not other.waits_for_room:
                continue
            for device_id in allowed_devices(self._books, other):
                without_mib = self._books.devices[device_id].free_or_idle_mib
                if without_mib < other.ask_mib <= without_mib + starting.get(device_id, 0):
                    return True
        return False

    def _taken_mib(self) -> dict[_Owner, int]:
        taken: dict[_Owner, int] = {}
        for lease in self._books.in_state(LeaseState.UNATTACHED):
            mib = lease.held_mib
            if not mib and lease.ticket is not None and lease.ticket.before_start:
                mib = lease.need_mib
            if mib:
                taken[_owner(lease)] = taken.get(_owner(lease), 0) + mib * lease.count
        return taken

    def mark_lapsed(self, lease: Lease) -> None:
        """Note that the lease's hold is over, if it is."""
        if _may_lapse(lease, self._books.now_ms):
            self._lapsed[lease.lease_id] = lease
            self._books.mark_changed(lease)  # its next deadline is its end

    def reclaim_lapsed(self, *, first: bool = False) -> bool:
        """Free room whose hold is over, in pools where a ticket waits for room. Returns whether any was freed.

        `first`: before the queue is served, only for tickets that fit nowhere now. Else a lease might be suspended for them in vain.
        """
        freed = False
        for lease in list(self._lapsed.values()):
            if not _may_lapse(lease, self._books.now_ms):
                del self._lapsed[lease.lease_id]
            elif self._is_wanted(lease, first=first):
                del self._lapsed[lease.lease_id]
                self._lapse(lease)
                freed = True
        return freed

    def _is_wanted(self, lease: Lease, *, first: bool) -> bool:
        """Return whether a ticket that waits for room, or a parked lease, could use the lease's room."""
        pool = lease.spec.pool
        waiting = [other for other in self._books.waiting.values() if other.spec.pool == pool and other is not lease]
        if any(other.waits_for_room and not (first and self._fits(other)) for other in waiting):
            return True
        return not first and any(other.spec.pool == pool for other in self._books.parked.values())

    def _fits(self, lease: Lease) -> bool:
        devices = [self._books.devices[device_id] for device_id in allowed_devices(self._books, lease)]
        return sum(device.free_mib >= lease.ask_mib for device in devices) >= lease.count

    def _lapse(self, lease: Lease) -> None:
        kept, mib = self._books.policy(lease).unattached_hold_ms, lease.held_mib
        self._changes.withdraw_ticket(lease)  # of one that waited to grow
        self._books.set_reservation(lease, ())
        # Else its owner's next lease, which has used nothing either, would be served first, again and again.
        self._books.accounts.fall_behind(lease, self._books.now_ms)
        self._changes.change_state(
            lease,
            Cause.LAPSED,
            "grant.lapsed",
            f"no process came within {format_duration(kept)}, and another kernel waits: its {format_memory(mib)} are free",
        )


def share_mib(books: Books, lease: Lease) -> int:
    """Return what one owner's leases without a process may hold together in the lease's pool, MiB."""
    pool = books.policy(lease)
    sizes = [books.devices[device_id].spec.leasable_mib for device_id in pool.devices if device_id in books.devices]
    return sum(sizes) * pool.unattached_share_milli // 1000


def _owner(lease: Lease) -> _Owner:
    return lease.spec.pool, lease.spec.owner


def _may_lapse(lease: Lease, now_ms: int) -> bool:
    return lease.state is LeaseState.UNATTACHED and lease.has_reservation and lease.hold_until_ms <= now_ms


# -- lifecycle ---------------------------------------------------------------------------------------------------------
FOUND = {
    LeaseState.UNATTACHED: Cause.FOUND_UNATTACHED,
    LeaseState.NO_CONTEXT: Cause.FOUND_NO_CONTEXT,
    LeaseState.RESIDENT: Cause.FOUND_RESIDENT,
    LeaseState.SUSPENDED: Cause.FOUND_SUSPENDED,
    LeaseState.QUARANTINED: Cause.FOUND_UNKNOWN,
}
"""The states that a lease can be found in, and the cause of that transition."""


_FOUND_AS = {
    LeaseState.UNATTACHED: "no process of this kernel",
    LeaseState.NO_CONTEXT: "this kernel alive, with nothing on a GPU",
    LeaseState.RESIDENT: "this kernel on its GPU",
    LeaseState.SUSPENDED: "this kernel's memory saved on the host",
    LeaseState.QUARANTINED: "this kernel in a state that it examines",
}


NEEDS_DEVICE = frozenset({LeaseState.RESIDENT, LeaseState.SUSPENDED})
"""States that are impossible without a device."""


class Lifecycle:
    """One method per event."""

    def __init__(
        self,
        changes: Changes,
        caps: MemoryCaps,
        pins: Pins,
        resizing: Resizer,
        starting: StartReservations,
        *,
        expectations: Expectations,
    ) -> None:
        self._changes = changes
        self._start_reservations = starting
        self._pins = pins
        self._resizer = resizing
        self._books = changes.books
        self._memory_caps = caps
        self._expectations = expectations

    def requested(self, event: LeaseRequested) -> None:
        """Admit a lease or refuse it."""
        spec, changes = event.spec, self._changes
        refused = refusal(self._books, spec)
        if refused is not None:
            refusal_effect = LeaseRefused(lease_id=spec.lease_id, reason=refused.code, sentence=refused.sentence)
            changes.effects.append(refusal_effect)
            return
        lease = Lease(spec=spec, since_ms=changes.now_ms, last_active_ms=changes.now_ms)
        changes.restart_expiry(lease)
        self._books.add(lease)
        changes.effects.append(LeaseAdmitted(lease_id=spec.lease_id))
        changes.announce_state(lease, None, "lease.admitted", f"admitted with up to {format_memory(spec.reserve_mib)}")
        if event.needs_reservation:
            self._start_reservations.request(lease)

    def recovered(self, event: LeaseRecovered) -> None:
        """Take over a lease that a new broker found. Raises ValueError for a state that cannot be found."""
        if event.state not in FOUND:
            allowed = ", ".join(sorted(FOUND))
            raise ValueError(f"lease {event.spec.lease_id} cannot be recovered as {event.state}; allowed: {allowed}")
        if event.spec.lease_id in self._books.leases:
            return
        changes, state = self._changes, event.state
        device_ids = event.device_ids or ((event.device_id,) if event.device_id is not None else ())
        if state in NEEDS_DEVICE and not device_ids:
            state = LeaseState.QUARANTINED  # resident or saved, and its device is unknown
        lease = Lease(spec=event.spec, state=next_state(None, FOUND[state]), generation=event.generation)
        lease.since_ms = lease.last_active_ms = changes.now_ms
        lease.busy = event.busy and state is not LeaseState.UNATTACHED
        self._books.add(lease)
        self.settle_found(lease, state, device_ids, event.saved_mib)
        self._pins.restore(lease, event.pinned_until_ms)
        changes.announce_state(
            lease,
            None,
            f"recovered.{state}",
            event.sentence or f"a broker was started anew and found {_FOUND_AS[state]}",
        )
        if state is LeaseState.QUARANTINED:
            changes.effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))

    def settle_found(self, lease: Lease, state: LeaseState, device_ids: tuple[str, ...], saved_mib: int) -> None:
        """Record what a lease that was found in this state holds, even beyond what is free. What it certainly held stays held."""
        held_mib = max(lease.need_mib, lease.held_mib, lease.spec.reserve_mib)
        keeps_saved = state in (LeaseState.SUSPENDED, LeaseState.QUARANTINED)
        holds = state in (LeaseState.RESIDENT, LeaseState.QUARANTINED)
        lease.is_measured = False
        if not holds:
            lease.used_mib = 0
        lease.home_ids = device_ids if keeps_saved else ()
        self._books.set_host_memory(lease, saved_mib=max(0, saved_mib) if keeps_saved else 0)
        places = () if state is LeaseState.UNATTACHED else device_ids
        self._books.set_reservation(lease, places, max(held_mib, lease.need_mib) if holds else 0)
        lease.has_run = lease.busy
        update_suspendability(self._books, lease)
        if not keeps_saved:
            lease.retries.forget_resumes()
        lease.expires_ms = None
        if state is LeaseState.UNATTACHED:
            self._changes.restart_expiry(lease)

    def attached(self, lease: Lease, *, gated: bool) -> None:
        """Note that a process stands behind the lease."""
        if lease.left_behind:
            lease.left_behind, lease.last_active_ms = "", self._changes.now_ms
            self._changes.record(lease.lease_id, "attached", "a new kernel runs beside what the last one left behind")
            if lease.state is LeaseState.RESIDENT:
                self._books.set_gate(lease, closed=False)
                self._changes.emit_granted(lease)
            elif not gated:
                self._changes.file_ticket(lease)
            return
        if lease.state is not LeaseState.UNATTACHED:
            return
        lease.expires_ms = None
        self._books.parked.pop(lease.lease_id, None)
        lease.last_active_ms = self._changes.now_ms
        if lease.has_reservation:
            self._changes.become_resident(lease)
            self._changes.change_state(
                lease, Cause.ATTACHED_RESERVED, "attached", "the kernel runs, with its reservation"
            )
            self._changes.emit_granted(lease)
            return
        self._changes.change_state(lease, Cause.ATTACHED, "attached", "the kernel runs and has not used a GPU yet")
        if not gated:  # no gate keeps it from using the GPU
            self._changes.file_ticket(lease)

    def left_behind(self, lease: Lease, what: str) -> None:
        """Keep what the lease holds for processes of its ended kernel: it counts as busy, and saved state gets a ticket."""
        changes = self._changes
        if not (lease.held_mib or lease.saved_mib) or lease.state is LeaseState.UNATTACHED:
            return
        begins, lease.left_behind = not lease.left_behind, what
        if begins:
            if lease.pinned_until_ms:
                self._pins.unpin(lease, "pin.ended", "the kernel process ended, and its pin with it")
            if lease.busy:
                changes.forecast_recorder.busy_changed(lease, busy=False)
            changes.forget_expectation(lease)
            if lease.gate.ticket is not None:  # the cell ended with its kernel
                self._books.set_gate(lease, closed=True)
            self._books.set_busy(lease, busy=True)
            sentence = f"the kernel process ended; {what} still has device memory and keeps the lease's room"
            changes.record(lease.lease_id, "left-behind", sentence)
            if lease.suspend_requested:
                changes.decline_suspend(lease, "busy", sentence)
        if lease.state in (LeaseState.SUSPENDED, LeaseState.RESUMING):  # a resume may fail to start
            changes.file_ticket(lease, preempted=True)
        changes.requeued |= self._books.waiting_pools  # tickets that wait for its room show it

    def exited(self, lease: Lease) -> None:
        """Free what the lease holds: its process is gone."""
        if lease.state is LeaseState.UNATTACHED:
            return
        if lease.pinned_until_ms:
            self._pins.unpin(lease, "pin.ended", "the kernel process ended, and its pin with it")
        if lease.busy and not lease.left_behind:
            self._changes.forecast_recorder.busy_changed(lease, busy=False)
        if lease.revoked:  # no server exists that could start another kernel for it
            self._changes.end(lease, Cause.RELEASED, "seat-ended")
            return
        self._changes.release_everything(lease)
        self._changes.restart_expiry(lease)
        self._changes.change_state(
            lease, Cause.EXITED, "process.exited", "the kernel process ended; what it held is free"
        )

    def released(self, lease: Lease, reason: str) -> None:
        """End the lease."""
        if lease.pinned_until_ms:
            self._pins.refund(lease)
        self._changes.end(lease, Cause.RELEASED, reason)

    def wanted(self, lease: Lease, *, urgent: bool) -> bool:
        """Let the kernel in, or give it a ticket. Returns whether any decision depends on it."""
        if lease.revoked:
            return False
        was_expected = lease.expectation is not None
        self._expectations.came_true(lease)
        if lease.state is LeaseState.RESIDENT:
            asked = lease.suspend_requested
            lease.last_active_ms = self._changes.now_ms
            self._books.mark_changed(lease)
            if lease.suspend_requested:
                self._changes.decline_suspend(lease, "busy", "a cell is about to run: try again when it has ended")
            # The gate is closed for an older ticket: the cell waits there, and the lease can be suspended between its cells.
            if lease.gate.closed and not urgent:
                self._changes.wait_at_gate(lease)
                return True
            if lease.gate.closed:
                self._books.set_gate(lease, closed=False)
            self._changes.emit_granted(lease)
            return asked or was_expected  # while it was, it was not to leave for being idle
        if lease.state is LeaseState.UNATTACHED and lease.has_reservation:
            self._changes.emit_granted(lease)
            return False
        if lease.state is LeaseState.UNATTACHED and (not lease.spec.gated or lease.lease_id in self._books.parked):
            self._start_reservations.request(lease, urgent=urgent)
        else:
            self._changes.file_ticket(lease, before_start=not lease.spec.gated, urgent=urgent)
        return True

    def unwanted(self, lease: Lease, *, interrupted: bool = False) -> bool:
        """Withdraw the ticket, unless a preempted cell, a claim to grow or a left process waits; return whether a decision needs that."""
        ticket = lease.ticket
        self._books.set_let_in(lease, let_in=False)
        self._books.parked.pop(lease.lease_id, None)
        if interrupted and (ticket or lease.gate.ticket):
            self._changes.record(lease.lease_id, "wait.given-up", "gave up its wait (interrupted)")
        if lease.gate.ticket is not None:
            self._books.set_gate(lease, closed=True)
            return True
        if ticket is None or (ticket.preempted and lease.busy) or (lease.left_behind and ticket.resize_to is None):
            return False
        if ticket.resize_to is not None:
            ticket.after_suspend = ticket.after_suspend if lease.target_ids else None
            return False
        self._changes.forecast_recorder.ticket_given_up(lease)
        self._changes.withdraw_ticket(lease)
        return True

    def busy_changed(self, lease: Lease, *, busy: bool, by_cell: bool) -> bool:
        """Note that the kernel began or ended to run something, perhaps a cell. Returns whether any decision depends on it."""
        if lease.state is LeaseState.UNATTACHED or lease.left_behind:
            return False
        if busy and by_cell:  # perhaps behind a completion that made it busy already
            self._expectations.came_true(lease)
        if busy == lease.busy:
            return False
        lease.last_active_ms, need_mib = self._changes.now_ms, lease.host_need_mib
        if busy and lease.state is LeaseState.RESIDENT and not (lease.let_in or lease.ticket or lease.gate.closed):
            self._changes.idle_costs.ran_at_once(lease)
        self._books.set_busy(lease, busy=busy)
        self._changes.forecast_recorder.busy_changed(lease, busy=busy)
        counted = lease.suspend_requested or lease.lease_id in self._books.expected_victims
        counted = counted or lease.gate.closed or self._eases_host_memory(lease, need_mib)
        counted = counted or self._books.goes_away(lease)
        if busy and not counted and not self._books.shares_by_time(lease):
            return False  # a lease that begins to work frees nothing
        return lease.state is LeaseState.RESIDENT

    def measured(self, lease: Lease, used_mib: int) -> bool:
        """Take a measurement of its device memory. Returns whether any decision depends on it."""
        if lease.state not in (LeaseState.NO_CONTEXT, LeaseState.RESIDENT, LeaseState.SUSPENDING):
            return False
        need_mib, stayed, used = lease.host_need_mib, lease.is_unsuspendable, lease.used_mib
        before_mib = lease.used_each_mib
        was_measured, lease.is_measured = lease.is_measured, True
        lease.used_mib = used_mib
        if lease.is_working:  # its residency and its cost depend on what it uses
            self._books.mark_changed(lease)
        lease.growth_mib = max(0, lease.used_each_mib - before_mib) if was_measured else 0
        breaches = self._memory_caps.measured(lease)
        matters = breaches or lease.is_unsuspendable != stayed or self._eases_host_memory(lease, need_mib)
        matters |= self._resizer.measured(lease)
        if used_mib != used and lease.state is LeaseState.NO_CONTEXT:
            self._books.note_unreserved(lease)
            matters = True
        if used_mib != used and self._books.goes_away(lease):
            matters = True  # so does the plan of what is saved before a deadline
        if used_mib != used and lease.busy and self._books.waiting:
            matters = True  # its use decides how long its swap takes, and so from when on it may be preempted
        if matters:
            self._books.mark_changed(lease)
        return matters

    def _eases_host_memory(self, lease: Lease, before_mib: int) -> bool:
        """Return whether the suspend of this lease takes less host memory than before, which it or a ticket may wait for."""
        return lease.host_need_mib < before_mib and (
            bool(self._books.waiting) or before_mib > self._books.host_left_mib
        )

    def shrunk(self, lease: Lease, event: Shrunk) -> bool:
        """Note that the kernel gave its caches back, or could not. Returns whether any decision depends on it."""
        if (
            not lease.shrink.is_requested
            or lease.generation != event.generation
            or lease.state is not LeaseState.RESIDENT
        ):
            return False
        lease.shrink.is_requested, lease.shrink.succeeded = False, event.used_mib is not None
        if event.used_mib is not None:
            self.measured(lease, max(0, event.used_mib))
            self._books.refresh(lease)
        return True

    def suspend_requested(self, lease: Lease, by: str) -> None:
        """Take a request of `by` (its user, an administrator) to suspend the lease, or decline it."""
        if lease.state is not LeaseState.RESIDENT:
            sentence = f"the kernel is {lease.state}: only a resident one can be suspended"
            self._changes.decline_suspend(lease, "not-resident", sentence)
        elif lease.left_behind:
            sentence = f"its kernel has ended, and {lease.left_behind} may be at work on the device: end it, or let it take its turns"
            self._changes.decline_suspend(lease, "busy", sentence)
        elif lease.busy:
            self._changes.decline_suspend(
                lease, "busy", "a cell is running: interrupt it, or try again when it has ended"
            )
        else:
            lease.suspend_requested_by = by  # served at once, or declined with the reason

    def checkpointable(self, lease: Lease, why_not: str) -> None:
        """Note whether the process can be checkpointed. If it can again, failed suspends delay the next one no longer."""
        if lease.why_not and not why_not:
            lease.retries.forget_suspends()
        lease.why_not = why_not
        update_suspendability(self._books, lease)
