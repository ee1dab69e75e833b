"""Habits beside the published one. No trace shows them: their figures are assumptions, chosen to differ from one another.

All cells use the GPU; a session holds its memory from its first cell on. The figures are those of `_SHAPES`; docs/simulator.md says what
each assumes.

- **Teaching lab.** Classes of `CLASS_SIZE` open their notebooks within a minute and close them together after 90 min. Short cells, short
  gaps, little memory. A cell that would not end before the class does is not begun.
- **Builders.** A working day of short cells, with many gaps of minutes and some pauses of an hour or more; and a short look.
- **Trainers.** A working day of a few cells that take hours, with large memory; three sessions in ten use 2, 4 or 8 GPUs.
- **Night jobs.** A few cells by day, and a long one that is started in the evening and runs over night; its owner closes the session the
  next morning.

With `MIXED`, a fifth of the users has each of these habits and the published one, and works as in a group that has only that habit:
only the time at which a class begins is another one.
"""

from dataclasses import dataclass

from fractional_gpu.simulator.load.day import HOUR_MS, MINUTE_MS, Points, UserDay, draw, gpu_cell
from fractional_gpu.simulator.load.settings import CLASS_SIZE, Habit, Load
from fractional_gpu.simulator.traces import Cell, Session

_CLASS_MS = 90 * MINUTE_MS
_MINUTES_OF_A_LOOK = (10.0, 40.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The quantile functions of a habit; times in s, memory in MiB on each GPU, utilisation in percent."""

    head_s: Points  # from the opening to the first cell
    cell_s: Points
    gap_s: Points
    memory_mib: Points
    util_percent: Points
    cells: Points | None = None  # of a session; None: until it closes
    several_percent: int = 0
    several: tuple[int, ...] = ()  # GPUs that a session of several may use


_SHAPES = {
    Habit.TEACHING_LAB: _Shape(
        head_s=((0.0, 30.0), (0.5, 120.0), (1.0, 480.0)),
        cell_s=((0.0, 0.5), (0.5, 6.0), (0.9, 40.0), (1.0, 180.0)),
        gap_s=((0.0, 3.0), (0.5, 40.0), (0.75, 120.0), (0.9, 360.0), (1.0, 900.0)),
        memory_mib=((0.0, 300.0), (0.5, 800.0), (0.9, 2_000.0), (1.0, 4_000.0)),
        util_percent=((0.0, 1.0), (0.5, 15.0), (0.9, 50.0), (1.0, 100.0)),
    ),
    Habit.BUILDERS: _Shape(
        head_s=((0.0, 5.0), (1.0, 300.0)),
        cell_s=((0.0, 1.0), (0.25, 5.0), (0.5, 20.0), (0.75, 60.0), (0.9, 240.0), (0.99, 900.0), (1.0, 1_800.0)),
        gap_s=((0.0, 5.0), (0.25, 45.0), (0.5, 180.0), (0.75, 480.0), (0.9, 1_500.0), (0.97, 5_400.0), (1.0, 10_800.0)),
        memory_mib=((0.0, 300.0), (0.5, 2_200.0), (0.75, 4_400.0), (0.9, 17_000.0), (1.0, 40_000.0)),
        util_percent=((0.0, 1.0), (0.5, 8.5), (0.9, 36.0), (1.0, 100.0)),
    ),
    Habit.TRAINERS: _Shape(
        head_s=((0.0, 60.0), (0.5, 1_200.0), (1.0, 7_200.0)),
        cell_s=((0.0, 1_200.0), (0.25, 2_700.0), (0.5, 7_200.0), (0.75, 16_200.0), (0.9, 28_800.0), (1.0, 43_200.0)),
        gap_s=((0.0, 60.0), (0.25, 240.0), (0.5, 600.0), (0.75, 2_400.0), (0.9, 7_200.0), (1.0, 14_400.0)),
        memory_mib=((0.0, 8_000.0), (0.5, 24_000.0), (0.9, 60_000.0), (1.0, 72_000.0)),
        util_percent=((0.0, 20.0), (0.5, 70.0), (0.9, 95.0), (1.0, 100.0)),
        several_percent=30,
        several=(2, 4, 8),
    ),
    Habit.NIGHT_JOBS: _Shape(
        head_s=((0.0, 60.0), (0.5, 1_800.0), (1.0, 7_200.0)),
        cell_s=((0.0, 5.0), (0.5, 60.0), (0.9, 600.0), (1.0, 1_800.0)),
        gap_s=((0.0, 60.0), (0.5, 1_800.0), (0.9, 7_200.0), (1.0, 10_800.0)),
        memory_mib=((0.0, 4_000.0), (0.5, 16_000.0), (0.9, 40_000.0), (1.0, 60_000.0)),
        util_percent=((0.0, 20.0), (0.5, 60.0), (0.9, 95.0), (1.0, 100.0)),
        cells=((0.0, 2.0), (0.5, 4.0), (1.0, 8.0)),
    ),
}  # fmt: skip
_EVENING_H, _NIGHT_JOB_H, _NEXT_MORNING_H = (17.0, 19.5), (8.0, 12.0), (32.0, 33.0)


class HabitDay(UserDay):
    """One day of a user with one of these habits; `rank` counts those who have it, from 0."""

    def __init__(self, number: int, day: int, seed: int, load: Load, *, habit: Habit, rank: int) -> None:
        super().__init__(number, day, seed, load, rank // CLASS_SIZE if habit is Habit.TEACHING_LAB else None)
        self._habit, self._shape = habit, _SHAPES[habit]

    def sessions(self) -> list[Session]:
        """Return the sessions of the day."""
        begins = self.class_begins()
        if begins is not None:
            return [self._class(begins)]
        hours = self.stream("hours", "work")
        opens = self.begins_ms + round(HOUR_MS * min(13.0, max(6.0, hours.gauss(9.0, 1.0))))
        length = round(HOUR_MS * hours.uniform(8.0, 10.5))
        if self._habit is Habit.NIGHT_JOBS:
            return [self._night(opens)]
        cells = self._cells("work", opens, opens + length)
        made = [self._made("work", opens, opens + length, cells)]
        return [*made, self._look()] if self._habit is Habit.BUILDERS else made

    def _class(self, begins: int) -> Session:
        """Return the session of a member of a class: none of its cells ends after the class."""
        arrives = self.stream("joint", "work")
        opens, ends = begins + round(MINUTE_MS * arrives.random()), begins + _CLASS_MS
        cells = self._cells("work", opens, ends)
        return self._made("work", opens, ends, [cell for cell in cells if cell.start_ms + cell.duration_ms <= ends])

    def _look(self) -> Session:
        """Return a short session with one cell, halfway through it."""
        hours = self.stream("hours", "look")
        opens = self.after_lunch(self.begins_ms + round(HOUR_MS * hours.uniform(8.0, 20.0)))
        length = round(MINUTE_MS * hours.uniform(*_MINUTES_OF_A_LOOK))
        gpus, memory = self._machine("look")
        takes = round(1000 * draw(self.stream("cells", "look"), self._shape.cell_s))
        util = draw(self.stream("util", "look"), self._shape.util_percent)
        cells = [gpu_cell(self.after_lunch(opens + length // 2), takes, gpus, memory, util)]
        return self._made("look", opens, opens + length, cells)

    def _night(self, opens: int) -> Session:
        """Return a session with some cells by day, and the job of the night."""
        hours = self.stream("hours", "night")
        evening, lasts, morning = (
            round(HOUR_MS * hours.uniform(*span)) for span in (_EVENING_H, _NIGHT_JOB_H, _NEXT_MORNING_H)
        )
        starts = self.begins_ms + evening
        cells = self._cells("work", opens, starts)
        if cells:
            starts = max(starts, cells[-1].start_ms + cells[-1].duration_ms + MINUTE_MS)
        gpus, memory = self._machine("work")
        util = draw(self.stream("util", "night"), self._shape.util_percent)
        return self._made(
            "work", opens, self.begins_ms + morning, [*cells, gpu_cell(starts, lasts, gpus, memory, util)]
        )

    def _cells(self, which: str, opens: int, until: int) -> list[Cell]:
        """Return the cells that begin before a time, as many as the habit has."""
        shape = self._shape
        lengths, gaps, utils = (self.stream(what, which) for what in ("cells", "gaps", "util"))
        left = round(draw(self.stream("count", which), shape.cells)) if shape.cells is not None else -1
        gpus, memory = self._machine(which)
        at = self._begins(opens + round(1000 * draw(self.stream("head", which), shape.head_s)))
        cells: list[Cell] = []
        while at < until and left:
            takes = round(1000 * draw(lengths, shape.cell_s))
            cells.append(gpu_cell(at, takes, gpus, memory, draw(utils, shape.util_percent)))
            left, at = left - 1, self._begins(at + takes + round(1000 * draw(gaps, shape.gap_s)))
        return cells

    def _begins(self, at_ms: int) -> int:
        """Return when a cell begins that would begin at that time; a class has no lunch."""
        return at_ms if self._habit is Habit.TEACHING_LAB else self.after_lunch(at_ms)

    def _made(self, which: str, opens: int, closes: int, cells: list[Cell]) -> Session:
        gpus, memory = self._machine(which)
        last = max((cell.start_ms + cell.duration_ms for cell in cells), default=0)
        return self.session(which, (opens, max(closes, last)), gpus, memory, cells)

    def _machine(self, which: str) -> tuple[int, int]:
        """Return how many GPUs a session uses, and the MiB that it holds on each."""
        shape, several = self._shape, self.stream("several", which)
        gpus = several.choice(shape.several) if several.random() * 100 < shape.several_percent else 1
        return gpus, max(1, round(draw(self.stream("memory", which), shape.memory_mib)))
