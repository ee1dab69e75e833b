"""Prices and charges in words: short, with the times as configured."""

import pytest

from fractional_gpu.broker.accounting.terms import charge_terms, fraction_price
from fractional_gpu.config import load
from fractional_gpu.core.metering.tariffs import Tariff

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_HELD = "the time during which a kernel has memory on a GPU counts, and suspended time costs nothing."


def _tariff(**keys: object) -> Tariff:
    return load(None, {"pools": {"default": keys}}).pools[0].tariff


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, f"No price is set; {_HELD}"),
        ({"price": "0.80 EUR"}, f"A whole GPU costs 0.80 EUR per hour; {_HELD}"),
        (
            {"price": "0.805 EUR", "charge": "busy"},
            "A whole GPU costs 0.805 EUR per hour; the time during which a kernel runs cells on a GPU counts.",
        ),
        (
            {
                "price": "0.80 EUR",
                "price_hours": {"Mon-Fri 08:00-18:00, Sat 10:00-14:00": 1.20, "Sun 22:00-06:00": 0.1},
                "charge": "reserved",
                "suspended_credit": "80%",
            },
            (
                "A whole GPU costs 0.80 EUR per hour, 1.20 Mon-Fri 08:00-18:00, Sat 10:00-14:00, 0.10 Sun 22:00-06:00; "
                "the time during which a kernel exists counts, and suspended time gets 80 % of it back."
            ),
        ),
        (
            {"price": "1 EUR", "price_hours": {f"{day} 08:00-09:00": 2 for day in _DAYS}},
            (
                "A whole GPU costs 1.00 EUR per hour, 2.00 Mon 08:00-09:00, 2.00 Tue 08:00-09:00, 2.00 Wed 08:00-09:00, "
                f"2.00 Thu 08:00-09:00, other prices apply at 3 other times of the week; {_HELD}"
            ),
        ),
    ],
)
def test_the_terms_are_one_sentence(keys: dict[str, object], sentence: str) -> None:
    assert charge_terms(_tariff(**keys)) == sentence


def test_a_fraction_has_its_part_of_the_price_or_its_span_over_the_week() -> None:
    fixed = _tariff(price="0.80 EUR")
    assert [fraction_price(fixed, milli) for milli in (1000, 250, 1)] == [
        "0.80 EUR per hour",
        "0.20 EUR per hour",
        "0.00 EUR per hour",
    ]
    varied = _tariff(price="0.80 EUR", price_hours={"Mon-Fri 08:00-18:00": 1.20, "Sat 08:00-18:00": 0.4})
    assert fraction_price(varied, 250) == "0.10 to 0.30 EUR per hour"
    assert fraction_price(Tariff(), 250) == ""
