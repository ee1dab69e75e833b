"""Tracks what users and groups spend, warns them, and applies a pool's `over_budget` setting once a budget is used up.

- A budget only counts past use. It does not reserve anything. When a group's budget is used up, everyone in the group is affected.
- The meter reports once a minute, so it can take up to a minute for a used-up budget to take effect.
- Kernels are never ended, and no state is lost. While the budget is used up, kernels run at a different priority, or new kernels and seats
  are refused.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from fractional_gpu.broker.clock import now_ms, wall_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.config.budgets import format_amount
from fractional_gpu.config.pools import Pool
from fractional_gpu.core.events import PriorityChanged
from fractional_gpu.core.metering.budgets import (
    Budget,
    BudgetExtension,
    BudgetState,
    Consequence,
    Spending,
    Subject,
    WindowKind,
    penalty,
)
from fractional_gpu.core.metering.usage import Party, UsageRow
from fractional_gpu.core.model import LeaseSpec, LeaseView
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.protocol.accounts import BudgetStatus
from fractional_gpu.protocol.errors import NoRoomError
from fractional_gpu.protocol.messages import GateVerb

if TYPE_CHECKING:
    from fractional_gpu.broker.broker import Broker

log = logging.getLogger(__name__)

_EXTRAS: Final = "budget-extras"  # the name of the extensions in the ledger
_SOME_S: Final = 7200
_DAY_S: Final = 86_400
_WHAT_FOLLOWS = {
    Consequence.LOWER_PRIORITY: "other kernels go first",
    Consequence.WHEN_FREE: "kernels get a GPU only while no other user is waiting for one",
    Consequence.NO_SEATS: "no more servers or kernels with a GPU are started",
}


def begin_of(budget: Budget, now_s: int) -> int:
    if budget.window is WindowKind.ROLLING:
        return now_s - budget.rolling_s
    now = time.localtime(now_s)
    day = now.tm_mday - (now.tm_wday if budget.window is WindowKind.WEEK else 0)
    return _local(now.tm_year, now.tm_mon, 1 if budget.window is WindowKind.MONTH else day)


def end_of(budget: Budget, now_s: int) -> int | None:
    if budget.window is WindowKind.ROLLING:
        return None
    begin = time.localtime(begin_of(budget, now_s))
    if budget.window is WindowKind.MONTH:
        return _local(begin.tm_year, begin.tm_mon + 1, 1)
    return _local(begin.tm_year, begin.tm_mon, begin.tm_mday + (7 if budget.window is WindowKind.WEEK else 1))


def _local(year: int, month: int, day: int) -> int:  # midnight; days and months that are out of range carry over
    return int(time.mktime((year, month, day, 0, 0, 0, 0, 0, -1)))


def party_of(spec: LeaseSpec) -> Party:
    return Party(pool=spec.pool, owner=spec.owner, group=spec.group, seated=bool(spec.seat))


class BudgetKeeper:
    """One broker's budgets. Not thread-safe. `terms` returns a pool's configuration, and `wall` returns the time in ms since 1970."""

    def __init__(
        self,
        broker: "Broker",
        writer: LedgerWriter,
        budgets: Sequence[Budget],
        terms: Callable[[str], Pool],
        *,
        wall: Callable[[], int] = wall_ms,
    ) -> None:
        self._broker = broker
        self._writer = writer
        self._terms = terms
        self._wall = wall
        self._spending = Spending(tuple(budgets))

    @property
    def is_needed(self) -> bool:
        return bool(self._spending.budgets)

    def recover(self, ledger: Ledger) -> None:
        if not self.is_needed:
            return
        now_s = self._now_s()
        since_s = min(begin_of(budget, now_s) for budget in self._spending.budgets)
        columns = ("hour", "pool", "user", "group", "seated", "currency")
        for key, usage in ledger.metered(columns, since_s - _SOME_S, now_s + _DAY_S):
            party = Party(str(key["pool"]), str(key["user"]), str(key["group"]), seated=bool(key["seated"]))
            self._spending.add([UsageRow.of(int(key["hour"]), str(key["currency"]), party, usage)])
        self._spending.extras = ledger.kept_as(_EXTRAS, list[BudgetExtension], [])
        self.apply()

    def counted(self, rows: Sequence[UsageRow]) -> None:
        if self.is_needed:
            now_s = self._now_s()
            self._spending.add(rows, now_s)
            self._spending.forget(min(begin_of(budget, now_s) for budget in self._spending.budgets) - _SOME_S)
            self.apply()

    def apply(self) -> None:
        for kernel, view in self._broker.views():
            self._apply_to(kernel, view)

    def lease_admitted(self, kernel: Kernel) -> None:
        view = self._broker.arbiter.lease(kernel.lease_id)
        if self.is_needed and view is not None:
            self._apply_to(kernel, view)

    def _apply_to(self, kernel: Kernel, view: LeaseView) -> None:
        spec, states = view.spec, self.states(party_of(view.spec))
        spent = [one for one in states if one.is_used_up]
        own = spec.priority if spec.own_priority is None else spec.own_priority
        wanted = penalty(own, self._terms(spec.pool).over_budget) if spent else None
        if spec.priority != (own if wanted is None else wanted):
            why = self._sentence(spent[0], spec.pool) if spent else "Its budget is no longer used up."
            self._broker.dispatch(
                PriorityChanged(at_ms=now_ms(), lease_id=spec.lease_id, priority=wanted, sentence=why)
            )
            self._broker.records.save(kernel)
        warned = spent or [one for one in states if one.is_warned]
        kernel.budget = self._sentence(warned[0], spec.pool) if warned else ""
        kernel.budget_used_up = bool(spent)
        self._warn(kernel, warned[0] if warned else None)

    def _warn(self, kernel: Kernel, state: BudgetState | None) -> None:
        """Show the budget warning in the notebook once per budget period, and again when the budget is used up."""
        key = None if state is None else (state.budget.text, end_of(state.budget, self._now_s()), state.is_used_up)
        if key != kernel.budget_told:
            kernel.budget_told = key
            if state is not None:
                if kernel.link is not None:
                    kernel.link.send(GateVerb.NOTICE, sentence=kernel.budget)
                else:
                    kernel.notices.append(kernel.budget)
            kernel.notify()

    def refusal(self, party: Party) -> str:
        if not self.is_needed or Consequence.NO_SEATS not in self._terms(party.pool).over_budget:
            return ""
        spent = [one for one in self.states(party) if one.is_used_up]
        return self._sentence(spent[0], party.pool) if spent else ""

    def check(self, party: Party) -> None:
        if why := self.refusal(party):
            raise NoRoomError(why, reason="over-budget")

    def group_of(self, groups: Iterable[str]) -> str:
        mine, named = sorted(groups), {one.name for one in self._spending.budgets if one.kind == "group"}
        return next((one for one in mine if one in named), mine[0] if mine and "*" in named else "")

    def states(self, party: Party) -> list[BudgetState]:
        """Return the budgets that cover this user, group and pool, starting with the one closest to being used up."""
        now_s, found = self._now_s(), []
        for index, budget in enumerate(self._spending.budgets):
            if (subject := budget.subject(party)) is not None:
                found.append(self._spending.state(index, subject, begin_of(budget, now_s), now_s))
        return sorted(found, key=lambda one: -one.spent * 1000 // max(1, one.amount))

    def status(self, party: Party) -> list[BudgetStatus]:
        return [self._status(one, party.pool) for one in self.states(party)]

    def seen_by(self, owner: str, group: str, *, seated: bool) -> list[BudgetStatus]:
        parties = [Party(pool, owner, group, seated=seated) for pool in sorted(self._broker.arbiter.pools())]
        found = {(one.kind, one.text): one for party in parties for one in self.status(party)}
        return list(found.values())

    def all(self) -> list[BudgetStatus]:
        now_s = self._now_s()
        parties = [party_of(view.spec) for _, view in self._broker.views()]
        return [
            self._status(self._spending.state(index, subject, begin_of(self._spending.budgets[index], now_s), now_s))
            for index, subject in self._spending.subjects(parties)
        ]

    def matching(self, subject: Subject, unit: str, currency: str) -> list[Budget]:
        return [
            one
            for one in self._spending.budgets
            if (one.kind, one.unit, one.currency) == (subject.kind, unit, currency) and one.name in {"*", subject.name}
        ]

    async def extend(self, subject: Subject, budgets: Iterable[Budget], amount: int, until_s: int | None) -> None:
        """Add `amount` to the subject's budgets until `until_s` (seconds since 1970) or, if that is None, until each budget resets.

        Raises LedgerError, leaving the budgets unchanged, if the extension cannot be saved. If this call is cancelled, the extension may
        still be saved.
        """
        now_s = self._now_s()
        more = [
            BudgetExtension(subject, one.text, amount, until_s or end_of(one, now_s) or now_s + one.rolling_s)
            for one in budgets
        ]
        extras = [*(one for one in self._spending.extras if one.until_s > now_s), *more]
        text = msgspec.json.encode(extras).decode()
        await self._writer.run(partial(self._writer.ledger.keep, _EXTRAS, text))
        self._spending.extras = extras
        self.apply()

    def _status(self, state: BudgetState, pool: str = "") -> BudgetStatus:
        budget, currency = state.budget, state.budget.currency
        return BudgetStatus(
            kind=state.subject.kind,
            name=state.subject.name,
            account=state.subject.account,
            text=budget.text,
            unit=budget.unit.value,
            currency=currency,
            amount=state.amount,
            spent=state.spent,
            left=state.left,
            amount_text=format_amount(budget.unit, state.amount, currency),
            spent_text=format_amount(budget.unit, state.spent, currency),
            left_text=format_amount(budget.unit, state.left, currency),
            since_s=state.since_s,
            until_s=end_of(budget, self._now_s()),
            warned=state.is_warned,
            used_up=state.is_used_up,
            sentence=self._sentence(state, pool),
        )

    def _sentence(self, state: BudgetState, pool: str = "") -> str:
        budget = state.budget
        whose = "Your budget" if state.subject.kind == "user" else f"The budget of the group {state.subject.name!r}"
        spent = format_amount(budget.unit, state.spent, budget.currency)
        percent = state.spent * 100 // max(1, state.amount)
        more = ""
        if state.amount != budget.amount:
            more = f" plus additions, {format_amount(budget.unit, state.amount, budget.currency)} in total"
        until_s = end_of(budget, self._now_s())
        reset = "older spending counts less and less"
        if until_s is not None:
            reset = time.strftime("it resets on %A, %d %B", time.localtime(until_s))
        if not state.is_used_up:
            return f"{whose} of {budget.text}{more}: {spent} spent ({percent} %); {reset}."
        follows = [_WHAT_FOLLOWS[one] for one in self._terms(pool).over_budget] if pool else []
        what = f": {' and '.join(follows)}" if follows else ""
        return (
            f"{whose} of {budget.text}{more} is used up ({spent} spent){what}; {reset}. "
            "No kernel is ended and nothing is lost; an administrator can add to it."
        )

    def _now_s(self) -> int:
        return self._wall() // 1000
