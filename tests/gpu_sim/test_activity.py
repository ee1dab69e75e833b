"""The simulated device tells who works on it, threads and children included, as a real one does."""

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import DeviceActivity
from fractional_gpu.gpu.simulated import cuda
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.host.clock import since_boot_us


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedMonitor]:
    host = create(tmp_path / "host", "1x256MiB")
    monkeypatch.setenv("JUPYTER_GPU_SIMULATED_DIR", str(host.directory))
    monkeypatch.setenv("JUPYTER_GPU_SIMULATED_DEVICE", host.devices[0].device_id)
    monkeypatch.delenv("JUPYTER_GPU_MEMORY_MIB", raising=False)
    monkeypatch.delenv("JUPYTER_GPU_LEASE", raising=False)
    with closing(SimulatedMonitor(host.directory)) as made:
        yield made
        cuda.reset()
    destroy(host.directory)


def now_us() -> int:
    return since_boot_us()


def activity(monitor: SimulatedMonitor, since_us: int = 0) -> DeviceActivity:
    return monitor.activity(monitor.devices()[0].device_id, since_us)


def test_a_context_that_did_nothing_has_not_worked(monitor: SimulatedMonitor) -> None:
    with cuda.allocate(1 << 20):
        assert activity(monitor).worked_us == {}


def test_work_is_told_with_the_time_at_which_it_ended(monitor: SimulatedMonitor) -> None:
    began_us = now_us()
    with cuda.allocate(1 << 20) as buffer:
        buffer.fill(b"a")
        seen = activity(monitor)
        assert began_us <= seen.worked_us[os.getpid()] <= now_us()
        assert seen.known_until_us <= now_us()
        assert activity(monitor, now_us()).worked_us == {}, "nothing was done since"


def test_work_under_way_in_a_thread_is_told_as_going_on(monitor: SimulatedMonitor) -> None:
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        cuda.launch(0)
        begun.set()
        while not stop.is_set():
            cuda.launch(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(30)
        for _ in range(3):
            cuda.launch(0)  # another piece of work that ends does not hide it
            until_us = now_us() + 30_000_000
            while os.getpid() not in activity(monitor, now_us()).worked_us:  # it may be between two pieces just now
                assert now_us() < until_us
    finally:
        stop.set()
        thread.join()


def test_what_ended_early_does_not_work_on(monitor: SimulatedMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    cuda.launch(0)
    with monkeypatch.context() as patch:
        patch.setattr("fractional_gpu.gpu.simulated.cuda.time.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cuda.launch(3600)
    assert activity(monitor, now_us()).worked_us == {}
