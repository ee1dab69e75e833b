"""Records of kernels that outlive their server: what the next server needs to take one over (`fractional_gpu.jupyter.kernel_manager`).

- One file a kernel, mode 0600, in a private folder; it holds the connection's key and the path of the lease's token.
- The server that has a kernel holds a lock on its record for as long as it lives: nobody takes over what somebody has. A record that
  is written anew is another file of the same name, which is locked before it takes the name; a lock on a file that has lost the name
  counts for nothing.
- A record says first that a process is about to be started, and with which lease; it is written anew when that process is attached,
  also after a restart, and removed when the kernel is shut down. A server that dies in between leaves a process that nobody could talk
  to: the next server ends it.
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

__all__ = ["KeptRecord", "KernelRecord", "kept_records"]


class KeptRecord:
    """The record of one kernel, held by this process until `close` or `remove`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, kernel_id: str) -> "KeptRecord | None":
        """Take the kernel's record, a new one if there is none; None if another server has it. Raises OSError, ValueError."""
        if not _NAME.fullmatch(kernel_id):
            raise ValueError(f"a kernel id such as {kernel_id[:80]!r} cannot name a file")
        return cls.hold(_folder() / f"{kernel_id}.json", os.O_CREAT)

    @classmethod
    def hold(cls, path: Path, flags: int = 0) -> "KeptRecord | None":
        """Open the record and hold it; None if another server does. Raises OSError."""
        while True:
            descriptor = open_own(path, os.O_RDWR | flags)
            try:
                _lock(descriptor)
                if _has_name(descriptor, path):
                    return cls(path, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            os.close(descriptor)  # it was replaced or removed between the two steps: look again

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace what it says, in one step: a server that is killed, or a disk that is full, leaves the old text or the new one.

        Raises OSError, and then the old text stands.
        """
        line = json.dumps(content).encode() + b"\n"
        old, self._descriptor = self._descriptor, replace_file(self.path, line, prepare=_lock, keep=True)
        os.close(old)

    def put_back(self) -> None:
        """Give it its name again where that leads to no file, or to another one. Raises OSError."""
        if self._descriptor >= 0 and not _has_name(self._descriptor, self.path):
            _folder()
            self.write(self.read())

    def read(self) -> dict[str, Any]:
        """Return what it says. Raises ValueError if it was never finished."""
        line, _, _ = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).partition(b"\n")
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError(f"{self.path} holds no record")  # noqa: TRY004 - what is in a file is a value
        return content

    def close(self) -> None:
        """Let go of it: another server may take the kernel over."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """The kernel is over."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.close()


def _lock(descriptor: int) -> None:
    """Lock the file against other servers. Raises BlockingIOError where one has it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _has_name(descriptor: int, path: Path) -> bool:
    """Whether the name still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def kept_records() -> Iterator[KeptRecord]:
    """Take each record that no server has, one after the other; whoever does not keep one closes or removes it."""
    for path in sorted(_folder().glob("*.json")):
        try:
            record = KeptRecord.hold(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("the record %s of a kernel is left alone: %s", path, error.strerror)
            continue
        if record is not None:
            yield record


def _folder() -> Path:
    folder = runtime_dir() / "kept"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


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


log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)
