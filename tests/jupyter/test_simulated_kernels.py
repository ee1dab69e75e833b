"""A kernelspec for simulated devices brings them along: it works when the broker that it was installed from has ended."""

from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.client import discovery
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.jupyter.kernel_command import parse_kernel_config
from fractional_gpu.jupyter.kernel_lease import take_lease
from fractional_gpu.jupyter.kernelspecs import install
from fractional_gpu.protocol.errors import BadRequestError, BrokerUnavailableError, ConflictError
from fractional_gpu.protocol.messages import LeaseRequest
from tests.support.fake_broker import Call, FakeBroker

Started = list[tuple[list[str], dict[str, str]] | None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    commands: Started = []

    def start(_client: object, _timeout_s: float, command: tuple[list[str], dict[str, str]] | None) -> None:
        commands.append(command)
        raise BrokerUnavailableError("not started")

    monkeypatch.setattr(discovery, "_start_once", start)
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(tmp_path / "b.sock"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("JUPYTER_GPU_SIMULATE", raising=False)
    return commands


def take(simulate: str | None) -> None:
    take_lease(LeaseRequest(fraction_milli=250), timeout_s=5, simulate=simulate)


def test_the_first_broker_has_the_devices_of_the_kernelspec(started: Started) -> None:
    with pytest.raises(BrokerUnavailableError):
        take("1x1GiB")
    assert [command and command[1] for command in started] == [{"JUPYTER_GPU_SIMULATE": "1x1GiB"}]


def test_what_the_environment_and_the_last_broker_say_goes_before(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SIMULATE", "2x8GiB")
    with pytest.raises(BrokerUnavailableError):
        ensure_broker(simulate="1x1GiB")
    monkeypatch.delenv("JUPYTER_GPU_SIMULATE")
    settings = tmp_path / "broker.json"
    settings.write_text('{"argv": ["the broker of kernels that live"]}')
    settings.chmod(0o600)
    with pytest.raises(BrokerUnavailableError):
        ensure_broker(simulate="1x1GiB")
    assert started == [None, None]


class RealBroker(FakeBroker):
    def answer(self, call: Call, token: str) -> dict[str, Any]:
        return {**super().answer(call, token), "simulated": False}


def test_a_broker_with_real_devices_is_not_taken_for_simulated_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "b.sock")
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", path)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    with RealBroker(path) as broker:
        with pytest.raises(
            ConflictError, match=r"for simulated GPUs \(1x1GiB\), but the GPU broker at .* has real ones; pick"
        ):
            take("1x1GiB")
        assert "create" not in broker.routes()
        take(None)
    with FakeBroker(path) as broker:
        take("4x1GiB")  # other simulated devices are as good


def test_the_stanza_is_checked() -> None:
    _, simulate = parse_kernel_config({"simulate": "2x80GiB,1x40GiB"}, default_pool="default", default_fraction="1/4")
    assert simulate == "2x80GiB,1x40GiB"
    for wrong in (7, "lots", "2x80GiB\n", "1x1GiB; rm"):
        with pytest.raises(BadRequestError, match=r"simulate is .*; expected COUNTxMEMORY such as 2x80GiB"):
            parse_kernel_config({"simulate": wrong}, default_pool="default", default_fraction="1/4")


def test_a_kernel_with_the_launcher_is_told_by_its_command(tmp_path: Path) -> None:
    (spec,) = install("default", [250], directory=str(tmp_path), simulated=True, simulate="1x1GiB", launcher=True)
    assert '"--simulate",\n  "1x1GiB"' in (spec.folder / "kernel.json").read_text()
