"""Records of kernels that outlive their server: what the next server needs to take one over (`fractional_gpu.jupyter.kernel_manager`).

- One file a kernel, mode 0600, in a private folder; it holds the connection's key and the path of the lease's token.
- The server that has a kernel holds a lock on its record for as long as the server lives, so no other server takes the kernel over. A
  rewritten record is a new file, which is locked before it takes the name; a lock on a file that has lost the name does not count.
- A record first names the lease of a process that is about to be started. It is rewritten when that process is attached, also after a
  restart, and removed when the kernel is shut down. A server that dies in between leaves a process whose connection is unknown: the next
  server ends it.
"""

import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

from fractional_gpu.client.discovery import runtime_dir
from fractional_gpu.host.files import open_own, replace_file
from fractional_gpu.jupyter.kernel_lease import KernelLease
from fractional_gpu.jupyter.kernel_process import ProcessGoneError

log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)


class RecordFile:
    """The file with one kernel's record, locked by this process until `close` or `remove`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, kernel_id: str) -> "RecordFile | None":
        """Create or open the kernel's record and lock it; None if another server has it. Raises OSError, ValueError."""
        if not _NAME.fullmatch(kernel_id):
            raise ValueError(f"a kernel id such as {kernel_id[:80]!r} cannot name a file")
        return cls.open(_folder() / f"{kernel_id}.json", os.O_CREAT)

    @classmethod
    def open(cls, path: Path, flags: int = 0) -> "RecordFile | None":
        """Open the record and lock it; None if another server has. Raises OSError."""
        while True:
            descriptor = open_own(path, os.O_RDWR | flags)
            try:
                _lock(descriptor)
                if _has_name(descriptor, path):
                    return cls(path, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            os.close(descriptor)  # it was replaced or removed between open and lock: try again

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content in one step: a server that is killed leaves the old text or the new one.

        Raises OSError, and then the old text stays.
        """
        line = json.dumps(content).encode() + b"\n"
        old, self._descriptor = self._descriptor, replace_file(self.path, line, prepare=_lock, keep=True)
        os.close(old)

    def restore(self) -> None:
        """Write the record again if its name leads to no file, or to another one. Raises OSError."""
        if self._descriptor >= 0 and not _has_name(self._descriptor, self.path):
            _folder()
            self.write(self.read())

    def read(self) -> dict[str, Any]:
        """Return the content. Raises ValueError if it was never written completely."""
        line, _, _ = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).partition(b"\n")
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError(f"{self.path} holds no record")  # noqa: TRY004 - what is in a file is a value
        return content

    def close(self) -> None:
        """Unlock it: another server may take the kernel over."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Remove it: the kernel is shut down."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.close()


def _lock(descriptor: int) -> None:
    """Lock the file against other servers. Raises BlockingIOError if another server has locked it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _has_name(descriptor: int, path: Path) -> bool:
    """Whether the name still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def unlocked_records() -> Iterator[RecordFile]:
    """Yield each record that no server has, locked; the caller keeps, closes or removes it."""
    for path in sorted(_folder().glob("*.json")):
        try:
            record = RecordFile.open(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("the record %s of a kernel cannot be read: %s", path, error.strerror)
            continue
        if record is not None:
            yield record


def _folder() -> Path:
    folder = runtime_dir() / "kept"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class KernelRecord:
    """A provisioner's record of its kernel. A failed write is logged, and the kernel then ends with this server."""

    def __init__(self, manager: Any, kernel_id: str, log: "Logger | LoggerAdapter[Any]") -> None:  # noqa: ANN401 - of any server
        self._manager = manager
        self._kernel_id = kernel_id
        self._log = log
        self.file: RecordFile | None = None  # None: the next server would not find the kernel

    @property
    def is_wanted(self) -> bool:
        """Whether the server keeps its kernels."""
        return bool(getattr(self._server, "keeps_kernels", False))

    def write_launching(self, lease: KernelLease) -> None:
        """Record that a process is about to be started: if this server dies meanwhile, the next one ends that process."""
        try:
            self._write({"launching": lease.to_info()})
        except (OSError, ValueError) as error:
            self._log_failure(error)

    def write_launched(
        self, launch: Mapping[str, Any], connection: Mapping[str, Any], info: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Record the connection of the process that was started; `info` returns what its provisioner needs, or raises ProcessGoneError."""
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
            self.remove()  # or the next server would take it for an unfinished start, and end the process
            self._log_failure(error)

    def remove(self) -> None:
        """Remove it: the kernel is shut down."""
        if self.file is not None:
            self.file.remove()
            self.file = None

    def leave_to_next_server(self) -> None:
        """Unlock it for the next server."""
        if self.file is not None:
            self.file.close()
            self.file = None

    @property
    def _server(self) -> Any:  # noqa: ANN401 - the server's multi-kernel manager, if there is one
        return getattr(self._manager, "parent", None)

    def _write(self, content: Mapping[str, Any]) -> None:
        if self.file is None:
            self.file = RecordFile.create(self._kernel_id)
        if self.file is not None:
            root_dir = str(getattr(self._server, "root_dir", ""))
            self.file.write({"kernel_id": self._kernel_id, "root_dir": root_dir, **content})

    def _log_failure(self, error: Exception) -> None:
        self._log.warning("Kernel %s will not outlive this server: %s", self._kernel_id, error)
