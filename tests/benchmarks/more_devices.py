"""What more devices bring: the delay of the same users on ever more of them, with the pool that is shipped.

    python -m tests.benchmarks.more_devices [--seeds 20] [--users 50] [--devices 64,72,88] [--jobs 2] [--json FILE]
        [--several-gpus PERCENT] [--gpus-per-host 8]

The table has the median over the seeds and its 95 % interval (sign test). The users of a seed are the same in each row. With
`--gpus-per-host 0` all devices are in one host; else numbers of devices are rounded up to whole hosts. Ends with status 1
if users are later (95 of 100 users' 95th percentile) in one row than in the row above beyond luck.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.simulation import simulate
from tests.benchmarks.simulated import heading, machine, mean_s, of_seeds, parser, read, spread_out, table, write_json
from tests.benchmarks.stats import sign_test

LATE = "95 of 100 users' p95 late, s"
COLUMNS = ("waited, %", "p95 late, s", "mean late, s", LATE, "worst user's p95 late, s", "worst user's p95 stretch")
_LUCK = 0.05


@dataclass(frozen=True, slots=True)
class Task:
    """One seed."""

    seed: int
    users: int
    several_percent: int
    devices: tuple[int, ...]
    each: int = 0  # devices of a host; 0: all in one


def measure(task: Task) -> dict[str, dict[str, float]]:
    """Return COLUMNS by the number of devices. Raises SimulationError where a session needs more devices than there are."""
    trace = synthetic_sessions(task.users, 1, task.seed, Load(several_percent=task.several_percent))
    found = {}
    for count in task.devices:
        result = simulate(machine(count, each=task.each), trace)
        users = result.lateness.of_users()
        values = (
            result.waits.nonzero_percent(),
            result.lateness.cells.percentile_ms(95) / 1000,
            mean_s(result.lateness.cells),
            users["p95"],
            users["worst"],
            result.lateness.stretch_of_users()["worst"],
        )
        found[str(result.devices)] = dict(zip(COLUMNS, values, strict=True))
    return found


def rises(done: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return a sentence for each step to more devices that makes users later, beyond luck."""
    said = []
    steps = list(pairwise(done[0]))
    for fewer, more in steps:
        test = sign_test([one[fewer][LATE] for one in done], [one[more][LATE] for one in done])
        if test.luck(len(steps)) < _LUCK:
            said.append(f"from {fewer} to {more} devices users are later in {test.lower} seeds of {len(done)}")
    return said


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        numbers = (0,)
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; numbers from 1 on with commas between them are")
    return numbers


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    made = parser(__doc__.splitlines()[0], several_gpus=True)
    made.add_argument(
        "--devices",
        type=_numbers,
        default=(64, 72, 88, 104, 120, 160, 200),
        metavar="N,N,...",
        help="numbers of devices (default: 64,72,88,104,120,160,200)",
    )
    options = read(made, arguments)
    tasks = [
        Task(seed, options.users, options.several_gpus, options.devices, options.gpus_per_host)
        for seed in options.seeds
    ]
    done = spread_out(measure, tasks, options.jobs, "seeds")
    sys.stdout.write(heading(options, "the pool that is shipped"))
    sys.stdout.write(table("devices", COLUMNS, of_seeds(done, COLUMNS)))
    said = rises(done)
    sys.stdout.write(
        "\n" + ("\n".join(said) if said else "No step to more devices makes users later beyond luck.") + "\n"
    )
    write_json(options.json, {"seeds": list(options.seeds), "devices": done})
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
