"""The demonstration's folder: separate from everything else, and removed afterwards."""

import os
import select
import signal
from pathlib import Path

import pytest

from fractional_gpu.client.discovery import IN_WORKLOAD, socket_path
from fractional_gpu.commands.demo.sandbox import EXAMPLES, interrupt_on_termination, open_sandbox, sandbox_environment
from fractional_gpu.config import load
from fractional_gpu.gpu.interface import DeviceInfo
from fractional_gpu.jupyter.kernelspecs import list_installed
from fractional_gpu.protocol.errors import BrokerUnavailableError


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
        (spec,) = list_installed(str(sandbox.root / "data" / "kernels"))
        assert spec.name == "fractional-gpu-default-750"
        assert sandbox.root.stat().st_mode & 0o077 == 0
    assert not sandbox.root.exists()
    assert dict(os.environ) == before


def test_a_broker_that_does_not_start_says_why() -> None:
    with (
        open_sandbox(keep=False) as sandbox,
        pytest.raises(BrokerUnavailableError, match=r"^the simulated devices '0x1GiB' are"),
    ):
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
