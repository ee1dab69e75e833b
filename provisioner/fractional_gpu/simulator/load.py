"""Generates a synthetic load of notebook users. Their habits follow a published trace or one of several other patterns (docs/simulator.md).

Each quantity of a session is drawn from its own random stream, so changing one option does not affect the other quantities. The same seed
gives the same trace on every machine.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import exp, log

from fractional_gpu.simulator.traces import Cell, Session

CLASS_SIZE = 20
SEVERAL_PERCENT = 39  # 23 of 59


class Habit(StrEnum):
    PUBLISHED = "published"
    TEACHING_LAB = "teaching-lab"
    BUILDERS = "builders"
    TRAINERS = "trainers"
    NIGHT_JOBS = "night-jobs"
    MIXED = "mixed"


class Pace(StrEnum):
    LONG = "long"
    SHORT = "short"


class Memory(StrEnum):
    SESSION = "session"
    CELL = "cell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How synthetic users behave. The defaults match the published trace. Percentages are integers."""

    habit: Habit = Habit.PUBLISHED
    # The next four apply only to the published habit.
    pace: Pace = Pace.LONG
    memory: Memory = Memory.SESSION
    several_percent: int = SEVERAL_PERCENT  # percentage of sessions that use 4 or 8 GPUs
    # Percentage of users in classes. A class opens its sessions within a minute, and begins its first cells within another minute
    joint_percent: int = 0
    lunch_ms: int = 0  # length of a break that starts between 12 and 1, in which only a teaching lab's cells begin
    weekends: bool = False  # the sixth and seventh day of a week are free
    weekend_percent: int = 0  # percentage of users who work on a free day anyway, drawn for each day
    time_zones: int = 1  # number of time zones in which users live, evenly around the clock
    ask_error_percent: int = 0  # standard deviation of log(memory asked for / memory used)
    failed_swaps_percent: int = 0  # percentage of swaps that fail harmlessly, after their fixed time (`machine.Host`)
    urgent_percent: int = 0  # percentage of users, evenly spread, who have priority 1


# Signs that people give before running a cell, and groups of users.

SIGN_MS = 60_000
"""How long a sign from a front end stays valid, in ms."""
_MOST_FALSE = 50  # in one gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Signs that a GPU cell is about to run. `false_percent` is the percentage of false signs. If `foresight_ms` is 0, there are no signs.

    True signs appear `foresight_ms` before each GPU cell, or right after the previous cell if the gap is shorter than that. False signs
    appear at random times in gaps.
    """

    foresight_ms: int = 0
    false_percent: int = 0

    def before(self, seed: int, session_id: str, cell: int, gap_ms: int, *, uses_gpu: bool) -> Sequence[int]:
        if not self.foresight_ms:
            return ()
        true = [max(0, gap_ms - self.foresight_ms)] if uses_gpu else []
        rng = random.Random(f"{seed}/signs/{session_id}/{cell}")  # noqa: S311 - a workload, not a secret
        false = list[int]()
        while len(false) < _MOST_FALSE and rng.random() * 100 < self.false_percent:
            false.append(rng.randrange(max(1, gap_ms)))
        return sorted(true + false)


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    weight: int = 1
    pool: str = ""


def in_groups(trace: Sequence[Session], groups: Sequence[Group]) -> list[Session]:
    """Return the sessions with the group and pool of their users filled in.

    Users are sorted by name and divided among the groups by weight. The students of a class have consecutive names, so they end up in the
    same group if it is large enough.
    """
    users = sorted({session.user for session in trace})
    whole = sum(group.weight for group in groups)
    of_user: dict[str, Group] = {}
    begin = running = 0
    for group in groups:
        running += group.weight
        end = len(users) * running // whole
        of_user |= dict.fromkeys(users[begin:end], group)
        begin = end
    return [replace(one, group=of_user[one.user].name, pool=of_user[one.user].pool) for one in trace]


_USUAL = Load()


def synthetic_sessions(
    users: int, days: int, seed: int, load: Load = _USUAL, progress: Callable[[int, int], None] = lambda *_: None
) -> list[Session]:
    """Return the sessions of all users on all days, in the order in which they open.

    `progress` is called with the number of user-days done and the total.
    """
    sessions = []
    for day in range(days):
        free = load.weekends and day % 7 >= 5
        for number in range(users):
            rng = random.Random(f"{seed}/weekend/{number}/{day}")  # noqa: S311 - a workload, not a secret
            if not free or rng.random() * 100 < load.weekend_percent:
                sessions += _day(number, day, seed, load).sessions()
            progress(day * users + number + 1, days * users)
    return sorted(sessions, key=lambda session: (session.open_ms, session.session_id))


def _day(number: int, day: int, seed: int, load: Load) -> "_UserDay":
    habit, rank = load.habit, number
    if habit is Habit.MIXED:
        mixed = [one for one in Habit if one is not Habit.MIXED]
        habit, rank = mixed[number % len(mixed)], number // len(mixed)
    if habit is Habit.PUBLISHED:
        return _PublishedDay(number, day, seed, load)
    return _HabitDay(number, day, seed, load, habit=habit, rank=rank)


# One day of one user, with any habit.

_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
# Pairs of a probability and a value of a quantile function. Between them, the logarithm is interpolated.
_Points = Sequence[tuple[float, float]]
_Machine = tuple[int, int]  # how many GPUs a session uses, and the MiB it holds on each


def _draw(rng: random.Random, points: _Points) -> float:
    at = rng.random()
    right = min(len(points) - 1, bisect_right([probability for probability, _ in points], at))
    (low, small), (high, large) = points[right - 1], points[right]
    return exp(log(small) + (log(large) - log(small)) * (at - low) / (high - low))


def _is_chosen(number: int, percent: int) -> bool:
    return (number + 1) * percent // 100 > number * percent // 100


def _gpu_cell(start_ms: int, duration_ms: int, machine: _Machine, util_percent: float) -> Cell:
    return Cell(start_ms, duration_ms, *machine, max(1, round(util_percent)))


class _UserDay:
    """One user's day. Times are in the user's time zone until `session` converts them. `group` is the user's class, if any."""

    def __init__(self, number: int, day: int, seed: int, load: Load, group: int | None) -> None:
        self.load, self._seed, self._group = load, seed, group
        self._number, self._day, self._name = number, day, f"u{number:05d}"
        self.begins_ms = day * _DAY_MS
        self._lunch_ms = self.begins_ms + 12 * _HOUR_MS + round(_HOUR_MS * self.stream("lunch", "").random())

    def sessions(self) -> list[Session]:
        raise NotImplementedError

    def machine(self, which: str) -> _Machine:
        raise NotImplementedError

    def stream(self, what: str, session: str) -> random.Random:
        """Return the random number generator for one quantity of a session or of the day."""
        return random.Random(f"{self._seed}/{what}/{self._name}/{self._day}/{session}")  # noqa: S311 - a workload, not a secret

    def working_hours(self) -> tuple[int, int]:
        hours = self.stream("hours", "work")
        opens = self.begins_ms + round(_HOUR_MS * min(13.0, max(6.0, hours.gauss(9.0, 1.0))))
        return opens, round(_HOUR_MS * hours.uniform(8.0, 10.5))

    def after_lunch(self, at_ms: int) -> int:
        ends_ms = self._lunch_ms + self.load.lunch_ms
        return ends_ms if self._lunch_ms <= at_ms < ends_ms else at_ms

    def class_begins(self) -> int | None:
        if self._group is None:
            return None
        hours = random.Random(f"{self._seed}/class/{self._group}/{self._day}")  # noqa: S311 - a workload
        return self.begins_ms + round(_HOUR_MS * hours.uniform(8.5, 15.0))

    def session(self, which: str, opens: int, closes: int, cells: Sequence[Cell]) -> Session:
        gpus, memory = self.machine(which)
        asked_mib, error = 0, self.load.ask_error_percent
        if error:
            asked_mib = max(1, round(memory * exp(self.stream("asked", which).gauss(0.0, error / 100))))
        zone = self._number if self._group is None else self._group  # a class has one time zone
        shift = _DAY_MS * (zone % self.load.time_zones) // self.load.time_zones
        return Session(
            session_id=f"{self._name}-d{self._day}-{which}",
            user=self._name,
            open_ms=opens + shift,
            close_ms=max([closes, *(cell.start_ms + cell.duration_ms for cell in cells)]) + shift,
            gpus=gpus,
            gpu_mib=memory,
            cells=tuple(replace(cell, start_ms=cell.start_ms + shift) for cell in cells),
            priority=int(_is_chosen(self._number, self.load.urgent_percent)),
            asked_mib=asked_mib,
        )


# The published habit has a working session and short looks, from the trace at https://github.com/ds2-lab/NotebookOS-Dashboard.


@dataclass(frozen=True, slots=True, kw_only=True)
class _PaceCurves:
    """The distributions of the pace of work in a published trace, as quantile functions. Times are in seconds."""

    cell_s: _Points
    gap_s: _Points
    head_s: _Points  # from the opening to the first cell
    cells: _Points | None  # number of cells of a working session; None: as many as fit until it closes
    looks: int  # number of looks a day, in addition to the working session
    idle_looks_percent: int  # percentage of looks that use no GPU


_PACES = {
    Pace.LONG: _PaceCurves(
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
    Pace.SHORT: _PaceCurves(
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


class _PublishedDay(_UserDay):
    def __init__(self, number: int, day: int, seed: int, load: Load) -> None:
        joint = load.joint_percent
        group = number * joint // 100 // CLASS_SIZE if _is_chosen(number, joint) else None
        super().__init__(number, day, seed, load, group)
        self._shape = _PACES[load.pace]

    def sessions(self) -> list[Session]:
        made = [self._working(*self.working_hours())]
        for look in range(self._shape.looks):
            hours = self.stream("hours", f"look{look}")
            opens = self.begins_ms + round(_HOUR_MS * hours.uniform(8.0, 20.0))
            made.append(self._looking(f"look{look}", self.after_lunch(opens), hours))
        return made

    def _working(self, opens: int, length: int) -> Session:
        shape = self._shape
        head, lengths, gaps, tables = (self.stream(what, "work") for what in ("head", "cells", "gaps", "tables"))
        first = round(1000 * _draw(head, shape.head_s))
        left = round(_draw(self.stream("count", "work"), shape.cells)) if shape.cells is not None else -1
        joint = self.class_begins()
        if joint is not None:
            arrives = self.stream("joint", "work")
            opens = joint + round(_MINUTE_MS * arrives.random())
            first = joint + _MINUTE_MS + round(_MINUTE_MS * arrives.random()) - opens
        closes, at = opens + length, self.after_lunch(opens + first)
        machine = self.machine("work")
        utils = self.stream("util", "work")
        cells: list[Cell] = []
        while at < closes and left:
            takes = round(1000 * _draw(lengths, shape.cell_s))
            cells.append(_gpu_cell(at, takes, machine, _draw(utils, _UTIL_PERCENT)))
            ended = at + takes
            gap = round(1000 * _draw(gaps, shape.gap_s))
            looks_at_a_table, looks_ms = tables.random() < 0.5, min(gap // 3, tables.randrange(200, 20_000))
            left, at = left - 1, self.after_lunch(ended + gap)
            table = ended + gap // 3
            if looks_at_a_table and table < closes and self.after_lunch(table) == table:
                cells.append(Cell(table, looks_ms, 0, 0, 0))
        return self.session("work", opens, closes, cells)

    def _looking(self, which: str, opens: int, hours: random.Random) -> Session:
        length = round(_MINUTE_MS * hours.uniform(10.0, 40.0))
        cells = [Cell(opens + length // 8, self.stream("tables", which).randrange(200, 20_000), 0, 0, 0)]
        if self.stream("idle", which).random() * 100 >= self._shape.idle_looks_percent:
            lengths, at = self.stream("cells", which), self.after_lunch(opens + length // 2)
            if self.load.pace is Pace.SHORT:
                takes = lengths.randrange(2_000, length // 20)
            else:
                takes = round(1000 * _draw(lengths, self._shape.cell_s))
            cells.append(_gpu_cell(at, takes, self.machine(which), _draw(self.stream("util", which), _UTIL_PERCENT)))
        return self.session(which, opens, opens + length, cells)

    def machine(self, which: str) -> _Machine:
        several = self.stream("several", which)
        gpus = _SEVERAL[several.randrange(len(_SEVERAL))] if several.random() * 100 < self.load.several_percent else 1
        points = (
            _EACH_OF_SEVERAL_MIB if gpus > 1 and self.load.memory is Memory.SESSION else _MEMORY_MIB[self.load.memory]
        )
        return gpus, max(1, round(_draw(self.stream("memory", which), points)))


# Habits other than the published one. No trace shows them. Their figures are assumptions, chosen to differ from the published habit. All
# cells use the GPU, and a session holds memory from its first cell on.

_CLASS_MS = 90 * _MINUTE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class _HabitCurves:
    """The distributions for one habit, as quantile functions. Times are in seconds, memory in MiB per GPU, and utilisation in percent."""

    head_s: _Points  # from the opening to the first cell
    cell_s: _Points
    gap_s: _Points
    memory_mib: _Points
    util_percent: _Points
    cells: _Points | None = None  # number of cells of a session; None: as many as fit until it closes
    several_percent: int = 0
    several: tuple[int, ...] = ()  # how many GPUs a session with several may use


_SHAPES = {
    Habit.TEACHING_LAB: _HabitCurves(
        head_s=((0.0, 30.0), (0.5, 120.0), (1.0, 480.0)),
        cell_s=((0.0, 0.5), (0.5, 6.0), (0.9, 40.0), (1.0, 180.0)),
        gap_s=((0.0, 3.0), (0.5, 40.0), (0.75, 120.0), (0.9, 360.0), (1.0, 900.0)),
        memory_mib=((0.0, 300.0), (0.5, 800.0), (0.9, 2_000.0), (1.0, 4_000.0)),
        util_percent=((0.0, 1.0), (0.5, 15.0), (0.9, 50.0), (1.0, 100.0)),
    ),
    Habit.BUILDERS: _HabitCurves(
        head_s=((0.0, 5.0), (1.0, 300.0)),
        cell_s=((0.0, 1.0), (0.25, 5.0), (0.5, 20.0), (0.75, 60.0), (0.9, 240.0), (0.99, 900.0), (1.0, 1_800.0)),
        gap_s=((0.0, 5.0), (0.25, 45.0), (0.5, 180.0), (0.75, 480.0), (0.9, 1_500.0), (0.97, 5_400.0), (1.0, 10_800.0)),
        memory_mib=((0.0, 300.0), (0.5, 2_200.0), (0.75, 4_400.0), (0.9, 17_000.0), (1.0, 40_000.0)),
        util_percent=((0.0, 1.0), (0.5, 8.5), (0.9, 36.0), (1.0, 100.0)),
    ),
    Habit.TRAINERS: _HabitCurves(
        head_s=((0.0, 60.0), (0.5, 1_200.0), (1.0, 7_200.0)),
        cell_s=((0.0, 1_200.0), (0.25, 2_700.0), (0.5, 7_200.0), (0.75, 16_200.0), (0.9, 28_800.0), (1.0, 43_200.0)),
        gap_s=((0.0, 60.0), (0.25, 240.0), (0.5, 600.0), (0.75, 2_400.0), (0.9, 7_200.0), (1.0, 14_400.0)),
        memory_mib=((0.0, 8_000.0), (0.5, 24_000.0), (0.9, 60_000.0), (1.0, 72_000.0)),
        util_percent=((0.0, 20.0), (0.5, 70.0), (0.9, 95.0), (1.0, 100.0)),
        several_percent=30,
        several=(2, 4, 8),
    ),
    Habit.NIGHT_JOBS: _HabitCurves(
        head_s=((0.0, 60.0), (0.5, 1_800.0), (1.0, 7_200.0)),
        cell_s=((0.0, 5.0), (0.5, 60.0), (0.9, 600.0), (1.0, 1_800.0)),
        gap_s=((0.0, 60.0), (0.5, 1_800.0), (0.9, 7_200.0), (1.0, 10_800.0)),
        memory_mib=((0.0, 4_000.0), (0.5, 16_000.0), (0.9, 40_000.0), (1.0, 60_000.0)),
        util_percent=((0.0, 20.0), (0.5, 60.0), (0.9, 95.0), (1.0, 100.0)),
        cells=((0.0, 2.0), (0.5, 4.0), (1.0, 8.0)),
    ),
}  # fmt: skip
_EVENING_H, _NIGHT_JOB_H, _NEXT_MORNING_H = (17.0, 19.5), (8.0, 12.0), (32.0, 33.0)


class _HabitDay(_UserDay):
    def __init__(self, number: int, day: int, seed: int, load: Load, *, habit: Habit, rank: int) -> None:
        super().__init__(number, day, seed, load, rank // CLASS_SIZE if habit is Habit.TEACHING_LAB else None)
        self._habit, self._shape = habit, _SHAPES[habit]

    def sessions(self) -> list[Session]:
        begins = self.class_begins()
        if begins is not None:
            return [self._class(begins)]
        opens, length = self.working_hours()
        if self._habit is Habit.NIGHT_JOBS:
            return [self._night(opens)]
        made = [self.session("work", opens, opens + length, self._cells("work", opens, opens + length))]
        return [*made, self._look()] if self._habit is Habit.BUILDERS else made

    def _class(self, begins: int) -> Session:
        arrives = self.stream("joint", "work")
        opens, ends = begins + round(_MINUTE_MS * arrives.random()), begins + _CLASS_MS
        cells = self._cells("work", opens, ends)
        return self.session("work", opens, ends, [cell for cell in cells if cell.start_ms + cell.duration_ms <= ends])

    def _look(self) -> Session:
        hours = self.stream("hours", "look")
        opens = self.after_lunch(self.begins_ms + round(_HOUR_MS * hours.uniform(8.0, 20.0)))
        length = round(_MINUTE_MS * hours.uniform(10.0, 40.0))
        takes = round(1000 * _draw(self.stream("cells", "look"), self._shape.cell_s))
        util = _draw(self.stream("util", "look"), self._shape.util_percent)
        cells = [_gpu_cell(self.after_lunch(opens + length // 2), takes, self.machine("look"), util)]
        return self.session("look", opens, opens + length, cells)

    def _night(self, opens: int) -> Session:
        hours = self.stream("hours", "night")
        evening, lasts, morning = (
            round(_HOUR_MS * hours.uniform(*span)) for span in (_EVENING_H, _NIGHT_JOB_H, _NEXT_MORNING_H)
        )
        starts = self.begins_ms + evening
        cells = self._cells("work", opens, starts)
        if cells:
            starts = max(starts, cells[-1].start_ms + cells[-1].duration_ms + _MINUTE_MS)
        util = _draw(self.stream("util", "night"), self._shape.util_percent)
        cells.append(_gpu_cell(starts, lasts, self.machine("work"), util))
        return self.session("work", opens, self.begins_ms + morning, cells)

    def _cells(self, which: str, opens: int, until: int) -> list[Cell]:
        shape = self._shape
        lengths, gaps, utils = (self.stream(what, which) for what in ("cells", "gaps", "util"))
        left = round(_draw(self.stream("count", which), shape.cells)) if shape.cells is not None else -1
        machine = self.machine(which)
        at = self._begins(opens + round(1000 * _draw(self.stream("head", which), shape.head_s)))
        cells: list[Cell] = []
        while at < until and left:
            takes = round(1000 * _draw(lengths, shape.cell_s))
            cells.append(_gpu_cell(at, takes, machine, _draw(utils, shape.util_percent)))
            left, at = left - 1, self._begins(at + takes + round(1000 * _draw(gaps, shape.gap_s)))
        return cells

    def _begins(self, at_ms: int) -> int:
        return at_ms if self._habit is Habit.TEACHING_LAB else self.after_lunch(at_ms)

    def machine(self, which: str) -> _Machine:
        shape, several = self._shape, self.stream("several", which)
        gpus = several.choice(shape.several) if several.random() * 100 < shape.several_percent else 1
        return gpus, max(1, round(_draw(self.stream("memory", which), shape.memory_mib)))
