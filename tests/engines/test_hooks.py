"""Prolog and Epilog if something is missing: they end soon, raise nothing, and import little."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fractional_gpu.engines import hooks
from fractional_gpu.engines.hooks import HookSettings
from fractional_gpu.engines.job_seats import JobSeat, SeatFiles
from tests.support.paths import PYTHONPATH, ROOT

ENVIRONMENT = {"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n1"}
HEAVY = (
    "zmq",
    "tornado",
    "traitlets",
    "asyncio",
    "pynvml",
    "prometheus_client",
    "jupyter_client",
    "fractional_gpu.broker",
)


@pytest.fixture
def settings(tmp_path: Path) -> HookSettings:
    return HookSettings(socket=str(tmp_path / "broker.sock"), folder=tmp_path / "seats", controller_s=0.2, broker_s=0.2)


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "squeue").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def files(settings: HookSettings) -> dict[str, str]:
    return {file.name: file.read_text() for file in settings.folder.iterdir()} if settings.folder.exists() else {}


def test_a_controller_that_hangs_costs_its_time_only_and_the_job_is_told(
    settings: HookSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, "exec sleep 600")
    said: list[str] = []
    hooks.begin(settings, ENVIRONMENT, said.append)
    assert "did not answer within 0.2 s" in said[0]
    assert "print jupyter gpu: this job has no GPU share" in files(settings)["job-12.env"]
    hooks.end(settings, ENVIRONMENT, said.append)
    assert files(settings) == {}


def test_without_a_broker_the_request_is_kept_for_the_agent(
    settings: HookSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, 'echo "12|1000|ada|RUNNING|gres:jgpu:open:250|12|cpu=1,mem=4G,node=1|1|"')
    hooks.begin(settings, ENVIRONMENT, lambda _: None)
    wanted = JobSeat(job_id=12, uid=1000, user="ada", pool="default", fraction_milli=250, memory_mib=4096)
    assert list(SeatFiles(settings.folder).wanted()) == [wanted]
    written = files(settings)["job-12.env"].splitlines()
    assert f"JUPYTER_GPU_SEAT_FILE={settings.folder}/job-12.json" in written
    assert any(line.startswith("print ") and "when the node's broker responds" in line for line in written)


def test_an_ssh_session_in_a_job_takes_its_environment_from_the_file(
    settings: HookSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is in docs/clusters-operating.md."""
    commands(tmp_path, monkeypatch, 'echo "12|1000|ada|RUNNING|gres:jgpu:open:250|12|cpu=1,mem=4G,node=1|1|"')
    hooks.begin(settings, ENVIRONMENT, lambda _: None)
    (line,) = re.findall(
        r"`(export \$\(grep .*)`\.$", (ROOT / "docs" / "clusters-operating.md").read_text(), re.MULTILINE
    )
    line = line.replace("/run/jupyter-gpu/seats", str(settings.folder))
    said = subprocess.run(
        ["sh", "-c", f"{line}; env"], env={"SLURM_JOB_ID": "12", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert {"JUPYTER_GPU_DEFAULT_FRACTION=250m", "CUDA_VISIBLE_DEVICES="} <= set(said.stdout.splitlines())
    assert said.stderr == ""


def test_a_request_is_registered_by_one_process_at_a_time(settings: HookSettings) -> None:
    seats = SeatFiles(settings.folder)
    seats.prepare()
    wanted = JobSeat(job_id=12, uid=1000, user="ada", pool="default", fraction_milli=250)
    with seats.writing_wanted(wanted), seats.claimed(12) as free:
        assert not free
    with seats.claimed(12) as free:
        assert free
    with seats.claimed(13) as free:
        assert not free


def test_a_folder_that_cannot_be_made_is_said_and_raises_nothing(
    settings: HookSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, 'echo "12|1000|ada|RUNNING|gres:jgpu:open:250|12|cpu=1,mem=4G,node=1|1|"')
    settings.folder.write_text("a file")
    said: list[str] = []
    hooks.begin(settings, ENVIRONMENT, said.append)
    assert said


def test_the_hooks_import_the_client_only_and_a_full_disk_under_their_log_is_no_failure(settings: HookSettings) -> None:
    words = ["--socket", settings.socket, "--seats", str(settings.folder), "--log", "/dev/full"]
    program = (
        "import sys; from fractional_gpu.commands.main import main\n"
        f"codes = [main(['node', name, *{words!r}]) for name in ('prolog', 'epilog')]\n"
        f"print(codes, sorted(set({HEAVY!r}) & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"PYTHONPATH": PYTHONPATH, "PATH": "/nowhere", **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[0, 0] []\n"
