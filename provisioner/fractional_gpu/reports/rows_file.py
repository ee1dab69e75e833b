"""Reads metered rows from a file written by `jupyter gpu simulate --set usage=FILE`, and adds them up as the broker would.

The file contains a JSON object with `format`, `version`, `begins_s` and `ends_s` (seconds since 1970), `pools`, and `rows`, each with
`key`, `party` and its nonzero `figures`. Hours, days and months are in UTC.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Final, Literal

import msgspec

from fractional_gpu.core.metering.usage import FIGURES, Party, Usage, UsageKey, UsageRow
from fractional_gpu.protocol.accounts import UsageReport
from fractional_gpu.reports.sums import columns_of, periods_of, summed

ZONE: Final = UTC
_WRITES: Final = "`jupyter gpu simulate ... --set usage=FILE` writes one"


class _Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hour_s: int
    lease_id: str
    device_id: str
    currency: str


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: _Key
    party: Party
    figures: dict[str, int]


class RowsFile(msgspec.Struct, frozen=True):
    format: Literal["jupyter-gpu-usage"]
    version: Literal[1]
    begins_s: int
    ends_s: int
    rows: list[_Row]


def read(content: bytes, name: str) -> RowsFile:
    try:
        found = msgspec.json.decode(content, type=RowsFile)
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} is not a file of metered rows from this version: {error}; {_WRITES}") from None
    for row in found.rows:
        if unknown := sorted(set(row.figures) - set(FIGURES)):
            raise ValueError(
                f"{name} has an unknown figure, {unknown[0][:40]!r}, and may be from another version; known: {', '.join(FIGURES)}"
            )
    return found


def rows_of(file: RowsFile) -> list[UsageRow]:
    return [UsageRow(UsageKey(**msgspec.structs.asdict(one.key)), one.party, Usage(**one.figures)) for one in file.rows]


def devices_of(file: RowsFile) -> list[str]:
    return sorted({one.key.device_id for one in file.rows} - {""}, key=lambda device_id: (len(device_id), device_id))


def report_of(
    file: RowsFile, by: Sequence[str], since_s: int, until_s: int, only: Mapping[str, str | int] | None = None
) -> UsageReport:
    columns = ((columns_of(row), row.usage) for row in rows_of(file))
    wanted = only or {}
    chosen = [
        (key, usage)
        for key, usage in columns
        if since_s <= int(key["hour"]) < until_s and all(key[name] == value for name, value in wanted.items())
    ]
    entries = summed(chosen, by, zone=ZONE)
    return UsageReport(
        by=list(by),
        since_s=since_s,
        until_s=until_s,
        entries=entries,
        periods=periods_of(entries, ZONE),
        simulated=True,
        scope="all",
    )
