"""Messages about seats: what a pool offers to a user of the hub, and the seat of one server.

A lease request carries the seat's id in the field `seat` and its token in the header `Authorization: Bearer TOKEN`. The broker then takes
owner, pool, priority and weight from the seat and not from the request, and limits the total size of the seat's kernels to the size of the
seat.
"""

from typing import Any

from msgspec import Struct

from fractional_gpu.protocol.messages import HidesSecrets, WaitLine, Workload
from fractional_gpu.protocol.status import SeatStatus


class OfferRequest(Struct, frozen=True, kw_only=True):
    """A request for the offers of all pools to one user of the hub. It names the user and the user's groups at the hub."""

    owner: str
    groups: list[str] = []
    server: str = ""  # the server to start; its existing seat does not count
    hub: str = ""  # the hub of that server; a server of the same name at another hub counts separately


class FractionOffer(Struct, frozen=True, kw_only=True):
    """A pool's offer for one fraction."""

    fraction_milli: int
    memory_mib: int
    price: str  # for people, such as `0.20 EUR per hour`, or the range of prices over the week; "" if there is no price
    free: bool  # whether a seat of this size is granted at once
    sentence: str  # what to expect, for people
    expected_ms: int | None = None  # the wait for a seat, with bounds that hold 80 % of outcomes, or None if unknown
    low_ms: int | None = None
    high_ms: int | None = None
    why_not: str = ""  # why this user can never have this fraction, even in an empty pool, or "" if the user can
    at_once_milli: int = 1000  # how many of 1000 cells find room when they begin


class PoolOffer(Struct, frozen=True, kw_only=True):
    """A pool's offer to one user. `why_not` explains why the user cannot use the pool now, and is empty if the user can."""

    pool: str
    why_not: str
    hours: str  # opening hours, or "" if the pool is always open
    devices: int
    free_mib: int  # what no seat or lease holds now
    capacity_mib: int
    seats: int
    waiting: int
    fractions: list[FractionOffer] = []
    terms: str = ""  # a sentence that says what is charged and what a whole GPU costs, or "" if there is no price
    budget: str = ""  # what is left of the user's budgets, for people
    advice: str = ""  # a few words on the share that the user's past use suggests, or ""


class Offers(Struct, frozen=True, kw_only=True):
    """The pools that one user can choose from, and the default choice, which is empty if nothing is available now."""

    pools: list[PoolOffer] = []
    default_pool: str = ""
    default_fraction_milli: int = 0
    simulated: bool = False


class SeatRequest(Struct, frozen=True, kw_only=True):
    """A request for a seat for one server of a user.

    Memory is in MiB. None stands for the fraction's share of a device.
    """

    owner: str
    pool: str
    fraction_milli: int
    groups: list[str] = []
    server: str = ""  # the server's name; a server of a hub has one seat, so its older seat ends
    memory_mib: int | None = None
    uid: int | None = None  # the only uid that may use the seat; None for any process with the token
    ttl_ms: int = 600_000  # the seat expires after this time unless it is confirmed
    wait_ms: int = 0  # how long to wait while the pool is full, if the pool has a queue
    hub: str = ""  # the address of the hub's API, by which a hub finds its own seats
    # The engine (Slurm or Kubernetes) has decided that the seat fits, so the seat needs no forecast and does not wait behind others. The
    # pool's `oversubscription`, groups, hours, limits and budgets still count.
    admitted: bool = False
    allowed_devices: list[str] | None = None  # UUIDs of the only devices for its leases; None for the whole pool
    workload: Workload | None = None  # only processes of this job or pod draw on the seat, which ends with the workload


class SeatProgress(HidesSecrets, WaitLine, frozen=True, kw_only=True):
    """A line of a stream that reports the wait for a seat. The last line is `granted`, with the seat and its token, or `refused`."""

    seat_id: str = ""
    token: str = ""
    memory_mib: int = 0
    priority: int = 0
    warning: str = ""  # with `granted`: a sentence that explains why its kernels may not be saved when idle


class SeatList(Struct, frozen=True, kw_only=True):
    """All seats, oldest first, and how many requests wait in each pool."""

    seats: list[SeatStatus] = []
    waiting: dict[str, int] = {}


class PoolChange(Struct, frozen=True, kw_only=True):
    """New values for some keys of a pool, in the form of the configuration. Other keys stay unchanged."""

    keys: dict[str, Any] = {}


class PoolKeys(Struct, frozen=True, kw_only=True):
    """The current keys of a pool. `changed` names the keys that differ from the configuration."""

    pool: str
    devices: list[str]  # ids
    keys: dict[str, Any] = {}
    changed: list[str] = []
    note: str = ""  # a sentence that describes an unexpected effect on seats


class PoolList(Struct, frozen=True, kw_only=True):
    """All pools, by name."""

    pools: list[PoolKeys] = []
