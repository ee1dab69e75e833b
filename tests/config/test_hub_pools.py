"""What a pool means to a hub's users is understood, or refused with the key, the value and what is allowed."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.config import load
from fractional_gpu.config.hub import GroupTerms
from fractional_gpu.config.hub import hours as parse_hours
from fractional_gpu.config.pools import Pool

_DAY = 24 * 60


def _hub(**policy: Any) -> Pool:  # noqa: ANN401 - whatever a person writes
    return load(None, {"pools": {"default": policy}}).pools[0]


def test_a_pool_without_settings_is_open_to_all_users_at_all_times_for_free() -> None:
    assert Pool().terms([]) == ("", GroupTerms())


def test_the_best_terms_of_ones_groups_count() -> None:
    hub = _hub(groups={"students": {"weight": 300}, "staff": {"priority": 1}, "tutors": {"priority": 1, "weight": 50}})
    assert hub.terms(["students", "tutors", "staff", "guests"]) == ("staff", GroupTerms(priority=1))
    assert hub.terms(["guests"]) is None


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
