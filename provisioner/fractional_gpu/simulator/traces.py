"""Session traces, from files and synthetic: the cells of each notebook session, and when it was open.

Two CSV files. Cells: `session,user,start_s,duration_s,gpus,gpu_mib,gpu_util`, one row per executed cell; `start_s` and `duration_s` are
those of an unshared machine, in seconds from the trace's start; `gpus` 0 does not touch the GPU; `gpu_mib` is what the kernel holds
during and after the cell; `gpu_util` is in percent. Sessions: `session,user,open_s,close_s,gpus,gpu_mib`, what was reserved and when; a
column `priority` (a whole number, 0 if there is none) may follow.

In memory everything is an integer: milliseconds, MiB, percent.
"""

import csv
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import TypeVar

from fractional_gpu.simulator import TraceError

# -- tables ------------------------------------------------------------------------------------------------------------
# Reads CSV files. Errors say which file, which line, what was there and what is allowed.


_LARGEST = 10**15
_Row = TypeVar("_Row")


def read_table(path: Path, columns: Sequence[str], read: Callable[[dict[str, str]], _Row]) -> Iterator[_Row]:
    """Yield what `read` makes of each row.

    Raises TraceError for a file that cannot be read, lacks a column, has a row of another length, or one that `read` refuses.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from _rows(csv.DictReader(file, strict=True), columns, read)
    except TraceError as error:
        raise TraceError(f"{path}, {error}") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise TraceError(f"{path} is not a CSV file: {error}") from error


def _rows(
    rows: "csv.DictReader[str]", columns: Sequence[str], read: Callable[[dict[str, str]], _Row]
) -> Iterator[_Row]:
    missing = [column for column in columns if column not in (rows.fieldnames or ())]
    if missing:
        raise TraceError(f"the header has no column {missing[0]!r}; expected {','.join(columns)}")
    for row in rows:
        if None in row or None in row.values():
            raise TraceError(f"line {rows.line_num}: expected {len(rows.fieldnames or ())} values, as in the header")
        try:
            yield read(row)
        except TraceError as error:
            raise TraceError(f"line {rows.line_num}: {error}") from None


def whole(row: dict[str, str], column: str, *, most: int = _LARGEST) -> int:
    """Return a whole number from 0 to `most`. Raises TraceError."""
    text = row[column].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(_LARGEST)) or int(text) > most:
        raise TraceError(f"{column} is {text[:40]!r}; allowed: a whole number from 0 to {most}")
    return int(text)


def number(row: dict[str, str], column: str, *, most: float = float(_LARGEST)) -> float:
    """Return a number from 0 to `most`. Raises TraceError."""
    text = row[column].strip()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise TraceError(f"{column} is {text[:40]!r}; allowed: a number from 0 to {most:g}")
    return value


# -- traces ------------------------------------------------------------------------------------------------------------


_CELLS = ("session", "user", "start_s", "duration_s", "gpus", "gpu_mib", "gpu_util")
_SESSIONS = ("session", "user", "open_s", "close_s", "gpus", "gpu_mib")
_LONGEST_S = 366 * 86_400.0
_MOST_GPUS = 64
_HIGHEST_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class Cell:
    """One executed cell: times in ms, memory in MiB, GPU utilisation in percent."""

    start_ms: int
    duration_ms: int
    gpus: int
    gpu_mib: int
    util_percent: int


@dataclass(frozen=True, slots=True)
class Session:
    """One kernel, its cells in the order of their starts. `gpus` and `gpu_mib` are what it would have reserved."""

    session_id: str
    user: str
    open_ms: int
    close_ms: int
    gpus: int
    gpu_mib: int
    cells: tuple[Cell, ...]
    priority: int = 0

    @property
    def peak_mib(self) -> int:
        """The most device memory that it ever holds, MiB."""
        return max((cell.gpu_mib for cell in self.cells if cell.gpus), default=0)

    @property
    def most_gpus(self) -> int:
        """The most GPUs that one of its cells uses."""
        return max((cell.gpus for cell in self.cells), default=0)


def read_sessions(sessions: Path, cells: Path) -> list[Session]:
    """Return the sessions in the order in which they open. Raises TraceError with the file, the line and what is allowed."""
    executed: dict[str, list[Cell]] = {}
    for name, cell in read_table(cells, _CELLS, _cell):
        executed.setdefault(name, []).append(cell)
    found: dict[str, Session] = {}

    def session(row: dict[str, str]) -> Session:
        return _session(row, executed.pop(row["session"], []), found)

    for one in read_table(sessions, _SESSIONS, session):
        found[one.session_id] = one
    if executed:
        raise TraceError(f"{cells} has cells of session {next(iter(executed))!r}, which is not in {sessions}")
    if not found:
        raise TraceError(f"{sessions} lists no sessions")
    return sorted(found.values(), key=lambda session: (session.open_ms, session.session_id))


def _cell(row: dict[str, str]) -> tuple[str, Cell]:
    return row["session"], Cell(
        start_ms=round(1000 * number(row, "start_s", most=_LONGEST_S)),
        duration_ms=round(1000 * number(row, "duration_s", most=_LONGEST_S)),
        gpus=whole(row, "gpus", most=_MOST_GPUS),
        gpu_mib=whole(row, "gpu_mib"),
        util_percent=round(number(row, "gpu_util", most=100.0)),
    )


def _session(row: dict[str, str], cells: Iterable[Cell], known: dict[str, Session]) -> Session:
    session = Session(
        session_id=row["session"],
        user=row["user"],
        open_ms=round(1000 * number(row, "open_s", most=_LONGEST_S)),
        close_ms=round(1000 * number(row, "close_s", most=_LONGEST_S)),
        gpus=whole(row, "gpus", most=_MOST_GPUS),
        gpu_mib=whole(row, "gpu_mib"),
        cells=tuple(sorted(cells, key=lambda cell: cell.start_ms)),
        priority=whole(row, "priority", most=_HIGHEST_PRIORITY) if "priority" in row else 0,
    )
    if not session.session_id or session.session_id in known:
        raise TraceError(f"session is {session.session_id[:40]!r}; allowed: an id that no other row has")
    if session.close_ms < session.open_ms:
        raise TraceError(f"session {session.session_id[:40]!r} closes before it opens")
    if session.cells and session.cells[0].start_ms < session.open_ms:
        raise TraceError(f"session {session.session_id[:40]!r} runs a cell before it opens")
    return session


def write_sessions(trace: Sequence[Session], sessions: Path, cells: Path) -> None:
    """Write a trace in the two files' format."""
    with sessions.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        ranked = any(one.priority for one in trace)
        out.writerow((*_SESSIONS, "priority") if ranked else _SESSIONS)
        for one in trace:
            row = (one.session_id, one.user, one.open_ms / 1000, one.close_ms / 1000, one.gpus, one.gpu_mib)
            out.writerow((*row, one.priority) if ranked else row)
    with cells.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(_CELLS)
        for one in trace:
            for cell in one.cells:
                out.writerow(
                    (
                        one.session_id,
                        one.user,
                        cell.start_ms / 1000,
                        cell.duration_ms / 1000,
                        cell.gpus,
                        cell.gpu_mib,
                        cell.util_percent,
                    )
                )


# -- synthetic ---------------------------------------------------------------------------------------------------------
# Synthetic build-phase users, whose pooled statistics follow a published trace of an industrial notebook platform.
#
# What is matched: GPU cells last 2 min (median) and 5 min (75th percentile); gaps between a session's GPU cells are 1, 3, 8 and 41 min
# (25th, 50th, 75th, 90th percentile); memory per cell is 2.3, 4.6, 18 and 38 GB (50th, 75th, 90th, 99th); GPU utilisation during a cell
# is 8.5 % (median) and 36 % (90th); reserved GPUs are busy about a quarter of the time; three sessions in four use their GPU at most 5 %
# of the time. The last two go together only if the sessions that hardly use their GPU are short, so a user's day is one long working
# session and three short looks. One seed gives one trace, on every machine.


_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
# Points (probability, value) of quantile functions; between them the logarithm is interpolated.
_CELL_S = ((0.0, 2.0), (0.25, 48.0), (0.5, 124.0), (0.75, 307.0), (0.9, 690.0), (0.99, 2800.0), (1.0, 7200.0))
_GAP_S = ((0.0, 5.0), (0.25, 60.0), (0.5, 180.0), (0.75, 480.0), (0.9, 2460.0), (1.0, 9000.0))
_MEMORY_MIB = ((0.0, 300.0), (0.5, 2194.0), (0.75, 4387.0), (0.9, 17166.0), (0.99, 36240.0), (1.0, 60000.0))
_UTIL_PERCENT = ((0.0, 1.0), (0.5, 8.5), (0.9, 36.0), (1.0, 100.0))
_SHORT_LOOKS = 3  # a day, beside the working session
_IDLE_LOOK = 0.5  # the share of short looks that never use the GPU


def _draw(rng: random.Random, points: Sequence[tuple[float, float]]) -> float:
    at = rng.random()
    right = min(len(points) - 1, bisect_right([probability for probability, _ in points], at))
    (low, small), (high, large) = points[right - 1], points[right]
    return exp(log(small) + (log(large) - log(small)) * (at - low) / (high - low))


def synthetic_sessions(users: int, days: int, seed: int, *, urgent_percent: int = 0) -> list[Session]:
    """Return the sessions of so many users over so many days, in the order in which they open.

    `urgent_percent` of the users, spread evenly among them, have priority 1; what all users do is the same for every share.
    """
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    sessions = []
    for day in range(days):
        for user in range(users):
            name = f"u{user:05d}"
            opens = day * _DAY_MS + round(_HOUR_MS * min(13.0, max(6.0, rng.gauss(9.0, 1.0))))
            closes = opens + round(_HOUR_MS * rng.uniform(8.0, 10.5))
            sessions.append(_working(rng, f"{name}-d{day}-work", name, opens, closes))
            for look in range(_SHORT_LOOKS):
                opens = day * _DAY_MS + round(_HOUR_MS * rng.uniform(8.0, 20.0))
                sessions.append(_looking(rng, f"{name}-d{day}-look{look}", name, opens))
    if urgent_percent:
        sessions = [replace(session, priority=_priority(session.user, urgent_percent)) for session in sessions]
    return sorted(sessions, key=lambda session: (session.open_ms, session.session_id))


def _priority(user: str, urgent_percent: int) -> int:
    number = int(user.removeprefix("u"))
    return (number + 1) * urgent_percent // 100 - number * urgent_percent // 100


def _working(rng: random.Random, session_id: str, user: str, opens: int, closes: int) -> Session:
    memory = round(_draw(rng, _MEMORY_MIB))
    cells: list[Cell] = []
    at = opens + round(1000 * rng.uniform(5.0, 300.0))
    while at < closes:
        cells.append(_gpu_cell(rng, at, round(1000 * _draw(rng, _CELL_S)), memory))
        ended = at + cells[-1].duration_ms
        gap = round(1000 * _draw(rng, _GAP_S))
        if rng.random() < 0.5:  # looks at a table or a plot in between
            cells.append(Cell(ended + gap // 3, min(gap // 3, rng.randrange(200, 20_000)), 0, 0, 0))
        at = ended + gap
    last = max(cell.start_ms + cell.duration_ms for cell in cells)
    return Session(session_id, user, opens, max(closes, last), 1, memory, tuple(cells))


def _looking(rng: random.Random, session_id: str, user: str, opens: int) -> Session:
    length = round(60_000 * rng.uniform(10.0, 40.0))
    memory = round(_draw(rng, _MEMORY_MIB))
    cells = [Cell(opens + length // 8, rng.randrange(200, 20_000), 0, 0, 0)]
    if rng.random() >= _IDLE_LOOK:
        cells.append(_gpu_cell(rng, opens + length // 2, rng.randrange(2_000, length // 20), memory))
    return Session(session_id, user, opens, opens + length, 1, memory, tuple(cells))


def _gpu_cell(rng: random.Random, start_ms: int, duration_ms: int, memory_mib: int) -> Cell:
    return Cell(start_ms, duration_ms, 1, memory_mib, max(1, round(_draw(rng, _UTIL_PERCENT))))
