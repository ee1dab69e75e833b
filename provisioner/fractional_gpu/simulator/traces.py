"""Reads and writes session traces. A trace has two CSV files, one for sessions and one for their cells (docs/simulator-files.md).

Once read, all values are integers in milliseconds, MiB or percent.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fractional_gpu.simulator import TraceError

_LARGEST = 10**15
_Row = TypeVar("_Row")


def read_table(path: Path, columns: Sequence[str], read: Callable[[dict[str, str]], _Row]) -> Iterator[_Row]:
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
    text = row[column].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(_LARGEST)) or int(text) > most:
        raise TraceError(f"{column} is {text[:40]!r}; expected a whole number from 0 to {most}")
    return int(text)


def number(row: dict[str, str], column: str, *, most: float = float(_LARGEST)) -> float:
    text = row[column].strip()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise TraceError(f"{column} is {text[:40]!r}; expected a number from 0 to {most:g}")
    return value


_CELLS = ("session", "user", "start_s", "duration_s", "gpus", "gpu_mib", "gpu_util")
_SESSIONS = ("session", "user", "open_s", "close_s", "gpus", "gpu_mib")
_FURTHER = ("priority", "asked_mib", "group", "pool")
_LONGEST_S = 366 * 86_400.0
_MOST_GPUS = 64
_HIGHEST_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class Cell:
    """One executed cell. Times are in ms, memory is in MiB, and GPU utilisation is in percent."""

    start_ms: int
    duration_ms: int
    gpus: int
    gpu_mib: int
    util_percent: int


@dataclass(frozen=True, slots=True)
class Session:
    """One kernel with its cells, ordered by start. `gpus` and `gpu_mib` are what it would reserve without sharing.

    `asked_mib` is how much memory it requests on each GPU. If this is 0, it requests what it needs. `pool` is empty for the default pool.
    """

    session_id: str
    user: str
    open_ms: int
    close_ms: int
    gpus: int
    gpu_mib: int
    cells: tuple[Cell, ...]
    priority: int = 0
    asked_mib: int = 0
    group: str = ""
    pool: str = ""

    @property
    def peak_mib(self) -> int:
        return max((cell.gpu_mib for cell in self.cells if cell.gpus), default=0)

    @property
    def most_gpus(self) -> int:
        return max((cell.gpus for cell in self.cells), default=0)


def read_sessions(sessions: Path, cells: Path) -> list[Session]:
    executed: dict[str, list[Cell]] = {}
    for name, cell in read_table(cells, _CELLS, _cell):
        executed.setdefault(name, []).append(cell)
    found: dict[str, Session] = {}

    def session(row: dict[str, str]) -> Session:
        return _session(row, executed.pop(row["session"], []), found)

    for one in read_table(sessions, _SESSIONS, session):
        found[one.session_id] = one
    if executed:
        raise TraceError(f"{cells} lists cells of session {next(iter(executed))!r}, which is not in {sessions}")
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
        asked_mib=whole(row, "asked_mib") if "asked_mib" in row else 0,
        group=row.get("group", "").strip(),
        pool=row.get("pool", "").strip(),
    )
    if not session.session_id or session.session_id in known:
        raise TraceError(f"session is {session.session_id[:40]!r}; ids must be unique and not empty")
    if session.close_ms < session.open_ms:
        raise TraceError(f"session {session.session_id[:40]!r} closes before it opens")
    if session.cells and session.cells[0].start_ms < session.open_ms:
        raise TraceError(f"session {session.session_id[:40]!r} runs a cell before it opens")
    return session


def write_sessions(trace: Sequence[Session], sessions: Path, cells: Path) -> None:
    with sessions.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        further = [name for name in _FURTHER if any(getattr(one, name) for one in trace)]
        out.writerow((*_SESSIONS, *further))
        for one in trace:
            row = (one.session_id, one.user, one.open_ms / 1000, one.close_ms / 1000, one.gpus, one.gpu_mib)
            out.writerow((*row, *(getattr(one, name) for name in further)))
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
