"""The carbon intensity of electricity (CO2 per kWh), which the administrator sets as one number or as a CSV file with hourly figures.

The file must have a header, and two of its columns are read. Times come from the first column with `time` in its name. They must be in ISO
8601 format, and are taken as UTC if they name no time zone. Figures come from the first column with both `g` and `kwh` in its name, such as
`g_per_kwh` or `Carbon intensity gCO2eq/kWh`. Exports of electricity data use this format. A missing hour gets the last figure before it, or
the first figure in the file if there is no earlier one.
"""

import csv
import math
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fractional_gpu.core.metering.usage import MJ_PER_KWH

_MOST_G = 100_000
ALLOWED = "grams per kWh as a number from 0 to 100000, or the path of a CSV file with the columns time and g_per_kwh"


@dataclass(frozen=True, slots=True)
class Carbon:
    """The carbon intensity, in milligrams of CO2 per kWh.

    `from_s` lists when each figure starts to apply, in seconds since 1970. If it is empty, the only figure applies at all times.
    """

    text: str  # the source of the figures, for people
    mg_per_kwh: tuple[int, ...]
    from_s: tuple[int, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether the figure changes over time."""
        return bool(self.from_s)

    def mg(self, energy_mj: int, hour_s: int) -> int:
        """Return the milligrams of CO2 for `energy_mj` millijoules consumed in the hour that begins at `hour_s`."""
        index = max(0, bisect_right(self.from_s, hour_s + 3599) - 1) if self.from_s else 0
        return energy_mj * self.mg_per_kwh[index] // MJ_PER_KWH


def parse_setting(value: object) -> float | Path | None:
    """Return the configured grams per kWh or the absolute path of the configured file. Return None if neither is configured.

    Raises ValueError with a message that describes the allowed values.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or not 0 <= value <= _MOST_G:
            raise ValueError(f"expected None, or {ALLOWED}")
        return float(value)
    if isinstance(value, str) and value.strip():
        path = Path(value).expanduser()
        if path.is_absolute():
            return path
    raise ValueError(f"expected None, or {ALLOWED}; the path must be absolute")


def read(setting: float | Path) -> Carbon:
    """Return the configured figures.

    Raises ValueError with a message that names the file and the line, quotes the line, and describes the allowed values.
    """
    if not isinstance(setting, Path):
        return Carbon(f"{setting:g} g CO2 per kWh, as configured", (round(setting * 1000),))
    try:
        with setting.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{setting} cannot be read: {error}; c.GPUBroker.carbon must be {ALLOWED}") from None
    return _parsed(setting, rows)


def _parsed(path: Path, rows: list[list[str]]) -> Carbon:
    if not rows:
        raise ValueError(f"{path} is empty; its first line must name the columns, such as `time,g_per_kwh`")
    header = [name.strip().lower() for name in rows[0]]
    when = next((index for index, name in enumerate(header) if "time" in name), None)
    grams = next((index for index, name in enumerate(header) if "kwh" in name and "g" in name), None)
    if when is None or grams is None:
        raise ValueError(f"{path}, line 1: {', '.join(rows[0])!r} does not have the columns time and g_per_kwh")
    found: dict[int, int] = {}
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        try:
            at = datetime.fromisoformat(row[when].strip())
            value = float(row[grams])
        except (ValueError, IndexError):
            raise ValueError(
                f"{path}, line {number}: {', '.join(row)[:100]!r}; expected a time such as 2026-11-24T08:00+00:00 and a number"
            ) from None
        if not math.isfinite(value) or not 0 <= value <= _MOST_G:
            raise ValueError(f"{path}, line {number}: {row[grams]!r}; expected a number from 0 to {_MOST_G} g per kWh")
        found[int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())] = round(value * 1000)
    if not found:
        raise ValueError(
            f"{path} has no data; add one line per hour after the header, such as `2026-11-24T08:00+00:00,312`"
        )
    moments = tuple(sorted(found))
    text = f"CO2 per kWh, hourly from {path.name}"
    return Carbon(text, tuple(found[one] for one in moments), moments)
