"""The command as a whole, on this machine as it is and on a simulated device."""

import json
from pathlib import Path

import pytest

from fractional_gpu.commands.doctor import doctor
from fractional_gpu.commands.doctor.nvidia import NvidiaReport
from fractional_gpu.commands.doctor.report import ok
from fractional_gpu.commands.main import main

SIMULATED = [
    "versions",
    "simulated",
    "configuration",
    "checkpoint",
    "process-use",
    "host-memory",
    "cgroup",
    "huge-pages",
    "swap",
    "broker",
    "oom",
    "ledger",
]


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_nvidia", lambda: NvidiaReport((), (ok("driver", "not looked at"),)))


def test_the_simulated_mode_tries_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], jupyter_home: Path
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SIMULATE", "1x64MiB")
    before = sorted(jupyter_home.rglob("*"))
    assert main(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    checks = [finding["check"] for finding in content["findings"]]
    assert [check for check in checks if check in SIMULATED] == SIMULATED
    assert content["ok"]
    found = [path for path in sorted(jupyter_home.rglob("*")) if path not in before]
    assert found in ([], [jupyter_home / "runtime" / "gpu"]), "looking changed something"


@pytest.mark.usefixtures("no_driver")
def test_without_a_gpu_the_text_ends_well_and_nothing_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "ok       driver          not looked at" in shown
    assert " checkpoint " not in shown


@pytest.mark.usefixtures("no_driver")
def test_an_error_is_exit_code_1_and_does_not_end_the_other_checks(
    capsys: pytest.CaptureFixture[str], jupyter_home: Path
) -> None:
    (jupyter_home / "config" / "jupyter_gpu_config.py").write_text("c.GPUBroker.devcies = 'all'")
    assert main(["doctor", "--no-try"]) == 1
    shown = capsys.readouterr().out
    assert "error    configuration" in shown
    assert " cullers " in shown
    assert "1 error" in shown


def test_a_wish_for_simulated_devices_that_is_wrong_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SIMULATE", "lots")
    assert main(["doctor"]) == 1
    assert "JUPYTER_GPU_SIMULATE" in capsys.readouterr().out
