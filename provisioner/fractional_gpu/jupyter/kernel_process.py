"""A kernel's process as a server sees it: its own child, or one that it took over from a server before it.

A pid alone names whoever has it now; with boot id and start time it names one process for ever.
"""

import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fractional_gpu.host.process import identify

__all__ = ["AdoptedProcess", "ProcessGoneError", "identity_of", "working_folder"]

_EXIT_UNKNOWN = 255  # only a parent is told


class ProcessGoneError(Exception):
    """The process has ended, or its pid is another's now."""


def identity_of(pid: int) -> dict[str, Any]:
    """Return the process's identity as plain data: pid, start_time (clock ticks since boot) and boot_id. Raises ProcessGoneError."""
    try:
        return identify(pid).to_dict()
    except (OSError, ValueError) as error:  # ValueError: the number is now a thread's
        raise ProcessGoneError(f"process {pid} is gone") from error


def working_folder(pid: int) -> Path:
    """Return the folder in which the process is. Raises ProcessGoneError."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError as error:
        raise ProcessGoneError(f"process {pid} is gone") from error


class AdoptedProcess:
    """A process that is not our child, with as much of `subprocess.Popen` as jupyter_client uses. Its exit code is not known."""

    stdin = stdout = stderr = None

    def __init__(self, identity: Mapping[str, Any]) -> None:
        """Hold on to the process. Raises ProcessGoneError."""
        self.pid = int(identity["pid"])
        self.returncode: int | None = None
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            raise ProcessGoneError(f"process {self.pid} is gone") from error
        try:
            if identity_of(self.pid) != dict(identity):
                raise ProcessGoneError(f"process {self.pid} is another one now")  # noqa: TRY301 - the descriptor is closed below
        except ProcessGoneError:
            os.close(self._pidfd)
            raise

    def poll(self) -> int | None:
        """Return None while it runs."""
        if self.returncode is None and self._has_ended(0):
            self._over()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return when it has ended. Raises TimeoutError after `timeout` seconds."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
            self._over()
        return _EXIT_UNKNOWN

    def send_signal(self, number: int) -> None:
        """Signal it; one that has ended hears nothing."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of it; it lives on."""
        if self.returncode is None:
            self._over()

    def _has_ended(self, timeout_s: float | None) -> bool:
        ready = select.poll()
        ready.register(self._pidfd, select.POLLIN)
        return bool(ready.poll(None if timeout_s is None else timeout_s * 1000))

    def _over(self) -> None:
        os.close(self._pidfd)
        self.returncode = _EXIT_UNKNOWN
