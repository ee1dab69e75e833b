"""What each assumption about the load does to the simulator's figures.

    python -m tests.benchmarks.sensitivity [--seeds 20] [--users 50] [--jobs 2] [--json FILE]

For each seed, the devices are found that the usual load needs for a 95th percentile of waits of 3 s. Then one switch at a time is turned,
and the same users are simulated on those devices: the table has the differences to the usual load, seed by seed, as the median over the
seeds and its 95 % interval (sign test). The last column is how many devices more or fewer the turned load needs to keep to the 3 s.
A load whose largest session needs more devices than were found runs on as many as that needs. All devices are in one host.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fractional_gpu.simulator.load import Load, Memory, Pace, synthetic_sessions
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks.simulated import (
    FIGURES,
    GOAL,
    figures,
    least,
    machine,
    needed,
    parser,
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
"""One switch each. Weekends are not here: within a day they change nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """One load of one seed, on so many devices; 0: on as many as it needs."""

    load: Load
    seed: int
    users: int
    devices: int = 0


def measure(task: Task) -> dict[str, float]:
    """Return the figures of a task."""
    trace, load = synthetic_sessions(task.users, 1, task.seed, task.load), task.load

    def run(count: int) -> Result:
        host = machine(count, failed_swaps_percent=load.failed_swaps_percent, seed=task.seed)
        return simulate(host, trace, goal=GOAL)

    enough = needed(run, trace)
    if not task.devices:
        return figures(enough, enough.devices)
    host = machine(max(task.devices, least(trace)), failed_swaps_percent=load.failed_swaps_percent, seed=task.seed)
    return figures(simulate(host, trace), enough.devices)


def differences(usual: Sequence[dict[str, float]], turned: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return each figure's difference, seed by seed."""
    return {name: [after[name] - before[name] for before, after in zip(usual, turned, strict=True)] for name in FIGURES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    options = parser(__doc__.splitlines()[0]).parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    usual = spread_out(measure, [Task(USUAL, seed, options.users) for seed in seeds], options.jobs, "the usual load")
    tasks = [
        Task(load, seed, options.users, int(before["devices needed"]))
        for load in SWITCHES.values()
        for seed, before in zip(seeds, usual, strict=True)
    ]
    done = spread_out(measure, tasks, options.jobs, "switches")
    turned = {name: done[at * len(seeds) : (at + 1) * len(seeds)] for at, name in enumerate(SWITCHES)}
    sys.stdout.write(
        f"{options.users} users, seeds {seeds[0]} to {seeds[-1]}. The usual load, and differences to it:\n\n"
    )
    rows = [("usual", {name: [one[name] for one in usual] for name in FIGURES})]
    rows += [(name, differences(usual, turned[name])) for name in SWITCHES]
    sys.stdout.write(table("load", FIGURES, rows))
    write_json(options.json, {"seeds": list(seeds), "usual": usual, **turned})
    return 0


if __name__ == "__main__":
    sys.exit(main())
