"""Code that plans by the memory that torch reports plans by the share."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu_kernel.memory import CONTEXT_MIB, MemoryLimits
from tests.support.packages import write

MIB = 2**20
TOTAL = 81920 * MIB
LIMIT = (20480 - CONTEXT_MIB) * MIB

# As in torch 2.13: the functions are attributes of the package and of one of its modules, and accept any name of a
# device.
TORCH = f"""
class Device:
    def __init__(self, index): self.index = index
class memory:
    free = {{0: {TOTAL}, 1: {TOTAL}}}
    reserved = {{0: 0, 1: 0}}
    @staticmethod
    def mem_get_info(device=None): return memory.free[index_of(device)], {TOTAL}
    @staticmethod
    def memory_reserved(device=None): return memory.reserved[index_of(device)]
class cuda:
    memory = memory
    mem_get_info = memory.mem_get_info
    memory_reserved = memory.memory_reserved
    _lazy_call = staticmethod(lambda call: None)
class accelerator:
    @staticmethod
    def get_memory_info(device_index=None, /): return memory.mem_get_info(device_index)
def index_of(device):
    if device is None: return 0
    if isinstance(device, str): return int(device.partition(":")[2] or 0)
    return getattr(device, "index", device)
"""


@pytest.fixture
def environment() -> dict[str, str]:
    return {"JUPYTER_GPU_MEMORY_MIB": "20480"}


@pytest.fixture
def limits(environment: dict[str, str]) -> Iterator[MemoryLimits]:
    made = MemoryLimits(environment)
    made.install()
    yield made
    made.hooks.close()
    sys.modules.pop("torch", None)


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: MemoryLimits) -> Any:  # noqa: ANN401, ARG001 - limits watch the import
    write(tmp_path, {"torch.py": TORCH})
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return importlib.import_module("torch")


def reports(torch: Any, device: object) -> list[tuple[int, int]]:  # noqa: ANN401
    functions = (torch.cuda.mem_get_info, torch.cuda.memory.mem_get_info, torch.accelerator.get_memory_info)
    return sorted({function(device) for function in functions})


def test_it_is_what_the_allocator_may_still_take_and_may_take_at_all(torch: Any) -> None:  # noqa: ANN401
    assert torch.cuda.mem_get_info() == (LIMIT, LIMIT)
    torch.cuda.memory.reserved[0] = 300 * MIB
    assert torch.cuda.mem_get_info() == (LIMIT - 300 * MIB, LIMIT)
    torch.cuda.memory.reserved[0] = LIMIT + MIB
    assert torch.cuda.mem_get_info() == (0, LIMIT), "a limit was lowered below what is held"


def test_what_neighbours_leave_free_counts_if_it_is_less(torch: Any) -> None:  # noqa: ANN401
    torch.cuda.memory.free[0] = 1024 * MIB
    assert torch.cuda.mem_get_info() == (1024 * MIB, LIMIT)


@pytest.mark.parametrize("device", [1, "cuda:1"])
def test_each_device_is_counted_however_it_is_named(torch: Any, device: object) -> None:  # noqa: ANN401
    torch.cuda.memory.reserved[1] = 700 * MIB
    for named in (device, torch.Device(1)):
        assert reports(torch, named) == [(LIMIT - 700 * MIB, LIMIT)]
    assert reports(torch, None) == [(LIMIT, LIMIT)]


def test_a_resize_shows_at_once(torch: Any, limits: MemoryLimits) -> None:  # noqa: ANN401
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "40960"})
    assert torch.cuda.mem_get_info() == ((40960 - CONTEXT_MIB) * MIB,) * 2


def test_a_share_of_the_whole_device_is_not_more_than_the_device(torch: Any, limits: MemoryLimits) -> None:  # noqa: ANN401
    limits.bind({"JUPYTER_GPU_MEMORY_MIB": "819200"})
    assert torch.cuda.mem_get_info() == (TOTAL, TOTAL)


def test_a_user_can_ask_for_the_device_s_own_figures(torch: Any, environment: dict[str, str]) -> None:  # noqa: ANN401
    assert torch.cuda.mem_get_info.__wrapped__() == (TOTAL, TOTAL)
    environment["JUPYTER_GPU_MEMORY_INFO"] = "device"
    assert reports(torch, 0) == [(TOTAL, TOTAL)]


def test_where_the_driver_shows_the_share_its_own_figures_stay(torch: Any, limits: MemoryLimits) -> None:  # noqa: ANN401
    limits.bind({"JUPYTER_GPU_CAP": "driver"})
    assert reports(torch, 0) == [(TOTAL, TOTAL)]
    limits.bind({"JUPYTER_GPU_CAP": ""})
    assert reports(torch, 0) == [(LIMIT, LIMIT)]


@pytest.mark.parametrize("environment", [{}])
def test_a_kernel_without_a_cap_sees_the_device(torch: Any) -> None:  # noqa: ANN401
    assert torch.cuda.mem_get_info() == (TOTAL, TOTAL)


def test_an_extension_that_is_loaded_again_reports_by_its_own_limit(torch: Any, limits: MemoryLimits) -> None:  # noqa: ANN401
    limits.hooks.close()
    MemoryLimits({"JUPYTER_GPU_MEMORY_MIB": "40960"}).torch_imported(torch)
    assert torch.cuda.mem_get_info() == ((40960 - CONTEXT_MIB) * MIB,) * 2
