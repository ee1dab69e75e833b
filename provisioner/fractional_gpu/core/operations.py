"""Results of operations: suspends, resumes, and searches for the truth about quarantined leases."""

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import LookAgain
from fractional_gpu.core.events import (
    HostMemoryNeeded,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    TruthFound,
)
from fractional_gpu.core.forecasts.forecasts import RESUME, SUSPEND
from fractional_gpu.core.foresight import Expectations
from fractional_gpu.core.lifecycle import FOUND, NEEDS_DEVICE, Lifecycle
from fractional_gpu.core.model import FOUND_FAILED, LeaseState
from fractional_gpu.core.resize import Resizer
from fractional_gpu.core.state.leases import Lease, Operation, Reason
from fractional_gpu.core.suspend import update_suspendability
from fractional_gpu.core.transitions import Cause

_FIRST_RETRY_MS = 1000  # after a resume that could not start; doubled each time, up to the pool's `retry_refused_ms`


class OperationResults:
    """One method per kind of result."""

    def __init__(self, changes: Changes, lifecycle: Lifecycle, resizing: Resizer, expectations: Expectations) -> None:
        self._expectations = expectations
        self._resizer = resizing
        self._changes = changes
        self._books = changes.books
        self._lifecycle = lifecycle

    def suspended(self, event: SuspendFinished) -> None:
        """Take the outcome of a suspend."""
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
                lease.retries.forget_suspends()
                books.set_host_memory(lease, saved_mib=max(0, event.saved_mib))
                books.set_reservation(lease, lease.device_ids)
                came_back = self._settle_claims(lease)
                changes.change_state(lease, Cause.SAVED, "suspended", sentence)
                self._expectations.await_rhythm(lease)
                self._record_return(lease, came_back)
            case SuspendOutcome.NOTHING_TO_SAVE:
                lease.used_mib, lease.home_ids = 0, ()
                lease.retries.forget_suspends()
                books.set_host_memory(lease)
                books.set_reservation(lease, lease.device_ids)
                lease.target_ids = ()
                came_back = self._settle_claims(lease)
                changes.change_state(lease, Cause.NOTHING_TO_SAVE, "unarmed", sentence)
                self._record_return(lease, came_back)
            case SuspendOutcome.UNKNOWN:
                changes.quarantine(lease, sentence)
            case _:  # rolled back
                if event.need_mib > lease.host_mib:
                    lease.shrink.host_floor_mib = event.need_mib
                self._rolled_back(lease, event.outcome, sentence)

    def host_memory_needed(self, lease: Lease, event: HostMemoryNeeded) -> None:
        """Reserve what a suspend under way needs beyond its reservation, if the host has that left."""
        books, operation = self._books, lease.operation
        known = (event.operation_id, SUSPEND, event.generation)
        if operation is None or (operation.operation_id, operation.kind, operation.generation) != known:
            return
        if 0 < event.need_mib - lease.host_mib <= books.host_left_mib:
            books.set_host_memory(lease, reserved_mib=event.need_mib)

    def _settle_claims(self, lease: Lease) -> tuple[bool, bool]:
        """Apply a claim to grow, and give a preempted kernel a ticket. Returns whether a ticket was filed, and a claim applied."""
        changes, claim = self._changes, lease.ticket.resize_to if lease.ticket is not None else None
        if lease.ticket is not None and claim is not None:  # on no device, it needs no room to grow
            then, kept_on = lease.ticket.after_suspend, lease.ticket.kept_on
            self._books.dequeue(lease)
            if self._resizer.is_allowed(lease, claim):
                self._books.resize(lease, claim)
            else:
                claim = None
            if then is not None:
                ticket = changes.new_ticket(first=True) if lease.target_ids else then
                ticket.kept_on = kept_on
                self._books.enqueue(lease, ticket)
        files = (lease.preempted or bool(lease.left_behind)) and lease.busy and lease.ticket is None
        if files:
            changes.file_ticket(lease, preempted=True)
        lease.preempted = False
        return files, claim is not None

    def _record_return(self, lease: Lease, came_back: tuple[bool, bool]) -> None:
        files, grew = came_back
        if grew:
            self._changes.report_size(lease, "resize.done", "its new size is there from its next resume on")
        if files:
            why = "its cell had to make room and goes on when it is this kernel's turn again"
            self._changes.record_wait_reason(lease, Reason("wait.preempted", why))

    def _rolled_back(self, lease: Lease, outcome: SuspendOutcome, sentence: str) -> None:
        changes = self._changes
        if outcome is SuspendOutcome.IMPOSSIBLE:
            lease.why_not = sentence
            update_suspendability(self._books, lease)
        self._books.set_host_memory(lease)
        lease.target_ids = ()
        lease.home_ids, lease.preempted = (), False
        lease.retries.failed_suspends += 1
        lease.retries.suspend_after_ms = changes.now_ms + self._pause_ms(lease, outcome)
        self._drop_ticket(lease)
        changes.change_state(lease, Cause.ROLLED_BACK, f"suspend.{outcome}", sentence)
        changes.emit_granted(lease)
        self._resizer.claim_missing(lease)

    def _drop_ticket(self, lease: Lease) -> None:
        """Drop the ticket of a lease that is still, or again, on its device; a claim to grow stays."""
        ticket = lease.ticket
        if ticket is not None and ticket.resize_to is not None:
            ticket.after_suspend, ticket.kept_on = None, ()
        else:
            self._changes.withdraw_ticket(lease)

    def _pause_ms(self, lease: Lease, outcome: SuspendOutcome) -> int:
        """Return how long no suspend is tried: long if the lease cannot be saved, else a moment, doubled with each failure."""
        longest_ms = self._books.policy(lease).retry_refused_ms
        if outcome is not SuspendOutcome.ABORTED:
            return longest_ms
        lease.retries.aborted_suspends += 1
        return min(_FIRST_RETRY_MS << min(lease.retries.aborted_suspends - 1, 16), longest_ms)

    def resumed(self, event: ResumeFinished) -> None:
        """Take the outcome of a resume."""
        changes, books = self._changes, self._books
        finished = changes.finish_operation(Operation(event.operation_id, event.lease_id, RESUME, event.generation))
        if finished is None:
            return
        lease, took_ms = finished
        sentence = event.sentence or f"the resume ended: {event.outcome}"
        match event.outcome:
            case ResumeOutcome.RESTORED:
                changes.forecast_recorder.swap_finished(RESUME, lease, lease.saved_mib, took_ms)
                changes.forecast_recorder.ticket_served(lease)
                lease.used_mib, lease.growth_mib = lease.saved_mib, 0  # until the next measurement
                books.set_host_memory(lease)
                changes.withdraw_ticket(lease)
                changes.become_resident(lease)
                lease.retries.forget_resumes()
                lease.target_ids = ()
                changes.change_state(lease, Cause.RESTORED, "resumed", sentence)
                changes.emit_granted(lease)
                self._resizer.claim_missing(lease)
            case ResumeOutcome.NOT_STARTED:
                books.set_reservation(lease, lease.home_ids)
                lease.target_ids = ()
                retry_ms = min(
                    _FIRST_RETRY_MS << min(lease.retries.failed_resumes, 16), books.policy(lease).retry_refused_ms
                )
                lease.retries.failed_resumes += 1
                changes.pause_resume(lease, changes.now_ms + max(1, retry_ms))
                changes.change_state(lease, Cause.NOT_STARTED, "resume.not-started", sentence)
            case ResumeOutcome.UNKNOWN:
                changes.quarantine(lease, sentence)

    def truth_found(self, lease: Lease, event: TruthFound) -> None:
        """Take the truth about a quarantined lease."""
        changes = self._changes
        if lease.state is not LeaseState.QUARANTINED or lease.generation != event.generation:
            changes.record(lease.lease_id, "answer.stale", f"it was found {event.state}, after another answer had come")
            return
        if event.state is LeaseState.QUARANTINED and event.sentence:
            lease.reason, lease.sentence = FOUND_FAILED, event.sentence
            changes.record(lease.lease_id, FOUND_FAILED, event.sentence)
            changes.requeued.add(lease.spec.pool)  # a waiting cell shows the reason
            return
        device_ids = lease.device_ids
        if event.device_id is not None and event.device_id not in device_ids:
            # One device is named. A lease on several is where it was before its resume, or on that device alone.
            device_ids = lease.home_ids if event.device_id in lease.home_ids else (event.device_id,)
        if event.state is LeaseState.SUSPENDED:
            device_ids = lease.home_ids or device_ids  # a failed resume leaves the state where it was saved from
        unknown = event.state not in FOUND or event.state is LeaseState.QUARANTINED
        if unknown or (event.state in NEEDS_DEVICE and not device_ids):
            changes.record(lease.lease_id, "truth.impossible", f"it was found {event.state}, which cannot be all")
            changes.effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))
            return
        if event.state is LeaseState.UNATTACHED:
            self._lifecycle.exited(lease)
            return
        saved_mib = event.saved_mib or lease.saved_mib or lease.host_mib
        self._lifecycle.settle_found(lease, event.state, device_ids, saved_mib)
        sentence = f"the driver says that the kernel is {event.state}"
        if event.state is LeaseState.RESIDENT:
            self._drop_ticket(lease)
            changes.become_resident(lease)
        came_back = (False, False) if event.state is LeaseState.RESIDENT else self._settle_claims(lease)
        lease.preempted = False
        changes.change_state(lease, FOUND[event.state], f"found.{event.state}", sentence)
        self._record_return(lease, came_back)
        if event.state is LeaseState.RESIDENT:
            changes.emit_granted(lease)
            self._resizer.claim_missing(lease)
