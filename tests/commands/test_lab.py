"""`jupyter gpu lab`: what it prepares before it becomes JupyterLab."""

import os
import sys
from pathlib import Path

import pytest

from fractional_gpu.commands import lab
from fractional_gpu.commands.main import main
from fractional_gpu.jupyter.kernelspecs import list_installed
from tests.commands.conftest import OwnBroker


class BecameJupyterLabError(Exception):
    """Raised where this process would become another program."""

    def __init__(self, path: str, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(path)
        self.command = command
        self.environment = environment


@pytest.fixture
def execve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def become(path: str, command: list[str], environment: dict[str, str]) -> None:
        raise BecameJupyterLabError(path, command, environment)

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.mark.usefixtures("execve")
def test_it_becomes_jupyterlab_with_kernels_that_only_it_sees(
    broker: OwnBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", "/elsewhere")
    broker.extra["pools"] = {"default": [250, 750]}
    with pytest.raises(BecameJupyterLabError) as became:
        main(["lab", "--no-browser", "--port", "9999", "notebook.ipynb"])
    command = [sys.executable, "-P", "-m", "jupyterlab", "--no-browser", "--port", "9999", "notebook.ipynb"]
    assert became.value.command == command
    private, *others = became.value.environment["JUPYTER_PATH"].split(os.pathsep)
    assert others == ["/elsewhere"]
    assert Path(private).is_relative_to(tmp_path)
    names = [spec.display_name for spec in list_installed(f"{private}/kernels")]
    assert names == ["Python 3 · 1/4 GPU (simulated)", "Python 3 · 3/4 GPU (simulated)"]
    assert became.value.environment["JUPYTER_GPU_SOCKET"] == broker.path
    assert "simulated: no real GPU is involved" in capsys.readouterr().err


def test_simulated_devices_get_a_separate_broker(broker: OwnBroker, short_runtime: Path) -> None:
    _, socket = lab._locate("1x2GiB")
    assert socket != broker.path
    assert Path(socket).is_relative_to(short_runtime)
    assert lab._locate("2x2GiB")[1] != socket


@pytest.fixture
def short_runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
    return folder


def test_without_jupyterlab_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["lab"]) == 1
    assert "this needs jupyterlab; run: pip install 'jupyter-fractional-gpu[lab]'" in capsys.readouterr().err
