"""A seeded random world around an arbiter: kernels that come, work, idle and die, and a driver that answers late, twice, or wrongly.

A kernel's measurement differs from what its suspend saves (`real_memory`). The driver counts the latter, usually asks for what
exceeds the reservation, and saves no more than is reserved then, unless it lies.

Each world has a different mix of events and lease sizes (swarm testing: Groce and others, 2012). Some faults need a rare event
again and again; others show only in its absence: code that runs only while no ticket waits never runs in a world of waiting leases.

`simulate(seed, events)` runs a world and checks everything after every event. The same seed always gives the same run.
"""

import heapq
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import (
    CapBreached,
    Effect,
    EndProcesses,
    LookAgain,
    Recorded,
    Resume,
    Shrink,
    StateChanged,
    Suspend,
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
    HostPressureSeen,
    LeaseRecovered,
    LeaseReleased,
    LeaseRequested,
    LeasesMeasured,
    LeftBehind,
    Measurement,
    MoveRequested,
    PinRequested,
    PoolConfigured,
    PriorityChanged,
    ProcessExited,
    ResizeRequested,
    ResumeFinished,
    ResumeOutcome,
    SeatEnded,
    SeatRenewed,
    Shrunk,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
    Tick,
    TruthFound,
    UnpinRequested,
    Unwanted,
    Wanted,
)
from fractional_gpu.core.model import (
    Breach,
    Compute,
    DeviceSpec,
    Foresight,
    LeaseSpec,
    LeaseState,
    Limits,
    PoolSpec,
    ReserveBy,
    Sharing,
    Sign,
    Strangers,
)
from tests.core.observer import LawBrokenError, Observer
from tests.core.real_memory import RealMemory

__all__ = ["World", "simulate"]

_MEMORY_MIB = 1000
_NAMES = [f"k{number}" for number in range(24)]  # few, so that ids are used again
_FAR_MS = 10**9
# The longer a cell has run, the longer it is expected to run on, and the more a move gains: each sample looks again, no alarm does.
_FOLLOWS_SAMPLES = ("move.compute", "suspend.compute")
_S = LeaseState


@dataclass(frozen=True, slots=True)
class _Count:
    """The driver counts, under its locks, what a suspend would save; with `asks` it requests the part that is not reserved."""

    suspend: Suspend
    asks: bool


@dataclass(frozen=True, slots=True)
class _Save:
    """The driver saves a lease: the amount it counted, or `lies_mib` if given."""

    suspend: Suspend
    lies_mib: int = 0


@dataclass
class World:
    """One arbiter, its observer, and the random world around them."""

    random: Random
    parallel_swaps: int = 1
    whole_every: int = 8  # a full check after this many events; every effect is checked anyway
    now: int = 0
    log: list[Event] = field(default_factory=list)
    made: list[Effect] = field(default_factory=list)
    late: list[tuple[int, int, Event | _Count | _Save]] = field(default_factory=list)  # pending answers
    counted: dict[int, int] = field(default_factory=dict)  # by operation: what its suspend would save, MiB
    devices: list[DeviceSpec] = field(default_factory=list)
    pools: list[PoolSpec] = field(default_factory=list)
    sizes: tuple[int, ...] = ()  # lease sizes, MiB
    leaps: float = 0  # how often time jumps to the next pending event, so that nothing else happens before it
    weights: list[float] = field(default_factory=list)  # how often each kind of event happens
    number: int = 0
    honest: bool = False  # from now on the driver does what it is told and reports it

    def __post_init__(self) -> None:
        """Create devices, pools and host memory."""
        random = self.random
        self.arbiter = Arbiter(parallel_swaps=self.parallel_swaps)
        self.observer = Observer(self.arbiter, parallel_swaps=self.parallel_swaps)
        self.memory = RealMemory(random)
        self.sizes = random.choice(((100, 125, 250, 250, 400, 700, 990), (50, 100, 125)))
        self.leaps = random.choice((0.02, 0.1, 0.5))
        self.weights = [weight * random.choice((0, 0.1, 1, 5) if weight < 8 else (0.2, 1)) for weight, _ in _HAPPENINGS]
        count = random.choice((1, 1, 2, 3, 4))
        fixed = random.choice(("", "", "", "the driver moves nothing"))
        self.devices = [
            DeviceSpec(
                device_id=f"d{n}",
                name=random.choice("ab"),
                memory_mib=_MEMORY_MIB,
                overhead_mib=n,
                why_no_move=fixed,
            )
            for n in range(count)
        ]
        cut = random.randrange(1, count + 1)
        for name, devices in (("p", self.devices[:cut]), ("q", self.devices[cut:])):
            self.pools.append(self._pool(name, tuple(device.device_id for device in devices)))
        for device in self.devices:
            self.send(DeviceSeen(at_ms=self.now, device=device))
        for pool in self.pools:
            self.send(PoolConfigured(at_ms=self.now, pool=pool))
        self.send(HostMemorySeen(at_ms=self.now, budget_mib=random.choice((500, 1000, 2000, 10_000))))

    def _pool(self, name: str, devices: tuple[str, ...]) -> PoolSpec:
        random = self.random
        if random.random() < 0.3:
            return PoolSpec(name=name, devices=devices)  # the usual setting
        return PoolSpec(
            name=name,
            devices=devices,
            fractions_milli=(),
            idle_after_ms=random.choice((None, 0, 5_000, 60_000)),
            idle_auto=random.random() < 0.2,
            hold_price_milli=random.choice((0, 1_000, 10_000_000)),
            min_residency_ms=random.choice((0, 2_000)),
            unattached_ttl_ms=20_000,
            revoked_ttl_ms=random.choice((1_000, 60_000, 200_000)),
            retry_refused_ms=random.choice((0, 3_000, 10_000)),
            max_passed_over=random.choice((0, 1, 3)),
            may_move=random.random() < 0.5,
            sharing=random.choices(list(Sharing), (18, 1, 1))[0],
            breach=random.choice(list(Breach)),
            strangers=random.choice(list(Strangers)),
            move_busy=random.random() < 0.5,
            warn_before_ms=1_000 if name == "p" else 0,
            reserve_by=random.choice((ReserveBy.CAP, ReserveBy.CAP, ReserveBy.USE)),
            headroom_mib=50,
            min_residency_swaps_milli=random.choice((0, 1_000, 4_000)),
            preempt_priorities=random.random() < 0.5,
            preempt_equals=random.random() < 0.3,
            max_pin_ms=20_000,
            pin_budget_ms=60_000 if name == "p" else None,
            compute=random.choice((Compute.SPREAD, Compute.SPREAD, Compute.PACK)),
            slowdown_bound_milli=random.choice((0, 1000, 1100, 1500)),
            empty_devices=random.random() < 0.3,
            foresight=random.choice(list(Foresight)),
            foresight_swap_ms=random.choice((400, 2_000)),
            foresight_vain_mib=random.choice((200, 500, 10_000)),
            user_limits=random.choice(
                (Limits(), Limits(), Limits(leases=2), Limits(milli=1_000), Limits(resident_milli=750))
            ),
            group_limits=(("g", Limits(leases=4, milli=1_500, resident_milli=random.choice((None, 500)))),),
        )

    # -- the driver -------------------------------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Pass an event to the arbiter, check the effects, and start the driver on them."""
        self.log.append(event)
        effects = self.arbiter.handle(event)
        self.observer.see(event, effects, whole=len(self.log) % self.whole_every == 0)
        self.made += effects
        if self.random.random() < 0.5:
            self.arbiter.run_deferred_work()
        for effect in effects:
            answer = self._answer(effect)
            if answer is not None:
                self._later(answer, self.random.choice((10, 300, 3_000)))
                if self.random.random() < 0.05:
                    self._later(answer, 4_000)  # twice

    def _later(self, event: Event | _Count | _Save, delay_ms: int) -> None:
        self.number += 1
        heapq.heappush(self.late, (self.now + delay_ms, self.number, event))

    def _answer_suspend(self, suspend: Suspend) -> Event | _Save:
        random = self.random
        outcome = random.choices(list(SuspendOutcome), (12, 2, 2, 1, 1, 1, 1))[0]
        if self.honest or outcome is SuspendOutcome.SAVED:
            if self.honest or random.random() < 0.9:
                self._later(_Count(suspend, asks=self.honest or random.random() < 0.8), random.choice((0, 10, 300)))
            lies = not self.honest and random.random() < 0.05
            return _Save(suspend, lies_mib=suspend.host_mib + 100 if lies else 0)
        need_mib = 0 if random.random() < 0.5 else random.randrange(2 * suspend.host_mib)
        return _finished(suspend, outcome, need_mib=need_mib)

    def _count(self, count: _Count) -> None:
        """Count what a suspend would save, and request what is not reserved. The suspend may already be over."""
        suspend, seen = count.suspend, self.observer.leases.get(count.suspend.lease_id)
        if seen is None:
            return
        need_mib = self.counted[suspend.operation_id] = self.memory.holds(seen)
        if count.asks and need_mib > suspend.host_mib:
            self.send(
                HostMemoryNeeded(
                    at_ms=self.now,
                    lease_id=suspend.lease_id,
                    operation_id=suspend.operation_id,
                    generation=suspend.generation,
                    need_mib=need_mib,
                )
            )

    def _save(self, save: _Save) -> Event:
        """Save a lease, if its reservation suffices."""
        suspend, seen = save.suspend, self.observer.leases.get(save.suspend.lease_id)
        if save.lies_mib:
            return _finished(suspend, SuspendOutcome.SAVED, saved_mib=save.lies_mib)
        reserved_mib = suspend.host_mib
        if seen is not None and seen.generation == suspend.generation:
            reserved_mib = seen.host
        need_mib = self.counted.get(suspend.operation_id)
        if need_mib is None:
            need_mib = self.memory.holds(seen) if seen is not None else 1
        if need_mib > reserved_mib:
            return _finished(suspend, SuspendOutcome.ABORTED, need_mib=need_mib)
        return _finished(suspend, SuspendOutcome.SAVED, saved_mib=need_mib)

    def _answer(self, effect: Effect) -> Event | _Save | None:
        random = self.random
        match effect:
            case Suspend():
                return self._answer_suspend(effect)
            case Shrink(lease_id=lease_id, generation=generation):
                used, idle = None, self.observer.leases[lease_id]
                if random.random() < 0.8:
                    self.memory.shrink(idle)
                    used = self.memory.said(idle)
                return Shrunk(at_ms=0, lease_id=lease_id, generation=generation, used_mib=used)
            case Resume(lease_id=lease_id, operation_id=operation_id, generation=generation):
                result = ResumeOutcome.RESTORED
                if not self.honest:
                    result = random.choices(list(ResumeOutcome), (12, 2, 1))[0]
                return ResumeFinished(
                    at_ms=0, lease_id=lease_id, operation_id=operation_id, generation=generation, outcome=result
                )
            case LookAgain(lease_id=lease_id, generation=generation):
                state = LeaseState.UNATTACHED
                if not self.honest:
                    state = random.choice([s for s in LeaseState if s is not LeaseState.ENDED])
                device = random.choice([None, *(device.device_id for device in self.devices)])
                seen = self.observer.leases.get(lease_id)
                if seen is not None and seen.spec.devices > 1:  # an answer names only the first device
                    device = next(iter(seen.home or seen.devices), None)
                return TruthFound(
                    at_ms=0, lease_id=lease_id, generation=generation, state=state, device_id=device, saved_mib=50
                )
            case CapBreached(action=Breach.KILL) | EndProcesses() if self.honest or random.random() < 0.8:
                return _exited(self, 0, effect.lease_id)
            case _:
                return None

    # -- the world ----------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let one thing happen: a pending event, or a random one."""
        random = self.random
        due = [self.late[0][0]] if self.late else []
        if self.observer.wake is not None:
            due.append(self.observer.wake)
        if due and random.random() < (0.5 if min(due) <= self.now else self.leaps):
            self.now = max(self.now, min(due))
            if self.late and self.late[0][0] <= self.now:
                self._arrive(heapq.heappop(self.late)[2])
            else:
                self.send(Tick(at_ms=self.now))
            return
        self.now += random.choice((0, 0, 1, 50, 1_000))
        _, make = random.choices(_HAPPENINGS, self.weights)[0]
        self.send(make(self, self.now - (random.randrange(5_000) if random.random() < 0.03 else 0)))

    def _arrive(self, what: Event | _Count | _Save) -> None:
        """Carry out a pending driver operation and deliver its answer, which sometimes names a wrong operation."""
        if isinstance(what, _Count):
            self._count(what)
            return
        event = self._save(what) if isinstance(what, _Save) else what
        if isinstance(event, SuspendFinished | ResumeFinished) and not self.honest:
            lie = self.random.random() < 0.03
            changes = {"operation_id": event.operation_id + self.random.choice((-1, 1))} if lie else {}
            if lie:
                self.send(_with(event, self.now, changes))
        self.send(_with(event, self.now, {}))

    def settle(self, most: int) -> int:
        """Only finish pending operations. Return how many operations began; raises LawBrokenError if more than `most` did."""
        self.honest, begun = True, 0
        for view in self.arbiter.leases():  # kernels that stay busy in a pool that shares by time take turns for ever
            if view.busy and any(pool.name == view.spec.pool and pool.preempt_equals for pool in self.pools):
                self.send(BusyChanged(at_ms=self.now, lease_id=view.spec.lease_id, busy=False))
        while True:
            wake = self.observer.wake
            due = [at_ms for at_ms in (self.late[0][0] if self.late else None, wake) if at_ms is not None]
            if not due:
                return begun
            self.now, before = max(self.now, min(due)), len(self.made)
            if self.late and self.late[0][0] <= self.now:
                self._arrive(heapq.heappop(self.late)[2])
            else:
                self.send(Tick(at_ms=self.now))
            begun += sum(isinstance(effect, Suspend | Resume) for effect in self.made[before:])
            if begun > most:
                raise LawBrokenError(f"law 5: {begun} suspends and resumes, without any other activity: thrashing")

    def check_rest(self) -> None:
        """Check that nothing was left undone and that nothing would happen before the alarm."""
        wake = self.observer.wake
        if wake is not None and wake <= self.observer.now + 1:
            return  # the alarm does at once what has become possible since the last event
        fair = [pool.name for pool in self.pools if pool.preempt_equals]
        if any(self.arbiter.queue_lengths().get(name, 0) > 1 for name in fair):
            return  # time-sharing may reorder the queue without an alarm, as every ticket is served in the end
        clone: Arbiter = pickle.loads(pickle.dumps(self.arbiter))  # noqa: S301 - our own; faster than a deep copy
        clone._books.advance(max(clone._changes.now_ms, wake - 1 if wake is not None else self.now + _FAR_MS))
        clone._scheduler.serve()
        effects = clone._changes.take_effects()
        undone = [effect for effect in effects if isinstance(effect, StateChanged | Recorded)]
        if any(isinstance(effect, Recorded) and effect.reason in _FOLLOWS_SAMPLES for effect in undone):
            return
        if any(isinstance(effect, StateChanged) for effect in undone):
            raise LawBrokenError(f"law 7: with the alarm at {wake}, this was left undone at {self.now}: {undone}")


def _finished(suspend: Suspend, outcome: SuspendOutcome, *, saved_mib: int = 0, need_mib: int = 0) -> SuspendFinished:
    return SuspendFinished(
        at_ms=0,
        lease_id=suspend.lease_id,
        operation_id=suspend.operation_id,
        generation=suspend.generation,
        outcome=outcome,
        saved_mib=saved_mib,
        need_mib=need_mib,
    )


def _with(event: Event, at_ms: int, changes: dict[str, int]) -> Event:
    """Return the event at another time, with fields changed."""
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
    return type(event)(**{**fields, "at_ms": at_ms, **changes})


# -- what can happen ------------------------------------------------------------------------------------------------------------------


def _spec(world: World) -> LeaseSpec:
    random = world.random
    devices = random.choice((1,) * 14 + (2, 3))
    claim_ms = random.choice((0,) * 9 + (20_000,))
    return LeaseSpec(
        lease_id=random.choice(_NAMES),
        pool=random.choice(("p", "p", "q")),
        owner=random.choice(("ann", "ann", "bob", "eve")),
        group=random.choice(("", "", "g", "h")),
        fraction_milli=random.choice((125, 250, 250, 500)) if devices == 1 else 1_000,
        devices=devices,
        request_mib=random.choice((None, 50, 100)),
        reserve_mib=random.choice(world.sizes),
        priority=random.choice((0, 0, 0, 1)),
        gated=not claim_ms and random.random() < 0.7,
        owner_weight=random.choice((50, 100, 100, 300)),
        weight=random.choice((50, 100, 100, 300)),
        allowed_devices=_some_devices(world) if random.random() < 0.2 else (),
        claim_ms=claim_ms,
    )


def _some_devices(world: World) -> tuple[str, ...]:
    """Return devices that an engine gave to a job: from one pool, or from both."""
    ids = [device.device_id for device in world.devices]
    return tuple(world.random.sample(ids, world.random.randint(1, len(ids))))


def _requested(world: World, at_ms: int) -> Event:
    spec = _spec(world)
    return LeaseRequested(at_ms=at_ms, spec=spec, needs_reservation=not spec.gated and not spec.claim_ms)


def _recovered(world: World, at_ms: int) -> Event:
    random = world.random
    states = (
        LeaseState.UNATTACHED,
        LeaseState.NO_CONTEXT,
        LeaseState.RESIDENT,
        LeaseState.SUSPENDED,
        LeaseState.QUARANTINED,
    )
    spec, ids = _spec(world), [device.device_id for device in world.devices]
    found = tuple(random.sample(ids, spec.devices)) if spec.devices <= len(ids) and random.random() < 0.8 else ()
    return LeaseRecovered(
        at_ms=at_ms,
        spec=spec,
        state=random.choice((LeaseState.UNATTACHED, LeaseState.RESIDENT) if spec.claim_ms else states),
        generation=random.randrange(5),
        device_id=found[0] if found else None,
        device_ids=found,
        saved_mib=random.choice((0, 60, 300)),
        busy=random.random() < 0.5,
    )


def _seen(world: World, at_ms: int) -> Event:
    random = world.random
    place = random.randrange(len(world.devices))
    if random.random() < 0.1:  # its driver fails, or works again
        world.devices[place] = replace(world.devices[place], why_not=random.choice(("", "", "", "the driver refuses")))
    device = world.devices[place]
    stranger_mib = random.choice((0, 0, 0, 100, 500, 2_000))
    return DeviceSeen(at_ms=at_ms, device=device, stranger_mib=stranger_mib)


def _configured(world: World, at_ms: int) -> Event:
    """Give a pool a new policy, and sometimes other devices."""
    random = world.random
    place = random.randrange(2)
    pool = world.pools[place]
    devices = pool.devices
    if random.random() < 0.3:
        mine = {device for other in world.pools if other is not pool for device in other.devices}
        devices = tuple(d.device_id for d in world.devices if d.device_id not in mine and random.random() < 0.7)
    world.pools[place] = world._pool(pool.name, devices)
    return PoolConfigured(at_ms=at_ms, pool=world.pools[place])


def _drained(world: World, at_ms: int) -> Event:
    device = world.random.choice(world.devices)
    after_ms = world.random.choice((None, None, 0, 1_000, 5_000, 60_000))
    return DeviceDrained(
        at_ms=at_ms,
        device_id=device.device_id,
        evict_busy=world.random.random() < 0.5,
        deadline_ms=None if after_ms is None else at_ms + after_ms,
    )


def _device_changed(world: World, at_ms: int) -> Event:
    """Remove a device or bring it back. One event does both, or a world in which devices only leave would soon stand still."""
    device_id = world.random.choice(world.devices).device_id
    match world.random.randrange(6):
        case 0:
            return DeviceLost(at_ms=at_ms, device_id=device_id)
        case 1:
            return _drained(world, at_ms)
        case 2 | 3:
            return DeviceUndrained(at_ms=at_ms, device_id=device_id)
        case _:
            return _seen(world, at_ms)


def _busy_changed(world: World, at_ms: int, name: str) -> Event:
    busy, seen = world.random.random() < 0.4, world.observer.leases.get(name)
    if busy and seen is not None:
        world.memory.run(seen)
    return BusyChanged(at_ms=at_ms, lease_id=name, busy=busy)


def _measured(world: World, at_ms: int, name: str) -> Event:
    """Take a sample of a lease, and sometimes of others, which may not exist."""
    names = {name: None} | dict.fromkeys(world.random.sample(_NAMES, world.random.choice((0, 0, 1, 6))))
    return LeasesMeasured(at_ms=at_ms, measurements=tuple(_measurement(world, one) for one in names))


def _measurement(world: World, name: str) -> Measurement:
    """Measure a lease. A busy one may grow just before or just after."""
    random, seen = world.random, world.observer.leases.get(name)
    said = random.randrange(500) if seen is None else world.memory.said(seen)
    if seen is not None and seen.works and random.random() < 0.5:
        world.memory.run(seen)
    util_milli = random.choice((None, 0, 40, 350, 700, 1000))
    return Measurement(lease_id=name, used_mib=said, util_milli=util_milli)


def _expected(world: World, at_ms: int, name: str) -> Event:
    random = world.random
    return Expected(
        at_ms=at_ms,
        lease_id=name,
        until_ms=at_ms + random.choice((-1, 1_000, 1_000, 3_000, 30_000, 10_000_000)),
        sign=random.choice(list(Sign)),
        confidence_milli=random.choice((-5, 100, 600, 1000, 1000, 5000)),
    )


def _host_memory_needed(world: World, at_ms: int, name: str) -> Event:
    """Ask for host memory for a suspend: too much, more than it needs, or for a suspend that does not exist."""
    random = world.random
    for operation_id, (kind, lease_id, generation) in world.observer.operations.items():
        if kind == "suspend" and random.random() < 0.9:
            need_mib = random.choice((-1, 0, 1, 100, 500, 1_000, 5_000, 100_000))
            return HostMemoryNeeded(
                at_ms=at_ms,
                lease_id=lease_id,
                operation_id=operation_id,
                generation=generation - (random.random() < 0.1),
                need_mib=need_mib,
            )
    return HostMemoryNeeded(at_ms=at_ms, lease_id=name, operation_id=1, generation=1, need_mib=random.randrange(500))


def _pinned(world: World, at_ms: int, name: str) -> Event:
    return PinRequested(at_ms=at_ms, lease_id=name, duration_ms=world.random.choice((0, 1_000, 5_000, 19_000, 30_000)))


def _resized(world: World, at_ms: int, name: str) -> Event:
    random = world.random
    return ResizeRequested(
        at_ms=at_ms,
        lease_id=name,
        fraction_milli=random.choice((125, 250, 500)),
        reserve_mib=random.choice((50, 100, 250, 400, 600, 990, 1_100)),
    )


def _move_asked(world: World, at_ms: int, name: str) -> Event:
    device = world.random.choice(world.devices).device_id if world.random.random() < 0.5 else None
    return MoveRequested(at_ms=at_ms, lease_id=name, device_id=device)


def _is_claim(world: World, name: str) -> bool:
    seen = world.observer.leases.get(name)
    return seen is not None and seen.spec.claim_ms > 0


def _exited(world: World, at_ms: int, name: str) -> Event:
    """A kernel's process ends. A claim has none, and is released when the program that took it ends."""
    if _is_claim(world, name):
        return LeaseReleased(at_ms=at_ms, lease_id=name)
    return ProcessExited(at_ms=at_ms, lease_id=name)


def _left_behind(world: World, at_ms: int, name: str) -> Event:
    if _is_claim(world, name):
        return Unwanted(at_ms=at_ms, lease_id=name)
    return LeftBehind(
        at_ms=at_ms, lease_id=name, what=world.random.choice(("process 7 (python3)", "process 8 (train)"))
    )


def _seat_ended(world: World, at_ms: int, name: str) -> Event:
    return SeatEnded(at_ms=at_ms, lease_id=name, since_ms=max(0, at_ms - world.random.choice((0, 0, 10_000))))


def _seat_renewed(world: World, at_ms: int) -> Event:
    names = [name for name, seen in world.observer.leases.items() if seen.revoked] or _NAMES
    return SeatRenewed(at_ms=at_ms, lease_id=world.random.choice(names), seat="next")


def _priority_changed(world: World, at_ms: int, name: str) -> Event:
    priority = world.random.choice((None, None, -1, -1_000_000))
    return PriorityChanged(at_ms=at_ms, lease_id=name, priority=priority, sentence="its budget")


def _returned(world: World, at_ms: int, name: str) -> Event:
    """A kernel's leftover processes end, or a new kernel comes. Without leftovers another event happens."""
    left = [one for one, seen in world.observer.leases.items() if seen.left]
    if not left:
        return Unwanted(at_ms=at_ms, lease_id=name)
    name = world.random.choice(left)
    if world.random.random() < 0.5:
        return Attached(at_ms=at_ms, lease_id=name, gated=world.random.random() < 0.5)
    return ProcessExited(at_ms=at_ms, lease_id=name)


def _named(make: Callable[[World, int, str], Event], *states: LeaseState) -> Callable[[World, int], Event]:
    """Return a function that makes events about a lease: usually in one of these states, sometimes in any state, or non-existent."""

    def choose(world: World, at_ms: int) -> Event:
        by_state: dict[LeaseState | None, list[str]] = {}
        for name, seen in world.observer.leases.items():
            by_state.setdefault(seen.state, []).append(name)
        fitting = [by_state[state] for state in states if state in by_state]
        names = world.random.choice(fitting) if fitting and world.random.random() < 0.9 else _NAMES
        return make(world, at_ms, world.random.choice(names))

    return choose


_HAPPENINGS: list[tuple[int, Callable[[World, int], Event]]] = [
    (8, _requested),
    (1, _recovered),
    (6, _device_changed),
    (1, lambda world, at: HostMemorySeen(at_ms=at, budget_mib=world.random.choice((200, 800, 2000, 10_000)))),
    (1, _configured),
    (12, _named(lambda _, at, name: Attached(at_ms=at, lease_id=name, gated=True), _S.UNATTACHED)),
    (1, _named(_exited)),
    (2, _named(_left_behind, _S.RESIDENT, _S.SUSPENDED, _S.SUSPENDING, _S.RESUMING, _S.QUARANTINED)),
    (2, _named(_returned, _S.RESIDENT, _S.SUSPENDED)),
    (1, _named(lambda _, at, name: LeaseReleased(at_ms=at, lease_id=name))),
    (
        20,
        _named(
            lambda world, at, name: Wanted(at_ms=at, lease_id=name, urgent=world.random.random() < 0.05),
            _S.NO_CONTEXT,
            _S.SUSPENDED,
            _S.SUSPENDING,
        ),
    ),
    (8, _named(lambda _, at, name: Wanted(at_ms=at, lease_id=name), _S.RESIDENT)),
    (3, _named(lambda _, at, name: Unwanted(at_ms=at, lease_id=name))),
    (25, _named(_busy_changed, _S.RESIDENT)),
    (3, _named(_measured, *_S)),
    (6, _named(_measured, _S.RESIDENT)),
    (5, _named(_host_memory_needed, _S.SUSPENDING)),
    (25, _named(_expected, _S.SUSPENDED)),
    (3, _named(_expected, *_S)),
    (3, _named(lambda _, at, name: SuspendRequested(at_ms=at, lease_id=name), _S.RESIDENT)),
    (2, _named(_move_asked, _S.RESIDENT, _S.RESIDENT, _S.SUSPENDED)),
    (
        1,
        _named(
            lambda world, at, name: Checkpointable(
                at_ms=at, lease_id=name, why_not=world.random.choice(("", "managed"))
            ),
            _S.RESIDENT,
        ),
    ),
    (
        1,
        _named(
            lambda world, at, name: HostPressureSeen(at_ms=at, lease_id=name, pressed=world.random.random() < 0.7),
            _S.SUSPENDED,
        ),
    ),
    (2, _named(_pinned, _S.RESIDENT, _S.SUSPENDED)),
    (1, _named(lambda _, at, name: UnpinRequested(at_ms=at, lease_id=name), _S.RESIDENT)),
    (3, _named(_resized, _S.RESIDENT, _S.RESIDENT, _S.SUSPENDED, _S.NO_CONTEXT)),
    (2, _named(_priority_changed, _S.RESIDENT, _S.RESIDENT, _S.SUSPENDED, _S.NO_CONTEXT, _S.RESUMING)),
    (2, _named(_seat_ended, *_S)),
    (3, _seat_renewed),
    (1, lambda _, at: Tick(at_ms=at)),
]


def simulate(seed: int, events: int = 2_000, *, rest_every: int = 100) -> World:
    """Run a world for that many steps, checking everything. Raises LawBrokenError or InvariantError with the seed."""
    random = Random(seed)
    try:
        world = World(random, parallel_swaps=2 if seed % 7 == 0 else 1)
        for number in range(events):
            world.step()
            if number % rest_every == 0:
                world.check_rest()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    return world
