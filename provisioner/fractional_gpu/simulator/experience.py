"""Measures how long cells and sessions wait, and how late cells end. docs/simulator.md defines wait, lateness and stretch.

Only GPU cells are included. Times are in ms, stretches in thousandths. For a cell that runs out of memory, only the wait is counted. The
stretch is the bounded slowdown defined by Feitelson, Rudolph et al., "Theory and Practice in Parallel Job Scheduling", JSSPP 1997.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fractional_gpu.simulator.traces import Session

_PERCENTS = (50, 90, 95, 99)
_USERS = (("median", 50), ("p95", 95), ("worst", 100))
_SHORTEST_MS = 10_000  # the least run time that counts in a cell's stretch


@dataclass(frozen=True, slots=True)
class Spread:
    """A sorted list of times in ms (including zeros), or of stretches (how much longer cells took) in thousandths."""

    ordered: tuple[int, ...] = ()

    @classmethod
    def of(cls, times_ms: Iterable[int]) -> "Spread":
        return cls(tuple(sorted(times_ms)))

    def percentile_ms(self, percent: int) -> int:
        return nearest_rank(self.ordered, percent)

    def nonzero(self) -> "Spread":
        return Spread(tuple(time_ms for time_ms in self.ordered if time_ms))

    def nonzero_percent(self) -> float:
        return round(100 * len(self.nonzero().ordered) / len(self.ordered), 3) if self.ordered else 0.0

    def summary(self) -> dict[str, float]:
        named = {f"p{percent}": self.percentile_ms(percent) / 1000 for percent in _PERCENTS}
        return {**named, "max": self.percentile_ms(100) / 1000}


def stretch_milli(late_ms: int, alone_ms: int) -> int:
    """Return the stretch of a cell that would take `alone_ms` on its own and finishes `late_ms` late.

    The result is in thousandths, rounded down, and at least 1000.
    """
    return max(1000, (alone_ms + late_ms) * 1000 // max(alone_ms, _SHORTEST_MS))


def nearest_rank(ordered: Sequence[int], percent: int) -> int:
    """Return the nearest-rank percentile: the smallest value with at least `percent` % of them at or below it, or 0 without values."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The limits a run must stay within, in ms. None means no limit.

    `p95_wait_ms` and `p99_wait_ms` limit the 95th and 99th percentiles of cells' waits, and of sessions' waits for a host. `p95_late_ms`
    limits each user's 95th percentile of lateness, for 95 % of the users. It also limits the 95th percentile of sessions' waits for a host.
    """

    p95_wait_ms: int | None = None
    p99_wait_ms: int | None = None
    p95_late_ms: int | None = None

    def waits(self) -> list[tuple[int, int]]:
        limits = ((95, self.p95_wait_ms), (99, self.p99_wait_ms))
        return [(percent, limit_ms) for percent, limit_ms in limits if limit_ms is not None]

    def doors(self) -> list[tuple[int, int]]:
        return self.waits() + ([(95, self.p95_late_ms)] if self.p95_late_ms is not None else [])


def too_long(what: str, percent: int, limit_ms: int) -> str:
    return f"more than {100 - percent} % of the {what} are longer than {limit_ms / 1000:g} s"


USERS_TOO_LATE = "more than 5 % of the users have a lateness whose 95th percentile is longer than {:g} s"


@dataclass(slots=True)
class _Allowance:
    """How many more durations can exceed a limit before their percentile does too.

    The percentile p of n durations (nearest rank) is within a limit if and only if at most n - ceil(n p) of them exceed it. If a run has at
    most N durations in all, and more than floor(N (1 - p)) of them have exceeded the limit, the rest of the run cannot change the outcome,
    because durations are never removed.
    """

    limit_ms: int
    left: int
    sentence: str = ""

    @classmethod
    def of(cls, percent: int, limit_ms: int, times: int, what: str = "") -> "_Allowance":
        return cls(limit_ms, times * (100 - percent) // 100, too_long(what, percent, limit_ms))

    def spent(self, time_ms: int) -> bool:
        self.left -= time_ms > self.limit_ms
        return self.left < 0


class UserExperience:
    """The waits and lateness experienced by a run's users. If the run can no longer meet its goal, `hopeless` says why."""

    def __init__(self, trace: Sequence[Session], goal: Goal | None = None) -> None:
        self.waits_ms: dict[int, list[int]] = {}  # by host
        self.doors_ms: list[int] = []
        self.late_ms: dict[str, list[int]] = {}  # by user
        self.stretch_milli: dict[str, list[int]] = {}  # by user
        self.hopeless = ""
        self._waits: list[_Allowance] = []
        self._doors: list[_Allowance] = []
        self._late: dict[str, _Allowance] = {}
        if goal is None:
            return
        cells: dict[str, int] = {}
        for session in trace:
            cells[session.user] = cells.get(session.user, 0) + sum(cell.gpus > 0 for cell in session.cells)
        total = sum(cells.values())
        limits = sorted(goal.waits(), key=lambda limit: limit[1])
        self._waits = [_Allowance.of(percent, ms, total, "GPU cells' waits") for percent, ms in limits]
        self._doors = [_Allowance.of(percent, ms, len(trace), "waits for a host") for percent, ms in goal.doors()]
        if (limit_ms := goal.p95_late_ms) is not None:
            self._late = {user: _Allowance.of(95, limit_ms, count) for user, count in cells.items()}
            self._late_users_left = sum(count > 0 for count in cells.values()) * 5 // 100

    @property
    def wait_limits_ms(self) -> list[int]:
        return [allowance.limit_ms for allowance in self._waits]

    def overdue(self, limit: int) -> None:
        """Count a cell that is still waiting and has just exceeded the wait limit at index `limit`."""
        allowance = self._waits[limit]
        if allowance.spent(allowance.limit_ms + 1):
            self.hopeless = allowance.sentence

    def waited(self, wait_ms: int, overdue: int = 0, *, host: int = 0) -> None:
        """Count a cell that starts after waiting `wait_ms`. `overdue()` has already counted it for the first `overdue` limits."""
        self.waits_ms.setdefault(host, []).append(wait_ms)
        for allowance in self._waits[overdue:]:
            if allowance.spent(wait_ms):
                self.hopeless = allowance.sentence

    def entered(self, wait_ms: int) -> None:
        self.doors_ms.append(wait_ms)
        for allowance in self._doors:
            if allowance.spent(wait_ms):
                self.hopeless = allowance.sentence

    def ended(self, user: str, late_ms: int, alone_ms: int) -> None:
        self.late_ms.setdefault(user, []).append(late_ms)
        self.stretch_milli.setdefault(user, []).append(stretch_milli(late_ms, alone_ms))
        allowance = self._late.get(user)
        if allowance is not None and allowance.spent(late_ms):
            del self._late[user]
            self._late_users_left -= 1
            if self._late_users_left < 0:
                self.hopeless = USERS_TOO_LATE.format(allowance.limit_ms / 1000)


@dataclass(frozen=True, slots=True)
class Lateness:
    """The lateness of each user's cells in ms, and their stretches in thousandths. Both are ordered by user name."""

    users: tuple[Spread, ...] = ()
    stretches: tuple[Spread, ...] = ()

    @classmethod
    def of(cls, experience: UserExperience) -> "Lateness":
        late = tuple(Spread.of(experience.late_ms[user]) for user in sorted(experience.late_ms))
        return cls(late, tuple(Spread.of(experience.stretch_milli[user]) for user in sorted(experience.stretch_milli)))

    @property
    def cells(self) -> Spread:
        return Spread.of(late_ms for user in self.users for late_ms in user.ordered)

    def percentile_of_users_ms(self, percent: int) -> int:
        """Return the given percentile, over all users, of each user's 95th percentile of lateness."""
        return nearest_rank(sorted(user.percentile_ms(95) for user in self.users), percent)

    def of_users(self) -> dict[str, float]:
        """Return the median, 95th percentile and maximum, over all users, of each user's 95th percentile of lateness, in seconds."""
        return {name: self.percentile_of_users_ms(percent) / 1000 for name, percent in _USERS}

    def stretch_of_users(self) -> dict[str, float]:
        ordered = sorted(nearest_rank(user.ordered, 95) for user in self.stretches)
        return {name: nearest_rank(ordered, percent) / 1000 for name, percent in _USERS}

    def jain(self) -> float:
        """Return Jain's index of fairness, (Σx)² / (n · Σx²), for the users' mean lateness x, or 1 if all means are zero.

        Source: Jain, Chiu, Hawe, "A Quantitative Measure of Fairness", DEC-TR-301, 1984.
        """
        means = [sum(user.ordered) / len(user.ordered) for user in self.users]
        squares = sum(mean * mean for mean in means)
        return round(sum(means) ** 2 / (len(means) * squares), 4) if squares else 1.0
