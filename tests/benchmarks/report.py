"""Measurements as a table for people and as JSON for programs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.benchmarks.stats import CONFIDENCE, Estimate

__all__ = ["Row", "as_json", "as_table"]

_HEADER = ("measured", "here", "compared with, in the same run", "compared", f"{CONFIDENCE:.0%} interval", "goal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison. `ours` and `theirs` are in `unit`; `compared` is their quotient ("x") or their difference in `unit`."""

    measured: str
    compared_with: str  # what `theirs` is of
    unit: str  # "s", "ms" or "us"
    ours: float
    theirs: float
    compared: Estimate
    quotient: bool
    samples: int
    goal: float | None = None  # the most that `compared` may be
    mib: int | None = None  # what was moved in that time

    @property
    def met(self) -> bool | None:
        """Whether the goal is met by the value itself; None without a goal."""
        return None if self.goal is None else self.compared.value <= self.goal


def as_table(rows: Sequence[Row]) -> str:
    """Return a markdown table."""
    lines = [_HEADER, tuple("---" for _ in _HEADER), *(_cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return plain data; an end of an interval that nothing is known of is null."""
    found = []
    for row in rows:
        low, high = (end if math.isfinite(end) else None for end in (row.compared.low, row.compared.high))
        compared = {"value": row.compared.value, "low": low, "high": high}
        found.append({**asdict(row), "compared": compared, "met": row.met})
    return found


def _cells(row: Row) -> tuple[str, ...]:
    low, high = (_compared(row, end) for end in (row.compared.low, row.compared.high))
    goal = ""
    if row.goal is not None:
        goal = f"{'at most' if row.met else '**missed**: at most'} {_compared(row, row.goal)}"
    return (
        row.measured,
        _side(row, row.ours),
        f"{_side(row, row.theirs)} ({row.compared_with})",
        f"{_compared(row, row.compared.value)} (n = {row.samples})",
        f"{low} to {high}",
        goal,
    )


def _side(row: Row, value: float) -> str:
    speed = "" if row.mib is None else f", {row.mib / value:,.0f} MiB/s"
    return _with_unit(value, row.unit) + speed


def _compared(row: Row, value: float) -> str:
    if not math.isfinite(value):
        return "unknown"
    return f"{value:.3f} x" if row.quotient else _with_unit(value, row.unit, sign=True)


def _with_unit(value: float, unit: str, *, sign: bool = False) -> str:
    digits = {"s": 3, "ms": 2, "us": 0}[unit]
    return f"{value:{'+' if sign else ''}.{digits}f} {'µs' if unit == 'us' else unit}"
