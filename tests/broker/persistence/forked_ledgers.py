"""Processes that do one thing to a ledger and may be killed in it: forks of one process that has imported what they need.

`python -m tests.broker.persistence.forked_ledgers` is that process. It reads lines of JSON, forks for each, and answers with the exit
status of the fork (negative: the signal that ended it).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fractional_gpu.broker.persistence.ledger_move import move_ledger
from fractional_gpu.host import files
from fractional_gpu.ledger import Ledger

__all__ = ["Forks"]


class Forks:
    """The process to be forked, seen from a test."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @classmethod
    @contextmanager
    def open(cls) -> "Iterator[Forks]":
        """Start the process; end it on exit."""
        command = [sys.executable, "-m", __name__]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield cls(process)

    def write_and_die(self, ledger: Path) -> int:
        """Write a line of the log of `a-lease` and be killed before the write-ahead log is merged; return the exit status."""
        return self._run(str(ledger))

    def move(self, source: Path, target: Path, failpoint: Path | None = None) -> int:
        """Move a ledger, with a file that names a failpoint; return the exit status: 1 if it raised."""
        return self._run(str(source), str(target), *([str(failpoint)] if failpoint else []))

    def _run(self, *arguments: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _do(ledger: str, target: str | None = None, failpoint: str | None = None) -> None:
    if target is not None:
        files._file = failpoint  # as if the variable had been set when the process started
        move_ledger(Path(ledger), Path(target))
        return
    Ledger.open(Path(ledger)).record("a-lease", 1, "test", "in the log only")
    os.kill(os.getpid(), signal.SIGKILL)


def _main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _do(*json.loads(line))
                status = 0
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    _main()
