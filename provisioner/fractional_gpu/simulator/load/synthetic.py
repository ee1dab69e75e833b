"""The sessions of synthetic users, day by day."""

import random
from collections.abc import Callable

from fractional_gpu.simulator.load.day import UserDay
from fractional_gpu.simulator.load.habits import HabitDay
from fractional_gpu.simulator.load.published import PublishedDay
from fractional_gpu.simulator.load.settings import Habit, Load
from fractional_gpu.simulator.traces import Session

_USUAL = Load()
_WEEKDAYS, _WEEK = 5, 7
_MIXED = tuple(habit for habit in Habit if habit is not Habit.MIXED)


def synthetic_sessions(
    users: int, days: int, seed: int, load: Load = _USUAL, progress: Callable[[int, int], None] = lambda *_: None
) -> list[Session]:
    """Return the sessions of so many users over so many days, in the order in which they open.

    `progress` is given how many days of a user are made up, and all.
    """
    sessions = []
    for day in range(days):
        free = load.weekends and day % _WEEK >= _WEEKDAYS
        for number in range(users):
            if not free or _works_nonetheless(number, day, seed, load):
                sessions += _day(number, day, seed, load).sessions()
            progress(day * users + number + 1, days * users)
    return sorted(sessions, key=lambda session: (session.open_ms, session.session_id))


def _works_nonetheless(number: int, day: int, seed: int, load: Load) -> bool:
    """Return whether a user works on a day that is free for most."""
    percent = load.weekend_percent
    return percent > 0 and random.Random(f"{seed}/weekend/{number}/{day}").random() * 100 < percent  # noqa: S311 - a workload


def _day(number: int, day: int, seed: int, load: Load) -> UserDay:
    """Return a day of a user, whose habit is that of all users, or one in turn of `_MIXED`."""
    habit, rank = load.habit, number
    if habit is Habit.MIXED:
        habit, rank = _MIXED[number % len(_MIXED)], number // len(_MIXED)
    if habit is Habit.PUBLISHED:
        return PublishedDay(number, day, seed, load)
    return HabitDay(number, day, seed, load, habit=habit, rank=rank)
