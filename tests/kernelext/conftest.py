"""A scripted broker, and a kernel with a lease there."""

import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernelext.kernels import RunningKernel, forked_kernel, kernel_environment
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
    with forked_kernel(kernel_environment(folder, broker.path)) as kernel:
        yield kernel


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before, finders = dict(sys.modules), list(sys.meta_path)
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)
    sys.meta_path[:] = finders
    importlib.invalidate_caches()
