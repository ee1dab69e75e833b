"""Managed memory is noticed when it is allocated, or before a suspend, without importing anything."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kernelext.gate import Gate
from kernelext.managed import ManagedMemory
from kernelext.shrink import Shrinker

CUPY = "from cupy import cuda\n"
CUPY_CUDA = "from cupy.cuda.memory import malloc_managed\n"
CUPY_MEMORY = "def malloc_managed(size):\n    'Allocates.'\n    return ('managed', size)\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages that can be imported, and are forgotten at the end."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, finders = set(sys.modules), list(sys.meta_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.meta_path[:] = finders
    importlib.invalidate_caches()


def write_cupy(folder: Path) -> None:
    (folder / "cupy" / "cuda").mkdir(parents=True)
    (folder / "cupy" / "__init__.py").write_text(CUPY)
    (folder / "cupy" / "cuda" / "__init__.py").write_text(CUPY_CUDA)
    (folder / "cupy" / "cuda" / "memory.py").write_text(CUPY_MEMORY)


@pytest.mark.parametrize("first", [True, False], ids=["imported before", "imported after"])
def test_cupy_s_managed_memory_is_told_of_once_when_it_is_allocated(packages: Path, first: bool) -> None:
    write_cupy(packages)
    told: list[str] = []
    managed = ManagedMemory(told.append)
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
    managed = ManagedMemory(lambda _: None)
    managed.install()
    cuda = importlib.import_module("numba.cuda")
    assert cuda.managed_array(3) == 3
    assert "numba" in managed.reason()


def test_an_import_that_fails_fails_as_it_would(packages: Path) -> None:
    (packages / "cupy").mkdir()
    (packages / "cupy" / "__init__.py").write_text("raise RuntimeError('no driver')")
    managed = ManagedMemory(lambda _: None)
    managed.install()
    with pytest.raises(RuntimeError, match="no driver"):
        importlib.import_module("cupy")
    assert managed.reason() == ""
    managed.uninstall()
    managed.uninstall()
    assert managed not in sys.meta_path


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
    assert ("rmm" in ManagedMemory(lambda _: None).reason()) is seen


@pytest.mark.parametrize(
    ("initialised", "backend", "seen"),
    [(True, "pluggable", True), (True, "native", False), (False, "pluggable", False)],
)
def test_an_allocator_that_was_plugged_into_torch_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, backend: str, seen: bool
) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: initialised, get_allocator_backend=lambda: backend)
    module(monkeypatch, "torch", cuda=cuda)
    assert ("torch" in ManagedMemory(lambda _: None).reason()) is seen


def test_frameworks_told_to_use_unified_memory_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_FORCE_UNIFIED_MEMORY", "1")
    assert ManagedMemory(lambda _: None).reason() == ""
    module(monkeypatch, "tensorflow")
    assert "tensorflow" in ManagedMemory(lambda _: None).reason()


def test_a_package_of_another_version_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "rmm")
    module(monkeypatch, "torch", cuda=SimpleNamespace())
    assert ManagedMemory(lambda _: None).reason() == ""


def test_nothing_is_freed_where_nothing_will_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelext.shrink.free_caches", lambda: pytest.fail("disturbed"))
    answers: list[tuple[str, str]] = []

    def schedule(callback: object) -> bool:
        assert callable(callback)
        callback()
        return True

    shrinker = Shrinker(schedule, Gate(lambda _: None), why_not=lambda: "it cannot be saved")
    shrinker.shrink(lambda word, detail: answers.append((word, detail)))
    assert answers == [("managed", "it cannot be saved")]
