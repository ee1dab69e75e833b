"""The command as a whole, on this machine as it is and on a simulated device."""

import errno
import json
import os
import pwd
from pathlib import Path

import pytest

from fractional_gpu.client import discovery
from fractional_gpu.commands.doctor import machine, setup
from fractional_gpu.commands.doctor.machine import NvidiaReport
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
    monkeypatch.setattr(machine, "check_nvidia", lambda: NvidiaReport((), (ok("driver", "not looked at"),)))


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
def test_a_user_without_a_home_folder_gets_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As in a container that runs as an arbitrary uid."""
    for name in [name for name in os.environ if name == "HOME" or name.startswith(("JUPYTER_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(discovery, "SYSTEM_SOCKET", str(tmp_path / "no-system.sock"))
    assert main(["doctor", "--json", "--no-try"]) == 1
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    for check in ("configuration", "broker", "kernelspecs", "cullers"):
        assert findings[check]["severity"] == "error"
        assert "home directory" in findings[check]["finding"]
        assert "set HOME" in f"{findings[check]['finding']} {findings[check]['advice']}".replace("Set", "set")
    assert findings["swap"]["severity"] != "error"
    assert main(["status"]) == 1
    assert "Set HOME, or JUPYTER_RUNTIME_DIR, to a folder of your own" in capsys.readouterr().err


@pytest.mark.usefixtures("no_driver")
def test_a_check_that_cannot_be_made_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/elsewhere/ledger")

    monkeypatch.setattr(setup, "check_ledgers", fails)
    assert main(["doctor", "--json", "--no-try"]) == 1
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert "Permission denied: '/elsewhere/ledger'" in findings["ledger"]["finding"]
    assert "cullers" in findings
