"""An independent model of the arbiter, written from the design and not from the code: who may move where, and who may hold what.

It sees what a driver sees: events that go in, effects that come out. From these alone it keeps its own books, and after every event it
compares them with what the arbiter says, and checks the seven laws. It decides nothing: it only knows what would be wrong.
"""

from dataclasses import dataclass, field

from provisioner.core.arbiter import Arbiter
from provisioner.core.effects import Effect, Granted, LeaseEnded, Recorded, Resume, StateChanged, Suspend, WakeAt
from provisioner.core.events import (
    Attached,
    BusyChanged,
    DeviceLost,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    PoolConfigured,
    ProcessExited,
    ResumeFinished,
    SuspendFinished,
    TruthFound,
    Unwanted,
    Wanted,
)
from provisioner.core.model import LeaseSpec, LeaseState, PoolSpec, TicketView

S = LeaseState

MOVES: dict[LeaseState | None, dict[LeaseState, tuple[type[Event], ...]]] = {
    None: {
        S.UNATTACHED: (LeaseRequested, LeaseRecovered),
        S.UNARMED: (LeaseRecovered,),
        S.RESIDENT: (LeaseRecovered,),
        S.SUSPENDED: (LeaseRecovered,),
        S.QUARANTINED: (LeaseRecovered,),
    },
    S.UNATTACHED: {S.UNARMED: (Attached,), S.RESIDENT: (Attached,), S.UNATTACHED: (Event,), S.ENDED: (Event,)},
    S.UNARMED: {S.RESIDENT: (Event,), S.UNATTACHED: (ProcessExited,), S.ENDED: (LeaseReleased,)},
    S.RESIDENT: {S.SUSPENDING: (Event,), S.UNATTACHED: (ProcessExited,), S.ENDED: (LeaseReleased,)},
    S.SUSPENDING: {
        S.SUSPENDED: (SuspendFinished,),
        S.UNARMED: (SuspendFinished,),
        S.RESIDENT: (SuspendFinished,),
        S.QUARANTINED: (SuspendFinished,),
        S.UNATTACHED: (ProcessExited,),
        S.ENDED: (LeaseReleased,),
    },
    S.SUSPENDED: {S.RESUMING: (Event,), S.UNATTACHED: (ProcessExited,), S.ENDED: (LeaseReleased,)},
    S.RESUMING: {
        S.RESIDENT: (ResumeFinished,),
        S.SUSPENDED: (ResumeFinished,),
        S.QUARANTINED: (ResumeFinished,),
        S.UNATTACHED: (ProcessExited,),
        S.ENDED: (LeaseReleased,),
    },
    S.QUARANTINED: {
        S.RESIDENT: (TruthFound,),
        S.SUSPENDED: (TruthFound,),
        S.UNARMED: (TruthFound,),
        S.UNATTACHED: (TruthFound, ProcessExited),
        S.ENDED: (LeaseReleased,),
    },
}
"""From where to where, and what must have happened for it. `Event`: the arbiter's own decision, at any event."""

OWN_DECISIONS = (Attached, SuspendFinished, ResumeFinished, TruthFound, ProcessExited, LeaseReleased, LeaseRecovered)
ELIGIBLE = frozenset({S.UNATTACHED, S.UNARMED, S.SUSPENDED})
HOLDERS = frozenset({S.RESIDENT, S.SUSPENDING, S.RESUMING, S.QUARANTINED})


class LawBrokenError(AssertionError):
    """The arbiter did what the design forbids. The message names the law."""


@dataclass(slots=True)
class Seen:
    """A lease as its driver knows it."""

    spec: LeaseSpec
    state: LeaseState | None = None
    generation: int = 0
    device: str | None = None
    home: str | None = None  # where its saved state came from
    held: int = 0
    saved: int = 0
    host: int = 0
    busy: bool = False
    asked: int = -1  # when it asked for the GPU: a running number; -1: it does not wait
    urgent: bool = False
    passed: int = 0

    @property
    def need(self) -> int:
        """What must be reserved for it."""
        return max(self.spec.reserve_mib, self.saved)


@dataclass(slots=True)
class Observer:
    """Watches one arbiter. `see` after every `handle`."""

    arbiter: Arbiter
    parallel_swaps: int = 1
    pools: dict[str, PoolSpec] = field(default_factory=dict)
    leasable: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    strangers: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    budget: int = 0
    leases: dict[str, Seen] = field(default_factory=dict)
    operations: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    most_k: int = 0
    now: int = 0
    wake: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    _asked: int = 0
    _answer: Seen | None = None

    def see(self, event: Event, effects: list[Effect]) -> None:
        """Check what the arbiter made of the event. Raises LawBrokenError or InvariantError."""
        self.now = max(self.now, event.at_ms)
        self._take(event)
        for place, effect in enumerate(effects):
            self._carry_out(event, effect, effects[place + 1 :])
        self._note_tickets()
        self._compare()
        self._law_7()
        self.arbiter.validate()

    def _law(self, number: int, holds: object, *what: object) -> None:
        if not holds:
            raise LawBrokenError(f"law {number}: " + " ".join(map(str, what)))

    # -- the world ---------------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:  # noqa: C901 - one case per event
        self._answer = None
        match event:
            case DeviceSeen(device=device, stranger_mib=stranger_mib):
                self.leasable[device.device_id] = device.memory_mib - device.overhead_mib
                self.names[device.device_id] = device.name
                self.strangers[device.device_id] = max(0, stranger_mib)
                self.lost.discard(device.device_id)
            case DeviceLost(device_id=device_id):
                self.lost.add(device_id)
            case PoolConfigured(pool=pool):
                self.pools[pool.name] = pool
                self.most_k = max(self.most_k, pool.max_passed_over)
            case HostMemorySeen(budget_mib=budget_mib):
                self.budget = budget_mib
            case LeaseRequested(spec=spec) if spec.lease_id not in self.leases:
                self.leases[spec.lease_id] = Seen(spec)
            case LeaseRecovered(spec=spec, busy=busy) if spec.lease_id not in self.leases:
                self.leases[spec.lease_id] = Seen(spec, busy=busy)
            case Wanted(lease_id=lease_id, urgent=True) if lease_id in self.leases:
                self.leases[lease_id].urgent = True
            case Unwanted(lease_id=lease_id) if lease_id in self.leases:
                self.leases[lease_id].asked = -1
            case BusyChanged(lease_id=lease_id, busy=busy):
                seen = self.leases.get(lease_id)
                if seen is not None and seen.state is not S.UNATTACHED:
                    seen.busy = busy
            case SuspendFinished() | ResumeFinished():
                self._take_answer(event)
            case _:
                pass

    def _take_answer(self, event: SuspendFinished | ResumeFinished) -> None:
        kind = "suspend" if isinstance(event, SuspendFinished) else "resume"
        seen = self.leases.get(event.lease_id)
        if self.operations.get(event.operation_id) != (kind, event.lease_id, event.generation):
            return
        del self.operations[event.operation_id]
        if seen is not None and seen.generation == event.generation:
            self._answer = seen

    # -- what the arbiter did ----------------------------------------------------------------------------------------------------

    def _carry_out(self, event: Event, effect: Effect, later: list[Effect]) -> None:
        match effect:
            case StateChanged():
                self._moved(event, effect, later)
            case Suspend():
                self._suspends(effect)
            case Resume():
                self._resumes(effect)
            case Granted(lease_id=lease_id, device_id=device_id):
                seen = self.leases[lease_id]
                self._law(1, seen.held > 0 and seen.device == device_id, lease_id, "was let in without a reservation")
            case LeaseEnded(lease_id=lease_id):
                self._law(6, self.leases[lease_id].state is S.ENDED, lease_id, "is over and did not end")
                del self.leases[lease_id]
            case WakeAt(at_ms=at_ms):
                self.wake = at_ms
            case _:
                pass

    def _moved(self, event: Event, change: StateChanged, later: list[Effect]) -> None:
        seen = self.leases[change.lease_id]
        old, new = seen.state, change.new
        self._law(6, change.old == old, change.lease_id, "was", old, "and is said to have been", change.old)
        causes = MOVES[old].get(new) if old in MOVES else None
        self._law(6, causes and isinstance(event, causes), change.lease_id, old, "->", new, "because of", event)
        if causes and causes != (Event,) and issubclass(causes[0], OWN_DECISIONS):
            self._law(6, getattr(event, "lease_id", change.lease_id) == change.lease_id, "one's event moved another")
        if causes and isinstance(event, SuspendFinished | ResumeFinished) and Event not in causes:
            self._law(6, self._answer is seen, change.lease_id, "was moved by an answer that is not its own")
        self._law(6, change.generation > seen.generation, change.lease_id, "went back to generation", change.generation)
        seen.state, seen.generation = new, change.generation
        self._hold(seen, old, change, later)
        self.counts[new] = self.counts.get(new, 0) + 1

    def _hold(self, seen: Seen, old: LeaseState | None, change: StateChanged, later: list[Effect]) -> None:
        """Restate what a lease in its new state holds, and check that what it was given was there."""
        device, lease_id = change.device_id, change.lease_id
        match seen.state:
            case S.UNATTACHED if old is S.UNATTACHED:
                seen.held, seen.device = seen.need, device
                self._given(seen)
            case S.UNATTACHED | S.UNARMED | S.ENDED:
                seen.held = seen.saved = seen.host = 0
                seen.asked = -1 if old is not S.UNATTACHED and seen.state is not S.UNARMED else seen.asked
                if seen.state is not S.UNARMED:
                    seen.busy, seen.device = False, None
                seen.home = None
            case S.RESIDENT if old is S.UNARMED:
                seen.held, seen.device = seen.need, device
                self._given(seen)
            case S.RESIDENT:
                self._law(1, device is not None, lease_id, "is resident nowhere")
                seen.held, seen.device = max(seen.held, seen.need), device
                seen.saved = seen.host = 0
                seen.home = None
            case S.SUSPENDING:
                seen.home = seen.device
                self._law(5, not seen.busy, lease_id, "is busy and is suspended")
                self._law(5, any(isinstance(e, Suspend) and e.lease_id == lease_id for e in later), "no Suspend effect")
                self._law_3(seen, later)
            case S.SUSPENDED:
                seen.held, seen.host, seen.saved = 0, 0, change.saved_mib
                seen.device = seen.home = seen.home or device
            case S.RESUMING:
                seen.held, seen.device = seen.need, device
                self._given(seen)
            case S.QUARANTINED if old is None:
                seen.device = seen.home = device
                seen.saved = change.saved_mib
                seen.held = seen.need if device is not None else 0
            case _:
                pass

    def _given(self, seen: Seen) -> None:
        device = seen.device or ""
        left = self.free(device)
        self._law(
            1, left >= 0 and device not in self.lost, seen.spec.lease_id, "was given", seen.held, "on", device, left
        )
        self._count_passes(seen, device)
        seen.asked = -1 if seen.state is not S.RESUMING else seen.asked

    def free(self, device: str) -> int:
        """What is left on a device by this model's own sums, MiB."""
        held = sum(seen.held for seen in self.leases.values() if seen.device == device)
        return self.leasable.get(device, 0) - self.strangers.get(device, 0) - held

    def _suspends(self, effect: Suspend) -> None:
        seen = self.leases[effect.lease_id]
        self._law(6, effect.generation == seen.generation, effect.lease_id, "has another generation than its suspend")
        self._law(2, effect.host_mib >= seen.held > 0, effect.lease_id, "may save more than the host has reserved")
        self._law(5, effect.device_id == seen.device, effect.lease_id, "is suspended somewhere else")
        seen.host = effect.host_mib
        host = sum(other.saved + other.host for other in self.leases.values())
        self._law(2, host <= self.budget, "the host would hold", host, "MiB of", self.budget)
        self._begins(effect.operation_id, ("suspend", effect.lease_id, effect.generation))

    def _resumes(self, effect: Resume) -> None:
        seen = self.leases[effect.lease_id]
        self._law(6, effect.generation == seen.generation, effect.lease_id, "has another generation than its resume")
        self._law(2, effect.reserve_mib >= max(seen.saved, seen.spec.reserve_mib), effect, "does not cover", seen.saved)
        self._law(2, effect.reserve_mib == seen.held and effect.device_id == seen.device, effect, "is not reserved")
        self._law(6, effect.from_device_id == seen.home, effect, "comes from", seen.home)
        self._law(6, effect.device_id in self.allowed(seen, S.SUSPENDED), effect, "is no place for it")
        self._begins(effect.operation_id, ("resume", effect.lease_id, effect.generation))

    def _begins(self, operation_id: int, operation: tuple[str, str, int]) -> None:
        self._law(6, operation_id not in self.operations, "operation", operation_id, "begins twice")
        self.operations[operation_id] = operation
        self._law(6, len(self.operations) <= self.parallel_swaps, "too many operations:", self.operations)

    # -- laws ----------------------------------------------------------------------------------------------------------------------

    def allowed(self, seen: Seen, state: LeaseState | None) -> list[str]:
        """Devices that the lease may go to now."""
        pool = self.pools.get(seen.spec.pool)
        devices = [d for d in pool.devices if d in self.leasable and d not in self.lost] if pool else []
        if state is not S.SUSPENDED:
            return devices
        home = seen.home or ""
        moves = pool is not None and pool.may_move
        like = [d for d in devices if moves and d != home and self.names[d] == self.names.get(home)]
        home_is_there = home in self.leasable and home not in self.lost
        return [*([home] if home_is_there and (home in devices or not like) else []), *like]

    def _law_3(self, victim: Seen, later: list[Effect]) -> None:
        """Somebody is suspended for a beneficiary who waits and would fit if all the idle went."""
        lease_id = victim.spec.lease_id
        why = next(e for e in later if isinstance(e, Recorded) and e.lease_id == lease_id)
        if why.reason != "suspend.needed-by":
            return
        name = why.sentence.rsplit(" ", 1)[-1]
        there = [s for i, s in self.leases.items() if i.startswith(name) and s.state in ELIGIBLE]
        device = victim.device or ""
        stays = sum(
            seen.held
            for seen in self.leases.values()
            if seen.device == device
            and (seen.state in (S.RESUMING, S.QUARANTINED, S.UNATTACHED) or (seen.state is S.RESIDENT and seen.busy))
        )
        room = self.leasable.get(device, 0) - self.strangers.get(device, 0) - stays
        fits = [s for s in there if s.need <= room and device in self.allowed(s, s.state)]
        self._law(3, fits, lease_id, "is suspended for", name, "who would not fit on", device)

    def _count_passes(self, winner: Seen, device: str) -> None:
        """Law 4, counted anew: who waited longer, could have used this room, and saw it go to somebody else."""
        asked = winner.asked if winner.asked >= 0 else self._asked + 1  # asked and served in one event
        for seen in self.leases.values():
            if seen is winner or seen.asked < 0 or seen.state not in ELIGIBLE or seen.spec.pool != winner.spec.pool:
                continue
            if seen.state is S.UNATTACHED and seen.spec.gated:
                continue
            ahead = (-seen.spec.priority, seen.asked) < (-winner.spec.priority, asked)
            roomy = self.leasable[device] - self.strangers[device] >= seen.need
            untouched = self.free(device) >= seen.need
            if not ahead or not roomy or untouched or device not in self.allowed(seen, seen.state):
                continue
            seen.passed += 1
            most = max(self.most_k, 1) * len(self.leasable)
            self._law(4, seen.passed <= most, seen.spec.lease_id, "was passed over", seen.passed, "times; most:", most)

    def _note_tickets(self) -> None:
        """Take over who waits (in the order of asking), as the arbiter shows it."""
        for pool in {seen.spec.pool for seen in self.leases.values()}:
            waiting = {view.lease_id: view for view in self.arbiter.tickets(pool)}
            for lease_id, seen in self.leases.items():
                if seen.spec.pool != pool:
                    continue
                view = waiting.get(lease_id)
                if view is None:
                    seen.asked, seen.urgent, seen.passed = -1, False, 0
                    continue
                if seen.asked < 0:
                    self._asked += 1
                    seen.asked, seen.passed = self._asked, 0
                seen.urgent = view.urgent
                self._law(4, view.passed_over <= self.most_k, lease_id, "was passed over", view.passed_over, "times")

    def _law_7(self) -> None:
        """Who fits in free memory is not kept waiting, unless it is kept for somebody ahead or the swap channel is taken."""
        free = {device: self.free(device) for device in self.leasable}
        roomiest = max(free.values(), default=0)
        line: list[tuple[tuple[int, bool, int], Seen, TicketView]] = []
        for pool in {seen.spec.pool for seen in self.leases.values()}:
            views = self.arbiter.tickets(pool)
            self._law(4, [v.position for v in views] == list(range(1, len(views) + 1)), "positions are wrong:", views)
            for view in views:
                seen = self.leases[view.lease_id]
                line.append(((-seen.spec.priority, not view.urgent, seen.asked), seen, view))
        line.sort(key=lambda item: item[0])
        for place, (_, seen, view) in enumerate(line):
            if seen.need <= roomiest:
                ahead = [other for _, _, other in line[:place]]
                if any(other.urgent for _, _, other in line):  # who was passed over too often goes before the urgent
                    ahead += [other for _, _, other in line[place + 1 :]]
                self._fits_and_waits(seen, view, free, ahead)

        self._nobody_blocks_each_other([(seen, view) for _, seen, view in line], free)

    def _nobody_blocks_each_other(self, line: list[tuple[Seen, TicketView]], free: dict[str, int]) -> None:
        """Room is kept for those who do not fit: if everybody who waits would fit by himself, somebody must have been served."""
        pausing = any(view.reason == "wait.retry" and view.kept_on for _, view in line)
        if pausing or len(self.operations) >= self.parallel_swaps:
            return
        waiting = [
            seen
            for seen, view in line
            if view.reason != "wait.retry"
            and (seen.state in (S.UNARMED, S.SUSPENDED) or (seen.state is S.UNATTACHED and not seen.spec.gated))
        ]
        fits = [any(free[d] >= seen.need for d in self.allowed(seen, seen.state)) for seen in waiting]
        self._law(7, not waiting or not all(fits), "they keep room from each other:", line)

    def _fits_and_waits(self, seen: Seen, view: TicketView, free: dict[str, int], ahead: list[TicketView]) -> None:
        if seen.state not in ELIGIBLE or (seen.state is S.UNATTACHED and seen.spec.gated):
            return
        if seen.state is S.SUSPENDED and (len(self.operations) >= self.parallel_swaps or view.reason == "wait.retry"):
            return
        for device in self.allowed(seen, seen.state):
            if free[device] < seen.need:
                continue
            kept = sum(
                other.need_mib
                for other in ahead
                if (device in other.kept_on or other.reason in ("wait.making-room", "wait.swap-channel"))
                and device in self.allowed(self.leases[other.lease_id], self.leases[other.lease_id].state)
            )
            self._law(7, free[device] - kept < seen.need, view, "fits on", device, "where", free[device], "are free")

    # -- does the arbiter say the same? ----------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        views = {view.spec.lease_id: view for view in self.arbiter.leases()}
        gone = [i for i, seen in self.leases.items() if seen.state is None and i not in views]  # refused
        for lease_id in gone:
            del self.leases[lease_id]
        self._law(6, list(views) == list(self.leases), "leases differ:", list(views), list(self.leases))
        for lease_id, view in views.items():
            seen = self.leases[lease_id]
            mine = (seen.state, seen.generation, seen.held, seen.saved, seen.host, seen.busy)
            says = (view.state, view.generation, view.reserved_mib, view.saved_mib, view.host_reserved_mib, view.busy)
            self._law(6, mine == says, lease_id, "is", mine, "and the arbiter says", says)
            if seen.held:
                self._law(1, seen.device == view.device_id, lease_id, "is on", seen.device, "not on", view.device_id)
        for device in self.arbiter.devices():
            held = sum(seen.held for seen in self.leases.values() if seen.device == device.device_id)
            self._law(1, held == device.reserved_mib, device, "holds", held)
        host = sum(seen.saved for seen in self.leases.values()), sum(seen.host for seen in self.leases.values())
        self._law(2, host == (self.arbiter.host_saved_mib, self.arbiter.host_reserved_mib), "the host holds", host)
