"""The file of a metered run: what was metered, and the figures row by row, as JSON.

One object: `format`, `version`, `begins_s` and `ends_s` (wall clock, seconds since 1970), `pools` (of each its devices and its tariff, as
`core.metering.tariffs.Tariff` has it), and `rows`, one on each line of the file. A row has `key` (hour_s, lease_id, device_id,
currency), `party` (pool, owner, group, label, seated) and `figures`, without those that are 0; `core.metering.usage` says what each is.
`fractional_gpu.reports.rows_file` reads it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fractional_gpu.core.metering.tariffs import Tariff
from fractional_gpu.core.metering.usage import FIGURES, UsageRow
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.metering.run_meter import BEGINS_MS, RunMeter

_FORMAT, _VERSION = "jupyter-gpu-usage", 1


def write_usage(path: Path, meter: RunMeter, hosts: Sequence[Host]) -> None:
    """Write the rows of a finished run. The same run gives the same bytes. Raises OSError."""
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "begins_s": BEGINS_MS // 1000,
        "ends_s": (BEGINS_MS + meter.ended_ms) // 1000,
        "pools": _pools(meter, hosts),
    }
    rows = ",\n".join(json.dumps(row_as_json(row)) for row in meter.rows())
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")


def row_as_json(row: UsageRow) -> dict[str, object]:
    """Return the row as plain data; figures that are 0 are left out."""
    figures = {name: value for name in FIGURES if (value := getattr(row.usage, name))}
    return {"key": row.key._asdict(), "party": asdict(row.party), "figures": figures}


def _pools(meter: RunMeter, hosts: Sequence[Host]) -> dict[str, dict[str, Any]]:
    pools: dict[str, dict[str, Any]] = {}
    for number, host in enumerate(hosts):
        prefix = f"host-{number}/" if len(hosts) > 1 else ""
        for pool in host.pools:
            tariff = asdict(meter.settings.tariffs.get(pool.name, Tariff()))
            known = pools.setdefault(pool.name, {"devices": [], "tariff": tariff})
            known["devices"] += [prefix + device_id for device_id in pool.devices]
    return pools
