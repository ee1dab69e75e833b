"""The broker's log: its own user's alone, without thousands of equal lines, and no trouble for the broker where it cannot be written."""

import logging
import logging.handlers
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Final

from fractional_gpu.host.files import open_own

__all__ = ["RepeatFilter", "reopen_logs", "set_up_logging"]

_AT_ONCE: Final = 3  # equal lines that are written one by one
_PERIOD_S: Final = 60.0  # equal ones after that: one line for each such period
_KEPT: Final = 256  # different lines that are remembered


class RepeatFilter(logging.Filter):
    """Lets `_AT_ONCE` equal lines through, and then one a minute, which says how many there were. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: OrderedDict[tuple[int, str], tuple[float, int]] = OrderedDict()  # -> since when, and how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written; the one that stands for others says so."""
        text = record.getMessage()
        key, now_s = (record.levelno, text), self._clock()
        since_s, times = self._seen.get(key, (now_s, 0))
        if now_s - since_s >= _PERIOD_S:
            if times >= _AT_ONCE:
                record.msg, record.args = f"{text} (repeated {times - _AT_ONCE + 1} times)", ()
                self._keep(key, now_s, _AT_ONCE)
            else:
                self._keep(key, now_s, 1)
            return True
        self._keep(key, since_s, times + 1)
        return times < _AT_ONCE

    def _keep(self, key: tuple[int, str], since_s: float, times: int) -> None:
        self._seen[key] = (since_s, times)
        self._seen.move_to_end(key)
        if len(self._seen) > _KEPT:
            self._seen.popitem(last=False)


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """A log for its owner only, each new file of it, too; what an earlier broker left is made so.

    Lines that cannot be written, because the disk is full or the folder is gone, are counted, and their number is written once it is
    possible again.
    """

    _lost = 0

    def _open(self) -> TextIOWrapper:
        descriptor = open_own(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    def reopen_if_gone(self) -> bool:
        """Go on in a new file if this one was deleted; return whether it was. Raises OSError."""
        if os.path.lexists(self.baseFilename):
            return False
        self.acquire()
        try:
            stream, self.stream = self.stream, self._open()
            if stream is not None:
                stream.close()
        finally:
            self.release()
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        before = self._lost
        super().emit(record)
        if before and self._lost == before:
            self._lost = 0
            lost = logging.makeLogRecord(
                {"levelname": "WARNING", "msg": f"{before} lines of this log could not be written"}
            )
            super().emit(lost)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Count a line that could not be written; a defect of ours is told as usual."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
            return
        self._lost += 1
        # What a stream has taken and not written would be tried again with each line.
        stream, self.stream = self.stream, None  # opened again for the next line
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.close()


def set_up_logging(level: str, socket: str, *, to_file: bool) -> None:
    """Write the log to stderr, or to `broker.log` beside the socket. Raises OSError."""
    handler: logging.Handler = logging.StreamHandler()
    if to_file:
        path = Path(socket).with_name("broker.log")
        handler = _PrivateLog(path, maxBytes=10_000_000, backupCount=3)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("tornado").setLevel(logging.WARNING)


def reopen_logs() -> bool:
    """Go on in new files where those of the log were deleted; return whether one was. Raises OSError."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, _PrivateLog)]
    back = [handler.reopen_if_gone() for handler in handlers]
    return any(back)
