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
    """A query for sums of use. `by`: a comma-separated list from `USAGE_BY`; empty: one sum per currency.

    `since_s`, `until_s`: hours that begin in this range, seconds since 1970. Other fields limit the sum to an exact name (empty: the
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
    advice: bool = False  # adds advice on shares, which sums by notebook always have


class UsageEntry(Struct, frozen=True, kw_only=True):
    """A sum. `of`: the value of each name in `by`; times as text: `2026-11-24T08:00+0100`, `2026-11-24`, `2026-11`.

    `user` comes with `account`, `hub` or `machine`, to tell apart users of the same name; empty with no user.
    """

    of: dict[str, str]
    currency: str  # of the amounts; empty: no price
    usage: Usage
    carbon_mg: int = 0  # CO2 for the energy, by the configured carbon intensity


class UsageReport(Struct, frozen=True, kw_only=True):
    """Sums of leases' use, sorted by the names in `by`. The pool's own part has the user, group, notebook and lease ""."""

    by: list[str]
    since_s: int
    until_s: int
    entries: list[UsageEntry]
    simulated: bool
    scope: str  # whose figures these are: `all`, `group` or `own`
    devices: dict[str, str] = {}  # names of the broker's present devices, by id
    carbon: str = ""  # a sentence about the source of the carbon figures, or ""
    note: str = ""  # what is missing, a sentence
    advice: list[ShareAdvice] = []  # if requested: on the reader's notebooks, or all for administrators
    visible: str = "own"  # whose figures users may see (the setting `usage_visible`): `own`, `group` or `all`
    periods: dict[str, tuple[int, int]] = {}  # where days and months of `entries` begin and end, seconds since 1970


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
    """The budgets that the peer may see: its user's and group's, or all for administrators."""

    budgets: list[BudgetStatus]
    scope: str  # `all` or `own`


class BudgetExtension(Struct, frozen=True, kw_only=True):
    """More budget for a user or group: an amount such as `10 GPU hours`, and until when (None: the reset).

    `account`: only for the user of that name on the hub (`hub`) or the machine (`machine`); empty: for both.
    """

    kind: str
    name: str
    amount: str
    until_s: int | None = None
    account: str = ""


class Cost(Struct, frozen=True, kw_only=True):
    """The use and costs of a kernel and its user. Each list has one entry per currency."""

    lease_id: str
    pool: str
    simulated: bool
    lease: list[UsageEntry]  # since the kernel's start
    today: list[UsageEntry]  # of all kernels of its user, local time
    month: list[UsageEntry]
    terms: str  # what the pool charges, a sentence
    now_milli: int = 0  # the present cost of an hour of this kernel, thousandths of the currency
    currency: str = ""
    carbon: str = ""  # a sentence about the source of the carbon figures, or ""
    note: str = ""  # what is missing, a sentence
    budgets: list[BudgetStatus] = []  # that the kernel counts against, the most spent (as a share) first
