"""Managed memory is noticed when it is allocated, or before a suspend, without importing anything."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fractional_gpu_kernel.memory import CheckpointBlockers, ImportHooks, shrink
from tests.kernelext.parts import a_kernel
from tests.support.packages import CUPY, write


@pytest.mark.parametrize("first", [True, False], ids=["imported before", "imported after"])
def test_cupy_s_managed_memory_is_told_of_once_when_it_is_allocated(packages: Path, first: bool) -> None:
    write(packages, CUPY)
    told: list[str] = []
    managed = CheckpointBlockers(told.append)
    if first:
        importlib.import_module("cupy")
    managed.install()
    cupy = importlib.import_module("cupy")
    assert (told, managed.reason()) == ([], "")
    assert cupy.cuda.malloc_managed(7) == ("managed", 7)
    assert cupy.cuda.memory.malloc_managed(8) == ("managed", 8)
    assert cupy.cuda.malloc_managed.__doc__ == "Allocates."
    assert told == ["it uses CuPy's managed memory, which the driver cannot save"]
    assert managed.reason() == told[0]


NUMBA_API = """
import functools
def require_context(function):
    @functools.wraps(function)
    def within(*args):
        return function(*args)
    return within
@require_context
def managed_array(shape):
    return shape
"""


def test_numba_s_managed_arrays_are_seen(packages: Path) -> None:
    (packages / "numba" / "cuda").mkdir(parents=True)
    (packages / "numba" / "__init__.py").write_text("")
    (packages / "numba" / "cuda" / "__init__.py").write_text("from numba.cuda.api import managed_array\n")
    (packages / "numba" / "cuda" / "api.py").write_text(NUMBA_API)
    managed = CheckpointBlockers(lambda _: None)
    managed.install()
    cuda = importlib.import_module("numba.cuda")
    assert cuda.managed_array(3) == 3
    assert "numba" in managed.reason()


# bitsandbytes calls its library through ctypes: an optimizer's `get_state_buffer`, `functional.get_paged`, `lib.cget_managed_ptr`.
# Here the library is the process itself, and the function its `malloc`.
BNB_FUNCTIONAL = """
import ctypes as ct
from .cextension import lib
def get_paged(*shape, dtype=None, device=None):
    return lib.cget_managed_ptr(ct.c_size_t(4 * shape[0]))
"""
BNB_OPTIMIZER = """
import bitsandbytes.functional as F
class Optimizer2State:
    def __init__(self, is_paged=False): self.is_paged = is_paged
    def get_state_buffer(self, shape):
        return F.get_paged(shape) if self.is_paged else None
"""
BNB_CDLL = """
import ctypes as ct
class lib:
    cget_managed_ptr = ct.CDLL(None).malloc
lib.cget_managed_ptr.restype = ct.c_void_p
"""
BNB_NATIVE = """
import ctypes as ct
class BNBNativeLibrary:
    def __init__(self, lib): self._lib = lib
    def __getattr__(self, name): return getattr(self._lib, {"cget_managed_ptr": "malloc"}[name])
library = ct.CDLL(None)
library.malloc.restype = ct.c_void_p
lib = BNBNativeLibrary(library)
"""
BNB = {
    "bitsandbytes/functional.py": BNB_FUNCTIONAL,
    "bitsandbytes/optim/__init__.py": "",
    "bitsandbytes/optim/optimizer.py": BNB_OPTIMIZER,
}


@pytest.mark.parametrize("extension", [BNB_CDLL, BNB_NATIVE], ids=["as in 0.39.1 to 0.42.0", "as in 0.43.3 to 0.50.2"])
@pytest.mark.parametrize("first", [True, False], ids=["imported before", "imported after"])
def test_bitsandbytes_paged_optimizers_are_told_of_when_they_allocate(
    packages: Path, extension: str, first: bool
) -> None:
    imports = "from . import functional\nfrom .optim import optimizer\n"
    write(packages, {**BNB, "bitsandbytes/__init__.py": imports, "bitsandbytes/cextension.py": extension})
    told: list[str] = []
    managed = CheckpointBlockers(told.append)
    if first:
        importlib.import_module("bitsandbytes")
    managed.install()
    bitsandbytes = importlib.import_module("bitsandbytes")
    optimizer = bitsandbytes.optim.optimizer.Optimizer2State
    assert optimizer(is_paged=False).get_state_buffer(100) is None
    assert (told, managed.reason()) == ([], "")
    assert optimizer(is_paged=True).get_state_buffer(100)
    assert told == ["it uses bitsandbytes' paged optimizers (managed memory), which the driver cannot save"]
    assert managed.reason() == told[0]


# rmm 26.10.0; cudf-polars 26.10.2 sets a resource while a query runs, and the resource outlives the query with all that it holds.
RMM = {
    "rmm/__init__.py": "from rmm import mr\nfrom rmm.rmm import reinitialize\n",
    "rmm/mr/__init__.py": "from rmm.pylibrmm.memory_resource import *\n",
    "rmm/rmm.py": """
from rmm.pylibrmm import memory_resource
def reinitialize(pool_allocator=False, managed_memory=False, initial_pool_size=None):
    memory_resource.current = memory_resource.CudaMemoryResource()
""",
    "rmm/pylibrmm/__init__.py": "",
    "rmm/pylibrmm/memory_resource.py": """
class CudaMemoryResource: pass
class ManagedMemoryResource: pass
class PoolMemoryResource:
    def __init__(self, upstream_mr, initial_pool_size=None): self.upstream_mr = upstream_mr
class PrefetchResourceAdaptor:
    def __init__(self, upstream_mr): self.upstream_mr = upstream_mr
current = CudaMemoryResource()
def get_current_device_resource(): return current
def set_per_device_resource(device, mr):
    global current
    current = mr
def set_current_device_resource(mr): set_per_device_resource(0, mr)
""",
}
POLARS = """
import contextlib, functools, rmm
@functools.cache
def default_memory_resource(managed):
    if managed:
        return rmm.mr.PrefetchResourceAdaptor(rmm.mr.PoolMemoryResource(rmm.mr.ManagedMemoryResource()))
    return rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource())
@contextlib.contextmanager
def set_memory_resource(managed):
    previous = rmm.mr.get_current_device_resource()
    rmm.mr.set_current_device_resource(default_memory_resource(managed))
    try: yield
    finally: rmm.mr.set_current_device_resource(previous)
"""


@pytest.mark.parametrize("first", [True, False], ids=["imported before", "imported after"])
def test_a_managed_pool_that_is_current_only_while_a_query_runs_is_seen(packages: Path, first: bool) -> None:
    write(packages, {**RMM, "cudf_polars/__init__.py": "", "cudf_polars/callback.py": POLARS})
    managed = CheckpointBlockers(lambda _: None)
    if first:
        importlib.import_module("cudf_polars.callback")
    managed.install()
    callback = importlib.import_module("cudf_polars.callback")
    with callback.set_memory_resource(managed=False):
        assert managed.reason() == ""
    with callback.set_memory_resource(managed=True):
        pass
    assert managed.seen == "it uses managed memory through rmm, which the driver cannot save"


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        ("rmm.reinitialize(managed_memory=True)", True),
        ("rmm.reinitialize(True, True)", True),
        ("rmm.reinitialize(pool_allocator=True)", False),
        ("rmm.mr.set_per_device_resource(0, rmm.mr.ManagedMemoryResource())", True),
        ("rmm.mr.set_per_device_resource(0, mr=rmm.mr.CudaMemoryResource())", False),
    ],
)
def test_rmm_s_options_for_managed_memory_are_seen(packages: Path, call: str, seen: bool) -> None:
    write(packages, RMM)
    managed = CheckpointBlockers(lambda _: None)
    managed.install()
    exec(call, {"rmm": importlib.import_module("rmm")})  # noqa: S102 - what a cell would do
    assert bool(managed.seen) is seen


# PyCUDA 2026.1; cuda-bindings (`cuda.bindings.*`) and its names before 12.8; CuPy's runtime.
OTHERS = {
    "pycuda.driver": "managed_empty",
    "cuda.bindings.driver": "cuMemAllocManaged",
    "cuda.bindings.runtime": "cudaMallocManaged",
    "cuda.cuda": "cuMemAllocManaged",
    "cuda.cudart": "cudaMallocManaged",
}


@pytest.mark.parametrize("module_name", OTHERS)
def test_other_packages_functions_for_managed_memory_are_seen(packages: Path, module_name: str) -> None:
    path = Path(*module_name.split("."))
    parents = {str(parent / "__init__.py"): "" for parent in path.parents if parent.name}
    write(packages, {**parents, f"{path}.py": f"def {OTHERS[module_name]}(size): return size\n"})
    for name in [name for name in sys.modules if name.split(".")[0] == path.parts[0]]:
        del sys.modules[name]  # the real bindings, which the broker's tests load
    managed = CheckpointBlockers(lambda _: None)
    managed.install()
    assert getattr(importlib.import_module(module_name), OTHERS[module_name])(5) == 5
    assert "managed" in managed.seen


# torch 2.13.0: `torch.cuda.memory.MemPool`, and `torch.cuda._use_uvm`, which allocates through a pool with `cudaMallocManaged`.
MEM_POOL = """
import contextlib
class MemPool:
    def __init__(self, allocator=None, use_on_oom=False, no_split=False): self.allocator = allocator
@contextlib.contextmanager
def _use_uvm(device=None): yield MemPool(allocator="cudaMallocManaged")
"""


def test_a_memory_pool_of_torch_with_an_allocator_of_its_own_is_not_trusted(packages: Path) -> None:
    write(packages, {"torch/__init__.py": "", "torch/cuda/__init__.py": "", "torch/cuda/memory.py": MEM_POOL})
    managed = CheckpointBlockers(lambda _: None)
    managed.install()
    memory = importlib.import_module("torch.cuda.memory")
    assert memory.MemPool(use_on_oom=True).allocator is None
    assert managed.seen == ""
    assert memory.MemPool("mine").allocator == "mine"
    assert "pluggable" in managed.seen


@pytest.mark.parametrize("library", ["vllm.cumem_allocator", "torch_memory_saver"])
def test_pools_of_the_drivers_virtual_memory_can_be_saved(
    packages: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    write(packages, {"torch/__init__.py": "", "torch/cuda/__init__.py": "", "torch/cuda/memory.py": MEM_POOL})
    managed = CheckpointBlockers(lambda _: None)
    managed.install()
    monkeypatch.setitem(sys.modules, library, ModuleType(library))
    importlib.import_module("torch.cuda.memory").MemPool("its own")
    assert managed.seen == ""


def test_torch_s_own_managed_memory_is_seen(packages: Path) -> None:
    cuda = "from .memory import *\nfrom .memory import _use_uvm\n"
    write(packages, {"torch/__init__.py": "", "torch/cuda/__init__.py": cuda, "torch/cuda/memory.py": MEM_POOL})
    managed = CheckpointBlockers(lambda _: None)
    managed.install()
    torch = importlib.import_module("torch.cuda")
    assert managed.seen == ""
    with torch._use_uvm() as pool:
        assert pool.allocator == "cudaMallocManaged"
    assert managed.seen == "it uses torch's managed memory, which the driver cannot save"


# torch 2.13.0: an operator becomes an attribute of its namespace when it is first used. fbgemm_gpu 1.5.0 makes embeddings with it.
OPERATORS = """
import types
class _OpNamespace(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        setattr(self, name, lambda *args, out=None: name)
        return getattr(self, name)
class ops: fbgemm = _OpNamespace("torch.ops.fbgemm")
class cuda:
    @staticmethod
    def is_initialized(): return False
"""


def test_fbgemm_s_tensors_in_managed_memory_are_seen(packages: Path) -> None:
    write(packages, {"torch/__init__.py": OPERATORS, "fbgemm_gpu/__init__.py": ""})
    torch = importlib.import_module("torch")
    importlib.import_module("fbgemm_gpu")
    managed = CheckpointBlockers(lambda _: None)
    torch.ops.fbgemm.permute_2D_sparse_data()
    assert managed.reason() == ""
    assert torch.ops.fbgemm.new_unified_tensor() == "new_unified_tensor"
    assert "fbgemm_gpu" in managed.reason()


def test_an_import_that_fails_fails_as_it_would(packages: Path) -> None:
    (packages / "cupy").mkdir()
    (packages / "cupy" / "__init__.py").write_text("raise RuntimeError('no driver')")
    managed = CheckpointBlockers(lambda _: None)
    managed.install()
    with pytest.raises(RuntimeError, match="no driver"):
        importlib.import_module("cupy")
    assert managed.reason() == ""
    managed.hooks.close()
    assert not any(isinstance(finder, ImportHooks) for finder in sys.meta_path)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    made = ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)


class ManagedMemoryResource:
    """As rmm names it."""


class PoolMemoryResource:
    """One that gets its memory elsewhere."""

    def __init__(self, upstream: object) -> None:
        self.upstream_mr = upstream


@pytest.mark.parametrize(
    ("resource", "seen"),
    [
        (ManagedMemoryResource(), True),
        (PoolMemoryResource(PoolMemoryResource(ManagedMemoryResource())), True),
        (PoolMemoryResource(None), False),
        (object(), False),
    ],
)
def test_the_chain_of_rmm_s_resources_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, resource: object, seen: bool
) -> None:
    module(monkeypatch, "rmm", mr=SimpleNamespace(get_current_device_resource=lambda: resource))
    assert ("rmm" in CheckpointBlockers(lambda _: None).reason()) is seen


@pytest.mark.parametrize(
    ("initialised", "backend", "seen"),
    [(True, "pluggable", True), (True, "native", False), (False, "pluggable", False)],
)
def test_an_allocator_that_was_plugged_into_torch_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, backend: str, seen: bool
) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: initialised, get_allocator_backend=lambda: backend)
    module(monkeypatch, "torch", cuda=cuda)
    assert ("torch" in CheckpointBlockers(lambda _: None).reason()) is seen


@pytest.mark.parametrize(
    ("variable", "value", "package", "seen"),
    [
        ("TF_FORCE_UNIFIED_MEMORY", "1", "tensorflow", True),
        ("TF_FORCE_UNIFIED_MEMORY", "0", "jax", False),
        ("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "0", "llama_cpp", True),  # only the variable's presence counts
        ("FLAGS_use_cuda_managed_memory", "True", "paddle", True),
        ("FLAGS_use_cuda_managed_memory", "false", "paddle", False),
    ],
)
def test_frameworks_told_to_use_unified_memory_are_believed(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, package: str, seen: bool
) -> None:
    monkeypatch.setenv(variable, value)
    assert CheckpointBlockers(lambda _: None).reason() == ""
    module(monkeypatch, package)
    assert (package in CheckpointBlockers(lambda _: None).reason()) is seen


def test_a_package_of_another_version_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "rmm")
    module(monkeypatch, "torch", cuda=SimpleNamespace())
    assert CheckpointBlockers(lambda _: None).reason() == ""


def test_nothing_is_freed_where_nothing_will_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fractional_gpu_kernel.memory.free_caches", lambda: pytest.fail("disturbed"))
    answers: list[tuple[str, str]] = []

    def schedule(callback: object) -> bool:
        assert callable(callback)
        callback()
        return True

    kernel = a_kernel(on_main_loop=schedule, why_not="it cannot be saved")
    shrink(kernel, lambda word, detail: answers.append((word, detail)))
    assert answers == [("managed", "it cannot be saved")]
