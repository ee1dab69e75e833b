"""Tab in a shell: the completions after `jupyter gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fractional_gpu.commands.completion import SHELLS
from fractional_gpu.commands.main import main
from tests.commands.conftest import OwnBroker

pytestmark = pytest.mark.promise("completion")


def proposed(line: str, folder: Path, *, shell: str = "bash") -> list[str]:
    """Return the completions that the shell's function would get: the line goes through `jupyter`, which passes it on."""
    told = folder / "told"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": shell,
        "_ARGCOMPLETE_STDOUT_FILENAME": str(told),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    jupyter = Path(sys.executable).with_name("jupyter")
    subprocess.run([jupyter], env=environment, check=True, timeout=120)
    return told.read_text().split("\n")


def words(line: str, folder: Path) -> list[str]:
    return [word.strip() for word in proposed(line, folder)]


def test_commands_options_and_what_the_broker_knows_are_proposed(broker: OwnBroker, tmp_path: Path) -> None:
    lease_id = broker.add("resident", label="train.ipynb")
    assert words("jupyter gpu s", tmp_path) == ["status", "suspend", "seats", "simulate", "setup-machine"]
    assert words("jupyter gpu status --w", tmp_path) == ["--watch"]
    assert words(f"jupyter gpu pin {lease_id[:3]}", tmp_path) == [lease_id[:8]]
    assert {"15m", "30m", "--json"} <= set(words("jupyter gpu pin x ", tmp_path))
    assert words("jupyter gpu kernels ins", tmp_path) == ["install"]
    assert words("jupyter gpu report --since th", tmp_path) == ["this-week", "this-month"]
    assert words("jupyter gpu report --by user,d", tmp_path) == ["user,day", "user,device"]


def test_values_that_are_no_files_are_not_completed_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").touch()
    monkeypatch.chdir(tmp_path)
    assert words("jupyter gpu lab --simulate h", tmp_path) == [""]
    assert words("jupyter gpu rescue --config h", tmp_path) == ["here.py"]


def test_without_a_broker_nothing_is_proposed_and_none_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_SOCKET", str(tmp_path / "b.sock"))
    assert words("jupyter gpu suspend x", tmp_path) == [""]
    assert not (tmp_path / "b.sock").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_its_code(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert "jupyter-gpu" in code
    assert "_ARGCOMPLETE" in code
    assert any("status" in word for word in proposed("jupyter gpu stat", tmp_path, shell=shell))


def test_bash_completes_with_the_code_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out + (
        "\nCOMP_WORDS=(jupyter gpu stat) COMP_CWORD=2 COMP_LINE='jupyter gpu stat' COMP_POINT=16 COMP_TYPE=9\n"
        'eval "$(complete -p jupyter | sed "s/.*-F \\([^ ]*\\) .*/\\1/") jupyter"\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "--norc"], input=script, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["status"]
