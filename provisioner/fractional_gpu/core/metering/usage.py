"""Defines and adds up the meter's figures, which record how much a lease used in one hour, on one device or without a device.

All figures are integer totals. Hourly figures add up exactly to the totals for a day, a user or a pool.

- Times (`..._ms`) are per lease. If a lease has several devices, they are counted only once, for the first device.
- Shares (`..._share`) are these times multiplied by the lease's share, in milli-GPU milliseconds. They are counted for each device.
- `reserved` figures accumulate while the lease has a process, in any state; `held` figures while it has a reservation on a device,
  including during swaps; `busy` figures while it holds a device and runs a cell; and `suspended` figures while its state is saved in host
  memory.
- `occupied_us` is the device's time, divided among the leases that hold the device in proportion to their shares. While no lease holds it,
  its time is attributed to the pool. So for each device, the figures of all leases and of the pool add up to the time that has passed.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple, Self

HOUR_MS = 3_600_000
SHARE_HOUR = 1000 * HOUR_MS
"""One hour's use of a whole device, in milli-GPU milliseconds."""
MJ_PER_KWH = 3_600_000_000
"""Millijoules in a kilowatt-hour."""
ACCOUNTS = ("machine", "hub")
"""The kinds of accounts an owner can have, indexed by `Party.seated`. Accounts of both kinds can have the same name."""


class UsageKey(NamedTuple):
    """The lease, device, hour and currency of a set of figures."""

    hour_s: int  # start of the local hour, seconds since 1970
    lease_id: str  # empty for the pool's own figures, while no lease held the device
    device_id: str  # empty if the lease held no device
    currency: str  # the currency of the amounts; empty if the pool has no price


@dataclass(frozen=True, slots=True)
class Party:
    """The pool, owner and group under which a lease's usage is reported."""

    pool: str
    owner: str = ""
    group: str = ""
    label: str = ""  # the notebook, as shown to people
    seated: bool = False  # the owner is a hub user, not a system user


@dataclass(slots=True, kw_only=True)
class Usage:
    """A set of figures that can be added to others. Amounts (`..._milli`) are in thousandths of the currency unit."""

    reserved_ms: int = 0
    held_ms: int = 0
    busy_ms: int = 0
    suspended_ms: int = 0
    reserved_share: int = 0
    held_share: int = 0
    busy_share: int = 0
    suspended_share: int = 0
    charged_share: int = 0  # the share-time that the pool's tariff charges for
    device_mib_ms: int = 0  # device memory in use, MiB times milliseconds
    host_mib_ms: int = 0  # host memory used by saved state, MiB times milliseconds
    moved_mib: int = 0  # moved by suspends and resumes
    occupied_us: int = 0
    energy_mj: int = 0
    charge_milli: int = 0  # the amount charged
    resident_milli: int = 0  # the amount if the lease had not been suspended
    whole_milli: int = 0  # the amount for whole devices during the reserved time

    def add(self, other: Self) -> None:
        for name in FIGURES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def is_empty(self) -> bool:
        return not any(getattr(self, name) for name in FIGURES)


FIGURES = tuple(one.name for one in fields(Usage))
"""The names of the figures, in the order of the ledger's columns."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """A row of the ledger: figures with their key and party."""

    key: UsageKey
    party: Party
    usage: Usage

    @classmethod
    def of(cls, hour_s: int, currency: str, party: Party, usage: Usage) -> Self:
        """Return a row with the totals for several leases and devices."""
        return cls(UsageKey(hour_s, "", "", currency), party, usage)


def divided(total: int, weights: list[int]) -> list[int]:
    """Divide `total` in proportion to the weights. The parts add up to `total`, or are all 0 if all weights are 0.

    The running total is rounded down, rather than each part.
    """
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
