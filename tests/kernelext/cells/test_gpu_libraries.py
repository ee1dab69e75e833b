"""A process has no way to the GPU only if neither its mappings nor its modules know one."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fractional_gpu_kernel.cells import barrier
from fractional_gpu_kernel.cells.barrier import STANDARD_LIBRARY, GpuLibraries


@pytest.fixture
def mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuLibraries]:
    """Return a look at a process that has mapped these files: name to content, None for one that is gone."""
    for name in barrier._MODULES:  # other tests' imports are not what is looked at
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "fractional_gpu.gpu.simulated.cuda", raising=False)
    maps = tmp_path / "maps"

    def look(mode: str = "r-xp", **contents: bytes | None) -> GpuLibraries:
        lines = ["7f00-7f01 rw-p 00000000 00:00 0", "7f02-7f03 r-xp 00000000 00:00 0 [vdso]"]
        for name, content in contents.items():
            path = tmp_path / f"{name}.so.1"
            if content is not None:
                path.write_bytes(content)
            lines.append(f"7f04-7f05 {mode} 00000000 08:01 1234    {path}")
        maps.write_text("\n".join(lines) + "\n")
        return GpuLibraries(maps)

    return look


def test_libraries_that_name_no_driver_are_no_way(mapped: Callable[..., GpuLibraries]) -> None:
    libraries = mapped(libm=b"\x7fELF" + b"x" * 3_000_000, libc=b"")
    assert libraries.way() == ""
    assert not libraries.is_loaded()


@pytest.mark.parametrize("name", ["libcuda", "libnvidia_ml", "libcudart", "libnvrtc", "libOpenCL"])
def test_a_library_of_cuda_is_one_however_it_is_mapped(mapped: Callable[..., GpuLibraries], name: str) -> None:
    libraries = mapped("r--p", libc=b"", **{name: b""})
    assert libraries.way() == f"{name}.so.1"
    assert libraries.is_loaded()


@pytest.mark.parametrize("before", [0, (1 << 20) - 3, (1 << 20) - 12, 5_000_000])
def test_a_library_that_names_the_driver_anywhere_is_one(mapped: Callable[..., GpuLibraries], before: int) -> None:
    libraries = mapped(xgboost=b"x" * before + b"\0libcuda.so.1\0")
    assert libraries.way() == "xgboost.so.1"
    assert not libraries.is_loaded(), "it is not there yet"
    assert libraries.way() == "xgboost.so.1", "what was found of a file is remembered"


def test_data_that_names_the_driver_is_none(mapped: Callable[..., GpuLibraries]) -> None:
    assert mapped("rw-p", data=b"libcuda.so.1").way() == ""


def test_a_library_that_cannot_be_read_is_one(mapped: Callable[..., GpuLibraries], tmp_path: Path) -> None:
    assert "cannot be read" in mapped(gone=None).way()
    assert "cannot be read" in GpuLibraries(tmp_path / "no maps").way()
    assert GpuLibraries(tmp_path / "no maps").is_loaded()


@pytest.mark.parametrize("name", ["_cffi_backend", "jaxlib", "numba.cuda"])
def test_a_module_that_loads_libraries_by_itself_is_one(
    mapped: Callable[..., GpuLibraries], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert mapped(libc=b"").way() == barrier._MODULES[name]


@pytest.mark.parametrize("used", [False, True])
def test_the_simulated_device_is_one_from_its_first_use_on(
    mapped: Callable[..., GpuLibraries], monkeypatch: pytest.MonkeyPatch, *, used: bool
) -> None:
    module = SimpleNamespace(is_in_use=lambda: used)
    monkeypatch.setitem(sys.modules, "fractional_gpu.gpu.simulated.cuda", module)
    assert bool(mapped(libc=b"").way()) == used


def test_python_without_its_lock_is_one(mapped: Callable[..., GpuLibraries], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert mapped(libc=b"").way()


def test_this_process_reads_its_own_mappings() -> None:
    assert any(path.startswith(STANDARD_LIBRARY) for path, runs in GpuLibraries()._mapped() if runs)
