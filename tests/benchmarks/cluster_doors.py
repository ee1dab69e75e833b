"""How jobs fare if an engine chooses nodes by whole GPUs, static shards, the brokers' counts or at random.

    python -m tests.benchmarks.cluster_doors [--seeds 1,2] [--json]

One day of synthetic users with one GPU each, on four hosts of two or four GPUs of 80 GiB, with about five or ten users for each GPU. The
rows are the baseline `reservation`, and runs with `--set door=slurm-shards` and so on.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from fractional_gpu.core.model import DeviceSpec, PoolSpec
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.engine_door import EngineDoor
from fractional_gpu.simulator.hosts import Door, DoorRule
from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session

CASES = ((40, 2), (80, 2), (80, 4), (160, 4))  # users, GPUs of each host
HOSTS = 4
TARGET_MS = 30_000  # as a pool's usual `wait_target`; the usual `wait_bound` is 5 %


def hosts_with(gpus: int) -> tuple[Host, ...]:
    """Return like hosts with that number of GPUs each, and a pool of the usual shares."""
    devices = tuple(
        DeviceSpec(device_id=f"gpu-{number}", name="80GiB", memory_mib=81_920, overhead_mib=0) for number in range(gpus)
    )
    names = tuple(device.device_id for device in devices)
    pool = PoolSpec(name="default", devices=names, fractions_milli=(125, 250, 500, 750, 1000))
    return (Host(devices=devices, pools=(pool,)),) * HOSTS


def runs(hosts: Sequence[Host], trace: Sequence[Session], seed: int) -> dict[str, Result]:
    """Return the result of each way."""
    return {
        "reservation": run_baseline("reservation", hosts, trace),
        "slurm-shards": run_baseline("static-fraction", hosts, trace),
        "slurm-count": simulate(hosts, trace, door=EngineDoor(hosts, trace, target_ms=TARGET_MS, bound_milli=50)),
        "random": simulate(hosts, trace, door=Door(hosts, trace, DoorRule.RANDOM, seed)),
    }


def figures(result: Result) -> dict[str, float]:
    """Return what the table shows: percent, seconds and hours."""
    waits = result.waits.ordered
    return {
        "at_once": 100 - result.doors.nonzero_percent(),
        "queue_p50_s": result.doors.percentile_ms(50) / 1000,
        "queue_p95_s": result.doors.percentile_ms(95) / 1000,
        **{f"wait_p{percent}_s": result.waits.percentile_ms(percent) / 1000 for percent in (50, 95, 99)},
        "late": 100 * sum(wait > TARGET_MS for wait in waits) / max(1, len(waits)),
        "held_h": round(result.held / 3.6e9, 1),
    }


def row(case: str, way: str, one: dict[str, float]) -> str:
    """Return a line of the table in Markdown; the engine's queue in hours."""
    cells = [
        f"{one['at_once']:.0f} %",
        f"{one['queue_p50_s'] / 3600:.1f} h",
        f"{one['queue_p95_s'] / 3600:.1f} h",
        " / ".join(f"{one[f'wait_p{percent}_s']:.1f}" for percent in (50, 95, 99)),
        f"{one['late']:.2f} %",
        f"{one['held_h']:.0f}",
    ]
    return f"| {case} | {way} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1", help="of the load, with commas (default: 1)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    if not options.json:
        print(
            "| users, seed | way | at once | queue p50 | queue p95 | cells wait p50 / p95 / p99, s | beyond 30 s | held GPU h |"
        )
        print("|---|---|---|---|---|---|---|---|")
    for seed in map(int, options.seeds.split(",")):
        for users, gpus in CASES:
            trace, began = synthetic_sessions(users, 1, seed, Load(several_percent=0)), time.perf_counter()
            for way, result in runs(hosts_with(gpus), trace, seed).items():
                one = figures(result)
                found.append({"users": users, "gpus": HOSTS * gpus, "seed": seed, "way": way, **one})
                if not options.json:
                    print(row(f"{users} on {HOSTS} x {gpus} GPUs, {seed}", way, one), flush=True)
            print(f"{users} users, seed {seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
