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

from fractional_gpu.commands.demo import sandbox
from fractional_gpu.commands.demo.sandbox import EXAMPLES, examples_dir
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.gpu.simulated import cuda
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.jupyter.kernelspecs import spec_name

MIB = 2**20
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


@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.usefixtures("simulated_share", "device")
def test_a_notebook_finds_its_data_intact_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    variables: dict[str, Any] = {}
    for cell in read(name).cells:
        if cell.cell_type == "code":
            exec(cell.source, variables)  # noqa: S102 - our own notebook
    result = shown[-1]["application/json"]
    assert result["notebook"] == Path(name).stem
    assert result["bytes"] == 144 * MIB  # three quarters of the share
    assert (result["intact"], result["wrong_bytes"], result["simulated"]) == (True, 0, True)
    variables.clear()


@pytest.mark.usefixtures("simulated_share")
def test_a_single_lost_byte_is_noticed(device: Any) -> None:  # noqa: ANN401 - a module without annotations
    data = device.open().fill(seed=5, size=32 * MIB)
    data.step(2)
    assert data.wrong_bytes() == 0
    chunk = data.chunks[1]
    right = chunk.read(1, offset=1000)
    chunk.write(bytes([right[0] ^ 1]), offset=1000)
    assert data.wrong_bytes() == 1


@pytest.mark.usefixtures("simulated_share")
def test_a_share_too_small_is_refused_with_what_to_do(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    monkeypatch.setenv("JUPYTER_GPU_MEMORY_MIB", "16")
    with pytest.raises(ValueError, match="a share of 16 MiB is too small for this notebook; ask for a bigger fraction"):
        device.open().fill(seed=5)


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


def test_an_installation_without_the_examples_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sandbox, "__file__", str(tmp_path / "fractional_gpu" / "commands" / "notebooks" / "example_paths.py")
    )
    with pytest.raises(CommandError, match="the example notebooks are missing"):
        examples_dir()
    packaged = tmp_path / "fractional_gpu" / "commands" / "notebooks" / "examples"
    packaged.mkdir(parents=True)
    for name in EXAMPLES:
        (packaged / name).touch()
    assert examples_dir() == packaged
