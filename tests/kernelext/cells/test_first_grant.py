"""Code that asks for a GPU before the kernel has one gets "none", without changing the answer for cells that do have it."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fractional_gpu_kernel.cells.acquire import NO_DEVICE_KEPT, FirstGrant, _has_searched
from fractional_gpu_kernel.memory import ImportHooks
from tests.kernelext.kernels import RunningKernel, kernel_environment, running_kernel
from tests.kernelext.scripted_broker import ScriptedBroker
from tests.support.packages import write
from tests.support.paths import PYTHONPATH

# torch 2.13.0: torch/cuda/__init__.py asks through these two of torch._C; the library keeps its first count in a static variable
# (c10/cuda/CUDAFunctions.cpp), and the driver its first look at CUDA_VISIBLE_DEVICES.
TORCH_CORE = """
import os
_count = None
def _driver(): return len([one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one])
def _cuda_getDeviceCount():
    global _count
    _count = _driver() if _count is None else _count
    return _count
def _cuda_init():
    if not _cuda_getDeviceCount(): raise RuntimeError("No CUDA GPUs are available")
"""
TORCH_CUDA = """
import torch._C
_initialized = False
def is_available(): return torch._C._cuda_getDeviceCount() > 0
def is_initialized(): return _initialized
def device_count(): return torch._C._cuda_getDeviceCount()
def _lazy_call(call): pass
def init():
    global _initialized
    torch._C._cuda_init()
    _initialized = True
"""
TORCH = {"torch/__init__.py": "import torch.cuda\n", "torch/_C.py": TORCH_CORE, "torch/cuda/__init__.py": TORCH_CUDA}

# Like NVIDIA's driver: CUDA_VISIBLE_DEVICES is read once, and cuInit always repeats its first answer. What other
# calls return after a failed cuInit is not documented: AFTER_FAILURE is 3 (not initialised) or 100 (no device).
DRIVER = """
#include <stdlib.h>
static int answer = -1, initialised = 0;
int started(void) { return initialised; }
int cuInit(unsigned flags) {
    if (answer < 0) { const char *visible = getenv("CUDA_VISIBLE_DEVICES"); answer = visible && !*visible ? 100 : 0; }
    initialised = 1;
    return answer;
}
int cuDeviceGetCount(int *count) {
    if (answer < 0) return 3;
    if (answer) return AFTER_FAILURE;
    *count = 1;
    return 0;
}
"""
NUMBA = {
    "numba/__init__.py": "",
    "numba/cuda/__init__.py": "",
    "numba/cuda/cudadrv/__init__.py": "",
    "numba/cuda/cudadrv/driver.py": """
class Driver:
    initialization_error = None
    def ensure(self, cuInit):
        if code := cuInit(0): self.initialization_error = f"no device ({code})"
driver = Driver()
""",
}


@pytest.fixture
def awaited(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(packages, TORCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def built(folder: Path, after_failure: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    options = [f"-DAFTER_FAILURE={after_failure}", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", str(library), str(folder / "driver.c")], check=True)
    return library


@pytest.mark.usefixtures("awaited")
@pytest.mark.parametrize("first", [True, False], ids=["torch imported before", "torch imported after"])
def test_torch_finds_no_device_before_the_grant_and_its_device_after_it(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    grant = FirstGrant(ImportHooks())
    if first:
        importlib.import_module("torch")
    grant.install()
    torch = importlib.import_module("torch")
    originals = importlib.import_module("torch._C")
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
    with pytest.raises(RuntimeError, match="before the kernel has its GPU"):
        torch.cuda.init()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    grant.bind({"JUPYTER_GPU_MEMORY_MIB": "1024"})
    assert not torch.cuda.is_available(), "another size is no device"
    grant.bind({"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 1)
    torch.cuda.init()
    assert torch.cuda.is_initialized()
    assert originals._cuda_init.__name__ == "_cuda_init", "torch is as it was"


@pytest.mark.usefixtures("awaited")
def test_a_torch_that_is_imported_after_the_grant_is_left_alone() -> None:
    grant = FirstGrant(ImportHooks())
    grant.install()
    grant.bind({"CUDA_VISIBLE_DEVICES": "GPU-1"})
    importlib.import_module("torch")
    assert importlib.import_module("torch._C")._cuda_getDeviceCount.__name__ == "_cuda_getDeviceCount"


@pytest.mark.usefixtures("packages")
def test_a_torch_without_cuda_stays_one(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(packages, {"torch/__init__.py": "import torch._C\n", "torch/_C.py": ""})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    grant = FirstGrant(ImportHooks())
    grant.install()
    importlib.import_module("torch")
    assert not hasattr(importlib.import_module("torch._C"), "_cuda_getDeviceCount")


@pytest.mark.parametrize("visible", [None, "GPU-1"])
def test_a_kernel_that_has_its_device_from_the_start_waits_for_none(visible: str | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert not FirstGrant(ImportHooks(), environment).is_awaited


def kernel_without_device(folder: Path, broker: ScriptedBroker) -> dict[str, str]:
    return {**kernel_environment(folder, broker.path), "CUDA_VISIBLE_DEVICES": ""}


def granted(kernel: RunningKernel, broker: ScriptedBroker, code: str) -> Any:  # noqa: ANN401 - an Outcome
    request = kernel.send(code)
    broker.stream("acquire").granted(CUDA_VISIBLE_DEVICES="GPU-1")
    return kernel.finish(request)


def test_a_cpu_cell_s_question_does_not_spoil_torch_for_the_cells_with_a_gpu(
    folder: Path, broker: ScriptedBroker
) -> None:
    write(folder / "packages", TORCH)
    with running_kernel(kernel_without_device(folder, broker)) as kernel:
        ask = f"import sys; sys.path.insert(0, {str(folder / 'packages')!r}); import torch; print(torch.cuda.is_available())"
        assert kernel.run(f"%%cpu\n{ask}").printed == "False\n"
        assert granted(kernel, broker, "print(torch.cuda.is_available())").printed == "True\n"


@pytest.mark.parametrize(
    ("looks", "after_failure", "told"),
    [
        ("cuda.cuInit(0)", 100, True),
        ("driver.ensure(cuda.cuInit)", 3, True),
        ("pass", 3, False),
        ("pass", 100, False),
    ],
)
def test_a_driver_that_was_started_without_a_device_is_told_of_in_the_first_cell_with_one(
    folder: Path, broker: ScriptedBroker, looks: str, after_failure: int, told: bool
) -> None:
    write(folder / "packages", NUMBA)
    library = built(folder / "driver", after_failure)
    with running_kernel(kernel_without_device(folder, broker)) as kernel:
        load = f"import ctypes, sys; sys.path.insert(0, {str(folder / 'packages')!r}); cuda = ctypes.CDLL({str(library)!r})"
        assert kernel.run(f"%%cpu\n{load}\nfrom numba.cuda.cudadrv.driver import driver\n{looks}").status == "ok"
        outcome = granted(kernel, broker, "print(cuda.started(), cuda.cuInit(0))")
        assert outcome.printed == ("1 100\n" if told else "0 0\n"), "nothing is started that was not"
        assert [NO_DEVICE_KEPT in text for text in outcome.shown] == ([True] if told else [])
        assert kernel.run("1").shown == [], "it is said once"


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))


def test_frameworks_that_found_no_gpu_are_recognised_by_what_they_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numba.cuda.cudadrv.driver", "jax._src.xla_bridge", "tensorflow.python.eager.context"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not _has_searched()
    for backends, looked in (({}, False), ({"cpu": 1}, True), ({"cpu": 1, "cuda": 2}, False)):
        module(monkeypatch, "jax._src.xla_bridge", _backends=backends)
        assert _has_searched() is looked
    module(monkeypatch, "tensorflow.python.eager.context", _context=None)
    assert not _has_searched()
    module(monkeypatch, "tensorflow.python.eager.context", _context=SimpleNamespace(_physical_devices=["CPU"]))
    assert _has_searched()


def test_without_a_loaded_driver_nothing_is_loaded(tmp_path: Path) -> None:
    driver = built(tmp_path / "driver", 100)
    code = (
        "from fractional_gpu_kernel.cells.acquire import FirstGrant\n"
        "from fractional_gpu_kernel.memory import ImportHooks; import sys\n"
        "grant = FirstGrant(ImportHooks()); grant.bind({'CUDA_VISIBLE_DEVICES': 'GPU-1'})\n"
        "print(grant.is_due, repr(grant.check()), grant.is_due, 'ctypes' in sys.modules, 'libcuda' in open('/proc/self/maps').read())"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": str(driver.parent)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "True '' False False False\n"


@pytest.mark.usefixtures("awaited")
def test_a_grant_in_a_simulated_world_ends_the_wait() -> None:
    grant = FirstGrant(ImportHooks())
    assert grant.is_awaited
    grant.bind({"JUPYTER_GPU_SIMULATED_DEVICE": "SIM-1"})
    assert not grant.is_awaited
