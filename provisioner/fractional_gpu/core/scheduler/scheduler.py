"""After every event, the scheduler serves the waiting leases as far as possible.

In this order: leases whose time is over end; leases are saved whose device goes away; suspends begin that were requested, or that a
breached cap, a drained device or an ended seat demands; tickets are served; host memory is relieved; leases whose cells are expected come
back; devices are relieved whose busy leases slow each other down; leases that were idle for long enough are suspended; idle ones move
together. All share the swap channels.
"""

from fractional_gpu.core.books.records import Lease, Reason
from fractional_gpu.core.changes.changes import Changes, Deadlines
from fractional_gpu.core.effects import SuspendAnnounced
from fractional_gpu.core.handlers.expectations import Expectations
from fractional_gpu.core.handlers.lifecycle import StartReservations
from fractional_gpu.core.handlers.overrides import DeviceDrains, Pins, Revocations
from fractional_gpu.core.handlers.resize import MemoryCaps, Resizer
from fractional_gpu.core.handlers.salvaging import Salvage
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.admission import over_limit
from fractional_gpu.core.rules.eligibility import eligible_devices, lacks_device
from fractional_gpu.core.rules.idling import idle_due_ms, spares_host_memory
from fractional_gpu.core.scheduler.capacity import Capacity
from fractional_gpu.core.scheduler.compute_relief import ComputeRelief
from fractional_gpu.core.scheduler.foresight import EarlyResumes
from fractional_gpu.core.scheduler.migration import move_on_request
from fractional_gpu.core.scheduler.packing import IdlePacking
from fractional_gpu.core.scheduler.queue_pass import QueuePass
from fractional_gpu.core.scheduler.victims import Victims
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_duration, format_memory

# -- host memory relief ------------------------------------------------------------------------------------------------
# Early resumes: while host memory is short and a device has room, saved leases come back before they are wanted.
#
# That happens only while no ticket waits, and for no more than host memory lacks. Leases whose own control group is short come first, then
# the most recently active one, which is likely to run next. A lease that came back early is not saved again before host memory allows it.


class HostMemoryRelief:
    """Begins early resumes."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books

    def relieve(self) -> None:
        """Begin early resumes while host memory is short, swap channels are free and a saved lease fits on a device."""
        books = self._books
        while not books.waiting and self._changes.channel_free:
            excess_mib = books.host_saved_mib - books.host_budget_mib
            if excess_mib > 0:  # leases that are resuming leave host memory soon
                excess_mib -= sum(lease.saved_mib for lease in books.by_state[LeaseState.RESUMING].values())
            if (excess_mib <= 0 and not books.under_host_pressure) or not self._begin(excess_mib):
                return

    def _begin(self, excess_mib: int) -> bool:
        """Begin one early resume if possible; return whether it began."""
        books, saved = self._books, self._order(any_lease=excess_mib > 0)
        if not saved:
            return False
        capacity = Capacity(books, Victims(books))
        for lease in saved:
            device_ids = capacity.pick_for(lease, eligible_devices(books, books.policy(lease), lease), lease.need_mib)
            if device_ids is not None and over_limit(books, lease, lease.milli) is None:
                why = "where its saved state lies" if lease.under_host_pressure else f"by {format_memory(excess_mib)}"
                sentence = f"host memory is short {why}, and a device has room: it comes back early"
                self._changes.resume_early(lease, device_ids, "resume.host-memory", sentence)
                return True
        return False

    def _order(self, *, any_lease: bool) -> list[Lease]:
        now_ms = self._changes.now_ms
        saved = [
            lease
            for lease in self._books.by_state[LeaseState.SUSPENDED].values()
            if (any_lease or lease.under_host_pressure)
            and lease.retries.resume_after_ms <= now_ms
            and not lease.revoked
        ]
        return sorted(saved, key=lambda lease: (not lease.under_host_pressure, -lease.last_active_ms, lease.lease_id))


# -- scheduler ---------------------------------------------------------------------------------------------------------


_SPARE_PASSES = 4  # over the queue in one event, beside two for each waiting lease; a second pass is rare


class Scheduler:
    """Serves waiting leases. `wake_ms`: the next time at which time alone changes a decision."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._deadlines = Deadlines(changes.books)
        self._last_pass: QueuePass | None = None  # over the queue, in the event in hand
        self._recheck_ms: int | None = None  # when the last pass asked to be repeated
        self.memory_caps = MemoryCaps(changes)
        self.drains = DeviceDrains(changes)
        self.salvage = Salvage(changes)
        self.pins = Pins(changes)
        self.resizer = Resizer(changes)
        self.revocations = Revocations(changes)
        self.start_reservations = StartReservations(changes)
        self.expectations = Expectations(changes)
        self._early_resumes = EarlyResumes(changes)
        self._relief = HostMemoryRelief(changes)
        self._compute_relief = ComputeRelief(changes)
        self._packing = IdlePacking(changes)

    def serve(self) -> None:
        """Do everything that can be done now."""
        self._changes.idle_costs.review()
        self._deadlines.refresh()
        self._take_due()
        self.salvage.save()
        self._suspend_asked()
        self._suspend_breaching()
        if self._books.draining:
            self.drains.suspend_ready()
        if self._books.revoked:
            self.revocations.suspend_ready()
        self.start_reservations.reclaim_lapsed(first=True)
        self.start_reservations.file_parked()
        self._serve_tickets()
        # Holds lapse only for tickets that still wait; each round frees room for them.
        while self.start_reservations.reclaim_lapsed():
            self.start_reservations.file_parked()
            self._serve_tickets()
        self._relief.relieve()
        self._early_resumes.begin()
        self._compute_relief.relieve()
        if self._suspend_idle():
            self._serve_tickets()
        self._packing.pack()
        self._settle_gates()
        self._deadlines.refresh(at_end=True)

    def _serve_tickets(self) -> None:
        self._recheck_ms = None
        # Bounded: each further pass follows a ticket that was served, or that needs more than it said.
        for _ in range(_SPARE_PASSES + 2 * len(self._books.waiting)):
            if not self._books.waiting:
                break
            self._last_pass = one = QueuePass(self._changes, self.resizer)
            one.serve()
            self._recheck_ms, self._books.expected_victims = one.recheck_ms, one.expected_victims
            for lease_id in sorted(one.short_of_host_memory):
                self._changes.ask_to_shrink(self._books.leases[lease_id])
            if not one.needs_another:
                break

    def _settle_gates(self) -> None:
        """Close and open gates as the last pass found right; where no ticket waits any more, open all."""
        last, self._last_pass = self._last_pass, None
        if last is not None and self._books.waiting:
            last.settle_gates()
        elif not self._books.waiting:
            for lease in list(self._books.gates_closed.values()):
                self._changes.open_gate(lease)

    def wake_ms(self) -> int | None:
        """Return when to serve again if no event comes, or None. What waits for the result of an operation needs no alarm."""
        due = (
            self._deadlines.next_ms(),
            self._recheck_ms,
            self._compute_relief.recheck_ms,
            self._early_resumes.recheck_ms,
            self._changes.forecast_recorder.recheck_ms,
            self._changes.idle_costs.recheck_ms,
            self._packing.recheck_ms,
            self.drains.recheck_ms,
            self.salvage.recheck_ms,
            self.revocations.recheck_ms,
            self.memory_caps.due_ms(),
        )
        return min((at_ms for at_ms in due if at_ms is not None and at_ms > self._changes.now_ms), default=None)

    def _take_due(self) -> None:
        """Do what the clock alone demands, except idle suspensions."""
        now_ms, ripe = self._changes.now_ms, self._deadlines.ripe
        for lease_id, lease in list(ripe.items()):
            if lease.expires_ms is not None and lease.expires_ms <= now_ms:
                self._changes.end(lease, Cause.EXPIRED, "expired")
            if lease.state is LeaseState.ENDED:
                del ripe[lease_id]
                continue
            if lease.retries.resume_paused and lease.retries.resume_after_ms <= now_ms:
                self._changes.unpause_resume(lease)
            if lease.pinned_until_ms and lease.pinned_until_ms <= now_ms:
                self.pins.unpin(lease, "pin.over", "its pin is over")
            self.expectations.take_due(lease)
            self.start_reservations.mark_lapsed(lease)
            self.revocations.end_processes_if_due(lease)
            self._announce(lease)

    def _announce(self, lease: Lease) -> None:
        """Warn an idle kernel once before it is suspended for that, where the pool says so."""
        warn_ms, now_ms = self._books.policy(lease).warn_before_ms, self._changes.now_ms
        due_ms = idle_due_ms(self._books, lease) if warn_ms else None
        if due_ms is None or due_ms == lease.announced_ms or not now_ms < due_ms <= now_ms + warn_ms:
            return
        lease.announced_ms = due_ms
        self._books.mark_changed(lease)
        self._changes.effects.append(SuspendAnnounced(lease_id=lease.lease_id, at_ms=due_ms))
        left = format_duration(due_ms - now_ms)
        self._changes.record(
            lease.lease_id, "suspend.announced", f"idle: it is suspended in {left} unless it runs something"
        )

    def _suspend_asked(self) -> None:
        for lease in list(self._books.suspend_requested.values()):
            if lease.busy:
                self._changes.decline_suspend(lease, "busy", "a cell began to run before the suspend could start")
            elif (wait := self.cannot_suspend(lease)) is not None:
                if wait.code == "host-memory" and self._changes.ask_to_shrink(lease):
                    continue  # its answer decides
                self._changes.decline_suspend(lease, wait.code, wait.sentence)
            elif self._changes.channel_free:
                by = lease.suspend_requested_by
                if lease.pinned_until_ms:
                    self.pins.unpin(lease, "pin.ended", f"its pin ended because of {by}")
                self._changes.begin_suspend(lease, "suspend.asked", f"suspended because of {by}")

    def move_requested(self, lease: Lease, device_id: str | None) -> None:
        """Move the lease at an administrator's request, at once or not at all."""
        wait = (lease.state is LeaseState.RESIDENT and self.cannot_suspend(lease)) or move_on_request(
            self._changes, lease, device_id
        )
        if wait:
            self._changes.decline(lease, wait.code, wait.sentence, about="move")
        elif lease.pinned_until_ms:
            self.pins.unpin(lease, "pin.ended", "an administrator has it moved, which ends its pin")

    def _suspend_breaching(self) -> None:
        for lease in self.memory_caps.enforce():
            if (
                self._changes.channel_free
                and lease.retries.suspend_after_ms <= self._changes.now_ms
                and not self.cannot_suspend(lease)
            ):
                self._changes.begin_suspend(lease, "suspend.breach", "it uses more than its cap")

    def cannot_suspend(self, lease: Lease) -> Reason | None:
        """Return why a resident, idle lease cannot be suspended now, or None."""
        if lease.is_unsuspendable:
            return Reason("not-checkpointable", lease.unsuspendable_reason)
        if lacks_device(self._books, lease):
            return Reason("device-lost", "its device answers nothing, so nothing can be saved from it")
        left_mib, need_mib = self._books.host_left_mib, lease.host_need_mib
        if need_mib <= left_mib:
            return None
        need, left = format_memory(need_mib), format_memory(max(0, left_mib))
        return Reason("host-memory", f"saving it is expected to take {need} of host memory, of which {left} are left")

    def _suspend_idle(self) -> bool:
        """Suspend leases that were idle for long enough. Returns whether room had been kept for one of them to grow in place."""
        now_ms, kept = self._changes.now_ms, False
        for lease in list(self._deadlines.ripe.values()):
            if not self._changes.channel_free:
                break
            if lease.state is LeaseState.ENDED:
                continue
            if lease.host_need_mib > self._books.host_left_mib:
                due_ms = idle_due_ms(self._books, lease)
                if due_ms is not None and due_ms <= now_ms:
                    self._changes.ask_to_shrink(lease)
                continue
            if not spares_host_memory(self._books, lease):
                self._books.mark_changed(lease)  # it is asked again later
                continue
            if self._makes_room_to_grow(lease):
                continue
            due_ms = idle_due_ms(self._books, lease)
            if due_ms is not None and due_ms <= now_ms:
                idle = format_duration(now_ms - lease.last_active_ms)
                kept |= lease.is_growing
                why = f"idle for {idle}"
                if self._books.policy(lease).idle_after_ms is None:
                    why += ", and to hold its memory is expected to cost more than to bring it back"
                self._changes.begin_suspend(lease, "suspend.idle", why)
        return kept

    def _makes_room_to_grow(self, lease: Lease) -> bool:
        """Return whether neighbours are leaving so that the lease can grow in place: its own suspend would waste that."""
        ticket = lease.ticket
        return (
            lease.is_growing
            and ticket is not None
            and ticket.wait is not None
            and ticket.wait.code == "wait.making-room"
        )
