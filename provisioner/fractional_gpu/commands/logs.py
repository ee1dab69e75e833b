"""`jupyter gpu logs` shows the broker's log and follows it.

The command reads the files itself, so it needs no broker. A broker in a terminal or under systemd writes no log files. In this case, the
error says where its log is.
"""

import argparse
import json
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Generic, TypeVar

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.commands.lease_commands import find_lease
from fractional_gpu.commands.terminal.arguments import LEASES, Parser
from fractional_gpu.commands.terminal.connection import broker_if_running
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError, Style, UsageError, line, parse_argument, say, write
from fractional_gpu.core.units import parse_duration_ms
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.status import LeaseStatus

if TYPE_CHECKING:
    from rich.text import Text

EPILOG = """\
examples:
  jupyter gpu logs                      the last 100 entries
  jupyter gpu logs --follow             the last 100, then each new one (Ctrl-C stops)
  jupyter gpu logs 4f2a                 entries about the lease whose id begins with 4f2a
  jupyter gpu logs --level warning --since 1h --lines all
  jupyter gpu logs --json | jq 'select(.level == "ERROR")'

For root and the user who runs the broker. `jupyter gpu explain LEASE` says why a kernel waited, was suspended or refused.
"""
T = TypeVar("T")
INTERVAL_S = 0.5  # how often a command that follows a log looks for new lines
_LONGEST_LINE = 1 << 20
LEVELS: Final = ("debug", "info", "warning", "error")
_SEVERITY: Final = {"DEBUG": 0, "INFO": 1, "WARNING": 2, "ERROR": 3, "CRITICAL": 4}
_STYLES: Final = {"WARNING": Style.ATTENTION, "ERROR": Style.WRONG, "CRITICAL": Style.WRONG}
_LINES = 100
_ALL = "all"
_FILES = 9  # how many rotated files to look for
_SHORT_ID = 8  # characters of an id in the log
_HEAD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]+) (.*)", re.DOTALL)


@contextmanager
def explained(path: Path, what: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise CommandError(
            f"cannot read {what} {error.filename or path}: only root and the user who runs the broker may read it; run this as one of "
            f"them"
        ) from None
    except OSError as error:
        raise CommandError(f"{what} {path} cannot be read: {error.strerror or error}{advice}") from None


class GrowingLog(ABC, Generic[T]):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._begun = False
        self._rest = b""

    @abstractmethod
    def finished(self) -> Sequence[Path]:
        """Return the rotated files, oldest first. This is called once, when the first line is read."""

    @abstractmethod
    def entries(self) -> Iterator[T]: ...

    def follow(self, pause: Callable[[float], None] = time.sleep) -> Iterator[T]:
        while True:
            yield from self.entries()
            pause(INTERVAL_S)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            for file in self.finished():
                with file.open("rb") as finished:
                    yield from self._read(finished)
        if self._file is None:
            self._open()
        while self._file is not None:
            yield from self._read(self._file)
            if self._is_current(self._file):
                return
            yield from self._read(self._file)  # lines written just before the rename
            self.close()
            self._open()

    def _open(self) -> None:
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            self._file = None

    def _is_current(self, file: BinaryIO) -> bool:
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return True  # the file was deleted and not replaced
        return os.path.samestat(there, os.fstat(file.fileno()))

    def _read(self, file: BinaryIO) -> Iterator[bytes]:
        while part := file.readline(_LONGEST_LINE):
            self._rest += part
            if not self._rest.endswith(b"\n") and len(self._rest) < _LONGEST_LINE:
                return  # the rest of the line may follow
            line, self._rest = self._rest, b""
            yield line


@dataclass(frozen=True, slots=True)
class LogEntry:
    time: datetime
    level: str
    text: str

    def lines(self) -> "Iterator[Text]":
        first, *others = self.text.split("\n")
        level = (f"{self.level:<7}", _STYLES.get(self.level, ""))
        yield line(f"{self.time:%Y-%m-%d %H:%M:%S} ", level, f" {first}")
        for one in others:
            yield line(f"    {one}")


def configure(parser: Parser) -> None:
    parser.describe("Show the broker's log.", EPILOG)
    parser.argument(
        "lease", "LEASE", "only entries that name this lease; give its id or the beginning of it", by=LEASES, nargs="?"
    )
    parser.flag("--follow", "keep printing new entries as they are written")
    parser.argument("--lines", "N", f"the last N entries, or `{_ALL}` (default: {_LINES})", default=str(_LINES))
    parser.argument("--since", "DURATION", "only entries since this long ago, such as 2h")
    parser.argument("--level", None, "only entries of this level or above", choices=LEVELS, default=LEVELS[0])
    parser.flag("--json", "print each entry as a line of JSON")
    parser.add_socket()


def run(options: argparse.Namespace) -> int:
    path = Path(options.socket or socket_path()).with_name("broker.log")
    last = _number(options.lines)
    since_ms = None if options.since is None else parse_argument(parse_duration_ms, options.since)
    least = datetime.fromtimestamp(0 if since_ms is None else time.time() - since_ms / 1000, UTC)
    wanted = _wanted(options.level, least, "" if options.lease is None else _short_id(options.lease, options.socket))
    with explained(path, "the log"), closing(LogReader(path)) as log:
        with Progress(f"reading {path} ...", silent=True):
            there = deque((entry for entry in log.entries() if wanted(entry)), maxlen=last)
        if not log.has_files:
            raise CommandError(
                f"there is no log {path}: no broker has run here, or it logs to a terminal, or it is a systemd service; "
                "read a service's log with `journalctl --unit jupyter-gpu`, or name another broker's socket with --socket"
            )
        _print(there, as_json=options.json)
        if options.follow:
            for entry in filter(wanted, log.follow()):
                _print([entry], as_json=options.json)
    if not there:
        say(f"no matching entries in {path}", sys.stderr)
    return 0


def _print(entries: Collection[LogEntry], *, as_json: bool) -> None:
    if as_json:
        for entry in entries:
            print(json.dumps({"time": entry.time.isoformat(), "level": entry.level, "text": entry.text}))
    else:
        write(text for entry in entries for text in entry.lines())
    sys.stdout.flush()


def _number(text: str) -> int | None:
    if text == _ALL:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"--lines must be a number of entries, such as 500, or `{_ALL}`, not {text!r}")
    return int(text)


def _short_id(name: str, socket: str | None) -> str:
    leases: list[LeaseStatus] = []
    try:
        client = broker_if_running(socket)
        if client is not None:
            with client:
                leases = client.status().leases
    except FractionalGPUError:
        pass  # the log is needed most when the broker does not answer
    try:
        return find_lease(name, leases).lease_id[:_SHORT_ID]
    except CommandError:
        if any(lease.lease_id.startswith(name) for lease in leases):  # the name matches several leases
            raise
    if not re.fullmatch(r"[0-9a-f]{4,}", name):
        raise UsageError(f"there is no lease {name!r} now; if it has ended, give its id or the first 4 to 8 characters")
    return name[:_SHORT_ID]


def _wanted(level: str, least: datetime, lease: str) -> Callable[[LogEntry], bool]:
    severity = LEVELS.index(level)
    named = re.compile(rf"\b{lease}") if lease else None

    def is_wanted(entry: LogEntry) -> bool:
        return (
            _SEVERITY.get(entry.level, severity) >= severity
            and entry.time >= least
            and (named is None or named.search(entry.text) is not None)
        )

    return is_wanted


class LogReader(GrowingLog[LogEntry]):
    _has_older = False
    _last: LogEntry | None = None

    @property
    def has_files(self) -> bool:
        return self._has_older or self.path.exists()

    def finished(self) -> Sequence[Path]:
        numbered = (self.path.with_name(f"{self.path.name}.{number}") for number in range(_FILES, 0, -1))
        older = [one for one in numbered if one.exists()]
        self._has_older = bool(older)
        return older

    def entries(self) -> Iterator[LogEntry]:
        entry: LogEntry | None = None
        for raw in self.lines():
            text = raw.decode(errors="backslashreplace").rstrip("\n")
            head = _head(text)
            if head is not None:
                if entry is not None:
                    yield entry
                entry = self._last = head
            elif entry is not None:
                entry = LogEntry(entry.time, entry.level, f"{entry.text}\n{text}")
            elif self._last is not None:  # the rest of an entry that was shown incompletely
                entry = LogEntry(self._last.time, self._last.level, text)
        if entry is not None:
            yield entry


def _head(line: str) -> LogEntry | None:
    match = _HEAD.fullmatch(line)
    if match is None:
        return None
    second, thousandths, level, text = match.groups()
    try:
        at = datetime.fromisoformat(f"{second}.{thousandths}").astimezone()
    except ValueError:
        return None
    return LogEntry(at, level, text)
