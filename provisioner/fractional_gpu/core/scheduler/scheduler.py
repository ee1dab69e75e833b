"""Whose turn it is: after every event, whoever waits is served as far as can be.

In this order: leases whose time is over end; suspends that somebody asked for, or that a breached cap, an emptied device or an ended
seat demands, begin;
tickets are served; host memory is relieved; leases that have idled long enough are suspended. One swap channel serves all of them.
"""

from fractional_gpu.core.books.books import Lease
from fractional_gpu.core.books.records import Wait
from fractional_gpu.core.changes.changes import Changes
from fractional_gpu.core.changes.deadlines import Deadlines, idle_due_ms
from fractional_gpu.core.effects import SuspendAnnounced
from fractional_gpu.core.handlers.drain import Draining
from fractional_gpu.core.handlers.memory_caps import Caps
from fractional_gpu.core.handlers.pins import Pins
from fractional_gpu.core.handlers.resize import Resizing
from fractional_gpu.core.handlers.revocation import Revoked
from fractional_gpu.core.handlers.starting import Starting
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.eligibility import is_lost
from fractional_gpu.core.rules.victim_cost import prepare
from fractional_gpu.core.scheduler.host_memory_relief import Relief
from fractional_gpu.core.scheduler.migration import move
from fractional_gpu.core.scheduler.queue_pass import Pass
from fractional_gpu.core.transitions import Cause
from fractional_gpu.core.units import format_duration, format_memory

__all__ = ["Serving"]

_SPARE_PASSES = 4  # over the queue in one event, beside two for everybody who waits; a second one is rare


class Serving:
    """Serves whoever waits. `wake_ms`: the next moment at which time alone changes a decision."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._deadlines = Deadlines(changes.books)
        self._hint_ms: int | None = None  # when the last pass over the queue asked to be repeated
        self.caps = Caps(changes)
        self.draining = Draining(changes)
        self.pins = Pins(changes)
        self.resizing = Resizing(changes)
        self.revoked = Revoked(changes)
        self.starting = Starting(changes)
        self._relief = Relief(changes)

    def serve(self) -> None:
        """Do everything that can be done now."""
        self._deadlines.renew()
        self._take_due()
        self._suspend_asked()
        self._suspend_breaching()
        if self._books.draining:
            self.draining.serve()
        if self._books.revoked:
            self.revoked.serve()
        self.starting.file_parked()
        self._serve_tickets()
        while self.starting.take_back():  # each round frees room for the tickets that are left
            self.starting.file_parked()
            self._serve_tickets()
        self._relief.relieve()
        if self._suspend_idle():
            self._serve_tickets()
        self._deadlines.renew(at_end=True)

    def reflect(self) -> None:
        """Prepare for the next decision."""
        if self._books.waiting:
            prepare(self._books)

    def _serve_tickets(self) -> None:
        self._hint_ms = None
        # each further pass follows a ticket that was served, or that needs more than it said
        for _ in range(_SPARE_PASSES + 2 * self._books.waiting):
            if not self._books.waiting:
                break
            one = Pass(self._changes, self.resizing)
            one.serve()
            self._hint_ms, self._books.counted_on = one.hint_ms, one.counted_on
            for lease_id in sorted(one.wished):
                self._changes.ask_to_shrink(self._books.leases[lease_id])
            if not one.again:
                break
        if not self._books.waiting:
            for lease in list(self._books.yielding.values()):
                self._changes.open_gate(lease)

    def wake_ms(self) -> int | None:
        """Return when to serve again though nothing happens, or None. What waits for an answer needs no alarm."""
        due = (
            self._deadlines.next_ms(),
            self._hint_ms,
            self.draining.hint_ms,
            self.revoked.hint_ms,
            self.caps.due_ms(),
        )
        return min((at_ms for at_ms in due if at_ms is not None and at_ms > self._changes.now_ms), default=None)

    def _take_due(self) -> None:
        """Do what the clock alone demands, but for idle suspensions."""
        now_ms, ripe = self._changes.now_ms, self._deadlines.ripe
        for lease_id, lease in list(ripe.items()):
            if lease.state is LeaseState.ENDED:
                del ripe[lease_id]
            elif lease.expires_ms is not None and lease.expires_ms <= now_ms:
                self._changes.end(lease, Cause.EXPIRED, "expired")
                del ripe[lease_id]
            elif lease.paused and lease.resume_after_ms <= now_ms:
                self._changes.unpause(lease)
            if lease.pinned_until_ms and lease.pinned_until_ms <= now_ms:
                self.pins.unpin(lease, "pin.over", "its pin is over")
            self.starting.due(lease)
            self.revoked.due(lease)
            self._announce(lease)

    def _announce(self, lease: Lease) -> None:
        """Warn an idle kernel once before it is suspended for that, where the pool says so."""
        warn_ms, due_ms = self._books.policy(lease).warn_before_ms, idle_due_ms(self._books, lease)
        now_ms = self._changes.now_ms
        if not warn_ms or due_ms is None or due_ms == lease.announced_ms or not now_ms < due_ms <= now_ms + warn_ms:
            return
        lease.announced_ms = due_ms
        self._books.touch(lease)
        self._changes.effects.append(SuspendAnnounced(lease_id=lease.lease_id, at_ms=due_ms))
        left = format_duration(due_ms - now_ms)
        self._changes.record(
            lease.lease_id, "suspend.announced", f"idle: it is suspended in {left} unless it runs something"
        )

    def _suspend_asked(self) -> None:
        for lease in list(self._books.asked.values()):
            if lease.busy:
                self._changes.decline_suspend(lease, "busy", "a cell began to run before the suspend could start")
            elif (wait := self.cannot_suspend(lease)) is not None:
                if wait.reason == "host-memory" and self._changes.ask_to_shrink(lease):
                    continue  # its answer decides
                self._changes.decline_suspend(lease, wait.reason, wait.sentence)
            elif self._changes.channel_free:
                if lease.pinned_until_ms:
                    self.pins.unpin(lease, "pin.ended", f"{lease.asked_by} asked for its suspend, which ends its pin")
                self._changes.begin_suspend(lease, "suspend.asked", f"{lease.asked_by} asked for it")

    def move_asked(self, lease: Lease, device_id: str | None) -> None:
        """An administrator wants it elsewhere: it goes at once, or stays."""
        wait = (lease.state is LeaseState.RESIDENT and self.cannot_suspend(lease)) or move(
            self._changes, lease, device_id
        )
        if wait:
            self._changes.decline(lease, wait.reason, wait.sentence, about="move")
        elif lease.pinned_until_ms:
            self.pins.unpin(lease, "pin.ended", "an administrator has it moved, which ends its pin")

    def _suspend_breaching(self) -> None:
        for lease in self.caps.enforce():
            if self._changes.channel_free and lease.retry_ms <= self._changes.now_ms and not self.cannot_suspend(lease):
                self._changes.begin_suspend(lease, "suspend.breach", "it uses more than its cap")

    def cannot_suspend(self, lease: Lease) -> Wait | None:
        """Say why a resident, idle lease cannot be suspended at all now, or return None."""
        if lease.staying:
            return Wait("not-checkpointable", lease.stays)
        if is_lost(self._books, lease):
            return Wait("device-lost", "its device answers nothing, so nothing can be saved from it")
        left_mib, need_mib = self._books.host_left_mib, lease.host_need_mib
        if need_mib <= left_mib:
            return None
        need, left = format_memory(need_mib), format_memory(max(0, left_mib))
        return Wait("host-memory", f"saving it takes up to {need} of host memory, of which {left} are left")

    def _suspend_idle(self) -> bool:
        """Suspend who has idled for long enough. Returns whether room was kept for one of them, to grow where it was."""
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
            if self._makes_room_to_grow(lease):
                continue
            due_ms = idle_due_ms(self._books, lease)
            if due_ms is not None and due_ms <= now_ms:
                idle = format_duration(now_ms - lease.last_active_ms)
                kept |= lease.grows
                self._changes.begin_suspend(lease, "suspend.idle", f"idle for {idle}")
        return kept

    def _makes_room_to_grow(self, lease: Lease) -> bool:
        """Whether neighbours are stepping aside so that it can grow where it is: if it left now, they would have done so in vain."""
        ticket = lease.ticket
        if ticket is None or not lease.grows or ticket.wait is None or ticket.passes != self._books.passes:
            return False
        return ticket.wait.reason == "wait.making-room"
