"""Handles the events in a lease's life, from its request to its end.

`Lifecycle` has one method per event. `StartReservations` limits the room that leases without a process may hold or queue for, because there
is no guarantee that their processes will ever start. (Admission limits how many such leases an owner may have.)

- An owner is a user, or the hub user of a seat. Each owner may always have one such lease that holds or queues for room. Further ones must
  fit within `unattached_share` of the pool's memory, and are not allowed if another owner's ticket is waiting only because of such leases.
  The rest are `parked`. A parked lease files a ticket once an earlier lease gets its process, ends or loses its room. That ticket queues
  behind any that other owners have filed in the meantime.
- Such a lease's room is kept for `unattached_hold_ms`. After that, any ticket that needs the room may take it. While no ticket is
  waiting in the pool, the lease keeps its room, so a kernel that starts slowly on an idle machine loses nothing.

`operations` handles the state a new broker finds after a restart, and leases that come out of quarantine.
"""

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import LeaseAdmitted, LeaseRefused
from fractional_gpu.core.events import LeaseRequested, Shrunk
from fractional_gpu.core.foresight import Expectations
from fractional_gpu.core.limits import end_pin, pool_mib, refusal
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.place import allowed_devices
from fractional_gpu.core.resize import MemoryCaps, Resizer
from fractional_gpu.core.state.leases import Lease
from fractional_gpu.core.suspend import update_suspendability
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_duration, format_memory


class StartReservations:
    """Decides which leases may hold or queue for room before their process starts."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def request(self, lease: Lease, *, urgent: bool = False) -> None:
        """File a ticket for a lease without a process. If its owner has too many such leases, park it instead."""
        books = self._books
        if lease.ticket is None and lease.lease_id not in books.parked:
            books.parked[lease.lease_id] = lease
            self.file_parked()
            if lease.lease_id in books.parked:
                pool = books.policy(lease)
                self._changes.record(
                    lease.lease_id,
                    "wait.unattached",
                    f"other kernels of {lease.spec.owner!r} are still starting, and kernels that have not started may hold at most "
                    f"{pool.unattached_share_milli / 10:g} % of pool {pool.name!r}: this one queues once one of them has started",
                )
        if lease.ticket is not None:
            self._changes.file_ticket(lease, before_start=True, urgent=urgent)

    def file_parked(self) -> None:
        """File tickets for as many parked leases as their owners' limits allow, in the order the leases were parked."""
        if not self._books.parked:
            return
        taken_mib = self._taken_mib()
        full: set[tuple[str, str]] = set()
        for lease in list(self._books.parked.values()):
            owner = _owner(lease)
            there_mib, need_mib = taken_mib.get(owner, 0), lease.need_mib * lease.count
            if owner in full or (there_mib and not self._may_have_more(lease, there_mib + need_mib)):
                full.add(owner)  # a smaller lease of the same owner must not overtake it
                continue
            taken_mib[owner] = there_mib + need_mib
            del self._books.parked[lease.lease_id]
            self._changes.file_ticket(lease, before_start=True)

    def _taken_mib(self) -> dict[tuple[str, str], int]:
        """Return how much memory leases without a process hold or are queueing for, in MiB, by pool and owner."""
        taken: dict[tuple[str, str], int] = {}
        for lease in self._books.in_state(LeaseState.UNATTACHED):
            asks = lease.ticket is not None and lease.ticket.before_start
            mib = lease.held_mib or (lease.need_mib if asks else 0)
            taken[_owner(lease)] = taken.get(_owner(lease), 0) + mib * lease.count
        return taken

    def _may_have_more(self, lease: Lease, mib: int) -> bool:
        """Return whether this lease's owner, who already has room, may have a total of `mib` for leases without a process."""
        pool = self._books.policy(lease)
        share_mib = pool_mib(self._books, pool) * pool.unattached_share_milli // 1000
        return mib <= share_mib and not self._keep_out_others(lease)

    def _keep_out_others(self, lease: Lease) -> bool:
        """Return whether leases without a process are all that stops another owner's ticket from finding room."""
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

    def reclaim_lapsed(self, *, first: bool = False) -> bool:
        """Free room whose hold time has expired, if another lease in the pool could use it. Return whether any was freed.

        Set `first` if the queue has not been served yet. In that case, room is freed only for tickets that don't fit anywhere, to spare
        other leases a needless suspend.
        """
        freed = False
        for lease in self._books.in_state(LeaseState.UNATTACHED):
            if self._has_lapsed(lease) and self._is_wanted(lease, first=first):
                self._reclaim(lease)
                freed = True
        return freed

    def _has_lapsed(self, lease: Lease) -> bool:
        holds = lease.state is LeaseState.UNATTACHED and lease.has_reservation
        return holds and lease.hold_until_ms <= self._books.now_ms

    def _is_wanted(self, lease: Lease, *, first: bool) -> bool:
        """Return whether a waiting ticket or a parked lease could use the lease's room."""
        pool = lease.spec.pool
        waiting = [other for other in self._books.waiting.values() if other.spec.pool == pool and other is not lease]
        if any(other.waits_for_room and not (first and self._fits(other)) for other in waiting):
            return True
        return not first and any(other.spec.pool == pool for other in self._books.parked.values())

    def _fits(self, lease: Lease) -> bool:
        devices = [self._books.devices[device_id] for device_id in allowed_devices(self._books, lease)]
        return sum(device.free_mib >= lease.ask_mib for device in devices) >= lease.count

    def _reclaim(self, lease: Lease) -> None:
        kept, mib = self._books.policy(lease).unattached_hold_ms, lease.held_mib
        self._changes.withdraw_ticket(lease)  # it may have waited to grow
        self._books.set_reservation(lease, ())
        # Otherwise its owner's next lease, which has not used anything either, would be served first again and again.
        self._books.accounts.fall_behind(lease)
        self._changes.change_state(
            lease,
            Cause.LAPSED,
            "grant.lapsed",
            f"no process started within {format_duration(kept)} and another kernel is waiting, so its {format_memory(mib)} was freed",
        )


def _owner(lease: Lease) -> tuple[str, str]:
    return lease.spec.pool, lease.spec.owner


class Lifecycle:
    """Applies lease events, with one method for each kind."""

    def __init__(self, changes: Changes, memory_caps: MemoryCaps) -> None:
        self._changes = changes
        self._books = changes.books
        self._memory_caps = memory_caps
        self._resizer = Resizer(changes)
        self._start_reservations = StartReservations(changes)
        self._expectations = Expectations(changes)

    def requested(self, event: LeaseRequested) -> None:
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

    def attached(self, lease: Lease, *, gated: bool) -> None:
        """Record that the lease's process has started."""
        if lease.left_behind:
            lease.left_behind, lease.last_active_ms = "", self._changes.now_ms
            self._changes.record(lease.lease_id, "attached", "a new kernel runs next to what the last one left behind")
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
                lease, Cause.ATTACHED_RESERVED, "attached", "the kernel runs and has its reservation"
            )
            self._changes.emit_granted(lease)
            return
        self._changes.change_state(lease, Cause.ATTACHED, "attached", "the kernel runs and has not used a GPU yet")
        if not gated:  # nothing stops it from using the GPU
            self._changes.file_ticket(lease)

    def left_behind(self, lease: Lease, what: str) -> None:
        """Keep the lease's room because processes have outlived its kernel, and treat it as busy. If it is suspended, file a ticket."""
        changes = self._changes
        if not (lease.held_mib or lease.saved_mib) or lease.state is LeaseState.UNATTACHED:
            return
        begins, lease.left_behind = not lease.left_behind, what
        if begins:
            end_pin(changes, lease, "the kernel process ended, so its pin has ended too")
            if lease.busy:
                changes.forecast_recorder.busy_changed(lease, busy=False)
            changes.forget_expectation(lease)
            if lease.gate.ticket is not None:  # the cell ended with its kernel
                self._books.set_gate(lease, closed=True)
            self._books.set_busy(lease, busy=True)
            sentence = f"the kernel process ended; {what} still holds device memory, so the lease keeps its room"
            changes.record(lease.lease_id, "left-behind", sentence)
            if lease.suspend_requested:
                changes.decline_suspend(lease, "busy", sentence)
        if lease.state in (LeaseState.SUSPENDED, LeaseState.RESUMING):  # a resume may fail to start
            changes.file_ticket(lease, preempted=True)
        changes.requeued |= self._books.waiting_pools  # tickets waiting for its room show why

    def exited(self, lease: Lease) -> None:
        """Free everything the lease holds, because its process is gone."""
        if lease.state is LeaseState.UNATTACHED:
            return
        end_pin(self._changes, lease, "the kernel process ended, so its pin has ended too")
        if lease.busy and not lease.left_behind:
            self._changes.forecast_recorder.busy_changed(lease, busy=False)
        if lease.revoked:  # there is no server that could start another kernel
            self._changes.end(lease, Cause.RELEASED, "seat-ended")
            return
        self._changes.release_everything(lease)
        self._changes.restart_expiry(lease)
        self._changes.change_state(
            lease, Cause.EXITED, "process.exited", "the kernel process ended; everything it held is free"
        )

    def released(self, lease: Lease, reason: str) -> None:
        if lease.pinned_until_ms:
            self._changes.set_pin(lease, 0)
        self._changes.end(lease, Cause.RELEASED, reason)

    def wanted(self, lease: Lease, *, urgent: bool) -> None:
        """Let the kernel's cell run if the lease is on a device. Otherwise file a ticket for the lease."""
        if lease.revoked:
            return
        self._expectations.came_true(lease)
        if lease.state is LeaseState.RESIDENT:
            lease.last_active_ms = self._changes.now_ms
            if lease.suspend_requested:
                self._changes.decline_suspend(lease, "busy", "a cell is about to run: try again when it has ended")
            # A closed gate keeps the cell waiting for an older ticket, so that the lease can be suspended between cells.
            if lease.gate.closed and not urgent:
                self._changes.wait_at_gate(lease)
                return
            if lease.gate.closed:
                self._books.set_gate(lease, closed=False)
            self._changes.emit_granted(lease)
        elif lease.state is LeaseState.UNATTACHED and lease.has_reservation:
            self._changes.emit_granted(lease)
        elif lease.state is LeaseState.UNATTACHED and (not lease.spec.gated or lease.lease_id in self._books.parked):
            self._start_reservations.request(lease, urgent=urgent)
        else:
            self._changes.file_ticket(lease, before_start=not lease.spec.gated, urgent=urgent)

    def unwanted(self, lease: Lease, *, interrupted: bool = False) -> None:
        """Withdraw the ticket, unless a preempted cell, a growing lease or a process left behind still needs it."""
        ticket = lease.ticket
        self._books.set_let_in(lease, let_in=False)
        self._books.parked.pop(lease.lease_id, None)
        if interrupted and (ticket or lease.gate.ticket):
            self._changes.record(lease.lease_id, "wait.given-up", "stopped waiting (interrupted)")
        if lease.gate.ticket is not None:
            self._books.set_gate(lease, closed=True)
            return
        if ticket is None or (ticket.preempted and lease.busy) or (lease.left_behind and ticket.resize_to is None):
            return
        if ticket.resize_to is not None:
            ticket.after_suspend = ticket.after_suspend if lease.target_ids else None
            return
        self._changes.forecast_recorder.ticket_ended(lease, given_up=True)
        self._changes.withdraw_ticket(lease)

    def busy_changed(self, lease: Lease, *, busy: bool, by_cell: bool) -> None:
        """Record that the kernel has become busy or idle."""
        if lease.state is LeaseState.UNATTACHED or lease.left_behind:
            return
        if busy and by_cell:  # the kernel may be busy already because of a completion
            self._expectations.came_true(lease)
        if busy == lease.busy:
            return
        lease.last_active_ms = self._changes.now_ms
        self._books.set_busy(lease, busy=busy)
        self._changes.forecast_recorder.busy_changed(lease, busy=busy)

    def measured(self, lease: Lease, used_mib: int) -> None:
        """Record a measurement of the lease's device memory."""
        if lease.state not in (LeaseState.NO_CONTEXT, LeaseState.RESIDENT, LeaseState.SUSPENDING):
            return
        before_mib, was_measured = lease.used_each_mib, lease.is_measured
        lease.used_mib, lease.is_measured = used_mib, True
        lease.growth_mib = max(0, lease.used_each_mib - before_mib) if was_measured else 0
        self._memory_caps.measured(lease)
        self._resizer.measured(lease)
        if lease.state is LeaseState.NO_CONTEXT:
            self._books.note_unreserved(lease)

    def shrunk(self, lease: Lease, event: Shrunk) -> None:
        """Record whether the kernel freed its caches."""
        if (
            not lease.shrink.is_requested
            or lease.generation != event.generation
            or lease.state is not LeaseState.RESIDENT
        ):
            return
        lease.shrink.is_requested, lease.shrink.succeeded = False, event.used_mib is not None
        if event.used_mib is not None:
            self.measured(lease, max(0, event.used_mib))
            self._books.refresh(lease)

    def suspend_requested(self, lease: Lease, by: str) -> None:
        """Accept or decline a request to suspend the lease. `by` says who made it, such as its user or an administrator."""
        if lease.state is not LeaseState.RESIDENT:
            sentence = f"the kernel is {lease.state}: only a resident kernel can be suspended"
            self._changes.decline_suspend(lease, "not-resident", sentence)
        elif lease.left_behind:
            sentence = f"its kernel has ended, but {lease.left_behind} might still be using the device: end it, or wait for its turn to end"
            self._changes.decline_suspend(lease, "busy", sentence)
        elif lease.busy:
            self._changes.decline_suspend(
                lease, "busy", "a cell is running: interrupt it, or try again when it has ended"
            )
        else:
            lease.suspend_requested_by = by  # `Scheduler` begins it, or declines with the reason

    def checkpointable(self, lease: Lease, why_not: str) -> None:
        """Record whether the process can be checkpointed. Once it can be again, earlier failures no longer delay suspends."""
        if lease.why_not and not why_not:
            lease.retries.forget_suspends()
        lease.why_not = why_not
        update_suspendability(self._books, lease)
