"""Budgets: how much a user or a group may use within a window of time, what they spent, and what is left.

Pure. Spending is added up by the minute for the last two hours and by the hour before that, so a window's start has that precision. A
used-up budget ends nothing: the pool says whether its owner's kernels wait for others, and whether new ones start.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from fractional_gpu.core.metering.usage import ACCOUNTS, Party, Usage, UsageRow

WARN_MILLI = 800
"""The broker warns when this many thousandths are spent."""
LAST_PRIORITY = -1_000_000
"""The priority of kernels that get only what no other ticket waits for: below any configured one."""
_MINUTE_S = 60
_HOUR_S = 3600
_MINUTES_FOR_S = 2 * _HOUR_S


class Unit(StrEnum):
    """What a budget counts."""

    SHARE = "gpu-hours"  # milli-GPU milliseconds that the pool's terms charge for
    MONEY = "money"  # thousandths of the budget's currency
    ENERGY = "energy"  # mJ


class Consequence(StrEnum):
    """What a pool does when a budget is used up. It never ends a kernel."""

    LOWER_PRIORITY = "lower-priority"  # one below its own
    WHEN_FREE = "when-free"  # served only while no other ticket waits
    NO_SEATS = "no-new-seats"  # neither seats nor kernels begin


class Subject(NamedTuple):
    """Who has a budget. A hub's user and a user of the machine with the same name have separate budgets."""

    kind: str  # "user" or "group"
    name: str
    account: str = ""  # of a user: `ACCOUNTS`; empty: of a group, or (of what was added) each of the two users

    def includes(self, other: "Subject") -> bool:
        """Whether this subject covers `other`."""
        return self[:2] == other[:2] and self.account in {"", other.account}


class WindowKind(StrEnum):
    """The period of a budget. Days, weeks (from Monday) and months follow the machine's local time."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    ROLLING = "rolling"  # the last `rolling_s` seconds; an hour is the limit of a surge


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What each of some users, or groups, may use. `name` "*": each one."""

    kind: str  # "user" or "group"
    name: str
    unit: Unit
    amount: int  # in the unit's measure
    window: WindowKind
    rolling_s: int = 0
    currency: str = ""  # Unit.MONEY: amounts in other currencies do not count
    pools: tuple[str, ...] = ()  # that count; empty: all
    text: str = ""  # as configured, for people: `40 GPU hours per month`

    def subject(self, party: Party) -> Subject | None:
        """Return whose budget a lease of this party is charged to, or None."""
        name = party.owner if self.kind == "user" else party.group
        counts = name and self.name in {"*", name} and (not self.pools or party.pool in self.pools)
        if not counts:
            return None
        return Subject(self.kind, name, ACCOUNTS[party.seated] if self.kind == "user" else "")

    def spent(self, usage: Usage, currency: str) -> int:
        """Return what the figures count, in the unit's measure."""
        match self.unit:
            case Unit.SHARE:
                return usage.charged_share
            case Unit.MONEY:
                return usage.charge_milli if currency == self.currency else 0
            case Unit.ENERGY:
                return usage.energy_mj


@dataclass(frozen=True, slots=True)
class Extra:
    """What an administrator added to a subject's budget until `until_s` (seconds since 1970)."""

    subject: Subject
    budget: str  # its text
    amount: int
    until_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """One subject's budget at a moment. Amounts in the unit's measure; times in seconds since 1970."""

    budget: Budget
    subject: Subject
    amount: int  # what was added included
    spent: int
    since_s: int

    @property
    def left(self) -> int:
        """What is left; 0 if it is overspent."""
        return max(0, self.amount - self.spent)

    @property
    def is_used_up(self) -> bool:
        return self.spent >= self.amount

    @property
    def is_warned(self) -> bool:
        return self.spent * 1000 >= self.amount * WARN_MILLI


@dataclass(slots=True)
class Spending:
    """What the subjects of some budgets spent, and what they got extra."""

    budgets: tuple[Budget, ...]
    extras: list[Extra] = field(default_factory=list)
    _spent: dict[tuple[int, Subject], dict[int, int]] = field(default_factory=dict)  # by budget's index: by bucket
    _grid_s: int = 0  # where local hours begin within UTC hours

    def add(self, rows: Iterable[UsageRow], now_s: int | None = None) -> None:
        """Add figures. `now_s`: they are from the last minute; None: they are the ledger's hourly figures."""
        for row in rows:
            bucket = row.key.hour_s
            self._grid_s = bucket % _HOUR_S
            if now_s is not None:
                bucket = max(bucket, min(now_s - now_s % _MINUTE_S, bucket + _HOUR_S - _MINUTE_S))
            for index, budget in enumerate(self.budgets):
                subject = budget.subject(row.party)
                amount = budget.spent(row.usage, row.key.currency)
                if subject is not None and amount:
                    buckets = self._spent.setdefault((index, subject), {})
                    buckets[bucket] = buckets.get(bucket, 0) + amount
        if now_s is not None:
            self._fold(now_s)

    def _fold(self, now_s: int) -> None:
        """Merge old minutes into hours without touching the existing hours, which may be thousands."""
        before_s, grid_s = now_s - _MINUTES_FOR_S, self._grid_s
        for buckets in self._spent.values():
            for at_s in [one for one in buckets if one < before_s and (one - grid_s) % _HOUR_S]:
                amount = buckets.pop(at_s)
                hour_s = at_s - (at_s - self._grid_s) % _HOUR_S
                buckets[hour_s] = buckets.get(hour_s, 0) + amount

    def forget(self, before_s: int) -> None:
        for key, buckets in list(self._spent.items()):
            for at_s in [one for one in buckets if one < before_s]:
                del buckets[at_s]
            if not buckets:
                del self._spent[key]
        self.extras = [one for one in self.extras if one.until_s > before_s]

    def subjects(self, parties: Iterable[Party]) -> list[tuple[int, Subject]]:
        """Return the sorted pairs of budget index and subject for these parties and past figures."""
        found = set(self._spent)
        for party in parties:
            for index, budget in enumerate(self.budgets):
                if (subject := budget.subject(party)) is not None:
                    found.add((index, subject))
        return sorted(found)

    def state(self, index: int, subject: Subject, since_s: int, now_s: int) -> BudgetState:
        """Return a subject's budget as of now, in the window that began at `since_s`."""
        budget = self.budgets[index]
        buckets = self._spent.get((index, subject), {})
        extra = sum(
            one.amount
            for one in self.extras
            if one.subject.includes(subject) and one.budget == budget.text and one.until_s > now_s
        )
        spent = sum(amount for at_s, amount in buckets.items() if at_s >= since_s - since_s % _MINUTE_S)
        return BudgetState(budget=budget, subject=subject, amount=budget.amount + extra, spent=spent, since_s=since_s)


def penalty(own_priority: int, consequences: Iterable[Consequence]) -> int | None:
    """Return the priority of a lease whose budget is used up, by its pool's terms; None: its own."""
    which = set(consequences)
    if Consequence.WHEN_FREE in which:
        return LAST_PRIORITY
    return own_priority - 1 if Consequence.LOWER_PRIORITY in which else None
