"""The broker's log. Only the broker's user can read it, repeated lines are counted, and a failure to write to it never stops the broker."""

import logging
import logging.handlers
import os
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Final

from fractional_gpu.core.units import plural
from fractional_gpu.host.files import open_own

_AT_ONCE: Final = 3  # equal lines to write one by one
_PERIOD_S: Final = 60.0  # after these, equal lines share one line per period
_KEPT: Final = 256  # different lines to remember


class RepeatFilter(logging.Filter):
    """Passes the first `_AT_ONCE` identical lines, then one a minute with a count."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: OrderedDict[tuple[int, str], tuple[float, int]] = OrderedDict()  # -> (start, repeats)

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        key, now_s = (record.levelno, text), time.monotonic()
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
    """A log whose files only their owner can read. Lines that cannot be written are counted, and the count is written later."""

    _lost = 0

    def _open(self) -> TextIOWrapper:
        descriptor = open_own(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        before = self._lost
        super().emit(record)
        if before and self._lost == before:
            self._lost = 0
            lost = logging.makeLogRecord(
                {"levelname": "WARNING", "msg": f"{plural(before, 'line')} of this log could not be written"}
            )
            super().emit(lost)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
            return
        self._lost += 1
        # The stream would retry its unwritten buffer with each line, so open it again for the next one.
        stream, self.stream = self.stream, None
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.close()


def set_up_logging(level: str, socket: str, *, to_file: bool) -> None:
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
