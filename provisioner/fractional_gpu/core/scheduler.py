"""Serves as many waiting leases as it can after each event.

Each run takes the following steps in order. All steps share the swap channels.

1. End leases whose time is up.
2. Save leases before their devices become unavailable.
3. Begin suspends that were requested, or that are needed because of a breached cap, a drained device, an ended seat or a stranger.
4. Serve tickets.
5. Relieve pressure on host memory.
6. Resume leases that are expected to run a cell soon.
7. Move leases off devices where busy leases slow each other down.
8. Suspend leases that have been idle long enough.
9. Move idle leases together so that whole devices become empty.
"""

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.foresight import Expectations, relieve_host_memory, resume_expected
from fractional_gpu.core.idle import suspend_idle
from fractional_gpu.core.lifecycle import StartReservations
from fractional_gpu.core.limits import end_pin
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.move import empty_devices, move_on_request, relieve_compute
from fractional_gpu.core.queue import QueuePass
from fractional_gpu.core.resize import MemoryCaps, Resizer
from fractional_gpu.core.revoke import Salvage, end_processes_if_due, suspend_leaving
from fractional_gpu.core.state.leases import Lease, Reason
from fractional_gpu.core.strangers import yield_to_strangers
from fractional_gpu.core.suspend import lacks_device
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_memory

_SPARE_PASSES = 4  # per event, in addition to two passes for each waiting lease; even a second pass is rare


class Scheduler:
    """Serves waiting leases after each event."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._last_pass: QueuePass | None = None  # of this event
        self.memory_caps = MemoryCaps(changes)
        self.salvage = Salvage(changes)
        self.resizer = Resizer(changes)
        self.start_reservations = StartReservations(changes)
        self.expectations = Expectations(changes)

    def serve(self) -> None:
        """Serve as many waiting leases as possible, following the steps in the module docstring."""
        self._books.recheck_ms = None
        for lease in list(self._books.leases.values()):
            self._take_due(lease)
        self.salvage.save()
        self._suspend_asked()
        self._suspend_breaching()
        suspend_leaving(self._changes)
        yield_to_strangers(self._changes)
        self.start_reservations.reclaim_lapsed(first=True)
        self.start_reservations.file_parked()
        self._serve_tickets()
        # Room is taken from leases without a process only while tickets still wait. Each round frees room for these tickets.
        while self.start_reservations.reclaim_lapsed():
            self.start_reservations.file_parked()
            self._serve_tickets()
        relieve_host_memory(self._changes)
        resume_expected(self._changes)
        relieve_compute(self._changes)
        if suspend_idle(self._changes):
            self._serve_tickets()
        empty_devices(self._changes)
        self._settle_gates()
        for lease in self._books.leases.values():
            self._await_next(lease)

    def _serve_tickets(self) -> None:
        # The number of passes is bounded, because each further pass follows a ticket that was served or that turned out to need more.
        for _ in range(_SPARE_PASSES + 2 * len(self._books.waiting)):
            if not self._books.waiting:
                break
            self._last_pass = one = QueuePass(self._changes, self.resizer)
            one.serve()
            for lease_id in sorted(one.capacity.short_of_host_memory):
                self._changes.ask_to_shrink(self._books.leases[lease_id])
            if not one.needs_another:
                break

    def _settle_gates(self) -> None:
        """Close and open gates as decided by the last pass over the queue. If no ticket is waiting, open all gates."""
        last, self._last_pass = self._last_pass, None
        if last is not None and self._books.waiting:
            last.settle_gates()
        elif not self._books.waiting:
            for lease in self._books.gates_closed:
                self._changes.open_gate(lease)

    def wake_ms(self) -> int | None:
        """Return the time at which `serve` should run if no event (such as the end of an operation) comes first, or None if it needn't."""
        due = (self._books.recheck_ms, self.memory_caps.due_ms())
        return min((at_ms for at_ms in due if at_ms is not None), default=None)

    def _take_due(self, lease: Lease) -> None:
        """Act on any of the lease's deadlines that have passed, except its idle-suspend deadline."""
        now_ms = self._changes.now_ms
        if lease.expires_ms is not None and lease.expires_ms <= now_ms:
            self._changes.end(lease, Cause.EXPIRED, "expired")
            return
        if lease.spec.claim_ms and lease.state is LeaseState.RESIDENT and lease.pinned_until_ms <= now_ms:
            self._changes.end(lease, Cause.RELEASED, "claim-over")
            return
        if lease.pinned_until_ms <= now_ms:
            end_pin(self._changes, lease, "its pin has run out", reason="pin.over")
        self.expectations.take_due(lease)
        end_processes_if_due(self._changes, lease)

    def _await_next(self, lease: Lease) -> None:
        """Schedule a recheck at each of the lease's deadlines."""
        books = self._books
        times = [lease.expires_ms, lease.ends_ms, lease.rhythm_ms, lease.pinned_until_ms, lease.retries.resume_after_ms]
        if lease.expectation is not None:
            times.append(lease.expectation.until_ms)
        if lease.state is LeaseState.UNATTACHED and lease.has_reservation:
            times.append(lease.hold_until_ms)
        for at_ms in times:
            if at_ms is not None:
                books.recheck_at(at_ms)

    def _suspend_asked(self) -> None:
        for lease in [one for one in self._books.leases.values() if one.suspend_requested]:
            if lease.busy:
                self._changes.decline_suspend(lease, "busy", "a cell began to run before the suspend could start")
            elif (wait := self.cannot_suspend(lease)) is not None:
                if wait.code == "host-memory" and self._changes.ask_to_shrink(lease):
                    continue  # decide once it has answered
                self._changes.decline_suspend(lease, wait.code, wait.sentence)
            elif self._changes.channel_free:
                by = lease.suspend_requested_by
                end_pin(self._changes, lease, f"its pin ended because of {by}")
                self._changes.begin_suspend(lease, "suspend.asked", f"suspended because of {by}")

    def move_requested(self, lease: Lease, device_id: str | None) -> None:
        """Move the lease right away, at an administrator's request, or decline the request."""
        wait = (lease.state is LeaseState.RESIDENT and self.cannot_suspend(lease)) or move_on_request(
            self._changes, lease, device_id
        )
        if wait:
            self._changes.decline(lease, wait.code, wait.sentence, about="move")
        else:
            end_pin(self._changes, lease, "an administrator is moving it, which ends its pin")

    def _suspend_breaching(self) -> None:
        for lease in self.memory_caps.enforce():
            if (
                self._changes.channel_free
                and lease.retries.suspend_after_ms <= self._changes.now_ms
                and not self.cannot_suspend(lease)
            ):
                self._changes.begin_suspend(lease, "suspend.breach", "it uses more than its cap")

    def cannot_suspend(self, lease: Lease) -> Reason | None:
        """Return why a resident, idle lease can't be suspended right now, or None if it can."""
        if lease.is_unsuspendable:
            return Reason("not-checkpointable", lease.unsuspendable_reason)
        if lacks_device(self._books, lease):
            return Reason("device-lost", "its GPU is not responding, so nothing can be saved from it")
        left_mib, need_mib = self._books.host_left_mib, lease.host_need_mib
        if need_mib <= left_mib:
            return None
        need, left = format_memory(need_mib), format_memory(max(0, left_mib))
        return Reason("host-memory", f"saving it is expected to take {need} of host memory, and only {left} is left")
