"""The counters decide whether a kernel without a running cell is idle: soon after a cell, during work, and without any counters."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any, cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.process_inspector import ProcessScans
from fractional_gpu.broker.supervision.enforcement import QUIET_S, UNANSWERED_QUIET_S, GpuActivity
from fractional_gpu.core.model import LeaseState, LeaseView
from fractional_gpu.gpu.interface import DeviceActivity, GPUError, GPUErrorCode
from fractional_gpu.host.clock import since_boot_us
from fractional_gpu.host.process import identify
from tests.broker.driver import DEVICE, Quiet
from tests.broker.monitoring.test_sampler import LEASE, view_of

SECOND = 1_000_000
SETTLE_US = SECOND


class World:
    """Replaces the broker: one kernel, which is this process, and a device whose counters the test sets."""

    def __init__(self, state: LeaseState = LeaseState.RESIDENT) -> None:
        self.monitor = self
        self.scans = ProcessScans()
        self.arbiter = self
        self.view: LeaseView = view_of(state)
        self.quiet = Quiet()
        self.kernel = Kernel(lease_id=LEASE, uid=0, token_sha256="", identity=identify(os.getpid()))
        self.kernel.iopub = cast("IOPubWatch", self.quiet)
        self.kernels = {LEASE: self.kernel}
        self.worked_us: Mapping[int, int] = {}
        self.known_until_us: int | None = None
        self.tells = True
        self.error: GPUError | None = None
        self.looks = 0
        self.looked = asyncio.Event()
        self.gpu_activity = GpuActivity(cast("Broker", self))

    def lease(self, lease_id: str) -> LeaseView | None:
        return self.view if lease_id == LEASE else None

    def views(self) -> list[tuple[Kernel, LeaseView]]:
        return [(self.kernel, self.view)]

    def roots(self) -> list[Any]:
        return [self.kernel.identity]

    def sync_busy_state(self, kernel: Kernel) -> None:
        self.gpu_activity.see(kernel, self.view)

    def activity(self, device_id: str, _since_us: int) -> DeviceActivity | None:
        assert device_id == DEVICE
        self.looks += 1
        if self.error is not None:
            raise self.error
        if not self.tells:
            return None
        known = self.known_until_us if self.known_until_us is not None else since_boot_us()
        return DeviceActivity(known_until_us=known, settle_us=SETTLE_US, worked_us=dict(self.worked_us))

    async def look(self) -> None:
        """Look once, as the loop does."""
        self.gpu_activity._looks = True
        if watched := self.gpu_activity._watched():
            await self.gpu_activity._look(watched)

    @property
    def busy(self) -> Any:  # noqa: ANN401 - bool, of which mypy would believe that it stays
        return self.kernel.busy

    def cell_ends(self) -> int:
        """Run a cell to its end; return when it ended, in microseconds."""
        self.gpu_activity._looks = True
        self.quiet.busy = True
        self.sync_busy_state(self.kernel)
        self.quiet.busy = False
        self.sync_busy_state(self.kernel)
        assert self.kernel.gpu_work.idle_us is not None
        return self.kernel.gpu_work.idle_us


async def test_right_after_a_cell_its_state_is_unknown_until_the_counters_tell() -> None:
    world = World()
    end_us = world.cell_ends()
    assert world.busy
    world.known_until_us = end_us + SETTLE_US - 1
    world.worked_us = {os.getpid(): end_us - 5}
    await world.look()
    assert world.busy, "what the cell did may still be told"
    world.known_until_us = end_us + SETTLE_US
    await world.look()
    assert not world.busy, "what it did before its end is no work now"


async def test_work_after_the_cell_keeps_it_busy_until_it_has_been_quiet() -> None:
    world = World()
    end_us = world.cell_ends()
    world.worked_us = {os.getpid(): end_us + SECOND}
    world.known_until_us = end_us + SECOND
    await world.look()
    assert world.busy
    world.worked_us = {}
    world.known_until_us = end_us + SECOND + int(QUIET_S * SECOND) - 1
    await world.look()
    assert world.busy, "a short pause"
    world.known_until_us += 1
    await world.look()
    assert not world.busy
    world.worked_us = {os.getpid(): world.known_until_us}
    await world.look()
    assert world.busy, "it began again"


async def test_work_of_another_process_is_not_its_work() -> None:
    world = World()
    end_us = world.cell_ends()
    world.worked_us = {1: end_us + SECOND}
    world.known_until_us = end_us + SECOND
    await world.look()
    assert not world.busy


async def test_a_kernel_that_cannot_say_that_it_is_idle_is_so_once_its_counters_were_quiet_for_longer() -> None:
    world = World()
    now_us = since_boot_us()
    world.worked_us = {os.getpid(): now_us - int(UNANSWERED_QUIET_S * SECOND) + SECOND}
    assert not await world.gpu_activity.is_quiet(world.kernel)
    world.worked_us = {os.getpid(): now_us - int(UNANSWERED_QUIET_S * SECOND) - 1, 1: now_us}
    assert await world.gpu_activity.is_quiet(world.kernel), "work of another process is not its work"
    world.error = GPUError(GPUErrorCode.UNKNOWN, "no")
    assert not await world.gpu_activity.is_quiet(world.kernel), "unknown is not quiet"
    world.error, world.tells = None, False
    assert await world.gpu_activity.is_quiet(world.kernel), "a device that tells nothing leaves it to the messages"


async def test_a_person_who_asks_is_not_kept_waiting_by_work() -> None:
    world = World()
    world.cell_ends()
    world.kernel.requests.suspend_waiters += 1
    assert not world.busy
    world.quiet.busy = True
    assert world.busy, "a cell is in the way"


async def test_a_device_that_tells_nothing_or_fails_leaves_it_to_the_messages() -> None:
    world = World()
    world.cell_ends()
    world.error = GPUError(GPUErrorCode.UNKNOWN, "no")
    await world.look()
    assert not world.busy
    world.error, world.tells = None, False
    world.cell_ends()
    await world.look()
    assert not world.busy
    looks = world.looks
    world.cell_ends()
    assert not world.busy, "it is not waited for again"
    await world.look()
    assert world.looks == looks, "nor asked"


@pytest.mark.parametrize(("served", "busy"), [(False, True), (True, False)])
async def test_a_command_on_a_device_that_tells_nothing_counts_as_at_work_unless_connections_tell(
    served: bool, busy: bool
) -> None:
    world = World()
    world.tells = False
    world.kernel.iopub = None
    world.kernel.launch.command, world.kernel.launch.served = True, served
    world.kernel.measurement.has_used = True
    world.gpu_activity._looks = True
    world.sync_busy_state(world.kernel)
    await world.look()
    assert world.busy is busy
    world.sync_busy_state(world.kernel)
    assert world.busy is busy, "and so it stays while the device is not read"
