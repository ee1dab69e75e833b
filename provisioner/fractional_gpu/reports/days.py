"""The picture of days: a stacked bar for each, of the GPU hours busy, held idle and free, and above them those suspended."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from html import escape
from typing import Final

from fractional_gpu.core.metering.usage import SHARE_HOUR
from fractional_gpu.pages import round_step
from fractional_gpu.protocol.accounts import UsageReport
from fractional_gpu.reports.columns import decimals
from fractional_gpu.reports.sums import rolled_up

LIGHT: Final = {"busy": "#1d4ed8", "idle": "#5b8def", "free": "#e5e7eb", "suspended": "#b45309", "stripe": "#f6f7f9"}
DARK: Final = {"busy": "#7cb0ff", "idle": "#3f74d1", "free": "#2a3039", "suspended": "#fbbf24", "stripe": "#1a1e25"}
STYLE: Final = (
    ".gpu-report .days{min-width:40em}"
    + "".join(
        f".gpu-report .{name}{{fill:var(--{name});stroke:var(--page);stroke-width:.8}}"
        for name in ("busy", "idle", "free", "suspended")
    )
    + ".gpu-report .free{stroke:var(--faint)}"
    ".gpu-report .legend{display:flex;flex-wrap:wrap;gap:.2em 1.4em;padding:0;margin:.3em 0;list-style:none}"
    ".gpu-report .legend svg{width:1em;height:.9em;margin-right:.4em}"
)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 240, 56, 10, 14, 30
_MOST_DAYS = 62
_MOST_LABELS = 11
_DAY_CHARACTERS = 10


@dataclass(frozen=True, slots=True)
class Bar:
    """A day or month: milli-GPU milliseconds by what they were used for."""

    when: str
    busy: int = 0
    idle: int = 0
    free: int = 0
    suspended: int = 0


PARTS: Final = {
    "busy": "busy: cells run",
    "idle": "held idle",
    "free": "free",
    "suspended": "suspended: in host memory, on no GPU",
}


def days_picture(report: UsageReport, *, whole: bool = True) -> str:
    """Return the legend and the picture, as HTML. The report is by day or hour and more.

    `whole`: the report is of whole devices, of all users, so that what is not held of them is free.
    """
    found = day_bars(report, whole=whole)
    parts = [name for name in PARTS if any(getattr(one, name) for one in found)]
    legend = "".join(
        f'<li><svg viewBox="0 0 10 9" aria-hidden="true"><rect class="{name}" width="10" height="9"/></svg>{PARTS[name]}</li>'
        for name in parts
    )
    return (
        f'<ul class="legend">{legend}</ul>'
        f'<div class="wide" role="region" tabindex="0" aria-label="GPU hours by day, a picture">{_drawn(found)}</div>'
    )


def day_bars(report: UsageReport, *, whole: bool) -> list[Bar]:
    """Return a bar for each day from the first one with figures to the last, or for each month if there are many days."""
    days = {one: Bar(one) for one in _days_between(report)}
    by = "day" if len(days) <= _MOST_DAYS else "month"
    bars = {one[:7]: Bar(one[:7]) for one in days} if by == "month" else days
    occupied = dict.fromkeys(bars, 0)
    for entry in rolled_up(report.entries, [by]):
        usage, known = entry.usage, bars[entry.of[by]]
        occupied[known.when] += usage.occupied_us
        held = known.busy + known.idle + usage.held_share
        bars[known.when] = Bar(
            known.when,
            busy=known.busy + usage.busy_share,
            idle=known.idle + usage.held_share - usage.busy_share,
            free=max(0, occupied[known.when] - held) if whole and report.scope == "all" else 0,
            suspended=known.suspended + usage.suspended_share,
        )
    return list(bars.values())


def _days_between(report: UsageReport) -> list[str]:
    days = sorted({one.of["day"] for one in rolled_up(report.entries, ["day"])})
    if not days:
        return []
    first, last = date.fromisoformat(days[0]), date.fromisoformat(days[-1])
    return [(first + timedelta(days=number)).isoformat() for number in range((last - first).days + 1)]


def _drawn(bars: Sequence[Bar]) -> str:
    most = max((one.busy + one.idle + one.free + one.suspended for one in bars), default=0) / SHARE_HOUR
    step = round_step(most / 4)
    top = step * max(1, -(-int(most * 1000) // (step * 1000)))
    height, width = _HEIGHT - _TOP - _BOTTOM, (_WIDTH - _LEFT - _RIGHT) / max(1, len(bars))
    grid = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_HEIGHT - _BOTTOM - height * at / top:.1f}" '
        f'y2="{_HEIGHT - _BOTTOM - height * at / top:.1f}"/><text x="{_LEFT - 8}" y="{_HEIGHT - _BOTTOM - height * at / top + 4:.1f}" '
        f'text-anchor="end">{at:,}{" h" if at == top else ""}</text>'
        for at in range(0, top + 1, step)
    ]
    every = -(-len(bars) // _MOST_LABELS) or 1
    columns = [
        _column(one, _LEFT + number * width, width, height / top, labelled=not number % every)
        for number, one in enumerate(bars)
    ]
    return (
        f'<svg class="days" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}"><title>GPU hours by day: busy, held idle, free and suspended. '
        f"The table by day has the figures.</title>{''.join(grid)}{''.join(columns)}</svg>"
    )


def _column(bar: Bar, x: float, width: float, per_hour: float, *, labelled: bool) -> str:
    said, rects, base = [], [], float(_HEIGHT - _BOTTOM)
    for name, words in PARTS.items():
        value = getattr(bar, name)
        if value:
            high = value / SHARE_HOUR * per_hour
            base -= high
            rects.append(
                f'<rect class="{name}" x="{x + width * 0.12:.1f}" y="{base:.1f}" width="{width * 0.76:.1f}" height="{high:.1f}"/>'
            )
            said.append(f"{words.partition(':')[0]} {decimals([value], SHARE_HOUR, 2)[0]}")
    text = bar.when[5:] if len(bar.when) == _DAY_CHARACTERS else bar.when
    label = f'<text x="{x + width / 2:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{text}</text>' if labelled else ""
    title = f"{bar.when}: {', '.join(said) or 'nothing'} (GPU hours)"
    return f"<g><title>{escape(title)}</title>{''.join(rects)}</g>{label}"
