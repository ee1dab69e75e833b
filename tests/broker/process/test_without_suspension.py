"""A host whose driver cannot checkpoint is still shared: every kernel stays resident, and all users learn why."""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fractional_gpu.broker.process import driver_start
from fractional_gpu.broker.process.driver_start import Backend
from fractional_gpu.broker.process.run import BrokerRun, device_specs
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.doctor.report import Severity
from fractional_gpu.commands.doctor.setup import check_broker
from fractional_gpu.config import load
from fractional_gpu.core.model import LeaseState
from fractional_gpu.gpu.interface import ProcessState
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.protocol.status import HostStatus
from tests.broker.driver import Driver, journal, kernel_of, suspend_of, swaps_of
from tests.broker.live import DEADLINE_S
from tests.gpu_nvidia.fake_nvml import FakeGPU, FakeNVML
from tests.support import stub_bindings

MISSING = "the Python package cuda-bindings is not installed: pip install it"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="jfg-") as made:
        yield Path(made)


@asynccontextmanager
async def serving(folder: Path, bindings: str, worker: str) -> AsyncIterator[BrokerClient]:
    """A broker on a machine with one real device, as NVML would show it, whose worker opens that backend."""
    monitor = NvidiaMonitor(nvml=FakeNVML(FakeGPU()), bindings=lambda: bindings)
    backend = Backend(name=worker, monitor=monitor, devices=tuple(monitor.devices()), folder=None)
    settings = load(None, {})
    reader, writer = os.pipe()
    ready = os.fdopen(writer, "w")
    run = BrokerRun(
        settings=settings,
        backend=backend,
        specs=device_specs(settings, backend),
        claims=[],
        ledger=Ledger.open(folder / "ledger.sqlite"),
        socket=str(folder / "broker.sock"),
        ready=ready,
        everyone=False,
    )
    serving = asyncio.create_task(run.main())
    serving.add_done_callback(lambda _: ready.close())  # a broker that fails at its start prints nothing
    with os.fdopen(reader) as report:
        if await asyncio.to_thread(report.read) != "ready":
            await serving
    client = BrokerClient(str(folder / "broker.sock"))
    try:
        yield client
    finally:
        client.close()
        run.stop.set()
        await serving


@pytest.mark.parametrize(
    ("told", "says"),
    [(MISSING, MISSING), ("", "there is no simulated GPU host")],
    ids=["seen before the start", "seen when the worker starts"],
)
async def test_a_broker_whose_worker_cannot_work_serves_and_says_why(folder: Path, told: str, says: str) -> None:
    async with serving(folder, told, f"simulated:{folder}/nowhere") as client:
        status: HostStatus = await asyncio.to_thread(client.status)
    (device,) = status.devices
    assert says in device.why_not


async def test_a_driver_that_is_not_ready_yet_is_used_as_soon_as_it_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is real, its bindings are not: CUDA starts with an error, as on an HGX host whose fabric manager is still starting."""
    caplog.set_level(logging.INFO, logger="fractional_gpu.broker.process.driver_start")
    monkeypatch.setattr(driver_start, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(driver_start, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setenv("PYTHONPATH", stub_bindings.install(folder / "stub"))
    stub_bindings.answer(folder / "stub", 802)
    async with serving(folder, "", "nvidia") as client:
        (device,) = (await asyncio.to_thread(client.status)).devices
        assert "CUDA_ERROR_SYSTEM_NOT_READY (802)" in device.why_not
        assert "nvidia-fabricmanager" in device.why_not
        assert "the next one is at" in device.why_not
        _, findings = await asyncio.to_thread(check_broker, str(folder / "broker.sock"))
        (said,) = [one for one in findings if "kernels on device 0 cannot be suspended now" in one.finding]
        assert "CUDA_ERROR_SYSTEM_NOT_READY (802)" in said.finding
        assert said.severity is Severity.WARNING
        stub_bindings.answer(folder / "stub", 0)
        async with asyncio.timeout(DEADLINE_S):
            while device.why_not:
                (device,) = (await asyncio.to_thread(client.status)).devices
            while "checkpoint self-test" not in caplog.text:  # noqa: ASYNC110 - the end of the trial sets no event
                await asyncio.sleep(0)
    assert "the CUDA driver works now, after " in caplog.text


async def test_what_uses_a_device_runs_on_it_where_no_driver_can_be_asked() -> None:
    driver = Driver()
    async with kernel_of(2, {"close": "closed"}) as (kernel, _, pids):
        swaps = swaps_of(driver)
        swaps.inspector.off = MISSING
        assert await swaps.suspend(kernel, suspend_of(kernel), journal([])) == (
            "nothing-to-save",
            0,
            "the kernel has no CUDA context: nothing had to be saved",
        )
        driver.has_context(pids[0], ProcessState.RUNNING, 300)
        assert await swaps.suspend(kernel, suspend_of(kernel), journal([])) == ("impossible", 0, MISSING)
        truth = await swaps.truth(kernel, "GPU-0", 0)
        assert truth is not None
        assert truth.state is LeaseState.RESIDENT
        assert driver.calls == [], "nothing was asked of the driver"


async def test_what_was_saved_by_a_driver_that_is_gone_is_not_called_lost() -> None:
    driver = Driver()
    async with kernel_of(1) as (kernel, _, _pids):
        swaps = swaps_of(driver)
        swaps.inspector.off = MISSING
        assert await swaps.truth(kernel, "GPU-0", 300) is None
