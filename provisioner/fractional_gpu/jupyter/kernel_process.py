"""A kernel's process as a server handles it: its own child, or one that it took over from an earlier server.

A pid alone names the process that has it now; with boot id and start time it names one process for ever.
"""

import os
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fractional_gpu.host.process import PROC, ProcessIdentity, environment_value, identify, open_pidfd

__all__ = ["AdoptedProcess", "ProcessGoneError", "identity_of", "kill_holders", "working_folder"]

_EXIT_UNKNOWN = 255  # only a parent learns the exit code


class ProcessGoneError(Exception):
    """The process has ended, or its pid is another process's now."""


def identity_of(pid: int) -> dict[str, Any]:
    """Return pid, start_time (clock ticks since boot) and boot_id. Raises ProcessGoneError."""
    try:
        return identify(pid).to_dict()
    except OSError as error:
        raise ProcessGoneError(f"process {pid} is gone") from error


def working_folder(pid: int) -> Path:
    """Return the process's working folder. Raises ProcessGoneError."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError as error:
        raise ProcessGoneError(f"process {pid} is gone") from error


def kill_holders(variable: str, value: str) -> list[int]:
    """Kill (SIGKILL) every process of this user whose environment has the variable with this value; return their pids."""
    killed = []
    for pid in [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]:
        with suppress(OSError):  # it has ended, or is another user's
            pidfd = os.pidfd_open(pid)
            try:
                if environment_value(pid, variable) == value:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    killed.append(pid)
            finally:
                os.close(pidfd)
    return killed


class AdoptedProcess:
    """A process that is not our child, with the part of `subprocess.Popen` that jupyter_client uses. Its exit code is unknown."""

    stdin = stdout = stderr = None

    def __init__(self, identity: Mapping[str, Any]) -> None:
        """Hold on to the process that `identity_of` described. Raises ProcessGoneError, and ValueError for a malformed identity."""
        process = ProcessIdentity.from_dict(dict(identity))
        self.pid = process.pid
        self.returncode: int | None = None
        try:
            self._pidfd = open_pidfd(process)
        except OSError as error:
            raise ProcessGoneError(f"process {self.pid} is gone") from error

    def poll(self) -> int | None:
        """Return None while it runs."""
        if self.returncode is None and self._has_ended(0):
            self._mark_ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return when it has ended. Raises TimeoutError after `timeout` seconds."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
            self._mark_ended()
        return _EXIT_UNKNOWN

    def send_signal(self, number: int) -> None:
        """Signal it; one that has ended gets no signal."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptor; the process lives on."""
        if self.returncode is None:
            self._mark_ended()

    def _has_ended(self, timeout_s: float | None) -> bool:
        ready = select.poll()
        ready.register(self._pidfd, select.POLLIN)
        return bool(ready.poll(None if timeout_s is None else timeout_s * 1000))

    def _mark_ended(self) -> None:
        os.close(self._pidfd)
        self.returncode = _EXIT_UNKNOWN
