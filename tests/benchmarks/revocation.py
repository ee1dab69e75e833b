"""State saved before a deadline: the arbiter's choice against largest first, first come and a random order.

    python -m tests.benchmarks.revocation [--seeds 200]

Each seed is one device with 4 to 24 kernels of 0.5 to 20 GiB (log-uniform), a third of them busy, whose cells have run for 10 s to 8 h
(log-uniform), in three priorities. A swap takes 0.3 s and its bytes at 1,800 MiB/s, times a separate factor (log-normal, sigma 0.15),
which no order knows beforehand. The deadline is a share of the time that all saves would take. The arbiter runs in virtual time, with
forecasts that have seen forty other swaps of the device; cells that end before it interrupts them do so at random times, the same for all.
The other orders begin one save after the other, busy or not, and lose what has not ended at the deadline.

The output is the table of docs/revocation.md.
"""

import argparse
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect, Suspend, WakeAt
from fractional_gpu.core.events import (
    Attached,
    BusyChanged,
    DeviceDrained,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseRequested,
    PoolConfigured,
    SuspendFinished,
    SuspendOutcome,
    Tick,
    Wanted,
)
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.forecasts.outcomes import SUSPEND
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec
from fractional_gpu.core.revoke import value_of
from tests.core.driving import lease_measured

__all__ = ["ORDERS", "Kernel", "Outcome", "kernels_of", "main", "run_arbiter", "run_order", "time_for_all_ms"]

_DEVICE_MIB = 640 * 1024
_MIB_PER_MS = 1.8
_FIXED_MS = 300
_SHARES = (25, 50, 75, 100)  # of the time that all saves take, per cent


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as the deadline is announced. Times in ms."""

    name: str
    mib: int
    worked_ms: int
    priority: int
    swap_ms: int  # what its save takes
    cell_left_ms: int  # 0: it idles

    @property
    def value(self) -> int:
        """What it is worth."""
        return value_of(self.worked_ms, self.priority)


@dataclass(slots=True)
class Outcome:
    """What was saved in time, and how many cells were interrupted."""

    saved: set[str] = field(default_factory=set)
    interrupted: int = 0


def _swap_ms(random: Random, mib: int) -> int:
    return round((_FIXED_MS + mib / _MIB_PER_MS) * random.lognormvariate(0, 0.15))


def kernels_of(seed: int) -> list[Kernel]:
    """Return the kernels of a seed."""
    random = Random(seed)
    found = []
    for number in range(random.randint(4, 24)):
        mib = round(512 * 40 ** random.random())
        busy = random.random() < 1 / 3
        found.append(
            Kernel(
                name=f"k{number}",
                mib=mib,
                worked_ms=round(10_000 * 2880 ** random.random()),
                priority=random.choice((0, 0, 0, 1, 2)),
                swap_ms=_swap_ms(random, mib),
                cell_left_ms=1 + round(random.expovariate(1 / 60_000)) if busy else 0,
            )
        )
    return found


def time_for_all_ms(kernels: Sequence[Kernel]) -> int:
    """Return how long all saves take."""
    return sum(kernel.swap_ms for kernel in kernels)


# -- the orders --------------------------------------------------------------------------------------------------------


ORDERS: dict[str, Callable[[list[Kernel], Random], list[Kernel]]] = {
    "largest first": lambda kernels, _: sorted(kernels, key=lambda one: -one.mib),
    "smallest first": lambda kernels, _: sorted(kernels, key=lambda one: one.mib),
    "first come": lambda kernels, _: kernels,
    "random": lambda kernels, random: random.sample(kernels, len(kernels)),
}


def run_order(kernels: Sequence[Kernel], order: Sequence[Kernel], deadline_ms: int) -> Outcome:
    """Save one after the other in this order."""
    outcome, now_ms = Outcome(), 0
    assert {one.name for one in order} == {one.name for one in kernels}
    for kernel in order:
        if now_ms >= deadline_ms:
            break
        outcome.interrupted += kernel.cell_left_ms > now_ms
        now_ms += kernel.swap_ms
        if now_ms <= deadline_ms:
            outcome.saved.add(kernel.name)
    return outcome


# -- the arbiter -------------------------------------------------------------------------------------------------------


class _World:
    """An arbiter with these kernels on one device, at the moment of the announcement."""

    def __init__(self, kernels: Sequence[Kernel], seed: int) -> None:
        random = Random(seed + 1_000_003)
        forecasts = Forecasts()
        for _ in range(40):
            mib = round(512 * 40 ** random.random())
            forecasts.swap_finished(SUSPEND, "G", mib, _swap_ms(random, mib))
        self.kernels = {kernel.name: kernel for kernel in kernels}
        self.arbiter = Arbiter(forecasts=forecasts)
        self.outcome = Outcome()
        self.now_ms = 0
        self.wake_ms: int | None = None
        self.due: list[tuple[int, int, Event]] = []
        self._number = 0
        self.begins_ms = max(kernel.worked_ms for kernel in kernels) + 1
        self._begin(kernels)

    def _begin(self, kernels: Sequence[Kernel]) -> None:
        self.send(DeviceSeen(at_ms=0, device=DeviceSpec(device_id="d", name="G", memory_mib=_DEVICE_MIB)))
        self.send(
            PoolConfigured(at_ms=0, pool=PoolSpec(name="p", devices=("d",), fractions_milli=(), idle_after_ms=None))
        )
        self.send(HostMemorySeen(at_ms=0, budget_mib=_DEVICE_MIB))
        for kernel in kernels:
            spec = LeaseSpec(
                lease_id=kernel.name,
                pool="p",
                owner="ann",
                fraction_milli=10,
                reserve_mib=kernel.mib,
                priority=kernel.priority,
            )
            self.send(LeaseRequested(at_ms=0, spec=spec))
            self.send(Attached(at_ms=0, lease_id=kernel.name, gated=True))
            self.send(Wanted(at_ms=0, lease_id=kernel.name))
            self.send(lease_measured(0, kernel.name, kernel.mib))
            self.at(self.begins_ms - kernel.worked_ms, BusyChanged(at_ms=0, lease_id=kernel.name, busy=True))
            ends_ms = self.begins_ms + (kernel.cell_left_ms or -1)
            self.at(ends_ms, BusyChanged(at_ms=0, lease_id=kernel.name, busy=False))
        self.run_until(self.begins_ms)

    def at(self, at_ms: int, event: Event) -> None:
        """Let an event happen at a time."""
        self._number += 1
        heapq.heappush(self.due, (at_ms, self._number, event))

    def run_until(self, end_ms: int) -> None:
        """Let time pass."""
        while True:
            next_ms = min(
                (at_ms for at_ms in (self.due[0][0] if self.due else None, self.wake_ms) if at_ms is not None),
                default=None,
            )
            if next_ms is None or next_ms > end_ms:
                self.now_ms = end_ms
                return
            self.now_ms = max(self.now_ms, next_ms)
            if self.due and self.due[0][0] <= self.now_ms:
                self._happens(heapq.heappop(self.due)[2])
            else:
                self.wake_ms = None
                self.send(Tick(at_ms=self.now_ms))

    def _happens(self, event: Event) -> None:
        match event:
            case BusyChanged(lease_id=lease_id, busy=busy):
                view = self.arbiter.lease(lease_id)
                if (
                    view is not None and view.state is LeaseState.RESIDENT
                ):  # a cell that was interrupted does not end here
                    self.send(BusyChanged(at_ms=self.now_ms, lease_id=lease_id, busy=busy))
            case SuspendFinished():
                self.outcome.saved.add(event.lease_id)
                self.send(
                    SuspendFinished(
                        at_ms=self.now_ms,
                        lease_id=event.lease_id,
                        operation_id=event.operation_id,
                        generation=event.generation,
                        outcome=SuspendOutcome.SAVED,
                        saved_mib=event.saved_mib,
                    )
                )
            case _:
                raise TypeError(f"nothing else happens here: {event}")

    def send(self, event: Event) -> None:
        """Hand an event in, and do what follows."""
        for effect in self.arbiter.handle(event):
            self._execute(effect)

    def _execute(self, effect: Effect) -> None:
        match effect:
            case Suspend():
                kernel = self.kernels[effect.lease_id]
                self.outcome.interrupted += effect.preempt
                done = SuspendFinished(
                    at_ms=0,
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=SuspendOutcome.SAVED,
                    saved_mib=kernel.mib,
                )
                self.at(self.now_ms + kernel.swap_ms, done)
            case WakeAt(at_ms=at_ms):
                self.wake_ms = at_ms
            case _:
                pass


def run_arbiter(kernels: Sequence[Kernel], seed: int, deadline_ms: int) -> Outcome:
    """Drain the device by the deadline."""
    world = _World(kernels, seed)
    end_ms = world.begins_ms + deadline_ms
    world.send(DeviceDrained(at_ms=world.now_ms, device_id="d", deadline_ms=end_ms))
    world.run_until(end_ms)
    return world.outcome


# -- the table ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description="state saved before a deadline, by order")
    parser.add_argument("--seeds", type=int, default=200, help="how many (200)")
    options = parser.parse_args(arguments)
    print("| deadline | order | value saved | kernels saved | cells interrupted |")
    print("|---|---|---|---|---|")
    for share in _SHARES:
        for name in ("as drained", *ORDERS):
            value = whole = saved = count = interrupted = 0
            for seed in range(options.seeds):
                kernels = kernels_of(seed)
                deadline_ms = time_for_all_ms(kernels) * share // 100
                if name == "as drained":
                    outcome = run_arbiter(kernels, seed, deadline_ms)
                else:
                    outcome = run_order(kernels, ORDERS[name](kernels, Random(seed)), deadline_ms)
                value += sum(one.value for one in kernels if one.name in outcome.saved)
                whole += sum(one.value for one in kernels)
                saved, count = saved + len(outcome.saved), count + len(kernels)
                interrupted += outcome.interrupted
            print(f"| {share} % | {name} | {100 * value / whole:.1f} % | {100 * saved / count:.0f} % | {interrupted} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
