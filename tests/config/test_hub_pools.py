"""What a pool means to a hub's users is understood, or refused with the key, the value and what is allowed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.config import ConfigError, load
from fractional_gpu.config.hub import GroupTerms, Price
from fractional_gpu.config.hub import hours as parse_hours
from fractional_gpu.config.pools import Pool

_DAY = 24 * 60


def _hub(**policy: Any) -> Pool:  # noqa: ANN401 - whatever a person writes
    return load(None, {"pools": {"default": policy}}).pools[0]


def test_a_pool_that_says_nothing_is_open_to_everybody_at_all_times_for_nothing() -> None:
    assert (_hub().hours, _hub().price) == (None, None)
    assert Pool().terms([]) == ("", GroupTerms())


def test_every_key_of_a_hub_is_understood() -> None:
    hub = _hub(
        groups={"students": {}, "staff": {"weight": 200, "priority": 10}},
        hours="Mon-Fri 08:00-18:00",
        price="0.80 EUR",
        wait_target="2m",
        wait_bound="1%",
        when_full="refuse",
        kernels_per_seat=2,
        expected_use="10%",
    )
    assert hub.groups == {"students": GroupTerms(), "staff": GroupTerms(weight=200, priority=10)}
    assert hub.hours is not None
    assert hub.price == Price(milli=800, unit="EUR")
    assert hub.expected_use == 100
    assert (hub.wait_target, hub.wait_bound, hub.when_full, hub.kernels_per_seat) == (120_000, 10, "refuse", 2)


def test_the_best_terms_of_ones_groups_count() -> None:
    hub = _hub(groups={"students": {"weight": 300}, "staff": {"priority": 1}, "tutors": {"priority": 1, "weight": 50}})
    assert hub.terms(["students", "tutors", "staff", "guests"]) == ("staff", GroupTerms(priority=1))
    assert hub.terms(["guests"]) is None


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("groups", [], "allowed: 'everybody', or groups such as"),
        ("groups", {}, "allowed: 'everybody', or groups such as"),
        ("groups", {"a": {"wieght": 1}}, "group 'a' has"),
        ("groups", {"a": {"weight": 0}}, "weight from 1 to 10000"),
        ("groups", {"a": {"priority": "high"}}, "priority from -1000 to 1000"),
        ("groups", {7: {}}, "7 is not a group's name"),
        ("hours", "weekdays", "is not a time of the week"),
        ("hours", "Mon 08:00-08:00", "opens and closes at the same time"),
        ("hours", "Mon 08:00-25:00", "is not a time of the week"),
        ("hours", "Mox 08:00-09:00", "'Mox 08:00-09:00' is not a time of the week"),
        ("hours", "", "allowed: 'always'"),
        ("price", 0.8, "an amount and a currency such as '0.80 EUR'"),
        ("price", "EUR 0.80", "an amount and a currency such as '0.80 EUR'"),
        ("wait_bound", "0%", "a share from '0.1%' to '100%'"),
        ("wait_bound", 0.05, "a share from '0.1%' to '100%'"),
        ("expected_use", "seldom", "a share from '0.1%' to '100%'"),
        ("wait_target", "soon", "duration"),
        ("when_full", "queue", "allowed: 'wait' or 'refuse'"),
        ("kernels_per_seat", 0, "a whole number from 1 to 512"),
        ("kernels_per_seats", 1, "did you mean 'kernels_per_seat'?"),
    ],
)
def test_what_is_wrong_names_the_key_the_value_and_what_is_allowed(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _hub(**{key: value})
    message = str(caught.value)
    assert f"pools['default'][{key!r}] = {value!r}" in message
    assert allowed in message


def test_hours_over_midnight_and_over_the_end_of_the_week() -> None:
    hours = parse_hours("Sun 22:00-06:00")
    assert hours is not None
    assert hours.is_open(6 * _DAY + 23 * 60)
    assert hours.is_open(5 * 60)  # Monday morning
    assert not hours.is_open(6 * 60)
    assert not hours.is_open(6 * _DAY + 21 * 60)
    assert hours.next_opening(6 * 60) == "Sun 22:00"


def test_days_may_go_over_the_end_of_the_week() -> None:
    hours = parse_hours("Sat-Mon 10:00-12:00")
    assert hours is not None
    assert [day for day in range(7) if hours.is_open(day * _DAY + 11 * 60)] == [0, 5, 6]


@given(minute=st.integers(0, 7 * _DAY - 1))
def test_it_opens_at_its_next_opening(minute: int) -> None:
    hours = parse_hours("Mon-Fri 08:00-18:00, Sat 22:30-01:00")
    assert hours is not None
    day, _, time = hours.next_opening(minute).partition(" ")
    hour, _, rest = time.partition(":")
    opening = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun").index(day) * _DAY + int(hour) * 60 + int(rest)
    assert hours.is_open(opening)
    assert not hours.is_open((opening - 1) % (7 * _DAY))
