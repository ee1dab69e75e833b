"""Makes all changes to leases' states and tickets. Each change updates the books (`core.state.books`) and emits effects.

Methods that change states come first, followed by methods for the queue and gates, and for swaps. `transitions` defines which changes are
legal. `lifecycle` calls these methods to handle events, and `scheduler` calls them to serve the queue.
"""

from collections.abc import Sequence

from fractional_gpu.core.effects import (
    CloseGate,
    Declined,
    Effect,
    Granted,
    LeaseEnded,
    LookAgain,
    Pinned,
    Recorded,
    Resized,
    Resume,
    Shrink,
    StateChanged,
    Suspend,
    TicketsChanged,
)
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.idle import learn_cost
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.queue_wait import ForecastRecorder
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, Operation, Reason, SwapRetries, Ticket
from fractional_gpu.core.suspend import update_suspendability
from fractional_gpu.core.transitions import Cause, next_state
from fractional_gpu.core.units import format_duration, format_memory

_FEW, _ONE_OF = 64, 32  # with `_FEW` or more tickets, only one in `_ONE_OF` has its forecast compared with the outcome
_NOT_ON_DEVICE = (LeaseState.UNATTACHED, LeaseState.NO_CONTEXT, LeaseState.SUSPENDED, LeaseState.ENDED)
_AT_ONCE_MS = 100  # a shorter wait is reported as "at once"
_AHEAD_OF_ALL = 1 << 60  # moves a ticket ahead of any other order number


class Changes:
    """The books, the operations in progress, and the effects of the current event."""

    def __init__(self, *, parallel_swaps: int, forecasts: Forecasts | None = None) -> None:
        self.books = Books(forecasts)
        self.forecast_recorder = ForecastRecorder(self.books, self.books.forecasts, parallel_swaps=parallel_swaps)
        self.effects: list[Effect] = []
        self.operations: dict[int, Operation] = {}
        self.granted_devices: set[str] = set()  # devices where the event granted room
        self.requeued: set[str] = set()  # pools whose queue the event changed
        self._next_operation = 1
        self._next_order = 1
        self.parallel_swaps = parallel_swaps
        self.kept_channels = 0  # swap channels kept for the suspends that `Salvage` begins before a deadline

    @property
    def now_ms(self) -> int:
        """The time of the current event."""
        return self.books.now_ms

    def take_effects(self) -> list[Effect]:
        """Return the event's effects in order, and clear them."""
        for pool in sorted(self.requeued):
            self.effects.append(TicketsChanged(pool=pool))
        self.requeued.clear()
        effects, self.effects = self.effects, []
        return effects

    # -- states ------------------------------------------------------------------------------------------------------------------

    def change_state(self, lease: Lease, cause: Cause, reason: str, sentence: str) -> None:
        """Change the lease's state as `cause` requires. Raise IllegalTransitionError if `transitions.TABLE` does not allow it."""
        old = lease.state
        new = next_state(old, cause)
        lease.since_ms, lease.shrink.is_requested = self.now_ms, False  # an answer to an earlier request is ignored
        if new is LeaseState.RESIDENT and old is not LeaseState.SUSPENDING:
            lease.arrived_ms = self.now_ms
        if new in _NOT_ON_DEVICE:
            lease.forget_shrinking()
            lease.came_early = False
        self.books.set_state(lease, new)
        self.announce_state(lease, old, reason, sentence)

    def announce_state(self, lease: Lease, old: LeaseState | None, reason: str, sentence: str) -> None:
        lease.generation += 1
        lease.reason, lease.sentence = reason, sentence
        self.effects.append(
            StateChanged(
                lease_id=lease.lease_id,
                old=old,
                new=lease.state,
                generation=lease.generation,
                device_id=lease.device_id,
                saved_mib=lease.saved_mib,
            )
        )
        self.record(lease.lease_id, reason, sentence)
        if lease.spec.pool in self.books.waiting_pools:
            self.requeued.add(lease.spec.pool)

    def record(self, lease_id: str, reason: str, sentence: str) -> None:
        """Add a line to the lease's history."""
        self.effects.append(Recorded(lease_id=lease_id, at_ms=self.now_ms, reason=reason, sentence=sentence))

    def decline(self, lease: Lease, reason: str, sentence: str, *, about: str = "") -> None:
        self.effects.append(Declined(lease_id=lease.lease_id, reason=reason, sentence=sentence, about=about))
        self.record(lease.lease_id, f"declined.{reason}", sentence)

    def decline_suspend(self, lease: Lease, reason: str, sentence: str) -> None:
        """Decline the request to suspend the lease, and clear it."""
        lease.suspend_requested_by = None
        self.decline(lease, reason, sentence)

    def report_size(self, lease: Lease, reason: str, sentence: str) -> None:
        self.effects.append(
            Resized(
                lease_id=lease.lease_id,
                fraction_milli=lease.spec.fraction_milli,
                reserve_mib=lease.spec.reserve_mib,
                reserved_mib=lease.held_mib,
            )
        )
        self.record(lease.lease_id, reason, sentence)

    def emit_granted(self, lease: Lease) -> None:
        """Tell the driver to open a resident lease's gate, so that its cells can run."""
        granted = Granted(lease_id=lease.lease_id, device_ids=lease.device_ids, reserved_mib=lease.held_mib)
        self.effects.append(granted)

    def restart_expiry(self, lease: Lease) -> None:
        """Restart the time to live (`unattached_ttl_ms`) of a lease without a process."""
        lease.expires_ms = self.now_ms + self.books.policy(lease).unattached_ttl_ms

    def release_everything(self, lease: Lease) -> None:
        """Free everything the lease holds. An operation in progress keeps its swap channel until its worker answers."""
        self.withdraw_ticket(lease)
        self.books.parked.pop(lease.lease_id, None)
        lease.suspend_requested_by = None
        lease.target_ids = ()
        self.books.set_gate(lease, closed=False)
        lease.gate.open_until_ms = 0
        lease.busy = lease.has_run = lease.preempted = lease.let_in = False
        lease.home_ids, lease.operation, lease.expires_ms = (), None, None
        lease.used_mib, lease.unreserved_mib, lease.growth_mib, lease.is_measured = 0, 0, 0, False
        lease.retries = SwapRetries()
        lease.why_not = lease.unsuspendable_reason = lease.left_behind = ""
        self.forget_expectation(lease)
        lease.under_host_pressure = False
        self.books.set_reservation(lease, ())
        self.books.set_host_memory(lease)
        lease.worked_ms = 0

    def forget_expectation(self, lease: Lease) -> None:
        """Discard any prediction of when the lease's next cell will start."""
        lease.expectation = lease.rhythm_ms = None

    def set_pin(self, lease: Lease, until_ms: int) -> None:
        """Set when the pin ends (0 for no pin), and charge the remaining time to the owner's pin budget. No effect is emitted."""
        account = self.books.accounts.of(lease)
        spent_ms = account.spent_pin_ms(self.books.policy(lease), self.now_ms) - max(
            0, lease.pinned_until_ms - self.now_ms
        )
        account.pinned_ms, account.pinned_at_ms = max(0, spent_ms) + max(0, until_ms - self.now_ms), self.now_ms
        lease.pinned_until_ms = until_ms
        self.books.refresh(lease)

    def end(self, lease: Lease, cause: Cause, reason: str) -> None:
        if lease.spec.claim_ms:  # its programs may still use the memory
            for device in [self.books.devices[one] for one in lease.occupied_ids if one in self.books.devices]:
                self.books.set_strangers(device, device.stranger_mib + min(lease.used_each_mib, lease.held_mib))
        self.release_everything(lease)
        self.change_state(lease, cause, f"lease.{reason}", f"the lease is over: {reason}")
        self.books.remove(lease)
        self.forecast_recorder.lease_ended(lease)
        self.effects.append(LeaseEnded(lease_id=lease.lease_id, reason=reason))

    def quarantine(self, lease: Lease, sentence: str) -> None:
        """Quarantine a lease and ask the driver for its real state. Until the driver answers, all memory it might hold stays reserved."""
        lease.target_ids = ()
        self.change_state(lease, Cause.LOST_TRACK, "quarantined", sentence)
        self.effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))

    # -- the queue ---------------------------------------------------------------------------------------------------------------

    def file_ticket(
        self, lease: Lease, *, before_start: bool = False, urgent: bool = False, preempted: bool = False
    ) -> None:
        """Put the lease in the queue, or update its ticket if it has one. A revoked lease gets no ticket."""
        if lease.revoked:
            return
        old = lease.ticket
        if old is not None and old.resize_to is not None:
            old.after_suspend = old.after_suspend or self.new_ticket()
            old.after_suspend.urgent |= urgent
            return
        if old is not None and old.before_start >= before_start and old.urgent >= urgent:
            return
        self.books.dequeue(lease)
        ticket = old or self.new_ticket()
        ticket.before_start |= before_start
        ticket.urgent |= urgent
        ticket.preempted |= preempted
        self._enqueue(lease, ticket, fresh=old is None)

    def _enqueue(self, lease: Lease, ticket: Ticket, *, fresh: bool) -> None:
        self.books.enqueue(lease, ticket)
        if fresh and lease.need_mib and self.books.reserves_cap(lease):  # reservations by use have no fixed size
            self.books.forecasts.asked(lease.spec.pool, lease.need_mib, lease.count)
        # When many wait, a sample is enough. The forecasts shown to users are computed when they are read.
        if fresh and (len(self.books.waiting) < _FEW or not ticket.order % _ONE_OF):
            self.forecast_recorder.ticket_filed(lease)
        self.requeued.add(lease.spec.pool)

    def new_ticket(self, *, first: bool = False) -> Ticket:
        """Return a new ticket. Among tickets of the same priority, it comes last or, if `first` is set, first."""
        order = self._next_order - _AHEAD_OF_ALL if first else self._next_order
        ticket = Ticket(order=order, asked_ms=self.now_ms)
        self._next_order += 1
        return ticket

    def close_gate(self, lease: Lease) -> None:
        """Close the lease's gate, so that its kernel asks the arbiter before it runs the next cell."""
        if not lease.gate.closed:
            self.books.set_gate(lease, closed=True)
            self.effects.append(CloseGate(lease_id=lease.lease_id))

    def wait_at_gate(self, lease: Lease) -> None:
        """Queue the next cell of a lease whose gate is closed. None of the lease's cells run until the arbiter lets this one through."""
        self.books.set_gate(lease, closed=True, next_cell=lease.gate.ticket or self.new_ticket())

    def open_gate(self, lease: Lease) -> None:
        """Open the gate of a resident lease again, because no ticket needs its room any longer."""
        self.books.set_gate(lease, closed=False)
        self.emit_granted(lease)

    def withdraw_ticket(self, lease: Lease) -> None:
        """Take the lease out of the queue."""
        if self.books.dequeue(lease) is not None:
            self.requeued.add(lease.spec.pool)
        lease.target_ids = ()

    def record_wait_reason(self, lease: Lease, wait: Reason) -> None:
        """Record why the ticket is waiting in the lease's history, unless the last state change already gave the same reason."""
        ticket = lease.ticket
        if ticket is not None and ticket.reason != wait.code:
            ticket.reason = wait.code
            if wait.sentence != lease.sentence:
                self.record(lease.lease_id, wait.code, wait.sentence)
            self.requeued.add(lease.spec.pool)

    # -- operations --------------------------------------------------------------------------------------------------------------

    @property
    def channel_free(self) -> bool:
        """Whether a swap channel is free for a suspend or resume, not counting channels reserved for suspends before a deadline."""
        return len(self.operations) < self.parallel_swaps - self.kept_channels

    def grant(self, lease: Lease, device_ids: Sequence[str]) -> None:
        """Reserve room for a lease. If its state is saved, resume it. Otherwise, make it resident at once."""
        waited_ms = self.now_ms - lease.ticket.asked_ms if lease.ticket is not None else 0
        lease.let_in = lease.state is not LeaseState.UNATTACHED and (lease.spec.gated or lease.busy)
        own_mib = lease.unreserved_mib
        for device_id in lease.bound_ids:  # its memory no longer counts as a stranger's
            device = self.books.devices[device_id]
            self.books.set_strangers(device, device.stranger_mib - own_mib)
        lease.unreserved_mib = 0
        self.books.set_reservation(lease, device_ids, lease.need_mib)
        self.granted_devices.update(device_ids)
        learn_cost(self.books, lease, lease.ticket)
        waited = "at once" if waited_ms < _AT_ONCE_MS else f"after {format_duration(waited_ms)}"
        sentence = f"this kernel asked for the GPU and got it {waited}: {format_memory(lease.held_mib)} is reserved"
        if lease.state is LeaseState.SUSPENDED:
            self._begin_resume(lease, "resume.room", sentence)
            return
        self.forecast_recorder.ticket_ended(lease)
        self.withdraw_ticket(lease)
        self.become_resident(lease)
        if lease.spec.claim_ms:
            self.set_pin(lease, self.now_ms + lease.spec.claim_ms)
            self.effects.append(Pinned(lease_id=lease.lease_id, until_ms=lease.pinned_until_ms))
        if lease.state is LeaseState.UNATTACHED:
            self.restart_expiry(lease)
            lease.hold_until_ms = self.now_ms + max(1, self.books.policy(lease).unattached_hold_ms)
            self.change_state(lease, Cause.RESERVED, "grant.room", sentence)
        else:
            self.change_state(lease, Cause.GRANTED, "grant.room", sentence)
        self.emit_granted(lease)

    def become_resident(self, lease: Lease) -> None:
        """Reset the record of a lease that becomes resident. Its idle time starts now, so that its kernel has time to run a cell."""
        lease.last_active_ms, lease.is_measured = self.now_ms, False
        lease.has_run = lease.busy or lease.came_early
        lease.home_ids, lease.rhythm_ms = (), None
        if lease.busy:  # its waiting cell begins now
            self.forecast_recorder.busy_changed(lease, busy=True)
        lease.under_host_pressure = False
        update_suspendability(self.books, lease)

    def resume_early(self, lease: Lease, device_ids: Sequence[str], reason: str, sentence: str) -> None:
        """Resume a saved lease before any cell asks for it."""
        lease.let_in = False
        self.books.set_reservation(lease, device_ids, lease.need_mib)
        self.granted_devices.update(device_ids)
        self._begin_resume(lease, reason, sentence)

    def _begin_resume(self, lease: Lease, reason: str, sentence: str) -> None:
        self.change_state(lease, Cause.RESUME, reason, sentence)
        operation = self._new_operation(lease, RESUME)
        self.effects.append(
            Resume(
                lease_id=lease.lease_id,
                operation_id=operation.operation_id,
                generation=lease.generation,
                device_ids=lease.device_ids,
                from_device_ids=lease.home_ids,
                reserve_mib=lease.held_mib,
            )
        )

    def ask_to_shrink(self, lease: Lease) -> bool:
        """Ask an idle lease's kernel to free its caches, at most once between cells. Return whether an answer is pending."""
        able = lease.state is LeaseState.RESIDENT and not lease.busy and lease.spec.gated and not lease.is_unsuspendable
        if able and lease.shrink.succeeded is None and not lease.shrink.is_requested:
            lease.shrink.is_requested = True
            self.effects.append(Shrink(lease_id=lease.lease_id, generation=lease.generation))
        return able and lease.shrink.is_requested

    def begin_suspend(self, lease: Lease, reason: str, sentence: str, *, beneficiary: Lease | None = None) -> None:
        """Begin a suspend. If the lease is working, this preempts it. Raise ValueError if there is not enough host memory."""
        left_mib, need_mib = self.books.host_left_mib, lease.host_need_mib
        if need_mib > left_mib:
            raise ValueError(f"lease {lease.lease_id} needs {need_mib} MiB of host memory; only {left_mib} MiB is left")
        lease.suspend_requested_by = None
        lease.home_ids, lease.let_in = lease.device_ids, False
        next_cell = lease.gate.ticket
        lease.preempted, lease.sent_away = lease.is_working, reason == "suspend.asked"
        if lease.sent_away:
            self.forget_expectation(lease)
        self.books.set_gate(lease, closed=False)
        self.books.set_host_memory(lease, reserved_mib=min(need_mib + lease.host_margin_mib, left_mib))
        self.change_state(lease, Cause.SUSPEND, reason, sentence)
        operation = self._new_operation(lease, SUSPEND)
        self.effects.append(
            Suspend(
                lease_id=lease.lease_id,
                operation_id=operation.operation_id,
                generation=lease.generation,
                device_ids=lease.device_ids,
                host_mib=lease.host_mib,
                preempt=lease.preempted,
                between_cells=next_cell is not None,
                for_lease_id=beneficiary.lease_id if beneficiary is not None else "",
            )
        )
        if next_cell is not None and lease.ticket is None:
            self._enqueue(lease, next_cell, fresh=True)
        elif next_cell is not None and lease.ticket is not None:  # it waits to grow, or is being moved
            lease.ticket.after_suspend = lease.ticket.after_suspend or next_cell

    def _new_operation(self, lease: Lease, kind: str) -> Operation:
        """Record a suspend or resume on a free swap channel, with the generation of the lease's last state change."""
        operation = Operation(self._next_operation, lease.lease_id, kind, lease.generation, self.now_ms)
        self._next_operation += 1
        self.operations[operation.operation_id] = lease.operation = operation
        return operation

    def finish_operation(self, reported: Operation) -> tuple[Lease, int] | None:
        """Free the channel of a suspend or resume that has ended. Return its lease and duration in ms, or None for an outdated report."""
        operation = self.operations.get(reported.operation_id)
        known = operation == reported
        if known:
            del self.operations[reported.operation_id]
        lease = self.books.leases.get(reported.lease_id)
        if not known or lease is None or operation is None or lease.operation is not operation:
            sentence = f"the answer to {reported.kind} {reported.operation_id} came too late and was ignored"
            self.record(reported.lease_id, "answer.stale", sentence)
            return None
        lease.operation = None
        return lease, self.now_ms - operation.began_ms
