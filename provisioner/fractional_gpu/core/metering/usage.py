"""The meter's figures: what one lease used of one device, or of none, within an hour, and how to add them up.

All are integers, and all are sums: the hourly figures of a day, a user or a pool add up exactly to its figures.

- Times (`..._ms`) are times of the lease. With several devices they are counted once, for the first device.
- Shares (`..._share`) are those times multiplied by the lease's share, in milli-GPU milliseconds, and counted for each of its devices.
- `reserved`: while the lease has a process, whatever its state; `held`: while it has a reservation on a device (swaps included);
  `busy`: while it holds a device and runs a cell; `suspended`: while its state lies in host memory.
- `occupied_us`: the device's time, divided among the leases that hold it by their shares; while none holds it, the time is the pool's. So
  for each device the figures of all leases and of the pool add up to the time that passed.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple, Self

HOUR_MS = 3_600_000
SHARE_HOUR = 1000 * HOUR_MS
"""A whole device for an hour, in milli-GPU milliseconds."""
MJ_PER_KWH = 3_600_000_000
"""Millijoules in a kilowatt-hour."""
ACCOUNTS = ("machine", "hub")
"""Whose user an owner is, by a party's `seated`: names may be in both."""


class UsageKey(NamedTuple):
    """Whose figures, and of which hour."""

    hour_s: int  # the beginning of the hour of local time, seconds since 1970
    lease_id: str  # empty: the pool's, of what no lease held
    device_id: str  # empty: the lease held none
    currency: str  # of the amounts; empty: the pool has no price


@dataclass(frozen=True, slots=True)
class Party:
    """Who a lease counts for, as reports name it."""

    pool: str
    owner: str = ""
    group: str = ""
    label: str = ""  # the notebook, for people
    seated: bool = False  # the owner is a hub's user, not one of the machine


@dataclass(slots=True, kw_only=True)
class Usage:
    """Figures that are added up. Amounts (`..._milli`) are thousandths of the currency's unit."""

    reserved_ms: int = 0
    held_ms: int = 0
    busy_ms: int = 0
    suspended_ms: int = 0
    reserved_share: int = 0
    held_share: int = 0
    busy_share: int = 0
    suspended_share: int = 0
    charged_share: int = 0  # what counts by the pool's terms: the share-time that the amount is charged for
    device_mib_ms: int = 0  # device memory in use, MiB times milliseconds
    host_mib_ms: int = 0  # host memory that its saved state takes
    moved_mib: int = 0  # by suspends and resumes
    occupied_us: int = 0
    energy_mj: int = 0
    charge_milli: int = 0  # what is charged
    resident_milli: int = 0  # what would be charged if the lease had not been suspended
    whole_milli: int = 0  # what whole devices would have cost for the time that it was reserved

    def add(self, other: Self) -> None:
        for name in FIGURES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def is_empty(self) -> bool:
        return not any(getattr(self, name) for name in FIGURES)


FIGURES = tuple(one.name for one in fields(Usage))
"""The names of the figures, in the order of the ledger's columns."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One row of the ledger's account: figures with their key and their party."""

    key: UsageKey
    party: Party
    usage: Usage

    @classmethod
    def of(cls, hour_s: int, currency: str, party: Party, usage: Usage) -> Self:
        """Return a row that stands for several leases and devices."""
        return cls(UsageKey(hour_s, "", "", currency), party, usage)


def divided(total: int, weights: list[int]) -> list[int]:
    """Divide a whole number by weights, so that the parts add up to it: the running sum is rounded down. All weights 0: all parts 0."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    parts, before, running = [], 0, 0
    for weight in weights:
        running += weight
        until = total * running // whole
        parts.append(until - before)
        before = until
    return parts
