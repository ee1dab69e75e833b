"""Short commands for example tests: an arbiter with one pool, a clock, and a method for each thing that can happen.

Every event goes through an `Observer`, so every example also checks every law.
"""

from collections.abc import Sequence

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect, Granted, Recorded, Resume, Suspend
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseRequested,
    LeasesMeasured,
    Measurement,
    PoolConfigured,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    Tick,
    Unwanted,
    Wanted,
)
from fractional_gpu.core.model import Compute, DeviceSpec, LeaseSpec, LeaseState, LeaseView, PoolSpec, TicketView
from tests.core.observer import Observer

__all__ = ["Hand", "device", "pool", "spec"]


def device(name: str = "d0", memory_mib: int = 1000, kind: str = "H") -> DeviceSpec:
    return DeviceSpec(device_id=name, name=kind, memory_mib=memory_mib)


def pool(
    *devices: str,
    name: str = "p",
    idle_after_ms: int | None = None,
    min_residency_ms: int = 10_000,
    max_passed_over: int = 8,
    may_move: bool = False,
    oversubscription_milli: int | None = None,
    preempt_equals: bool = False,
) -> PoolSpec:
    """Return a pool that offers every fraction, suspends only when a ticket needs the room, and never preempts equals.

    It packs: memory alone decides which device.
    """
    return PoolSpec(
        name=name,
        devices=devices or ("d0",),
        fractions_milli=(),
        idle_after_ms=idle_after_ms,
        min_residency_ms=min_residency_ms,
        max_passed_over=max_passed_over,
        may_move=may_move,
        oversubscription_milli=oversubscription_milli,
        preempt_equals=preempt_equals,
        min_residency_swaps_milli=4_000,
        compute=Compute.PACK,
    )


def spec(
    name: str, reserve_mib: int = 600, *, in_pool: str = "p", priority: int = 0, gated: bool = True, milli: int = 250
) -> LeaseSpec:
    """Return a kernel's request: 600 of a device's 1000 MiB, so that two do not fit."""
    return LeaseSpec(
        lease_id=name,
        pool=in_pool,
        owner="ann",
        fraction_milli=milli,
        reserve_mib=reserve_mib,
        priority=priority,
        gated=gated,
    )


def lease_measured(at_ms: int, name: str, used_mib: int, *, util_milli: int | None = None) -> LeasesMeasured:
    one = Measurement(lease_id=name, used_mib=used_mib, util_milli=util_milli)
    return LeasesMeasured(at_ms=at_ms, measurements=(one,))


class Hand:
    """An arbiter in a world that the test controls. `now` is the time of the next event in milliseconds."""

    def __init__(
        self,
        *devices: DeviceSpec,
        pools: Sequence[PoolSpec] = (),
        host_mib: int = 100_000,
        parallel_swaps: int = 1,
    ) -> None:
        self.arbiter = Arbiter(parallel_swaps=parallel_swaps)
        self.observer = Observer(self.arbiter, parallel_swaps=parallel_swaps)
        self.now = 0
        for one in devices or (device(),):
            self.send(DeviceSeen(at_ms=0, device=one))
        for policy in pools or (pool(),):
            self.send(PoolConfigured(at_ms=0, pool=policy))
        self.send(HostMemorySeen(at_ms=0, budget_mib=host_mib))

    def send(self, event: Event) -> list[Effect]:
        """Pass an event to the arbiter unchanged."""
        effects = self.arbiter.handle(event)
        self.observer.see(event, effects)
        return effects

    # -- words -------------------------------------------------------------------------------------------------------------------

    def request(self, name: str, reserve_mib: int = 600, *, priority: int = 0, gated: bool = True) -> list[Effect]:
        """Request a lease; an ungated kernel wants its reservation before it starts."""
        what = spec(name, reserve_mib, priority=priority, gated=gated)
        return self.send(LeaseRequested(at_ms=self.now, spec=what, needs_reservation=not gated))

    def start(self, name: str, reserve_mib: int = 600, *, priority: int = 0) -> None:
        """Start a gated kernel, unarmed."""
        self.request(name, reserve_mib, priority=priority)
        self.send(Attached(at_ms=self.now, lease_id=name, gated=True))

    def want(self, name: str, *, urgent: bool = False) -> list[Effect]:
        """Make a kernel want the GPU."""
        return self.send(Wanted(at_ms=self.now, lease_id=name, urgent=urgent))

    def give_up(self, name: str) -> list[Effect]:
        """Withdraw a kernel's ticket."""
        return self.send(Unwanted(at_ms=self.now, lease_id=name))

    def work(self, name: str) -> list[Effect]:
        """Make a kernel busy."""
        return self.send(BusyChanged(at_ms=self.now, lease_id=name, busy=True))

    def rest(self, name: str) -> list[Effect]:
        """Make a kernel idle."""
        return self.send(BusyChanged(at_ms=self.now, lease_id=name, busy=False))

    def run(self, name: str, reserve_mib: int = 600) -> None:
        """Start a kernel, give it the GPU, and begin a cell."""
        self.start(name, reserve_mib)
        self.want(name)
        self.work(name)

    def idle(self, name: str, reserve_mib: int = 600) -> None:
        """Start a kernel, give it the GPU, run a cell, and leave it idle."""
        self.run(name, reserve_mib)
        self.rest(name)

    def idle_again(self, name: str) -> None:
        """Restart the kernel of a lease that lost its process, give it the GPU, run a cell, and leave it idle."""
        self.send(Attached(at_ms=self.now, lease_id=name, gated=True))
        self.want(name)
        self.work(name)
        self.rest(name)

    def wait(self, ms: int) -> list[Effect]:
        """Let time pass."""
        self.now += ms
        return self.send(Tick(at_ms=self.now))

    def saved(
        self, effects: list[Effect], outcome: SuspendOutcome = SuspendOutcome.SAVED, *, saved_mib: int = 100
    ) -> list[Effect]:
        """Answer the only suspend among the effects."""
        (effect,) = [effect for effect in effects if isinstance(effect, Suspend)]
        return self.send(
            SuspendFinished(
                at_ms=self.now,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=outcome,
                saved_mib=saved_mib,
            )
        )

    def restored(self, effects: list[Effect], outcome: ResumeOutcome = ResumeOutcome.RESTORED) -> list[Effect]:
        """Answer the only resume among the effects."""
        (effect,) = [effect for effect in effects if isinstance(effect, Resume)]
        return self.send(
            ResumeFinished(
                at_ms=self.now,
                lease_id=effect.lease_id,
                operation_id=effect.operation_id,
                generation=effect.generation,
                outcome=outcome,
            )
        )

    # -- what is so --------------------------------------------------------------------------------------------------------------

    def view(self, name: str) -> LeaseView:
        """Return a lease, which must exist."""
        view = self.arbiter.lease(name)
        assert view is not None, f"there is no lease {name}"
        return view

    def state(self, name: str) -> LeaseState:
        return self.view(name).state

    def ticket(self, name: str) -> TicketView:
        """Return a ticket, which must exist."""
        ticket = self.arbiter.ticket(name)
        assert ticket is not None, f"lease {name} does not wait"
        return ticket

    @staticmethod
    def suspends(effects: list[Effect]) -> list[str]:
        """Return the leases to suspend."""
        return [effect.lease_id for effect in effects if isinstance(effect, Suspend)]

    @staticmethod
    def granted(effects: list[Effect]) -> list[tuple[str, str]]:
        """Return the leases let in, each with its device."""
        return [(effect.lease_id, effect.device_id) for effect in effects if isinstance(effect, Granted)]

    @staticmethod
    def resumes(effects: list[Effect]) -> list[tuple[str, str]]:
        """Return the leases to resume, each with its device."""
        return [(effect.lease_id, effect.device_id) for effect in effects if isinstance(effect, Resume)]

    @staticmethod
    def reasons(effects: list[Effect], name: str) -> list[str]:
        return [effect.reason for effect in effects if isinstance(effect, Recorded) and effect.lease_id == name]
