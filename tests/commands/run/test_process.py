"""A command that is held back, run, waited for and ended by its runner, with its output in a file or with a terminal."""

import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from fractional_gpu.commands.run.process import HeldCommand, RunningCommand
from tests.support.world import until

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
os.write(1, b"%d\\n" % os.getpid())
while True: time.sleep(60)
"""
"""Each process writes its line in one call: unbuffered, `print` would write the end of the line separately."""


def start(program: str, output: Path) -> RunningCommand:
    with output.open("wb") as file:
        return HeldCommand([sys.executable, "-c", program], os.environ, file).go(os.environ)


def test_one_that_ignores_it_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    output = tmp_path / "output"
    running = start(STUBBORN, output)
    until(lambda: len(output.read_text().split()) == 2, "both have begun")
    assert not running.has_ended()
    assert running.end(0.1) == 128 + 9
    for pid in map(int, output.read_text().split()):
        until(lambda pid=pid: not is_running(pid), "it is gone")  # type: ignore[misc]


def is_running(pid: int) -> bool:
    """Whether it runs: a killed child of a killed process may wait for a parent that reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_its_status_is_known_where_this_process_was_started_with_the_signal_of_its_end_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        running = start("raise SystemExit(7)", tmp_path / "output")
        until(running.has_ended, "it ends")
        assert running.end(1) == 7
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("patience_s", [0, 1])
def test_one_that_ends_when_asked_to_has_the_status_of_the_signal(tmp_path: Path, patience_s: float) -> None:
    output = tmp_path / "output"
    running = start("print('ready', flush=True)\nimport time\ntime.sleep(600)", output)
    until(output.read_text, "it has begun")
    assert running.end(patience_s) in (128 + 15, 128 + 9)


def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        held = HeldCommand([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, file)
        running = held.go(os.environ)
    held.give_up()  # as after a signal that came just when the command began
    assert not is_running(running.pid)


SHELL = """
import os, subprocess, sys
job = subprocess.Popen([sys.executable, "-c", sys.argv[1]], process_group=0)
os.tcsetpgrp(0, job.pid)
status = os.waitpid(job.pid, os.WUNTRACED)[1]
sys.exit("the job was stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
"""
RUNNER = """
import os, sys
from fractional_gpu.commands.run.process import HeldCommand
while os.tcgetpgrp(0) != os.getpgrp():
    pass
running = HeldCommand([sys.executable, "-c", "line = input(); print('got', line, flush=True)"], os.environ).go(os.environ)
os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WNOWAIT)
print("stopped", flush=True)
sys.exit(running.wait(noted=[], passed_on=lambda number: None, continued=lambda: None))
"""


def test_one_that_reads_before_it_has_the_terminal_goes_on() -> None:
    """SIGTTIN stops it until its runner has given it the terminal; the job must not stop for that."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SHELL, RUNNER])  # noqa: S606 - no shell is wanted
    with os.fdopen(terminal, "r+b", buffering=0) as file:
        seen = file.read(4096)
        while b"stopped" not in seen:
            seen += file.read(4096)
        file.write(b"hello\n")
        while b"got hello" not in seen:
            assert b"the job was stopped" not in seen
            seen += file.read(4096)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.promise("children")
def test_a_command_in_a_pool_that_saves_children_starts_in_a_checkpoint_job(tmp_path: Path) -> None:
    output = tmp_path / "output"
    program = "import os; print(os.readlink(os.environ['CUDA_CHECKPOINT_JOB_FILE']), 'JUPYTER_GPU_CHECKPOINT_JOB' in os.environ)"
    with output.open("wb") as file:
        held = HeldCommand([sys.executable, "-c", program], os.environ, file)
        running = held.go({**os.environ, "JUPYTER_GPU_CHECKPOINT_JOB": "1"})
    until(running.has_ended, "it ends")
    assert running.end(1) == 0
    assert output.read_text() == "/memfd:cuda-checkpoint-job (deleted) False\n"
