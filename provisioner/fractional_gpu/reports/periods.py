"""Converts a report's period, given as words such as `this-month`, `7d` or `2026-11-24`, to seconds since 1970.

When used as the start of a period, a word or date means its first moment. When used as the end, it means its last moment, so `yesterday` to
`yesterday` is all of yesterday. The start is rounded down to the hour, because figures are hourly.
"""

import re
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Final

from fractional_gpu.core.units import parse_duration_ms

WORDS: Final = ("today", "yesterday", "this-week", "this-month", "last-month")
DEFAULT: Final = "this-month"
ALLOWED: Final = f"expected {', '.join(WORDS)}, a duration such as 7d or 12h, or a date or time such as 2026-11-24 or 2026-11-24T08:00"
_DURATION: Final = re.compile(r"\d{1,7}(?:\.\d{1,3})?(?:m|h|d)", re.ASCII | re.IGNORECASE)
_SHOWN: Final = 60
_DAY: Final = timedelta(days=1)
_LONGEST_DATE: Final = 10  # characters; a longer text is a time


def period(since: str, until: str | None, now_s: int, zone: tzinfo | None = None) -> tuple[int, int]:
    """Return the start and the exclusive end, in seconds since 1970.

    If `until` is None, the period ends now. `zone` defaults to the machine's time zone. Raises ValueError.
    """
    begin_s = _moment("--since", since, now_s, zone, end=False)
    end_s = max(now_s, begin_s + 1) if until is None else _moment("--until", until, now_s, zone, end=True)
    if end_s <= begin_s:
        raise ValueError(
            f"--since {since[:_SHOWN]} --until {(until or '')[:_SHOWN]} is not a valid period: it ends ({moment_text(end_s, zone)}) "
            f"before it begins ({moment_text(begin_s, zone)}); give a later --until"
        )
    return max(0, begin_s), max(1, end_s)


def moment_text(at_s: int, zone: tzinfo | None = None) -> str:
    return datetime.fromtimestamp(at_s, UTC).astimezone(zone).strftime("%Y-%m-%d %H:%M")


def bounds(text: str, zone: tzinfo | None = None) -> tuple[int, int]:
    if "T" in text:
        begin_s = int(datetime.strptime(text, "%Y-%m-%dT%H:%M%z").timestamp())
        return begin_s, begin_s + 3600
    if text.count("-") == 1:
        first = datetime.strptime(text, "%Y-%m")  # noqa: DTZ007 - converted to local time below
        return _seconds(first, zone), _seconds(_next_month(first), zone)
    day = datetime.strptime(text, "%Y-%m-%d")  # noqa: DTZ007 - as above
    return _seconds(day, zone), _seconds(day + _DAY, zone)


def _moment(option: str, text: str, now_s: int, zone: tzinfo | None, *, end: bool) -> int:
    word = text.strip()
    now = datetime.fromtimestamp(now_s, UTC).astimezone(zone).replace(tzinfo=None)
    try:
        if word in WORDS:
            return _seconds(_period_of(word, now)[end], zone)
        if _DURATION.fullmatch(word):
            at = datetime.fromtimestamp(now_s - parse_duration_ms(word) // 1000, UTC)
            return int(at.timestamp()) if end else _hour_of(at, zone)
        at = datetime.fromisoformat(word)
        if len(word) <= _LONGEST_DATE:
            return _seconds(at + _DAY if end else at, zone)
        at = at if at.tzinfo is not None else at.replace(tzinfo=zone)
        return int(at.timestamp()) if end else _hour_of(at.astimezone(zone), zone)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{option} {text[:_SHOWN]!r} is not a valid time; {ALLOWED}") from None


def _period_of(word: str, now: datetime) -> tuple[datetime, datetime]:
    today = datetime.combine(now.date(), time())
    month = today.replace(day=1)
    match word:
        case "today":
            return today, today + _DAY
        case "yesterday":
            return today - _DAY, today
        case "this-week":
            monday = today - timedelta(days=today.weekday())
            return monday, monday + timedelta(days=7)
        case "last-month":
            return (month - _DAY).replace(day=1), month
        case _:
            return month, _next_month(month)


def _next_month(first: datetime) -> datetime:
    return (first + timedelta(days=32)).replace(day=1)


def _hour_of(at: datetime, zone: tzinfo | None) -> int:
    local = at.astimezone(zone)
    return int(local.timestamp()) - local.minute * 60 - local.second


def _seconds(local: datetime, zone: tzinfo | None) -> int:
    return int(local.replace(tzinfo=zone).timestamp())
