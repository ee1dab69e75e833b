"""Whose turn it is: after every event, whoever waits is served as far as can be.

In this order: leases whose time is over end; suspends that somebody asked for begin; tickets are served; leases that have idled long
enough are suspended. One swap channel serves all of them.
"""

from provisioner.core.caps import Caps
from provisioner.core.changes import Changes
from provisioner.core.model import LeaseState
from provisioner.core.relief import Relief
from provisioner.core.scheduling import Plan, Room, Wait, candidates, willing_from_ms
from provisioner.core.state import Lease, Ticket
from provisioner.core.transitions import Cause
from provisioner.core.units import format_duration, format_memory

__all__ = ["Serving"]

_Waiting = tuple[Lease, Ticket, tuple[str, ...]]
_OPEN = frozenset({LeaseState.UNARMED, LeaseState.SUSPENDED})  # nothing but room is in their way


class Serving:
    """Serves whoever waits. `wake_ms`: the next moment at which time alone changes a decision."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self.caps = Caps(changes)
        self._relief = Relief(changes)

    def serve(self) -> None:
        """Do everything that can be done now."""
        self._expire()
        self._suspend_asked()
        self._suspend_breaching()
        if self._books.waiting:
            _Pass(self._changes).serve()
        self._relief.relieve()
        self._suspend_idle()

    def wake_ms(self) -> int | None:
        """Return when to serve again though nothing happens, or None. What waits for an answer needs no alarm."""
        now_ms, books = self._changes.now_ms, self._books
        due: list[int | None] = [self.caps.due_ms()]
        due += [lease.expires_ms for lease in books.by_state[LeaseState.UNATTACHED].values()]
        for lease in books.by_state[LeaseState.RESIDENT].values():
            if lease.busy:
                continue
            due.append(self._idle_due(lease))
            if books.waiting:
                due.append(willing_from_ms(books.policy(lease), lease))
        if books.waiting:
            due += [lease.resume_after_ms for lease in books.by_state[LeaseState.SUSPENDED].values() if lease.ticket]
        return min((at_ms for at_ms in due if at_ms is not None and at_ms > now_ms), default=None)

    def _expire(self) -> None:
        for lease in list(self._books.by_state[LeaseState.UNATTACHED].values()):
            if lease.expires_ms is not None and lease.expires_ms <= self._changes.now_ms:
                self._changes.end(lease, Cause.EXPIRED, "expired")

    def _suspend_asked(self) -> None:
        for lease in [lease for lease in self._books.by_state[LeaseState.RESIDENT].values() if lease.asked_to_suspend]:
            if lease.busy:
                self._changes.decline(lease, "busy", "a cell began to run before the suspend could start")
            elif (wait := self.cannot_suspend(lease)) is not None:
                self._changes.decline(lease, wait.reason, wait.sentence)
            elif self._changes.channel_free:
                self._changes.begin_suspend(lease, "suspend.asked", "somebody asked for it")

    def _suspend_breaching(self) -> None:
        for lease in self.caps.enforce():
            if self._changes.channel_free and lease.retry_ms <= self._changes.now_ms and not self.cannot_suspend(lease):
                self._changes.begin_suspend(lease, "suspend.breach", "it uses more than its cap")

    def cannot_suspend(self, lease: Lease) -> Wait | None:
        """Say why a resident, idle lease cannot be suspended at all now, or return None."""
        if lease.staying:
            return Wait("not-checkpointable", lease.stays)
        if self._is_lost(lease):
            return Wait("device-lost", "its device answers nothing, so nothing can be saved from it")
        left_mib, need_mib = self._books.host_left_mib, lease.host_need_mib
        if need_mib <= left_mib:
            return None
        need, left = format_memory(need_mib), format_memory(max(0, left_mib))
        return Wait("host-memory", f"saving it takes up to {need} of host memory, of which {left} are left")

    def _is_lost(self, lease: Lease) -> bool:
        device = self._books.devices.get(lease.device_id or "")
        return device is None or device.lost

    def _suspend_idle(self) -> None:
        now_ms = self._changes.now_ms
        for lease in list(self._books.by_state[LeaseState.RESIDENT].values()):
            if not self._changes.channel_free:
                return
            due_ms = self._idle_due(lease)
            if due_ms is None or due_ms > now_ms or lease.host_need_mib > self._books.host_left_mib:
                continue
            idle = format_duration(now_ms - lease.last_active_ms)
            self._changes.begin_suspend(lease, "suspend.idle", f"idle for {idle}")

    def _idle_due(self, lease: Lease) -> int | None:
        """When an idle lease is to be suspended without anybody needing its room. A lost device saves nothing."""
        if lease.busy:
            return None
        pool = self._books.policy(lease)
        willing_ms = willing_from_ms(pool, lease)
        if willing_ms is None or pool.idle_after_ms is None or self._is_lost(lease):
            return None
        return max(lease.last_active_ms + pool.idle_after_ms, willing_ms)


class _Pass:
    """One walk along the queue. What is promised on the way counts against everybody behind."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._books = changes.books
        self._room = Room(changes.books, changes.now_ms)
        self._mosts: dict[str, int] = {}
        self._line = changes.books.line()
        self._urgent = any(lease.ticket is not None and lease.ticket.urgent for lease in self._line)
        if self._urgent:
            self._line = self._owed_first(self._line)
        self._ahead: list[_Waiting] = []  # could be served and were not
        self._kept: set[tuple[str, str]] = set()  # lease and device: room is kept or promised there already
        self._allowed: dict[tuple[str, str | None], tuple[str, ...]] = {}
        self._hopeless: dict[tuple[tuple[str, ...], int], Wait] = {}  # room only shrinks on the way

    def serve(self) -> None:
        """Serve everybody once, in order."""
        for place, lease in enumerate(self._line):
            ticket = lease.ticket
            if ticket is None:
                continue
            wait = None if lease.state in _OPEN else _not_yet(lease, ticket)
            if wait is None:
                wait = self._serve(place, lease, ticket)
            if wait is not None:
                self._changes.explain(lease, wait)

    def _serve(self, place: int, lease: Lease, ticket: Ticket) -> Wait | None:
        """Serve one ticket as far as it can be now; say why it waits, if it does."""
        devices, need_mib = self._devices(lease), lease.need_mib
        if lease.resume_after_ms > self._changes.now_ms:
            self._stays(lease, ticket, devices)
            return Wait("wait.retry", f"{lease.sentence}; it is tried again in a moment")
        hopeless = self._hopeless.get((devices, need_mib))
        if hopeless is not None:
            self._stays(lease, ticket, devices)
            return hopeless
        saved = lease.state is LeaseState.SUSPENDED
        home = [device_id for device_id in devices if saved and device_id == lease.home_id]
        device_id = self._room.best_fit(home, need_mib) or self._room.best_fit(devices, need_mib)
        if device_id is not None:
            if saved and not self._changes.channel_free:
                self._keep(lease, device_id)
                return Wait("wait.swap-channel", "another kernel is being moved; this one is next")
            self._changes.grant(lease, device_id)
            self._pass_over(place, lease, ticket, device_id)
            return None
        plan = self._room.plan(lease, devices)
        if isinstance(plan, Wait):
            self._hopeless[devices, need_mib] = plan
        else:
            self._make_room(lease, ticket, plan)
        self._stays(lease, ticket, devices)
        if isinstance(plan, Wait):
            return plan
        victims = tuple(victim.lease_id for victim in plan.victims)
        return Wait("wait.making-room", "an idle kernel is being suspended to make room", victims)

    def _make_room(self, lease: Lease, ticket: Ticket, plan: Plan) -> None:
        need_mib = lease.need_mib
        self._room.promise(plan, need_mib, firm=ticket.passed_over >= self._most(lease))
        self._kept.add((lease.lease_id, plan.device_id))
        for victim in plan.victims:
            if not self._changes.channel_free:
                break
            self._room.begun(victim)
            why = f"idle, and {format_memory(need_mib)} are needed by lease {lease.lease_id[:8]}"
            self._changes.begin_suspend(victim, "suspend.needed-by", why)

    def _devices(self, lease: Lease) -> tuple[str, ...]:
        key = (lease.spec.pool, lease.home_id if lease.state is LeaseState.SUSPENDED else None)
        if key not in self._allowed:
            self._allowed[key] = candidates(self._books, self._books.policy(lease), lease)
        return self._allowed[key]

    # -- law 4 -------------------------------------------------------------------------------------------------------------------

    def _most(self, lease: Lease) -> int:
        """How often a ticket of the lease's pool may be passed over."""
        name = lease.spec.pool
        if name not in self._mosts:
            self._mosts[name] = self._books.policy(lease).max_passed_over
        return self._mosts[name]

    def _stays(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> None:
        """The ticket waits, and may be passed over from now on; one that was passed over too often keeps room."""
        self._ahead.append((lease, ticket, devices))
        if ticket.passed_over >= self._most(lease):
            self._keep_what_is_due(lease, ticket, devices)

    def _pass_over(self, place: int, winner: Lease, winning: Ticket, device_id: str) -> None:
        """Count it for everybody who could have used the room that was just given away, finds none there now, and came earlier."""
        left_mib = self._books.devices[device_id].free_mib
        for lease, ticket, devices in self._ahead:
            if device_id in devices and left_mib < lease.need_mib and self._count(lease, ticket):
                self._keep_what_is_due(lease, ticket, devices)
        if not self._urgent:
            return
        behind, owed = self._line[place + 1 :], False
        for lease in behind:  # those that an urgent ticket, or one that was owed more, went before
            other = lease.ticket
            if other is None or lease.spec.priority != winner.spec.priority or other.order > winning.order:
                continue
            if _not_yet(lease, other) is None and device_id in self._devices(lease) and left_mib < lease.need_mib:
                owed |= self._count(lease, other)
        if owed:  # from now on somebody goes before the urgent ones still to come
            self._line[place + 1 :] = self._owed_first(behind)

    def _owed_first(self, line: list[Lease]) -> list[Lease]:
        """Return the line with those that were passed over too often before the urgent ones that are younger."""
        latest: dict[int, int] = {}  # urgent ticket by priority
        for lease in line:
            if lease.ticket is not None and lease.ticket.urgent:
                latest[lease.spec.priority] = max(lease.ticket.order, latest.get(lease.spec.priority, 0))

        def rank(lease: Lease) -> tuple[int, bool, int]:
            ticket, priority = lease.ticket, lease.spec.priority
            if ticket is None:
                return (-priority, True, 0)
            owed = ticket.order < latest.get(priority, 0) and ticket.passed_over >= self._most(lease)
            return (-priority, not (owed or ticket.urgent), ticket.order)

        return sorted(line, key=rank)

    def _count(self, lease: Lease, ticket: Ticket) -> bool:
        """Count one more; return whether that is as often as a ticket may be passed over."""
        most = self._most(lease)
        if ticket.passed_over < most:
            ticket.passed_over += 1
        else:
            ticket.passed_elsewhere += 1
        return ticket.passed_over >= most

    def _keep_what_is_due(self, lease: Lease, ticket: Ticket, devices: tuple[str, ...]) -> None:
        """Keep room on one device for a ticket that was passed over K times, and on one more for every K times since.

        The device stays the same while it can serve, so that the room there can grow to what is needed.
        """
        due = 1 + ticket.passed_elsewhere // max(1, self._most(lease))
        able = [device_id for device_id in devices if self._room.nearest([device_id], lease.need_mib) is not None]
        promised = [device_id for device_id in able if (lease.lease_id, device_id) in self._kept]
        kept = list(dict.fromkeys([*(device_id for device_id in ticket.kept_on if device_id in able), *promised]))[:due]
        while len(kept) < due:
            nearest = self._room.nearest([device_id for device_id in able if device_id not in kept], lease.need_mib)
            if nearest is None:
                break
            kept.append(nearest)
        ticket.kept_on = tuple(kept)
        for device_id in kept:
            self._keep(lease, device_id)

    def _keep(self, lease: Lease, device_id: str) -> None:
        if (lease.lease_id, device_id) not in self._kept:
            self._kept.add((lease.lease_id, device_id))
            self._room.keep(device_id, lease.need_mib)


def _not_yet(lease: Lease, ticket: Ticket) -> Wait | None:
    """Why a ticket cannot be served whatever room there is: its lease is in an operation, in doubt, or has not started."""
    match lease.state:
        case LeaseState.SUSPENDING:
            return Wait("wait.own-suspend", "this kernel is being suspended; it comes back right after")
        case LeaseState.RESUMING:
            return Wait("wait.restoring", f"its {format_memory(lease.saved_mib)} are being brought back to the device")
        case LeaseState.QUARANTINED:
            return Wait(
                "wait.quarantine", "nobody knows for certain what state this kernel is in; it is being looked at again"
            )
        case LeaseState.UNATTACHED if not ticket.before_start:
            return Wait("wait.no-process", "the kernel has not started yet")
        case _:
            return None
