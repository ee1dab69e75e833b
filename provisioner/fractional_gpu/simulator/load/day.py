"""One day of one synthetic user: the random numbers, lunch, classes, and what a session asks for, whatever the user's habit."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log

from fractional_gpu.simulator.load.settings import Load
from fractional_gpu.simulator.traces import Cell, Session

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

Points = Sequence[
    tuple[float, float]
]  # (probability, value) of a quantile function; between them the logarithm is interpolated


def draw(rng: random.Random, points: Points) -> float:
    """Return a value by its quantile function."""
    at = rng.random()
    right = min(len(points) - 1, bisect_right([probability for probability, _ in points], at))
    (low, small), (high, large) = points[right - 1], points[right]
    return exp(log(small) + (log(large) - log(small)) * (at - low) / (high - low))


def is_chosen(number: int, percent: int) -> bool:
    """Return whether a user is among so many percent, evenly spread."""
    return (number + 1) * percent // 100 > number * percent // 100


class UserDay:
    """One day of one user. Times are the user's own until `session` moves them to the user's time zone.

    `group`: the class that the user's working session belongs to, if any.
    """

    def __init__(self, number: int, day: int, seed: int, load: Load, group: int | None) -> None:
        self.load, self._seed, self._group = load, seed, group
        self._number, self._day, self._name = number, day, f"u{number:05d}"
        self.begins_ms = day * DAY_MS
        self._lunch_ms = self.begins_ms + 12 * HOUR_MS + round(HOUR_MS * self.stream("lunch", "").random())

    def sessions(self) -> list[Session]:
        """Return the sessions of the day."""
        raise NotImplementedError

    def stream(self, what: str, session: str) -> random.Random:
        """Return the random numbers of one thing in one session, or of the whole day."""
        return random.Random(f"{self._seed}/{what}/{self._name}/{self._day}/{session}")  # noqa: S311 - a workload, not a secret

    def after_lunch(self, at_ms: int) -> int:
        """Return the time, or the end of lunch if it is within lunch."""
        ends_ms = self._lunch_ms + self.load.lunch_ms
        return ends_ms if self._lunch_ms <= at_ms < ends_ms else at_ms

    def class_begins(self) -> int | None:
        """Return when the class of the user opens its notebooks, if there is one."""
        if self._group is None:
            return None
        hours = random.Random(f"{self._seed}/class/{self._group}/{self._day}")  # noqa: S311 - a workload
        return self.begins_ms + round(HOUR_MS * hours.uniform(8.5, 15.0))

    def session(
        self, which: str, open_close_ms: tuple[int, int], gpus: int, memory: int, cells: Sequence[Cell]
    ) -> Session:
        """Return a session of the day, in the user's time zone. `memory` is what it holds on each GPU, MiB."""
        asked_mib, error = 0, self.load.ask_error_percent
        if error:
            asked_mib = max(1, round(memory * exp(self.stream("asked", which).gauss(0.0, error / 100))))
        zone = self._number if self._group is None else self._group  # a class is in one zone
        shift = DAY_MS * (zone % self.load.time_zones) // self.load.time_zones
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
            priority=int(is_chosen(self._number, self.load.urgent_percent)),
            asked_mib=asked_mib,
        )


def gpu_cell(start_ms: int, duration_ms: int, gpus: int, memory_mib: int, util_percent: float) -> Cell:
    """Return a cell that uses GPUs; its utilisation is rounded, and at least 1 %."""
    return Cell(start_ms, duration_ms, gpus, memory_mib, max(1, round(util_percent)))
