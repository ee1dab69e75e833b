"""Idle cullers spare kernels that hold GPU state; the broker ends these after a warning, unless they are used."""

import pytest

from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("culling")

CULLER = [f"--MappingKernelManager.cull_{setting}" for setting in ("idle_timeout=8", "interval=1", "connected=True")]


def warned(world: World, notebook: Notebook) -> bool:
    status = world.lease(notebook.kernel_id)
    return status.reason == "cull.warned" and "run a cell to keep its variables" in status.sentence


def test_jupyters_culler_ends_an_idle_kernel_but_not_one_that_holds_gpu_state(world: World) -> None:
    world.configure("c.GPUBroker.cull_idle_after = '1h'")
    (name,) = world.install(250)
    with Server(world, *CULLER) as server:
        holds, plain = server.start(name), server.start(name)
        holds.must(fill(1))
        until(
            lambda: plain.kernel_id not in {one["id"] for one in server.request("GET", "api/kernels")},
            "the kernel without GPU state is culled",
        )
        assert holds.must(CHECK).text == "intact\n"


def test_an_idle_kernel_is_warned_and_ended_unless_a_cell_runs(world: World) -> None:
    world.configure("c.GPUBroker.cull_idle_after = '8s'\nc.GPUBroker.cull_warning = '5s'")
    (name,) = world.install(250)
    with Server(world) as server:
        notebook = server.start(name)
        notebook.must(fill(1))
        until(lambda: warned(world, notebook), "it is warned")
        assert notebook.must(CHECK).text == "intact\n"
        until(lambda: not warned(world, notebook), "the cell keeps it")
        pid = world.lease(notebook.kernel_id).pid
        until(lambda: {one.pid for one in world.status().leases} - {pid, None}, "another kernel follows")
        (lease,) = world.status().leases
        with world.client() as client:
            told = [line.sentence for line in client.story(lease.lease_id).lines]
        assert any("The GPU broker ended the previous kernel at" in sentence for sentence in told)
        server.connect(notebook.kernel_id).must(
            "%%cpu\npass"
        )  # a Jupyter server that ends while it restarts a kernel may hang
