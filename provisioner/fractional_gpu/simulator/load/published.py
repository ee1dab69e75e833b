"""The published habit: what users do by the statistics of a published trace.

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
"""

import random
from dataclasses import dataclass

from fractional_gpu.simulator.load.day import HOUR_MS, MINUTE_MS, Points, UserDay, draw, gpu_cell, is_chosen
from fractional_gpu.simulator.load.settings import CLASS_SIZE, Load, Memory, Pace
from fractional_gpu.simulator.traces import Cell, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The quantile functions of a pace; times in s."""

    cell_s: Points
    gap_s: Points
    head_s: Points  # from the opening to the first cell
    cells: Points | None  # of one working session; None: until it closes
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
_MEMORY_MIB: dict[Memory, Points] = {
    Memory.SESSION: (
        (0.0, 1.0), (0.08, 1.0), (0.1, 266.0), (0.25, 3717.0), (0.5, 5028.0), (0.75, 19_026.0), (0.9, 33_997.0), (0.95, 38_298.0),
        (1.0, 40_182.0),
    ),
    Memory.CELL: ((0.0, 300.0), (0.5, 2194.0), (0.75, 4387.0), (0.9, 17_166.0), (0.99, 36_240.0), (1.0, 60_000.0)),
}  # fmt: skip
_EACH_OF_SEVERAL_MIB: Points = (
    (0.0, 1.0), (0.08, 1.0), (0.1, 62.0), (0.25, 3359.0), (0.5, 4444.0), (0.75, 4792.0), (0.9, 5028.0), (1.0, 5079.0)
)  # fmt: skip
_UTIL_PERCENT: Points = ((0.0, 1.0), (0.5, 8.5), (0.9, 36.0), (1.0, 100.0))
_SEVERAL = (4, 8)


class PublishedDay(UserDay):
    """One day of a user with the published habit: a working session and looks."""

    def __init__(self, number: int, day: int, seed: int, load: Load) -> None:
        joint = load.joint_percent
        super().__init__(
            number, day, seed, load, number * joint // 100 // CLASS_SIZE if is_chosen(number, joint) else None
        )
        self._shape = _SHAPES[load.pace]

    def sessions(self) -> list[Session]:
        """Return the working session and the looks."""
        hours = self.stream("hours", "work")
        opens = self.begins_ms + round(HOUR_MS * min(13.0, max(6.0, hours.gauss(9.0, 1.0))))
        length = round(HOUR_MS * hours.uniform(8.0, 10.5))
        made = [self._working(opens, length)]
        for look in range(self._shape.looks):
            hours = self.stream("hours", f"look{look}")
            opens = self.begins_ms + round(HOUR_MS * hours.uniform(8.0, 20.0))
            made.append(self._looking(f"look{look}", self.after_lunch(opens), hours))
        return made

    def _working(self, opens: int, length: int) -> Session:
        shape = self._shape
        head, lengths, gaps, tables = (self.stream(what, "work") for what in ("head", "cells", "gaps", "tables"))
        first = round(1000 * draw(head, shape.head_s))
        left = round(draw(self.stream("count", "work"), shape.cells)) if shape.cells is not None else -1
        joint = self.class_begins()
        if joint is not None:
            arrives = self.stream("joint", "work")
            opens = joint + round(MINUTE_MS * arrives.random())
            first = joint + MINUTE_MS + round(MINUTE_MS * arrives.random()) - opens
        closes, at = opens + length, self.after_lunch(opens + first)
        gpus, memory = self._machine("work")
        utils = self.stream("util", "work")
        cells: list[Cell] = []
        while at < closes and left:
            cells.append(
                gpu_cell(at, round(1000 * draw(lengths, shape.cell_s)), gpus, memory, draw(utils, _UTIL_PERCENT))
            )
            ended = at + cells[-1].duration_ms
            gap = round(1000 * draw(gaps, shape.gap_s))
            looks_at_a_table, takes = tables.random() < 0.5, min(gap // 3, tables.randrange(200, 20_000))
            left, at = left - 1, self.after_lunch(ended + gap)
            table = ended + gap // 3
            if looks_at_a_table and table < closes and self.after_lunch(table) == table:
                cells.append(Cell(table, takes, 0, 0, 0))
        last = max((cell.start_ms + cell.duration_ms for cell in cells), default=0)
        return self.session("work", (opens, max(closes, last)), gpus, memory, cells)

    def _looking(self, which: str, opens: int, hours: random.Random) -> Session:
        length = round(MINUTE_MS * hours.uniform(10.0, 40.0))
        gpus, memory = self._machine(which)
        cells = [Cell(opens + length // 8, self.stream("tables", which).randrange(200, 20_000), 0, 0, 0)]
        if self.stream("idle", which).random() * 100 >= self._shape.idle_looks_percent:
            lengths, at = self.stream("cells", which), self.after_lunch(opens + length // 2)
            if self.load.pace is Pace.SHORT:
                takes = lengths.randrange(2_000, length // 20)
            else:
                takes = round(1000 * draw(lengths, self._shape.cell_s))
            cells.append(gpu_cell(at, takes, gpus, memory, draw(self.stream("util", which), _UTIL_PERCENT)))
        last = cells[-1].start_ms + cells[-1].duration_ms
        return self.session(which, (opens, max(opens + length, last)), gpus, memory, cells)

    def _machine(self, which: str) -> tuple[int, int]:
        """Return how many GPUs a session uses, and the MiB that it holds on each."""
        several = self.stream("several", which)
        gpus = _SEVERAL[several.randrange(len(_SEVERAL))] if several.random() * 100 < self.load.several_percent else 1
        points = (
            _EACH_OF_SEVERAL_MIB if gpus > 1 and self.load.memory is Memory.SESSION else _MEMORY_MIB[self.load.memory]
        )
        return gpus, max(1, round(draw(self.stream("memory", which), points)))
