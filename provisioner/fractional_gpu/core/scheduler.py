"""After every event, the scheduler serves the waiting leases as far as possible.

In this order: leases whose time is over end; leases are saved whose device goes away; suspends begin that were requested, or that a
breached cap, a drained device or an ended seat demands; tickets are served; host memory is relieved; leases whose cells are expected come
back; devices are relieved whose busy leases slow each other down; leases that were idle for long enough are suspended; idle ones move
together. All share the swap channels.
"""

from heapq import heapify, heappop, heappush

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.foresight import EarlyResumes, Expectations, HostMemoryRelief
from fractional_gpu.core.idle import announce, idle_due_ms, suspend_idle
from fractional_gpu.core.lifecycle import StartReservations
from fractional_gpu.core.limits import Pins
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.move import ComputeRelief, IdlePacking, move_on_request
from fractional_gpu.core.queue import QueuePass
from fractional_gpu.core.resize import MemoryCaps, Resizer
from fractional_gpu.core.revoke import Departures, Salvage
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, Reason
from fractional_gpu.core.suspend import lacks_device
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_memory

# -- scheduler ---------------------------------------------------------------------------------------------------------
_SPARE_PASSES = 4  # over the queue in one event, in addition to two for each waiting lease; a second pass is rare


class Scheduler:
    """Serves waiting leases. `wake_ms`: the next time at which time alone changes a decision."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._deadlines = Deadlines(changes.books)
        self._last_pass: QueuePass | None = None  # over the queue, in the event in hand
        self.memory_caps = MemoryCaps(changes)
        self.departures = Departures(changes)
        self.salvage = Salvage(changes)
        self.pins = Pins(changes)
        self.resizer = Resizer(changes)
        self.start_reservations = StartReservations(changes)
        self.expectations = Expectations(changes)
        self._early_resumes = EarlyResumes(changes)
        self._relief = HostMemoryRelief(changes)
        self._compute_relief = ComputeRelief(changes)
        self._packing = IdlePacking(changes)

    def serve(self) -> None:
        """Do everything that can be done now."""
        self._books.recheck_ms = None
        self._changes.idle_costs.review()
        self._deadlines.refresh()
        self._take_due()
        self.salvage.save()
        self._suspend_asked()
        self._suspend_breaching()
        self.departures.suspend_ready()
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
        if suspend_idle(self._changes, list(self._deadlines.ripe.values())):
            self._serve_tickets()
        self._packing.pack()
        self._settle_gates()
        self._deadlines.refresh(at_end=True)

    def _serve_tickets(self) -> None:
        # Bounded: each further pass follows a ticket that was served, or that needs more than it said.
        for _ in range(_SPARE_PASSES + 2 * len(self._books.waiting)):
            if not self._books.waiting:
                break
            self._last_pass = one = QueuePass(self._changes, self.resizer)
            one.serve()
            self._books.expected_victims = one.expected_victims
            for lease_id in sorted(one.capacity.short_of_host_memory):
                self._changes.ask_to_shrink(self._books.leases[lease_id])
            if not one.needs_another:
                break

    def _settle_gates(self) -> None:
        """Close and open the gates that the last pass chose; if no ticket waits any more, open all."""
        last, self._last_pass = self._last_pass, None
        if last is not None and self._books.waiting:
            last.settle_gates()
        elif not self._books.waiting:
            for lease in self._books.gates_closed:
                self._changes.open_gate(lease)

    def wake_ms(self) -> int | None:
        """Return when to serve again if no event comes, or None. What waits for the result of an operation needs no alarm."""
        due = (self._deadlines.next_ms(), self._books.recheck_ms, self.memory_caps.due_ms())
        return min((at_ms for at_ms in due if at_ms is not None and at_ms > self._changes.now_ms), default=None)

    def is_due_sooner(self) -> bool:
        """Return whether time alone changes something for a lease sooner than the last pass knew."""
        return self._deadlines.refresh()

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
            if lease.pinned_until_ms <= now_ms:
                self.pins.end(lease, "its pin is over", reason="pin.over")
            self.expectations.take_due(lease)
            self.start_reservations.mark_lapsed(lease)
            self.departures.end_processes_if_due(lease)
            announce(self._changes, lease)

    def _suspend_asked(self) -> None:
        for lease in [one for one in self._books.leases.values() if one.suspend_requested]:
            if lease.busy:
                self._changes.decline_suspend(lease, "busy", "a cell began to run before the suspend could start")
            elif (wait := self.cannot_suspend(lease)) is not None:
                if wait.code == "host-memory" and self._changes.ask_to_shrink(lease):
                    continue  # its answer decides
                self._changes.decline_suspend(lease, wait.code, wait.sentence)
            elif self._changes.channel_free:
                by = lease.suspend_requested_by
                self.pins.end(lease, f"its pin ended because of {by}")
                self._changes.begin_suspend(lease, "suspend.asked", f"suspended because of {by}")

    def move_requested(self, lease: Lease, device_id: str | None) -> None:
        """Move the lease at an administrator's request, at once or not at all."""
        wait = (lease.state is LeaseState.RESIDENT and self.cannot_suspend(lease)) or move_on_request(
            self._changes, lease, device_id
        )
        if wait:
            self._changes.decline(lease, wait.code, wait.sentence, about="move")
        else:
            self.pins.end(lease, "an administrator has it moved, which ends its pin")

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


# -- deadlines ---------------------------------------------------------------------------------------------------------
# When time alone changes something for a lease: one heap for all leases, brought up to date with those that changed.
#
# An entry of the heap counts only while it agrees with its lease (`Lease.due_ms`); others are dropped when they come up. Leases whose time
# has come and that could not be served yet (the swap channel is in use, host memory is short) are `ripe`, and need no alarm.
_SPARE = 4  # entries per lease before the heap is rebuilt


class Deadlines:
    """The heap. `ripe`: leases whose time has come."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._heap: list[tuple[int, int, Lease]] = []
        self._pushed = 0
        self.ripe: dict[str, Lease] = {}

    def refresh(self, *, at_end: bool = False) -> bool:
        """Take changed leases, and the clock, into account. Returns whether one of these leases is due sooner than before.

        `at_end`: nothing more is done in this event.
        """
        now_ms, sooner = self._books.now_ms, False
        for lease in self._books.changed.values():
            at_ms = self._due_ms(lease, at_end=at_end)
            sooner |= at_ms is not None and (lease.due_ms is None or at_ms < lease.due_ms)
            if at_ms is not None and at_ms <= now_ms:
                self.ripe[lease.lease_id] = lease
            else:
                self.ripe.pop(lease.lease_id, None)
                if at_ms is not None and at_ms != lease.due_ms:
                    self._push(at_ms, lease)
            lease.due_ms = at_ms
        self._books.changed.clear()
        heap = self._heap
        while heap and (heap[0][0] <= now_ms or heap[0][2].due_ms != heap[0][0]):
            at_ms, _, lease = heappop(heap)
            if lease.due_ms == at_ms:
                self.ripe[lease.lease_id] = lease
        return sooner

    def next_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def _push(self, at_ms: int, lease: Lease) -> None:
        if len(self._heap) > 64 + _SPARE * len(self._books.leases):
            # Every change of a deadline leaves an outdated entry behind: rebuild the heap from those that still count.
            self._heap = list({entry[2].number: entry for entry in self._heap if entry[2].due_ms == entry[0]}.values())
            heapify(self._heap)
        self._pushed += 1
        heappush(self._heap, (at_ms, self._pushed, lease))

    def _due_ms(self, lease: Lease, *, at_end: bool) -> int | None:
        idle_ms = idle_due_ms(self._books, lease)
        if idle_ms is not None and idle_ms != lease.announced_ms:
            due_ms, idle_ms = idle_ms, idle_ms - self._books.policy(lease).warn_before_ms
            if at_end and idle_ms <= self._books.now_ms < due_ms:
                idle_ms = self._books.now_ms + 1  # the warning is late: give it at the next tick
        times = [] if lease.expires_ms is None else [lease.expires_ms]
        if lease.ends_ms is not None:
            times.append(lease.ends_ms)
        if idle_ms is not None:
            times.append(idle_ms)
        if lease.expectation is not None:
            times.append(lease.expectation.until_ms)
        if lease.rhythm_ms is not None and lease.state is LeaseState.SUSPENDED:
            times.append(lease.rhythm_ms)
        if lease.retries.resume_paused:
            times.append(lease.retries.resume_after_ms)
        if lease.pinned_until_ms:
            times.append(lease.pinned_until_ms)
        if lease.state is LeaseState.UNATTACHED and lease.has_reservation and lease.hold_until_ms > self._books.now_ms:
            times.append(lease.hold_until_ms)
        return min(times) if times else None
