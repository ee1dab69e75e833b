"""What leases of each size wait for: other leases, or swaps of their own.

    python -m tests.benchmarks.by_size [--seeds 20] [--users 50] [--devices 6] [--jobs 2] [--json FILE] [--several-gpus PERCENT]

A large lease waits longer than a small one because more bytes have to move for it. So the time of its own swaps (the suspends that make
room for it, and its resume) is counted apart: what is left is time in the queue, which the order of tickets decides. Waits of all seeds
together, seconds, on one host with devices of 80 GiB and the pool that is shipped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from fractional_gpu.core.effects import Effect, Granted, Resume, Suspend
from fractional_gpu.core.events import BusyChanged, Event, LeaseRequested, ResumeFinished, SuspendFinished, Wanted
from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.simulator.felt import nearest_rank
from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks.simulated import machine, parser, read, spread_out, write_json

_COLUMNS = ("cells", "waited, %", "p95 wait", "worst wait", "p95 in the queue", "worst in the queue")


@dataclass(frozen=True, slots=True)
class Task:
    """One seed."""

    seed: int
    users: int
    devices: int
    several_percent: int


@dataclass(slots=True)
class Waits:
    """The waits of one run, collected from its events: of each size, each wait that is not zero and the part of it in the queue, ms."""

    cells: dict[str, int] = field(default_factory=dict)
    found: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _sizes: dict[str, str] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)
    _swaps: dict[int, tuple[str, int]] = field(
        default_factory=dict
    )  # by operation: the lease it is for, and its beginning
    _own: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # by lease that waits: its swaps that have ended

    def watch(self, event: Event, effects: Sequence[Effect]) -> None:
        """Take one event and its effects."""
        now_ms = event.at_ms
        match event:
            case LeaseRequested():
                self._sizes[event.spec.lease_id] = size_of(event.spec)
            case BusyChanged(busy=True):
                size = self._sizes[event.lease_id]
                self.cells[size] = self.cells.get(size, 0) + 1
            case Wanted():
                self._asked[event.lease_id], self._own[event.lease_id] = now_ms, []
            case SuspendFinished() | ResumeFinished():
                lease_id, began_ms = self._swaps.pop(event.operation_id, ("", 0))
                if lease_id in self._own:
                    self._own[lease_id].append((began_ms, now_ms))
        for effect in effects:
            match effect:
                case Suspend():
                    self._swaps[effect.operation_id] = effect.for_lease_id or "", now_ms
                case Resume():
                    self._swaps[effect.operation_id] = effect.lease_id, now_ms
                case Granted() if effect.lease_id in self._asked:
                    self._granted(effect.lease_id, now_ms)

    def _granted(self, lease_id: str, now_ms: int) -> None:
        asked_ms, swaps = self._asked.pop(lease_id), self._own.pop(lease_id)
        until_ms, in_swaps_ms = asked_ms, 0
        for began_ms, ended_ms in sorted(swaps):
            in_swaps_ms += max(0, ended_ms - max(began_ms, until_ms))
            until_ms = max(until_ms, ended_ms)
        if now_ms > asked_ms:
            waits = self.found.setdefault(self._sizes[lease_id], [])
            waits.append((now_ms - asked_ms, now_ms - asked_ms - in_swaps_ms))


def size_of(spec: LeaseSpec) -> str:
    """Return the class of a lease."""
    return f"{spec.devices} GPUs" if spec.devices > 1 else f"{spec.reserve_mib // 1024} GiB"


def measure(task: Task) -> Waits:
    """Return the waits of one seed."""
    waits = Waits()
    trace = synthetic_sessions(task.users, 1, task.seed, Load(several_percent=task.several_percent))
    simulate(machine(task.devices), trace, watch=waits.watch)
    return waits


def summary(runs: Sequence[Waits]) -> dict[str, dict[str, float]]:
    """Return the figures of each size over all runs, seconds; zeros count in the waits."""
    rows: dict[str, dict[str, float]] = {}
    for size in sorted(
        {size for run in runs for size in run.cells}, key=lambda one: ("GPUs" in one, int(one.split()[0]))
    ):
        cells = sum(run.cells.get(size, 0) for run in runs)
        found = [wait for run in runs for wait in run.found.get(size, [])]
        none = [0] * max(0, cells - len(found))
        waits, queue = ([*none, *sorted(times)] for times in (zip(*found, strict=True) if found else ((), ())))
        named = [nearest_rank(times, percent) / 1000 for times in (waits, queue) for percent in (95, 100)]
        values = (float(cells), round(100 * len(found) / cells, 1) if cells else 0.0, *named)
        rows[size] = dict(zip(_COLUMNS, values, strict=True))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    made = parser(__doc__.splitlines()[0], several_gpus=True)
    made.add_argument("--devices", type=int, default=6, metavar="N", help="so many devices of 80 GiB (default: 6)")
    options = read(made, arguments)
    tasks = [Task(seed, options.users, options.devices, options.several_gpus) for seed in options.seeds]
    rows = summary(spread_out(measure, tasks, options.jobs, "seeds"))
    sys.stdout.write(f"| lease | {' | '.join(_COLUMNS)} |\n|---|{'---:|' * len(_COLUMNS)}\n")
    for size, values in rows.items():
        sys.stdout.write(f"| {size} | {' | '.join(f'{values[column]:,.10g}' for column in _COLUMNS)} |\n")
    write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
