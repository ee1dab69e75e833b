"""How wrong the division of a device's energy is: the meter's and two others, compared with what the simulator knows.

    python -m tests.benchmarks.energy_division [--seeds 20] [--jobs 2] [--json FILE]

The simulator knows what each lease's cells have drawn; no meter does. Three divisions of the same readings (one a minute) are compared for
each lease and day:

- `ours`: the meter's, with the use of the device measured for all leases, for half of them or for none. For the others it takes their
  share. In `work by time` all have the same use, so that busy time alone divides the work.
- `by share`: all energy among the leases that hold the device, by their shares and times.
- `by busy time`: all energy, the idle draw included, among the leases that run cells, by their run times.

`simulator.metering` describes the noise of draws and measured uses.

Whose the idle draw of a device is, is a matter of taste, so the truth has two forms: it belongs to the leases that hold the device, by
their shares, or to those that work there, evenly. The rest is the pool's. The tables have medians over the seeds.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fractional_gpu.core.metering.meter import Holding, Meter, _Device, _Part
from fractional_gpu.core.metering.usage import Party, UsageRow, divided
from fractional_gpu.simulator.load import Habit, Load, Memory, Pace, synthetic_sessions
from fractional_gpu.simulator.metering import BEGINS_MS, DAY_MS, Metering
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks.simulated import cell, machine, read, spread_out, write_json
from tests.benchmarks.stats import median, percentile
from tests.support.simulated_draw import Draw, TruthfulMeter

NOISES = (0, 5, 20)
OURS, SOME = "ours, use measured for all", "ours, for half of the leases"
NONE, TIME = "ours, for none", "ours, for none, work by time"
SHARE, BUSY = "by share", "by busy time"
DIVISIONS = (OURS, SOME, NONE, TIME, SHARE, BUSY)
BY_SHARE, BY_WORK = "idle draw by share", "idle draw by work"
TRUTHS = (BY_SHARE, BY_WORK)
FIGURES = ("misplaced, %", "half of the lease-days within, %", "95 of 100 lease-days within, %", "95 of 100 within, Wh")
SHARES = ("pool", "lease-days without a cell", "half that worked least", "others", "tenth that worked most")
_MJ_PER_WH = 3_600_000
_LEAST_MJ = 10 * _MJ_PER_WH  # an error of a lease-day of less is not worth a percentage

LeaseDays = dict[tuple[int, str], int]
"""mJ by day and lease; an empty lease is the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A load, and its numbers of devices and users."""

    load: Load
    users: int
    devices: int


LOADS = {
    "short cells": Shape(load=Load(pace=Pace.SHORT, memory=Memory.CELL, several_percent=0), users=40, devices=4),
    "all habits": Shape(load=Load(habit=Habit.MIXED), users=40, devices=8),
}


# -- divisions ---------------------------------------------------------------------------------------------------------


class ByWeight(Meter):
    """Divides all that a device drew since the last reading by one weight; where all weights are 0 it is the pool's."""

    def __init__(self, weight: Callable[[_Part], int]) -> None:
        super().__init__()
        self._weight = weight

    def _divide(
        self,
        device_id: str,
        device: _Device,
        drawn_mj: int,
        passed_ms: int,  # noqa: ARG002 - as its base
        wall_ms: int,
        *,
        quiet: bool,  # noqa: ARG002
        utilisation: Mapping[str, int],  # noqa: ARG002
    ) -> None:
        parts, device.parts = device.parts, {}
        weights = {name: self._weight(part) for name, part in sorted(parts.items())}
        if not any(weights.values()):
            weights = {"": 1}
        hour_s, _ = self._local(wall_ms)
        for name, energy_mj in zip(weights, divided(drawn_mj, list(weights.values())), strict=True):
            party = parts[name].party if name in parts else Party(pool=device.pool)
            self._row(hour_s, name, device_id, party).energy_mj += energy_mj


class Compared(Meter):
    """A meter that forwards all calls to several others, except the use of leases that they do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.others: dict[str, Meter] = {
            SOME: Meter(),
            NONE: Meter(),
            TIME: Meter(),
            SHARE: ByWeight(lambda part: part.occupied_us),
            BUSY: ByWeight(lambda part: part.busy_ms),
        }

    def add_device(
        self, at_ms: int, device_id: str, pool: str, *, idle_mw: int | None = None, counter_mj: int | None = None
    ) -> None:
        super().add_device(at_ms, device_id, pool, idle_mw=idle_mw, counter_mj=counter_mj)
        for other in self.others.values():
            other.add_device(at_ms, device_id, pool, idle_mw=idle_mw, counter_mj=counter_mj)

    def set_lease(self, at_ms: int, wall_ms: int, lease_id: str, holding: Holding | None) -> None:
        super().set_lease(at_ms, wall_ms, lease_id, holding)
        for other in self.others.values():
            other.set_lease(at_ms, wall_ms, lease_id, holding)

    def read_energy(
        self,
        at_ms: int,
        wall_ms: int,
        device_id: str,
        *,
        counter_mj: int | None,
        power_mw: int | None = None,
        quiet: bool = False,
        utilisation: Mapping[str, int] | None = None,
    ) -> int:
        known = utilisation or {}
        some = {lease_id: use for lease_id, use in known.items() if is_in_the_half(lease_id)}
        for name, other in self.others.items():
            told: Mapping[str, int] = {SOME: some, TIME: dict.fromkeys(known, 1)}.get(name, {})
            other.read_energy(
                at_ms, wall_ms, device_id, counter_mj=counter_mj, power_mw=power_mw, quiet=quiet, utilisation=told
            )
        return super().read_energy(
            at_ms, wall_ms, device_id, counter_mj=counter_mj, power_mw=power_mw, quiet=quiet, utilisation=known
        )


def is_in_the_half(lease_id: str) -> bool:
    """Whether the lease is one of the half whose use is measured: by chance, the same in every run."""
    return random.Random(lease_id).random() < 0.5


# -- what is compared ----------------------------------------------------------------------------------------------------


def of_days(rows: Iterable[UsageRow]) -> LeaseDays:
    """Return the energy of each lease-day."""
    found: LeaseDays = {}
    for row in rows:
        key = ((row.key.hour_s * 1000 - BEGINS_MS) // DAY_MS, row.key.lease_id)
        found[key] = found.get(key, 0) + row.usage.energy_mj
    return found


def truths(draw: Draw) -> dict[str, LeaseDays]:
    """Return both forms of the truth."""
    found: dict[str, LeaseDays] = {}
    for name, idle in ((BY_SHARE, draw.idle_by_share), (BY_WORK, draw.idle_by_work)):
        keys = draw.work.keys() | idle.keys()
        found[name] = {key: (draw.work.get(key, 0) + idle.get(key, 0)) // 1_000_000 for key in keys}
    return found


def errors(given: LeaseDays, true: LeaseDays) -> dict[str, float]:
    """Return FIGURES: how much of all energy is given to the wrong one, and how far off lease-days are.

    A percentage is of what the lease-day really drew, which counts as 10 Wh where it drew less.
    """
    keys = [key for key in given.keys() | true.keys() if key[1]]
    off = {key: abs(given.get(key, 0) - true.get(key, 0)) for key in keys}
    pool_mj = sum(abs(given.get(key, 0) - true.get(key, 0)) for key in given.keys() | true.keys() if not key[1])
    relative = [100 * off[key] / max(_LEAST_MJ, true.get(key, 0)) for key in keys]
    values = (
        100 * (sum(off.values()) + pool_mj) / 2 / sum(true.values()),  # each misplaced joule is missing elsewhere
        percentile(relative, 50),
        percentile(relative, 95),
        percentile([one / _MJ_PER_WH for one in off.values()], 95),
    )
    return dict(zip(FIGURES, values, strict=True))


def given_to(given: LeaseDays, draw: Draw) -> dict[str, float]:
    """Return which percentage of all energy goes to whom (SHARES), by what the lease-days' cells really drew."""
    worked = sorted((key for key in given if key[1] and draw.work.get(key)), key=lambda key: draw.work[key])
    half, tenth = len(worked) // 2, len(worked) - len(worked) // 10
    kinds = (
        [key for key in given if not key[1]],
        [key for key in given if key[1] and not draw.work.get(key)],
        worked[:half],
        worked[half:tenth],
        worked[tenth:],
    )
    whole = sum(given.values())
    return {name: 100 * sum(given[key] for key in keys) / whole for name, keys in zip(SHARES, kinds, strict=True)}


@dataclass(frozen=True, slots=True)
class Task:
    """One seed of one load, with so much noise."""

    load: str
    noise: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a task. `errors`: by truth and division; `shares`: by division, and of the truths."""

    task: Task
    kwh: float
    lease_days: int
    errors: dict[str, dict[str, dict[str, float]]]
    shares: dict[str, dict[str, float]]


def measure(task: Task) -> Measured:
    """Simulate a day, and compare."""
    shape = LOADS[task.load]
    trace = [one for one in synthetic_sessions(shape.users, 1, task.seed, shape.load) if one.most_gpus <= 1]
    meter = TruthfulMeter(Metering(noise_percent=task.noise, seed=task.seed), make=Compared)
    simulate(machine(shape.devices, seed=task.seed), trace, meter=meter)
    draw, compared = meter.truth, meter.hosts[0].meter
    assert isinstance(compared, Compared)
    wall_ms = BEGINS_MS + meter.ended_ms
    given = {OURS: of_days(meter.rows)}
    given |= {name: of_days(other.take(meter.ended_ms, wall_ms)) for name, other in compared.others.items()}
    true = truths(draw)
    return Measured(
        task=task,
        kwh=sum(given[OURS].values()) / _MJ_PER_WH / 1000,
        lease_days=sum(bool(lease_id) for _, lease_id in given[OURS]),
        errors={form: {name: errors(given[name], true[form]) for name in DIVISIONS} for form in TRUTHS},
        shares={name: given_to(one, draw) for name, one in (given | true).items()},
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def error_table(done: Sequence[Measured], truth: str) -> str:
    """Return a Markdown table of errors against one form of the truth: medians over the seeds and their intervals, by division."""
    misplaced, *within = FIGURES
    columns = [(misplaced, noise) for noise in NOISES] + [(figure, NOISES[1]) for figure in within]
    heads = [f"{figure} (noise {noise} %)" for figure, noise in columns]
    lines = [f"| division | {' | '.join(heads)} |", "|---|" + "---:|" * len(columns)]
    for division in DIVISIONS:
        cells = [
            cell([one.errors[truth][division][figure] for one in done if one.task.noise == noise])
            for figure, noise in columns
        ]
        lines.append(f"| {division} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def share_table(done: Sequence[Measured], noise: int) -> str:
    """Return a Markdown table of SHARES, of the truths and of all divisions: medians over the seeds."""
    lines = [f"| division | {' | '.join(f'{one}, %' for one in SHARES)} |", "|---|" + "---:|" * len(SHARES)]
    runs = [one for one in done if one.task.noise == noise]
    for name in (*TRUTHS, *DIVISIONS):
        shown = f"truth, {name}" if name in TRUTHS else name
        cells = [f"{median([one.shares[name][whose] for one in runs]):.1f}" for whose in SHARES]
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def report(done: Sequence[Measured]) -> str:
    """Return all tables."""
    parts = []
    for name, shape in LOADS.items():
        runs = [one for one in done if one.task.load == name]
        days, kwh = median([one.lease_days for one in runs]), median([one.kwh for one in runs])
        parts.append(
            f"{name}: {shape.users} users on {shape.devices} devices, {len({one.task.seed for one in runs})} seeds, "
            f"{days:.0f} lease-days and {kwh:.0f} kWh each\n"
        )
        parts += [f"Error, truth: {truth}\n\n{error_table(runs, truth)}" for truth in TRUTHS]
        parts.append(f"Who is given what, noise {NOISES[1]} %\n\n{share_table(runs, NOISES[1])}")
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the tables."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--seeds", type=int, default=20, metavar="N", help="number of days of each load (default: 20)")
    made.add_argument("--first", type=int, default=1, metavar="S", help="the first of their seeds (default: 1)")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (default: one a core)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every seed's figures there")
    options = read(made, arguments)
    tasks = [Task(load, noise, seed) for seed in options.seeds for load in LOADS for noise in NOISES]
    done = spread_out(measure, tasks, options.jobs, "days")
    sys.stdout.write(report(done))
    write_json(options.json, [asdict(one) for one in done])
    return 0


if __name__ == "__main__":
    sys.exit(main())
