"""The arbiter decides who holds which GPU: events in, effects out, nothing else.

`handle` is the one mutator. It updates the books by the event, then serves whoever waits: tickets in order, suspends that were asked
for, leases that have idled long enough. It has no clock (time arrives on the event), does no I/O, and counts in integers; the same
events give the same effects, bit for bit. Operations (suspend, resume) take time: they are effects with an operation id and the
lease's generation, and come back as events with the same two; an answer whose lease has moved on is recorded and otherwise ignored,
but always gives its swap channel back.
"""

from provisioner.core.effects import (
    Declined,
    Effect,
    Granted,
    LeaseAdmitted,
    LeaseEnded,
    LeaseRefused,
    LookAgain,
    Recorded,
    Resume,
    StateChanged,
    Suspend,
    TicketsChanged,
    WakeAt,
)
from provisioner.core.events import (
    Attached,
    BusyChanged,
    DeviceLost,
    DeviceSeen,
    Event,
    HostMemorySeen,
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
from provisioner.core.model import LeaseState, LeaseView, PoolSpec, TicketView
from provisioner.core.requests import refusal
from provisioner.core.scheduling import Wait, best_fit, candidates, plan_room
from provisioner.core.state import Books, Device, DeviceView, Lease, Ticket
from provisioner.core.transitions import Cause, next_state
from provisioner.core.units import format_duration, format_memory

__all__ = ["Arbiter"]

_FOUND = {
    LeaseState.UNATTACHED: Cause.FOUND_UNATTACHED,
    LeaseState.UNARMED: Cause.FOUND_UNARMED,
    LeaseState.RESIDENT: Cause.FOUND_RESIDENT,
    LeaseState.SUSPENDED: Cause.FOUND_SUSPENDED,
    LeaseState.QUARANTINED: Cause.FOUND_UNKNOWN,
}
_WANTING = frozenset(
    {LeaseState.UNATTACHED, LeaseState.UNARMED, LeaseState.SUSPENDED}
)  # states whose ticket can be served


class Arbiter:
    """See the module. `parallel_swaps` operations run at a time; `check` asserts the devices every event touched."""

    def __init__(self, *, first_operation_id: int = 1, parallel_swaps: int = 1, check: bool = True) -> None:
        self._books = Books()
        self._effects: list[Effect] = []
        self._now_ms = 0
        self._next_operation = first_operation_id
        self._next_order = 1
        self._parallel_swaps = parallel_swaps
        self._operations: dict[int, str] = {}  # under way: operation id -> lease id
        self._wake_ms: int | None = None
        self._check = check
        self._touched: set[str] = set()
        self._requeued: set[str] = set()  # pools whose queue changed

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
        lease = self._books.queue.get(lease_id)
        if lease is None:
            return None
        return next(view for view in self.tickets(lease.spec.pool) if view.lease_id == lease_id)

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
        validate(self._books, self._operations)

    # -- the one mutator ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """Take an event in and return what is to be done, in order."""
        self._now_ms = max(self._now_ms, event.at_ms)
        self._take(event)
        self._expire()
        self._serve_queue()
        self._serve_requests()
        self._suspend_idle()
        for pool in sorted(self._requeued):
            self._effects.append(TicketsChanged(pool=pool))
        self._set_wake()
        if self._check:
            check_devices(self._books, self._touched)
        self._touched.clear()
        self._requeued.clear()
        effects, self._effects = self._effects, []
        return effects

    def _take(self, event: Event) -> None:  # noqa: C901, PLR0912 - one case per event
        match event:
            case DeviceSeen():
                self._device_seen(event)
            case DeviceLost():
                if event.device_id in self._books.devices:
                    self._books.devices[event.device_id].lost = True
            case PoolConfigured():
                self._books.pools[event.pool.name] = event.pool
            case HostMemorySeen():
                self._books.host_budget_mib = event.budget_mib
            case LeaseRequested():
                self._requested(event)
            case LeaseRecovered():
                self._recovered(event)
            case Tick():
                pass
            case SuspendFinished():
                self._suspend_finished(event)
            case ResumeFinished():
                self._resume_finished(event)
            case TruthFound():
                self._truth_found(event)
            case (
                Attached()
                | ProcessExited()
                | LeaseReleased()
                | Wanted()
                | Unwanted()
                | BusyChanged()
                | LeaseMeasured()
                | SuspendRequested()
            ):
                lease = self._books.leases.get(event.lease_id)
                if lease is not None:
                    self._about(lease, event)
            case _:
                raise TypeError(f"the arbiter does not know the event {type(event).__name__}")

    def _about(
        self,
        lease: Lease,
        event: Attached
        | ProcessExited
        | LeaseReleased
        | Wanted
        | Unwanted
        | BusyChanged
        | LeaseMeasured
        | SuspendRequested,
    ) -> None:
        match event:
            case Attached():
                self._attached(lease)
            case ProcessExited():
                self._exited(lease)
            case LeaseReleased():
                self._end(lease, Cause.RELEASED, "released")
            case Wanted():
                self._wanted(lease)
            case Unwanted():
                self._withdraw(lease)
            case BusyChanged(busy=busy):
                if busy != lease.busy:
                    lease.busy, lease.last_active_ms = busy, self._now_ms
            case LeaseMeasured(used_mib=used_mib):
                lease.used_mib = used_mib
            case SuspendRequested():
                self._suspend_asked(lease)

    # -- events --------------------------------------------------------------------------------------------------------------

    def _device_seen(self, event: DeviceSeen) -> None:
        device = self._books.devices.get(event.device.device_id)
        if device is None:
            device = self._books.devices[event.device.device_id] = Device(spec=event.device)
            for lease in self._books.leases.values():  # recovered before its device came
                if lease.reserved and lease.device_id == event.device.device_id:
                    device.reserved_mib += lease.spec.reserve_mib
        device.spec, device.stranger_mib, device.lost = event.device, event.stranger_mib, False

    def _requested(self, event: LeaseRequested) -> None:
        spec = event.spec
        refused = refusal(self._books, spec)
        if refused is not None:
            self._effects.append(LeaseRefused(lease_id=spec.lease_id, reason=refused.reason, sentence=refused.sentence))
            return
        lease = Lease(spec=spec, since_ms=self._now_ms, last_active_ms=self._now_ms)
        lease.expires_ms = self._now_ms + self._books.pools[spec.pool].unattached_ttl_ms
        self._books.add(lease)
        self._effects.append(LeaseAdmitted(lease_id=spec.lease_id))
        self._announce(lease, None, "lease.admitted", f"admitted with up to {format_memory(spec.reserve_mib)}")
        if event.needs_reservation:
            self._file_ticket(lease)

    def _recovered(self, event: LeaseRecovered) -> None:
        if event.spec.lease_id in self._books.leases:
            return
        lease = Lease(spec=event.spec, generation=event.generation, since_ms=self._now_ms, last_active_ms=self._now_ms)
        lease.busy = event.busy
        self._books.add(lease)
        if event.state is not LeaseState.UNATTACHED:
            self._books.move(lease, next_state(None, _FOUND[event.state]))
        self._settle_found(lease, event.state, event.device_id, event.saved_mib)
        self._announce(lease, None, f"recovered.{event.state}", f"a new broker found the kernel {event.state}")
        if event.state is LeaseState.QUARANTINED:
            self._effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))

    def _settle_found(self, lease: Lease, state: LeaseState, device_id: str | None, saved_mib: int) -> None:
        holds = state in (LeaseState.RESIDENT, LeaseState.QUARANTINED)
        self._books.hold(lease, device_id, reserved=holds)
        saved = saved_mib if state in (LeaseState.SUSPENDED, LeaseState.QUARANTINED) else 0
        self._books.save_on_host(lease, saved_mib=saved)
        pool = self._books.pools.get(lease.spec.pool)
        ttl_ms = pool.unattached_ttl_ms if pool is not None else 0
        lease.expires_ms = self._now_ms + ttl_ms if state is LeaseState.UNATTACHED else None

    def _attached(self, lease: Lease) -> None:
        if lease.state is not LeaseState.UNATTACHED:
            return
        lease.expires_ms = None
        lease.last_active_ms = self._now_ms
        if lease.reserved:
            self._move(lease, Cause.ATTACHED_RESERVED, "attached", "the kernel runs, with its reservation")
            self._grant_effect(lease)
        else:
            self._move(lease, Cause.ATTACHED, "attached", "the kernel runs and has not used a GPU yet")

    def _exited(self, lease: Lease) -> None:
        if lease.state is LeaseState.UNATTACHED:
            return
        self._empty(lease)
        pool = self._books.pools.get(lease.spec.pool)
        lease.expires_ms = self._now_ms + (pool.unattached_ttl_ms if pool is not None else 0)
        self._move(lease, Cause.EXITED, "process.exited", "the kernel process ended; what it held is free")

    def _end(self, lease: Lease, cause: Cause, reason: str) -> None:
        self._empty(lease)
        self._move(lease, cause, f"lease.{reason}", f"the lease is over: {reason}")
        self._books.drop(lease)
        self._effects.append(LeaseEnded(lease_id=lease.lease_id, reason=reason))

    def _empty(self, lease: Lease) -> None:
        """Free everything the lease holds. An operation under way keeps its swap channel: the worker still works on it."""
        self._withdraw(lease)
        self._books.hold(lease, None, reserved=False)
        self._books.save_on_host(lease)
        lease.busy, lease.used_mib, lease.operation_id, lease.asked_to_suspend = False, 0, None, False
        lease.retry_ms, lease.expires_ms = 0, None

    def _wanted(self, lease: Lease) -> None:
        if lease.state is LeaseState.RESIDENT:
            self._grant_effect(lease)
        elif lease.state is not LeaseState.UNATTACHED:
            self._file_ticket(lease)

    def _suspend_asked(self, lease: Lease) -> None:
        if lease.state is not LeaseState.RESIDENT:
            self._decline(lease, "not-resident", f"the kernel is {lease.state}: only a resident one can be suspended")
        elif lease.busy:
            self._decline(lease, "busy", "a cell is running: interrupt it, or try again when it has ended")
        elif lease.spec.reserve_mib > self._books.host_left_mib:
            left = format_memory(max(0, self._books.host_left_mib))
            need = format_memory(lease.spec.reserve_mib)
            self._decline(
                lease, "host-memory", f"saving it takes up to {need} of host memory, of which {left} are left"
            )
        else:
            lease.asked_to_suspend = True

    def _suspend_finished(self, event: SuspendFinished) -> None:
        lease = self._answered(event.lease_id, event.operation_id, event.generation, "suspend")
        if lease is None:
            return
        sentence = event.sentence or f"the suspend ended: {event.outcome}"
        match event.outcome:
            case SuspendOutcome.SAVED:
                self._books.hold(lease, lease.device_id, reserved=False)
                self._books.save_on_host(lease, saved_mib=event.saved_mib)
                lease.used_mib = 0
                self._move(lease, Cause.SAVED, "suspended", sentence)
            case SuspendOutcome.NOTHING_TO_SAVE:
                self._books.hold(lease, lease.device_id, reserved=False)
                self._books.save_on_host(lease)
                lease.used_mib = 0
                self._move(lease, Cause.NOTHING_TO_SAVE, "unarmed", sentence)
            case SuspendOutcome.UNKNOWN:
                self._books.save_on_host(lease, reserved_mib=lease.host_mib)
                self._quarantine(lease, sentence)
            case SuspendOutcome.ABORTED | SuspendOutcome.REFUSED:
                self._books.save_on_host(lease)
                lease.retry_ms = self._now_ms + self._books.pools[lease.spec.pool].retry_refused_ms
                self._withdraw(lease)
                self._move(lease, Cause.ROLLED_BACK, f"suspend.{event.outcome}", sentence)
                self._grant_effect(lease)

    def _resume_finished(self, event: ResumeFinished) -> None:
        lease = self._answered(event.lease_id, event.operation_id, event.generation, "resume")
        if lease is None:
            return
        sentence = event.sentence or f"the resume ended: {event.outcome}"
        match event.outcome:
            case ResumeOutcome.RESTORED:
                self._books.save_on_host(lease)
                self._withdraw(lease)
                lease.last_active_ms = self._now_ms
                self._move(lease, Cause.RESTORED, "resumed", sentence)
                self._grant_effect(lease)
            case ResumeOutcome.NOT_STARTED:
                self._books.hold(lease, lease.device_id, reserved=False)
                self._move(lease, Cause.NOT_STARTED, "resume.not-started", sentence)
            case ResumeOutcome.UNKNOWN:
                self._quarantine(lease, sentence)

    def _truth_found(self, event: TruthFound) -> None:
        lease = self._books.leases.get(event.lease_id)
        if lease is None or lease.state is not LeaseState.QUARANTINED or lease.generation != event.generation:
            return
        if event.state is LeaseState.UNATTACHED:
            self._exited(lease)
            return
        device_id = event.device_id or lease.device_id
        if event.state is LeaseState.RESIDENT and device_id is None:
            return  # resident nowhere is no truth: stay in quarantine
        self._settle_found(lease, event.state, device_id, event.saved_mib)
        self._move(
            lease, _FOUND[event.state], f"found.{event.state}", f"the driver says that the kernel is {event.state}"
        )
        if event.state is LeaseState.RESIDENT:
            self._withdraw(lease)
            self._grant_effect(lease)

    def _answered(self, lease_id: str, operation_id: int, generation: int, kind: str) -> Lease | None:
        """Give the operation's swap channel back; return its lease if the answer still concerns it."""
        self._operations.pop(operation_id, None)
        lease = self._books.leases.get(lease_id)
        wanted = LeaseState.SUSPENDING if kind == "suspend" else LeaseState.RESUMING
        stale = lease is None or (lease.operation_id, lease.generation, lease.state) != (
            operation_id,
            generation,
            wanted,
        )
        if stale or lease is None:
            self._record(
                lease_id, "answer.stale", f"the answer to {kind} {operation_id} came too late and changes nothing"
            )
            return None
        lease.operation_id = None
        return lease

    def _quarantine(self, lease: Lease, sentence: str) -> None:
        self._move(lease, Cause.LOST_TRACK, "quarantined", sentence)
        self._effects.append(LookAgain(lease_id=lease.lease_id, generation=lease.generation))

    # -- serving ----------------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        for lease in list(self._books.by_state[LeaseState.UNATTACHED].values()):
            if lease.expires_ms is not None and lease.expires_ms <= self._now_ms:
                self._end(lease, Cause.EXPIRED, "expired")

    def _serve_queue(self) -> None:
        kept: dict[str, int] = {}
        waiting: list[tuple[Lease, list[str]]] = []  # eligible, ahead, and not served
        for lease in self._books.line():
            pool = self._books.pools.get(lease.spec.pool)
            if pool is None or lease.ticket is None:
                continue
            if lease.state not in _WANTING:
                self._explain(lease, _while_moving(lease))
                continue
            devices = candidates(self._books, pool, lease)
            if self._serve(lease, devices, kept, waiting):
                continue
            waiting.append((lease, devices))
            if lease.ticket.passed_over >= pool.max_passed_over:
                _keep_for(self._books, lease, devices, kept)

    def _serve(
        self, lease: Lease, devices: list[str], kept: dict[str, int], ahead: list[tuple[Lease, list[str]]]
    ) -> bool:
        """Serve one ticket as far as it can be now. Returns False if it waits for others."""
        need_mib = lease.spec.reserve_mib
        device_id = best_fit(self._books, devices[:1], need_mib, kept) or best_fit(self._books, devices, need_mib, kept)
        if device_id is not None:
            if lease.state is LeaseState.SUSPENDED and not self._channel_free:
                kept[device_id] = kept.get(device_id, 0) + need_mib
                self._explain(lease, Wait("wait.swap-channel", "another kernel is being moved; this one is next"))
                return True
            for other, wanted in ahead:
                if device_id in wanted and other.ticket is not None:
                    other.ticket.passed_over += 1
            self._grant(lease, device_id)
            return True
        plan = plan_room(self._books, lease, devices, kept, self._now_ms)
        if isinstance(plan, Wait):
            self._explain(lease, plan)
            return False
        kept[plan.device_id] = kept.get(plan.device_id, 0) + need_mib
        if plan.victims and self._channel_free:
            self._start_suspend(
                plan.victims[0],
                "suspend.needed-by",
                f"idle, and {format_memory(need_mib)} are needed by lease {lease.lease_id[:8]}",
            )
        self._explain(lease, Wait("wait.making-room", "an idle kernel is being suspended to make room"))
        return True

    def _grant(self, lease: Lease, device_id: str) -> None:
        home = lease.device_id
        self._books.hold(lease, device_id, reserved=True)
        self._touched.add(device_id)
        waited_ms = self._now_ms - lease.ticket.asked_ms if lease.ticket is not None else 0
        sentence = f"{format_memory(lease.spec.reserve_mib)} reserved after {format_duration(waited_ms)}"
        if lease.state is LeaseState.SUSPENDED:
            operation_id = self._begin(lease)
            self._move(lease, Cause.RESUME, "resume.room", sentence)
            self._effects.append(
                Resume(
                    lease_id=lease.lease_id,
                    operation_id=operation_id,
                    generation=lease.generation,
                    device_id=device_id,
                    from_device_id=home,
                    reserve_mib=lease.spec.reserve_mib,
                )
            )
            return
        lease.last_active_ms = self._now_ms
        self._withdraw(lease)
        self._move(
            lease, Cause.RESERVED if lease.state is LeaseState.UNATTACHED else Cause.GRANTED, "grant.room", sentence
        )
        self._grant_effect(lease)

    def _serve_requests(self) -> None:
        for lease in list(self._books.by_state[LeaseState.RESIDENT].values()):
            if not lease.asked_to_suspend:
                continue
            if lease.busy:
                lease.asked_to_suspend = False
                self._decline(lease, "busy", "a cell began to run before the suspend could start")
            elif self._channel_free and lease.spec.reserve_mib <= self._books.host_left_mib:
                self._start_suspend(lease, "suspend.asked", "somebody asked for it")

    def _suspend_idle(self) -> None:
        for lease in list(self._books.by_state[LeaseState.RESIDENT].values()):
            due_ms = self._idle_due(lease)
            fits = lease.spec.reserve_mib <= self._books.host_left_mib
            if self._channel_free and fits and due_ms is not None and due_ms <= self._now_ms:
                idle = format_duration(self._now_ms - lease.last_active_ms)
                self._start_suspend(lease, "suspend.idle", f"idle for {idle}")

    def _idle_due(self, lease: Lease) -> int | None:
        """When an idle lease is to be suspended without anybody needing its room."""
        pool = self._books.pools.get(lease.spec.pool)
        if lease.busy or pool is None or pool.idle_after_ms is None:
            return None
        return max(lease.last_active_ms + pool.idle_after_ms, lease.retry_ms)

    def _start_suspend(self, lease: Lease, reason: str, sentence: str) -> None:
        operation_id = self._begin(lease)
        lease.asked_to_suspend = False
        self._books.save_on_host(lease, reserved_mib=lease.spec.reserve_mib)
        self._move(lease, Cause.SUSPEND, reason, sentence)
        self._effects.append(
            Suspend(
                lease_id=lease.lease_id,
                operation_id=operation_id,
                generation=lease.generation,
                device_id=lease.device_id or "",
                host_mib=lease.host_mib,
            )
        )

    def _begin(self, lease: Lease) -> int:
        operation_id, self._next_operation = self._next_operation, self._next_operation + 1
        self._operations[operation_id] = lease.lease_id
        lease.operation_id = operation_id
        return operation_id

    @property
    def _channel_free(self) -> bool:
        return len(self._operations) < self._parallel_swaps

    def _set_wake(self) -> None:
        """Ask to be woken at the next moment at which time alone changes a decision. What waits for an answer needs no alarm."""
        due = [lease.expires_ms for lease in self._books.by_state[LeaseState.UNATTACHED].values()]
        for lease in self._books.by_state[LeaseState.RESIDENT].values():
            due += [self._idle_due(lease), lease.retry_ms]
        wake_ms = min((at_ms for at_ms in due if at_ms is not None and at_ms > self._now_ms), default=None)
        if wake_ms != self._wake_ms:
            self._wake_ms = wake_ms
            self._effects.append(WakeAt(at_ms=wake_ms))

    # -- small change ----------------------------------------------------------------------------------------------------------

    def _file_ticket(self, lease: Lease) -> None:
        if lease.ticket is None:
            lease.ticket = Ticket(order=self._next_order, asked_ms=self._now_ms)
            self._next_order += 1
            self._books.queue[lease.lease_id] = lease
            self._requeued.add(lease.spec.pool)

    def _withdraw(self, lease: Lease) -> None:
        if lease.ticket is not None:
            lease.ticket = None
            del self._books.queue[lease.lease_id]
            self._requeued.add(lease.spec.pool)

    def _explain(self, lease: Lease, wait: Wait) -> None:
        ticket = lease.ticket
        if ticket is None or (ticket.reason, ticket.sentence, ticket.blockers) == (
            wait.reason,
            wait.sentence,
            wait.blockers,
        ):
            return
        if ticket.reason != wait.reason:
            self._record(lease.lease_id, wait.reason, wait.sentence)
        ticket.reason, ticket.sentence, ticket.blockers = wait.reason, wait.sentence, wait.blockers
        self._requeued.add(lease.spec.pool)

    def _grant_effect(self, lease: Lease) -> None:
        if lease.device_id is not None:
            self._effects.append(Granted(lease_id=lease.lease_id, device_id=lease.device_id))

    def _decline(self, lease: Lease, reason: str, sentence: str) -> None:
        self._effects.append(Declined(lease_id=lease.lease_id, reason=reason, sentence=sentence))
        self._record(lease.lease_id, f"declined.{reason}", sentence)

    def _move(self, lease: Lease, cause: Cause, reason: str, sentence: str) -> None:
        old = lease.state
        self._books.move(lease, next_state(old, cause))
        lease.since_ms = self._now_ms
        self._announce(lease, old, reason, sentence)

    def _announce(self, lease: Lease, old: LeaseState | None, reason: str, sentence: str) -> None:
        lease.generation += 1
        lease.reason, lease.sentence = reason, sentence
        self._effects.append(
            StateChanged(
                lease_id=lease.lease_id,
                old=old,
                new=lease.state,
                generation=lease.generation,
                device_id=lease.device_id,
                saved_mib=lease.saved_mib,
            )
        )
        self._record(lease.lease_id, reason, sentence)

    def _record(self, lease_id: str, reason: str, sentence: str) -> None:
        self._effects.append(Recorded(lease_id=lease_id, at_ms=self._now_ms, reason=reason, sentence=sentence))


def _while_moving(lease: Lease) -> Wait:
    """Why a ticket waits whose lease is in an operation, or in doubt."""
    match lease.state:
        case LeaseState.SUSPENDING:
            return Wait("wait.own-suspend", "this kernel is being suspended; it comes back right after")
        case LeaseState.RESUMING:
            return Wait("wait.restoring", f"its {format_memory(lease.saved_mib)} are being brought back to the device")
        case _:
            return Wait(
                "wait.quarantine", "nobody knows for certain what state this kernel is in; it is being looked at again"
            )


def _keep_for(books: Books, lease: Lease, devices: list[str], kept: dict[str, int]) -> None:
    """Keep room for a ticket that was passed over too often, on the device that is nearest to having it."""
    if devices:
        nearest = max(devices, key=lambda device_id: books.devices[device_id].free_mib - kept.get(device_id, 0))
        kept[nearest] = kept.get(nearest, 0) + lease.spec.reserve_mib
