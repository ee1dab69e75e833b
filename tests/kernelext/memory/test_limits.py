"""Frameworks get the cap minus the context as their limit, and a user's own settings stay."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fractional_gpu_kernel.memory import CONTEXT_MIB, MemoryLimits, framework_mib
from tests.support.paths import PYTHONPATH

pytestmark = pytest.mark.promise("race-limits")

TORCH = """
calls = []
class cuda:
    queued = []
    initialized = False
    @staticmethod
    def _lazy_call(call): (call() if cuda.initialized else cuda.queued.append(call))
    @staticmethod
    def is_initialized(): return cuda.initialized
    @staticmethod
    def init():
        cuda.initialized = True
        for call in cuda.queued: call()
    @staticmethod
    def device_count(): return 1
    @staticmethod
    def get_device_properties(index):
        import types; return types.SimpleNamespace(total_memory=80 * 2**30)
    @staticmethod
    def set_per_process_memory_fraction(fraction, device): calls.append((round(fraction * 80 * 1024), device))
"""


@pytest.fixture
def torch_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    importlib.invalidate_caches()


@pytest.fixture
def limits() -> Any:  # noqa: ANN401
    made = MemoryLimits({"JUPYTER_GPU_MEMORY_MIB": "20480"})
    yield made
    made.hooks.close()
    sys.modules.pop("torch", None)


def import_torch() -> Any:  # noqa: ANN401
    return importlib.import_module("torch")


def test_the_context_is_taken_off_and_never_more_than_half() -> None:
    assert framework_mib(20480) == 20480 - CONTEXT_MIB
    assert framework_mib(600) == 300
    assert framework_mib(1) == 1


def test_a_measured_context_is_taken_off_and_never_more_than_three_quarters() -> None:
    assert framework_mib(20480, 900) == 20480 - 900
    assert framework_mib(1024, 700) == 324
    assert framework_mib(1000, 900) == 250
    assert framework_mib(20480, 100) == 20480 - CONTEXT_MIB, "a smaller figure than the floor is none"


@pytest.mark.parametrize("told", ["", "0", "-1", "many"])
def test_a_broker_that_has_measured_nothing_leaves_it_at_the_assumed_context(told: str) -> None:
    environment = {"JUPYTER_GPU_MEMORY_MIB": "20480", "JUPYTER_GPU_CONTEXT_MIB": told}
    MemoryLimits(environment).bind({})
    assert environment["CUPY_GPU_MEMORY_LIMIT"] == str((20480 - CONTEXT_MIB) * 2**20)


@pytest.mark.usefixtures("torch_on_path")
def test_another_figure_for_the_context_is_another_limit(limits: MemoryLimits) -> None:
    limits.install()
    torch = import_torch()
    torch.cuda.init()
    limits.bind({"JUPYTER_GPU_CONTEXT_MIB": "512"})
    assert not limits.is_stale
    limits.bind({"JUPYTER_GPU_CONTEXT_MIB": "896"})
    assert (limits.is_stale, limits.is_lowered) == (True, True)
    limits.refresh()
    assert torch.calls[-1] == (20480 - 896, 0)
    limits.bind({"JUPYTER_GPU_CONTEXT_MIB": "640"})
    assert (limits.is_stale, limits.is_lowered) == (True, False)


@pytest.mark.usefixtures("torch_on_path")
def test_torch_is_limited_when_it_initialises_cuda_and_not_before(limits: MemoryLimits) -> None:
    limits.install()
    torch = import_torch()
    assert torch.calls == []
    torch.cuda.init()
    assert torch.calls == [(20480 - CONTEXT_MIB, 0)]
    assert "exec_module" not in vars(torch.__spec__.loader), "the loader is as it was"


@pytest.mark.usefixtures("torch_on_path")
def test_a_torch_that_was_there_first_is_limited_at_once_if_it_uses_cuda(limits: MemoryLimits) -> None:
    torch = import_torch()
    torch.cuda.init()
    limits.install()
    assert torch.calls == [(20480 - CONTEXT_MIB, 0)]


@pytest.mark.usefixtures("torch_on_path")
def test_a_changed_cap_is_applied_before_the_next_cell(limits: MemoryLimits) -> None:
    limits.install()
    torch = import_torch()
    torch.cuda.init()
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "40960"})
    assert limits.is_stale
    limits.refresh()
    assert torch.calls[-1] == (40960 - CONTEXT_MIB, 0)
    assert not limits.is_stale


@pytest.mark.usefixtures("torch_on_path")
def test_a_torch_without_a_queue_is_limited_before_the_cell_after_its_start(limits: MemoryLimits) -> None:
    limits.install()
    torch = ModuleType("torch")
    calls: list[float] = []
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_initialized=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda _: SimpleNamespace(total_memory=2**40),
        set_per_process_memory_fraction=lambda fraction, _: calls.append(fraction),
    )
    limits.torch_imported(torch)
    assert len(calls) == 1


@pytest.mark.usefixtures("torch_on_path")
def test_a_cap_that_changes_before_cuda_starts_is_the_one_that_torch_gets(limits: MemoryLimits) -> None:
    limits.install()
    torch = import_torch()
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "10240"})
    assert (limits.is_stale, limits.is_lowered) == (True, True)
    limits.refresh()
    assert (torch.calls, limits.is_stale) == ([], False)
    torch.cuda.init()
    assert torch.calls == [(10240 - CONTEXT_MIB, 0)]


def test_cupy_that_is_loaded_is_told_unless_the_user_set_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def set_limit(size: int) -> None:
        told.append(size)

    pool = SimpleNamespace(set_limit=set_limit)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(get_default_memory_pool=lambda: pool))
    environment = {"JUPYTER_GPU_MEMORY_MIB": "20480"}
    limits = MemoryLimits(environment)
    limits.bind({})
    assert not limits.is_stale
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "40960"})
    assert (limits.is_stale, limits.is_lowered) == (True, False)
    limits.refresh()
    assert told == [(40960 - CONTEXT_MIB) * 2**20]
    environment["CUPY_GPU_MEMORY_LIMIT"] = "50%"
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "20480"})
    limits.refresh()
    assert len(told) == 1


def spoilt(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.usefixtures("torch_on_path")
def test_a_spoilt_cuda_context_is_left_for_the_next_cell_to_look_at_again(
    limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.install()
    torch = import_torch()
    torch.cuda.init()
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "40960"})
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, "set_per_process_memory_fraction", spoilt)
        limits.refresh()
    assert limits.is_stale
    limits.refresh()
    assert (torch.calls[-1], limits.is_stale) == ((40960 - CONTEXT_MIB, 0), False)


def test_a_cupy_that_cannot_be_told_stays_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace(set_limit=spoilt)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(get_default_memory_pool=lambda: pool))
    limits = MemoryLimits({"JUPYTER_GPU_MEMORY_MIB": "20480"})
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "40960"})
    limits.refresh()
    assert limits.is_stale


def test_a_missing_torch_is_still_reported_as_missing(limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.install()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError, match="torch"):
        import_torch()


def test_hints_are_set_renewed_and_leave_a_users_setting_alone() -> None:
    environment = {"JUPYTER_GPU_MEMORY_MIB": "20480", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    limits = MemoryLimits(environment)
    limits.bind({"CUDA_VISIBLE_DEVICES": "GPU-1", "JUPYTER_GPU_DEVICE_MIB": "81920", "BAD\0": "x", "A=B": "x"})
    assert environment["CUPY_GPU_MEMORY_LIMIT"] == str((20480 - CONTEXT_MIB) * 2**20)
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2437"
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert environment["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert not {"BAD\0", "A=B"} & environment.keys()
    environment["CUPY_GPU_MEMORY_LIMIT"] = "50%"
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "40960"})
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.4938"
    assert environment["CUPY_GPU_MEMORY_LIMIT"] == "50%"


@pytest.mark.parametrize("cap", ["", "0", "-5", "lots", "1.5", "٣"])
def test_a_cap_that_is_none_sets_nothing(cap: str) -> None:
    environment = {"JUPYTER_GPU_MEMORY_MIB": cap}
    MemoryLimits(environment).bind({})
    assert environment == {"JUPYTER_GPU_MEMORY_MIB": cap}


def test_loading_imports_nothing_that_waits_for_a_connection() -> None:
    code = (
        "import sys, IPython.core.completer, IPython.core.inputtransformer2, dataclasses\n"
        "import fractional_gpu_kernel.extension\n"
        "print([name for name in sys.modules if name.startswith('fractional_gpu.')], 'subprocess' in sys.modules and '')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("[] "), run.stdout
