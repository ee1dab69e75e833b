"""How many of 30 jobs of a quarter of a GPU run at once on a real Slurm of two one-GPU nodes, with and without the agent.

    python -m tests.benchmarks.slurm [--jobs 30] [--json]

Each job asks for `jgpu:open:250` and lives until the benchmark ends it; the fewer wait, the better. Without the agent a node stays open for
what slurm.conf says, its device without sharing. With it the node is open for what the broker's forecast admits, for users who compute 5 %
of the time. Every running job has its seat at the broker. Figures are counts and, for the waits, what the
brokers forecast; nothing is timed.
"""

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import closing

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
        figures = {"without": measured(slurm, nodes, options.jobs)}
        for node in nodes:
            node.start_agent()
        until(
            lambda: all(slurm.opened_milli(node.node.name) > 1000 for node in nodes), "the agents have opened the nodes"
        )
        figures["with"] = measured(slurm, nodes, options.jobs)
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


def seated(nodes: list[GPUNode]) -> int:
    """Return how many seats the brokers have."""
    found = 0
    for node in nodes:
        with closing(SeatClient(node.node.socket)) as client:
            found += len(client.seats().seats)
    return found


def shown(figures: dict[str, dict[str, float]]) -> str:
    """Return the figures as a table."""
    lines = ["| | at once | waiting in Slurm's queue | forecast wait of a cell, p95 |", "|---|---|---|---|"]
    names = {"without": "without the agent", "with": "with the agent"}
    for name, one in figures.items():
        lines.append(f"| {names[name]} | {one['running']} | {one['waiting']} | {one['wait_p95_s']:g} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
