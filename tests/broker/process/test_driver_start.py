"""The broker serves while it retries a driver that is not ready, and starts suspending when the driver works."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.broker.process import driver_start
from fractional_gpu.broker.process.driver_start import DriverStart
from fractional_gpu.broker.recovery.recovery import recover
from fractional_gpu.broker.swap.swap import Swaps
from fractional_gpu.core.arbiter import Arbiter
from fractional_gpu.core.events import Checkpointable, DeviceSeen, HostMemorySeen, PoolConfigured
from fractional_gpu.core.model import DeviceSpec, LeaseState, LeaseView, PoolSpec
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, Monitor, ProcessState
from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.ledger.records import LeaseRecord
from tests.broker.driver import DEVICE, OTHERS, Driver, swaps_of
from tests.broker.live import DEADLINE_S, started_for
from tests.broker.persistence.disk import Disk
from tests.broker.recovery.test_recovery import LEASE, record_of

pytestmark = pytest.mark.promise("late-driver")

NOT_READY = GPUError(GPUErrorCode.SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY (802)")
TRANSIENT = [code for code in GPUErrorCode if code not in (GPUErrorCode.NOT_SUPPORTED, GPUErrorCode.NOT_PERMITTED)]
ON_MIG = "it is a MIG instance"


class Worker:
    """A worker whose start attempts give the test's answers, the last one repeatedly. Each attempt but the first waits for `proceed`."""

    def __init__(self, *answers: GPUError | None) -> None:
        self.answers = list(answers)
        self.attempts = 0
        self.proceed = asyncio.Semaphore(0)
        self.alone = asyncio.Event()
        self.alone.set()

    async def wait_for_previous_worker(self) -> None:
        await self.alone.wait()

    async def start(self) -> None:
        if self.attempts:
            await self.proceed.acquire()
        self.attempts += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer


class World:
    """A broker with one device, perhaps an earlier broker's lease, and such a worker."""

    def __init__(self, broker: Broker, swaps: Swaps, start: DriverStart, specs: dict[str, DeviceSpec]) -> None:
        self.broker = broker
        self.swaps = swaps
        self.start = start
        self.specs = specs

    def lease(self) -> LeaseView:
        view = self.broker.arbiter.lease(LEASE)
        assert view is not None
        return view

    def why_not(self, device_id: str = DEVICE) -> str:
        """Return what the arbiter was told about the device, as the sampler will repeat it."""
        (view,) = [one for one in self.broker.arbiter.devices() if one.device_id == device_id]
        assert view.why_not == self.specs[device_id].why_not
        return view.why_not


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_start, "_FIRST_PAUSE_S", 0.0)


@asynccontextmanager
async def world_of(
    tmp_path: Path,
    worker: Worker,
    record: LeaseRecord | None = None,
    driver: Driver | None = None,
) -> AsyncIterator[World]:
    """A broker after its start, with further attempts in the background."""
    driver = Driver() if driver is None else driver
    ledger = Disk.open(tmp_path / "ledger.sqlite")
    if record is not None:
        ledger.save_lease(record)
    swaps = swaps_of(driver)
    specs = {
        DEVICE: DeviceSpec(device_id=DEVICE, name="G", memory_mib=1000),
        OTHERS[0]: DeviceSpec(device_id=OTHERS[0], name="G", memory_mib=1000, why_not=ON_MIG),
    }
    start = DriverStart(cast("WorkerLink", worker), specs)
    swaps.inspector.off = await start.begin()
    broker = Broker(Arbiter(), cast("Monitor", driver), swaps, LedgerWriter(ledger))
    for spec in specs.values():
        broker.dispatch(DeviceSeen(at_ms=now_ms(), device=spec, stranger_mib=7))
    broker.dispatch(PoolConfigured(at_ms=now_ms(), pool=PoolSpec(name="default", devices=(DEVICE,))))
    broker.dispatch(HostMemorySeen(at_ms=now_ms(), budget_mib=4096))
    await recover(broker, swaps, ledger)
    background = asyncio.create_task(start.run(broker, swaps))
    try:
        yield World(broker, swaps, start, specs)
        assert not background.done(), "the end of a service ends the broker"
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        await broker.close()


async def settled(world: World, worker: Worker, attempts: int) -> None:
    """Return once this many attempts were made and reported."""
    async with asyncio.timeout(DEADLINE_S):
        while worker.attempts < attempts or world.swaps.inspector.off != world.start.off:  # noqa: ASYNC110 - attempts set no event
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.mark.parametrize("code", TRANSIENT)
async def test_what_may_pass_is_tried_again_until_the_driver_works(tmp_path: Path, code: GPUErrorCode) -> None:
    worker = Worker(GPUError(code, "not now"), GPUError(code, "not now"), None)
    with started_for(LEASE) as process:
        driver = Driver()
        driver.has_context(process["pid"], ProcessState.RUNNING, 300)
        async with world_of(tmp_path, worker, record_of(process, LeaseState.RESIDENT), driver) as world:
            assert world.lease().state is LeaseState.RESIDENT, "the driver is not needed to know that"
            assert re.fullmatch(r"not now \(attempt 1; the next one is at \d\d:\d\d:\d\d \w+\)", world.why_not())
            assert world.lease().unsuspendable_reason == world.swaps.inspector.off == world.why_not()
            worker.proceed.release()
            await settled(world, worker, 2)
            assert "(attempt 2;" in world.why_not()
            assert world.lease().unsuspendable_reason == world.swaps.inspector.off == world.why_not()
            assert world.why_not(OTHERS[0]) == ON_MIG
            worker.proceed.release()
            await settled(world, worker, 3)
            assert (world.swaps.inspector.off, world.lease().unsuspendable_reason, world.why_not()) == ("", "", "")
            assert world.why_not(OTHERS[0]) == ON_MIG, "that reason is its own"
            strangers = [view.stranger_mib for view in world.broker.arbiter.devices()]
            assert strangers == [7, 7]


@pytest.mark.parametrize("code", [GPUErrorCode.NOT_SUPPORTED, GPUErrorCode.NOT_PERMITTED])
async def test_what_is_refused_for_good_is_not_tried_again(tmp_path: Path, code: GPUErrorCode) -> None:
    worker = Worker(NOT_READY, GPUError(code, "never here"), None)
    async with world_of(tmp_path, worker) as world:
        worker.proceed.release()
        worker.proceed.release()
        await settled(world, worker, 2)
        assert world.swaps.inspector.off == world.why_not() == "never here"
        assert worker.attempts == 2


async def test_what_the_driver_left_locked_waits_for_it_and_then_runs(tmp_path: Path) -> None:
    """A broker was killed in the middle of a suspend; by the device's counters the locked process seems to run."""
    worker = Worker(NOT_READY, None)
    with started_for(LEASE) as process:
        driver = Driver()
        driver.has_context(process["pid"], ProcessState.LOCKED, 300)
        record = record_of(process, LeaseState.SUSPENDING)
        async with world_of(tmp_path, worker, record, driver) as world:
            assert world.lease().state is LeaseState.QUARANTINED
            worker.proceed.release()
            async with asyncio.timeout(DEADLINE_S):
                while world.lease().state is not LeaseState.RESIDENT:
                    await world.broker.anything_changed.wait()
            assert driver.states[process["pid"]] is ProcessState.RUNNING


async def test_what_is_saved_waits_for_the_driver_and_is_then_known_at_once(tmp_path: Path) -> None:
    worker = Worker(NOT_READY, None)
    with started_for(LEASE) as process:
        driver = Driver()
        driver.has_context(process["pid"], ProcessState.CHECKPOINTED, 300)
        record = record_of(process, LeaseState.SUSPENDED, saved_mib=300, home_ids=(DEVICE,))
        async with world_of(tmp_path, worker, record, driver) as world:
            assert world.lease().state is LeaseState.QUARANTINED
            worker.proceed.release()
            async with asyncio.timeout(DEADLINE_S):
                while world.lease().state is not LeaseState.SUSPENDED:
                    await world.broker.anything_changed.wait()
            assert world.lease().saved_mib == 300


async def test_a_lease_whose_suspend_met_the_reason_is_released_from_it(tmp_path: Path) -> None:
    worker = Worker(NOT_READY, None)
    with started_for(LEASE) as process:
        driver = Driver()
        driver.has_context(process["pid"], ProcessState.RUNNING, 300)
        async with world_of(tmp_path, worker, record_of(process, LeaseState.RESIDENT), driver) as world:
            told = Checkpointable(at_ms=now_ms(), lease_id=LEASE, why_not=world.swaps.inspector.off)
            world.broker.dispatch(told)  # as when such a suspend ends
            worker.proceed.release()
            await settled(world, worker, 2)
            assert world.lease().unsuspendable_reason == ""


async def test_the_worker_of_a_killed_broker_is_waited_for_and_then_the_driver_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_start, "_ORPHAN_PATIENCE_S", 0.0)
    worker = Worker(NOT_READY, None)
    worker.alone.clear()
    async with world_of(tmp_path, worker) as world:
        assert (world.swaps.inspector.off, worker.attempts) == ("", 0)
        worker.alone.set()
        await settled(world, worker, 1)
        assert "(attempt 1;" in world.why_not()
        worker.proceed.release()
        await settled(world, worker, 2)
        assert world.swaps.inspector.off == world.why_not() == ""
