"""`jupyter gpu logs` shows the broker's log and follows it.

The command reads the files directly, so it needs no broker. A broker that runs in a terminal or under systemd writes no log files. In that
case, the error says where its log is.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.commands.terminal.arguments import LEASES, Parser
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError, Style, UsageError, line, parse_argument, say, write
from fractional_gpu.core.units import parse_duration_ms

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
        raise CommandError(f"cannot read {what} {path}: {error.strerror or error}{advice}") from None


def growing_lines(path: Path, finished: Iterable[Path]) -> Generator[bytes | None, None, None]:
    """Yield lines from the finished files, then from the file at `path`, even if it is replaced. Yield None when no more are available."""
    rest = bytearray()

    def lines(file: BinaryIO) -> Iterator[bytes]:
        while part := file.readline(_LONGEST_LINE):
            rest.extend(part)
            if rest.endswith(b"\n") or len(rest) >= _LONGEST_LINE:
                yield bytes(rest)
                rest.clear()

    for one in finished:
        with one.open("rb") as file:
            yield from lines(file)
    while True:
        try:
            current = path.open("rb")
        except FileNotFoundError:
            yield None
            continue
        with current:
            yield from lines(current)
            while not _is_replaced(path, current):
                yield None
                yield from lines(current)
            yield from lines(current)  # lines written just before the rename


def _is_replaced(path: Path, file: BinaryIO) -> bool:
    try:
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False  # the file was deleted, and not replaced yet


def told(entries: Iterable[T | None], pause: Callable[[float], None] | None = None) -> Iterator[T]:
    """Yield the entries up to the first None. With `pause`, yield all of them, and call `pause` at each None."""
    for entry in entries:
        if entry is not None:
            yield entry
        elif pause is None:
            return
        else:
            pause(INTERVAL_S)


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
    parser.argument("--since", "DURATION", "only entries in the last DURATION, such as 2h")
    parser.argument("--level", None, "only entries of this level or above", choices=LEVELS, default=LEVELS[0])
    parser.flag("--json", "print each entry as a line of JSON")
    parser.add_socket()


def run(options: argparse.Namespace) -> int:
    path = Path(options.socket or socket_path()).with_name("broker.log")
    last = _number(options.lines)
    since_ms = None if options.since is None else parse_argument(parse_duration_ms, options.since)
    least = datetime.fromtimestamp(0 if since_ms is None else time.time() - since_ms / 1000, UTC)
    wanted = _wanted(options.level, least, "" if options.lease is None else _short_id(options.lease))
    numbered = (path.with_name(f"{path.name}.{number}") for number in range(_FILES, 0, -1))
    finished = [one for one in numbered if one.exists()]
    with explained(path, "the log"), closing(growing_lines(path, finished)) as lines:
        entries = entries_of(lines)
        with Progress(f"reading {path} ...", silent=True):
            there = deque(filter(wanted, told(entries)), maxlen=last)
        if not finished and not path.exists():
            raise CommandError(
                f"there is no log at {path}: no broker has run here, or it logs to a terminal, or it is a systemd service; "
                "read a service's log with `journalctl --unit jupyter-gpu`, or name another broker's socket with --socket"
            )
        _print(there, as_json=options.json)
        if options.follow:
            for entry in filter(wanted, told(entries, time.sleep)):
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


def _short_id(lease: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{4,}", lease):
        raise UsageError(
            f"{lease!r} is not the id of a lease; give the id, or its first 4 to 8 characters (`jupyter gpu status` shows them)"
        )
    return lease[:_SHORT_ID]


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


def entries_of(lines: Iterable[bytes | None]) -> Iterator[LogEntry | None]:
    """Group lines into entries. Yield each, and None when no more lines are available yet. Lines added to an entry later form a new one."""
    entry: LogEntry | None = None
    last: LogEntry | None = None
    for raw in lines:
        text = "" if raw is None else raw.decode(errors="backslashreplace").rstrip("\n")
        head = _head(text)
        if (raw is None or head is not None) and entry is not None:
            yield entry
            entry = None
        if raw is None:
            yield None
        elif head is not None:
            entry = last = head
        elif entry is not None:
            entry = LogEntry(entry.time, entry.level, f"{entry.text}\n{text}")
        elif last is not None:  # the rest of an entry that was shown incompletely
            entry = LogEntry(last.time, last.level, text)


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
