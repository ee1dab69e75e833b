"""An agent runs many kernels on one device beside a person's notebook: nothing is lost, and the person waits within the pool's bound."""

import os
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from fractional_gpu.jupyter import mcp
from tests.support.managed import entered
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, new_world, until

pytestmark = pytest.mark.promise("agents", "bounded-wait", "budgets")

KERNELS = int(os.environ.get("JUPYTER_GPU_AGENT_KERNELS", "6"))
POOL = {"idle_after": "on-demand", "preempt": "fair", "min_residency": "1s", "min_residency_swaps": 0}
BUDGETS = [{"user": "*", "limit": "0.001 GPU hours", "per": "day"}]
WORK = "cuda.launch(0.1)"


def test_an_agent_with_many_kernels_and_a_budget_leaves_a_person_their_turns() -> None:
    with new_world() as world, Server(world) as server, entered(world):
        world.configure(
            f"c.GPUBroker.pools = {{'default': {POOL}}}\nc.GPUBroker.budgets = [{{'user': '*', 'limit': '0.001 GPU hours', 'per': 'day'}}]"
        )
        (whole,) = world.install(1000)
        person = server.start(whole)
        person.must(fill(0))
        notebooks = [server.start(whole) for _ in range(KERNELS)]
        over, cells = threading.Event(), Counter[int]()

        def works(seed: int, notebook: Notebook) -> None:
            notebook.must(fill(seed))
            while not over.is_set():
                notebook.must(WORK)
                cells[seed] += 1
            notebook.must(CHECK)

        waits_s, over_bound = [], 0
        with ThreadPoolExecutor(KERNELS) as threads:
            agents = [threads.submit(works, seed, one) for seed, one in enumerate(notebooks, 1)]
            until(lambda: len([one for one in world.status().leases if one.position]) >= KERNELS // 2, "they queue")
            while len(cells) < KERNELS:  # the last one gets its first turn
                begun_s = time.monotonic()
                person.must(WORK)
                waits_s.append(time.monotonic() - begun_s)
                over_bound += late(world)
            over.set()
            for one in agents:
                one.result()
        person.must(CHECK)
        print(f"the person's cells took {[round(one, 1) for one in waits_s]} s")  # noqa: T201 - read with -s
        assert over_bound == 0
        (budget,) = mcp.gpu_cost(world.lease(person.kernel_id).lease_id)["budgets"]
        assert budget["spent"] > budget["amount"]


def late(world: World) -> int:
    """Return how many kernels have waited longer than the turns of all others and their own patience explain (docs/policies.md)."""
    argv = ["curl", "-s", "--unix-socket", world.socket, "http://broker/v1/metrics"]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in text.splitlines()
        if line.startswith("jupyter_gpu_queue_over_bound{")
    )
