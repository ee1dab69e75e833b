"""Each test here runs on the simulated device, and on NVIDIA's interface over the double of its driver.

Some also run on the kind of device that examples/device-kind adds; all of them with JUPYTER_GPU_ALL_KINDS=1.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import Checkpointer, Monitor
from tests.driver_double.double import DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_behaviour.hosts import DEVICE_MIB, DoubleHost, Host, OutsideDevices, SimulatedDevices
from tests.gpu_sim.kernels import KernelProcess
from tests.support.outside import as_installed

MakeHost = Callable[[tuple[int, ...]], Host]
_OUTSIDE_TOO = ("test_worker.py",)  # a worker opens it by its entry point, and every operation goes through it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the example of a kind shares with the simulated device, unless all of it is asked for."""
    if os.environ.get("JUPYTER_GPU_ALL_KINDS"):
        return
    here = Path(__file__).parent
    out = [
        item
        for item in items
        if item.path.parent == here and item.path.name not in _OUTSIDE_TOO and "outside" in item.name
    ]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in set(out)]


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """One process for all tests: starting Python and the bindings takes longer than most of them."""
    with Remote(DriverDouble(tmp_path_factory.mktemp("first") / "host")) as remote:
        yield remote


@pytest.fixture(params=["simulated", "double", "outside"])
def make_host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeHost]:
    """Make a host with devices of these sizes, MiB."""
    with ExitStack() as stack:

        def make(sizes: tuple[int, ...]) -> Host:
            if request.param == "simulated":
                made: Host = SimulatedDevices(tmp_path / "host", sizes)
            elif request.param == "outside":
                path = stack.enter_context(as_installed("device-kind", tmp_path / "site"))
                made = OutsideDevices(tmp_path / "host", sizes, path)
            else:
                double = DoubleHost.make_double(tmp_path / "host", sizes)
                made = DoubleHost(double, request.getfixturevalue("remote"))
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def host(make_host: MakeHost) -> Host:
    """Two devices of 256 MiB; a context takes 32 MiB."""
    return make_host((DEVICE_MIB, DEVICE_MIB))


@pytest.fixture
def kernel(host: Host) -> Iterator[KernelProcess]:
    """A process bound to the first device; it has no context yet."""
    with host.kernel() as kernel:
        yield kernel


@pytest.fixture
def driver(host: Host) -> Checkpointer:
    return host.checkpointer


@pytest.fixture
def monitor(host: Host) -> Monitor:
    return host.monitor
