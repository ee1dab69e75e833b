"""Synthetic build-phase users, whose pooled statistics follow a published trace of an industrial notebook platform.

What is matched: GPU cells last 2 min (median) and 5 min (75th percentile); gaps between a session's GPU cells are 1, 3, 8 and 41 min
(25th, 50th, 75th, 90th percentile); memory per cell is 2.3, 4.6, 18 and 38 GB (50th, 75th, 90th, 99th); GPU utilisation during a cell
is 8.5 % (median) and 36 % (90th); reserved GPUs are busy about a quarter of the time; three sessions in four use their GPU at most 5 %
of the time. The last two go together only if the sessions that hardly use their GPU are short, so a user's day is one long working
session and three short looks. One seed gives one trace, on every machine.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log

from fractional_gpu.simulator.traces import Cell, Session

__all__ = ["synthetic_sessions"]

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
