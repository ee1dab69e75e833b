"""How long one decision of the arbiter takes: `python tests/benchmarks/decision_time.py [--events N]`.

For 10, 100 and 1,000 leases on 8 devices, in two worlds: a calm one, in which an eighth of the kernels wants the GPU at a time, and a
crowded one, in which all do. Every event is timed by itself, with the arbiter's own checks on; microseconds of processor time.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))

from provisioner.core.arbiter import Arbiter
from provisioner.core.effects import Effect, Resume, Suspend
from provisioner.core.events import (
    Attached,
    BusyChanged,
    DeviceSeen,
    Event,
    HostMemorySeen,
    LeaseMeasured,
    LeaseRequested,
    PoolConfigured,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    Unwanted,
    Wanted,
)
from provisioner.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec

__all__ = ["measure"]

DEVICES = 8
MEMORY_MIB = 80 * 1024
SLICES = 8  # kernels that fit on a device


def _world(leases: int) -> Arbiter:
    arbiter = Arbiter(check=True)
    ids = tuple(f"d{number}" for number in range(DEVICES))
    for name in ids:
        arbiter.handle(DeviceSeen(at_ms=0, device=DeviceSpec(device_id=name, name="H", memory_mib=MEMORY_MIB)))
    arbiter.handle(PoolConfigured(at_ms=0, pool=PoolSpec(name="p", devices=ids)))
    arbiter.handle(HostMemorySeen(at_ms=0, budget_mib=leases * MEMORY_MIB))
    for number in range(leases):
        spec = LeaseSpec(
            lease_id=f"k{number:04}",
            pool="p",
            owner="ann",
            fraction_milli=125,
            reserve_mib=MEMORY_MIB // SLICES,
        )
        arbiter.handle(LeaseRequested(at_ms=0, spec=spec))
        arbiter.handle(Attached(at_ms=0, lease_id=spec.lease_id, gated=True))
    return arbiter


def _answers(effects: Sequence[Effect], at_ms: int) -> list[Event]:
    answers: list[Event] = []
    for effect in effects:
        if isinstance(effect, Suspend):
            answers.append(
                SuspendFinished(
                    at_ms=at_ms,
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=SuspendOutcome.SAVED,
                    saved_mib=1000,
                )
            )
        elif isinstance(effect, Resume):
            answers.append(
                ResumeFinished(
                    at_ms=at_ms,
                    lease_id=effect.lease_id,
                    operation_id=effect.operation_id,
                    generation=effect.generation,
                    outcome=ResumeOutcome.RESTORED,
                )
            )
    return answers


def _happening(arbiter: Arbiter, random: Random, name: str, at_ms: int, wanting: float) -> Event:
    view = arbiter.lease(name)
    if view is not None and view.state is LeaseState.RESIDENT:
        if random.random() < 0.3:
            return LeaseMeasured(at_ms=at_ms, lease_id=name, used_mib=random.randrange(9_000))
        return BusyChanged(at_ms=at_ms, lease_id=name, busy=not view.busy)
    return Wanted(at_ms=at_ms, lease_id=name) if random.random() < wanting else Unwanted(at_ms=at_ms, lease_id=name)


def measure(leases: int, wanting: float, events: int) -> list[float]:
    """Return how long each event took, microseconds. `wanting`: the share of the kernels that wants the GPU."""
    arbiter, random = _world(leases), Random(7)
    names = [view.spec.lease_id for view in arbiter.leases()]
    took: list[float] = []
    under_way: list[Event] = []
    for number in range(events):
        answer = bool(under_way) and random.random() < 0.2
        name = random.choice(names)
        event = under_way.pop(0) if answer else _happening(arbiter, random, name, number * 50, wanting)
        begun = time.thread_time_ns()
        effects = arbiter.handle(event)
        took.append((time.thread_time_ns() - begun) / 1000)
        under_way += _answers(effects, number * 50)
    return took


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description="time of one decision of the arbiter")
    parser.add_argument("--events", type=int, default=20_000, help="events per world (20000)")
    options = parser.parse_args(arguments)
    print("| leases | who wants the GPU | p50 µs | p99 µs | most µs |")
    print("|---:|---|---:|---:|---:|")
    for leases in (10, 100, 1000):
        for wanting, words in ((0.125, "an eighth"), (1.0, "everybody")):
            took = sorted(measure(leases, wanting, options.events))
            p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
            print(f"| {leases} | {words} | {p50:.0f} | {p99:.0f} | {took[-1]:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
