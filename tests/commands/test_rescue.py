"""`jupyter gpu rescue` with nothing to restore, or no device to restore it to."""

import json
from pathlib import Path

import pytest

from fractional_gpu.broker.process import driver_start
from fractional_gpu.commands import rescue
from fractional_gpu.commands.main import main
from fractional_gpu.gpu.interface import DeviceInfo


class NoDevices:
    kind = "nvidia"
    why_none = "the driver is not installed"

    def devices(self) -> list[DeviceInfo]:
        return []

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver_start, "open_monitor", lambda _: NoDevices())
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(tmp_path / "run" / "b.sock"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))


def test_where_no_kernel_lives_a_missing_device_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescue"]) == 0
    assert capsys.readouterr() == ("There are no kernels to rescue.\n", "")
    assert main(["rescue", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == []


def test_kernels_that_cannot_come_back_without_a_device_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rescue, "kernels_of", lambda _socket: [101, 102])
    assert main(["rescue"]) == 1
    said = capsys.readouterr().err
    assert "no GPU was found: the driver is not installed. The saved state of 2 kernels needs a device" in said
    assert "simulate" not in said.lower(), "simulated devices bring nothing of a real one back"
