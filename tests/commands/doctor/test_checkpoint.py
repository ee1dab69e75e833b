"""Checkpointing is really tried: here on a simulated host, with everything that can go wrong."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.commands.doctor.machine import claim_and_try, findings_of
from fractional_gpu.commands.doctor.report import Severity
from fractional_gpu.gpu.checkpoint_trial import TrialResult
from fractional_gpu.gpu.interface import DeviceUse, GPUErrorCode
from fractional_gpu.gpu.probe_process import MEMORY_MIB
from fractional_gpu.gpu.simulated.host import create, destroy
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor
from fractional_gpu.gpu.simulated.store import Store
from fractional_gpu.host.claims import DeviceClaim
from tests.support import faults
from tests.support.faults import configure


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "host"
    create(folder, "1x256MiB")
    yield folder
    destroy(folder)  # fails if the result left a process behind


@pytest.fixture
def monitor(host: Path) -> Iterator[SimulatedMonitor]:
    with closing(SimulatedMonitor(host)) as opened:
        yield opened


def attempt(host: Path, monitor: SimulatedMonitor) -> TrialResult:
    return claim_and_try(f"simulated:{host}", monitor, monitor.devices())


def test_a_good_attempt_moves_real_bytes_and_says_how_long_it_took(host: Path, monitor: SimulatedMonitor) -> None:
    result = attempt(host, monitor)
    assert (result.wrong, result.not_tried) == ("", "")
    assert set(result.phases_us) == {"lock", "checkpoint", "restore", "unlock"}
    assert result.before_mib is not None
    assert result.before_mib >= MEMORY_MIB
    assert not result.left_mib
    tried, counted = findings_of(result, kind="simulated")
    assert (tried.severity, counted.severity) == (Severity.OK, Severity.OK)
    assert "on a simulated device" in tried.finding


@pytest.mark.parametrize("phase", ["lock", "checkpoint", "restore", "unlock"])
def test_a_refusal_in_any_phase_is_an_error_that_says_which(host: Path, monitor: SimulatedMonitor, phase: str) -> None:
    faults.inject(host, phase, "fail:not-permitted")
    result = attempt(host, monitor)
    assert result.code is GPUErrorCode.NOT_PERMITTED
    assert phase not in result.phases_us
    (found,) = findings_of(result, kind="nvidia")
    assert found.severity is Severity.ERROR
    assert "ptrace_scope" in found.advice


def test_a_checkpoint_that_saved_nothing_is_seen(host: Path, monitor: SimulatedMonitor) -> None:
    faults.inject(host, "checkpoint", "lie")
    result = attempt(host, monitor)
    assert result.left_mib == result.before_mib
    assert result.wrong  # restoring what is not saved fails


def test_nothing_is_tried_while_a_broker_manages_the_device(host: Path, monitor: SimulatedMonitor) -> None:
    (device,) = monitor.devices()
    with DeviceClaim.claim(device.device_id):
        result = attempt(host, monitor)
    (found,) = findings_of(result, kind="nvidia")
    assert found.severity is Severity.NOTE
    assert device.device_id in found.finding
    assert result.phases_us == {}


def test_without_a_device_that_can_nothing_is_tried(host: Path, monitor: SimulatedMonitor) -> None:
    with closing(Store(host)) as store:
        configure(store, checkpointable=0)
    assert attempt(host, monitor).not_tried == "no device can be checkpointed"


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
    _, counted = findings_of(TrialResult(phases_us=phases, before_mib=500, left_mib=9), kind="nvidia")
    assert counted.severity is Severity.WARNING
    assert "9 MiB" in counted.finding
