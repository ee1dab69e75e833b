"""Defines pools' tariffs: the price per device-hour at each time of the week, and which part of a lease's time is charged.

Usage is charged at the price in effect at the time. Changing a pool's price does not affect earlier charges.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

SLICE_MS = 900_000
"""The length of a time slice: a quarter hour, because prices and local hours only change on a quarter hour in every time zone."""
_DAY = 24 * 60
_WEEK = 7 * _DAY
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class Basis(StrEnum):
    """Which part of a lease's time is charged."""

    RESERVED = "reserved"  # while its kernel exists, with a credit for suspended time
    HELD = "held"  # while it has a reservation on a device; suspended time is free
    BUSY = "busy"  # while it runs cells on a device


class LocalTime(NamedTuple):
    """A quarter hour in the machine's local time."""

    hour_s: int  # start of its hour, seconds since 1970
    minute: int  # of the week, from Monday 00:00


Calendar = Callable[[int], LocalTime]
"""A function that converts a slice, given as a number of quarter hours since 1970, to local time."""


def utc(number: int) -> LocalTime:
    """Return the UTC time of a slice, given in quarter hours since 1970. Simulations use this as their calendar."""
    minutes = number * 15
    return LocalTime(minutes // 60 * 3600, (minutes + 3 * 24 * 60) % (7 * 24 * 60))  # 1 January 1970 was a Thursday


@dataclass(frozen=True, slots=True)
class PriceBand:
    """A price that applies at certain times of the week. Spans are in minutes from Monday 00:00, and can extend into the next week."""

    spans: tuple[tuple[int, int], ...]
    price_milli: int

    def covers(self, minute: int) -> bool:
        """Return whether the price applies at the given minute of the week."""
        return any(start <= minute < end or start <= minute + _WEEK < end for start, end in self.spans)

    @property
    def hours(self) -> str:
        """The spans as text, such as `Mon-Fri 08:00-18:00, Sat 10:00-14:00`. Consecutive days with the same times are merged."""
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
    """Format a time of day. The end of the day is 24:00. Later minutes are times of the next day."""
    minute -= _DAY * (minute > _DAY)
    return f"{minute // 60:02}:{minute % 60:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """What a pool charges. Prices are per device-hour, in thousandths of the currency unit."""

    currency: str = ""  # empty: time is counted but not charged
    price_milli: int = 0
    bands: tuple[PriceBand, ...] = ()  # the first one that covers a minute applies
    basis: Basis = Basis.HELD
    credit_milli: int = 0  # Basis.RESERVED: discount on suspended time, thousandths of the price

    def price_at(self, minute: int) -> int:
        """Return the price per device-hour at the given minute of the week."""
        return next((band.price_milli for band in self.bands if band.covers(minute)), self.price_milli)

    def charged_milli(self, *, held: bool, busy: bool, suspended: bool) -> int:
        """Return how many thousandths of a lease's time in this state are charged."""
        match self.basis:
            case Basis.RESERVED:
                return 1000 - self.credit_milli if suspended else 1000
            case Basis.HELD:
                return 1000 if held else 0
            case Basis.BUSY:
                return 1000 if held and busy else 0
