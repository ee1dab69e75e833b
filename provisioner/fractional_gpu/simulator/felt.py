"""What a user feels of sharing: waits, waits at the door, and lateness.

- The wait of a cell is the time from asking to running.
- A session waits at the door where it may not begin before it has its devices. That wait is no wait of a cell.
- The lateness of a cell is how much later it ends than it would end alone: its wait, what contention with its neighbours adds to its
  run time, and the time for which it is preempted. A wait at the door counts in the lateness of the session's first GPU cell.

All three are of GPU cells only, in ms. A cell that fails for want of memory has a wait and no lateness.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of one kind, ms, sorted; zeros are in."""

    ordered: tuple[int, ...] = ()

    @classmethod
    def of(cls, times_ms: Iterable[int]) -> "Spread":
        """Return the times, sorted."""
        return cls(tuple(sorted(times_ms)))

    def percentile_ms(self, percent: int) -> int:
        """Return the smallest time that `percent` of the times do not exceed (nearest rank), ms; 0 of none."""
        return nearest_rank(self.ordered, percent)

    def nonzero(self) -> "Spread":
        """Return the times that are not zero."""
        return Spread(tuple(time_ms for time_ms in self.ordered if time_ms))

    def nonzero_percent(self) -> float:
        """Return the share of times that are not zero, percent; 0 of none."""
        return round(100 * len(self.nonzero().ordered) / len(self.ordered), 3) if self.ordered else 0.0

    def summary(self) -> dict[str, float]:
        """Return the percentiles in seconds."""
        named = {f"p{percent}": self.percentile_ms(percent) / 1000 for percent in _PERCENTS}
        return {**named, "max": self.percentile_ms(100) / 1000}


def nearest_rank(ordered: Sequence[int], percent: int) -> int:
    """Return the smallest of the sorted values that `percent` of them do not exceed; 0 of none."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


@dataclass(slots=True)
class Felt:
    """What the users of one run feel, collected as it happens."""

    waits_ms: list[int] = field(default_factory=list)
    doors_ms: list[int] = field(default_factory=list)
    late_ms: dict[str, list[int]] = field(default_factory=dict)  # by user

    def waited(self, wait_ms: int) -> None:
        """Count a cell that begins after so long a wait, ms."""
        self.waits_ms.append(wait_ms)

    def entered(self, wait_ms: int) -> None:
        """Count a session that begins after so long a wait at the door, ms."""
        self.doors_ms.append(wait_ms)

    def ended(self, user: str, late_ms: int) -> None:
        """Count a cell of `user` that ends so much later than alone, ms."""
        self.late_ms.setdefault(user, []).append(late_ms)


@dataclass(frozen=True, slots=True)
class Lateness:
    """The lateness of each user's cells."""

    users: tuple[Spread, ...] = ()

    @classmethod
    def of(cls, felt: Felt) -> "Lateness":
        """Return the users that ended a GPU cell, in the order of their names."""
        return cls(tuple(Spread.of(felt.late_ms[user]) for user in sorted(felt.late_ms)))

    @property
    def cells(self) -> Spread:
        """The lateness of all cells."""
        return Spread.of(late_ms for user in self.users for late_ms in user.ordered)

    def percentile_of_users_ms(self, percent: int) -> int:
        """Return what `percent` of the users do not exceed with the 95th percentile of their own cells' lateness, ms."""
        return nearest_rank(sorted(user.percentile_ms(95) for user in self.users), percent)

    def of_users(self) -> dict[str, float]:
        """Return the 95th percentile of a user's own lateness in seconds: of the median user, of the 95th in a hundred, of the worst."""
        named = (("median", 50), ("p95", 95), ("worst", 100))
        return {name: self.percentile_of_users_ms(percent) / 1000 for name, percent in named}

    def jain(self) -> float:
        """Return Jain's index of fairness over the users' mean lateness: 1 if all are late alike, 1/n if one user bears all of it.

        (Σx)² / (n · Σx²); 1 where all are zero. Source: Jain, Chiu, Hawe, "A Quantitative Measure of Fairness", DEC-TR-301, 1984.
        """
        means = [sum(user.ordered) / len(user.ordered) for user in self.users]
        squares = sum(mean * mean for mean in means)
        return round(sum(means) ** 2 / (len(means) * squares), 4) if squares else 1.0
