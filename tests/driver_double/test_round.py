"""The real bindings and the real pynvml over the double: a process is found, suspended, moved and brought back with its bytes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState, ProcessUse
from fractional_gpu.gpu.probe_process import MEMORY_MIB
from tests.driver_double import releases
from tests.driver_double.double import DriverDouble
from tests.driver_double.remote import Remote

pytestmark = pytest.mark.promise("driver-bytes")

CONTEXT_MIB = 512


@pytest.fixture
def double(tmp_path: Path) -> DriverDouble:
    return DriverDouble(tmp_path / "host")


@pytest.fixture
def victim(double: DriverDouble) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **double.environment()}
    command = [sys.executable, "-P", "-m", "fractional_gpu.gpu.probe_process", "nvidia"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def intact(victim: subprocess.Popen[str]) -> bool:
    assert victim.stdin is not None
    assert victim.stdout is not None
    victim.stdin.write("\n")
    victim.stdin.flush()
    return victim.stdout.readline() == "intact\n"


@pytest.mark.parametrize("release", [releases.oldest(), releases.newest()])
@pytest.mark.parametrize("nvml", [releases.oldest("nvidia-ml-py"), releases.newest("nvidia-ml-py")])
def test_a_process_is_suspended_and_comes_back_with_its_bytes(
    double: DriverDouble, victim: subprocess.Popen[str], release: str, nvml: str
) -> None:
    device = double.devices[0].device_id
    with Remote(double, bindings=release, nvml=nvml) as remote:
        there = ProcessUse(pid=victim.pid, used_mib=CONTEXT_MIB + MEMORY_MIB)
        assert remote.monitor.use(device).processes == (there,)
        remote.checkpointer.lock(victim.pid, 1000)
        remote.checkpointer.checkpoint(victim.pid)
        assert remote.checkpointer.state(victim.pid) is ProcessState.CHECKPOINTED
        assert remote.monitor.use(device).used_mib == 0
        assert next(one for one in double.processes() if one.pid == victim.pid).saved_mib == MEMORY_MIB
        remote.checkpointer.restore(victim.pid)
        remote.checkpointer.unlock(victim.pid)
        assert remote.monitor.use(device).processes == (there,)
    assert intact(victim)


def test_a_process_moves_to_another_device(double: DriverDouble, victim: subprocess.Popen[str]) -> None:
    first, second = (device.device_id for device in double.devices)
    with Remote(double) as remote:
        remote.checkpointer.lock(victim.pid, 1000)
        remote.checkpointer.checkpoint(victim.pid)
        remote.checkpointer.restore(victim.pid, {first: second})
        remote.checkpointer.unlock(victim.pid)
        assert remote.monitor.use(first).used_mib == 0
        assert [one.pid for one in remote.monitor.use(second).processes] == [victim.pid]
    assert intact(victim)


def test_a_restore_without_room_is_fatal(double: DriverDouble, victim: subprocess.Popen[str]) -> None:
    with Remote(double) as remote:
        remote.checkpointer.lock(victim.pid, 1000)
        remote.checkpointer.checkpoint(victim.pid)
        double.set(devices=[replace(one, mib=CONTEXT_MIB) for one in double.devices])
        expected = [GPUErrorCode.OUT_OF_MEMORY, GPUErrorCode.OPERATING_SYSTEM]
        for code in expected:
            with pytest.raises(GPUError) as caught:
                remote.checkpointer.restore(victim.pid)
            assert caught.value.code is code
        with pytest.raises(GPUError) as caught:
            remote.checkpointer.unlock(victim.pid)
        assert caught.value.code is GPUErrorCode.ILLEGAL_STATE
        assert remote.checkpointer.state(victim.pid) is ProcessState.FAILED
