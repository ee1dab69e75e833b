"""Checkpointing is really tried: on a simulated host here, with everything that can go wrong."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import pytest

from fractional_gpu.commands.doctor.finding import Severity
from fractional_gpu.commands.doctor.probe import Probe, findings_of, try_checkpoint
from fractional_gpu.gpu.interface import DeviceInfo, DeviceUse, GPUErrorCode
from fractional_gpu.gpu.probe_process import VICTIM_MIB, hold_nvidia
from fractional_gpu.gpu.simulated import faults
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.host.claims import DeviceClaim


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "host"
    create(folder, "1x256MiB")
    yield folder
    destroy(folder)  # fails if the probe left a process behind


@pytest.fixture
def monitor(host: Path) -> Iterator[SimulatedMonitor]:
    with closing(SimulatedMonitor(host)) as opened:
        yield opened


def attempt(host: Path, monitor: SimulatedMonitor) -> Probe:
    return try_checkpoint(f"simulated:{host}", monitor, monitor.devices())


def test_a_good_attempt_moves_real_bytes_and_says_how_long_it_took(host: Path, monitor: SimulatedMonitor) -> None:
    probe = attempt(host, monitor)
    assert (probe.wrong, probe.not_tried) == ("", "")
    assert set(probe.phases_us) == {"lock", "checkpoint", "restore", "unlock"}
    assert probe.before_mib is not None
    assert probe.before_mib >= VICTIM_MIB
    assert not probe.left_mib
    tried, counted = findings_of(probe, kind="simulated")
    assert (tried.severity, counted.severity) == (Severity.OK, Severity.OK)
    assert "on a simulated device" in tried.finding


@pytest.mark.parametrize("phase", ["lock", "checkpoint", "restore", "unlock"])
def test_a_refusal_in_any_phase_is_an_error_that_says_which(host: Path, monitor: SimulatedMonitor, phase: str) -> None:
    faults.inject(host, phase, "fail:not-permitted")
    probe = attempt(host, monitor)
    assert probe.code is GPUErrorCode.NOT_PERMITTED
    assert phase not in probe.phases_us
    (found,) = findings_of(probe, kind="nvidia")
    assert found.severity is Severity.ERROR
    assert "ptrace_scope" in found.advice


def test_a_checkpoint_that_saved_nothing_is_seen(host: Path, monitor: SimulatedMonitor) -> None:
    faults.inject(host, "checkpoint", "lie")
    probe = attempt(host, monitor)
    assert probe.left_mib == probe.before_mib
    assert probe.wrong  # the restore of what is not saved fails


def test_nothing_is_tried_while_a_broker_manages_the_device(host: Path, monitor: SimulatedMonitor) -> None:
    (device,) = monitor.devices()
    with DeviceClaim.claim(device.device_id):
        probe = attempt(host, monitor)
    (found,) = findings_of(probe, kind="nvidia")
    assert found.severity is Severity.NOTE
    assert device.device_id in found.finding
    assert probe.phases_us == {}


def test_without_a_device_that_can_nothing_is_tried(host: Path, monitor: SimulatedMonitor) -> None:
    with closing(Store(host)) as store:
        store.configure(checkpointable=0)
    assert attempt(host, monitor).not_tried == "no device can be checkpointed"


def test_a_device_without_room_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    create(folder, "1x48MiB")
    with closing(SimulatedMonitor(folder)) as small:
        probe = attempt(folder, small)
    destroy(folder)
    assert probe.wrong.startswith("no device memory could be had for it: ")
    assert findings_of(probe, kind="simulated")[0].severity is Severity.ERROR


class BlindMonitor(SimulatedMonitor):
    """Counts processes by other numbers than ours, as NVML does in some containers."""

    def use(self, device_id: str) -> DeviceUse:
        seen = super().use(device_id)
        return replace(seen, processes=())


def test_a_driver_that_counts_by_other_process_ids_is_a_warning(host: Path) -> None:
    with closing(BlindMonitor(host)) as blind:
        tried, counted = findings_of(attempt(host, blind), kind="nvidia")
    assert (tried.severity, counted.severity) == (Severity.OK, Severity.WARNING)
    assert "--pid=host" in counted.advice


def test_memory_that_stays_on_the_device_is_a_warning() -> None:
    phases = dict.fromkeys(("lock", "checkpoint", "restore", "unlock"), 1000)
    _, counted = findings_of(Probe(phases_us=phases, before_mib=500, left_mib=9), kind="nvidia")
    assert counted.severity is Severity.WARNING
    assert "9 MiB" in counted.finding


def test_without_devices_nothing_is_tried(host: Path, monitor: SimulatedMonitor) -> None:
    none: list[DeviceInfo] = []
    assert try_checkpoint(f"simulated:{host}", monitor, none).not_tried


# -- the process on which it is tried -------------------------------------------------------------------------------------------


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """A double of the driver's memory calls, with the signatures and results of `cuda.bindings.driver`."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.calls: list[str] = []
        self.memory = (ctypes.c_char * 0)()

    def cuInit(self, flags: int) -> tuple[Result]:  # noqa: N802
        assert flags == 0
        self.calls.append("init")
        return (Result.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, str]:  # noqa: N802
        return Result.CUDA_SUCCESS, f"device {ordinal}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Result, str]:  # noqa: N802
        return Result.CUDA_SUCCESS, f"context of {device}"

    def cuCtxSetCurrent(self, context: str) -> tuple[Result]:  # noqa: N802
        self.calls.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuMemAlloc(self, n_bytes: int) -> tuple[Result, int | None]:  # noqa: N802
        if n_bytes > self.room:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        self.memory = (ctypes.c_char * n_bytes)()
        return Result.CUDA_SUCCESS, ctypes.addressof(self.memory)

    def cuMemsetD32(self, pointer: int, value: int, count: int) -> tuple[Result]:  # noqa: N802
        assert pointer == ctypes.addressof(self.memory)
        self.memory.raw = value.to_bytes(4, "little") * count
        return (Result.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Result]:  # noqa: N802
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, host: int, pointer: int, n_bytes: int) -> tuple[Result]:  # noqa: N802
        ctypes.memmove(host, pointer, n_bytes)
        return (Result.CUDA_SUCCESS,)


def test_the_victim_reads_back_what_it_wrote_through_the_driver() -> None:
    driver = Driver()
    read = hold_nvidia(driver)
    assert driver.calls == ["init", "context of device 0"]
    assert read() == b"\xa5\x5a\x3c\xc3" * (VICTIM_MIB << 18)
    driver.memory.raw = bytes(VICTIM_MIB << 20)
    assert set(read()) == {0}


def test_the_victim_says_which_call_failed() -> None:
    with pytest.raises(RuntimeError, match=r"cuMemAlloc gave CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        hold_nvidia(Driver(room=1))


def test_the_victim_knows_its_own_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.gpu.probe_process"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.split(":")[0]) == (2, "usage")
