"""`jupyter gpu capacity` shows how much more GPU capacity each pool on this host can grant, according to the broker's forecast."""

import argparse

from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.connection import running_broker, say_if_slow
from fractional_gpu.commands.terminal.text import answer
from fractional_gpu.core.units import format_duration, format_fraction, format_gpus, format_memory, plural
from fractional_gpu.protocol.nodes import Capacity, PoolCapacity

EPILOG = """\
examples:
  jupyter gpu capacity                  for each pool: held and available shares, and how long cells would wait
  jupyter gpu capacity --json           the same as JSON: the fields of GET /v1/capacity

A share is available if the forecast waiting time stays within the pool's wait_bound for every size that the pool offers. In JSON,
shares are in thousandths of a GPU. The node agents of Slurm and Kubernetes read the same figures.
"""


def configure(parser: Parser) -> None:
    parser.describe("Show how much more GPU this host's pools can grant. Does not start a broker.", EPILOG)
    parser.flag("--json", "print JSON, with the fields of GET /v1/capacity")
    parser.add_socket()


def run(options: argparse.Namespace) -> int:
    with running_broker(options.socket) as client, say_if_slow("forecasting the waits ..."):
        capacity = client.capacity()
    answer(options, capacity, lambda _: described(capacity))
    return 0


def described(capacity: Capacity) -> list[str]:
    simulated = " (simulated GPUs)" if capacity.simulated else ""
    lines = [_pool(pool) + simulated for pool in capacity.pools] or ["this broker manages no devices"]
    left, total = format_memory(capacity.host_memory_left_mib), format_memory(capacity.host_memory_total_mib)
    return [*lines, f"host memory: {left} of {total} free for saved state"]


def _pool(pool: PoolCapacity) -> str:
    wait_s = pool.wait_p95_s
    wait = "start at once" if not wait_s else f"start within {format_duration(max(1, round(wait_s)) * 1000)}"
    queue = f"; {pool.waiting} waiting" if pool.waiting else ""
    return (
        f"pool {pool.name}: {plural(len(pool.devices), 'GPU')}, {format_gpus(pool.held_milli)} held, "
        f"{format_gpus(pool.admissible_milli)} available now; with one more seat of {format_fraction(pool.fraction_milli)} GPU, "
        f"95 % of cells would {wait}{queue}"
    )
