"""A pool's terms: for a hub's users, which groups may use it, when, and how full it may be; for everybody, what is charged.

The broker's seats and its meter apply these; the arbiter does not know them. Terms of use are checked when a seat is taken, never later: a
seat stays through closing time and changes of a group.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from fractional_gpu.config import values
from fractional_gpu.config.budgets import over_budget
from fractional_gpu.config.values import Key
from fractional_gpu.core.metering.budgets import Consequence
from fractional_gpu.core.metering.tariffs import Basis, PriceBand, Tariff
from fractional_gpu.core.seat_packing import PRIOR_USAGE

_PRICE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s+([A-Za-z€$£¥][A-Za-z €$£¥]{0,19})")
_LONGEST_NAME = 200
_MOST_GROUPS = 1000
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY_MINUTES = 24 * 60
_WEEK_MINUTES = 7 * _DAY_MINUTES
_LONGEST_HOURS = 400
_MOST_BANDS = 50
_ALLOWED_HOURS = "allowed: 'always', or days and times such as 'Mon-Fri 08:00-18:00, Sat 10:00-14:00'"
_SPAN = re.compile(
    r"([A-Za-z]{3})(?:-([A-Za-z]{3}))?\s+(\d{2}):([0-5]\d)-(\d{2}):([0-5]\d)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """How the members of a group use a pool: their weight where users compete, and their priority."""

    weight: int = 100
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a whole device for an hour, in thousandths of the unit."""

    milli: int
    unit: str

    def of(self, fraction_milli: int) -> str:
        """Return the price of a fraction, such as `0.20 EUR per hour`."""
        cents = (self.milli * fraction_milli + 5000) // 10_000
        return f"{cents // 100}.{cents % 100:02} {self.unit} per hour"


@dataclass(frozen=True, slots=True)
class OpeningHours:
    """When a pool takes new seats, in the machine's local time. `text` is as configured, such as `Mon-Fri 08:00-18:00`.

    `spans`: first and last (exclusive) minute of the week, Monday first; a span may end in the next week.
    """

    text: str
    spans: tuple[tuple[int, int], ...]

    def is_open(self, minute: int) -> bool:
        """Whether the pool is open in that minute of the week."""
        return any(start <= minute < end or start <= minute + _WEEK_MINUTES < end for start, end in self.spans)

    def next_opening(self, minute: int) -> str:
        """Return the next opening time, such as `Mon 08:00`."""
        start = min((start for start, _ in self.spans), key=lambda start: (start - minute) % _WEEK_MINUTES)
        return f"{_DAYS[start // _DAY_MINUTES]} {start % _DAY_MINUTES // 60:02}:{start % 60:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPool:
    """A pool's terms for a hub's users. Durations in milliseconds, chances in thousandths."""

    groups: Mapping[str, GroupTerms] | None = None  # None: everybody, on equal terms
    hours: OpeningHours | None = None  # None: always
    price: Price | None = None
    price_bands: tuple[PriceBand, ...] = ()
    charge: Basis = Basis.HELD
    suspended_credit_milli: int = 1000
    over_budget: tuple[Consequence, ...] = (Consequence.LOWER_PRIORITY,)
    wait_target_ms: int = 30_000
    wait_bound_milli: int = 50
    waits_when_full: bool = True
    kernels_per_seat: int = 4
    expected_use_milli: int = PRIOR_USAGE.duty_milli

    @property
    def tariff(self) -> Tariff:
        """What the pool charges. Without a price nothing is, and device time is counted alone."""
        price = self.price or Price(milli=0, unit="")
        return Tariff(
            currency=price.unit,
            price_milli=price.milli,
            bands=self.price_bands,
            basis=self.charge,
            credit_milli=self.suspended_credit_milli,
        )

    def terms(self, groups: Iterable[str]) -> tuple[str, GroupTerms] | None:
        """Return the best terms that membership in `groups` gives, with the group's name; None: these groups may not use the pool."""
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


def parse_hours(value: object) -> OpeningHours | None:
    """Return the hours, None for 'always'. Raises ValueError with what is allowed."""
    if value == "always":
        return None
    if not isinstance(value, str) or len(value) > _LONGEST_HOURS or not value.strip():
        raise ValueError(_ALLOWED_HOURS)
    spans: list[tuple[int, int]] = []
    for part in value.split(","):
        spans += _spans(part.strip())
    return OpeningHours(value.strip(), tuple(sorted(spans)))


def _spans(part: str) -> list[tuple[int, int]]:
    match = _SPAN.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is not a time of the week; {_ALLOWED_HOURS}")
    first, last = _day(match[1]), _day(match[2] or match[1])
    start, end = _minute(match[3], match[4]), _minute(match[5], match[6])
    if start in {end, _DAY_MINUTES}:
        raise ValueError(f"{part!r} opens and closes at the same time; {_ALLOWED_HOURS}")
    if end < start:
        end += _DAY_MINUTES  # over midnight
    count = (last - first) % 7 + 1
    days = [(first + number) % 7 for number in range(count)]
    return [(day * _DAY_MINUTES + start, day * _DAY_MINUTES + end) for day in days]


def _day(name: str) -> int:
    try:
        return _DAYS.index(name.capitalize())
    except ValueError:
        raise ValueError(f"{name!r} is not a day; allowed: {', '.join(_DAYS)}") from None


def _minute(hour: str, minute: str) -> int:
    total = int(hour) * 60 + int(minute)
    if total > _DAY_MINUTES:
        raise ValueError(f"{hour}:{minute} is not a time of day; allowed: 00:00 to 24:00")
    return total


def _price(value: object) -> Price | None:
    if value is None:
        return None
    match = _PRICE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("allowed: None, or an amount and a currency such as '0.80 EUR'")
    return Price(milli=int(Fraction(match[1]) * 1000), unit=match[2].strip())


def _price_bands(value: object) -> tuple[PriceBand, ...]:
    allowed = (
        "allowed: prices by times of the week, such as {'Mon-Fri 08:00-18:00': 1.20}, at whole quarters of an hour"
    )
    if not isinstance(value, Mapping) or len(value) > _MOST_BANDS:
        raise ValueError(allowed)
    bands = []
    for hours, price in value.items():
        if (parsed := parse_hours(hours)) is None or any(minute % 15 for span in parsed.spans for minute in span):
            raise ValueError(f"{hours!r}: {allowed}")
        try:
            bands.append(PriceBand(spans=parsed.spans, price_milli=values.hourly_price(price)))
        except ValueError as error:
            raise ValueError(f"{hours!r} has {price!r}: {error}") from None
    return tuple(bands)


def _basis(value: object) -> Basis:
    if isinstance(value, str) and value in {str(one) for one in Basis}:
        return Basis(value)
    raise ValueError("allowed: 'reserved', 'held' or 'busy'")


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
        help="Hub: the groups whose members may use the pool, each with its weight (100 by default; 200 gets twice the share of "
        "100) and its priority. 'everybody': all users, on equal terms.",
    ),
    "hours": Key(
        field="hours",
        parse=parse_hours,
        default="always",
        example="Mon-Fri 08:00-18:00, Sat 10:00-14:00",
        help="Hub: when servers may be started, in the machine's local time, or 'always'. Servers that run at closing time go on.",
    ),
    "price": Key(
        field="price",
        parse=_price,
        default=None,
        example="0.80 EUR",
        help="The price of a whole GPU for an hour, with its currency. Users see their fraction's price before they start a hub's server.",
    ),
    "price_hours": Key(
        field="price_bands",
        parse=_price_bands,
        default={},
        example={"Mon-Fri 08:00-18:00": 1.20},
        help="Other prices at some times of the week, in the same currency and the machine's local time; the first one that fits counts.",
    ),
    "charge": Key(
        field="charge",
        parse=_basis,
        default="held",
        example="reserved",
        help="What is charged: 'held': the time in which a kernel has memory on a GPU; 'busy': the time in which it runs cells there; "
        "'reserved': the time in which the kernel exists, less suspended_credit. Each times its fraction.",
    ),
    "suspended_credit": Key(
        field="suspended_credit_milli",
        parse=values.share,
        default="100%",
        example="80%",
        help="With charge 'reserved': the part of the price that is not charged while the kernel is suspended.",
    ),
    "over_budget": Key(
        field="over_budget",
        parse=over_budget,
        default="lower-priority",
        example="when-free, no-new-seats",
        help="What follows for a user or group whose budget (c.GPUBroker.budgets) is used up: 'lower-priority': others go first; "
        "'when-free': their kernels get a GPU only while nobody else waits; 'no-new-seats': no server with a GPU, and no kernel outside "
        "of one, is started; 'nothing'. No kernel is ended, and no state is lost.",
    ),
    "wait_target": Key(
        field="wait_target_ms",
        parse=values.duration(),
        default="30s",
        example="2m",
        help="Hub: the longest time that a cell should wait for the GPU; see wait_bound.",
    ),
    "wait_bound": Key(
        field="wait_bound_milli",
        parse=values.share,
        default="5%",
        example="1%",
        help="Hub: the share of cells that may wait longer than wait_target. If one more server would exceed it, the pool is full and that "
        "server gets no seat.",
    ),
    "expected_use": Key(
        field="expected_use_milli",
        parse=values.share,
        default="25.7%",
        example="10%",
        help="Hub: the share of the time in which a user's kernels are assumed to use the GPU, until enough is known of that user.",
    ),
    "when_full": Key(
        field="waits_when_full",
        parse=_when_full,
        default="wait",
        example="refuse",
        help="Hub: what happens to a server while the pool is full: 'wait': it waits in the queue; 'refuse': it gets the reason.",
    ),
    "kernels_per_seat": Key(
        field="kernels_per_seat",
        parse=values.whole_number(1, 512),
        default=4,
        example=8,
        help="Hub: how many kernels with a GPU one server may have; together they share what the server was given.",
    ),
}
