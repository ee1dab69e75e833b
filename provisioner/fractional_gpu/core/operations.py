"""Applies the results of suspends and resumes, and recovers leases after a restart or from an unknown state.

**Suspends and resumes** either succeed, are rolled back and retried after a pause, or leave the lease in quarantine.

**Restarts.** A new broker does not replay events. For each lease in the ledger, it finds out the actual state from /proc and the driver,
and reports that state with a `LeaseRecovered` event (`recovered`). The lease may have no process, have a process without a context, be
resident, be suspended, or be in an unknown state. It keeps the memory it actually holds, even if that exceeds what is free. A lease in an
unknown state is quarantined.

**Quarantined leases** keep all the memory they might hold. The broker keeps checking until it knows their actual state (`truth_found`).
"""

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import LookAgain
from fractional_gpu.core.events import (
    HostMemoryNeeded,
    LeaseRecovered,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    TruthFound,
)
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.foresight import Expectations
from fractional_gpu.core.lifecycle import Lifecycle
from fractional_gpu.core.model import FOUND_FAILED, LeaseState
from fractional_gpu.core.resize import Resizer
from fractional_gpu.core.state.leases import Lease, Operation, Reason, pause_ms
from fractional_gpu.core.suspend import update_suspendability
from fractional_gpu.core.transitions import Cause, next_state

_FOUND = {
    LeaseState.UNATTACHED: (Cause.FOUND_UNATTACHED, "no process of this kernel"),
    LeaseState.NO_CONTEXT: (Cause.FOUND_NO_CONTEXT, "this kernel alive, with nothing on a GPU"),
    LeaseState.RESIDENT: (Cause.FOUND_RESIDENT, "this kernel on its GPU"),
    LeaseState.SUSPENDED: (Cause.FOUND_SUSPENDED, "this kernel's memory saved on the host"),
    LeaseState.QUARANTINED: (Cause.FOUND_UNKNOWN, "this kernel in an unknown state, which it is checking"),
}
"""Maps each state a lease can be found in to the cause of the transition and a human-readable description."""

_NEEDS_DEVICE = frozenset({LeaseState.RESIDENT, LeaseState.SUSPENDED})


class OperationResults:
    """Applies the results of suspends and resumes, and the states the broker found leases in."""

    def __init__(self, changes: Changes, lifecycle: Lifecycle) -> None:
        self._changes = changes
        self._books = changes.books
        self._lifecycle = lifecycle
        self._resizer = Resizer(changes)
        self._expectations = Expectations(changes)

    def suspended(self, event: SuspendFinished) -> None:
        changes, books = self._changes, self._books
        finished = changes.finish_operation(Operation(event.operation_id, event.lease_id, SUSPEND, event.generation))
        if finished is None:
            return
        lease, took_ms = finished
        sentence = event.sentence or f"the suspend ended: {event.outcome}"
        match event.outcome:
            case SuspendOutcome.SAVED:
                changes.forecast_recorder.swap_finished(SUSPEND, lease, event.saved_mib, took_ms)
                lease.used_mib = 0
                books.set_host_memory(lease, saved_mib=max(0, event.saved_mib))
                books.set_reservation(lease, lease.device_ids)
                self._leave_devices(lease, Cause.SAVED, "suspended", sentence)
                self._expectations.await_rhythm(lease)
            case SuspendOutcome.NOTHING_TO_SAVE:
                lease.used_mib, lease.home_ids = 0, ()
                books.set_host_memory(lease)
                books.set_reservation(lease, lease.device_ids)
                lease.target_ids = ()
                self._leave_devices(lease, Cause.NOTHING_TO_SAVE, "unarmed", sentence)
            case SuspendOutcome.UNKNOWN:
                changes.quarantine(lease, sentence)
            case _:
                if event.need_mib > lease.host_mib:
                    lease.shrink.host_floor_mib = event.need_mib
                self._roll_back(lease, event.outcome, sentence)

    def host_memory_needed(self, lease: Lease, event: HostMemoryNeeded) -> None:
        """Reserve more host memory for a suspend in progress, if enough is left."""
        is_current = lease.operation == Operation(event.operation_id, lease.lease_id, SUSPEND, event.generation)
        if is_current and 0 < event.need_mib - lease.host_mib <= self._books.host_left_mib:
            self._books.set_host_memory(lease, reserved_mib=event.need_mib)

    def _roll_back(self, lease: Lease, outcome: SuspendOutcome, sentence: str) -> None:
        """Keep a lease on its devices after a failed suspend, and schedule a retry. An aborted suspend is retried sooner."""
        retries, wait_ms = lease.retries, self._books.policy(lease).retry_refused_ms
        if outcome is SuspendOutcome.IMPOSSIBLE:
            lease.why_not = sentence
            update_suspendability(self._books, lease)
        self._books.set_host_memory(lease)
        lease.target_ids = ()
        lease.home_ids, lease.preempted = (), False
        retries.failed_suspends += 1
        if outcome is SuspendOutcome.ABORTED:
            wait_ms = pause_ms(retries.aborted_suspends, wait_ms)
            retries.aborted_suspends += 1
        retries.suspend_after_ms = self._changes.now_ms + wait_ms
        self._drop_ticket(lease)
        self._stay_on_devices(lease, Cause.ROLLED_BACK, f"suspend.{outcome}", sentence)

    def resumed(self, event: ResumeFinished) -> None:
        changes, books = self._changes, self._books
        finished = changes.finish_operation(Operation(event.operation_id, event.lease_id, RESUME, event.generation))
        if finished is None:
            return
        lease, took_ms = finished
        sentence = event.sentence or f"the resume ended: {event.outcome}"
        match event.outcome:
            case ResumeOutcome.RESTORED:
                changes.forecast_recorder.swap_finished(RESUME, lease, lease.saved_mib, took_ms)
                changes.forecast_recorder.ticket_ended(lease)
                lease.used_mib, lease.growth_mib = lease.saved_mib, 0  # until the next measurement
                books.set_host_memory(lease)
                changes.withdraw_ticket(lease)
                changes.become_resident(lease)
                lease.retries.forget_resumes()
                lease.target_ids = ()
                self._stay_on_devices(lease, Cause.RESTORED, "resumed", sentence)
            case ResumeOutcome.NOT_STARTED:
                books.set_reservation(lease, lease.home_ids)
                lease.target_ids = ()
                wait_ms = pause_ms(lease.retries.failed_resumes, books.policy(lease).retry_refused_ms)
                lease.retries.failed_resumes += 1
                lease.retries.resume_after_ms = changes.now_ms + max(1, wait_ms)
                changes.change_state(lease, Cause.NOT_STARTED, "resume.not-started", sentence)
            case ResumeOutcome.UNKNOWN:
                changes.quarantine(lease, sentence)

    def recovered(self, event: LeaseRecovered) -> None:
        """Take over a lease that a new broker found. Raise ValueError if its state is not in `_FOUND`."""
        if event.state not in _FOUND:
            allowed = ", ".join(sorted(_FOUND))
            raise ValueError(f"lease {event.spec.lease_id} cannot be recovered as {event.state}; expected {allowed}")
        if event.spec.lease_id in self._books.leases:
            return
        changes, state = self._changes, event.state
        device_ids = event.device_ids or ((event.device_id,) if event.device_id is not None else ())
        if state in _NEEDS_DEVICE and not device_ids:
            state = LeaseState.QUARANTINED
        cause, found = _FOUND[state]
        lease = Lease(spec=event.spec, state=next_state(None, cause), generation=event.generation)
        lease.since_ms = lease.arrived_ms = lease.last_active_ms = changes.now_ms
        lease.busy = event.busy and state is not LeaseState.UNATTACHED
        self._books.add(lease)
        self._settle_found(lease, state, device_ids, event.saved_mib)
        if event.pinned_until_ms > changes.now_ms and state is not LeaseState.UNATTACHED:
            changes.set_pin(lease, event.pinned_until_ms)
        sentence = event.sentence or f"the broker restarted and found {found}"
        changes.announce_state(lease, None, f"recovered.{state}", sentence)
        if state is LeaseState.QUARANTINED:
            changes.effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))

    def truth_found(self, lease: Lease, event: TruthFound) -> None:
        """Put a quarantined lease into its actual state, now that it is known."""
        changes, state = self._changes, event.state
        if lease.state is not LeaseState.QUARANTINED or lease.generation != event.generation:
            changes.record(lease.lease_id, "answer.stale", f"it was found {state}, but another answer came first")
            return
        if state is LeaseState.QUARANTINED and event.sentence:
            lease.reason, lease.sentence = FOUND_FAILED, event.sentence
            changes.record(lease.lease_id, FOUND_FAILED, event.sentence)
            changes.requeued.add(lease.spec.pool)  # so that a waiting cell shows the reason
            return
        device_ids = lease.device_ids
        if event.device_id is not None and event.device_id not in device_ids:
            # The event names only one device. If that is one of the lease's old devices, the lease is on all of its old devices.
            device_ids = lease.home_ids if event.device_id in lease.home_ids else (event.device_id,)
        if state is LeaseState.SUSPENDED:
            device_ids = lease.home_ids or device_ids  # a failed resume leaves it bound to its old devices
        is_unknown = state not in _FOUND or state is LeaseState.QUARANTINED
        if is_unknown or (state in _NEEDS_DEVICE and not device_ids):
            changes.record(lease.lease_id, "truth.impossible", f"it was found {state}, which needs another check")
            changes.effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))
            return
        if state is LeaseState.UNATTACHED:
            self._lifecycle.exited(lease)
            return
        self._settle_found(lease, state, device_ids, event.saved_mib or lease.saved_mib or lease.host_mib)
        told = _FOUND[state][0], f"found.{state}", f"the driver reports that the kernel is {state}"
        if state is LeaseState.RESIDENT:
            self._drop_ticket(lease)
            changes.become_resident(lease)
            lease.preempted = False
            self._stay_on_devices(lease, *told)
        else:
            self._leave_devices(lease, *told)

    def _settle_found(self, lease: Lease, state: LeaseState, device_ids: tuple[str, ...], saved_mib: int) -> None:
        """Record how much memory is held by a lease found in this state: at least as much as before, even if too little is free."""
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

    def _stay_on_devices(self, lease: Lease, cause: Cause, reason: str, sentence: str) -> None:
        """Make a lease resident. Its memory is still on its devices, or has been restored to them."""
        self._changes.change_state(lease, cause, reason, sentence)
        self._changes.emit_granted(lease)
        self._resizer.claim_missing(lease)

    def _leave_devices(self, lease: Lease, cause: Cause, reason: str, sentence: str) -> None:
        """Update a lease that has left its devices: change its state, apply any size it claimed, and file a ticket if it was preempted."""
        changes, ticket = self._changes, lease.ticket
        lease.retries.forget_suspends()
        claim = ticket.resize_to if ticket is not None else None
        if ticket is not None and claim is not None:  # off its devices, it can grow without room
            self._books.dequeue(lease)
            if self._resizer.is_allowed(lease, claim):
                self._books.resize(lease, claim)
            else:
                claim = None
            if ticket.after_suspend is not None:
                next_ticket = changes.new_ticket(first=True) if lease.target_ids else ticket.after_suspend
                next_ticket.kept_on = ticket.kept_on
                self._books.enqueue(lease, next_ticket)
        is_interrupted = (lease.preempted or bool(lease.left_behind)) and lease.busy and lease.ticket is None
        if is_interrupted:
            changes.file_ticket(lease, preempted=True)
        lease.preempted = False
        changes.change_state(lease, cause, reason, sentence)
        if claim is not None:
            changes.report_size(lease, "resize.done", "it gets its new size at its next resume")
        if is_interrupted:
            why = "its cell was paused to make room and continues when it is this kernel's turn again"
            changes.record_wait_reason(lease, Reason("wait.preempted", why))

    def _drop_ticket(self, lease: Lease) -> None:
        """Drop a lease's ticket now that its memory is on its devices, unless the ticket asks for more memory."""
        ticket = lease.ticket
        if ticket is not None and ticket.resize_to is not None:
            ticket.after_suspend, ticket.kept_on = None, ()
        else:
            self._changes.withdraw_ticket(lease)
