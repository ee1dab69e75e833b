"""A profiler that attaches NVIDIA's profiling interface to the kernel is noticed; others are no reason to refuse."""

import importlib
import mmap
import sys
from pathlib import Path

import pytest

from fractional_gpu_kernel.memory import CheckpointBlockers, ImportHooks, injected
from tests.support.packages import TORCH_PROFILER, write

# jax 0.10.2 and 0.4.30, tensorflow 2.x, triton 3.4.0, cupti-python 13.4.0.
JAX = {
    "jax/__init__.py": "",
    "jax/_src/__init__.py": "",
    "jax/_src/profiler.py": "def start_trace(log_dir): return log_dir\n"
    "def start_server(port): return port\ndef device_memory_profile(): return 'host'\n",
    "jax/profiler.py": "from jax._src.profiler import start_trace as start_trace, start_server as start_server\n"
    "from jax._src.profiler import device_memory_profile as device_memory_profile\n",
}
TF_FOLDER = "tensorflow/python/profiler"
TENSORFLOW = {
    **{f"{folder}/__init__.py": "" for folder in ("tensorflow", "tensorflow/python", TF_FOLDER)},
    f"{TF_FOLDER}/profiler_v2.py": "def start(logdir, options=None): return logdir\n",
}
TRITON = {
    "triton/__init__.py": "",
    "triton/profiler/__init__.py": "from .profile import start\n",
    "triton/profiler/profile.py": "def start(name=None, *, backend=None): return name\n",
}
CUPTI = {"cupti/__init__.py": "", "cupti/cupti.py": "def activity_enable(kind): return kind\n"}


def watched(folder: Path, files: dict[str, str]) -> CheckpointBlockers:
    write(folder, files)
    managed = CheckpointBlockers(lambda _: None)
    managed.install()
    return managed


@pytest.mark.parametrize("first", [True, False], ids=["imported before", "imported after"])
def test_torch_s_profiler_is_seen_when_it_traces_cuda_and_not_otherwise(packages: Path, first: bool) -> None:
    write(packages, TORCH_PROFILER)
    told: list[str] = []
    managed = CheckpointBlockers(told.append)
    if first:
        importlib.import_module("torch")
    managed.install()
    torch = importlib.import_module("torch")
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU]):
        assert managed.reason() == ""
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]):
        assert "torch's profiler" in managed.reason()
    assert managed.reason(), "the interface stays attached"
    assert "restarts" in told[0]
    assert torch.autograd.calls == ["prepare", "enable"] * 2


def test_torch_s_older_profiler_is_seen(packages: Path) -> None:
    managed = watched(packages, TORCH_PROFILER)
    torch = importlib.import_module("torch")
    with torch.autograd.profiler.profile(use_device="cuda"):
        assert "torch's profiler" in managed.reason()


def test_a_profiler_s_start_and_stop_without_a_profiler_attach_nothing(packages: Path) -> None:
    managed = watched(packages, TORCH_PROFILER)
    assert importlib.import_module("torch.cuda.profiler").start() == "cudaProfilerStart"
    assert managed.reason() == ""


@pytest.mark.parametrize(
    ("files", "function", "argument", "who"),
    [
        (TORCH_PROFILER, "torch.profiler._cupti_monitor:start_collection", "/tmp/x", "torch"),  # noqa: S108 - a name
        (JAX, "jax.profiler:start_trace", "logs", "JAX"),
        (JAX, "jax.profiler:start_server", 9999, "JAX"),
        (TENSORFLOW, "tensorflow.python.profiler.profiler_v2:start", "logs", "TensorFlow"),
        (TRITON, "triton.profiler:start", "run", "Proton"),
        (CUPTI, "cupti.cupti:activity_enable", 3, "cupti-python"),
    ],
    ids=str,
)
def test_other_profilers_are_seen(
    packages: Path, files: dict[str, str], function: str, argument: object, who: str
) -> None:
    managed = watched(packages, files)
    module, _, name = function.partition(":")
    loaded = importlib.import_module(module)
    assert managed.reason() == "", "loading is not profiling"
    assert getattr(loaded, name)(argument) == argument
    assert who in managed.reason()


def test_jax_s_memory_profile_needs_no_profiling_interface(packages: Path) -> None:
    managed = watched(packages, JAX)
    assert importlib.import_module("jax.profiler").device_memory_profile() == "host"
    assert managed.reason() == ""


@pytest.mark.parametrize("variable", ["CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"])
def test_a_library_that_a_variable_injects_counts_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    library = tmp_path / "libToolsInjection64.so"
    library.write_bytes(b"\0" * 4096)
    monkeypatch.setenv(variable, str(library))
    assert injected() == ""
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert injected().startswith(f"the profiler libToolsInjection64.so is attached to it ({variable})")
        assert injected() in CheckpointBlockers(lambda _: None).reason()
        monkeypatch.delenv(variable)
        assert injected() == "", "the broker looks for the names of known tools"


def test_built_in_modules_are_imported_as_ever_and_cannot_be_watched() -> None:
    name = next(
        name for name in ("xxsubtype", "_symtable") if name in sys.builtin_module_names
    )  # the first since 3.12 is none
    hooks = ImportHooks()
    imported: list[str] = []
    sys.modules.pop(name, None)
    hooks.after(name, lambda module: imported.append(module.__name__))
    try:
        importlib.reload(importlib.import_module(name))
        assert imported == []
    finally:
        hooks.close()
    importlib.reload(importlib.import_module(name))
