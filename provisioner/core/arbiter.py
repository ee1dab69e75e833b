"""The arbiter decides who holds which GPU: events in, effects out, nothing else.

`handle` is the one mutator. It updates the books by the event, then serves whoever waits (`serving`). It has no clock (time arrives on
the event), does no I/O, and counts in integers; the same events give the same effects, bit for bit. Operations (suspend, resume) take
time: they are effects with an operation id and the lease's generation, and come back as events with the same two. An answer whose lease
has moved on gives its swap channel back and is otherwise recorded and ignored; one that names no operation under way is only recorded.

Events about leases that do not exist (any more) are ignored: the world is always a little behind. An event that cannot be true
(a lease recovered in the middle of an operation) raises ValueError before anything changes.
"""

from provisioner.core.changes import Changes
from provisioner.core.effects import Effect, LeaseAdmitted, LeaseRefused, LookAgain, WakeAt
from provisioner.core.events import (
    Attached,
    BusyChanged,
    Checkpointable,
    DeviceLost,
    DeviceSeen,
    Event,
    HostMemorySeen,
    HostPressureSeen,
    LeaseMeasured,
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    PoolConfigured,
    ProcessExited,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
    Tick,
    TruthFound,
    Unwanted,
    Wanted,
)
from provisioner.core.invariants import check_devices, validate
from provisioner.core.model import DeviceView, LeaseState, LeaseView, PoolSpec, TicketView
from provisioner.core.requests import refusal
from provisioner.core.serving import Serving
from provisioner.core.state import Device, Lease, Operation
from provisioner.core.staying import note, note_all
from provisioner.core.transitions import Cause, next_state
from provisioner.core.units import format_memory

__all__ = ["Arbiter"]

_FOUND = {
    LeaseState.UNATTACHED: Cause.FOUND_UNATTACHED,
    LeaseState.UNARMED: Cause.FOUND_UNARMED,
    LeaseState.RESIDENT: Cause.FOUND_RESIDENT,
    LeaseState.SUSPENDED: Cause.FOUND_SUSPENDED,
    LeaseState.QUARANTINED: Cause.FOUND_UNKNOWN,
}
_SOMEWHERE = frozenset({LeaseState.RESIDENT, LeaseState.SUSPENDED})  # found on a device, or saved from one
_FIRST_RETRY_MS = 1000  # after a resume that could not start; doubled each time, up to the pool's `retry_refused_ms`
_AboutALease = (
    Attached
    | ProcessExited
    | LeaseReleased
    | Wanted
    | Unwanted
    | BusyChanged
    | Checkpointable
    | HostPressureSeen
    | LeaseMeasured
    | SuspendRequested
    | TruthFound
)


class Arbiter:
    """See the module. `parallel_swaps` operations run at a time; `check` asserts the devices every event touched."""

    def __init__(self, *, first_operation_id: int = 1, parallel_swaps: int = 1, check: bool = True) -> None:
        self._changes = Changes(first_operation_id=first_operation_id, parallel_swaps=parallel_swaps)
        self._books = self._changes.books
        self._serving = Serving(self._changes)
        self._wake_ms: int | None = None
        self._check = check

    # -- what others may read -----------------------------------------------------------------------------------------

    def lease(self, lease_id: str) -> LeaseView | None:
        """Return one lease, or None if there is none such (any more)."""
        lease = self._books.leases.get(lease_id)
        return None if lease is None else lease.view()

    def leases(self) -> list[LeaseView]:
        """Return every living lease, oldest first."""
        return [lease.view() for lease in self._books.leases.values()]

    def ticket(self, lease_id: str) -> TicketView | None:
        """Return the lease's place in the queue, or None if it does not wait."""
        lease = self._books.leases.get(lease_id)
        return None if lease is None else self._books.ticket_view(lease)

    def tickets(self, pool: str) -> list[TicketView]:
        """Return a pool's queue in order."""
        return self._books.ticket_views(pool)

    def devices(self) -> list[DeviceView]:
        """Return every device."""
        return self._books.device_views()

    def pools(self) -> dict[str, PoolSpec]:
        """Return the pools by name."""
        return dict(self._books.pools)

    @property
    def host_budget_mib(self) -> int:
        """Host memory that suspended state may take in all."""
        return self._books.host_budget_mib

    @property
    def host_saved_mib(self) -> int:
        """Host memory that suspended state takes."""
        return self._books.host_saved_mib

    @property
    def host_reserved_mib(self) -> int:
        """Host memory reserved for suspends under way."""
        return self._books.host_reserved_mib

    def validate(self) -> None:
        """Check the whole state. Raises InvariantError that lists what is broken."""
        validate(self._books, self._changes.operations)

    # -- the one mutator ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """Take an event in and return what is to be done, in order. Raises ValueError or TypeError for what can be no event."""
        changes = self._changes
        changes.now_ms = max(changes.now_ms, event.at_ms)
        matters = self._take(event)
        if matters or (self._wake_ms is not None and changes.now_ms >= self._wake_ms):
            self._serving.serve()
            self._set_wake(anew=isinstance(event, Tick))
        elif isinstance(event, Tick):
            self._set_wake(anew=True)
        if self._check:
            check_devices(self._books, changes.touched)
        changes.touched.clear()
        return changes.take_effects()

    def _set_wake(self, *, anew: bool) -> None:
        """A tick uses the alarm up, however early it came."""
        wake_ms = self._serving.wake_ms()
        if wake_ms != self._wake_ms or (anew and wake_ms is not None):
            self._wake_ms = wake_ms
            self._changes.effects.append(WakeAt(at_ms=wake_ms))

    def _take(self, event: Event) -> bool:  # noqa: C901 - one case per event
        """Take the event into the books. Returns False if that cannot change what anybody gets."""
        match event:
            case DeviceSeen():
                self._device_seen(event)
            case DeviceLost():
                if event.device_id in self._books.devices:
                    self._books.devices[event.device_id].lost = True
            case PoolConfigured():
                self._books.pools[event.pool.name] = event.pool
                note_all(self._books, self._books.leases.values())
            case HostMemorySeen():
                self._books.host_budget_mib = event.budget_mib
            case LeaseRequested():
                self._requested(event)
            case LeaseRecovered():
                self._recovered(event)
            case Tick():
                return False
            case SuspendFinished():
                self._suspend_finished(event)
            case ResumeFinished():
                self._resume_finished(event)
            case _:
                return self._take_about_lease(event)
        return True

    def _take_about_lease(self, event: Event) -> bool:  # noqa: C901, PLR0912 - one case per event
        if not isinstance(event, _AboutALease):
            raise TypeError(f"the arbiter does not know the event {type(event).__name__}")
        lease = self._books.leases.get(event.lease_id)
        if lease is None:
            return False
        match event:
            case Attached():
                self._attached(lease, gated=event.gated)
            case ProcessExited():
                self._exited(lease)
            case LeaseReleased():
                self._changes.end(lease, Cause.RELEASED, "released")
            case Wanted():
                self._wanted(lease, urgent=event.urgent)
            case Unwanted():
                self._changes.withdraw(lease)
            case BusyChanged():
                return self._busy_changed(lease, busy=event.busy)
            case LeaseMeasured():
                return self._measured(lease, max(0, event.used_mib))
            case SuspendRequested():
                self._suspend_asked(lease)
            case Checkpointable():
                lease.why_not = event.why_not
                note(self._books, lease)
            case HostPressureSeen():
                self._changes.press(lease, pressed=event.pressed and lease.state is LeaseState.SUSPENDED)
            case TruthFound():
                self._truth_found(lease, event)
        return True

    # -- events --------------------------------------------------------------------------------------------------------------

    def _device_seen(self, event: DeviceSeen) -> None:
        device = self._books.devices.get(event.device.device_id)
        news = device is None or device.spec != event.device
        if device is None:
            device = self._books.devices[event.device.device_id] = Device(spec=event.device)
            for lease in self._books.leases.values():  # recovered before its device came
                if lease.device_id == event.device.device_id:
                    device.reserved_mib += lease.held_mib
        device.spec, device.stranger_mib, device.lost = event.device, max(0, event.stranger_mib), False
        if news:
            note_all(self._books, self._books.leases.values())

    def _requested(self, event: LeaseRequested) -> None:
        spec, changes = event.spec, self._changes
        refused = refusal(self._books, spec)
        if refused is not None:
            refusal_effect = LeaseRefused(lease_id=spec.lease_id, reason=refused.reason, sentence=refused.sentence)
            changes.effects.append(refusal_effect)
            return
        lease = Lease(spec=spec, since_ms=changes.now_ms, last_active_ms=changes.now_ms)
        changes.restart_expiry(lease)
        self._books.add(lease)
        changes.effects.append(LeaseAdmitted(lease_id=spec.lease_id))
        changes.announce(lease, None, "lease.admitted", f"admitted with up to {format_memory(spec.reserve_mib)}")
        if event.needs_reservation:
            changes.file_ticket(lease, before_start=True)

    def _recovered(self, event: LeaseRecovered) -> None:
        if event.state not in _FOUND:
            allowed = ", ".join(sorted(_FOUND))
            raise ValueError(f"lease {event.spec.lease_id} cannot be recovered as {event.state}; allowed: {allowed}")
        if event.spec.lease_id in self._books.leases:
            return
        changes, state = self._changes, event.state
        if state in _SOMEWHERE and event.device_id is None:
            state = LeaseState.QUARANTINED  # resident or saved, but where? that is no truth
        lease = Lease(spec=event.spec, state=next_state(None, _FOUND[state]), generation=event.generation)
        lease.since_ms = lease.last_active_ms = changes.now_ms
        lease.busy = event.busy and state is not LeaseState.UNATTACHED
        self._books.add(lease)
        self._settle_found(lease, state, event.device_id, event.saved_mib)
        changes.announce(lease, None, f"recovered.{state}", f"a new broker found the kernel {state}")
        if state is LeaseState.QUARANTINED:
            changes.effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))

    def _settle_found(self, lease: Lease, state: LeaseState, device_id: str | None, saved_mib: int) -> None:
        """Write down what a lease in this state holds, whether there is room for it or not. What it held for certain stays held."""
        held_mib = max(lease.need_mib, lease.held_mib)
        keeps_saved = state in (LeaseState.SUSPENDED, LeaseState.QUARANTINED)
        self._books.save_on_host(lease, saved_mib=max(0, saved_mib) if keeps_saved else 0)
        holds = state in (LeaseState.RESIDENT, LeaseState.QUARANTINED)
        self._books.hold(lease, device_id, max(held_mib, lease.need_mib) if holds else 0)
        lease.home_id = device_id if keeps_saved else None
        lease.ran = lease.busy
        note(self._books, lease)
        if not keeps_saved:
            lease.failed_resumes = lease.resume_after_ms = 0
        lease.expires_ms = None
        if state is LeaseState.UNATTACHED:
            self._changes.restart_expiry(lease)

    def _attached(self, lease: Lease, *, gated: bool) -> None:
        if lease.state is not LeaseState.UNATTACHED:
            return
        lease.expires_ms = None
        lease.last_active_ms = self._changes.now_ms
        if lease.reserved:
            self._changes.settle_in(lease)
            self._changes.move(lease, Cause.ATTACHED_RESERVED, "attached", "the kernel runs, with its reservation")
            self._changes.let_in(lease)
            return
        self._changes.move(lease, Cause.ATTACHED, "attached", "the kernel runs and has not used a GPU yet")
        if not gated:  # nothing keeps it from using the GPU
            self._changes.file_ticket(lease)

    def _exited(self, lease: Lease) -> None:
        if lease.state is LeaseState.UNATTACHED:
            return
        self._changes.empty(lease)
        self._changes.restart_expiry(lease)
        self._changes.move(lease, Cause.EXITED, "process.exited", "the kernel process ended; what it held is free")

    def _wanted(self, lease: Lease, *, urgent: bool) -> None:
        if lease.state is LeaseState.RESIDENT:
            lease.last_active_ms = self._changes.now_ms
            if lease.asked_to_suspend:
                self._changes.decline(lease, "busy", "a cell is about to run: try again when it has ended")
            self._changes.let_in(lease)
        elif lease.state is LeaseState.UNATTACHED and lease.reserved:
            self._changes.let_in(lease)
        else:
            self._changes.file_ticket(lease, before_start=not lease.spec.gated, urgent=urgent)

    def _busy_changed(self, lease: Lease, *, busy: bool) -> bool:
        if busy == lease.busy or lease.state is LeaseState.UNATTACHED:
            return False
        lease.busy, lease.last_active_ms = busy, self._changes.now_ms
        lease.ran |= busy
        return lease.state is LeaseState.RESIDENT

    def _measured(self, lease: Lease, used_mib: int) -> bool:
        if lease.state not in (LeaseState.UNARMED, LeaseState.RESIDENT, LeaseState.SUSPENDING):
            return False
        need_mib, stayed = lease.host_need_mib, lease.staying
        lease.used_mib = used_mib
        breaches = self._serving.caps.measured(lease)
        return breaches or lease.host_need_mib != need_mib or lease.staying != stayed

    def _suspend_asked(self, lease: Lease) -> None:
        if lease.state is not LeaseState.RESIDENT:
            sentence = f"the kernel is {lease.state}: only a resident one can be suspended"
            self._changes.decline(lease, "not-resident", sentence)
        elif lease.busy:
            self._changes.decline(lease, "busy", "a cell is running: interrupt it, or try again when it has ended")
        else:
            lease.asked_to_suspend = True  # served at once, or declined with the reason

    # -- answers -------------------------------------------------------------------------------------------------------------

    def _suspend_finished(self, event: SuspendFinished) -> None:
        changes, books = self._changes, self._books
        lease = changes.answered(event.operation_id, Operation(event.lease_id, "suspend", event.generation))
        if lease is None:
            return
        sentence = event.sentence or f"the suspend ended: {event.outcome}"
        match event.outcome:
            case SuspendOutcome.SAVED:
                books.hold(lease, lease.device_id)
                books.save_on_host(lease, saved_mib=max(0, event.saved_mib))
                lease.used_mib = lease.aborted_suspends = 0
                changes.move(lease, Cause.SAVED, "suspended", sentence)
            case SuspendOutcome.NOTHING_TO_SAVE:
                books.hold(lease, lease.device_id)
                books.save_on_host(lease)
                lease.used_mib, lease.home_id = 0, None
                changes.move(lease, Cause.NOTHING_TO_SAVE, "unarmed", sentence)
            case SuspendOutcome.UNKNOWN:
                changes.quarantine(lease, sentence)
            case SuspendOutcome.ABORTED | SuspendOutcome.REFUSED | SuspendOutcome.IMPOSSIBLE:
                if event.outcome is SuspendOutcome.IMPOSSIBLE:
                    lease.why_not = sentence
                    note(books, lease)
                books.save_on_host(lease)
                lease.home_id = None
                lease.retry_ms = changes.now_ms + self._pause_ms(lease, event.outcome)
                changes.withdraw(lease)
                changes.move(lease, Cause.ROLLED_BACK, f"suspend.{event.outcome}", sentence)
                changes.let_in(lease)

    def _pause_ms(self, lease: Lease, outcome: SuspendOutcome) -> int:
        """How long the lease is left alone: what cannot be saved for long, what was only at a bad moment for a moment, then longer."""
        longest_ms = self._books.policy(lease).retry_refused_ms
        if outcome is not SuspendOutcome.ABORTED:
            return longest_ms
        lease.aborted_suspends += 1
        return min(_FIRST_RETRY_MS << min(lease.aborted_suspends - 1, 16), longest_ms)

    def _resume_finished(self, event: ResumeFinished) -> None:
        changes, books = self._changes, self._books
        lease = changes.answered(event.operation_id, Operation(event.lease_id, "resume", event.generation))
        if lease is None:
            return
        sentence = event.sentence or f"the resume ended: {event.outcome}"
        match event.outcome:
            case ResumeOutcome.RESTORED:
                books.save_on_host(lease)
                changes.withdraw(lease)
                changes.settle_in(lease)
                lease.failed_resumes = lease.resume_after_ms = 0
                changes.move(lease, Cause.RESTORED, "resumed", sentence)
                changes.let_in(lease)
            case ResumeOutcome.NOT_STARTED:
                books.hold(lease, lease.home_id)
                retry_ms = min(_FIRST_RETRY_MS << min(lease.failed_resumes, 16), books.policy(lease).retry_refused_ms)
                lease.failed_resumes += 1
                lease.resume_after_ms = changes.now_ms + max(1, retry_ms)
                changes.move(lease, Cause.NOT_STARTED, "resume.not-started", sentence)
            case ResumeOutcome.UNKNOWN:
                changes.quarantine(lease, sentence)

    def _truth_found(self, lease: Lease, event: TruthFound) -> None:
        changes = self._changes
        if lease.state is not LeaseState.QUARANTINED or lease.generation != event.generation:
            changes.record(lease.lease_id, "answer.stale", f"it was found {event.state}, which nobody asks any more")
            return
        device_id = event.device_id or lease.device_id
        if event.state is LeaseState.SUSPENDED:
            device_id = lease.home_id or device_id  # a resume that failed leaves what was saved where it was saved from
        unknown = event.state not in _FOUND or event.state is LeaseState.QUARANTINED
        if unknown or (event.state in _SOMEWHERE and device_id is None):
            changes.record(lease.lease_id, "truth.impossible", f"it was found {event.state}, which cannot be all")
            changes.effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))
            return
        if event.state is LeaseState.UNATTACHED:
            self._exited(lease)
            return
        saved_mib = event.saved_mib or lease.saved_mib or lease.host_mib
        self._settle_found(lease, event.state, device_id, saved_mib)
        sentence = f"the driver says that the kernel is {event.state}"
        if event.state is LeaseState.RESIDENT:
            changes.withdraw(lease)
            changes.settle_in(lease)
        changes.move(lease, _FOUND[event.state], f"found.{event.state}", sentence)
        if event.state is LeaseState.RESIDENT:
            changes.let_in(lease)
