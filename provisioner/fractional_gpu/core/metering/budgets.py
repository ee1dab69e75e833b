"""Computes how much of each budget has been spent and how much is left. Budgets limit how much a user or group may use in a time window.

The module does no I/O. Spending is stored per minute for the last two hours and per hour before that, so the start of a window is accurate
only to the minute or the hour. Kernels are not ended when a budget is used up. The pool's settings determine whether the owner's kernels
then wait for others, and whether new kernels may start.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from fractional_gpu.core.metering.usage import ACCOUNTS, Party, Usage, UsageRow

WARN_MILLI = 800
"""The broker gives a warning once this much of a budget has been spent, in thousandths."""
LAST_PRIORITY = -1_000_000
"""The priority of kernels that are served only while no other ticket is waiting. It is lower than any configured priority."""
_MINUTE_S = 60
_HOUR_S = 3600
_MINUTES_FOR_S = 2 * _HOUR_S


class Unit(StrEnum):
    """The unit of a budget."""

    SHARE = "gpu-hours"  # charged milli-GPU milliseconds
    MONEY = "money"  # thousandths of the budget's currency
    ENERGY = "energy"  # mJ


class Consequence(StrEnum):
    """What happens when a budget is used up. Kernels are never ended."""

    LOWER_PRIORITY = "lower-priority"  # one below the lease's own priority
    WHEN_FREE = "when-free"  # served only while no other ticket waits
    NO_SEATS = "no-new-seats"  # no new seats and no new kernels


class Subject(NamedTuple):
    """The user or group a budget applies to. A hub user and a system user of the same name have separate budgets."""

    kind: str  # "user" or "group"
    name: str
    account: str = ""  # for users, one of `ACCOUNTS`; empty for a group or, in an extension, for both users

    def includes(self, other: "Subject") -> bool:
        """Return whether this subject covers `other`. Without an account, it covers both the hub user and the system user with its name."""
        return self[:2] == other[:2] and self.account in {"", other.account}


class WindowKind(StrEnum):
    """The period of a budget. Days, weeks (from Monday) and months follow the machine's local time."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    ROLLING = "rolling"  # the last `rolling_s` seconds; a window of an hour limits bursts


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget for the user or group with this name. If the name is "*", every user or group has a separate budget of this size."""

    kind: str  # "user" or "group"
    name: str
    unit: Unit
    amount: int  # in the measure of the unit
    window: WindowKind
    rolling_s: int = 0
    currency: str = ""  # with Unit.MONEY, the only currency that counts
    pools: tuple[str, ...] = ()  # the pools that count; empty for all
    text: str = ""  # as configured, such as `40 GPU hours per month`

    def subject(self, party: Party) -> Subject | None:
        """Return the subject that a lease of this party is charged to, or None if this budget does not apply to it."""
        name = party.owner if self.kind == "user" else party.group
        counts = name and self.name in {"*", name} and (not self.pools or party.pool in self.pools)
        if not counts:
            return None
        return Subject(self.kind, name, ACCOUNTS[party.seated] if self.kind == "user" else "")

    def spent(self, usage: Usage, currency: str) -> int:
        """Return how much of this budget the usage consumes. `Unit` says how the amount is measured."""
        match self.unit:
            case Unit.SHARE:
                return usage.charged_share
            case Unit.MONEY:
                return usage.charge_milli if currency == self.currency else 0
            case Unit.ENERGY:
                return usage.energy_mj


@dataclass(frozen=True, slots=True)
class BudgetExtension:
    """An amount added to a budget by an administrator. It is valid until `until_s`, in seconds since 1970."""

    subject: Subject
    budget: str  # its `text`
    amount: int
    until_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """The state of a subject's budget at one point in time. `Unit` says how amounts are measured. Times are in seconds since 1970."""

    budget: Budget
    subject: Subject
    amount: int  # extensions included
    spent: int
    since_s: int

    @property
    def left(self) -> int:
        """The amount left, or 0 if the budget is overspent."""
        return max(0, self.amount - self.spent)

    @property
    def is_used_up(self) -> bool:
        return self.spent >= self.amount

    @property
    def is_warned(self) -> bool:
        return self.spent * 1000 >= self.amount * WARN_MILLI


@dataclass(slots=True)
class Spending:
    """How much each subject has spent of each budget, and the budgets' extensions."""

    budgets: tuple[Budget, ...]
    extras: list[BudgetExtension] = field(default_factory=list)
    _spent: dict[tuple[int, Subject], dict[int, int]] = field(default_factory=dict)  # by budget index; then by bucket
    _grid_s: int = 0  # offset of local hours from UTC hours

    def add(self, rows: Iterable[UsageRow], now_s: int | None = None) -> None:
        """Add usage from the minute before `now_s`, or hourly figures from the ledger if `now_s` is None."""
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
        """Merge old minutes into hours. Entries that are already hourly are skipped, because there can be thousands of them."""
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
        """Return sorted (budget index, subject) pairs for these parties and for everyone with recorded spending."""
        found = set(self._spent)
        for party in parties:
            for index, budget in enumerate(self.budgets):
                if (subject := budget.subject(party)) is not None:
                    found.add((index, subject))
        return sorted(found)

    def state(self, index: int, subject: Subject, since_s: int, now_s: int) -> BudgetState:
        """Return how much of a subject's budget has been spent, and how much is left, in the window that started at `since_s`."""
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
    """Return the priority a lease gets once its budget is used up, or None if it keeps its own."""
    which = set(consequences)
    if Consequence.WHEN_FREE in which:
        return LAST_PRIORITY
    return own_priority - 1 if Consequence.LOWER_PRIORITY in which else None
