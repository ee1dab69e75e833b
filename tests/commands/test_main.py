"""The command line as a whole: overview, dispatch, exit codes."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fractional_gpu import __version__
from fractional_gpu.commands import main as main_module
from fractional_gpu.commands.main import COMMANDS, main
from fractional_gpu.commands.terminal.text import CommandError, UsageError
from fractional_gpu.protocol.errors import NoRoomError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A subcommand `probe` whose `run` each test sets."""
    module = ModuleType("probe_command")
    monkeypatch.setattr(module, "configure", lambda parser: parser.add_argument("--number", type=int), raising=False)
    monkeypatch.setitem(sys.modules, "fractional_gpu.commands.probe_command", module)
    monkeypatch.setitem(COMMANDS, "probe", main_module._Entry("probe_command", "for tests"))
    return module


def test_without_a_command_the_overview_is_shown_and_the_usage_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jupyter-fractional-gpu {__version__}\n"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jupyter gpu {name}")
    assert "examples:" in shown


def test_the_overview_imports_nothing_heavy() -> None:
    probe = (
        "import sys; from fractional_gpu.commands.main import main; main([]); "
        "print(sorted(set(sys.modules) & {'zmq', 'tornado', 'msgspec', 'traitlets', 'nbclient', 'jupyter_client'}))"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_arguments_reach_the_command_and_its_answer_is_the_exit_code(command: ModuleType) -> None:
    def run(options: argparse.Namespace) -> int:
        return int(options.number)

    command.__dict__["run"] = run
    assert main(["probe", "--number", "7"]) == 7


@pytest.mark.parametrize(
    ("error", "code"),
    [(NoRoomError("no GPU has\n room"), 1), (CommandError("no GPU has room"), 1), (UsageError("no GPU has room"), 2)],
)
def test_a_foreseeable_error_is_one_line(
    command: ModuleType, error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_options: argparse.Namespace) -> int:
        raise error

    command.__dict__["run"] = run
    assert main(["probe"]) == code
    assert capsys.readouterr().err == "jupyter gpu: no GPU has room\n"


def test_an_interrupt_is_quiet(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command.__dict__["run"] = run
    assert main(["probe"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_is_no_drama() -> None:
    # The pipe's reader is closed before the command writes: what `jupyter gpu status | true` may look like.
    probe = (
        "import sys; sys.stdin.read(); from fractional_gpu.commands.main import main; "
        "raise SystemExit(main(['status', '--socket', '/nonexistent/broker.sock']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", probe], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert complaint == ""


_MAIN = [sys.executable, "-m", "fractional_gpu.commands.main"]


@pytest.mark.parametrize(
    "arguments", [["broker", "--generate-config"], ["--version"], ["--help"], ["status", "--help"]]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(arguments: list[str], unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*_MAIN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment
        )
    assert done.returncode == 1
    assert done.stderr == (
        "jupyter gpu: cannot write the output: No space left on device; free some space, or write elsewhere\n"
    )


def test_every_command_is_there_without_the_packages_of_the_extras() -> None:
    """As after a plain `pip install jupyter-fractional-gpu`: without JupyterLab, its server and JupyterHub."""
    program = """
import sys
sys.modules |= dict.fromkeys(("nbformat", "nbclient", "jupyterlab", "jupyter_server", "jupyterhub", "cuda"))
from fractional_gpu.commands import main
for name in main.COMMANDS:
    main.subcommand(name)
sys.exit(main.main(["demo", "--check"]))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert said.returncode == 1, said.stderr
    assert (
        said.stderr == "jupyter gpu: this needs nbclient and nbformat; run: pip install 'jupyter-fractional-gpu[lab]'\n"
    )


def test_an_unknown_command_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["statsu"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert (
        "unknown command 'statsu'; did you mean `jupyter gpu status`? choose from demo, lab, run, lease, release"
        in said
    )
    with pytest.raises(SystemExit):
        main(["frobnicate"])
    assert "unknown command 'frobnicate'; choose from demo" in capsys.readouterr().err
