"""A pool's terms: which of a hub's groups may use the pool and when, how full it may get, and what its users are charged.

The broker applies these terms to seats and metering. The arbiter does not know about them. Access is checked only when a user takes a seat.
A seat that has been taken stays valid if the pool closes or its user's groups change.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from fractional_gpu.config import values
from fractional_gpu.core.metering.tariffs import PriceBand

_PRICE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s+([A-Za-z€$£¥][A-Za-z €$£¥]{0,19})")
_LONGEST_NAME = 200
_MOST_GROUPS = 1000
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY_MINUTES = 24 * 60
_WEEK_MINUTES = 7 * _DAY_MINUTES
_LONGEST_HOURS = 400
_MOST_BANDS = 50
_ALLOWED_HOURS = "expected 'always', or days and times such as 'Mon-Fri 08:00-18:00, Sat 10:00-14:00'"
_DAY, _TIME = f"({'|'.join(_DAYS)})", r"((?:[01]\d|2[0-3]):[0-5]\d|24:00)"
_SPAN = re.compile(rf"{_DAY}(?:-{_DAY})?\s+{_TIME}-{_TIME}", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """A group's terms in a pool: its members' priority, and their weight when users compete for devices."""

    weight: int = 100
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The hourly price of a whole device, in thousandths of the currency unit."""

    milli: int
    unit: str


@dataclass(frozen=True, slots=True)
class OpeningHours:
    """The times when users can take new seats in a pool, in local time. `text` is the configured value, such as `Mon-Fri 08:00-18:00`.

    `spans` holds a (start, end) pair of minutes for each span, with the end exclusive. Minutes are counted from the start of Monday. A span
    may end in the next week.
    """

    text: str
    spans: tuple[tuple[int, int], ...]

    def is_open(self, minute: int) -> bool:
        """Return whether the pool is open at the given minute of the week."""
        return any(start <= minute < end or start <= minute + _WEEK_MINUTES < end for start, end in self.spans)

    def next_opening(self, minute: int) -> str:
        """Return the next opening time, such as `Mon 08:00`."""
        start = min((start for start, _ in self.spans), key=lambda start: (start - minute) % _WEEK_MINUTES)
        return f"{_DAYS[start // _DAY_MINUTES]} {start % _DAY_MINUTES // 60:02}:{start % 60:02}"


def groups(value: object) -> Mapping[str, GroupTerms] | None:
    """Parse the groups that may use the pool, and return each group's terms. Return None if the value is 'everybody'."""
    if value == "everybody":
        return None
    allowed = "expected 'everybody', or groups such as {'students': {}, 'staff': {'weight': 200, 'priority': 10}}"
    if not isinstance(value, Mapping) or not 0 < len(value) <= _MOST_GROUPS:
        raise ValueError(allowed)
    found = {}
    for name, raw in value.items():
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            raise ValueError(f"{name!r} is not a group name; {allowed}")
        if not isinstance(raw, Mapping) or not set(raw) <= {"weight", "priority"}:
            raise ValueError(f"invalid terms for group {name!r}: {raw!r}; {allowed}")
        try:
            weight = values.whole_number(1, 10_000)(raw.get("weight", 100))
            priority = values.whole_number(-1000, 1000)(raw.get("priority", 0))
        except ValueError as error:
            limits = "weight from 1 to 10000, priority from -1000 to 1000"
            raise ValueError(f"group {name!r}: {error} ({limits})") from None
        found[name] = GroupTerms(weight=weight, priority=priority)
    return found


def hours(value: object) -> OpeningHours | None:
    """Parse the opening hours. Return None if they are 'always'. Raises ValueError with a message that describes the allowed values."""
    if value == "always":
        return None
    if not isinstance(value, str) or len(value) > _LONGEST_HOURS or not value.strip():
        raise ValueError(_ALLOWED_HOURS)
    spans: list[tuple[int, int]] = []
    for part in value.split(","):
        spans += _spans(part.strip())
    return OpeningHours(value.strip(), tuple(sorted(spans)))


def _spans(part: str) -> list[tuple[int, int]]:
    match = _SPAN.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is not a time of the week; {_ALLOWED_HOURS}")
    first, last = (_DAYS.index(day.capitalize()) for day in (match[1], match[2] or match[1]))
    start, end = (int(time[:2]) * 60 + int(time[3:]) for time in (match[3], match[4]))
    if start in {end, _DAY_MINUTES}:
        raise ValueError(f"{part!r} opens and closes at the same time; {_ALLOWED_HOURS}")
    if end < start:
        end += _DAY_MINUTES  # the span goes past midnight
    days = [(first + number) % 7 for number in range((last - first) % 7 + 1)]
    return [(day * _DAY_MINUTES + start, day * _DAY_MINUTES + end) for day in days]


def price(value: object) -> Price | None:
    """Parse the hourly price of a whole device. Return None if there is no price."""
    if value is None:
        return None
    match = _PRICE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected None, or an amount and a currency such as '0.80 EUR'")
    return Price(milli=int(Fraction(match[1]) * 1000), unit=match[2].strip())


def price_bands(value: object) -> tuple[PriceBand, ...]:
    """Parse the prices that apply at certain times of the week."""
    allowed = "expected prices by time of the week, such as {'Mon-Fri 08:00-18:00': 1.20}, with times on quarter hours"
    if not isinstance(value, Mapping) or len(value) > _MOST_BANDS:
        raise ValueError(allowed)
    bands = []
    for when, asked in value.items():
        if (parsed := hours(when)) is None or any(minute % 15 for span in parsed.spans for minute in span):
            raise ValueError(f"{when!r}: {allowed}")
        try:
            bands.append(PriceBand(spans=parsed.spans, price_milli=values.hourly_price(asked)))
        except ValueError as error:
            raise ValueError(f"invalid price {asked!r} for {when!r}: {error}") from None
    return tuple(bands)
