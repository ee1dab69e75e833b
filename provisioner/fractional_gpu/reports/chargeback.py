"""Converts a report to CSV for chargeback systems, following the FinOps Open Cost and Usage Specification (FOCUS), version 1.2.

There is one row for each combination of hour or day, user, group, pool, currency and any other requested columns. The CSV has all 21
mandatory columns of FOCUS 1.2 and some others (docs/costs.md). The prefix `x_` marks our own columns. Numbers are never converted to
floats, so the `BilledCost` values add up to the exact total.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR
from fractional_gpu.protocol.accounts import UsageEntry, UsageReport
from fractional_gpu.reports.columns import decimals
from fractional_gpu.reports.periods import bounds
from fractional_gpu.reports.sums import ACCOUNT, rolled_up

NO_CURRENCY: Final = "XXX"
"""ISO 4217's code for no currency. FOCUS requires a currency code."""
_USERS: Final = {"": "user", "machine": "user", "hub": "hub-user"}
"""Prefixes of user ids, by account. A hub user and a machine user with the same name are billed separately."""
_HOURS: Final = "GPU-Hours"
_PLACES: Final = 6
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
COLUMNS: Final = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd",
    "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost",
    "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ResourceId", "ResourceName", "ResourceType",
    "ServiceCategory", "ServiceName", "SubAccountId", "SubAccountName", "Tags", "x_ReservedGpuHours", "x_BusyGpuHours",
    "x_SuspendedGpuHours", "x_EnergyKwh", "x_CarbonGrams", "x_CostIfResident", "x_CostOfWholeGpus", "x_Simulated",
)  # fmt: skip
_Figure = Callable[[UsageEntry], int]
_MEASURED: Final[dict[str, tuple[_Figure, int]]] = {
    "ConsumedQuantity": (lambda one: one.usage.held_share, SHARE_HOUR),
    "PricingQuantity": (lambda one: one.usage.charged_share, SHARE_HOUR),
    "x_ReservedGpuHours": (lambda one: one.usage.reserved_share, SHARE_HOUR),
    "x_BusyGpuHours": (lambda one: one.usage.busy_share, SHARE_HOUR),
    "x_SuspendedGpuHours": (lambda one: one.usage.suspended_share, SHARE_HOUR),
    "x_EnergyKwh": (lambda one: one.usage.energy_mj, MJ_PER_KWH),
    "x_CarbonGrams": (lambda one: one.carbon_mg, 1000),
}


def grain(by: Sequence[str]) -> list[str]:
    time = "hour" if "hour" in by else "day"
    return [time, "user", "group", "pool", *(one for one in ("device", "notebook", "lease") if one in by)]


def as_csv(report: UsageReport, by: Sequence[str], *, provider: str) -> str:
    """Return the rows as CSV, with a header. The report must be at least as detailed as `grain(by)`.

    `provider` is the name of the billing party, such as the machine.
    """
    entries = rolled_up(report.entries, grain(by))
    measured = {
        name: [text.replace(",", "") for text in decimals([value(one) for one in entries], unit, _PLACES)]
        for name, (value, unit) in _MEASURED.items()
    }
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\r\n")
    writer.writeheader()
    for number, entry in enumerate(entries):
        writer.writerow(_row(report, entry, provider) | {name: texts[number] for name, texts in measured.items()})
    return out.getvalue()


def _row(report: UsageReport, entry: UsageEntry, provider: str) -> dict[str, str]:
    of = entry.of
    when = of.get("hour") or of["day"]
    # Use this machine's time zone if the broker does not name one.
    begin_s, end_s = report.periods.get(when) or bounds(when)
    month_s, next_month_s = report.periods.get(when[:7]) or bounds(when[:7])
    cost = cost_text(entry.usage.charge_milli)
    user = of["user"]
    # The bill goes to the group, to a user without a group, or to the pool for what no lease held.
    if not user:
        account_type, account = "Pool", of["pool"]
    else:
        account_type, account = ("Group", of["group"]) if of["group"] else ("User", user)
    what = "GPU time of notebook kernels" if user else "GPU time that no lease held"
    tags = {name: value for name, value in of.items() if name not in ("hour", "day") and value}
    user_id = f"{_USERS[of.get(ACCOUNT, '')]}/{user}"
    return {
        "BilledCost": cost,
        "BillingAccountId": user_id if account_type == "User" else f"{account_type.lower()}/{account}",
        "BillingAccountName": _name(account),
        "BillingAccountType": account_type,
        "BillingCurrency": entry.currency or NO_CURRENCY,
        "BillingPeriodEnd": _moment(next_month_s),
        "BillingPeriodStart": _moment(month_s),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"{what}, pool {of['pool']}{' (simulated)' if report.simulated else ''}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": _moment(end_s),
        "ChargePeriodStart": _moment(begin_s),
        "ConsumedUnit": _HOURS,
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "InvoiceIssuerName": provider,
        "ListCost": cost,
        "PricingUnit": _HOURS,
        "ProviderName": provider,
        "PublisherName": "jupyter-fractional-gpu",
        **_resource(report, of),
        "ServiceCategory": "Compute",
        "ServiceName": "GPU notebooks",
        "SubAccountId": user_id if user else "",
        "SubAccountName": _name(user),
        "Tags": json.dumps(tags, ensure_ascii=False),
        "x_CostIfResident": cost_text(entry.usage.resident_milli),
        "x_CostOfWholeGpus": cost_text(entry.usage.whole_milli),
        "x_Simulated": "true" if report.simulated else "false",
    }


def cost_text(milli: int) -> str:
    return f"{milli // 1000}.{milli % 1000:03}"


def _resource(report: UsageReport, of: dict[str, str]) -> dict[str, str]:
    lease, device = of.get("lease", ""), of.get("device", "")
    name = of.get("notebook", "") if lease else report.devices.get(device, "")
    if lease:
        kind, identity = "Kernel", f"lease/{lease}" + (f"/device/{device}" if device else "")
    elif device:
        kind, identity = "GPU", f"device/{device}"
    else:
        kind, identity = "GPU pool", f"pool/{of['pool']}"
    return {"ResourceId": identity, "ResourceName": _name(name), "ResourceType": kind}


def _name(text: str) -> str:
    """Return the name in a form that spreadsheets won't read as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _moment(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
