"""What signs before cells bring, and what false ones cost.

    python -m tests.benchmarks.foresight [--seeds 20] [--users 50] [--jobs 2] [--json FILE] [--foresight 20] [--gpus-per-host 0]

For each seed the benchmark finds the devices that the load needs without foresight for a 95th percentile of waits of 3 s. On these the same
users run again: their notebooks give a sign some seconds before each GPU cell, and 0, 30 or 70 % of all signs are false. Expected kernels
resume if there is room ("free"), or idle ones make room for them ("displace"), in swaps of at most 2 s, the default, or 30 s ("large ones,
too"). The table has medians over the seeds with 95 % intervals (sign test).

Cells are short (2 min at the median), with one GPU each and the memory of one cell of the trace. With the long cells of the usual load
hardly anything is swapped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fractional_gpu.core.model import Foresight, PoolSpec
from fractional_gpu.simulator.load import Load, Memory, Pace, Signs, synthetic_sessions
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session
from tests.benchmarks.simulated import (
    GOAL,
    SHIPPED,
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

LOAD = Load(pace=Pace.SHORT, memory=Memory.CELL, several_percent=0)
FALSE_PERCENT = (0, 30, 70)
KINDS = {
    "free": replace(SHIPPED, foresight=Foresight.FREE),
    "displace": replace(SHIPPED, foresight=Foresight.DISPLACE),
    "displace, large ones, too": replace(SHIPPED, foresight=Foresight.DISPLACE, foresight_swap_ms=30_000),
}
COLUMNS = ("devices", "p95 wait, s", "p99 wait, s", "waited, %", "p95 late, s", "early resumes", "moved in vain, GiB")
WITHOUT = "without foresight"
OFF = replace(SHIPPED, foresight=Foresight.OFF)


@dataclass(frozen=True, slots=True)
class Task:
    """One seed."""

    seed: int
    users: int
    foresight_ms: int
    each: int


def _on(trace: Sequence[Session], each: int, count: int) -> Result:
    hosts = machine(count, each=each)
    return simulate([with_pool(host, OFF) for host in hosts], trace, goal=GOAL)


def measure(task: Task) -> dict[str, dict[str, float]]:
    """Return COLUMNS without foresight, and with each kind of it."""
    trace = synthetic_sessions(task.users, 1, task.seed, LOAD)
    devices = needed(partial(_on, trace, task.each), trace, task.each).devices
    found = {WITHOUT: _row(trace, task, devices, OFF, None)}
    for name, pool in KINDS.items():
        for percent in FALSE_PERCENT:
            found[f"{name}, {percent} % false"] = _row(trace, task, devices, pool, percent)
    return found


def _row(
    trace: Sequence[Session], task: Task, devices: int, pool: PoolSpec, false_percent: int | None
) -> dict[str, float]:
    signs = Signs()
    if false_percent is not None:
        signs = Signs(foresight_ms=task.foresight_ms, false_percent=false_percent)
    hosts = [replace(with_pool(host, pool), signs=signs, seed=task.seed) for host in machine(devices, each=task.each)]
    result = simulate(hosts, trace)
    values = (
        float(devices),
        result.waits.percentile_ms(95) / 1000,
        result.waits.percentile_ms(99) / 1000,
        result.waits.nonzero_percent(),
        result.lateness.cells.percentile_ms(95) / 1000,
        float(result.early_resumes),
        result.vain_mib / 1024,
    )
    return dict(zip(COLUMNS, values, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    made = parser(__doc__.splitlines()[0])
    made.set_defaults(gpus_per_host=0)
    made.add_argument(
        "--foresight", type=int, default=20, metavar="S", help="seconds from a sign to its cell (default: 20)"
    )
    options = read(made, arguments)
    tasks = [Task(seed, options.users, options.foresight * 1000, options.gpus_per_host) for seed in options.seeds]
    done = spread_out(measure, tasks, options.jobs, "seeds")
    sys.stdout.write(heading(options, f"signs {options.foresight} s before cells:"))
    sys.stdout.write(table("foresight", COLUMNS, of_seeds(done, COLUMNS)))
    write_json(options.json, {"seeds": list(options.seeds), "runs": done})
    return 0


if __name__ == "__main__":
    sys.exit(main())
