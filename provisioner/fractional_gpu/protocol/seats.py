"""Messages about seats: what a hub's users are offered, and what one server of theirs is given. Standard library only.

Routes (all under /v1; `S` is a seat id; administrators only, see DESIGN's Safety):

    POST   /v1/offers        OfferRequest -> Offers               the pools as one user would meet them
    POST   /v1/seats         SeatRequest  -> stream of SeatProgress lines (NDJSON), the last one `granted` or `refused`
    GET    /v1/seats                      -> SeatList
    POST   /v1/seats/S/confirm            -> SeatStatus           it is saved where it was taken: it no longer expires
    DELETE /v1/seats/S                    -> Done                 idempotent
    GET    /v1/pools                      -> PoolList             every key of every pool, as it holds now
    POST   /v1/pools/P       PoolChange   -> PoolKeys             until the broker is started again

The seat's token goes with `POST /v1/leases` (header `Authorization: Bearer TOKEN`, field `seat`): the broker then takes owner, pool,
priority and weight from the seat, whatever the request says, and the kernels of a seat never have more than it together.
"""

from typing import Any

from msgspec import Struct

from fractional_gpu.protocol.messages import HidesSecrets, ProgressKind, SeatStatus, WaitLine

__all__ = [
    "FractionOffer",
    "OfferRequest",
    "Offers",
    "PoolChange",
    "PoolKeys",
    "PoolList",
    "PoolOffer",
    "ProgressKind",
    "SeatList",
    "SeatProgress",
    "SeatRequest",
    "SeatStatus",
]


class OfferRequest(Struct, frozen=True, kw_only=True):
    """Who asks: a user of the hub, and the groups that the hub has put them into."""

    owner: str
    groups: list[str] = []
    server: str = ""  # the server that is to be started: what it may have already does not count


class FractionOffer(Struct, frozen=True, kw_only=True):
    """A fraction as one user would get it now."""

    fraction_milli: int
    memory_mib: int
    price: str  # for people, such as `0.20 EUR per hour`; empty: none
    free: bool  # a seat of this size would be given at once
    sentence: str  # what to expect, for people
    expected_ms: int | None = None  # how long a seat is waited for; None: cannot be told
    why_not: str = ""  # why this user cannot have it, whoever else is there; empty: they can
    at_once_milli: int = 1000  # how many of a thousand cells would find room when they begin


class PoolOffer(Struct, frozen=True, kw_only=True):
    """A pool as one user would meet it. `why_not`: why they cannot use it now; empty: they can."""

    pool: str
    why_not: str
    hours: str  # empty: always open
    devices: int
    free_mib: int  # that nobody holds now
    capacity_mib: int
    seats: int
    waiting: int
    fractions: list[FractionOffer] = []


class Offers(Struct, frozen=True, kw_only=True):
    """What one user can choose from, and what is chosen for who does not care (empty: nothing can be had now)."""

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
    server: str = ""  # the server's name; it has one seat at most, an older one ends
    memory_mib: int | None = None
    uid: int | None = None  # the only user of the machine who may draw on it; None: whoever has the token
    ttl_ms: int = 600_000  # how long it lives unless it is confirmed
    wait_ms: int = 0  # how long to wait for a full pool that lets wait
    hub: str = ""  # who takes it, so that a hub finds its own: the address of its API


class SeatProgress(HidesSecrets, WaitLine, frozen=True, kw_only=True):
    """A line of a stream that waits for a seat. The last one is `granted`, with the seat and its token, or `refused`."""

    seat_id: str = ""
    token: str = ""
    memory_mib: int = 0
    priority: int = 0


class SeatList(Struct, frozen=True, kw_only=True):
    """All seats, oldest first, and how many wait for one in each pool."""

    seats: list[SeatStatus] = []
    waiting: dict[str, int] = {}


class PoolChange(Struct, frozen=True, kw_only=True):
    """Keys of a pool with their new values, in the form that the configuration has; the others stay as they are."""

    keys: dict[str, Any] = {}


class PoolKeys(Struct, frozen=True, kw_only=True):
    """A pool's keys as they hold now. `changed` names those that differ from the configuration."""

    pool: str
    devices: list[str]  # ids
    keys: dict[str, Any] = {}
    changed: list[str] = []
    note: str = ""  # what they mean for seats that an administrator may not expect, a sentence


class PoolList(Struct, frozen=True, kw_only=True):
    """All pools, by name."""

    pools: list[PoolKeys] = []
