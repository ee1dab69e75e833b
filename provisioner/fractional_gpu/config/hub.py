"""What a pool means to the users of a hub: who may use it, when, for what price, and how full it may be.

The arbiter knows nothing of these; the broker's seats do. The terms are enforced where a seat is taken, never later: a seat that was
given outlives closing time and changes of a group.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from fractional_gpu.config import values
from fractional_gpu.config.hours import OpeningHours, parse_hours
from fractional_gpu.config.keys import Key
from fractional_gpu.core.seat_packing import PRIOR

__all__ = ["HUB_KEYS", "GroupTerms", "HubPool", "Price"]

_PRICE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s+([A-Za-z€$£¥][A-Za-z €$£¥]{0,19})")
_LONGEST_NAME = 200
_MOST_GROUPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """How the members of a group use a pool: their share among others where they compete, and their priority."""

    weight: int = 100
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Of a whole device for an hour, in thousandths of the unit."""

    milli: int
    unit: str

    def of(self, fraction_milli: int) -> str:
        """Return the price of a fraction for an hour, as `0.20 EUR per hour`."""
        cents = (self.milli * fraction_milli + 5000) // 10_000
        return f"{cents // 100}.{cents % 100:02} {self.unit} per hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPool:
    """A pool's terms for a hub's users. Durations in milliseconds, chances in thousandths."""

    groups: Mapping[str, GroupTerms] | None = None  # None: everybody, on equal terms
    hours: OpeningHours | None = None  # None: always
    price: Price | None = None
    wait_target_ms: int = 30_000
    wait_bound_milli: int = 50
    waits_when_full: bool = True
    kernels_per_seat: int = 4
    expected_use_milli: int = PRIOR.duty_milli

    def terms(self, groups: Iterable[str]) -> tuple[str, GroupTerms] | None:
        """Return the group through which somebody uses the pool and its terms, the best ones; None: they may not use it."""
        if self.groups is None:
            return "", GroupTerms()
        mine = [(name, self.groups[name]) for name in groups if name in self.groups]
        return max(mine, key=lambda each: (each[1].priority, each[1].weight, each[0]), default=None)


def _groups(value: object) -> Mapping[str, GroupTerms] | None:
    if value == "everybody":
        return None
    allowed = "allowed: 'everybody', or groups such as {'students': {}, 'staff': {'weight': 200, 'priority': 10}}"
    if not isinstance(value, Mapping) or not 0 < len(value) <= _MOST_GROUPS:
        raise ValueError(allowed)
    return {_name(name, allowed): _terms(name, raw, allowed) for name, raw in value.items()}


def _name(name: object, allowed: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ValueError(f"{name!r} is not a group's name; {allowed}")
    return name


def _terms(name: str, raw: object, allowed: str) -> GroupTerms:
    if not isinstance(raw, Mapping) or not set(raw) <= {"weight", "priority"}:
        raise ValueError(f"group {name!r} has {raw!r}; {allowed}")
    try:
        return GroupTerms(
            weight=values.whole_number(1, 10_000)(raw.get("weight", 100)),
            priority=values.whole_number(-1000, 1000)(raw.get("priority", 0)),
        )
    except ValueError as error:
        raise ValueError(f"group {name!r}: {error} (weight from 1 to 10000, priority from -1000 to 1000)") from None


def _price(value: object) -> Price | None:
    if value is None:
        return None
    match = _PRICE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("allowed: None, or an amount and a currency such as '0.80 EUR'")
    return Price(milli=int(Fraction(match[1]) * 1000), unit=match[2].strip())


def _when_full(value: object) -> bool:
    if value not in ("wait", "refuse"):
        raise ValueError("allowed: 'wait' or 'refuse'")
    return value == "wait"


HUB_KEYS: Mapping[str, Key] = {
    "groups": Key(
        field="groups",
        parse=_groups,
        default="everybody",
        example={"students": {}, "staff": {"weight": 200, "priority": 10}},
        help="Hub: which groups may use the pool, their weight where they compete (100 is usual) and their priority.",
    ),
    "hours": Key(
        field="hours",
        parse=parse_hours,
        default="always",
        example="Mon-Fri 08:00-18:00, Sat 10:00-14:00",
        help="Hub: when servers may be started, in the machine's own time. Those that run at closing time run on.",
    ),
    "price": Key(
        field="price",
        parse=_price,
        default=None,
        example="0.80 EUR",
        help="Hub: what a whole GPU costs for an hour; shown, with the fraction's share of it, before a server is started.",
    ),
    "wait_target": Key(
        field="wait_target_ms",
        parse=values.duration(),
        default="30s",
        example="2m",
        help="Hub: a cell should not wait longer than this for the GPU ...",
    ),
    "wait_bound": Key(
        field="wait_bound_milli",
        parse=values.share,
        default="5%",
        example="1%",
        help="Hub: ... with a greater chance than this, or the pool is full: no further server gets a seat.",
    ),
    "expected_use": Key(
        field="expected_use_milli",
        parse=values.share,
        default="25.7%",
        example="10%",
        help="Hub: the share of the time in which somebody's kernels are busy with the GPU, until enough is known of them.",
    ),
    "when_full": Key(
        field="waits_when_full",
        parse=_when_full,
        default="wait",
        example="refuse",
        help="Hub: what happens to a server that finds the pool full: 'wait' in the queue, or 'refuse' it with the reason.",
    ),
    "kernels_per_seat": Key(
        field="kernels_per_seat",
        parse=values.whole_number(1, 512),
        default=4,
        example=8,
        help="Hub: how many kernels with a GPU one server may have; together they have what the server was given.",
    ),
}
