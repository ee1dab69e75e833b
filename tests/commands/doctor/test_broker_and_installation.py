"""The socket, the ledger, the configuration and host memory."""

import sqlite3
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from fractional_gpu.client.state_folder import make_state_folder
from fractional_gpu.commands.doctor import machine as memory_checks
from fractional_gpu.commands.doctor.machine import check_memory
from fractional_gpu.commands.doctor.report import Finding, Severity
from fractional_gpu.commands.doctor.setup import (
    check_broker,
    check_ledgers,
    check_settings,
    check_simulation,
    check_versions,
    forecast_findings,
    inherited_findings,
)
from fractional_gpu.core.forecasts.outcomes import ForecastError
from fractional_gpu.gpu.interface import DeviceInfo
from fractional_gpu.host.memory import Headroom, LimitReader
from fractional_gpu.ledger.ledger import Ledger
from tests.support.fake_broker import FakeBroker

pytestmark = pytest.mark.promise("forecasts")


def device(memory_mib: int) -> DeviceInfo:
    return DeviceInfo(
        device_id="GPU-1", index=0, name="H100", memory_mib=memory_mib, simulated=False, checkpointable=True
    )


def the(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


# -- the broker -------------------------------------------------------------------------------------------------------------


def test_a_broker_that_serves_is_named(tmp_path: Path) -> None:
    with FakeBroker(str(tmp_path / "b.sock")) as broker:
        path, found = check_broker(broker.path)
    assert path == broker.path
    assert found[0].check == "broker"
    assert f"runs on {broker.path} with 0 leases" in found[0].finding


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (["nice", "-n", "5"], "niceness 5 from the program that started it"),
        (["prlimit", f"--cpu={10**7}"], "a hard RLIMIT_CPU from"),
        ([], None),
    ],
)
def test_what_a_broker_has_of_the_program_that_started_it_is_a_warning(how: list[str], words: str | None) -> None:
    with subprocess.Popen([*how, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"runs\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"runs\n"
        found = [one.finding for one in inherited_findings(process.pid)]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


@pytest.mark.parametrize(
    ("covered_permille", "severity", "words"),
    [
        (
            640,
            Severity.WARNING,
            "64 % of the last 256 outcomes were within the bounds of wait forecasts; the bounds promise 80 %",
        ),
        (800, Severity.OK, "wait 80 %"),
        (651, Severity.OK, "wait 65 %"),
        (960, Severity.NOTE, "wider than needed"),
    ],
)
def test_bounds_of_forecasts_that_do_not_hold_are_found(covered_permille: int, severity: Severity, words: str) -> None:
    error = ForecastError(what="wait", count=300, median_error_permille=100, covered_permille=covered_permille)
    found = the(list(forecast_findings([error])))
    assert (found.check, found.severity) == ("forecasts", severity)
    assert words in found.finding


def test_a_folder_that_is_not_there_means_no_broker_and_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "b.sock").mkdir(mode=0o700)
    _, found = check_broker(str(tmp_path / "b.sock" / "x" / "y"))
    assert the(found).severity is Severity.NOTE
    (tmp_path / "file").write_text("")
    _, found = check_broker(str(tmp_path / "file" / "b.sock"))
    assert the(found).severity is Severity.ERROR


def test_a_service_that_does_not_run_is_an_error() -> None:
    _, found = check_broker("/run/jupyter-gpu-nowhere/b.sock")
    assert the(found).severity is Severity.ERROR
    assert "an administrator must start it" in the(found).advice


# -- the ledger -------------------------------------------------------------------------------------------------------------


def ledgers(socket: str) -> list[Finding]:
    return list(check_ledgers(socket, None))


@pytest.fixture
def socket(tmp_path: Path) -> str:
    return str(tmp_path / "broker.sock")


@pytest.fixture
def folder(socket: str) -> Path:
    return make_state_folder(socket)


def test_a_sound_ledger_is_read_while_its_broker_has_it(socket: str, folder: Path) -> None:
    with Ledger.open(folder / "ledger.sqlite"):
        found = the(ledgers(socket))
        assert (found.severity, "with 0 live leases" in found.finding) == (Severity.OK, True)
    before = (folder / "ledger.sqlite").read_bytes()
    assert the(ledgers(socket)).severity is Severity.OK
    assert (folder / "ledger.sqlite").read_bytes() == before


def test_a_newer_or_damaged_ledger_is_an_error(socket: str, folder: Path) -> None:
    file = folder / "ledger-simulated.sqlite"
    Ledger.open(file).close()
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    assert "another version (schema 999" in the(ledgers(socket)).finding
    file.write_bytes(file.read_bytes()[:4096])
    assert the(ledgers(socket)).severity is Severity.ERROR


# -- configuration, versions, memory ---------------------------------------------------------------------------------------------


def test_a_configuration_that_cannot_be_read_is_an_error_and_its_file_is_named(jupyter_home: Path) -> None:
    file = jupyter_home / "config" / "jupyter_gpu_config.py"
    file.write_text("c.GPUBroker.devcies = 'all'")
    settings, found = check_settings()
    assert settings is None
    assert the(found).severity is Severity.ERROR
    assert str(file) in the(found).finding


def test_an_installation_that_jupyter_does_not_see_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    versions, provisioner = check_versions()
    assert versions.severity is Severity.OK
    assert (provisioner.check, provisioner.severity) == ("provisioner", Severity.ERROR)


def test_simulation_is_said_and_a_bad_wish_is_an_error() -> None:
    assert list(check_simulation(None)) == []
    assert "2 GiB, 2 GiB" in the(list(check_simulation("2x2GiB"))).finding
    assert the(list(check_simulation("two"))).severity is Severity.ERROR


def memory(monkeypatch: pytest.MonkeyPatch, system_mib: int, here_mib: int, *devices: DeviceInfo) -> list[Finding]:
    monkeypatch.setattr(memory_checks, "system_headroom", lambda **_: Headroom(system_mib, "the system's memory"))
    monkeypatch.setattr(LimitReader, "headroom", lambda *_: Headroom(here_mib, "the memory limit of a group"))
    return list(check_memory(devices, None))


def test_less_host_memory_than_device_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    host, group = memory(monkeypatch, 2000, 2000, device(1500), device(1500))
    assert (host.severity, group.severity) == (Severity.WARNING, Severity.OK)
    assert "2.9 GiB" in host.finding


def test_a_control_group_smaller_than_a_device_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory(monkeypatch, 2000, 1000, device(1500))[1].severity is Severity.WARNING
    assert memory(monkeypatch, 2000, 1700, device(1500))[1].severity is Severity.NOTE
