"""Checkpoints are tried on a test process before any kernel depends on them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.process.driver_start import DriverStart
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import DeviceSeen, Event
from fractional_gpu.core.model import DeviceSpec
from fractional_gpu.gpu.interface import GPUErrorCode
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.worker_link import WorkerLink
from tests.support import faults


class World:
    """Replaces the broker of a simulated host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (device,) = create(folder, "1x512MiB").devices
        self.specs = {device.device_id: DeviceSpec(device_id=device.device_id, name=device.name, memory_mib=512)}
        self.monitor = SimulatedMonitor(folder)
        self.arbiter = Arbiter()
        self.kernels: dict[str, object] = {}
        self.used_mib: dict[str, int] = {}
        self.enforcement = SimpleNamespace(exempt_pids=set[int]())
        self.swaps = SimpleNamespace(inspector=SimpleNamespace(counts_processes=False))
        for spec in self.specs.values():
            self.dispatch(DeviceSeen(at_ms=0, device=spec, stranger_mib=7))

    def dispatch(self, event: Event) -> None:
        self.arbiter.handle(event)

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[WorkerLink]:
        worker = WorkerLink(f"simulated:{self.folder}")
        try:
            yield worker
        finally:
            await worker.close()

    async def found(self) -> str:
        """Return the self-test's result."""
        async with self.worker() as worker:
            return await DriverStart(worker, self.specs).self_test(cast("Broker", self), cast("Swaps", self.swaps))

    @property
    def why_not(self) -> str:
        """Return what the arbiter was told about the device."""
        (view,) = self.arbiter.devices()
        assert view.stranger_mib == 7
        (spec,) = self.specs.values()
        assert spec.why_not == view.why_not
        return view.why_not


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "host")
    with closing(made.monitor):
        yield made
    destroy(made.folder)


@pytest.mark.parametrize("code", [GPUErrorCode.NOT_PERMITTED, GPUErrorCode.NOT_SUPPORTED])
async def test_what_is_refused_for_good_becomes_the_devices_reason(world: World, code: GPUErrorCode) -> None:
    faults.inject(world.folder, "lock", f"fail:{code.value}")
    found = await world.found()
    assert world.why_not
    assert world.why_not in found


async def test_missing_rights_come_as_a_failure_of_the_operating_system_and_are_final(world: World) -> None:
    faults.inject(world.folder, "lock", f"fail:{GPUErrorCode.OPERATING_SYSTEM.value}")
    found = await world.found()
    assert "missing rights" in found
    assert "gVisor" in world.why_not


async def test_what_went_wrong_for_another_reason_proves_nothing(world: World) -> None:
    faults.inject(world.folder, "checkpoint", f"fail:{GPUErrorCode.OPERATING_SYSTEM.value}")
    assert "checkpoint self-test: " in await world.found()
    assert world.why_not == ""


@pytest.mark.parametrize("why", ["kernels", "use", "reason"])
async def test_it_is_not_tried_without_a_free_device(world: World, why: str) -> None:
    (device_id,) = world.specs
    if why == "kernels":
        world.kernels["lease"] = object()
    elif why == "use":
        world.used_mib[device_id] = 300
    else:
        world.specs[device_id] = DeviceSpec(device_id=device_id, name="G", memory_mib=512, why_not="MIG")
    assert await world.found() == "checkpoint self-test skipped: no device is free for it"
