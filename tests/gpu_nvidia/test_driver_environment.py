"""Our processes do not get the variables that CUDA's driver reads, even if the broker inherited them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fractional_gpu.gpu.worker_link import WorkerLink
from fractional_gpu.host.process import maps, read_environment
from tests.support import stub_bindings

PRELOADED = "libanl.so.1"  # of every glibc, and of no use to Python
INHERITED = {
    "CUDA_VISIBLE_DEVICES": "1",
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",  # noqa: S108 - nothing is made there
    "CUDA_MPS_LOG_DIRECTORY": "/tmp/nvidia-log",  # noqa: S108 - as above
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1024M",
    "CUDA_INJECTION64_PATH": "/opt/profiler.so",
    "NVTX_INJECTION64_PATH": "/opt/profiler.so",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MEMORY_LIMIT": "1024m",
    "CUDA_DEVICE_SM_LIMIT": "25",
    "LD_PRELOAD": PRELOADED,
}
LEFT = {"CUDA_MPS_PIPE_DIRECTORY": "/proc/self/without-mps"}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Bindings that write down the environment in which the driver starts; the test's process has inherited everything."""
    for name, value in INHERITED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", stub_bindings.install(tmp_path))
    monkeypatch.setenv("JUPYTER_GPU_OF_THE_BROKER", "kept")
    return tmp_path


def of_the_driver(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("CUDA", "NVTX", "LD_")) and name != "LD_LIBRARY_PATH"
    }


async def test_the_worker_inherits_nothing_that_changes_the_driver(stub: Path) -> None:
    link = WorkerLink("nvidia")
    try:
        await link.start()
        pid = link.pid
        assert pid is not None
        (seen,) = stub_bindings.environments(stub).items()
        assert seen[0] == pid
        assert of_the_driver(dict(seen[1])) == LEFT
        assert of_the_driver(read_environment(pid)) == LEFT, "also not while its libraries were loaded"
        assert not maps(pid, lambda path: PRELOADED in path)
        assert seen[1]["JUPYTER_GPU_OF_THE_BROKER"] == "kept"
    finally:
        await link.close()


def test_a_process_that_is_preloaded_by_others_is_seen_here() -> None:
    """Else the test above could not fail."""
    environment = {**os.environ, "LD_PRELOAD": PRELOADED}
    argv = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
    found = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    assert PRELOADED in found.stdout


def test_the_process_on_which_checkpoints_are_tried_sees_its_device_and_nothing_else(stub: Path) -> None:
    argv = [sys.executable, "-P", "-m", "fractional_gpu.gpu.probe_process", "nvidia"]
    subprocess.run(argv, input=b"", capture_output=True, check=False)
    (environment,) = stub_bindings.environments(stub).values()
    assert of_the_driver(dict(environment)) == {**LEFT, "CUDA_VISIBLE_DEVICES": "1"}
