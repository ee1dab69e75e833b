"""What the benchmarks of the simulator share: options, machines, figures of a run, tables of medians over seeds, work on all cores."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.simulator.experience import Goal, Spread
from fractional_gpu.simulator.load import SEVERAL_PERCENT
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.search import devices_for_cells, fewest
from fractional_gpu.simulator.traces import Session
from tests.benchmarks.stats import median_estimate

DEVICE_MIB = 81_920
Row = tuple[str, Mapping[str, Sequence[float]]]
Task = TypeVar("Task")
Done = TypeVar("Done")
GOAL = Goal(p95_wait_ms=3_000)
SHIPPED = PoolSpec(name="default", devices=())
"""The pool of a broker without a configuration."""
FIGURES = (
    "p95 wait, s",
    "p95 wait at the door, s",
    "waited, %",
    "p95 of the waits, s",
    "p95 late, s",
    "median user's p95 late, s",
    "worst user's p95 late, s",
    "median user's p95 stretch",
    "worst user's p95 stretch",
    "Jain",
    "out of memory",
    "devices needed",
)


def machine(
    count: int,
    pool: PoolSpec | None = None,
    *,
    each: int = 0,
    memory_mib: int = DEVICE_MIB,
    failed_swaps_percent: int = 0,
    seed: int = 1,
) -> tuple[Host, ...]:
    """Return hosts of `each` devices (of 80 GiB by default) in one pool, by default the shipped one, with at least `count` devices in all.

    With `each` 0 all devices are in one host.
    """
    inside = each or count
    names = tuple(f"simulated-{number}" for number in range(inside))
    devices = tuple(DeviceSpec(device_id=name, name="simulated", memory_mib=memory_mib) for name in names)
    host = Host(
        devices=devices, pools=(replace(SHIPPED, devices=names),), failed_swaps_percent=failed_swaps_percent, seed=seed
    )
    return (with_pool(host, pool) if pool is not None else host,) * -(-count // inside)


def with_pool(host: Host, pool: PoolSpec) -> Host:
    """Return the host with another policy for its only pool."""
    return replace(host, pools=(replace(pool, devices=host.pools[0].devices),))


def least(trace: Sequence[Session]) -> int:
    """Return the devices that the largest session needs."""
    return max(1, *(max(session.gpus, session.most_gpus) for session in trace))


def needed(
    run: Callable[[int], Result], trace: Sequence[Session], each: int = 0, memory_mib: int = DEVICE_MIB
) -> Result:
    """Return the run with the fewest devices, or hosts of `each` devices, that keeps GOAL. `run` gets the number of devices.

    Raises SimulationError if one device for each GPU, or one host for each session, is too few.
    """
    (host,) = machine(each or least(trace), each=each, memory_mib=memory_mib)
    start = devices_for_cells(trace, host)
    if not each:
        return fewest(run, GOAL, sum(session.gpus for session in trace), least=least(trace), start=start)
    return fewest(lambda hosts: run(hosts * each), GOAL, len(trace), start=-(-start // each), counted="hosts")


def mean_s(times: Spread) -> float:
    """Return the mean of the times in seconds; 0 of none."""
    return fmean(times.ordered or (0,)) / 1000


def figures(result: Result, devices_needed: int) -> dict[str, float]:
    """Return FIGURES of a run, and how many devices this load or this way of sharing needs to keep GOAL."""
    users, stretch = result.lateness.of_users(), result.lateness.stretch_of_users()
    values = (
        result.waits.percentile_ms(95) / 1000,
        result.doors.percentile_ms(95) / 1000,
        result.waits.nonzero_percent(),
        result.waits.nonzero().percentile_ms(95) / 1000,
        result.lateness.cells.percentile_ms(95) / 1000,
        users["median"],
        users["worst"],
        stretch["median"],
        stretch["worst"],
        result.lateness.jain(),
        float(result.out_of_memory),
        float(devices_needed),
    )
    return dict(zip(FIGURES, values, strict=True))


def parser(what: str, *, several_gpus: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options of all these benchmarks; some have `--several-gpus`, too."""
    made = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seeds", type=int, default=20, metavar="N", help="number of traces (default: 20)")
    made.add_argument("--first", type=int, default=1, metavar="S", help="the first of their seeds (default: 1)")
    made.add_argument("--users", type=int, default=50, metavar="N", help="of each trace (default: 50)")
    made.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (default: one for each core)"
    )
    made.add_argument(
        "--gpus-per-host", type=int, default=8, metavar="N", help="devices of each host; 0: all in one (default: 8)"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write every seed's figures there")
    if several_gpus:
        made.add_argument(
            "--several-gpus",
            type=int,
            default=SEVERAL_PERCENT,
            metavar="PERCENT",
            help=f"of the sessions use 4 or 8 GPUs (default: {SEVERAL_PERCENT})",
        )
    return made


def read(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `seeds` is the range of the seeds then."""
    options = made.parse_args(arguments)
    if options.seeds < 1:
        made.error(f"--seeds {options.seeds} is not allowed; a number from 1 on is")
    options.seeds = range(options.first, options.first + options.seeds)
    return options


def heading(options: argparse.Namespace, about: str) -> str:
    """Return the line above a table: whose figures it has."""
    return f"{options.users} users, seeds {options.seeds[0]} to {options.seeds[-1]}, {about}\n\n"


def of_seeds(done: Sequence[Mapping[str, Mapping[str, float]]], columns: Sequence[str]) -> list[Row]:
    """Return the rows of a table: of each row that the seeds have, the figures of all seeds by column."""
    return [(name, {column: [one[name][column] for one in done] for column in columns}) for name in done[0]]


def spread_out(work: Callable[[Task], Done], tasks: Sequence[Task], jobs: int, what: str) -> list[Done]:
    """Return what `work` makes of each task, in the order of the tasks, computed by `jobs` processes; progress on standard error."""
    done: dict[int, Done] = {}
    began = spoke = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        number = {pool.submit(work, task): at for at, task in enumerate(tasks)}
        for future in as_completed(number):
            done[number[future]] = future.result()
            if time.monotonic() - spoke >= 2 or len(done) == len(tasks):
                spoke = time.monotonic()
                sys.stderr.write(f"{what}: {len(done)} of {len(tasks)} after {spoke - began:.0f} s\n")
    return [done[at] for at in range(len(tasks))]


def table(head: str, columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a Markdown table: of each row and column the median of the seeds and its 95 % interval."""
    lines = [f"| {head} | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, values in rows:
        lines.append(f"| {name} | " + " | ".join(cell(values[column]) for column in columns) + " |")
    return "\n".join(lines) + "\n"


def cell(samples: Sequence[float]) -> str:
    """Return the median of the samples and its sign-test interval; no interval of fewer than six, which say nothing of it."""
    estimate = median_estimate(samples)
    shown = _shown(estimate.value)
    return shown if math.isinf(estimate.low) else f"{shown} ({_shown(estimate.low)} to {_shown(estimate.high)})"


def _shown(value: float) -> str:
    rounded = round(value, 2) or 0.0  # no minus before a zero
    return f"{rounded:,.0f}" if abs(rounded) >= 100 or rounded == int(rounded) else f"{rounded:.2f}"


def write_json(path: Path | None, found: object) -> None:
    """Write every seed's figures, if a file is named."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
