"""Messages about lease usage and costs."""

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
    """A query for usage totals.

    `by` is a comma-separated list of names from `USAGE_BY`. If it is empty, the report has one total per currency. `since_s` and `until_s`
    are in seconds since 1970 and select the hours that begin in this range. Names must match exactly; an empty name matches entries with no
    name in that field, such as time when no lease held the device. `seated` restricts the query to hub users (1) or machine users (0). A
    hub user and a machine user with the same name are different users.
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
    advice: bool = False  # adds advice on shares; sums by notebook always include it


class UsageEntry(Struct, frozen=True, kw_only=True):
    """One total in a usage report.

    `of` maps each name in `by` to its value. Times are strings such as `2026-11-24T08:00+0100`, `2026-11-24` or `2026-11`. To distinguish
    users with the same name, `user` always comes with `account`, which is `hub` or `machine`, or empty if there is no user.
    """

    of: dict[str, str]
    currency: str  # of the amounts, or "" if there is no price
    usage: Usage
    carbon_mg: int = 0  # CO2 for the energy, from the configured carbon intensity


class UsageReport(Struct, frozen=True, kw_only=True):
    """Usage totals, sorted by the names in `by`. The user, group, notebook and lease are empty for time when no lease held a device."""

    by: list[str]
    since_s: int
    until_s: int
    entries: list[UsageEntry]
    simulated: bool
    scope: str  # whose figures the report covers: `all`, `group` or `own`
    devices: dict[str, str] = {}  # maps the ids of the broker's present devices to their names
    carbon: str = ""  # a sentence about the source of the carbon figures, or ""
    note: str = ""  # a sentence that says what is missing
    advice: list[
        ShareAdvice
    ] = []  # on request: about the reader's notebooks, or about all notebooks for administrators
    visible: str = "own"  # whose figures users may see (the setting `usage_visible`): `own`, `group` or `all`
    periods: dict[str, tuple[int, int]] = {}  # start and end of each day and month in `entries`, in seconds since 1970


class BudgetStatus(Struct, frozen=True, kw_only=True):
    """A budget of a user or a group.

    Amounts are in milli-GPU milliseconds, thousandths of the currency, or mJ, depending on `unit`.
    """

    kind: str  # "user" or "group"
    name: str
    account: str = ""  # `hub` or `machine` for a user's budget, "" for a group's
    text: str  # as configured: `40 GPU hours per month`
    unit: str  # "gpu-hours", "money" or "energy"
    currency: str
    amount: int
    spent: int
    left: int
    amount_text: str  # the amount as text for people
    spent_text: str
    left_text: str
    since_s: int  # when the budget's window began, in seconds since 1970
    until_s: int | None  # when the budget resets, or None for a rolling window
    warned: bool  # whether most of the budget is spent
    used_up: bool
    sentence: str


class BudgetList(Struct, frozen=True, kw_only=True):
    """The budgets of the requesting user and the user's groups, or all budgets if the user is an administrator."""

    budgets: list[BudgetStatus]
    scope: str  # `all` or `own`


class BudgetExtension(Struct, frozen=True, kw_only=True):
    """Extra budget for a user or a group.

    The amount is text such as `10 GPU hours`. It is valid until `until_s` or, if that is None, until the budget resets. If a hub user and a
    machine user share the name, `account` says which one gets it: `hub`, `machine`, or both if it is empty.
    """

    kind: str
    name: str
    amount: str
    until_s: int | None = None
    account: str = ""


class Cost(Struct, frozen=True, kw_only=True):
    """Usage and costs of a kernel and its user. Each list of `UsageEntry` has one entry per currency."""

    lease_id: str
    pool: str
    simulated: bool
    lease: list[UsageEntry]  # since the kernel started
    today: list[UsageEntry]  # all kernels of its user, today in local time
    month: list[UsageEntry]
    terms: str  # a sentence that says what the pool charges
    now_milli: int = 0  # what an hour of this kernel costs at present, in thousandths of the currency
    currency: str = ""
    carbon: str = ""  # a sentence about the source of the carbon figures, or ""
    note: str = ""  # a sentence that says what is missing
    budgets: list[
        BudgetStatus
    ] = []  # the budgets that the kernel's use counts against, starting with the most spent (as a share)
