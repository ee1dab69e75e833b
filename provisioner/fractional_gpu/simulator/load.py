"""Synthetic load: what a group of notebook users does, by the statistics of a published trace.

The source is the trace of an industrial notebook platform (Adobe's research clusters) that the NotebookOS project published
(https://github.com/ds2-lab/NotebookOS-Dashboard): an excerpt of 48 hours with 59 sessions, one of whose minutes is the unit of time, and
figures of the whole platform. Where the two differ, the excerpt has longer cells and more memory, and is the default.

- **Pace.** `LONG`: the excerpt's. Cells on a GPU take 11 and 21 min (median, 75th percentile) and up to 30 h; a session has 3 and 13 of
  them, gaps of 1, 3, 8 and 41 min (25th, 50th, 75th, 90th percentile) between them, and begins with the first 73 min (median) after it
  opened; a seventh of the sessions use no GPU. A user's day is a working session and a short look.
  `SHORT`: the platform's. Cells take 2 and 5 min, at most 2 h, and go on with the same gaps until the session closes; three sessions in
  four use their GPU at most 5 % of the time. A user's day is a working session and three short looks.
- **Memory.** `SESSION`: a session holds its peak from its first cell on, and peaks are the excerpt's: 5.3 and 20 GB (median, 75th
  percentile), at most 42 GB. `CELL`: a session holds what one cell of the excerpt held: 2.3 and 4.6 GB, and 38 GB for one in a hundred.
- **Several GPUs.** 23 of the 59 sessions use 4 or 8 GPUs at once, each about 4.7 GB of every one.
- **Utilisation** of a GPU during a cell: 8.5 % (median), 36 % (90th percentile).

What the trace does not show is off unless it is asked for: classes that begin together, lunch, weekends, several time zones, errors in
what people ask for, swaps that fail.

Each of these draws from random numbers of its own, a stream for each session: what one switch changes leaves the other draws as they are.
One seed gives one trace, on every machine.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log

from fractional_gpu.simulator.traces import Cell, Session

_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
_WEEKDAYS, _WEEK = 5, 7
CLASS_SIZE = 20
SEVERAL_PERCENT = 39  # 23 of 59

_Points = Sequence[
    tuple[float, float]
]  # (probability, value) of a quantile function; between them the logarithm is interpolated


class Pace(StrEnum):
    """How long cells on a GPU take, and how many there are."""

    LONG = "long"
    SHORT = "short"


class Memory(StrEnum):
    """What a session holds: its peak, or what one cell held."""

    SESSION = "session"
    CELL = "cell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the synthetic users do; the defaults are the trace's.

    Percentages are whole ones. `several_percent` of the sessions use 4 or 8 GPUs. `joint_percent` of the users are in classes of
    `CLASS_SIZE` whose working sessions open within a minute, and whose first cells begin within another. `lunch_ms` is how long a lunch
    takes that begins at some time from 12 to 1: no cell begins in it. With `weekends`, the sixth and the seventh day of a week are free.
    The users live in `time_zones` evenly spread around the clock. `ask_error_percent` is the standard deviation of the logarithm of what
    people ask for over what they use: with 50, one in six asks for less than 0.61 of it, and one in six for more than 1.65 times as much.
    `failed_swaps_percent` of the swaps fail harmlessly, after the fixed time of a swap (`machine.Host`). `urgent_percent` of the users,
    spread evenly among them, have priority 1.
    """

    pace: Pace = Pace.LONG
    memory: Memory = Memory.SESSION
    several_percent: int = SEVERAL_PERCENT
    joint_percent: int = 0
    lunch_ms: int = 0
    weekends: bool = False
    time_zones: int = 1
    ask_error_percent: int = 0
    failed_swaps_percent: int = 0
    urgent_percent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The quantile functions of a pace; times in s."""

    cell_s: _Points
    gap_s: _Points
    head_s: _Points  # from the opening to the first cell
    cells: _Points | None  # of one working session; None: until it closes
    looks: int  # a day, beside the working session
    idle_looks_percent: int  # of the looks use no GPU


_SHAPES = {
    Pace.LONG: _Shape(
        cell_s=(
            (0.0, 180.0), (0.1, 300.0), (0.25, 360.0), (0.5, 660.0), (0.75, 1260.0), (0.9, 2460.0), (0.95, 4260.0), (0.97, 8160.0),
            (0.98, 20_700.0), (0.99, 57_660.0), (1.0, 106_680.0),
        ),
        gap_s=((0.0, 30.0), (0.25, 60.0), (0.5, 180.0), (0.75, 540.0), (0.9, 3300.0), (0.95, 10_800.0), (0.99, 56_940.0), (1.0, 83_520.0)),
        head_s=((0.0, 120.0), (0.1, 660.0), (0.25, 1020.0), (0.5, 4380.0), (0.75, 21_780.0), (0.9, 52_500.0), (1.0, 126_600.0)),
        cells=((0.0, 1.0), (0.15, 1.0), (0.25, 2.0), (0.5, 3.5), (0.75, 13.0), (0.9, 35.0), (0.95, 47.0), (1.0, 57.0)),
        looks=1,
        idle_looks_percent=30,
    ),
    Pace.SHORT: _Shape(
        cell_s=((0.0, 2.0), (0.25, 48.0), (0.5, 124.0), (0.75, 307.0), (0.9, 690.0), (0.99, 2800.0), (1.0, 7200.0)),
        gap_s=((0.0, 5.0), (0.25, 60.0), (0.5, 180.0), (0.75, 480.0), (0.9, 2460.0), (1.0, 9000.0)),
        head_s=((0.0, 5.0), (1.0, 300.0)),
        cells=None,
        looks=3,
        idle_looks_percent=50,
    ),
}  # fmt: skip
_MEMORY_MIB: dict[Memory, _Points] = {
    Memory.SESSION: (
        (0.0, 1.0), (0.08, 1.0), (0.1, 266.0), (0.25, 3717.0), (0.5, 5028.0), (0.75, 19_026.0), (0.9, 33_997.0), (0.95, 38_298.0),
        (1.0, 40_182.0),
    ),
    Memory.CELL: ((0.0, 300.0), (0.5, 2194.0), (0.75, 4387.0), (0.9, 17_166.0), (0.99, 36_240.0), (1.0, 60_000.0)),
}  # fmt: skip
_EACH_OF_SEVERAL_MIB: _Points = (
    (0.0, 1.0), (0.08, 1.0), (0.1, 62.0), (0.25, 3359.0), (0.5, 4444.0), (0.75, 4792.0), (0.9, 5028.0), (1.0, 5079.0)
)  # fmt: skip
_UTIL_PERCENT: _Points = ((0.0, 1.0), (0.5, 8.5), (0.9, 36.0), (1.0, 100.0))
_SEVERAL = (4, 8)


def _draw(rng: random.Random, points: _Points) -> float:
    at = rng.random()
    right = min(len(points) - 1, bisect_right([probability for probability, _ in points], at))
    (low, small), (high, large) = points[right - 1], points[right]
    return exp(log(small) + (log(large) - log(small)) * (at - low) / (high - low))


def _is_chosen(number: int, percent: int) -> bool:
    """Return whether a user is among so many percent, evenly spread."""
    return (number + 1) * percent // 100 > number * percent // 100


def synthetic_sessions(
    users: int, days: int, seed: int, load: Load = Load(), progress: Callable[[int, int], None] = lambda *_: None
) -> list[Session]:
    """Return the sessions of so many users over so many days, in the order in which they open.

    `progress` is given how many days of a user are made up, and all.
    """
    sessions = []
    for day in range(days):
        if load.weekends and day % _WEEK >= _WEEKDAYS:
            continue
        for number in range(users):
            sessions += _Day(number, day, seed, load).sessions()
            progress(day * users + number + 1, days * users)
    return sorted(sessions, key=lambda session: (session.open_ms, session.session_id))


class _Day:
    """One day of one user. Times are the user's own until `_shifted`."""

    def __init__(self, number: int, day: int, seed: int, load: Load) -> None:
        self._load, self._shape, self._seed = load, _SHAPES[load.pace], seed
        self._number, self._day, self._name = number, day, f"u{number:05d}"
        joint = load.joint_percent
        self._group = number * joint // 100 // CLASS_SIZE if _is_chosen(number, joint) else None
        self._begins_ms = day * _DAY_MS
        self._lunch_ms = self._begins_ms + 12 * _HOUR_MS + round(_HOUR_MS * self._stream("lunch", "").random())

    def _stream(self, what: str, session: str) -> random.Random:
        """Return the random numbers of one thing in one session, or of the whole day."""
        return random.Random(f"{self._seed}/{what}/{self._name}/{self._day}/{session}")  # noqa: S311 - a workload, not a secret

    def sessions(self) -> list[Session]:
        """Return the working session and the looks."""
        hours = self._stream("hours", "work")
        opens = self._begins_ms + round(_HOUR_MS * min(13.0, max(6.0, hours.gauss(9.0, 1.0))))
        length = round(_HOUR_MS * hours.uniform(8.0, 10.5))
        made = [self._working(opens, length)]
        for look in range(self._shape.looks):
            hours = self._stream("hours", f"look{look}")
            opens = self._begins_ms + round(_HOUR_MS * hours.uniform(8.0, 20.0))
            made.append(self._looking(f"look{look}", self._after_lunch(opens), hours))
        return made

    def _after_lunch(self, at_ms: int) -> int:
        ends_ms = self._lunch_ms + self._load.lunch_ms
        return ends_ms if self._lunch_ms <= at_ms < ends_ms else at_ms

    def _class_begins(self) -> int | None:
        """Return when the class of a user opens its notebooks, if there is one."""
        if self._group is None:
            return None
        hours = random.Random(f"{self._seed}/class/{self._group}/{self._day}")  # noqa: S311 - a workload
        return self._begins_ms + round(_HOUR_MS * hours.uniform(8.5, 15.0))

    def _working(self, opens: int, length: int) -> Session:
        shape = self._shape
        head, lengths, gaps, tables = (self._stream(what, "work") for what in ("head", "cells", "gaps", "tables"))
        first = round(1000 * _draw(head, shape.head_s))
        left = round(_draw(self._stream("count", "work"), shape.cells)) if shape.cells is not None else -1
        joint = self._class_begins()
        if joint is not None:
            arrives = self._stream("joint", "work")
            opens = joint + round(_MINUTE_MS * arrives.random())
            first = joint + _MINUTE_MS + round(_MINUTE_MS * arrives.random()) - opens
        closes, at = opens + length, self._after_lunch(opens + first)
        gpus, memory = self._machine("work")
        utils = self._stream("util", "work")
        cells: list[Cell] = []
        while at < closes and left:
            cells.append(_gpu_cell(at, round(1000 * _draw(lengths, shape.cell_s)), gpus, memory, utils))
            ended = at + cells[-1].duration_ms
            gap = round(1000 * _draw(gaps, shape.gap_s))
            looks_at_a_table, takes = tables.random() < 0.5, min(gap // 3, tables.randrange(200, 20_000))
            left, at = left - 1, self._after_lunch(ended + gap)
            table = ended + gap // 3
            if looks_at_a_table and table < closes and self._after_lunch(table) == table:
                cells.append(Cell(table, takes, 0, 0, 0))
        last = max((cell.start_ms + cell.duration_ms for cell in cells), default=0)
        return self._session("work", (opens, max(closes, last)), gpus, memory, cells)

    def _looking(self, which: str, opens: int, hours: random.Random) -> Session:
        length = round(_MINUTE_MS * hours.uniform(10.0, 40.0))
        gpus, memory = self._machine(which)
        cells = [Cell(opens + length // 8, self._stream("tables", which).randrange(200, 20_000), 0, 0, 0)]
        if self._stream("idle", which).random() * 100 >= self._shape.idle_looks_percent:
            lengths, at = self._stream("cells", which), self._after_lunch(opens + length // 2)
            if self._load.pace is Pace.SHORT:
                takes = lengths.randrange(2_000, length // 20)
            else:
                takes = round(1000 * _draw(lengths, self._shape.cell_s))
            cells.append(_gpu_cell(at, takes, gpus, memory, self._stream("util", which)))
        last = cells[-1].start_ms + cells[-1].duration_ms
        return self._session(which, (opens, max(opens + length, last)), gpus, memory, cells)

    def _machine(self, which: str) -> tuple[int, int]:
        """Return how many GPUs a session uses, and the MiB that it holds on each."""
        several = self._stream("several", which)
        gpus = _SEVERAL[several.randrange(len(_SEVERAL))] if several.random() * 100 < self._load.several_percent else 1
        points = (
            _EACH_OF_SEVERAL_MIB if gpus > 1 and self._load.memory is Memory.SESSION else _MEMORY_MIB[self._load.memory]
        )
        return gpus, max(1, round(_draw(self._stream("memory", which), points)))

    def _session(
        self, which: str, open_close_ms: tuple[int, int], gpus: int, memory: int, cells: Sequence[Cell]
    ) -> Session:
        asked_mib, error = 0, self._load.ask_error_percent
        if error:
            asked_mib = max(1, round(memory * exp(self._stream("asked", which).gauss(0.0, error / 100))))
        zone = self._number if self._group is None else self._group  # a class is in one zone
        shift = _DAY_MS * (zone % self._load.time_zones) // self._load.time_zones
        return Session(
            session_id=f"{self._name}-d{self._day}-{which}",
            user=self._name,
            open_ms=open_close_ms[0] + shift,
            close_ms=open_close_ms[1] + shift,
            gpus=gpus,
            gpu_mib=memory,
            cells=tuple(
                Cell(cell.start_ms + shift, cell.duration_ms, cell.gpus, cell.gpu_mib, cell.util_percent)
                for cell in cells
            ),
            priority=int(_is_chosen(self._number, self._load.urgent_percent)),
            asked_mib=asked_mib,
        )


def _gpu_cell(start_ms: int, duration_ms: int, gpus: int, memory_mib: int, utils: random.Random) -> Cell:
    return Cell(start_ms, duration_ms, gpus, memory_mib, max(1, round(_draw(utils, _UTIL_PERCENT))))


# -- signs -------------------------------------------------------------------------------------------------------------
# Signs that people give before they run a cell, as a front end tells them: for simulations of foresight.
#
# A sign comes `foresight_ms` before each cell that uses a GPU, or at once where the person is quicker than that. So many percent of all
# signs are false: they come at any time of a gap, and no cell follows them within the time that a sign lasts, unless by chance. Each gap
# of each session draws from random numbers of its own, so one seed gives the same signs whatever else happens.


SIGN_MS = 60_000
"""How long a sign of a front end lasts."""
_MOST_FALSE = 50  # in one gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """How early signs come, and how many of 100 are false. 0 ms: there are none."""

    foresight_ms: int = 0
    false_percent: int = 0

    def before(self, seed: int, session_id: str, cell: int, gap_ms: int, *, uses_gpu: bool) -> Sequence[int]:
        """Return when signs come in the gap before a cell (its number), in ms after the gap's beginning."""
        if not self.foresight_ms:
            return ()
        true = [max(0, gap_ms - self.foresight_ms)] if uses_gpu else []
        rng = random.Random(f"{seed}/signs/{session_id}/{cell}")  # noqa: S311 - a workload, not a secret
        false = list[int]()
        while len(false) < _MOST_FALSE and rng.random() * 100 < self.false_percent:
            false.append(rng.randrange(max(1, gap_ms)))
        return sorted(true + false)
