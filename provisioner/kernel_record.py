"""What a provisioner writes down about its kernel, so that the next server can take it over (`provisioner.keeping`)."""

import os
from collections.abc import Callable, Mapping
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

from provisioner.kept import KeptRecord
from provisioner.kernel_lease import KernelLease
from provisioner.kernel_process import ProcessGoneError

__all__ = ["KernelRecord"]


class KernelRecord:
    """The record of one kernel. Where it cannot be written, that is logged, and the kernel dies with this server's stop."""

    def __init__(self, manager: Any, kernel_id: str, log: "Logger | LoggerAdapter[Any]") -> None:  # noqa: ANN401 - of any server
        self._manager = manager
        self._kernel_id = kernel_id
        self._log = log
        self._kept: KeptRecord | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the server keeps its kernels."""
        return bool(getattr(self._server, "keeps_kernels", False))

    @property
    def exists(self) -> bool:
        """Whether the next server would find it."""
        return self._kept is not None

    def adopt(self, kept: KeptRecord) -> None:
        """Go on with the record that an earlier server wrote."""
        self._kept = kept

    def launching(self, lease: KernelLease) -> None:
        """Write down that a process is about to be started: should this server die meanwhile, the next one ends it."""
        try:
            self._write({"launching": lease.to_info()})
        except (OSError, ValueError) as error:
            self._say_why_not(error)

    def launched(
        self, launch: Mapping[str, Any], connection: Mapping[str, Any], info: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Write down how to talk to the process that was started; `info` tells what its provisioner needs, or raises ProcessGoneError."""
        contents = {name: value.decode() if isinstance(value, bytes) else value for name, value in connection.items()}
        try:
            self._write(
                {
                    "kernel_name": self._manager.kernel_name,
                    "cwd": os.fspath(launch.get("cwd") or Path.cwd()),
                    "session_name": launch.get("env", {}).get("JPY_SESSION_NAME", ""),
                    "connection_file": self._manager.connection_file,
                    "connection": contents,
                    "provisioner": info(),
                }
            )
        except (OSError, ValueError, ProcessGoneError) as error:
            self.remove()  # or the next server would take this for a start that was never finished
            self._say_why_not(error)

    def put_back(self) -> None:
        """Write it again if it was removed, or replaced, by somebody else. Raises OSError."""
        if self._kept is not None:
            self._kept.put_back()

    def remove(self) -> None:
        """The kernel is shut down."""
        if self._kept is not None:
            self._kept.remove()
            self._kept = None

    def let_go(self) -> None:
        """Leave it to the next server."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    @property
    def _server(self) -> Any:  # noqa: ANN401 - or whoever has the kernel manager
        return getattr(self._manager, "parent", None)

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._kept is None:
            self._kept = KeptRecord.take(self._kernel_id)
        if self._kept is not None:
            root_dir = str(getattr(self._server, "root_dir", ""))
            self._kept.write({"kernel_id": self._kernel_id, "root_dir": root_dir, **content})

    def _say_why_not(self, error: Exception) -> None:
        self._log.warning("Kernel %s will not outlive this server: %s", self._kernel_id, error)
