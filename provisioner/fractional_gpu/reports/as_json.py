"""Converts a complete report to JSON, including totals. All figures are integers, and their names include the unit."""

import json
from collections.abc import Sequence
from typing import Any, Final

from msgspec import to_builtins

from fractional_gpu.core.metering.usage import FIGURES
from fractional_gpu.protocol.accounts import UsageEntry, UsageReport
from fractional_gpu.reports.sums import of_leases, of_no_lease, rolled_up

FORMAT: Final = "jupyter-gpu-report"
VERSION: Final = 1


def as_json(report: UsageReport, by: Sequence[str]) -> str:
    """Return a JSON object with `entries` for leases, `no_lease` for time without a lease, and `totals` over both for each currency.

    The report must be grouped at least by user. If the entries are by user, their `of` includes an `account` (`hub` or `machine`), since a
    hub user and a machine user can have the same name.
    """
    finer = rolled_up(report.entries, list(dict.fromkeys([*by, "user"])))
    found = {
        "format": FORMAT,
        "version": VERSION,
        "by": list(by),
        "since_s": report.since_s,
        "until_s": report.until_s,
        "scope": report.scope,
        "simulated": report.simulated,
        "carbon": report.carbon,
        "note": report.note,
        "devices": report.devices,
        "entries": [_plain(one) for one in rolled_up(of_leases(finer), by)],
        "no_lease": [_plain(one) for one in rolled_up(of_no_lease(finer), [])],
        "totals": [_plain(one) for one in rolled_up(report.entries, [])],
    }
    if report.advice:
        found["advice"] = to_builtins(report.advice)
    return json.dumps(found, ensure_ascii=False, indent=1)


def _plain(entry: UsageEntry) -> dict[str, Any]:
    figures = {name.replace("_share", "_milli_gpu_ms"): getattr(entry.usage, name) for name in FIGURES}
    return {"of": entry.of, "currency": entry.currency, **figures, "carbon_mg": entry.carbon_mg}
