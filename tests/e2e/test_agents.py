"""Programs run notebooks: they see in numbers why a cell waits, and a cell's timeout does not count the wait."""

import json
import subprocess
import threading
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError

from fractional_gpu.jupyter.notebook_runs import wait_before_cells
from fractional_gpu.protocol.messages import CLAIM, LeaseReply, LeaseRequest
from fractional_gpu_kernel.display.lines import WAIT_TYPE
from tests.support.managed import entered
from tests.support.world import Server, World

pytestmark = pytest.mark.promise("agents")

HOLD = "import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)"
TIMEOUT_S = 2
POOL = "c.GPUBroker.pools = {'default': {'idle_after': 'on-demand', 'preempt': 'never'}}"


def test_a_waiting_cell_publishes_its_place_and_reason_for_programs(world: World, server: Server) -> None:
    world.configure(POOL)
    (whole,) = world.install(1000)
    first, second = server.start(whole), server.start(whole)
    go = world.state / "go"
    running = first.send(HOLD.format(path=str(go)))
    world.await_state(first.kernel_id, "resident")
    waiting = second.send("print('on')")
    shown = next(
        message["content"]["data"][WAIT_TYPE]
        for message in second.messages(waiting)
        if WAIT_TYPE in message["content"].get("data", {})
    )
    assert (shown["version"], shown["position"], shown["reason"]) == (1, 1, "wait.busy-neighbour")
    assert shown["blockers"] == [world.lease(first.kernel_id).lease_id]
    go.touch()
    first.wait(running)


def test_a_cells_timeout_does_not_count_the_wait_for_the_gpu_if_the_program_says_so(
    world: World, server: Server
) -> None:
    world.configure(POOL)
    (whole,) = world.install(1000)
    first, go = server.start(whole), world.state / "go"
    running = first.send(HOLD.format(path=str(go)))
    world.await_state(first.kernel_id, "resident")
    with entered(world):
        with pytest.raises(CellTimeoutError):
            client_of(whole).execute()
        patient = client_of(whole)
        wait_before_cells(patient)
        opener = threading.Timer(2 * TIMEOUT_S, go.touch)
        opener.start()
        patient.execute()
    assert patient.nb.cells[0].outputs[0]["text"] == "on\n"
    first.wait(running)


def client_of(kernelspec: str) -> NotebookClient:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print('on')")])  # type: ignore[no-untyped-call]
    return NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name=kernelspec)


def test_curl_waits_as_long_as_it_prefers_and_gets_one_answer(world: World) -> None:
    world.configure(POOL)
    world.start_broker()
    with world.client() as client:
        holding, waiting = [client.create_lease(LeaseRequest(fraction_milli=1000, kind=CLAIM)) for _ in range(2)]
    assert acquire(world, holding, "wait=10")[0]["kind"] == "granted"
    refused, head = acquire(world, waiting, "respond-async, wait=0")
    assert (refused["kind"], refused["reason"]) == ("refused", "timeout")
    assert "preference-applied: wait=0" in head.lower()


def acquire(world: World, lease: LeaseReply, prefer: str) -> tuple[dict[str, Any], str]:
    argv = ["curl", "-s", "-i", "--unix-socket", world.socket, "-H", f"Authorization: Bearer {lease.token}"]
    argv += ["-H", f"Prefer: {prefer}", "-d", "{}", f"http://broker/v1/leases/{lease.lease_id}/acquire"]
    head, _, body = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.partition("\n\n")
    return json.loads(body), head
