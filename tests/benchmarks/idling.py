"""When should idle kernels leave? `idle_after: auto` and every fixed time.

    python -m tests.benchmarks.idling [--seeds 20] [--users 30] [--jobs 2] [--json FILE]

Each user has whole GPUs, enough for all sessions, so no kernel leaves for another one. A rule costs the GPU hours that kernels hold, and
the time that cells wait for their kernels to return. There are two loads: long cells in few sessions, and many short cells
(docs/simulator.md). Fixed times are compared with `auto` at several prices for holding. The command exits with 1 if a fixed time beats a
price of `auto` by more than 2 % in both figures.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fractional_gpu.core.model import Foresight, PoolSpec
from fractional_gpu.simulator.load import Load, Memory, Pace, synthetic_sessions
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks.simulated import (
    heading,
    machine,
    mean_s,
    of_seeds,
    parser,
    read,
    spread_out,
    table,
    with_pool,
    write_json,
)

LOADS = {
    "long cells": Load(several_percent=0),
    "short cells": Load(pace=Pace.SHORT, memory=Memory.CELL, several_percent=0),
}
WHOLE = PoolSpec(name="default", devices=(), fractions_milli=(1000,), foresight=Foresight.OFF)
FIXED_S = (0, 15, 60, 180, 300, 600, 1800, 3600)
PRICES = (0.02, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
RULES = {
    **{f"after {seconds} s": replace(WHOLE, idle_after_ms=seconds * 1000) for seconds in FIXED_S},
    **{f"auto, {price:g} an hour": replace(WHOLE, hold_price_milli=int(price * 1000)) for price in PRICES},
    "never": WHOLE,
}
COLUMNS = ("held, GPU hours", "mean wait, s", "p95 wait, s", "waited, %")
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Task:
    """One load of one seed."""

    load: str
    seed: int
    users: int


def measure(task: Task) -> dict[str, dict[str, float]]:
    """Return COLUMNS of every rule."""
    trace = synthetic_sessions(task.users, 1, task.seed, LOADS[task.load])
    found = {}
    for name, pool in RULES.items():
        result = simulate([with_pool(host, pool) for host in machine(len(trace))], trace)
        values = (
            result.held / 3.6e9,
            mean_s(result.waits),
            result.waits.percentile_ms(95) / 1000,
            result.waits.nonzero_percent(),
        )
        found[name] = dict(zip(COLUMNS, values, strict=True))
    return found


def beaten(means: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a sentence for each price of `auto` that a fixed time beats in both held hours and mean wait."""
    said = []
    held, wait = COLUMNS[:2]
    for name in means:
        for other in means:
            fixed = name.startswith("auto") and other.startswith("after")
            if fixed and all(means[other][one] < means[name][one] * (1 - TOLERANCE) for one in (held, wait)):
                said.append(f"{name} is beaten by {other}")
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table for each load."""
    made = parser(__doc__.splitlines()[0])
    made.set_defaults(users=30)
    options = read(made, arguments)
    found, status = {}, 0
    for load in LOADS:
        done = spread_out(measure, [Task(load, seed, options.users) for seed in options.seeds], options.jobs, load)
        found[load] = done
        sys.stdout.write(heading(options, f"{load}:") + table("idle_after", COLUMNS, of_seeds(done, COLUMNS)) + "\n")
        means = {name: {column: fmean(one[name][column] for one in done) for column in COLUMNS} for name in RULES}
        lost = beaten(means)
        status |= bool(lost)
        sys.stdout.write("".join(f"{line}\n" for line in lost or ["no fixed time beats any price of auto"]) + "\n")
    write_json(options.json, {"seeds": list(options.seeds), "runs": found})
    return status


if __name__ == "__main__":
    sys.exit(main())
