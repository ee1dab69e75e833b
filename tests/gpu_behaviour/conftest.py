"""Each test here runs twice: on the simulated device, and on NVIDIA's interface over the double of its driver."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import Checkpointer, Monitor
from tests.driver_double.double import DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_behaviour.hosts import DEVICE_MIB, DoubleHost, Host, SimulatedDevices
from tests.gpu_sim.kernels import KernelProcess

MakeHost = Callable[[tuple[int, ...]], Host]


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """One process for all tests: starting Python and the bindings takes longer than most of them."""
    with Remote(DriverDouble(tmp_path_factory.mktemp("first") / "host")) as remote:
        yield remote


@pytest.fixture(params=["simulated", "double"])
def make_host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeHost]:
    """Make a host with devices of these sizes, MiB."""
    with ExitStack() as stack:

        def make(sizes: tuple[int, ...]) -> Host:
            if request.param == "simulated":
                made: Host = SimulatedDevices(tmp_path / "host", sizes)
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
