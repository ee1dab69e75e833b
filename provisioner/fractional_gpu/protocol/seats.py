"""Messages about seats: what a pool offers a hub's user, and the seat of one server.

A request for a lease carries the seat's token (header `Authorization: Bearer TOKEN`, field `seat`): the broker then takes owner, pool,
priority and weight from the seat, not from the request, and bounds the sum of the seat's kernels by the seat.
"""

from typing import Any

from msgspec import Struct

from fractional_gpu.protocol.messages import HidesSecrets, WaitLine, Workload
from fractional_gpu.protocol.status import SeatStatus


class OfferRequest(Struct, frozen=True, kw_only=True):
    """The user of the hub to whom the pools make an offer, and the user's groups at the hub."""

    owner: str
    groups: list[str] = []
    server: str = ""  # the server that is to start: a seat that it has already does not count
    hub: str = ""  # of the server: the server of the same names at another hub is another one, and its seat counts


class FractionOffer(Struct, frozen=True, kw_only=True):
    """What a pool offers of one fraction."""

    fraction_milli: int
    memory_mib: int
    price: str  # for people, such as `0.20 EUR per hour`, or its span over the week; empty: none
    free: bool  # a seat of this size is granted at once
    sentence: str  # what to expect, for people
    expected_ms: int | None = None  # the wait for a seat, with the bounds of four outcomes of five; None: unknown
    low_ms: int | None = None
    high_ms: int | None = None
    why_not: str = ""  # why this user cannot have it, however full the pool is; empty: the user can
    at_once_milli: int = 1000  # how many of a thousand cells find room when they begin


class PoolOffer(Struct, frozen=True, kw_only=True):
    """What a pool offers one user. `why_not`: why the user cannot use it now; empty: the user can."""

    pool: str
    why_not: str
    hours: str  # empty: always open
    devices: int
    free_mib: int  # that no seat or lease holds now
    capacity_mib: int
    seats: int
    waiting: int
    fractions: list[FractionOffer] = []
    terms: str = ""  # the prices of a whole GPU and what is charged, a sentence; empty: no price
    budget: str = ""  # what is left of the user's budgets, for people
    advice: str = ""  # which share is suggested by what the user's servers have used, a few words; empty: none


class Offers(Struct, frozen=True, kw_only=True):
    """What one user can choose from, and the default choice (empty: nothing is available now)."""

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
    server: str = ""  # the server's name; a server of a hub has one seat: an older one ends
    memory_mib: int | None = None
    uid: int | None = None  # the only uid that may draw on it; None: any process with the token
    ttl_ms: int = 600_000  # it expires after so long unless it is confirmed
    wait_ms: int = 0  # how long to wait while the pool is full, if the pool has a queue
    hub: str = ""  # the address of the hub's API, by which a hub finds its own seats
    # The engine (Slurm, Kubernetes) has decided that it fits: no forecast decides, and it does not wait behind others. What the pool may
    # promise (`oversubscription`), its groups, hours, limits and budgets still count.
    admitted: bool = False
    allowed_devices: list[str] | None = None  # UUIDs of the only devices that its leases may use; None: all of the pool
    workload: Workload | None = None  # only processes of this job or pod draw on the seat, and it ends with it


class SeatProgress(HidesSecrets, WaitLine, frozen=True, kw_only=True):
    """A line of a stream that waits for a seat. The last one is `granted`, with the seat and its token, or `refused`."""

    seat_id: str = ""
    token: str = ""
    memory_mib: int = 0
    priority: int = 0
    warning: str = ""  # with `granted`: why its kernels may not be saved when they idle, a sentence


class SeatList(Struct, frozen=True, kw_only=True):
    """All seats, oldest first, and how many requests wait in each pool."""

    seats: list[SeatStatus] = []
    waiting: dict[str, int] = {}


class PoolChange(Struct, frozen=True, kw_only=True):
    """Keys of a pool with new values, in the configuration's form; the others stay as they are."""

    keys: dict[str, Any] = {}


class PoolKeys(Struct, frozen=True, kw_only=True):
    """A pool's present keys. `changed` names those that differ from the configuration."""

    pool: str
    devices: list[str]  # ids
    keys: dict[str, Any] = {}
    changed: list[str] = []
    note: str = ""  # an effect on seats that an administrator may not expect, a sentence


class PoolList(Struct, frozen=True, kw_only=True):
    """All pools, by name."""

    pools: list[PoolKeys] = []
