"""Which time is meant: words, durations, dates and times, in the local time, with whole hours."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from fractional_gpu.reports.periods import bounds, period

BERLIN = ZoneInfo("Europe/Berlin")
KOLKATA = ZoneInfo("Asia/Kolkata")
NOW = datetime(2026, 11, 24, 10, 30, 15, tzinfo=BERLIN)  # a Tuesday


def local(since: str, until: str | None = None) -> list[str]:
    found = period(since, until, int(NOW.timestamp()), BERLIN)
    return [datetime.fromtimestamp(one, BERLIN).strftime("%Y-%m-%dT%H:%M") for one in found]


@pytest.mark.parametrize(
    ("since", "until", "found"),
    [
        ("this-month", None, ["2026-11-01T00:00", "2026-11-24T10:30"]),
        ("today", None, ["2026-11-24T00:00", "2026-11-24T10:30"]),
        ("today", "today", ["2026-11-24T00:00", "2026-11-25T00:00"]),
        ("yesterday", "yesterday", ["2026-11-23T00:00", "2026-11-24T00:00"]),
        ("this-week", "this-week", ["2026-11-23T00:00", "2026-11-30T00:00"]),
        ("last-month", "last-month", ["2026-10-01T00:00", "2026-11-01T00:00"]),
        ("7d", None, ["2026-11-17T10:00", "2026-11-24T10:30"]),
        ("12h", "2h", ["2026-11-23T22:00", "2026-11-24T08:30"]),
        ("2026-11-02", "2026-11-03", ["2026-11-02T00:00", "2026-11-04T00:00"]),
        ("2026-11-02T08:45", "2026-11-02T09:00", ["2026-11-02T08:00", "2026-11-02T09:00"]),
        ("2026-11-02T08:00+00:00", "2026-11-02T12:00Z", ["2026-11-02T09:00", "2026-11-02T13:00"]),
        (" today ", None, ["2026-11-24T00:00", "2026-11-24T10:30"]),
    ],
)
def test_a_time_is_what_its_words_say(since: str, until: str | None, found: list[str]) -> None:
    assert local(since, until) == found


@pytest.mark.parametrize(
    "text",
    ["", "soon", "7", "7w", "2026-13-01", "2026-02-30", "9999-12-31", "9999999d", "24.11.2026", "tödäy"],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"--until '.*' is not a valid time; expected today, yesterday, .* 7d .* 2026-11-24"
    ):
        period("2026-01-01", text, int(NOW.timestamp()), UTC)


def test_a_time_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--since today --until yesterday is not a valid period: it ends .* give a later --until"
    ):
        period("today", "yesterday", int(NOW.timestamp()), BERLIN)


def test_a_beginning_within_an_hour_is_moved_to_that_of_the_local_hour() -> None:
    begin_s, _ = period("90m", None, int(NOW.timestamp()), KOLKATA)
    assert datetime.fromtimestamp(begin_s, KOLKATA).minute == 0


@pytest.mark.parametrize(
    ("text", "begin", "hours"),
    [
        ("2026-10-25", "2026-10-24T22:00", 25),  # the clocks go back
        ("2026-03-29", "2026-03-28T23:00", 23),
        ("2026-10-25T02:00+0200", "2026-10-25T00:00", 1),
        ("2026-10-25T02:00+0100", "2026-10-25T01:00", 1),
        ("2026-12", "2026-11-30T23:00", 31 * 24),
    ],
)
def test_days_and_months_are_as_long_as_they_are_in_local_time(text: str, begin: str, hours: int) -> None:
    begin_s, end_s = bounds(text, BERLIN)
    assert datetime.fromtimestamp(begin_s, UTC).strftime("%Y-%m-%dT%H:%M") == begin
    assert end_s - begin_s == hours * 3600
