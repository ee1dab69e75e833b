"""Budgets as they are configured."""

from typing import Any

import pytest

from fractional_gpu.config import load
from fractional_gpu.config.budgets import format_amount, parse_amount
from fractional_gpu.config.values import ConfigError
from fractional_gpu.core.metering.budgets import Unit, WindowKind
from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR

USER = {"user": "*", "limit": "40 GPU hours", "per": "month"}


def budgets(*entries: Any) -> Any:  # noqa: ANN401 - whatever a configuration may hold
    return load(None, {"budgets": list(entries)}).budgets


def test_a_budget_is_read_as_it_is_written() -> None:
    (one,) = budgets(USER)
    assert (one.kind, one.name, one.unit, one.amount, one.window) == (
        "user",
        "*",
        Unit.SHARE,
        40 * SHARE_HOUR,
        WindowKind.MONTH,
    )
    assert one.text == "40.0 GPU hours per month"


@pytest.mark.parametrize(
    ("per", "window", "rolling_s", "text"),
    [
        ("day", WindowKind.DAY, 0, "day"),
        ("week", WindowKind.WEEK, 0, "week"),
        ("hour", WindowKind.ROLLING, 3600, "hour"),
        ("rolling 30d", WindowKind.ROLLING, 30 * 86_400, "720 h, rolling"),
    ],
)
def test_each_window(per: str, window: WindowKind, rolling_s: int, text: str) -> None:
    (one,) = budgets({**USER, "per": per})
    assert (one.window, one.rolling_s, one.text) == (window, rolling_s, f"40.0 GPU hours per {text}")


@pytest.mark.parametrize(
    ("text", "parsed", "shown"),
    [
        ("0.5 GPU hours", (Unit.SHARE, SHARE_HOUR // 2, ""), "0.5 GPU hours"),
        ("1 GPU hour", (Unit.SHARE, SHARE_HOUR, ""), "1.0 GPU hours"),
        ("12.5 kWh", (Unit.ENERGY, MJ_PER_KWH * 25 // 2, ""), "12.50 kWh"),
        ("100 EUR", (Unit.MONEY, 100_000, "EUR"), "100.00 EUR"),
        ("1234.567 €", (Unit.MONEY, 1_234_567, "€"), "1,234.57 €"),
    ],
)
def test_amounts(text: str, parsed: tuple[Unit, int, str], shown: str) -> None:
    assert parse_amount(text) == parsed
    assert format_amount(*parsed) == shown


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("40 GPU hours", "[0] = '40 GPU hours': a budget must be a dictionary"),
        ({"limit": "1 EUR", "per": "day"}, "either 'user' or 'group'"),
        ({**USER, "group": "x"}, "either 'user' or 'group'"),
        ({**USER, "user": ""}, "['user'] = '': expected a name, or '*'"),
        ({**USER, "user": "a\nb"}, "a name, or '*'"),
        ({**USER, "limit": "40"}, "['limit'] = '40': expected an amount and its unit"),
        ({**USER, "limit": 40}, "an amount and its unit"),
        ({"user": "*", "per": "day"}, "['limit'] = None"),
        ({**USER, "per": "year"}, "['per'] = 'year': expected 'day', 'week' or 'month'"),
        ({**USER, "per": "rolling 5m"}, "['per'] = 'rolling 5m'"),
        ({**USER, "per": "rolling"}, "['per']"),
        ({**USER, "pools": "lab"}, "['pools'] = 'lab': expected a list of pool names"),
        ({**USER, "perr": "day"}, "did you mean 'per'?"),
    ],
)
def test_a_wrong_budget_names_the_entry_the_key_and_what_is_allowed(entry: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        budgets(entry)
    assert said in str(refused.value)
    assert "budgets" in str(refused.value)


def test_the_same_budget_twice_is_a_slip() -> None:
    with pytest.raises(ConfigError, match=r"\[1\] = .*: this budget is a duplicate"):
        budgets(USER, dict(USER))
