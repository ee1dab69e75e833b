"""What each assumption about the load does to the simulator's figures.

    python -m tests.benchmarks.sensitivity [--seeds 20] [--users 50] [--jobs 2] [--json FILE] [--gpus-per-host 8]

For each seed, the hosts are found that the usual load needs for a 95th percentile of waits of 3 s. Then one switch at a time is turned,
and the same users are simulated on those devices: the table has the differences to the usual load, seed by seed, as the median over the
seeds and its 95 % interval (sign test). The last column is how many devices more or fewer the turned load needs to keep to the 3 s.
A load whose largest session needs more devices than were found runs on as many as that needs. With `--gpus-per-host 0` all devices are
in one host. Weekends are compared over a week: that of the usual load, on the devices that it needs for that, with the same week in which
two days are free. Its figures are in rows of their own.
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
    """One load of one seed, on so many devices; 0: on as many as it needs."""

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
