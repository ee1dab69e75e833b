"""Budgets: what counts against which budget, in which window, and what happens when one is used up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.metering.budgets import (
    LAST_PRIORITY,
    Budget,
    BudgetExtension,
    Consequence,
    Spending,
    Subject,
    Unit,
    WindowKind,
    penalty,
)
from fractional_gpu.core.metering.usage import Party, Usage, UsageRow
from tests.support.counted import calls_of

HOUR = 3600
ANN = Party("lab", "ann", "staff")
EACH = Budget(
    kind="user", name="*", unit=Unit.MONEY, amount=1000, currency="EUR", window=WindowKind.DAY, text="1 EUR per day"
)
ANN_S = Subject("user", "ann", "machine")


def row(hour_s: int, amount: int, party: Party = ANN, currency: str = "EUR") -> UsageRow:
    return UsageRow.of(
        hour_s, currency, party, Usage(charge_milli=amount, charged_share=7 * amount, energy_mj=3 * amount)
    )


def spent(spending: Spending, since_s: int, now_s: int, subject: Subject = ANN_S) -> int:
    return spending.state(0, subject, since_s, now_s).spent


def test_each_unit_counts_its_figure() -> None:
    one = row(0, 5)
    for unit, amount in {Unit.MONEY: 5, Unit.SHARE: 35, Unit.ENERGY: 15}.items():
        assert replace(EACH, unit=unit).spent(one.usage, "EUR") == amount
    assert EACH.spent(one.usage, "USD") == 0


def test_each_user_has_a_budget_of_their_own_and_a_group_one_together() -> None:
    bob = Party("lab", "bob", "staff")
    group = replace(EACH, kind="group", name="staff")
    spending = Spending((EACH, group))
    spending.add([row(0, 5), row(0, 7, bob)])
    assert [spending.state(0, Subject("user", name, "machine"), 0, HOUR).spent for name in ("ann", "bob")] == [5, 7]
    assert spending.state(1, Subject("group", "staff"), 0, HOUR).spent == 12
    assert spending.subjects([]) == [(0, ANN_S), (0, Subject("user", "bob", "machine")), (1, Subject("group", "staff"))]


def test_a_hubs_user_and_one_of_the_machine_with_the_same_name_have_a_budget_each() -> None:
    hub = replace(ANN, seated=True)
    hub_s = Subject("user", "ann", "hub")
    spending = Spending((EACH,), [BudgetExtension(Subject("user", "ann"), EACH.text, 30, 10 * HOUR)])
    spending.add([row(0, 5), row(0, 7, hub)])
    assert (EACH.subject(ANN), EACH.subject(hub)) == (ANN_S, hub_s)
    assert (spent(spending, 0, HOUR), spent(spending, 0, HOUR, hub_s)) == (5, 7)
    assert spending.state(0, ANN_S, 0, HOUR).amount == spending.state(0, hub_s, 0, HOUR).amount == 1030, "for each"
    spending.extras = [BudgetExtension(hub_s, EACH.text, 30, 10 * HOUR)]
    assert spending.state(0, ANN_S, 0, HOUR).amount == 1000
    assert replace(EACH, kind="group").subject(hub) == replace(EACH, kind="group").subject(ANN)


def test_a_budget_names_its_users_and_pools() -> None:
    assert replace(EACH, name="bob").subject(ANN) is None
    assert replace(EACH, pools=("big",)).subject(ANN) is None
    assert replace(EACH, pools=("lab", "big")).subject(ANN) == ANN_S
    assert replace(EACH, kind="group").subject(replace(ANN, group="")) is None
    assert EACH.subject(Party("lab")) is None  # the pool's share


def test_what_was_spent_before_the_window_does_not_count() -> None:
    spending = Spending((EACH,))
    spending.add([row(0, 5), row(HOUR, 7)])
    assert spent(spending, HOUR, 2 * HOUR) == 7
    assert spent(spending, 0, 2 * HOUR) == 12


def test_a_surge_is_seen_to_the_minute() -> None:
    spending = Spending((replace(EACH, window=WindowKind.ROLLING, rolling_s=HOUR),))
    for minute in range(120):
        now_s = 10 * HOUR + 60 * minute
        spending.add([row(now_s - now_s % HOUR, 1)], now_s)
        assert spent(spending, now_s - HOUR, now_s) == min(minute + 1, 61)


def test_fresh_figures_count_for_the_hour_they_are_of() -> None:
    spending = Spending((EACH,))
    spending.add([row(23 * HOUR, 5)], now_s=24 * HOUR + 20)  # counted just after midnight
    assert spent(spending, 24 * HOUR, 24 * HOUR + 20) == 0
    assert spent(spending, 0, 24 * HOUR + 20) == 5


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), max_size=60), st.sampled_from([0, 1800, 2700]))
def test_folding_minutes_into_hours_loses_nothing(steps: list[tuple[int, int]], grid_s: int) -> None:
    spending, now_s, total = Spending((EACH,)), 100 * HOUR + grid_s, 0
    for minutes, amount in steps:
        now_s += 60 * minutes
        total += amount
        spending.add([row(now_s - (now_s - grid_s) % HOUR, amount)], now_s)
        assert spent(spending, 0, now_s) == total
    spending.forget(now_s + HOUR)
    assert spent(spending, 0, now_s) == 0


def test_what_was_added_counts_until_its_time_for_its_budget_and_subject_only() -> None:
    spending = Spending((EACH,), [BudgetExtension(ANN_S, EACH.text, 500, until_s=10 * HOUR)])
    spending.add([row(0, 1200)])
    state = spending.state(0, ANN_S, 0, HOUR)
    assert (state.amount, state.left, state.is_used_up, state.is_warned) == (1500, 300, False, True)
    later = spending.state(0, ANN_S, 0, 10 * HOUR)
    assert (later.amount, later.left, later.is_used_up) == (1000, 0, True)
    assert spending.state(0, Subject("user", "bob", "machine"), 0, HOUR).amount == 1000


@pytest.mark.parametrize(
    ("amount", "warned", "used_up"), [(799, False, False), (800, True, False), (999, True, False), (1000, True, True)]
)
def test_it_warns_at_four_fifths(amount: int, warned: bool, used_up: bool) -> None:
    spending = Spending((EACH,))
    spending.add([row(0, amount)])
    state = spending.state(0, ANN_S, 0, HOUR)
    assert (state.is_warned, state.is_used_up) == (warned, used_up)


def test_what_follows_is_another_priority_or_nothing() -> None:
    assert penalty(5, []) is None
    assert penalty(5, [Consequence.NO_SEATS]) is None
    assert penalty(5, [Consequence.LOWER_PRIORITY, Consequence.NO_SEATS]) == 4
    assert penalty(5, [Consequence.WHEN_FREE]) == LAST_PRIORITY


def test_what_is_spent_each_minute_is_counted_without_touching_the_hours_of_the_month() -> None:
    costs = []
    for hours in (24, 24 * 31):
        spending, now_s = Spending((EACH,)), 1000 * HOUR
        spending.add([row(now_s - HOUR * number, 1) for number in range(hours)])
        costs.append(calls_of(lambda spending=spending, now_s=now_s: spending.add([row(now_s, 1)], now_s)))  # type: ignore[misc]
        assert spent(spending, 0, now_s) == hours + 1
    assert costs[0] == costs[1]
