"""Busy kernels are spread over devices by their measured utilisation, and each learns which kernels slow it down."""

import json
from pathlib import Path

import pytest

from fractional_gpu.protocol.status import LeaseStatus
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("contention")

# Uses that much of the device until it is told to end.
WORK = """
import pathlib
from fractional_gpu.gpu.simulated import cuda
if "buffer" not in globals():
    buffer = cuda.allocate(16 << 20)
end = pathlib.Path({end!r})
while not end.exists():
    cuda.launch(0.2, {part})
"""
NEAR_MILLI = (
    150  # Not close to any prior of these tests: before the first measurement 300 counts, then the mean of the pool.
)


def end_of(world: World) -> Path:
    return world.folder / "end"


def begin(world: World, notebook: Notebook, part: float, *, until_there_is: Path | None = None) -> LeaseStatus:
    notebook.send(WORK.format(end=str(until_there_is or end_of(world)), part=part))

    def runs() -> LeaseStatus | None:
        lease = world.lease(notebook.kernel_id)
        return lease if lease.busy and lease.state == "resident" else None

    return until(runs, "its cell runs")


def await_measured(world: World, notebook: Notebook, part: float) -> None:
    def measured() -> bool:
        with world.client() as client:
            client.status(fresh=True)  # the broker looks at the devices at once
        return abs(world.lease(notebook.kernel_id).lease.demand_milli - part * 1000) <= NEAR_MILLI

    until(measured, f"the broker has measured that it uses {part} of its device", deadline_s=90)


def demands(world: World) -> dict[str, int]:
    return {device.device_id: device.demand_milli for device in world.status().devices}


def test_a_busy_kernel_goes_to_the_less_busy_device_and_its_neighbours_are_named(world: World, server: Server) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'compute': 'spread', 'min_residency': 0}}")
    world.start_broker("2x1GiB")
    (name,) = world.install(250)  # memory is never short
    first, second, third = (server.start(name) for _ in range(3))
    try:
        heavy = begin(world, first, 1.0)
        await_measured(world, first, 1.0)
        light = begin(world, second, 0.6)
        assert heavy.lease.device_id != light.lease.device_id
        await_measured(world, second, 0.6)
        assert demands(world)[light.lease.device_id or ""] < demands(world)[heavy.lease.device_id or ""]
        placed = begin(world, third, 1.0)
        assert placed.lease.device_id == light.lease.device_id
        it_is_told_that_they_slow_each_other_down(world, placed, light, heavy)
    finally:
        end_of(world).touch()


def it_is_told_that_they_slow_each_other_down(
    world: World, placed: LeaseStatus, neighbour: LeaseStatus, alone: LeaseStatus
) -> None:
    until(lambda: world.lease(placed.kernel_id).slowdown.milli > 1100, "it is slowed down, and that is known")
    told = world.command("explain", placed.lease_id)
    assert told.returncode == 0, told.stderr
    last = told.stdout.splitlines()[-1]
    assert last.startswith("slowed down: its cell runs next to "), told.stdout
    assert "about 1." in last
    assert "so they slow each other down" in world.command("status").stdout
    story = json.loads(world.command("explain", placed.lease_id, "--json").stdout)
    assert story["slowdown"]["milli"] > 1100
    assert story["slowdown"]["brief"].startswith("runs next to ")
    status = json.loads(world.command("status", "--json").stdout)
    slowed = {one["lease"]["spec"]["lease_id"]: one["slowdown"]["milli"] for one in status["leases"]}
    assert slowed[placed.lease_id] > 1100
    assert slowed[neighbour.lease_id] > 1100
    assert slowed[alone.lease_id] == 1000, "it is alone on its device"


def test_a_busy_kernel_moves_off_a_crowded_device_in_the_middle_of_its_cell_with_all_its_bytes(
    world: World, server: Server
) -> None:
    pool = "{'default': {'min_residency': 0, 'min_residency_swaps': 0}}"
    world.configure(f"c.GPUBroker.pools = {pool}")
    world.start_broker("2x1GiB")
    quarter, whole = world.install(250, 1000)
    large, *small = (server.start(name) for name in (whole, quarter, quarter))
    leaves = world.folder / "the large one rests"
    try:
        apart = begin(world, large, 0.3, until_there_is=leaves).lease.device_id
        for number, notebook in enumerate(small):
            assert notebook.run(fill(number)).status == "ok"
            assert begin(world, notebook, 0.9).lease.device_id != apart, (
                "the large kernel has the other device to itself"
            )
            if not number:  # the second is never measured without its neighbour
                await_measured(world, notebook, 0.9)
        until(lambda: demands(world)[world.lease(small[0].kernel_id).lease.device_id or ""] > 1200, "the crowd is seen")
        leaves.touch()

        def moved() -> list[Notebook]:
            return [one for one in small if world.lease(one.kernel_id).lease.device_id == apart]

        (mover,) = until(moved, "one of them has moved", deadline_s=90)
        told = world.command("explain", world.lease(mover.kernel_id).lease_id)
        assert "move.compute" in told.stdout
        assert "suspend.compute" in world.command("explain", world.lease(large.kernel_id).lease_id).stdout
    finally:
        leaves.touch()
        end_of(world).touch()
    for notebook in small:
        assert notebook.run(CHECK).text == "intact\n"
