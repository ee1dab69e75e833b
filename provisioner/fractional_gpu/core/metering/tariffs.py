"""What a pool charges: the price of a device hour by the time of the week, and which time of a lease is charged.

The price at the time of use counts: a later change of the pool's price changes no earlier charge.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

SLICE_MS = 900_000
"""Prices and hours change at whole quarters of an hour, in whatever time zone."""
_DAY = 24 * 60
_WEEK = 7 * _DAY
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class Basis(StrEnum):
    """Which time of a lease is charged."""

    RESERVED = "reserved"  # while its kernel exists; suspended time gets a credit
    HELD = "held"  # while it has a reservation on a device: suspended time costs nothing
    BUSY = "busy"  # while it runs cells on a device


class LocalTime(NamedTuple):
    """A quarter of an hour in the machine's local time."""

    hour_s: int  # the beginning of its hour, seconds since 1970
    minute: int  # of the week, Monday first


Calendar = Callable[[int], LocalTime]
"""Returns the local time of a slice, a number of quarters of an hour since 1970."""


def utc(number: int) -> LocalTime:
    """Return the slice's time in UTC: the calendar of simulations."""
    minutes = number * 15
    return LocalTime(minutes // 60 * 3600, (minutes + 3 * 24 * 60) % (7 * 24 * 60))  # 1 January 1970 was a Thursday


@dataclass(frozen=True, slots=True)
class PriceBand:
    """Another price for some minutes of the week, Monday first; a span may end in the next week."""

    spans: tuple[tuple[int, int], ...]
    price_milli: int

    def covers(self, minute: int) -> bool:
        """Whether the price holds in that minute of the week."""
        return any(start <= minute < end or start <= minute + _WEEK < end for start, end in self.spans)

    @property
    def hours(self) -> str:
        """The times, such as `Mon-Fri 08:00-18:00, Sat 10:00-14:00`: neighbouring days are merged if equal."""
        runs: list[tuple[int, int, int, int]] = []  # first and last day, minute of the day, minutes
        for start, end in sorted(self.spans, key=lambda span: (span[0] % _DAY, span[1] - span[0], span[0])):
            day, minute = divmod(start, _DAY)
            if runs and runs[-1][1:] == (day - 1, minute, end - start):
                runs[-1] = (runs[-1][0], day, minute, end - start)
            else:
                runs.append((day, day, minute, end - start))
        return ", ".join(
            f"{_DAYS[first]}{f'-{_DAYS[last]}' if last > first else ''} {_clock(minute)}-{_clock(minute + length)}"
            for first, last, minute, length in sorted(runs)
        )


def _clock(minute: int) -> str:
    """Return a time of day; minutes past the day's end are the next day's, and the end itself is 24:00."""
    minute -= _DAY * (minute > _DAY)
    return f"{minute // 60:02}:{minute % 60:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """What a pool charges. Prices are for an hour of a device, thousandths of the currency's unit."""

    currency: str = ""  # empty: nothing is charged, time is counted alone
    price_milli: int = 0
    bands: tuple[PriceBand, ...] = ()  # the first one that covers a minute counts
    basis: Basis = Basis.HELD
    credit_milli: int = 0  # Basis.RESERVED: the part of the price that suspended time gets back, thousandths

    def price_at(self, minute: int) -> int:
        """Return the price in that minute of the week."""
        return next((band.price_milli for band in self.bands if band.covers(minute)), self.price_milli)

    def charged_milli(self, *, held: bool, busy: bool, suspended: bool) -> int:
        """Return which part of the time in this state is charged, thousandths."""
        match self.basis:
            case Basis.RESERVED:
                return 1000 - self.credit_milli if suspended else 1000
            case Basis.HELD:
                return 1000 if held else 0
            case Basis.BUSY:
                return 1000 if held and busy else 0
