"""The files of a node: the files in examples/slurm are what `jupyter gpu node install` writes, and they are sound."""

import os
import subprocess
from pathlib import Path

import pytest

from fractional_gpu.commands.main import main
from fractional_gpu.config.service import UNIT, service_files
from fractional_gpu.engines.files import NodeFiles, change_site, install_files, site_files, wrapper_text
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "slurm"
FOLDER = Path("/etc/jupyter-gpu/slurm")
WRAPPER = Path("/etc/slurm/jupyter-gpu-wrapper")
FILES = NodeFiles(command=["/opt/jupyter-gpu/bin/jupyter-gpu"], seats=Path("/run/jupyter-gpu/seats"))
WRITE = bool(os.environ.get("JUPYTER_GPU_WRITE_GOLDEN"))


def texts() -> dict[str, str]:
    confs = site_files(Path("/nowhere/slurm.conf"))
    change_site(FILES, confs, WRAPPER, "gpu[01-08]", str.split, devices=4, promise=4)
    lines = {conf.path.name: f"# Lines to add to {conf.path.name}.\n{conf.changed(conf.path)}" for conf in confs}
    return {**install_files(FILES), **lines, WRAPPER.name: wrapper_text(FOLDER, {})}


@pytest.mark.parametrize("name", sorted(texts()))
def test_the_examples_are_what_is_installed(name: str) -> None:
    if WRITE:
        EXAMPLES.mkdir(exist_ok=True)
        (EXAMPLES / name).write_text(texts()[name])
    assert (EXAMPLES / name).read_text() == texts()[name], "JUPYTER_GPU_WRITE_GOLDEN=1 writes it again"


@pytest.mark.parametrize("name", ["prolog", "epilog"])
@pytest.mark.parametrize("command", [["/bin/false"], ["/no/such/command"], ["/bin/sh", "-c", "kill -9 $$"]])
def test_a_hook_ends_with_0_whatever_becomes_of_the_command(tmp_path: Path, name: str, command: list[str]) -> None:
    text = install_files(NodeFiles(command=command, seats=tmp_path))[name]
    script = tmp_path / name
    script.write_text(text)
    done = subprocess.run(["sh", str(script)], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("seats", "lines"),
    [
        ("/run/jupyter-gpu/seats", ["RuntimeDirectory=jupyter-gpu", "RuntimeDirectoryPreserve=yes"]),
        ("/run/site/gpu 1%/seats", ['RuntimeDirectory="site/gpu 1%%"', "RuntimeDirectoryPreserve=yes"]),
        ("/srv/gpu 1%/seats", ['ReadWritePaths="-/srv/gpu 1%%"']),
        ("/run/seats", ["ReadWritePaths=-/run"]),
    ],
)
def test_the_agents_unit_makes_the_folder_that_it_may_write_or_names_it(seats: str, lines: list[str]) -> None:
    """A folder that the broker's unit creates after the agent's start would be read-only in the agent's /run."""
    unit = install_files(NodeFiles(command=["x"], seats=Path(seats)))["jupyter-gpu-agent.service"].splitlines()
    assert set(lines) <= set(unit)
    assert sum(line.startswith(("ReadWritePaths", "RuntimeDirectory=")) for line in unit) == 1


@pytest.mark.parametrize("unit", ["jupyter-gpu-agent.service", "jupyter-gpu.service"])
def test_systemd_finds_no_fault_in_a_unit(tmp_path: Path, unit: str) -> None:
    text = service_files("/opt/jupyter-gpu")[UNIT] if unit == UNIT.name else (EXAMPLES / unit).read_text()
    file = tmp_path / unit
    file.write_text(text.replace("ExecStart=/opt/jupyter-gpu/bin/jupyter-gpu ", "ExecStart=/bin/true "))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    assert "/bin/true" in file.read_text()
    assert [line for line in done.stderr.splitlines() if file.name in line] == []
    assert done.returncode == 0, done.stderr


def task_prolog(tmp_path: Path, content: str | None, job: str = "7", **environment: str) -> str:
    if content is not None:
        (tmp_path / "job-7.env").write_text(content)
    script = tmp_path / "taskprolog"
    script.write_text(install_files(NodeFiles(command=["x"], seats=tmp_path))["taskprolog"])
    done = subprocess.run(
        ["sh", str(script)], env={"SLURM_JOB_ID": job, **environment}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


def test_a_task_gets_what_the_prolog_wrote_and_nothing_is_run_of_it(tmp_path: Path) -> None:
    content = "A_B=$(touch x) `id` \\n\nprint jupyter gpu: a \\t warning\nnot this\n  NOR=this\n"
    assert task_prolog(tmp_path, content) == "export A_B=$(touch x) `id` \\n\nprint jupyter gpu: a \\t warning\n"
    assert not (tmp_path / "x").exists()
    assert "print" not in task_prolog(tmp_path, content, SLURM_LOCALID="3")  # only one task per node prints it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "0"], "--devices must be from 1 to 64, not 0"),
        (["--folder", "here"], "Slurm needs an absolute path"),
        (["--pool", "default=gpu"], "not gpu, shard, mps, gres"),
        (["--pool", "a=x", "--pool", "b=x"], "each resource can only be named once"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", "install", "--print", *words]) == 2
    assert said in capsys.readouterr().err
