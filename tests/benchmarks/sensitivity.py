"""What each assumption about the load does to the simulator's figures.

    python -m tests.benchmarks.sensitivity [--seeds 20] [--users 50] [--jobs 2] [--json FILE] [--gpus-per-host 8]

For each seed the benchmark finds the hosts that the usual load needs for a 95th percentile of waits of 3 s. Then it changes one switch at
a time and runs the same users on those hosts. The table has the differences to the usual load, as medians over the seeds with 95 %
intervals (sign test). The last column is how many more devices the changed load needs for the 3 s. If the largest session needs more
devices than the usual load, the changed load gets these. With `--gpus-per-host 0` all devices are in one host. Weekends are compared with
a week without free days, in separate rows.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fractional_gpu.simulator.load import Load, Memory, Pace, synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks.simulated import (
    FIGURES,
    GOAL,
    figures,
    heading,
    least,
    machine,
    needed,
    parser,
    read,
    spread_out,
    table,
    write_json,
)

USUAL = Load()
SWITCHES = {
    "short cells": replace(USUAL, pace=Pace.SHORT),
    "memory of cells": replace(USUAL, memory=Memory.CELL),
    "one GPU each": replace(USUAL, several_percent=0),
    "all three, as before": replace(USUAL, pace=Pace.SHORT, memory=Memory.CELL, several_percent=0),
    "40 % in classes": replace(USUAL, joint_percent=40),
    "lunch of 45 min": replace(USUAL, lunch_ms=45 * 60_000),
    "three time zones": replace(USUAL, time_zones=3),
    "asked wrong by 50 %": replace(USUAL, ask_error_percent=50),
    "5 % of the swaps fail": replace(USUAL, failed_swaps_percent=5),
    "20 % urgent users": replace(USUAL, urgent_percent=20),
}
"""One switch each, for a day."""
WEEKENDS = {"weekends": replace(USUAL, weekends=True)}
"""For a week: within a day they change nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """One load of one seed, on `devices` devices; 0: on those that it needs."""

    load: Load
    seed: int
    users: int
    devices: int = 0
    each: int = 0  # devices of a host; 0: all in one
    days: int = 1


def measure(task: Task) -> dict[str, float]:
    """Return the figures of a task."""
    trace, load = synthetic_sessions(task.users, task.days, task.seed, task.load), task.load

    def on(count: int) -> Sequence[Host]:
        return machine(count, each=task.each, failed_swaps_percent=load.failed_swaps_percent, seed=task.seed)

    enough = needed(lambda count: simulate(on(count), trace, goal=GOAL), trace, task.each)
    if not task.devices:
        return figures(enough, enough.devices)
    return figures(simulate(on(max(task.devices, least(trace))), trace), enough.devices)


def differences(usual: Sequence[dict[str, float]], turned: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return each figure's difference, seed by seed."""
    return {name: [after[name] - before[name] for before, after in zip(usual, turned, strict=True)] for name in FIGURES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    made = parser(__doc__.splitlines()[0])
    made.add_argument(
        "--week", type=int, default=7, metavar="DAYS", help="days of the rows about weekends (default: 7)"
    )
    options = read(made, arguments)
    seeds = options.seeds
    sys.stdout.write(heading(options, "the usual load, and differences to it:"))
    found: dict[str, list[dict[str, float]]] = {}
    rows: list[tuple[str, Mapping[str, Sequence[float]]]] = []
    for days, name, switches in ((1, "usual", SWITCHES), (options.week, "usual, for a week", WEEKENDS)):
        usual = [Task(USUAL, seed, options.users, each=options.gpus_per_host, days=days) for seed in seeds]
        found[name] = spread_out(measure, usual, options.jobs, name)
        tasks = [
            replace(task, load=load, devices=int(before["devices needed"]))
            for load in switches.values()
            for task, before in zip(usual, found[name], strict=True)
        ]
        done = spread_out(measure, tasks, options.jobs, "switches")
        rows.append((name, {column: [one[column] for one in found[name]] for column in FIGURES}))
        for at, switch in enumerate(switches):
            found[switch] = done[at * len(seeds) : (at + 1) * len(seeds)]
            rows.append((switch, differences(found[name], found[switch])))
    sys.stdout.write(table("load", FIGURES, rows))
    write_json(options.json, {"seeds": list(seeds), **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
