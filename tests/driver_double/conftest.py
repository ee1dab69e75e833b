"""A host of the double, and processes on it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.driver_double.double import DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_sim.kernels import KernelProcess

StartKernel = Callable[..., KernelProcess]


@pytest.fixture
def double(tmp_path: Path) -> DriverDouble:
    """Two devices of 1 GiB; a context takes 32 MiB."""
    double = DriverDouble(tmp_path / "host")
    double.set(context_mib=32)
    return double


@pytest.fixture
def start(double: DriverDouble) -> Iterator[StartKernel]:
    """Start processes; they end with the test."""
    with ExitStack() as stack:

        def start(**environment: str) -> KernelProcess:
            whole = {**double.environment(), **environment}
            return stack.enter_context(KernelProcess("tests.driver_double.device", whole))

        yield start


@pytest.fixture
def kernel(start: StartKernel) -> KernelProcess:
    """A process without a context."""
    return start()


@pytest.fixture(scope="session")
def remote_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """One process for all tests: starting Python and the bindings takes longer than most of them."""
    with Remote(DriverDouble(tmp_path_factory.mktemp("first") / "host")) as remote:
        yield remote


@pytest.fixture
def remote(remote_process: Remote, double: DriverDouble) -> Remote:
    """A checkpointer and a monitor in a separate process, which has started the driver."""
    remote_process.use(double)
    return remote_process
