"""Builds a report's tables for terminals and pages: column names, formatted figures, rows and totals.

In a column, the displayed parts add up to the displayed total. Amounts are exact. To round other figures, the running sums are rounded, and
each part is displayed as the difference between two of them. The last digit of a part may therefore be off by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fractional_gpu.core.metering.usage import ACCOUNTS, MJ_PER_KWH, SHARE_HOUR
from fractional_gpu.protocol.accounts import BudgetStatus, UsageEntry, UsageReport
from fractional_gpu.protocol.status import ShareAdvice
from fractional_gpu.reports.sums import ACCOUNT, of_leases, of_no_lease, rolled_up

SCOPES: Final = {
    "own": "Your own figures",
    "group": "The figures of your group",
    "all": "The figures of all users",
}
ADVICE_BASIS: Final = "Based on the recorded days (docs/measuring.md); it does not change any shares"
_US_PER_HOUR: Final = 3_600_000_000
_GIB_HOUR: Final = 1024 * 3_600_000
_MG_PER_KG: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures.

    The displayed value is the figure divided by `unit`. If `unit` is 0, it is an exact amount. Columns with `resource` set are shown in the
    second table.
    """

    name: str
    value: Callable[[UsageEntry], int]
    unit: int
    says: str
    resource: bool = False
    decimals: int = 2


@dataclass(frozen=True, slots=True)
class Line:
    names: tuple[str, ...]
    cells: tuple[str, ...]
    kind: str = ""  # `rest` for what no lease held, or `total`


@dataclass(frozen=True, slots=True)
class Table:
    by: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]


HOURS: Final = (
    Column("reserved", lambda one: one.usage.reserved_share, SHARE_HOUR, "GPU hours while kernels existed"),
    Column("held", lambda one: one.usage.held_share, SHARE_HOUR, "GPU hours with a reservation on a GPU"),
    Column("busy", lambda one: one.usage.busy_share, SHARE_HOUR, "GPU hours in which cells ran on a GPU"),
    Column("suspended", lambda one: one.usage.suspended_share, SHARE_HOUR, "GPU hours while suspended to host memory"),
    Column("charged", lambda one: one.usage.charged_share, SHARE_HOUR, "GPU hours charged under the pool's terms"),
)
BUSY_PERCENT: Final = Column(
    "busy %", lambda one: one.usage.busy_share, -1, "share of the held GPU hours that were busy"
)
AMOUNT: Final = Column("amount", lambda one: one.usage.charge_milli, 0, "what is charged")
RESOURCES: Final = (
    Column("devices h", lambda one: one.usage.occupied_us, _US_PER_HOUR, "device hours, divided among their kernels", resource=True),
    Column("memory GiB h", lambda one: one.usage.device_mib_ms, _GIB_HOUR, "device memory in use, over time", resource=True),
    Column("saved GiB h", lambda one: one.usage.host_mib_ms, _GIB_HOUR, "host memory of suspended kernels, over time", resource=True),
    Column("moved GiB", lambda one: one.usage.moved_mib, 1024, "data moved by suspends and resumes", resource=True),
    Column("energy kWh", lambda one: one.usage.energy_mj, MJ_PER_KWH, "energy that the devices used", resource=True, decimals=3),
)  # fmt: skip
CARBON: Final = Column(
    "CO2 kg", lambda one: one.carbon_mg, _MG_PER_KG, "CO2 of the energy, by the configured figures", resource=True, decimals=3
)  # fmt: skip


def tabulated(report: UsageReport, by: Sequence[str], *, only: Callable[[Column], bool] | None = None) -> Table:
    """Return a table of totals for leases, for time without a lease, and for both. The report must be grouped at least by user.

    Amounts are omitted if nothing has a price, and CO2 is omitted if no figures for it are configured.
    """
    finer = rolled_up(report.entries, list(dict.fromkeys([*by, "user"])))
    parts, rest = rolled_up(of_leases(finer), by), rolled_up(of_no_lease(finer), [])
    totals = rolled_up(report.entries, [])
    priced = [AMOUNT] if any(one.currency for one in totals) else []
    columns = [*HOURS, BUSY_PERCENT, *priced, *RESOURCES, *([CARBON] if report.carbon else [])]
    columns = [one for one in columns if only is None or only(one)]
    named = names_of(report)
    lines: list[Line] = []
    closing: list[Line] = []
    for total in totals:
        mine = [one for one in (*parts, *rest) if one.currency == total.currency]
        cells = [_shown(column, mine, total) for column in columns]
        for number, entry in enumerate(mine):
            shown = tuple(texts[number] for texts in cells)
            if entry in rest:
                lines.append(Line(_first("no lease", by), shown, "rest"))
            else:
                lines.append(Line(tuple(named(one, entry) for one in by) or ("all kernels",), shown))
        closing.append(Line(_first("total", by), tuple(texts[-1] for texts in cells), "total"))
    return Table(tuple(by) or ("",), tuple(columns), (*lines, *closing))


def _first(name: str, by: Sequence[str]) -> tuple[str, ...]:
    return (name, *([""] * (len(by) - 1)))


def _shown(column: Column, parts: Sequence[UsageEntry], total: UsageEntry) -> list[str]:
    if column.unit == 0:
        return [amount_text(column.value(one), one.currency) for one in (*parts, total)]
    if column.unit < 0:
        return [percent_text(one.usage.busy_share, one.usage.held_share) for one in (*parts, total)]
    values = [column.value(one) for one in parts]
    return [*decimals(values, column.unit, column.decimals), *decimals([sum(values)], column.unit, column.decimals)]


def decimals(values: Sequence[int], unit: int, places: int) -> list[str]:
    """Format values in `unit` with `places` decimals. Rounds the running sums (half up), so that the results add up to their total."""
    step, shown, before, running = 10**places, [], 0, 0
    for value in values:
        running += value
        until = (2 * running * step + unit) // (2 * unit)
        whole, rest = divmod(until - before, step)
        shown.append(f"{whole:,}.{rest:0{places}}")
        before = until
    return shown


def amount_text(milli: int, currency: str = "") -> str:
    """Format an amount given in thousandths, without rounding: for example, `1,234.500 EUR`. Without a currency, return `-`."""
    if not currency:
        return "-"
    return f"{milli // 1000:,}.{milli % 1000:03} {currency}"


def percent_text(share: int, of: int) -> str:
    return f"{(200 * share + of) // (2 * of)} %" if of else "-"


def names_of(report: UsageReport) -> Callable[[str, UsageEntry], str]:
    """Return a function that formats an entry's value in a column, adding `hub` or `machine` to user names if needed."""
    is_mixed = len({one.of.get(ACCOUNT, "") for one in report.entries if one.of.get("user")}) > 1

    def name(column: str, entry: UsageEntry) -> str:
        value, account = entry.of[column], entry.of.get(ACCOUNT, "")
        if not value:
            return {"device": "on no device", "group": "no group"}.get(column, "-")
        if column == "device":
            return f"{report.devices[value]} ({value})" if report.devices.get(value) else value
        if column == "lease":
            return value[:8]
        return f"{value} ({account})" if is_mixed and column == "user" and account else value

    return name


def budget_names(budgets: Sequence[BudgetStatus]) -> Callable[[BudgetStatus], str]:
    """Return a function that names a budget's user or group.

    It returns `user ada`, or `user ada (hub)` if there are users from both the hub and the machine.
    """
    is_mixed = len({one.account for one in budgets if one.kind == "user"}) > 1

    def name(budget: BudgetStatus) -> str:
        account = f" ({budget.account})" if is_mixed and budget.account else ""
        return f"{budget.kind} {budget.name}{account}"

    return name


def advice_names(advice: Sequence[ShareAdvice]) -> Callable[[ShareAdvice], str]:
    """Return a function that names the notebook and, if there are several users, its user (on the hub or the machine)."""
    several = len({(one.owner, one.seated) for one in advice}) > 1
    is_mixed = len({one.seated for one in advice}) > 1

    def name(one: ShareAdvice) -> str:
        notebook = one.notebook or "notebooks without a name"
        account = f" ({ACCOUNTS[one.seated]})" if is_mixed else ""
        return f"{one.owner}{account}, {notebook}" if several else notebook

    return name


def scope_text(report: UsageReport) -> str:
    said = SCOPES.get(report.scope, report.scope)
    return f"{said}; simulated: no real GPU was used." if report.simulated else f"{said}."
