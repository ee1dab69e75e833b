"""Programs run notebooks: they see in numbers why a cell waits, and a cell's timeout does not count the wait."""

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError
from papermill import execute_notebook

from fractional_gpu.jupyter.notebook_runs import wait_before_cells
from fractional_gpu.protocol.messages import CLAIM, LeaseReply, LeaseRequest
from fractional_gpu_kernel.display.lines import WAIT_TYPE
from tests.support.managed import entered
from tests.support.shared_server import SharedServer
from tests.support.world import Server, World, until

pytestmark = pytest.mark.promise("agents")

HOLD = "import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)"
TIMEOUT_S = 2
POOL = "c.GPUBroker.pools = {'default': {'idle_after': 'on-demand', 'preempt': 'never'}}"


@pytest.fixture(scope="module")
def world(shared_server: SharedServer) -> Iterator[World]:
    """One broker for all tests of this file."""
    with shared_server.borrowed() as lent:
        lent.configure(POOL)
        yield lent


def test_a_waiting_cell_publishes_its_place_and_reason_for_programs(world: World, server: Server) -> None:
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
    with held(world, server) as (whole, release):
        with pytest.raises(CellTimeoutError):
            client_of(whole).execute()
        patient = client_of(whole)
        wait_before_cells(patient)
        release.start()
        patient.execute()
    assert patient.nb.cells[0].outputs[0]["text"] == "on\n"


def test_papermills_timeout_does_not_count_the_wait_with_our_engine(world: World, server: Server) -> None:
    with held(world, server) as (whole, release):
        path = world.notebooks / "story.ipynb"
        path.write_text(nbformat.writes(notebook_of(whole)))  # type: ignore[no-untyped-call]
        argv = {"execution_timeout": TIMEOUT_S, "progress_bar": False}
        with pytest.raises(CellTimeoutError):
            execute_notebook(path, None, **argv)
        release.start()
        done = execute_notebook(path, None, engine_name="fractional-gpu", **argv)
    assert done.cells[0].outputs[0]["text"] == "on\n"


@contextmanager
def held(world: World, server: Server) -> Iterator[tuple[str, threading.Thread]]:
    """Enter a world whose device another kernel holds; the thread releases it when a cell has waited for twice its timeout."""
    (whole,) = world.install(1000)
    first, go = server.start(whole), world.state / "go"
    go.unlink(missing_ok=True)
    running = first.send(HOLD.format(path=str(go)))
    world.await_state(first.kernel_id, "resident")

    def release() -> None:
        until(lambda: any(one.position for one in world.status().leases), "a cell waits")
        threading.Timer(2 * TIMEOUT_S, go.touch).start()

    with entered(world):
        yield whole, threading.Thread(target=release)
    first.wait(running)


def client_of(kernelspec: str) -> NotebookClient:
    return NotebookClient(notebook_of(kernelspec), timeout=TIMEOUT_S, kernel_name=kernelspec)


def notebook_of(kernelspec: str) -> Any:  # noqa: ANN401 - nbformat's
    made: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print('on')")])  # type: ignore[no-untyped-call]
    made.metadata.kernelspec = {"name": kernelspec, "display_name": kernelspec, "language": "python"}
    return made


def test_curl_waits_as_long_as_it_prefers_and_gets_one_answer(world: World) -> None:
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
