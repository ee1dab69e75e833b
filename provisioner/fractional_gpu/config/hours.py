"""Opening hours of a pool, in the machine's own time: `Mon-Fri 08:00-18:00, Sat 10:00-14:00`. Minutes are of the week, Monday first."""

import re
from dataclasses import dataclass

__all__ = ["OpeningHours", "parse_hours"]

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY_MINUTES = 24 * 60
_WEEK_MINUTES = 7 * _DAY_MINUTES
_LONGEST = 400
_ALLOWED = "allowed: 'always', or days and times such as 'Mon-Fri 08:00-18:00, Sat 10:00-14:00'"
_PART = re.compile(
    r"([A-Za-z]{3})(?:-([A-Za-z]{3}))?\s+(\d{2}):([0-5]\d)-(\d{2}):([0-5]\d)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class OpeningHours:
    """When a pool takes new seats. `spans`: from, until (exclusive), minutes of the week; one may end in the next week."""

    text: str
    spans: tuple[tuple[int, int], ...]

    def is_open(self, minute: int) -> bool:
        """Whether the pool is open in that minute of the week."""
        return any(start <= minute < end or start <= minute + _WEEK_MINUTES < end for start, end in self.spans)

    def next_opening(self, minute: int) -> str:
        """Return when it opens next, as `Mon 08:00`."""
        start = min((start for start, _ in self.spans), key=lambda start: (start - minute) % _WEEK_MINUTES)
        return f"{_DAYS[start // _DAY_MINUTES]} {start % _DAY_MINUTES // 60:02}:{start % 60:02}"


def parse_hours(value: object) -> OpeningHours | None:
    """Return the hours, None for 'always'. Raises ValueError with what is allowed."""
    if value == "always":
        return None
    if not isinstance(value, str) or len(value) > _LONGEST or not value.strip():
        raise ValueError(_ALLOWED)
    spans: list[tuple[int, int]] = []
    for part in value.split(","):
        spans += _spans(part.strip())
    return OpeningHours(value.strip(), tuple(sorted(spans)))


def _spans(part: str) -> list[tuple[int, int]]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is not a time of the week; {_ALLOWED}")
    first, last = _day(match[1]), _day(match[2] or match[1])
    start, end = _minute(match[3], match[4]), _minute(match[5], match[6])
    if start in {end, _DAY_MINUTES}:
        raise ValueError(f"{part!r} opens and closes at the same time; {_ALLOWED}")
    if end < start:
        end += _DAY_MINUTES  # over midnight
    count = (last - first) % 7 + 1
    days = [(first + number) % 7 for number in range(count)]
    return [(day * _DAY_MINUTES + start, day * _DAY_MINUTES + end) for day in days]


def _day(name: str) -> int:
    try:
        return _DAYS.index(name.capitalize())
    except ValueError:
        raise ValueError(f"{name!r} is not a day; allowed: {', '.join(_DAYS)}") from None


def _minute(hour: str, minute: str) -> int:
    total = int(hour) * 60 + int(minute)
    if total > _DAY_MINUTES:
        raise ValueError(f"{hour}:{minute} is not a time of day; allowed: 00:00 to 24:00")
    return total
