"""Messages about seats, and about what pools offer hub users. Each seat is for one server.

A lease request carries the seat's id in the field `seat` and its token in the header `Authorization: Bearer TOKEN`. The broker then takes
the owner, pool, priority and weight from the seat rather than the request, and makes sure that the seat's kernels together stay within the
seat's size.
"""

from typing import Any

from msgspec import Struct

from fractional_gpu.protocol.messages import HidesSecrets, WaitLine, Workload
from fractional_gpu.protocol.status import SeatStatus


class OfferRequest(Struct, frozen=True, kw_only=True):
    """A request for what all pools offer a hub user. It contains the user's name and groups on the hub."""

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
    """A pool's offer to a user. If the user cannot use the pool at the moment, `why_not` explains why. Otherwise, it is empty."""

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
    """The pools a user can choose from, and the default choice, which is empty if nothing is available at the moment."""

    pools: list[PoolOffer] = []
    default_pool: str = ""
    default_fraction_milli: int = 0
    simulated: bool = False


class SeatRequest(Struct, frozen=True, kw_only=True):
    """A request for a seat for one of a user's servers.

    Memory is in MiB, and None means the fraction's share of a device.
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
    """A line in a stream that reports on a wait for a seat. The last line is `granted`, with the seat and its token, or `refused`."""

    seat_id: str = ""
    token: str = ""
    memory_mib: int = 0
    priority: int = 0
    warning: str = ""  # with `granted`: a sentence that explains why its kernels may not be saved when idle


class SeatList(Struct, frozen=True, kw_only=True):
    """All seats, oldest first, and the number of requests waiting in each pool."""

    seats: list[SeatStatus] = []
    waiting: dict[str, int] = {}


class PoolChange(Struct, frozen=True, kw_only=True):
    """New values for some of a pool's keys, in the format of the configuration. Other keys are unchanged."""

    keys: dict[str, Any] = {}


class PoolKeys(Struct, frozen=True, kw_only=True):
    """A pool's current keys. `changed` lists those that differ from the configuration."""

    pool: str
    devices: list[str]  # ids
    keys: dict[str, Any] = {}
    changed: list[str] = []
    note: str = ""  # a sentence that describes an unexpected effect on seats


class PoolList(Struct, frozen=True, kw_only=True):
    """All pools, by name."""

    pools: list[PoolKeys] = []
