"""How long one decision of the arbiter takes: `python tests/benchmarks/decision_time.py [--events N] [--leases N] [--devices N]`.

For 10 to 10,000 leases on 8 and on 64 devices, in two worlds: a calm one, in which an eighth of the kernels wants the GPU at a time, and
a crowded one, in which all do. Every event is timed by itself, with the arbiter's own checks on; microseconds of processor time. What the
arbiter learns and foresees once the effects are out (`Arbiter.run_deferred_work`) delays no decision and is timed beside it. Each
world is measured in several turns, so that what the machine does meanwhile falls on all of them. Exits with 1 if a goal is missed: 200 µs
at the 99th percentile with 1,000 leases on 8 devices, and less than half of what linear growth would be from there to 10,000.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.effects import Effect, Resume, Suspend
from fractional_gpu.core.events import (
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
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec
from tests.benchmarks.stats import percentile

__all__ = ["Crowd", "as_json", "as_table", "measure", "missed"]

MEMORY_MIB = 80 * 1024
SLICES = 8  # kernels that fit on a device
TURNS = 4
LEASES = (10, 100, 1_000, 10_000)
DEVICES = (8, 64)
GOAL_US, GOAL_LEASES, GOAL_DEVICES = 200, 1_000, 8
GOAL_GROWTH = 5  # of the 99th percentile, for ten times the leases


@dataclass
class Crowd:
    """Kernels around one arbiter; `wanting`: the share of them that wants the GPU at a time."""

    leases: int
    devices: int
    wanting: float
    fair: bool = False  # the pool shares by time
    took_us: list[float] = field(default_factory=list)
    reflected_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start the kernels. None of them has asked for a GPU yet."""
        self._random = Random(7)
        self._arbiter = _world(self.leases, self.devices, fair=self.fair)
        self._names = [view.spec.lease_id for view in self._arbiter.leases()]
        self._under_way: list[Event] = []
        self._now = 0

    def run(self, events: int, *, timed: bool = True) -> None:
        """Let so many things happen."""
        random, arbiter, under_way = self._random, self._arbiter, self._under_way
        for _ in range(events):
            self._now += 50
            answer = bool(under_way) and random.random() < 0.2
            name = random.choice(self._names)
            event = under_way.pop(0) if answer else _happening(arbiter, random, name, self._now, self.wanting)
            begun = time.thread_time_ns()
            effects = arbiter.handle(event)
            if timed:
                self.took_us.append((time.thread_time_ns() - begun) / 1000)
            begun = time.thread_time_ns()
            arbiter.run_deferred_work()
            if timed:
                self.reflected_us.append((time.thread_time_ns() - begun) / 1000)
            under_way += _answers(effects, self._now)

    @property
    def words(self) -> str:
        """Say who wants the GPU."""
        return "everybody" if self.wanting == 1 else "an eighth"


def _world(leases: int, devices: int, *, fair: bool) -> Arbiter:
    arbiter = Arbiter(check=True)
    ids = tuple(f"d{number}" for number in range(devices))
    for name in ids:
        arbiter.handle(DeviceSeen(at_ms=0, device=DeviceSpec(device_id=name, name="H", memory_mib=MEMORY_MIB)))
    arbiter.handle(PoolConfigured(at_ms=0, pool=PoolSpec(name="p", devices=ids, preempt_equals=fair)))
    arbiter.handle(HostMemorySeen(at_ms=0, budget_mib=leases * MEMORY_MIB))
    for number in range(leases):
        spec = LeaseSpec(
            lease_id=f"k{number:05}",
            pool="p",
            owner=f"user{number // 3}",
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
            used_mib, util_milli = random.randrange(9_000), random.randrange(1001)
            return LeaseMeasured(at_ms=at_ms, lease_id=name, used_mib=used_mib, util_milli=util_milli)
        return BusyChanged(at_ms=at_ms, lease_id=name, busy=not view.busy)
    return Wanted(at_ms=at_ms, lease_id=name) if random.random() < wanting else Unwanted(at_ms=at_ms, lease_id=name)


def measure(leases: Sequence[int], devices: Sequence[int], events: int, *, fair: bool = False) -> list[Crowd]:
    """Return a crowd of each size, measured over so many events. Before, twice as many events as it has kernels go by unmeasured."""
    crowds = [Crowd(count, on, wanting, fair=fair) for on in devices for count in leases for wanting in (0.125, 1.0)]
    for crowd in crowds:
        crowd.run(max(1_000, 2 * crowd.leases), timed=False)
    gc.collect()
    gc.freeze()  # else the memory of the other crowds would be gone through during the measurement of one
    for _ in range(TURNS):
        for crowd in crowds:
            crowd.run(events // TURNS)
    gc.unfreeze()
    return crowds


def _p99(crowd: Crowd) -> float:
    return percentile(crowd.took_us, 99)


def _growth(crowd: Crowd, crowds: Sequence[Crowd]) -> float | None:
    """How many times longer than with a tenth of the leases."""
    for other in crowds:
        if (other.leases * 10, other.devices, other.wanting) == (crowd.leases, crowd.devices, crowd.wanting):
            return _p99(crowd) / _p99(other)
    return None


def missed(crowds: Sequence[Crowd]) -> list[str]:
    """Say which goals are missed."""
    slow = [
        f"p99 with {crowd.leases} leases on {crowd.devices} devices, {crowd.words} wanting, is over {GOAL_US} µs"
        for crowd in crowds
        if (crowd.leases, crowd.devices) == (GOAL_LEASES, GOAL_DEVICES) and _p99(crowd) > GOAL_US
    ]
    steep = [
        f"p99 with {crowd.leases} leases on {crowd.devices} devices, {crowd.words} wanting, is over {GOAL_GROWTH} x that of a tenth"
        for crowd in crowds
        if crowd.leases > GOAL_LEASES and (_growth(crowd, crowds) or 0) > GOAL_GROWTH
    ]
    return slow + steep


def as_table(crowds: Sequence[Crowd]) -> str:
    """Return a markdown table."""
    lines = [
        "| leases | devices | who wants the GPU | p50 µs | p99 µs | most µs | p99, for ten times the leases | p99 afterwards µs |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for crowd in crowds:
        growth = _growth(crowd, crowds)
        p50, most = percentile(crowd.took_us, 50), max(crowd.took_us)
        lines.append(
            f"| {crowd.leases:,} | {crowd.devices} | {crowd.words} | {p50:.0f} | {_p99(crowd):.0f} | {most:.0f} | "
            f"{'' if growth is None else f'{growth:.1f} x'} | {percentile(crowd.reflected_us, 99):.0f} |"
        )
    return "\n".join(lines)


def as_json(crowds: Sequence[Crowd]) -> list[dict[str, object]]:
    """Return plain data; times in microseconds."""
    return [
        {
            "measured": "one decision of the arbiter",
            "leases": crowd.leases,
            "devices": crowd.devices,
            "wanting": crowd.wanting,
            "events": len(crowd.took_us),
            "p50_us": percentile(crowd.took_us, 50),
            "p99_us": _p99(crowd),
            "max_us": max(crowd.took_us),
            "reflected_p99_us": percentile(crowd.reflected_us, 99),
        }
        for crowd in crowds
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description="time of one decision of the arbiter")
    parser.add_argument("--events", type=int, default=20_000, help="events per world (20000)")
    parser.add_argument("--leases", type=int, action="append", help=f"how many leases, also several times {LEASES}")
    parser.add_argument(
        "--devices", type=int, action="append", help=f"on how many devices, also several times {DEVICES}"
    )
    parser.add_argument(
        "--preempt", choices=("priorities", "fair"), default="priorities", help="what the pool says (priorities)"
    )
    options = parser.parse_args(arguments)
    fair = options.preempt == "fair"
    crowds = measure(options.leases or LEASES, options.devices or DEVICES, options.events, fair=fair)
    print(as_table(crowds))
    for line in missed(crowds):
        print(f"missed: {line}")
    return 1 if missed(crowds) else 0


if __name__ == "__main__":
    sys.exit(main())
