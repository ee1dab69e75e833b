"""Messages about leases' use and costs."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from fractional_gpu.core.metering.usage import Usage
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.status import ShareAdvice

USAGE_BY: Final = ("hour", "day", "month", "user", "group", "pool", "device", "notebook", "lease")
USAGE_ONLY: Final = ("user", "group", "pool", "device", "lease", "seated")
_Name = Annotated[str, Meta(max_length=MAX_NAME)]
EVER_S: Final = 10**12 - 1
_Seconds = Annotated[int, Meta(ge=0, le=EVER_S)]


class UsageQuery(Struct, frozen=True, kw_only=True):
    """What to sum by (any of `USAGE_BY`, separated by commas; empty: one sum for each currency), and over which hours.

    `since_s`, `until_s`: hours that begin in this range, seconds since 1970. The other fields: only this one, by exact name (empty: the
    pool's own part). `seated`: only users of the hub (1) or of the machine (0); the same name in both is two users.
    """

    by: str = ""
    since_s: _Seconds = 0
    until_s: _Seconds = EVER_S
    user: _Name | None = None
    group: _Name | None = None
    pool: _Name | None = None
    device: _Name | None = None
    lease: _Name | None = None
    seated: bool | None = None
    advice: bool = False  # with advice on shares, which sums by notebook have anyway


class UsageEntry(Struct, frozen=True, kw_only=True):
    """A sum. `of`: what it is the sum of, by the names of `by`; times as text: `2026-11-24T08:00+0100`, `2026-11-24`, `2026-11`.

    With `user` it has `account`, too: `hub` or `machine`, for two with the same name are two; empty with no user.
    """

    of: dict[str, str]
    currency: str  # of the amounts; empty: no price
    usage: Usage
    carbon_mg: int = 0  # CO2 for the energy, by the carbon that is configured


class UsageReport(Struct, frozen=True, kw_only=True):
    """Sums of leases' use, sorted by the names in `by`. The pool's own part has the user, group, notebook and lease ""."""

    by: list[str]
    since_s: int
    until_s: int
    entries: list[UsageEntry]
    simulated: bool
    scope: str  # whose figures these are: `all`, `group` or `own`
    devices: dict[str, str] = {}  # names, by id, of those that the broker has now
    carbon: str = ""  # a sentence about the source of the carbon figures, or ""
    note: str = ""  # what is missing, a sentence
    advice: list[ShareAdvice] = []  # if requested: about the reader's notebooks, for administrators about all
    visible: str = "own"  # whose figures users may see by the broker's setting `usage_visible`: `own`, `group` or `all`
    periods: dict[str, tuple[int, int]] = {}  # when the days and months of `entries` begin and end, seconds since 1970


class BudgetStatus(Struct, frozen=True, kw_only=True):
    """A budget of a user or a group. Amounts in the unit's measure: milli-GPU milliseconds, thousandths of the currency, or mJ."""

    kind: str  # "user" or "group"
    name: str
    account: str = ""  # of a user: `hub` or `machine`; empty: of a group
    text: str  # as configured: `40 GPU hours per month`
    unit: str  # "gpu-hours", "money" or "energy"
    currency: str
    amount: int
    spent: int
    left: int
    amount_text: str  # the same for people
    spent_text: str
    left_text: str
    since_s: int  # when its window began, seconds since 1970
    until_s: int | None  # when it resets; None: a rolling window
    warned: bool  # most of it is spent
    used_up: bool
    sentence: str


class BudgetList(Struct, frozen=True, kw_only=True):
    """Budgets that the peer may see: its user's and group's, or all for administrators."""

    budgets: list[BudgetStatus]
    scope: str  # `all` or `own`


class BudgetExtension(Struct, frozen=True, kw_only=True):
    """More for one user or group: an amount such as `10 GPU hours`, until then (None: until the budget resets).

    `account`: only for the user of that name of the hub (`hub`) or of the machine (`machine`); empty: for each of the two.
    """

    kind: str
    name: str
    amount: str
    until_s: int | None = None
    account: str = ""


class Cost(Struct, frozen=True, kw_only=True):
    """What a kernel and its user used. Each list has one entry for each currency."""

    lease_id: str
    pool: str
    simulated: bool
    lease: list[UsageEntry]  # since the kernel's beginning
    today: list[UsageEntry]  # of all kernels of its user, local time
    month: list[UsageEntry]
    terms: str  # what the pool charges, a sentence
    now_milli: int = 0  # what an hour of this kernel costs as it is now, thousandths of the currency
    currency: str = ""
    carbon: str = ""  # a sentence about the source of the carbon figures, or ""
    note: str = ""  # what is missing, a sentence
    budgets: list[BudgetStatus] = []  # that the kernel counts for, the one of which the largest part is spent first
