"""Session traces: the cells of each notebook session, and when it was open.

Two CSV files. Cells: `session,user,start_s,duration_s,gpus,gpu_mib,gpu_util`, one row per executed cell; `start_s` and `duration_s` are
those of an unshared machine, in seconds from the trace's start; `gpus` 0 does not touch the GPU; `gpu_mib` is what the kernel holds
during and after the cell; `gpu_util` is in percent. Sessions: `session,user,open_s,close_s,gpus,gpu_mib`, what was reserved and when; a
column `priority` (a whole number, 0 if there is none) may follow.

In memory everything is an integer: milliseconds, MiB, percent.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fractional_gpu.simulator import TraceError
from fractional_gpu.simulator.tables import number, read_table, whole

__all__ = ["Cell", "Session", "read_sessions", "write_sessions"]

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
