"""Defines the arbiter, which decides which lease holds which GPU. It takes events and returns effects.

Only `handle` changes state. It updates the state for the event (`lifecycle`), then serves the waiting leases (`scheduler`). The arbiter
does no I/O, and gets the time from the events, not from a clock. It uses only integers, so the same events always produce the same effects.

Operations (suspend and resume) take time. Each begins with an effect that carries an operation id and the lease's generation, and ends with
an event that repeats both. If they are out of date by then, the event only frees the swap channel. Events about unknown or ended leases are
ignored, because the driver's view is always slightly out of date. An impossible event raises ValueError before anything changes.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.effects import Effect, WakeAt
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    Checkpointable,
    DeviceDrained,
    DeviceLost,
    DeviceSeen,
    DeviceUndrained,
    Event,
    Expected,
    HostMemoryNeeded,
    HostMemorySeen,
    HostPressureSeen,
    LeaseEvent,
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    LeasesMeasured,
    LeftBehind,
    MoveRequested,
    PinRequested,
    PoolConfigured,
    PriorityChanged,
    ProcessExited,
    ResizeRequested,
    ResumeFinished,
    SeatEnded,
    SeatRenewed,
    Shrunk,
    SuspendFinished,
    SuspendRequested,
    Tick,
    TruthFound,
    UnpinRequested,
    Unwanted,
    Wanted,
)
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.laws import check_devices, validate
from fractional_gpu.core.lifecycle import Lifecycle
from fractional_gpu.core.limits import end_pin, pin, refusal, set_priority, unpin
from fractional_gpu.core.metering.meter import Holding
from fractional_gpu.core.metering.usage import Party
from fractional_gpu.core.model import (
    DeviceView,
    LeaseSpec,
    LeaseState,
    LeaseView,
    PoolSpec,
    QueueDelay,
    Slowdown,
    Span,
    TicketView,
)
from fractional_gpu.core.move import kept_mib
from fractional_gpu.core.operations import OperationResults
from fractional_gpu.core.queue import queue_delay
from fractional_gpu.core.queue_wait import ForecastRecorder, shown_span
from fractional_gpu.core.revoke import drain, reinstate, revoke, undrain
from fractional_gpu.core.scheduler import Scheduler
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease
from fractional_gpu.core.suspend import likelihood_milli, update_all_suspendability
from fractional_gpu.core.words import describe_slowdown, stranger_devices, turns_end_ms, wait_reason

_WITHOUT_PROCESS = (LeaseState.UNATTACHED, LeaseState.ENDED)


class Arbiter:
    """The state machine. If `check` is set, over-committing a device raises an error. `forecasts` may come from an earlier arbiter."""

    def __init__(
        self,
        *,
        parallel_swaps: int = 1,
        check: bool = True,
        forecasts: Forecasts | None = None,
    ) -> None:
        self._changes = Changes(parallel_swaps=parallel_swaps, forecasts=forecasts)
        self._books = self._changes.books
        self._scheduler = Scheduler(self._changes)
        self._lifecycle = Lifecycle(self._changes, self._scheduler.memory_caps)
        self._operation_results = OperationResults(self._changes, self._lifecycle)
        self._wake_ms: int | None = None
        self._check = check
        self._deferred_work_done = True
        self._views: dict[str, LeaseView] = {}  # cached until the next event

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event and return its effects in order. Raise ValueError or TypeError if the event is impossible."""
        self.run_deferred_work()
        self._deferred_work_done = False
        self._views.clear()
        changes = self._changes
        self._books.advance(max(changes.now_ms, event.at_ms))
        self._take(event)
        self._scheduler.serve()
        self._set_wake(ticked=isinstance(event, Tick))
        if self._check:
            check_devices(self._books, changes.granted_devices)
        changes.granted_devices.clear()
        return changes.take_effects()

    def run_deferred_work(self) -> None:
        """Forecast the waits and cells that began with the last event.

        The driver calls this after sending the effects, so that forecasting does not delay them. If it doesn't, the next `handle` calls it.
        The decisions are the same either way.
        """
        if not self._deferred_work_done:
            self._deferred_work_done = True
            self._changes.forecast_recorder.run_deferred_work()

    def _set_wake(self, *, ticked: bool) -> None:
        """Request the next tick if its time has changed, or if the current event is itself a tick (`ticked`)."""
        wake_ms = self._scheduler.wake_ms()
        if wake_ms != self._wake_ms or (ticked and wake_ms is not None):
            self._wake_ms = wake_ms
            self._changes.effects.append(WakeAt(at_ms=wake_ms))

    def _take(self, event: Event) -> None:
        match event:
            case Tick():
                pass
            case SuspendFinished():
                self._operation_results.suspended(event)
            case ResumeFinished():
                self._operation_results.resumed(event)
            case LeaseRequested():
                self._lifecycle.requested(event)
            case LeaseRecovered():
                self._operation_results.recovered(event)
            case LeasesMeasured():
                self._measured(event)
            case LeaseEvent():
                self._take_about_lease(event)
            case _:
                self._take_about_host(event)

    def _take_about_host(self, event: Event) -> None:
        books = self._books
        match event:
            case DeviceSeen():
                self._device_seen(event)
            case DeviceLost():
                if event.device_id in books.devices:
                    books.devices[event.device_id].lost = True
            case DeviceDrained():
                drain(self._changes, event.device_id, evict_busy=event.evict_busy, deadline_ms=event.deadline_ms)
            case DeviceUndrained():
                undrain(self._books, event.device_id)
            case PoolConfigured():
                books.configure(event.pool)
                update_all_suspendability(books, books.leases.values())
                self._scheduler.resizer.pool_configured(event.pool.name)
            case HostMemorySeen():
                books.host_budget_mib = event.budget_mib
            case _:
                raise TypeError(f"the arbiter does not recognise the event {type(event).__name__}")
        books.forget_all_sums()
        self._changes.requeued |= books.waiting_pools

    def _device_seen(self, event: DeviceSeen) -> None:
        books = self._books
        device = books.devices.get(event.device.device_id)
        news = device is None or device.spec != event.device
        if device is None:
            device = Device(spec=event.device)
            books.add_device(device)
        device.spec, device.lost = event.device, False
        books.set_strangers(device, max(0, event.stranger_mib))
        if news:
            update_all_suspendability(books, books.leases.values())

    def _measured(self, event: LeasesMeasured) -> None:
        for one in event.measurements:
            lease = self._books.leases.get(one.lease_id)
            if lease is not None:
                if one.util_milli is not None:
                    self._books.see_utilisation(lease, one.util_milli)
                self._lifecycle.measured(lease, max(0, one.used_mib))

    def _take_about_lease(self, event: LeaseEvent) -> None:  # noqa: C901, PLR0912 - one case per event
        lease, does = self._books.leases.get(event.lease_id), self._lifecycle
        if lease is None:
            return
        match event:
            case BusyChanged():
                does.busy_changed(lease, busy=event.busy, by_cell=event.by_cell)
            case Expected():
                self._scheduler.expectations.seen(lease, event.sign, event.until_ms, event.confidence_milli)
            case Shrunk():
                does.shrunk(lease, event)
            case Wanted():
                does.wanted(lease, urgent=event.urgent)
            case Unwanted():
                does.unwanted(lease, interrupted=event.interrupted)
            case LeftBehind():
                does.left_behind(lease, event.what)
            case Attached():
                does.attached(lease, gated=event.gated)
            case ProcessExited():
                does.exited(lease)
            case LeaseReleased():
                does.released(lease, event.reason)
            case SuspendRequested():
                does.suspend_requested(lease, event.by)
            case ResizeRequested():
                self._scheduler.resizer.requested(lease, event)
            case MoveRequested():
                self._scheduler.move_requested(lease, event.device_id)
            case PinRequested():
                pin(self._changes, lease, event.duration_ms)
            case UnpinRequested():
                unpin(self._changes, lease, event.by)
            case PriorityChanged():
                set_priority(self._changes, lease, event.priority, event.sentence)
            case SeatEnded():
                end_pin(self._changes, lease, "the seat of its server has ended, so its pin has ended too")
                revoke(self._changes, lease, event.since_ms)
            case SeatRenewed():
                reinstate(self._changes, lease, event.seat)
                if lease.state is LeaseState.RESIDENT:  # the end of its seat had withdrawn its claim to grow
                    self._scheduler.resizer.claim_missing(lease)
            case Checkpointable():
                does.checkpointable(lease, event.why_not)
            case HostPressureSeen():
                lease.under_host_pressure = event.pressed and lease.state is LeaseState.SUSPENDED
            case HostMemoryNeeded():
                self._operation_results.host_memory_needed(lease, event)
            case TruthFound():
                self._operation_results.truth_found(lease, event)

    # -- views ------------------------------------------------------------------------------------------------------------

    def lease(self, lease_id: str) -> LeaseView | None:
        lease = self._books.leases.get(lease_id)
        return None if lease is None else self._view(lease)

    def leases(self) -> list[LeaseView]:
        """Return all active leases, oldest first. The result is cached until the next event."""
        return [self._view(lease) for lease in self._books.leases.values()]

    def _view(self, lease: Lease) -> LeaseView:
        view = self._views.get(lease.lease_id)
        if view is None:
            view = self._views[lease.lease_id] = _lease_view(self._books, lease, self._changes.forecast_recorder)
        return view

    def holding(self, lease_id: str) -> Holding | None:
        """Return what the lease now holds and is charged for, or None if the lease is unknown or has no process."""
        lease = self._books.leases.get(lease_id)
        return None if lease is None else _holding(lease)

    def ticket(self, lease_id: str) -> TicketView | None:
        """Return the lease's place in the queue, or None if it has no ticket."""
        lease = self._books.leases.get(lease_id)
        views = [] if lease is None or lease.ticket is None else self.tickets(lease.spec.pool)
        return next((view for view in views if view.lease_id == lease_id), None)

    def waits(self, lease_id: str) -> bool:
        """Return whether the lease has a ticket. This is cheaper than `ticket`."""
        lease = self._books.leases.get(lease_id)
        return lease is not None and lease.ticket is not None

    def tickets(self, pool: str, at_ms: int | None = None) -> list[TicketView]:
        """Return a pool's queue in order, as of `at_ms` or, if that is None, as of the last event."""
        with self._as_of(at_ms):
            return _ticket_views(self._books, pool, self._changes.forecast_recorder)

    def slowdown(self, lease_id: str) -> Slowdown:
        """Estimate how much neighbours slow down the lease's cell, or would slow it down on the device it is waiting for."""
        lease = self._books.leases.get(lease_id)
        return Slowdown() if lease is None else describe_slowdown(self._books, lease)

    def turns_end_ms(self, lease_id: str) -> int | None:
        """Return the time at which enough busy leases' turns will be over to make room for the lease, or None if waiting won't help."""
        lease = self._books.leases.get(lease_id)
        return None if lease is None else turns_end_ms(self._books, lease)

    def stranger_devices(self, lease_id: str) -> list[str]:
        """Return the devices that would have room for the waiting lease if all processes without a lease released their memory."""
        lease = self._books.leases.get(lease_id)
        return [] if lease is None else stranger_devices(self._books, lease)

    def gate_wait(self, lease_id: str, at_ms: int) -> Span | None:
        """Forecast how much longer the lease's cell is held back for another lease, as of `at_ms`. Return None if no cell is held back."""
        lease = self._books.leases.get(lease_id)
        if lease is None:
            return None
        with self._as_of(at_ms):
            return self._changes.forecast_recorder.gate_wait(lease)

    def queue_lengths(self) -> dict[str, int]:
        """Return how many leases are waiting in each pool, excluding those being resumed. Pools with no waiting leases may be missing."""
        waiting = self._books.waiting.values()
        return dict(Counter(lease.spec.pool for lease in waiting if lease.state is not LeaseState.RESUMING))

    def queue_delays(self, at_ms: int) -> dict[str, QueueDelay]:
        """Return how long each pool's tickets have been waiting, as of `at_ms`."""
        with self._as_of(at_ms):
            return {pool: queue_delay(self._books, pool) for pool in self._books.pools}

    @contextmanager
    def _as_of(self, at_ms: int | None) -> Iterator[None]:
        """Within the block, queries return the state as of `at_ms` or, if that is None, as of the last event."""
        event_ms = self._books.now_ms
        self._books.now_ms = max(event_ms, at_ms or 0)
        try:
            yield
        finally:
            self._books.now_ms = event_ms

    def devices(self) -> list[DeviceView]:
        return _device_views(self._books)

    def refusal(self, spec: LeaseSpec) -> tuple[str, str] | None:
        """Return the error code and sentence if a request for this lease would be refused now, or None if it would be admitted."""
        refused = refusal(self._books, spec)
        return None if refused is None else (refused.code, refused.sentence)

    @property
    def forecasts(self) -> Forecasts:
        """The forecasts that the arbiter has learnt, and their accuracy so far."""
        return self._changes.forecast_recorder.forecasts

    def pools(self) -> dict[str, PoolSpec]:
        return dict(self._books.pools)

    @property
    def host_budget_mib(self) -> int:
        """The host memory that suspended state may use, in MiB."""
        return self._books.host_budget_mib

    @property
    def host_left_mib(self) -> int:
        """The host memory, in MiB, that is neither used by suspended state nor reserved for suspends in progress. It can be negative."""
        return self._books.host_left_mib

    @property
    def host_saved_mib(self) -> int:
        """The host memory that suspended state uses, in MiB."""
        return self._books.host_saved_mib

    @property
    def host_reserved_mib(self) -> int:
        """The host memory reserved for suspends in progress, in MiB."""
        return self._books.host_reserved_mib

    def validate(self) -> None:
        """Check the whole state. If it is inconsistent, raise InvariantError with a list of all violations."""
        validate(self._books, self._changes.operations)


def _lease_view(books: Books, lease: Lease, foresight: ForecastRecorder) -> LeaseView:
    known = lease.expectation
    return LeaseView(
        spec=lease.spec,
        state=lease.state,
        generation=lease.generation,
        device_id=lease.device_id,
        saved_mib=lease.saved_mib,
        used_mib=lease.used_mib,
        is_measured=lease.is_measured,
        busy=lease.busy,
        since_ms=lease.since_ms,
        last_active_ms=lease.last_active_ms,
        operation_id=lease.operation.operation_id if lease.operation is not None else None,
        reason=lease.reason,
        sentence=lease.sentence,
        reserved_mib=lease.held_mib,
        host_reserved_mib=lease.host_mib,
        suspend_requested=lease.suspend_requested,
        device_ids=lease.device_ids,
        pinned_until_ms=lease.pinned_until_ms,
        unsuspendable_reason=lease.unsuspendable_reason,
        left_behind=lease.left_behind,
        revoked=lease.revoked,
        ends_ms=lease.ends_ms,
        resume=foresight.resume_span(lease),
        gate_closed=lease.gate.closed,
        at_gate=lease.gate.ticket is not None,
        demand_milli=lease.demand_milli,
        expected_until_ms=known.until_ms if known is not None else 0,
        expected_by=known.best if known is not None else "",
        expected_milli=likelihood_milli(lease),
        came_early=lease.came_early,
        deadline_ms=books.deadline_ms(lease),
        lost_because=_lost_because(books, lease),
    )


def _lost_because(books: Books, lease: Lease) -> str:
    if lease.state is LeaseState.QUARANTINED and books.deadline_ms(lease) is not None:
        return "the state of its GPU memory is unknown"
    return books.unsaved.get(lease.lease_id, "")


def _holding(lease: Lease) -> Holding | None:
    """Return what the lease is charged for. If it has no process, return None, even if room is reserved for it.

    A lease holds its devices while it has a reservation on them, including during swaps. It is busy while a cell, or a process that
    outlived its kernel, might be running on them. It is not busy during a swap, in quarantine, or while its cell waits at a closed gate.
    """
    spec, held = lease.spec, lease.held_mib > 0
    if lease.state in _WITHOUT_PROCESS:
        return None
    return Holding(
        party=Party(pool=spec.pool, owner=spec.owner, group=spec.group, label=spec.label, seated=bool(spec.seat)),
        milli=spec.fraction_milli,
        count=spec.devices,
        devices=lease.occupied_ids,
        busy=held and lease.is_working and lease.state is LeaseState.RESIDENT,
        suspended=lease.state is LeaseState.SUSPENDED,
        device_mib=lease.used_mib if held else 0,
        host_mib=lease.saved_mib,
    )


def _ticket_views(books: Books, pool: str, foresight: ForecastRecorder) -> list[TicketView]:
    waits = foresight.waits_of_pool(pool)
    views, position = [], 0
    for lease, expected in zip(books.line(pool), waits, strict=True):
        if (ticket := lease.ticket) is None:
            continue
        wait = wait_reason(books, lease, ticket)
        is_served = lease.state is LeaseState.RESUMING  # it has its room, so later tickets do not wait for it
        position += not is_served
        views.append(
            TicketView(
                lease_id=lease.lease_id,
                position=None if is_served else position,
                asked_ms=ticket.asked_ms,
                passed_over=min(ticket.passed_over, books.policy(lease).max_passed_over),
                reason=wait.code,
                sentence=wait.sentence,
                blockers=wait.blockers,
                urgent=ticket.urgent,
                need_mib=lease.ask_mib if lease.waits_for_room else kept_mib(lease),
                kept_on=ticket.kept_on,
                expected=None if expected is None else shown_span(ticket, lease, expected, books.now_ms),
            )
        )
    return views


def _device_views(books: Books) -> list[DeviceView]:
    return [
        DeviceView(
            device_id=device.spec.device_id,
            name=device.spec.name,
            pool=books.pool_of(device.spec.device_id),
            memory_mib=device.spec.memory_mib,
            leasable_mib=device.spec.leasable_mib,
            reserved_mib=device.sums.reserved_mib,
            stranger_mib=device.stranger_mib,
            over_committed=device.sums.reserved_mib + device.stranger_mib > device.spec.leasable_mib,
            lost=device.lost,
            draining=device.draining,
            why_not=device.spec.why_not,
            why_no_move=device.spec.why_no_move,
            demand_milli=device.sums.demand_milli,
            deadline_ms=device.deadline_ms,
        )
        for device in books.devices.values()
    ]
