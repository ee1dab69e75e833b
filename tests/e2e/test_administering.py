"""An administrator moves a kernel to another device, where every byte of it is again, and evicts one."""

import json
from collections.abc import Iterator

import pytest

from tests.support.stories import CHECK, fill
from tests.support.world import Server, World, new_world, until


@pytest.fixture
def world() -> Iterator[World]:
    with new_world("2x256MiB") as made:
        made.configure("c.GPUBroker.pools = {'default': {'may_move': True}}")
        yield made


def test_a_kernel_is_moved_to_and_fro_and_evicted(world: World, server: Server) -> None:
    (name,) = world.install(500)
    notebook, neighbour = server.start(name), server.start(name)
    notebook.must(fill(1))
    neighbour.must(fill(2))
    first = world.lease(notebook.kernel_id)
    moved = world.command("move", notebook.kernel_id, "--json")
    assert moved.returncode == 0, moved.stderr
    assert json.loads(moved.stdout)["lease"]["device_ids"] not in ([], list(first.lease.device_ids))
    assert notebook.must(CHECK).text == "intact\n"
    assert first.lease.device_id is not None
    back = world.command("move", notebook.kernel_id, "--to", first.lease.device_id)
    assert back.returncode == 0, back.stderr
    assert f"is on {first.lease.device_id} now" in back.stdout
    assert notebook.must(CHECK).text == "intact\n"
    there = world.command("move", notebook.kernel_id, "--to", first.lease.device_id)
    assert (there.returncode, "on that device already" in there.stderr) == (1, True)
    with world.client() as client:
        reasons = [line.reason for line in client.story(first.lease_id).lines]
    assert reasons.count("move.asked") == 2

    unsure = world.command("evict", notebook.kernel_id)
    assert (unsure.returncode, "add --confirm" in unsure.stderr) == (2, True)
    done = world.command("evict", notebook.kernel_id, "--confirm")
    assert done.returncode == 0, done.stderr
    until(lambda: first.lease_id not in [one.lease_id for one in world.status().leases], "the lease is over")
    assert neighbour.must(CHECK).text == "intact\n"
    # The kernel is new and empty. The test waits for it: jupyter_client cannot end a kernel that is restarting, and then its server answers
    # 500, or never ends.
    until(lambda: notebook.kernel_id in [one.kernel_id for one in world.status().leases], "the server starts it anew")
    assert server.connect(notebook.kernel_id).must("print('buffer' in globals())").text == "False\n"
