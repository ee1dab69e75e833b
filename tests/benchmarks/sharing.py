"""Ways of sharing GPUs side by side, on the devices that fixed fractions need.

    python -m tests.benchmarks.sharing [--seeds 20] [--users 50] [--jobs 2] [--json FILE] [--several-gpus PERCENT] [--gpus-per-host 8]

For each seed, the hosts are found on which fixed fractions (`static-fraction`) keep the 95th percentile of waits, those at the door
included, at 3 s. All ways run on those: fixed fractions, the same with MPS, whole GPUs that are suspended, and this project with the
pool that is shipped, with `compute` `pack`, and with sessions that go to the host with the most room (the door `most-free`).
The table has the median over the seeds and its 95 % interval (sign test). The last two columns are how many devices each way needs by
itself to keep to the 3 s, as whole hosts, and how much longer the worst user's cells take on those. With `--gpus-per-host 0` all devices
are in one host, and single ones are counted.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fractional_gpu.core.model import Compute, PoolSpec
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.hosts import Door, DoorRule
from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session
from tests.benchmarks.simulated import (
    FIGURES,
    GOAL,
    SHIPPED,
    figures,
    heading,
    machine,
    needed,
    of_seeds,
    parser,
    read,
    spread_out,
    table,
    with_pool,
    write_json,
)

Run = Callable[[Sequence[Host], Sequence[Session], Goal | None], Result]


def _baseline(name: str) -> Run:
    return lambda hosts, trace, goal: run_baseline(name, hosts, trace, goal=goal)


def _ours(pool: PoolSpec, door: DoorRule = DoorRule.FIT) -> Run:
    def run(hosts: Sequence[Host], trace: Sequence[Session], goal: Goal | None) -> Result:
        ours = [with_pool(host, pool) for host in hosts]
        return simulate(ours, trace, door=Door(ours, trace, door), goal=goal)

    return run


OWN = "worst user's p95 stretch on those"
WAYS: dict[str, Run] = {
    "static-fraction": _baseline("static-fraction"),
    "mps-pack": _baseline("mps-pack"),
    "whole-gpu-suspend": _baseline("whole-gpu-suspend"),
    "ours, as shipped": _ours(SHIPPED),
    "ours, pack": _ours(replace(SHIPPED, compute=Compute.PACK)),
    "ours, placed where most is free": _ours(SHIPPED, DoorRule.MOST_FREE),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One seed."""

    seed: int
    users: int
    several_percent: int
    each: int = 0  # devices of a host; 0: all in one


def _on(way: Run, trace: Sequence[Session], each: int, count: int) -> Result:
    return way(machine(count, each=each), trace, GOAL)


def measure(task: Task) -> dict[str, dict[str, float]]:
    """Return the figures of all ways on the devices that fixed fractions need."""
    trace = synthetic_sessions(task.users, 1, task.seed, Load(several_percent=task.several_percent))
    found = {name: needed(partial(_on, way, trace, task.each), trace, task.each) for name, way in WAYS.items()}
    count = found["static-fraction"].devices
    hosts = machine(count, each=task.each)
    return {
        name: {
            "devices": float(count),
            **figures(way(hosts, trace, None), found[name].devices),
            OWN: found[name].lateness.stretch_of_users()["worst"],
        }
        for name, way in WAYS.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    options = read(parser(__doc__.splitlines()[0], several_gpus=True), arguments)
    tasks = [Task(seed, options.users, options.several_gpus, options.gpus_per_host) for seed in options.seeds]
    done = spread_out(measure, tasks, options.jobs, "seeds")
    columns = ("devices", *FIGURES, OWN)
    sys.stdout.write(heading(options, "goal: 95 % of the waits at most 3 s"))
    sys.stdout.write(table("way of sharing", columns, of_seeds(done, columns)))
    write_json(options.json, {"seeds": list(options.seeds), "ways": done})
    return 0


if __name__ == "__main__":
    sys.exit(main())
