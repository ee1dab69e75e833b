"""Messages about seats: what a pool offers a hub's user, and the seat of one server.

A lease request carries the seat's id (field `seat`) and token (header `Authorization: Bearer TOKEN`). The broker then takes owner, pool,
priority and weight from the seat, not the request, and limits the total of the seat's kernels to the seat.
"""

from typing import Any

from msgspec import Struct

from fractional_gpu.protocol.messages import HidesSecrets, WaitLine, Workload
from fractional_gpu.protocol.status import SeatStatus


class OfferRequest(Struct, frozen=True, kw_only=True):
    """The hub's user to whom the pools make an offer, and the user's groups at the hub."""

    owner: str
    groups: list[str] = []
    server: str = ""  # the server to start, whose existing seat does not count
    hub: str = ""  # the server's; a server of the same name at another hub is a different one, whose seat counts


class FractionOffer(Struct, frozen=True, kw_only=True):
    """A pool's offer for one fraction."""

    fraction_milli: int
    memory_mib: int
    price: str  # for people, such as `0.20 EUR per hour`, or its range over the week; empty: none
    free: bool  # a seat of this size is granted at once
    sentence: str  # what to expect, for people
    expected_ms: int | None = None  # the wait for a seat, with the bounds of 80 % of outcomes; None: unknown
    low_ms: int | None = None
    high_ms: int | None = None
    why_not: str = ""  # why this user can never have it, even in an empty pool; empty: the user can
    at_once_milli: int = 1000  # how many of 1000 cells find room when they begin


class PoolOffer(Struct, frozen=True, kw_only=True):
    """A pool's offer to one user. `why_not`: why the user cannot use it now; empty: the user can."""

    pool: str
    why_not: str
    hours: str  # empty: always open
    devices: int
    free_mib: int  # held by no seat or lease now
    capacity_mib: int
    seats: int
    waiting: int
    fractions: list[FractionOffer] = []
    terms: str = ""  # a sentence on a whole GPU's prices and what is charged; empty: no price
    budget: str = ""  # what is left of the user's budgets, for people
    advice: str = ""  # a few words on the share that the user's past use suggests; empty: none


class Offers(Struct, frozen=True, kw_only=True):
    """The pools that one user can choose from, and the default choice (empty: nothing is available now)."""

    pools: list[PoolOffer] = []
    default_pool: str = ""
    default_fraction_milli: int = 0
    simulated: bool = False


class SeatRequest(Struct, frozen=True, kw_only=True):
    """A seat for one server of a user. Memory in MiB (None: the fraction's share of a device)."""

    owner: str
    pool: str
    fraction_milli: int
    groups: list[str] = []
    server: str = ""  # the server's name; a hub's server has one seat, so an older one ends
    memory_mib: int | None = None
    uid: int | None = None  # the only uid that may use it; None: any process with the token
    ttl_ms: int = 600_000  # how long until it expires unless confirmed
    wait_ms: int = 0  # how long to wait while the pool is full, if the pool has a queue
    hub: str = ""  # the address of the hub's API, by which a hub finds its own seats
    # The engine (Slurm, Kubernetes) decided that it fits: it needs no forecast, and does not wait behind others. What the pool may
    # promise (`oversubscription`), its groups, hours, limits and budgets still count.
    admitted: bool = False
    allowed_devices: list[str] | None = None  # UUIDs of the only devices that its leases may use; None: all of the pool
    workload: Workload | None = None  # only processes of this job or pod draw on the seat, and it ends with it


class SeatProgress(HidesSecrets, WaitLine, frozen=True, kw_only=True):
    """A line of a stream that waits for a seat. The last is `granted`, with the seat and its token, or `refused`."""

    seat_id: str = ""
    token: str = ""
    memory_mib: int = 0
    priority: int = 0
    warning: str = ""  # with `granted`: a sentence why its kernels may not be saved when idle


class SeatList(Struct, frozen=True, kw_only=True):
    """All seats, oldest first, and how many requests wait in each pool."""

    seats: list[SeatStatus] = []
    waiting: dict[str, int] = {}


class PoolChange(Struct, frozen=True, kw_only=True):
    """New values for a pool's keys, in the configuration's form. Other keys stay unchanged."""

    keys: dict[str, Any] = {}


class PoolKeys(Struct, frozen=True, kw_only=True):
    """A pool's current keys. `changed` names those that differ from the configuration."""

    pool: str
    devices: list[str]  # ids
    keys: dict[str, Any] = {}
    changed: list[str] = []
    note: str = ""  # a sentence about an unexpected effect on seats


class PoolList(Struct, frozen=True, kw_only=True):
    """All pools, by name."""

    pools: list[PoolKeys] = []
