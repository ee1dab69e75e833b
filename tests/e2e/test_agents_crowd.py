"""An agent runs many kernels on one device over MCP beside a person: nothing is lost, and the person waits within the pool's bound.

    JUPYTER_GPU_AGENT_KERNELS=20 tests/run test -s tests/e2e/test_agents_crowd.py

jupyter-server-mcp has no tools of its own. So the agent starts kernels and sends cells over Jupyter's REST API and websockets, and
everything about GPUs goes over MCP.
"""

import os
import re
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.agents import Agent, connected, mcp_server, mcp_world
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, World, until

pytestmark = pytest.mark.promise("agents", "bounded-wait", "budgets")

KERNELS = int(os.environ.get("JUPYTER_GPU_AGENT_KERNELS", "6"))
TURN_S = 1.0
DEADLINE_S = 2
POOL = {"idle_after": "on-demand", "preempt": "fair", "min_residency": f"{TURN_S:g}s", "min_residency_swaps": 0}
BUDGETS = [{"user": "*", "limit": "0.001 GPU hours", "per": "day"}]
WORK = "cuda.launch(0.1)"


def test_an_agent_with_many_kernels_deadlines_and_a_budget_leaves_a_person_their_turns() -> None:
    with mcp_world() as world, mcp_server(world) as server, connected(server) as agent:
        world.configure(f"c.GPUBroker.pools = {{'default': {POOL}}}\nc.GPUBroker.budgets = {BUDGETS}")
        (whole,) = world.install(1000)
        person = server.start(whole)
        person.must(fill(0))
        notebooks = [server.start(whole) for _ in range(KERNELS)]
        leases = {one["kernel_id"]: one["lease"]["spec"]["lease_id"] for one in agent.call("gpu_status")["leases"]}
        over, cells, missed = threading.Event(), Counter[int](), Counter[int]()

        def works(seed: int, notebook: Notebook) -> None:
            notebook.must(fill(seed))
            while not over.is_set():
                if waits(agent, leases[notebook.kernel_id]):
                    notebook.must(WORK)
                    cells[seed] += 1
                else:
                    missed[seed] += 1
            notebook.must(CHECK)

        waits_s = []
        with ThreadPoolExecutor(KERNELS) as threads:
            works_on = [threads.submit(works, seed, one) for seed, one in enumerate(notebooks, 1)]
            try:
                until(lambda: len([one for one in world.status().leases if one.position]) >= KERNELS // 2, "they queue")
                while len(cells) < KERNELS or not spent(agent, leases[person.kernel_id]):
                    waits_s.append(cell_s(person, world))
            finally:
                over.set()
            for one in works_on:
                one.result()
        person.must(CHECK)
        # Law 4 and the turns (docs/policies.md): all kernels are one user's and equal, so each has one part in all of them. A ticket is
        # due after twice the turns and swaps of all, and then waits for one turn and swap of each.
        bound_s = 3 * (KERNELS + 1) * (TURN_S + swap_s(world))
        print(f"{KERNELS} kernels: {sum(cells.values())} cells, {sum(missed.values())} deadlines missed")  # noqa: T201 - read with -s
        print(f"a person's {len(waits_s)} cells: at most {max(waits_s):.1f} s, bound {bound_s:.1f} s")  # noqa: T201 - as above
        assert max(waits_s) <= bound_s


def waits(agent: Agent, lease_id: str) -> bool:
    """Wait for a kernel's GPU. Whether it is there in time."""
    answer = agent.call("gpu_wait", lease_id=lease_id, wait_s=DEADLINE_S)
    if "code" not in answer:
        return True
    assert (answer["code"], answer["reason"]) == ("no-room", "timeout"), answer
    return False


def spent(agent: Agent, lease_id: str) -> bool:
    (budget,) = agent.call("gpu_cost", lease_id=lease_id)["budgets"]
    return bool(budget["spent"] >= budget["amount"])


def cell_s(person: Notebook, world: World) -> float:
    """Run a cell, while the broker counts no ticket that waits longer than the turns of others and its share explain. Return its time."""
    begun_s = time.monotonic()
    cell = person.send(WORK)
    while world.lease(person.kernel_id).position is not None:
        assert metric(world, "queue_over_bound") == 0
    assert person.wait(cell).status == "ok"
    return time.monotonic() - begun_s


def swap_s(world: World) -> float:
    """Return the mean time of a suspend and a resume."""
    return sum(
        metric(world, f'swap_seconds_sum{{kind="{kind}"}}') / metric(world, f'swap_seconds_count{{kind="{kind}"}}')
        for kind in ("suspend", "resume")
    )


def metric(world: World, name: str) -> float:
    argv = ["curl", "-s", "--unix-socket", world.socket, "http://broker/v1/metrics"]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return sum(float(one) for one in re.findall(rf"^jupyter_gpu_{re.escape(name)}\S* (\S+)$", text, re.MULTILINE))
