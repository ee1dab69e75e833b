"""The example notebooks: as files, and run on a simulated GPU in this process."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

from fractional_gpu.commands.demo.sandbox import EXAMPLES, examples_dir
from fractional_gpu.gpu.simulated import cuda
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.jupyter.kernelspecs import spec_name

NOTEBOOKS = [name for name in EXAMPLES if name.endswith(".ipynb")]


def read(name: str) -> Any:  # noqa: ANN401 - nbformat has no types
    return nbformat.reads((examples_dir() / name).read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The helper next to the notebooks, imported as they import it."""
    spec = importlib.util.spec_from_file_location("device", examples_dir() / "device.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "device", module)
    yield module
    cuda.reset()


@pytest.fixture
def simulated_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has 3/4 of a simulated GPU of 256 MiB."""
    host = create(tmp_path / "host", "1x256MiB")
    monkeypatch.setenv("JUPYTER_GPU_SIMULATED_DIR", str(host.directory))
    monkeypatch.setenv("JUPYTER_GPU_SIMULATED_DEVICE", host.devices[0].device_id)
    monkeypatch.setenv("JUPYTER_GPU_MEMORY_MIB", "192")
    yield
    destroy(host.directory)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_valid_clean_and_names_the_demonstrations_kernel(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == spec_name("default", 750)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert [cell.execution_count for cell in code] == [None] * len(code)


def test_the_notebooks_take_turns_cell_by_cell() -> None:
    counts = {name: sum(cell.cell_type == "code" for cell in read(name).cells) for name in NOTEBOOKS}
    assert len(set(counts.values())) == 1, counts


@pytest.mark.usefixtures("simulated_share")
def test_the_device_names_the_share_that_the_kernel_has_now(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = device.open()
    for mib in ("192", "256", "64"):
        monkeypatch.setenv("JUPYTER_GPU_MEMORY_MIB", mib)  # as a resize does, and a cell under %%gpu
        assert f"{mib} MiB of it are this kernel's share" in repr(gpu)


@pytest.mark.parametrize("available", [None, False])
def test_a_kernel_without_a_gpu_is_told_what_to_do(
    device: Any,  # noqa: ANN401 - a module without annotations
    available: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "JUPYTER_GPU_SIMULATED_DIR" not in os.environ
    torch: ModuleType | None = None  # makes `import torch` fail
    if available is not None:
        torch = ModuleType("torch")
        torch.cuda = ModuleType("torch.cuda")  # type: ignore[attr-defined]
        torch.cuda.is_available = lambda: available
    monkeypatch.setitem(sys.modules, "torch", torch)
    wanted = "pip install torch" if torch is None else "Change Kernel"
    with pytest.raises(RuntimeError, match=wanted):
        device.open()
