"""How many of 30 jobs of a quarter of a GPU run at once on a real Slurm of two one-GPU nodes, and how long they queue, with and without us.

    python -m tests.benchmarks.slurm [--jobs 30] [--lives 10] [--json]

Each job asks for `jgpu:open:250`. Without the agent a node stays open for what slurm.conf says, its device without sharing. With it the
node is open for what the broker's forecast admits, for users who compute 5 % of the time. Every running job has its seat at the broker.

First all jobs live until the benchmark ends them, and those that run are counted. Then as many live for `--lives` seconds each, all
submitted at once, and the time from each one's submission to its first line is its wait. The jobs only sleep. What a cell waits for the
GPU is the brokers' forecast.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median

from fractional_gpu.client.seat import SeatClient
from tests.support.paths import PYTHONPATH
from tests.support.slurm import GRES, Cluster, new_cluster
from tests.support.slurm_nodes import GPUNode, gpu_nodes, install_scripts
from tests.support.world import until

_CONFIG = """
c.GPUBroker.pools = {"default": {"fractions": ["1/4"], "oversubscription": 4, "expected_use": "5%"}}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both and print the figures."""
    parser = argparse.ArgumentParser(
        description="Jobs of a quarter of a GPU on a real Slurm, with and without the agent."
    )
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--lives", type=int, default=10, metavar="SECONDS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    os.environ["PYTHONPATH"] = PYTHONPATH
    scripts = ("--no-groups",)
    with (
        new_cluster(scripts=lambda nodes: install_scripts(nodes, os.environ, *scripts)) as slurm,
        gpu_nodes(slurm, more=scripts, config=_CONFIG) as nodes,
    ):
        for node in nodes:
            node.stop_agent()
        slurm.call("scontrol", "reconfigure")
        figures = {"without": measured(slurm, nodes, options.jobs) | queued(slurm, options.jobs, options.lives)}
        for node in nodes:
            node.start_agent("--every", "500ms", "--look", "1s")
        until(
            lambda: all(slurm.opened_milli(node.node.name) > 1000 for node in nodes), "the agents have opened the nodes"
        )
        figures["with"] = measured(slurm, nodes, options.jobs)
        until(
            lambda: all(slurm.opened_milli(node.node.name) > 1000 for node in nodes), "the agents open the nodes again"
        )
        figures["with"] |= queued(slurm, options.jobs, options.lives)
    print(json.dumps(figures) if options.json else shown(figures))


def measured(slurm: Cluster, nodes: list[GPUNode], count: int) -> dict[str, float]:
    """Submit jobs, wait until no further one starts, and return the figures. Ends all jobs."""
    for _ in range(count):
        slurm.sbatch("exec sleep 3600", f"--gres={GRES}:open:250", "--mem=100")

    states: list[str] = []

    def settled() -> bool:
        """Whether every job runs with its seat, or waits since the scheduler found no resources for the first of those that wait."""
        states[:] = slurm.call("squeue", "-h", "-o", "%T %r").splitlines()
        running = [line for line in states if line.startswith("RUNNING")]
        waiting = [line for line in states if line in ("PENDING Resources", "PENDING Priority")]
        looked = not waiting or "PENDING Resources" in waiting
        return looked and len(running) + len(waiting) == count and len(running) == seated(nodes)

    until(settled, "the jobs have settled", deadline_s=180)
    running = sum(line.startswith("RUNNING") for line in states)
    waits = []
    for node in nodes:
        with closing(SeatClient(node.node.socket)) as client:
            waits.append(client.capacity().pools[0].wait_p95_s)
    slurm.cancel_all()
    return {"jobs": count, "running": running, "waiting": count - running, "wait_p95_s": round(max(waits), 1)}


def queued(slurm: Cluster, count: int, lives_s: int) -> dict[str, float]:
    """Submit jobs that end after a while, and return how long they queued, in seconds."""
    submitted: dict[str, float] = {}
    for _ in range(count):
        begun = time.time()
        submitted[slurm.sbatch(f"date +%s.%N; exec sleep {lives_s}", f"--gres={GRES}:open:250", "--mem=100")] = begun
    until(lambda: not slurm.call("squeue", "-h", "-o", "%i").split(), "all jobs have ended", deadline_s=600)
    waits = sorted(float(slurm.output(job).splitlines()[-1]) - begun for job, begun in submitted.items())
    return {"queued_p50_s": round(median(waits), 1), "queued_max_s": round(waits[-1], 1)}


def seated(nodes: list[GPUNode]) -> int:
    """Return how many seats the brokers have."""
    found = 0
    for node in nodes:
        with closing(SeatClient(node.node.socket)) as client:
            found += len(client.seats().seats)
    return found


def shown(figures: dict[str, dict[str, float]]) -> str:
    """Return the figures as a table."""
    lines = [
        "| | at once | waiting | wait in Slurm's queue, median | longest | forecast wait of a cell, p95 |",
        "|---|---|---|---|---|---|",
    ]
    names = {"without": "without the agent", "with": "with the agent"}
    for name, one in figures.items():
        queue = f"{one['queued_p50_s']:g} s | {one['queued_max_s']:g} s"
        lines.append(f"| {names[name]} | {one['running']} | {one['waiting']} | {queue} | {one['wait_p95_s']:g} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
