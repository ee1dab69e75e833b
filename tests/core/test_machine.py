"""Any sequence of events that hypothesis finds, against the independent model. Every step checks everything."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import LookAgain, Resume, Shrink, Suspend
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
from fractional_gpu.core.model import DeviceSpec, Foresight, LeaseSpec, LeaseState, Limits, PoolSpec, ReserveBy, Sign
from tests.core.observer import Observer

pytestmark = pytest.mark.promise("laws")

DEVICES = ("d0", "d1", "d2")
names = st.sampled_from(["a", "b", "c", "d", "e", "f"])
devices = st.sampled_from(DEVICES)
sizes = st.sampled_from([1, 100, 250, 400, 500, 600, 1000])
found = st.sampled_from([state for state in LeaseState if state not in ("suspending", "resuming", "ended")])
one_device = st.builds(
    LeaseSpec,
    lease_id=names,
    pool=st.sampled_from(["p", "q", "gone"]),
    owner=st.sampled_from(["ann", "bob"]),
    group=st.sampled_from(["", "g"]),
    fraction_milli=st.sampled_from([250, 500]),
    reserve_mib=sizes,
    priority=st.sampled_from([0, 0, 1]),
    gated=st.booleans(),
    owner_weight=st.sampled_from([50, 100]),
    weight=st.sampled_from([50, 100]),
    request_mib=st.sampled_from([None, 1, 100]),
)
several_devices = st.builds(
    LeaseSpec,
    lease_id=names,
    pool=st.sampled_from(["p", "q"]),
    owner=st.just("ann"),
    fraction_milli=st.just(1_000),
    reserve_mib=sizes,
    gated=st.booleans(),
    devices=st.sampled_from([2, 3]),
)
specs = st.one_of(one_device, one_device, one_device, several_devices)
policies = st.builds(
    PoolSpec,
    name=st.sampled_from(["p", "q"]),
    devices=st.lists(devices, unique=True).map(tuple),
    fractions_milli=st.just(()),
    oversubscription_milli=st.sampled_from([None, None, 1500]),
    idle_after_ms=st.sampled_from([None, 0, 1_000]),
    min_residency_ms=st.sampled_from([0, 500]),
    revoked_ttl_ms=st.sampled_from([0, 1_000, 100_000]),
    unattached_ttl_ms=st.sampled_from([5_000, 100_000]),
    unattached_hold_ms=st.sampled_from([0, 2_000, 200_000]),
    unattached_leases=st.sampled_from([2, 64]),
    unattached_share_milli=st.sampled_from([1, 500, 1_000]),
    retry_refused_ms=st.sampled_from([0, 2_000]),
    max_passed_over=st.sampled_from([0, 1, 3]),
    may_move=st.booleans(),
    move_busy=st.booleans(),
    warn_before_ms=st.sampled_from([0, 200]),
    reserve_by=st.sampled_from(ReserveBy),
    headroom_mib=st.just(50),
    min_residency_swaps_milli=st.sampled_from([0, 4_000]),
    preempt_priorities=st.booleans(),
    preempt_equals=st.booleans(),
    max_pin_ms=st.just(5_000),
    pin_budget_ms=st.just(20_000),
    empty_devices=st.booleans(),
    foresight=st.sampled_from(Foresight),
    foresight_vain_mib=st.sampled_from([0, 500, 10_000]),
    user_limits=st.sampled_from([Limits(), Limits(), Limits(leases=3, milli=1_000), Limits(resident_milli=500)]),
    group_limits=st.sampled_from([(), (("g", Limits(leases=2)),), (("g", Limits(milli=500, resident_milli=250)),)]),
)

measurements = st.builds(
    Measurement,
    lease_id=names,
    used_mib=st.sampled_from([0, 300, 900]),
    util_milli=st.sampled_from([None, 0, 400, 1000]),
)


class ArbiterMachine(RuleBasedStateMachine):
    """Kernels, devices, clocks and drivers that act arbitrarily."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.asked: list[Suspend | Resume] = []  # including answered ones, which may be answered again
        self.looks: list[LookAgain] = []
        self.shrinks: list[Shrink] = []

    @initialize(
        swaps=st.sampled_from([1, 1, 2]),
        kinds=st.tuples(*[st.sampled_from("HA")] * 3),
        fixed=st.sampled_from(["", "", "the driver moves nothing"]),
    )
    def begin(self, swaps: int, kinds: tuple[str, ...], fixed: str) -> None:
        self.arbiter = Arbiter(parallel_swaps=swaps)
        self.observer = Observer(self.arbiter, parallel_swaps=swaps)
        self.specs = {
            name: DeviceSpec(device_id=name, name=kind, memory_mib=1000, why_no_move=fixed)
            for name, kind in zip(DEVICES, kinds, strict=True)
        }
        self.send(DeviceSeen, device=self.specs["d0"])
        self.send(PoolConfigured, pool=PoolSpec(name="p", devices=("d0", "d1"), fractions_milli=(), max_passed_over=1))
        self.send(HostMemorySeen, budget_mib=3_000)

    def send(self, kind: type[Event], **fields: Any) -> None:  # noqa: ANN401 - the fields of any event
        event = kind(at_ms=self.now, **fields)
        effects = self.arbiter.handle(event)
        self.observer.see(event, effects)
        for effect in effects:
            if isinstance(effect, Suspend | Resume):
                self.asked.append(effect)
            elif isinstance(effect, LookAgain):
                self.looks.append(effect)
            elif isinstance(effect, Shrink):
                self.shrinks.append(effect)

    # -- time --------------------------------------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([-60_000, -1, 1, 500, 1_000, 2_000, 60_000]))
    def clock_jumps(self, ms: int) -> None:
        self.now = max(0, self.now + ms)
        self.send(Tick)

    @precondition(lambda self: self.observer.wake is not None)
    @rule()
    def alarm(self) -> None:
        self.now = max(self.now, self.observer.wake or 0)
        self.send(Tick)

    @rule()
    def pause(self) -> None:
        self.arbiter.run_deferred_work()
        self.arbiter.validate()

    # -- devices, pools, host ----------------------------------------------------------------------------------------------------

    @rule(name=devices, stranger_mib=st.sampled_from([0, 0, 100, 700, 5_000, -1]))
    def device_seen(self, name: str, stranger_mib: int) -> None:
        self.send(DeviceSeen, device=self.specs[name], stranger_mib=stranger_mib)

    @rule(name=devices)
    def device_lost(self, name: str) -> None:
        self.send(DeviceLost, device_id=name)

    @rule(name=devices, evict=st.booleans(), after_ms=st.sampled_from([None, None, -1, 500, 2_000, 60_000]))
    def device_drained(self, name: str, evict: bool, after_ms: int | None) -> None:
        deadline_ms = None if after_ms is None else self.now + after_ms
        self.send(DeviceDrained, device_id=name, evict_busy=evict, deadline_ms=deadline_ms)

    @rule(name=devices)
    def device_undrained(self, name: str) -> None:
        self.send(DeviceUndrained, device_id=name)

    @rule(policy=policies)
    def pool_configured(self, policy: PoolSpec) -> None:
        self.send(PoolConfigured, pool=policy)

    @rule(budget_mib=st.sampled_from([0, 500, 3_000]))
    def host_memory_seen(self, budget_mib: int) -> None:
        self.send(HostMemorySeen, budget_mib=budget_mib)

    # -- kernels -----------------------------------------------------------------------------------------------------------------

    @rule(spec=specs, needs=st.booleans())
    def requested(self, spec: LeaseSpec, needs: bool) -> None:
        self.send(LeaseRequested, spec=spec, needs_reservation=needs)

    @rule(
        spec=specs,
        state=found,
        generation=st.integers(0, 3),
        device=st.none() | devices,
        saved=st.sampled_from([0, 300, 2_000]),
        busy=st.booleans(),
    )
    def recovered(  # noqa: PLR0917 - hypothesis calls it by name
        self, spec: LeaseSpec, state: LeaseState, generation: int, device: str | None, saved: int, busy: bool
    ) -> None:
        self.send(
            LeaseRecovered,
            spec=spec,
            state=state,
            generation=generation,
            device_id=DEVICES[0] if spec.devices > 1 and device is not None else device,
            device_ids=DEVICES[: spec.devices] if spec.devices > 1 and device is not None else (),
            saved_mib=saved,
            busy=busy,
        )

    @rule(name=names, reserve_mib=sizes, idle=st.booleans())
    def runs(self, name: str, reserve_mib: int, idle: bool) -> None:
        """Take a kernel through its whole life, so that a few steps cover a lot."""
        spec = LeaseSpec(lease_id=name, pool="p", owner="ann", fraction_milli=250, reserve_mib=reserve_mib)
        self.send(LeaseRequested, spec=spec)
        self.send(Attached, lease_id=name, gated=True)
        self.send(Wanted, lease_id=name)
        self.send(BusyChanged, lease_id=name, busy=True)
        if idle:
            self.send(BusyChanged, lease_id=name, busy=False)

    @rule(name=names, gated=st.booleans())
    def attached(self, name: str, gated: bool) -> None:
        self.send(Attached, lease_id=name, gated=gated)

    @rule(name=names, urgent=st.sampled_from([False, False, True]))
    def wanted(self, name: str, urgent: bool) -> None:
        self.send(Wanted, lease_id=name, urgent=urgent)

    @rule(name=names, busy=st.booleans())
    def busy_changed(self, name: str, busy: bool) -> None:
        self.send(BusyChanged, lease_id=name, busy=busy)

    @rule(sample=st.lists(measurements, min_size=1, max_size=3, unique_by=lambda one: one.lease_id))
    def measured(self, sample: list[Measurement]) -> None:
        self.send(LeasesMeasured, measurements=tuple(sample))

    @rule(
        name=names,
        ms=st.sampled_from([0, 1_000, 60_000]),
        sign=st.sampled_from(Sign),
        confidence_milli=st.sampled_from([100, 1_000]),
    )
    def expected(self, name: str, ms: int, sign: Sign, confidence_milli: int) -> None:
        self.send(Expected, lease_id=name, until_ms=self.now + ms, sign=sign, confidence_milli=confidence_milli)

    @rule(name=names, kind=st.sampled_from([Unwanted, ProcessExited, LeaseReleased, SuspendRequested, UnpinRequested]))
    def said_of(self, name: str, kind: type[Event]) -> None:
        self.send(kind, lease_id=name)

    @rule(name=names, what=st.sampled_from(["process 7 (python3)", "process 8 (train)"]))
    def left_behind(self, name: str, what: str) -> None:
        self.send(LeftBehind, lease_id=name, what=what)

    @rule(name=names, ago_ms=st.sampled_from([-1, 0, 2_000]))
    def seat_ended(self, name: str, ago_ms: int) -> None:
        self.send(SeatEnded, lease_id=name, since_ms=self.now - ago_ms)

    @rule(name=names)
    def seat_renewed(self, name: str) -> None:
        self.send(SeatRenewed, lease_id=name, seat="next")

    @rule(name=names, priority=st.sampled_from([None, -1, 0, 5, -1_000_000]))
    def priority_changed(self, name: str, priority: int | None) -> None:
        self.send(PriorityChanged, lease_id=name, priority=priority, sentence="its budget")

    @rule(name=names, mib=sizes, milli=st.sampled_from([100, 250, 500]))
    def resized(self, name: str, mib: int, milli: int) -> None:
        self.send(ResizeRequested, lease_id=name, fraction_milli=milli, reserve_mib=mib)

    @rule(name=names, ms=st.sampled_from([-1, 0, 1_000, 5_000, 5_001]))
    def pinned(self, name: str, ms: int) -> None:
        self.send(PinRequested, lease_id=name, duration_ms=ms)

    @rule(name=names, device=st.none() | devices)
    def move_requested(self, name: str, device: str | None) -> None:
        self.send(MoveRequested, lease_id=name, device_id=device)

    @rule(name=names, why_not=st.sampled_from(["", "managed memory"]))
    def checkpointable(self, name: str, why_not: str) -> None:
        self.send(Checkpointable, lease_id=name, why_not=why_not)

    @rule(name=names, pressed=st.booleans())
    def host_pressure_seen(self, name: str, pressed: bool) -> None:
        self.send(HostPressureSeen, lease_id=name, pressed=pressed)

    # -- answers: in any order, late, twice, or lies -------------------------------------------------------------------------------

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        newest_first = self.asked[::-1]
        self.answer(data, data.draw(st.sampled_from(newest_first)), lie=0)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), lie=st.sampled_from([-1, 1]))
    def answered_with_a_lie(self, data: st.DataObject, lie: int) -> None:
        self.answer(data, data.draw(st.sampled_from(self.asked)), lie=lie)

    def answer(self, data: st.DataObject, effect: Suspend | Resume, *, lie: int) -> None:
        what: dict[str, Any] = {
            "lease_id": effect.lease_id,
            "generation": effect.generation,
            "operation_id": effect.operation_id,
        }
        if lie:
            about = data.draw(st.sampled_from(["lease_id", "generation", "operation_id", "kind"]))
            if about == "lease_id":
                what["lease_id"] = data.draw(names)
            elif about != "kind":
                what[about] += lie
            elif isinstance(effect, Suspend):
                self.send(ResumeFinished, **what, outcome=ResumeOutcome.RESTORED)
                return
        if isinstance(effect, Suspend):
            saved_mib = data.draw(st.sampled_from([0, 100, 1_500, -5]))
            outcome = data.draw(st.sampled_from(list(SuspendOutcome)))
            self.send(SuspendFinished, **what, outcome=outcome, saved_mib=saved_mib)
        else:
            self.send(ResumeFinished, **what, outcome=data.draw(st.sampled_from(list(ResumeOutcome))))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), need_mib=st.sampled_from([-1, 0, 300, 1_000, 5_000]), stale=st.booleans())
    def host_memory_needed(self, data: st.DataObject, need_mib: int, stale: bool) -> None:
        effect = data.draw(st.sampled_from(self.asked[::-1]))
        self.send(
            HostMemoryNeeded,
            lease_id=effect.lease_id,
            operation_id=effect.operation_id,
            generation=effect.generation - stale,
            need_mib=need_mib,
        )

    @precondition(lambda self: self.shrinks)
    @rule(data=st.data(), used=st.sampled_from([None, 0, 100, 1_500]))
    def shrunk(self, data: st.DataObject, used: int | None) -> None:
        asked = data.draw(st.sampled_from(self.shrinks[::-1]))
        self.send(Shrunk, lease_id=asked.lease_id, generation=asked.generation, used_mib=used)

    @precondition(lambda self: self.looks)
    @rule(data=st.data(), state=st.sampled_from(LeaseState), device=st.none() | devices)
    def truth_found(self, data: st.DataObject, state: LeaseState, device: str | None) -> None:
        look = data.draw(st.sampled_from(self.looks[::-1]))
        seen = self.observer.leases.get(look.lease_id)
        if seen is not None and seen.spec.devices > 1:  # an answer names only the first device
            device = next(iter(seen.home or seen.devices), None)
        self.send(
            TruthFound,
            lease_id=look.lease_id,
            generation=look.generation,
            state=state,
            device_id=device,
            saved_mib=data.draw(st.sampled_from([0, 300])),
        )


TestArbiterMachine = ArbiterMachine.TestCase
TestArbiterMachine.settings = settings(stateful_step_count=50, suppress_health_check=list(HealthCheck))
