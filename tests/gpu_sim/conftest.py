"""A small simulated host for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.gpu.simulated import host
from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from tests.gpu_sim.kernels import Kernel
from tests.gpu_sim.machine import Machine, virtual
from tests.support.paths import PYTHONPATH


@pytest.fixture
def simulated(tmp_path: Path) -> host.SimulatedHost:
    """Two devices of 256 MiB; a context takes 32 MiB."""
    return host.create(tmp_path / "host", "2x256MiB")


@pytest.fixture
def kernel(simulated: host.SimulatedHost) -> Iterator[Kernel]:
    """A process bound to the first device; it has no context yet."""
    with Kernel(simulated) as kernel:
        yield kernel


@pytest.fixture
def driver(simulated: host.SimulatedHost) -> Iterator[SimulatedCheckpointer]:
    driver = SimulatedCheckpointer(simulated.directory)
    yield driver
    driver.close()


@pytest.fixture
def monitor(simulated: host.SimulatedHost) -> Iterator[SimulatedMonitor]:
    monitor = SimulatedMonitor(simulated.directory)
    yield monitor
    monitor.close()


@pytest.fixture
def machine(simulated: host.SimulatedHost) -> Iterator[Machine]:
    """The host in virtual time."""
    with virtual(simulated.directory) as machine:
        yield machine


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
