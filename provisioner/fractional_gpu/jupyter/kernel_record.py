"""Keeps records of kernels that outlive their server, so that the next server can take them over (see `kernel_manager`).

Each kernel has a private file with its connection key and the path of its lease's token. The server that manages a kernel holds a lock on
its record. Rewriting a record creates a new file, which is locked before it is renamed into place. Before a process starts, its record
names only the lease; once the process is attached, the record is rewritten. If the server dies in between, the next server ends the kernel.
"""

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fractional_gpu.client.discovery import runtime_dir
from fractional_gpu.host.files import open_own, replace_file

log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)


class RecordFile:
    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, kernel_id: str) -> "RecordFile | None":
        """Create or open the record and lock it. Return None if another server has locked the record. Raises OSError or ValueError."""
        if not _NAME.fullmatch(kernel_id):
            raise ValueError(f"kernel id {kernel_id[:80]!r} cannot be used as a file name")
        return cls.open(_folder() / f"{kernel_id}.json", os.O_CREAT)

    @classmethod
    def open(cls, path: Path, flags: int = 0) -> "RecordFile | None":
        while True:
            descriptor = open_own(path, os.O_RDWR | flags)
            try:
                _lock(descriptor)
                if _has_name(descriptor, path):
                    return cls(path, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            os.close(descriptor)  # another server replaced or removed it between open and lock, so try again

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content atomically. After an OSError, the file still has the old content."""
        line = json.dumps(content).encode() + b"\n"
        # Lock the new file before it takes the name, and close the old file afterwards, so that the record is always locked.
        old, self._descriptor = self._descriptor, replace_file(self.path, line, prepare=_lock, keep=True)
        os.close(old)

    def restore(self) -> None:
        if self._descriptor >= 0 and not _has_name(self._descriptor, self.path):
            _folder()
            self.write(self.read())

    def read(self) -> dict[str, Any]:
        """Return the content. Raises ValueError if it is incomplete."""
        line, _, _ = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).partition(b"\n")
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError(f"{self.path} contains no record")  # noqa: TRY004 - a file's content is a value
        return content

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.close()


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def unlocked_records() -> Iterator[RecordFile]:
    for path in sorted(_folder().glob("*.json")):
        try:
            record = RecordFile.open(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("could not read the kernel record %s: %s", path, error.strerror)
            continue
        if record is not None:
            yield record


def _folder() -> Path:
    folder = runtime_dir() / "kept"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
