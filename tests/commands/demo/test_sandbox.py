"""The demonstration's place: apart from everything else, and gone afterwards."""

import os
import select
import signal
import tempfile
from pathlib import Path

import pytest

from fractional_gpu.client.discovery import IN_WORKLOAD, socket_path
from fractional_gpu.commands.demo import demo
from fractional_gpu.commands.demo.sandbox import (
    EXAMPLES,
    Sandbox,
    interrupt_on_termination,
    open_sandbox,
    sandbox_environment,
)
from fractional_gpu.commands.terminal.text import CommandError
from fractional_gpu.config import load
from fractional_gpu.gpu.interface import DeviceInfo
from fractional_gpu.jupyter.kernelspecs import list_installed


def test_the_environment_forgets_other_kernels_and_brokers() -> None:
    outside = {
        "PATH": "/bin",
        "JUPYTER_GPU_LEASE": "somebody's",
        "JUPYTER_GPU_SIMULATE": "1x1GiB",
        "JUPYTER_PATH": "/theirs",
        "JUPYTER_RUNTIME_DIR": "/theirs",
    }
    inside = sandbox_environment(Path("/sandbox"), outside)
    assert inside["PATH"] == "/bin"
    assert {name for name in inside if name.startswith("JUPYTER_GPU_")} == {"JUPYTER_GPU_SOCKET", IN_WORKLOAD}
    assert "/theirs" not in inside.values()


def test_inside_everything_is_the_sandboxs_and_outside_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_GPU_LEASE", "somebody's")
    before = dict(os.environ)
    with open_sandbox(keep=False) as sandbox:
        assert socket_path() == sandbox.socket
        assert "JUPYTER_GPU_LEASE" not in os.environ
        assert sorted(file.name for file in sandbox.notebooks.iterdir()) == sorted(EXAMPLES)
        sandbox.install_kernels(simulated=True)
        (spec,) = list_installed(directory=str(sandbox.root / "data" / "kernels"))
        assert spec.name == "fractional-gpu-default-750"
        assert sandbox.root.stat().st_mode & 0o077 == 0
    assert not sandbox.root.exists()
    assert dict(os.environ) == before


def test_a_folder_that_is_to_be_kept_is_kept_and_a_failure_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="jfg-") as short:  # pytest's own folders can be too deep for a socket
        monkeypatch.setattr("tempfile.tempdir", short)
        with pytest.raises(CommandError, match="no luck"), open_sandbox(keep=False):
            raise CommandError("no luck")
        assert list(Path(short).iterdir()) == []
        with open_sandbox(keep=True) as sandbox:
            pass
        assert (sandbox.notebooks / EXAMPLES[0]).is_file()


def test_a_temporary_folder_too_deep_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(CommandError, match="set TMPDIR to a shorter one"), open_sandbox(keep=False):
        pass
    assert list(deep.iterdir()) == []


def test_a_broker_that_does_not_start_says_why() -> None:
    with open_sandbox(keep=False) as sandbox, pytest.raises(CommandError, match=r"^simulated devices '0x1GiB' are"):
        sandbox.start_broker(simulate="0x1GiB", device=0)


def test_a_broker_serves_one_device_and_is_stopped_at_the_end() -> None:
    with open_sandbox(keep=False) as sandbox:
        with sandbox.start_broker(simulate="2x64MiB", device=1) as client:
            status = client.status()
            pidfd = os.pidfd_open(status.pid)
        assert [device.index for device in status.devices] == [1]
        assert status.pools == {"default": [750]}
        assert load(sandbox.root / "config" / "demo_config.py").devices == ("1",)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    try:
        assert ended.poll(0), "the broker still runs"
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_asked_to_end_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupt_on_termination():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_being_asked_to_end_is_an_interrupt_where_ctrl_c_is_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), interrupt_on_termination():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


class Machine:
    """A monitor of the machine's GPUs."""

    kind = "nvidia"

    def __init__(self, *devices: DeviceInfo) -> None:
        self._devices = devices
        self.closed = False

    def devices(self) -> list[DeviceInfo]:
        return list(self._devices)

    def close(self) -> None:
        self.closed = True


def gpu(name: str, why_not: str = "") -> DeviceInfo:
    return DeviceInfo(
        device_id=f"GPU-{name}",
        index=0,
        name=name,
        memory_mib=1024,
        simulated=False,
        checkpointable=not why_not,
        why_not=why_not,
    )


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (Machine(), "This machine has no GPU."),
        (Machine(gpu("Old", "its driver is too old")), "Old cannot be shared: its driver is too old"),
        (Machine(gpu("Taken")), "Taken cannot be used: another broker has it"),
    ],
)
def test_without_a_gpu_that_will_do_the_reason_is_told(
    machine: Machine,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_self: Sandbox, *, simulate: str | None, device: int | str) -> None:
        assert (simulate, device) == (None, "GPU-Taken")
        raise CommandError("another broker has it")

    monkeypatch.setattr(demo, "open_monitor", lambda _name: machine)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setattr(Sandbox, "start_broker", refuse)
    told: list[str] = []
    assert demo._set_up_real(Sandbox(tmp_path), told.append) is None
    assert told == [said]
    assert machine.closed


def test_without_torch_no_real_gpu_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    told: list[str] = []
    assert demo._set_up_real(Sandbox(tmp_path), told.append) is None
    assert told == ["torch, which the notebooks use on a real GPU, is not installed here."]
