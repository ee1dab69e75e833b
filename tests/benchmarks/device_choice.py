"""What it brings on notebooks' loads to choose devices by the mix of sizes that is asked for, instead of by best fit.

    python -m tests.benchmarks.device_choice [--seeds 20] [--users 50] [--jobs 2] [--json FILE] [--several-gpus PERCENT] [--devices 6]

The same traces run on the same devices twice: with the mix that the arbiter learns, and with none, which is best fit. The pool is the
one that is shipped, and the same with `compute` `pack`, in which memory alone decides. The table has the mean over the seeds of both, and
in how many seeds the mix was better and worse.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from unittest.mock import patch

from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.forecasts.sizes import NO_ASKS
from fractional_gpu.core.model import Compute
from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks.simulated import SHIPPED, heading, machine, parser, read, spread_out, write_json

POOLS = {
    "as shipped": SHIPPED,
    "pack": replace(SHIPPED, compute=Compute.PACK),
}
FIGURES = ("waited, %", "p95 wait, s", "p95 late, s", "95 of 100 users' p95 late, s", "suspends")


@dataclass(frozen=True, slots=True)
class Task:
    """One seed. `each`: devices of a host; 0: all in one."""

    seed: int
    users: int
    devices: int
    several_percent: int
    each: int = 0


def _figures(result: Result) -> dict[str, float]:
    values = (
        result.waits.nonzero_percent(),
        result.waits.percentile_ms(95) / 1000,
        result.lateness.cells.percentile_ms(95) / 1000,
        result.lateness.of_users()["p95"],
        float(result.suspends),
    )
    return dict(zip(FIGURES, values, strict=True))


def measure(task: Task) -> dict[str, dict[str, dict[str, float]]]:
    """Return by pool the figures with the mix (`mix`) and without (`best fit`)."""
    trace, found = synthetic_sessions(task.users, 1, task.seed, Load(several_percent=task.several_percent)), {}
    for name, pool in POOLS.items():
        hosts = machine(task.devices, pool, each=task.each)
        with patch.object(Forecasts, "asks", lambda _self, _pool: NO_ASKS):
            without = _figures(simulate(hosts, trace))
        found[name] = {"best fit": without, "mix": _figures(simulate(hosts, trace))}
    return found


def as_table(done: Sequence[dict[str, dict[str, dict[str, float]]]]) -> str:
    """Return a Markdown table of means, and of the seeds in which the mix was better and worse (less is better)."""
    lines = [f"| pool | {' | '.join(FIGURES)} |", "|---|" + "---:|" * len(FIGURES)]
    for name in POOLS:
        cells = []
        for figure in FIGURES:
            pairs = [(one[name]["best fit"][figure], one[name]["mix"][figure]) for one in done]
            better, worse = sum(mix < fit for fit, mix in pairs), sum(mix > fit for fit, mix in pairs)
            fit, mix = (fmean(values) for values in zip(*pairs, strict=True))
            cells.append(f"{fit:.2f} → {mix:.2f} ({better} better, {worse} worse)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    made = parser(__doc__.splitlines()[0], several_gpus=True)
    made.add_argument("--devices", type=int, default=6, metavar="N", help="so many devices in all (default: 6)")
    options = read(made, arguments)
    tasks = [
        Task(seed, options.users, options.devices, options.several_gpus, options.gpus_per_host)
        for seed in options.seeds
    ]
    done = spread_out(measure, tasks, options.jobs, "seeds")
    sys.stdout.write(heading(options, f"{options.devices} devices"))
    sys.stdout.write(as_table(done))
    write_json(options.json, {"seeds": list(options.seeds), "pools": done})
    return 0


if __name__ == "__main__":
    sys.exit(main())
