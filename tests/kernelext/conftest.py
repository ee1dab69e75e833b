"""A scripted broker, and a kernel that has a lease at it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernelext.kernels import RunningKernel, kernel_environment, running_kernel
from tests.kernelext.scripted_broker import ScriptedBroker


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="jfg-") as name:  # short: UNIX sockets allow 107 bytes
        yield Path(name)


@pytest.fixture
def broker(folder: Path) -> Iterator[ScriptedBroker]:
    with ScriptedBroker(str(folder / "broker.sock")) as broker:
        yield broker


@pytest.fixture
def kernel(folder: Path, broker: ScriptedBroker) -> Iterator[RunningKernel]:
    with running_kernel(kernel_environment(folder, broker.path)) as kernel:
        yield kernel
