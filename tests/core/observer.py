"""An independent model of the arbiter, written from the design and not from the code: which lease may move where and hold what.

It sees what a driver sees: events in, effects out. From these alone it keeps its books (`checked_books`), checks every effect,
and compares its books with the arbiter's views. The laws over the whole state are in `laws`. It decides nothing; it only
knows what would be wrong.
"""

from collections import Counter
from dataclasses import replace

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import (
    CloseGate,
    Declined,
    Effect,
    EndProcesses,
    Granted,
    LeaseAdmitted,
    LeaseEnded,
    LeaseRefused,
    Recorded,
    Resized,
    Resume,
    Shrink,
    StateChanged,
    Suspend,
    TicketsChanged,
    WakeAt,
)
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
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    LeasesMeasured,
    LeftBehind,
    Measurement,
    PoolConfigured,
    PriorityChanged,
    ResizeRequested,
    ResumeFinished,
    SeatEnded,
    SeatRenewed,
    Shrunk,
    SuspendFinished,
    SuspendOutcome,
    Tick,
    Unwanted,
    Wanted,
)
from fractional_gpu.core.model import HOLDING, LeaseState, ReserveBy, Sharing, TicketView
from fractional_gpu.core.revoke import LEAST_RETRY_MS
from tests.core.checked_books import LawBrokenError, Seen, World, law
from tests.core.laws import Laws
from tests.core.moves import ELIGIBLE, MOVES, OWN_EVENTS

__all__ = ["LawBrokenError", "Observer"]

S = LeaseState

MOST_VAIN_TICKS = 10
"""The number of alarms without effect allowed within a tenth of a second: deadlines of several leases may fall in it."""

_ROLLED_BACK = {SuspendOutcome.ABORTED, SuspendOutcome.REFUSED, SuspendOutcome.NO_MEMORY, SuspendOutcome.IMPOSSIBLE}


class Observer:
    """Watches one arbiter. Call `see` after every `handle`."""

    def __init__(self, arbiter: Arbiter, parallel_swaps: int = 1) -> None:
        self.arbiter = arbiter
        self.parallel_swaps = parallel_swaps
        self.world = World()
        self.laws = Laws(self.world, arbiter)
        self.leases = self.world.leases
        self.operations: dict[int, tuple[str, str, int]] = {}
        self.wake: int | None = None
        self.counts: Counter[str] = Counter()  # states entered, reasons given
        self._asked = 0
        self._answer: Seen | None = None
        self._later: list[Effect] = []
        self._vain_ticks: list[int] = []  # alarms of the last second

    @property
    def now(self) -> int:
        return self.world.now

    def see(self, event: Event, effects: list[Effect], *, whole: bool = True) -> None:
        """Check the arbiter's response to an event; with `whole`, also the rest of its state.

        Raises LawBrokenError or InvariantError.
        """
        self.world.now = max(self.world.now, event.at_ms)
        self._take(event)
        if isinstance(event, ResizeRequested) and not any(isinstance(one, Declined) for one in effects):
            self._claims_anew(event.lease_id)
        if isinstance(event, Unwanted):
            self._gives_up(event.lease_id, effects)
        was_asked = isinstance(event, Tick) and self.wake is not None and event.at_ms >= self.wake
        if was_asked and all(isinstance(effect, WakeAt) for effect in effects):
            self._vain_ticks = [at_ms for at_ms in (*self._vain_ticks, event.at_ms) if at_ms > self.now - 100]
            law(
                9,
                len(self._vain_ticks) <= MOST_VAIN_TICKS,
                "it wakes up again and again for nothing:",
                self._vain_ticks,
            )
        for place, effect in enumerate(effects):
            self._later = effects[place + 1 :]
            self._carry_out(event, effect)
        if whole:
            pools = dict.fromkeys(seen.spec.pool for seen in self.leases.values())
            lines = {pool: self.arbiter.tickets(pool) for pool in pools}
            for pool, views in lines.items():
                self._note_tickets(pool)
                self._compare_tickets(pool, views)
            self._compare()
            kept = self.arbiter._changes.kept_channels
            self.laws.keeps_channels(kept)
            self.laws.check(lines.values(), channel_free=len(self.operations) < self.parallel_swaps - kept)
            self.arbiter.validate()

    # -- the world ---------------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        self._answer = None
        world = self.world
        match event:
            case DeviceSeen(device=device, stranger_mib=stranger_mib):
                world.leasable[device.device_id] = device.memory_mib - device.overhead_mib
                world.note_kind(device)
                world.memory[device.device_id] = device.memory_mib
                world.strangers[device.device_id] = max(0, stranger_mib)
                world.lost.discard(device.device_id)
            case DeviceLost(device_id=device_id):
                world.lost.add(device_id)
            case DeviceDrained(device_id=device_id, evict_busy=evict_busy) if device_id in world.leasable:
                world.draining[device_id] = evict_busy
                world.deadlines[device_id] = event.deadline_ms or 0
                for there in world.on(device_id):
                    self._hastened(there)
            case DeviceUndrained(device_id=device_id):
                world.draining.pop(device_id, None)
                world.deadlines.pop(device_id, None)
            case PoolConfigured(pool=pool):
                world.pools[pool.name] = pool
                pools = world.pools.values()
                world.whole = {device for one in pools if one.sharing is Sharing.MIG for device in one.devices}
                self.laws.most_k = max(self.laws.most_k, pool.max_passed_over)
            case HostMemorySeen(budget_mib=budget_mib):
                world.budget = budget_mib
            case LeaseRequested(spec=spec) if spec.lease_id not in self.leases:
                self.leases[spec.lease_id] = Seen(spec)
            case LeaseRecovered(spec=spec, busy=busy) if spec.lease_id not in self.leases:
                found = self.leases[spec.lease_id] = Seen(spec, busy=busy, ran=busy, pinned_until=event.pinned_until_ms)
                if event.pinned_until_ms or spec.claim_ms:
                    self.laws.pins.distrust(found)
            case SuspendFinished() | ResumeFinished():
                self._take_answer(event)
            case _:
                for about in event.measurements if isinstance(event, LeasesMeasured) else (event,):
                    seen = self.leases.get(getattr(about, "lease_id", ""))
                    if seen is not None:
                        self._take_about(seen, about)

    def _claims_anew(self, lease_id: str) -> None:
        """A newer claim to grow goes to the end of the queue; a refused claim changes nothing."""
        seen = self.leases.get(lease_id)
        if seen is not None and seen.held:
            seen.asked = -1

    def _gives_up(self, lease_id: str, effects: list[Effect]) -> None:
        """A busy lease keeps its ticket only if it was preempted. If the arbiter shows no ticket, it no longer waits."""
        seen = self.leases.get(lease_id)
        served = any(isinstance(one, StateChanged) and one.lease_id == lease_id for one in effects)
        if seen is not None and seen.busy and not served and not self.arbiter.waits(lease_id):
            seen.asked = -1

    def _wants(self, seen: Seen, *, urgent: bool) -> None:
        seen.urgent |= urgent
        if seen.closed and not urgent and seen.at_gate < 0:
            self._asked += 1
            seen.at_gate = self._asked
        if seen.claimed and seen.then < 0:
            self._asked += 1
            seen.then = self._asked

    def _take_about(self, seen: Seen, event: Event | Measurement) -> None:  # noqa: C901, PLR0912 - one case per event
        match event:
            case Wanted() if seen.revoked:
                pass  # it gets nothing, whatever it asks for
            case SeatEnded() if seen.state is not S.UNATTACHED and not seen.revoked:
                seen.revoked, seen.at_gate, seen.then, seen.asked, seen.claimed = True, -1, -1, -1, False
                seen.ends = min(event.since_ms, self.now) + self.world.pool(seen).revoked_ttl_ms
                seen.expected_until = 0
            case SeatRenewed(seat=seat) if seen.revoked:
                seen.revoked, seen.spec = False, replace(seen.spec, seat=seat)
            case PriorityChanged(priority=priority):
                own = seen.spec.priority if seen.spec.own_priority is None else seen.spec.own_priority
                lowered = None if priority in {None, own} else own
                seen.spec = replace(seen.spec, priority=own if priority is None else priority, own_priority=lowered)
            case Expected():
                self.laws.expected.sign(seen, event)
            case Wanted(urgent=urgent):
                self.laws.expected.cell(seen)
                self._wants(seen, urgent=urgent)
            case Unwanted() if seen.closed:
                seen.at_gate = -1
            case Unwanted() if seen.claimed:
                seen.then = -1
            case Unwanted() if not seen.busy and (seen.state not in {S.RESIDENT, S.UNATTACHED} or not seen.held):
                # a lease that waits to grow in place keeps waiting until its user asks for another size
                seen.asked = -1
            case LeftBehind(what=what) if seen.held or seen.saved:
                if seen.state is not S.UNATTACHED:
                    seen.at_gate = seen.at_gate if seen.left else -1
                    if not seen.left:  # a repeated report says nothing new about what they would save
                        seen.forget_idleness()
                    seen.left, seen.busy, seen.ran, seen.expected_until = what, True, True, 0
            case Attached() if seen.left:
                seen.left = ""
            case BusyChanged(busy=busy) if seen.state is not S.UNATTACHED and not seen.left:
                if busy and not seen.busy:
                    seen.forget_idleness()
                if busy:
                    self.laws.expected.cell(seen)
                seen.busy = busy
                seen.ran |= busy
            case Shrunk(generation=generation, used_mib=used_mib) if generation == seen.generation == seen.shrinking:
                seen.shrinking, seen.shrunk = -1, used_mib is not None
                if used_mib is not None:
                    seen.used, seen.measured = max(0, used_mib), True
            case Measurement(used_mib=used_mib) if seen.state in {S.NO_CONTEXT, S.RESIDENT, S.SUSPENDING}:
                seen.used, seen.measured = max(0, used_mib), True
            case Checkpointable(why_not=why_not):
                if seen.why_not and not why_not:
                    seen.alone_until = seen.pauses_until = 0
                seen.why_not = why_not
            case ResizeRequested():
                seen.resizes = [*seen.resizes, event]
            case HostMemoryNeeded(need_mib=need_mib) if seen.generation == event.generation and self.operations.get(
                event.operation_id
            ) == ("suspend", event.lease_id, event.generation):
                others = sum(one.saved + one.host for one in self.leases.values() if one is not seen)
                if need_mib > seen.host:
                    fits = others + need_mib <= self.world.budget
                    seen.host = need_mib if fits else seen.host
                    self.counts["host-memory.added" if fits else "host-memory.not-added"] += 1
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
            if isinstance(event, SuspendFinished) and event.outcome in _ROLLED_BACK and event.need_mib > seen.host:
                seen.floor = event.need_mib
            if isinstance(event, SuspendFinished) and event.outcome in _ROLLED_BACK:
                self._left_alone(seen, event.outcome)

    def _left_alone(self, seen: Seen, outcome: SuspendOutcome) -> None:
        """After a failed suspend a lease is no victim for the pool's pause; at least for a moment if only the moment was bad.

        A time in quarantine meanwhile neither ends nor renews the pause.
        """
        ms = self.world.pool(seen).retry_refused_ms
        seen.alone_until = self.now + (min(ms, 1_000) if outcome is SuspendOutcome.ABORTED else ms)
        seen.pauses_until = self.now + ms
        self._hastened(seen)
        if outcome is SuspendOutcome.IMPOSSIBLE:
            seen.why_not = str(outcome)

    def _hastened(self, seen: Seen) -> None:
        """Before a deadline, the next attempt follows within half of the remaining time, but not before `LEAST_RETRY_MS`."""
        deadline = self.world.deadline(seen)
        if deadline is not None and seen.state in {S.RESIDENT, S.SUSPENDING}:
            seen.alone_until = min(seen.alone_until, self.now + LEAST_RETRY_MS)
            seen.pauses_until = min(seen.pauses_until, self.now + max(LEAST_RETRY_MS, (deadline - self.now) // 2))

    # -- what the arbiter did ----------------------------------------------------------------------------------------------------

    def _carry_out(self, event: Event, effect: Effect) -> None:  # noqa: C901, PLR0912 - one case per effect
        match effect:
            case StateChanged():
                self._moved(event, effect)
            case Suspend():
                self._suspends(effect)
            case Shrink():
                seen = self.leases[effect.lease_id]
                law(
                    6,
                    effect.generation == seen.generation,
                    effect.lease_id,
                    "has another generation than its shrinking",
                )
                idle = seen.state is S.RESIDENT and not seen.busy and seen.spec.gated
                law(2, idle and seen.shrunk is None and seen.shrinking != seen.generation, effect, "is asked of", seen)
                seen.shrinking = seen.generation
            case Resume():
                self._resumes(effect)
            case Granted():
                seen = self.leases[effect.lease_id]
                says = (effect.device_ids, effect.reserved_mib)
                law(1, seen.held > 0 and says == (seen.devices, seen.held), effect, "is not so:", seen)
                seen.closed, seen.at_gate = False, -1
            case CloseGate(lease_id=lease_id):
                self.laws.closing(self.leases[lease_id], self._later)
                self.counts["gate.closed"] += 1
            case Resized():
                self._resized(effect)
            case EndProcesses():
                self.laws.ends_processes(self.leases[effect.lease_id])
                self.counts["seat-ended.processes"] += 1
            case LeaseAdmitted(lease_id=lease_id):
                self.laws.admitted(self.leases[lease_id])
            case LeaseRefused(lease_id=lease_id, reason=reason):
                self.laws.refused(event, lease_id, reason)
                if self.leases[lease_id].state is None:
                    del self.leases[lease_id]
            case LeaseEnded(lease_id=lease_id):
                law(6, self.leases[lease_id].state is S.ENDED, lease_id, "is over and did not end")
                self.laws.ended(self.leases.pop(lease_id))
            case TicketsChanged(pool=pool):
                self._note_tickets(pool)
            case WakeAt(at_ms=at_ms):
                self.wake = at_ms
            case Recorded(reason=reason, sentence=sentence):
                law(0, reason and sentence, effect, "gives no reason")
                self.counts[reason] += 1
            case _:
                self.laws.see(event, effect)

    def _moved(self, event: Event, change: StateChanged) -> None:
        seen = self.leases[change.lease_id]
        old, new = seen.state, change.new
        seen.told = seen.told if new in {S.RESIDENT, S.SUSPENDING} else ""
        law(6, change.old == old, change.lease_id, "was", old, "and is said to have been", change.old)
        causes = MOVES[old].get(new) if old in MOVES else None
        is_over = bool(seen.spec.claim_ms) and (old, new) == (S.RESIDENT, S.ENDED) and seen.pinned_until <= self.now
        law(6, is_over or (causes and isinstance(event, causes)), change.lease_id, old, "->", new, "because of", event)
        if causes and not is_over and Event not in causes:
            if issubclass(causes[0], OWN_EVENTS):
                law(6, getattr(event, "lease_id", change.lease_id) == change.lease_id, "one's event moved another")
            if isinstance(event, SuspendFinished | ResumeFinished):
                law(6, self._answer is seen, change.lease_id, "was moved by an answer that is not its own")
        self.laws.moved(seen, old, new, by_release=is_over or isinstance(event, LeaseReleased))
        law(6, change.generation > seen.generation, change.lease_id, "went back to generation", change.generation)
        said = any(isinstance(effect, Recorded) and effect.lease_id == change.lease_id for effect in self._later)
        law(0, said, change.lease_id, old, "->", new, "is not in its story")
        seen.state, seen.generation = new, change.generation
        if new not in {S.SUSPENDING, S.QUARANTINED}:
            if seen.claimed and new in {
                S.SUSPENDED,
                S.NO_CONTEXT,
            }:  # nothing stops it from growing: now it waits to come back
                seen.asked, seen.passed = seen.then, 0
            seen.claimed = False
        self._hold(event, seen, old, change)
        if new in {S.UNATTACHED, S.NO_CONTEXT, S.SUSPENDED, S.ENDED}:
            seen.forget_idleness()
            seen.early = False
            seen.alone_until = seen.pauses_until = 0
        if new in {S.UNATTACHED, S.ENDED}:
            seen.why_not = ""
        seen.closed, seen.at_gate = False, -1
        seen.since = self.now
        if new is S.RESIDENT and old is not S.SUSPENDING:
            seen.arrived = self.now
        if new is S.RESIDENT:
            self._hastened(seen)
        self.counts[new] += 1

    def _hold(self, event: Event, seen: Seen, old: LeaseState | None, change: StateChanged) -> None:  # noqa: C901, PLR0912 - one case per state
        """Restate what a lease holds in its new state, and check that any room it got was free."""
        world, device = self.world, change.device_id
        match seen.state:
            case S.UNATTACHED if old is S.UNATTACHED and device is None:
                self._lapsed(seen)
            case S.UNATTACHED if old is S.UNATTACHED:
                self._given(seen, device)
                seen.kept_for = world.pool(seen).unattached_hold_ms
            case S.UNATTACHED | S.NO_CONTEXT | S.ENDED:
                found = seen.devices or getattr(event, "device_ids", ()) or ((device,) if device else ())
                for place in seen.devices if seen.spec.claim_ms and seen.state is S.ENDED and seen.held else ():
                    world.strangers[place] += min(seen.used_each, seen.held)  # its programs live on
                if old is S.QUARANTINED and seen.state is S.NO_CONTEXT:
                    found = self._places(seen, device)  # the report may name another device
                world.hold(seen, found if seen.state is S.NO_CONTEXT else (), 0)
                seen.saved = seen.host = seen.used = 0
                seen.measured = seen.measured and seen.state is S.NO_CONTEXT
                if seen.state is not S.NO_CONTEXT:
                    seen.busy = seen.ran = False
                    seen.left = ""
                    seen.asked, seen.resizes = -1, []
                seen.home = ()
            case S.RESIDENT if old is S.NO_CONTEXT:
                mine = world.unreserved(seen)
                for place in seen.devices if mine else ():
                    world.strangers[place] -= mine
                self._given(seen, device, mine)
                seen.ran, seen.measured = seen.busy, False
            case S.RESIDENT:
                law(1, device is not None, seen.lease_id, "is resident nowhere")
                if old in {None, S.QUARANTINED}:
                    self._found(seen, device, seen.held)
                if old is S.RESUMING:
                    seen.used = seen.saved
                    seen.asked = -1  # it has what it asked for; a claim to more goes to the end of the queue
                seen.saved = seen.host = 0
                seen.measured = seen.measured and old is S.SUSPENDING
                seen.home = ()
                seen.ran = seen.busy or seen.early if old is not S.SUSPENDING else seen.ran
            case S.SUSPENDING:
                seen.home, seen.claimed, seen.then = seen.devices, seen.asked >= 0, seen.at_gate
                suspend = next((e for e in self._later if isinstance(e, Suspend) and e.lease_id == seen.lease_id), None)
                law(5, suspend is not None, seen.lease_id, "is suspending without a Suspend effect")
                if suspend is not None:
                    self.laws.suspending(seen, suspend, self._reason(seen), self._later)
                if seen.at_gate >= 0 and not seen.claimed:
                    seen.asked, seen.passed = seen.at_gate, 0
            case S.SUSPENDED:
                if isinstance(event, SuspendFinished):
                    law(2, change.saved_mib == max(0, event.saved_mib), seen.lease_id, "saved", event, "not", change)
                found = (
                    event.device_ids if isinstance(event, LeaseRecovered) else ()
                )  # it may come back in the same event
                seen.home = seen.home or found or self._places(seen, device)
                world.hold(seen, seen.home, 0)
                seen.host, seen.saved, seen.used = 0, change.saved_mib, 0
            case S.RESUMING:
                self._given(seen, device)
                self.laws.expected.resuming(seen, self._reason(seen))
            case S.QUARANTINED if old is None:
                seen.saved = change.saved_mib
                self._found(seen, device, 0)
                seen.home = seen.devices
            case _:
                pass

    def _lapsed(self, seen: Seen) -> None:
        """Room kept for a process that did not come is released: not too soon, and only if another lease wants it."""
        kept = self.now - seen.since
        law(5, seen.held > 0, seen.lease_id, "had no room that it could lose")
        law(5, kept >= seen.kept_for, seen.lease_id, "lost its room after", kept, "ms")
        others = [one for one in self.leases.values() if one is not seen and one.spec.pool == seen.spec.pool]
        grown = {effect.lease_id for effect in self._later if isinstance(effect, Resized)}
        # A lease that has room may want more because of its use, even in this event: then it has grown, or waits.
        wanted = any(
            one.asked >= 0
            or one.state in ELIGIBLE
            or one.resizes
            or one.lease_id in grown
            or self.arbiter.waits(one.lease_id)
            for one in others
        )
        law(5, wanted, seen.lease_id, "lost its room, and no other lease can want any")
        self.world.hold(seen, (), 0)
        seen.asked, seen.claimed, seen.resizes = -1, False, []

    def _reason(self, seen: Seen) -> Recorded:
        return next(e for e in self._later if isinstance(e, Recorded) and e.lease_id == seen.lease_id)

    def _places(self, seen: Seen, device: str | None) -> tuple[str, ...]:
        """Return all devices of a lease, given the first one."""
        if device is None:
            return ()
        if seen.spec.devices == 1:
            return (device,)
        view = self.arbiter.lease(seen.lease_id)
        return view.device_ids if view is not None else (device,)

    def _found(self, seen: Seen, device: str | None, before: int) -> None:
        """A report was found to be true; it may exceed the grant. The amount told to the kernel counts, as a resize may follow."""
        view, least = self.arbiter.lease(seen.lease_id), self.world.least(seen)
        held = max(before, self.world.most(seen))
        if self.world.pool(seen).reserve_by is ReserveBy.USE and view is not None:
            told = [
                one.reserved_mib for one in self._later if isinstance(one, Granted) and one.lease_id == seen.lease_id
            ]
            held = (told or [view.reserved_mib])[0]
            law(1, device is None or max(before, least) <= held, seen.lease_id, "holds", held, "and needs", least)
        self.world.hold(seen, self._places(seen, device), held)

    def _given(self, seen: Seen, device: str | None, mine: int = 0) -> None:
        """Check a new reservation against the effect that tells the driver about it. `mine`: what it already used there."""
        world, effect = self.world, None
        for later in self._later:
            if isinstance(later, Granted | Resume) and later.lease_id == seen.lease_id:
                effect = later
                break
        law(1, effect is not None and effect.device_id == device, seen.lease_id, "was given room and not told")
        places = (effect.device_ids if effect is not None else ()) or (device or "",)
        amount = 0
        if effect is not None:
            amount = effect.reserve_mib if isinstance(effect, Resume) else effect.reserved_mib
        amount = amount or world.most(seen)
        law(1, amount == world.due(seen), seen.lease_id, "was given", amount, "MiB and not", world.due(seen))
        law(1, len(places) == len(set(places)) == seen.spec.devices, seen.lease_id, "was given devices", places)
        self.laws.giving(seen, places)
        world.hold(seen, places, amount)
        for place in places:
            left = world.free(place)
            law(1, left >= 0 and world.open(place), seen.lease_id, "was given", amount, "on", place, left)
        self.laws.count_passes(seen, places, self._asked, mine)
        seen.asked = -1 if seen.state is not S.RESUMING else seen.asked

    def _suspends(self, effect: Suspend) -> None:
        seen = self.leases[effect.lease_id]
        law(6, effect.generation == seen.generation, effect.lease_id, "has another generation than its suspend")
        law(2, effect.host_mib >= seen.save_at_least, effect, "may save more:", seen)
        law(2, effect.host_mib <= seen.save_at_most, effect, "keeps more than it can need from others:", seen)
        law(5, effect.device_ids == seen.devices, effect.lease_id, "is suspended somewhere else")
        seen.host = effect.host_mib
        host = sum(other.saved + other.host for other in self.leases.values())
        law(2, host <= self.world.budget, "the host would hold", host, "MiB of", self.world.budget)
        self._begins(effect.operation_id, ("suspend", effect.lease_id, effect.generation))

    def _resumes(self, effect: Resume) -> None:
        seen = self.leases[effect.lease_id]
        law(6, effect.generation == seen.generation, effect.lease_id, "has another generation than its resume")
        law(2, effect.reserve_mib >= self.world.saved_each(seen), effect, "does not cover", seen.saved)
        law(2, effect.reserve_mib == seen.held and effect.device_ids == seen.devices, effect, "is not reserved")
        law(6, effect.from_device_ids == seen.home, effect, "comes from", seen.home)
        self._begins(effect.operation_id, ("resume", effect.lease_id, effect.generation))

    def _begins(self, operation_id: int, operation: tuple[str, str, int]) -> None:
        law(6, operation_id not in self.operations, "operation", operation_id, "begins twice")
        self.operations[operation_id] = operation
        law(6, len(self.operations) <= self.parallel_swaps, "too many operations:", self.operations)

    def _resized(self, effect: Resized) -> None:
        """A resize or a new reservation: the room must be free, and not below what the lease uses."""
        seen, world = self.leases[effect.lease_id], self.world
        spec = seen.spec
        sizes = [spec] + [
            replace(spec, fraction_milli=one.fraction_milli, reserve_mib=one.reserve_mib, request_mib=one.request_mib)
            for one in seen.resizes
        ]
        size = (effect.fraction_milli, effect.reserve_mib)
        meant = [one for one in sizes if (one.fraction_milli, one.reserve_mib) == size]
        law(0, meant, effect, "was not requested:", seen.resizes)
        view = self.arbiter.lease(effect.lease_id)
        seen.spec = view.spec if view is not None and view.spec in meant else meant[-1]
        if seen.spec != spec:
            seen.resizes = []
            self.laws.resized(seen, spec)
        before = seen.held
        held = effect.reserved_mib
        law(1, (held > 0) == (seen.held > 0), effect, "and it holds", seen.held)
        if seen.held and seen.state in HOLDING:
            law(1, held >= min(seen.used_each, seen.spec.reserve_mib), effect, "is less than it uses:", seen.used)
        if seen.held:
            law(1, world.least(seen) <= held <= max(world.most(seen), before), effect, "is not what it may have")
            world.hold(seen, seen.devices, held)
        for device in seen.devices if held > before else ():
            law(1, world.free(device) >= 0 and world.open(device), effect, "grew where there is no room:", device)

    # -- who waits -----------------------------------------------------------------------------------------------------------------

    def _note_tickets(self, pool: str) -> None:
        """Copy the waiting leases in order of arrival from the queue itself, since a view of it would forecast every wait."""
        waiting = {lease.lease_id: lease.ticket for lease in self.arbiter._books.line(pool)}
        for lease_id, seen in self.leases.items():
            if seen.spec.pool != pool:
                continue
            ticket = waiting.get(lease_id)
            if ticket is None:
                seen.asked, seen.urgent, seen.passed = -1, False, 0
                continue
            if seen.asked < 0:
                self._asked += 1
                seen.asked, seen.passed = self._asked, 0
            seen.urgent = ticket.urgent
            if seen.state is S.SUSPENDING and ticket.resize_to is not None:
                seen.claimed = True  # it asked to grow in the event in which its suspend began

    # -- does the arbiter say the same? ----------------------------------------------------------------------------------------------

    def _compare_tickets(self, pool: str, line: list[TicketView]) -> None:
        views = {view.lease_id: view for view in line}
        waiting = {name: seen for name, seen in self.leases.items() if seen.spec.pool == pool and seen.asked >= 0}
        law(4, views.keys() == waiting.keys(), "tickets differ:", list(views), list(waiting))
        for name, view in views.items():
            law(4, view.urgent == waiting[name].urgent, name, "is urgent, or not, and the arbiter says", view)
            law(0, view.reason and view.sentence, view, "gives no reason")

    def _compare(self) -> None:
        views = {view.spec.lease_id: view for view in self.arbiter.leases()}
        law(6, list(views) == list(self.leases), "leases differ:", list(views), list(self.leases))
        saved = reserved = 0
        for lease_id, view in views.items():
            seen = self.leases[lease_id]
            gate = (seen.closed, seen.at_gate >= 0)
            law(6, gate == (view.gate_closed, view.at_gate), lease_id, "has a gate that is", gate, "and not", view)
            law(6, view.revoked == seen.revoked, lease_id, "is revoked:", seen.revoked, view)
            mine = (seen.state, seen.generation, seen.held, seen.saved, seen.host, seen.busy, seen.left, seen.spec)
            says = (
                view.state,
                view.generation,
                view.reserved_mib,
                view.saved_mib,
                view.host_reserved_mib,
                view.busy,
                view.left_behind,
                view.spec,
            )
            law(6, mine == says, lease_id, "is", mine, "and the arbiter says", says)
            if seen.held:
                law(1, seen.devices == (view.device_ids or (view.device_id,)), lease_id, "is on", seen.devices, view)
            saved, reserved = saved + seen.saved, reserved + seen.host
        for device in self.arbiter.devices():
            held = self.world.held_on[device.device_id]
            law(1, held == device.reserved_mib, device, "holds", held)
        host = (self.arbiter.host_saved_mib, self.arbiter.host_reserved_mib)
        law(2, host == (saved, reserved), "the host holds", (saved, reserved), "and the arbiter says", host)
