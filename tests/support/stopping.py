"""A process is stopped (SIGSTOP), and it is certain that it does nothing any more."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.world import until


def stop(pid: int) -> None:
    """Stop a process, and return once all its threads stand still: the signal takes effect a moment after the call."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(state in "TtZX" for state in _states(pid)), f"process {pid} is stopped")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> list[str]:
    """The state of each thread that is there, as a letter (proc_pid_stat(5))."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states
