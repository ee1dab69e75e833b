"""The lines of a log that another process writes, over rotations: those that are there, and then new ones as they come."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fractional_gpu.commands.terminal.text import CommandError

INTERVAL_S = 0.5
"""How often a command that follows a log looks for new lines."""
_LONGEST_LINE = 1 << 20


@contextmanager
def explained(path: Path, what: str, advice: str = "") -> Iterator[None]:
    """Turn a failure to read the log into a CommandError. `what` it is; `advice`: what else to do, beginning with a semicolon."""
    try:
        yield
    except PermissionError as error:
        raise CommandError(
            f"you may not read {what} {error.filename or path}: root and the user who runs the broker may; run this as one of them"
        ) from None
    except OSError as error:
        raise CommandError(f"{what} {path} cannot be read: {error.strerror or error}{advice}") from None


class GrowingLog:
    """Reads the log's files from the oldest line on, and new lines as they come. Raises OSError; a missing log is empty.

    `finished` returns the files that were rotated away, oldest first. It is called once, when the first line is read.
    """

    def __init__(self, path: Path, finished: Callable[[Path], Sequence[Path]]) -> None:
        self._path = path
        self._finished = finished
        self._file: BinaryIO | None = None
        self._begun = False
        self._rest = b""

    def close(self) -> None:
        """Close the open file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> Iterator[bytes]:
        """Yield the whole lines since the last call, with their ends. A line of more than a MiB comes in pieces."""
        if not self._begun:
            self._begun = True
            for file in self._finished(self._path):
                with file.open("rb") as finished:
                    yield from self._read(finished)
        if self._file is None:
            self._open()
        while self._file is not None:
            yield from self._read(self._file)
            if self._is_current(self._file):
                return
            yield from self._read(self._file)  # lines that were written just before it was renamed
            self.close()
            self._open()

    def _open(self) -> None:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            self._file = None

    def _is_current(self, file: BinaryIO) -> bool:
        """Return whether new lines still go to this file; one that was deleted stays until there is another."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        return os.path.samestat(there, os.fstat(file.fileno()))

    def _read(self, file: BinaryIO) -> Iterator[bytes]:
        while part := file.readline(_LONGEST_LINE):
            self._rest += part
            if not self._rest.endswith(b"\n") and len(self._rest) < _LONGEST_LINE:
                return  # its end may still come
            line, self._rest = self._rest, b""
            yield line
