"""Renders a report as a script-free HTML page, or just the parts that the hub's pages reuse: totals, daily bars, cost bars and tables.

The templates are in `fractional_gpu.pages`. All figures shown in charts are also given as text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta, tzinfo
from typing import Final

from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR
from fractional_gpu.pages import render
from fractional_gpu.protocol.accounts import UsageEntry, UsageReport
from fractional_gpu.reports.columns import (
    ADVICE_BASIS,
    AMOUNT,
    BUSY_PERCENT,
    CARBON,
    HOURS,
    RESOURCES,
    Table,
    advice_names,
    amount_text,
    decimals,
    names_of,
    percent_text,
    scope_text,
    tabulated,
)
from fractional_gpu.reports.periods import moment_text
from fractional_gpu.reports.sums import ACCOUNT, of_leases, rolled_up
from fractional_gpu.svg import Frame, Svg, count_axis, element

MOST_BARS: Final = 20
TITLES: Final[Mapping[str, str]] = {"hour": "hour", "lease": "kernel's lease"}
PARTS: Final = {
    "busy": "busy: cells run",
    "idle": "held idle",
    "free": "free",
    "suspended": "suspended: in host memory, on no GPU",
}
_FRAME: Final = Frame(width=720, height=240, left=56, right=10, top=14, bottom=30)
_MOST_DAYS: Final = 62
_MOST_LABELS: Final = 11
_DAY_CHARACTERS: Final = 10


@dataclass(slots=True)
class Day:
    when: str
    busy: int = 0
    idle: int = 0
    free: int = 0
    suspended: int = 0


@dataclass(frozen=True, slots=True)
class Bars:
    title: str
    rows: Sequence[tuple[str, int, str]]


def page(
    report: UsageReport, by: Sequence[str], *, made_by: str, whole: bool = True, zone: tzinfo | None = None
) -> str:
    """Return the page. The report must be grouped by day, user, group, pool and the columns in `by`.

    `made_by` is the command and its version. `whole` means that the report covers whole devices, so that time without a lease counts as
    free. `zone` is the report's time zone, or None for the machine's time zone.
    """
    title = "GPU use and cost" + (" (simulated)" if report.simulated else "")
    return render(
        "report.html", title=title, period=period_text(report, zone), scope=scope_text(report), made_by=made_by,
        parts=body(report, by, whole=whole),
    )  # fmt: skip


def body(
    report: UsageReport, by: Sequence[str], *, whole: bool = True, others: Mapping[str, UsageReport] | None = None
) -> str:
    """Return the body of the page, from the totals to the legend. `others` maps headings to further reports, grouped by user."""
    days = day_bars(report, whole=whole)
    leases = of_leases(report.entries)
    several = [
        column
        for column in ("group", "user")
        if len({(one.of[column], one.of.get(ACCOUNT) if column == "user" else "") for one in leases}) > 1
    ]
    *first, last = [TITLES.get(one, one) for one in by] or [""]
    heading = f"By {', '.join(first)} and {last}" if first else f"By {last}"
    sections = [(heading if by else "In all", _tables(report, by))]
    if "pool" not in by and len({one.of["pool"] for one in report.entries}) > 1:
        sections.append(("By pool", _tables(report, ["pool"])))
    if list(by) != ["day"]:
        sections.append(("By day", _tables(report, ["day"])[:1]))
    advised = advice_names(report.advice)
    return render(
        "report_parts.html",
        report=report,
        sums=_sums(report),
        legend={name: words for name, words in PARTS.items() if any(getattr(one, name) for one in days)},
        days=_drawn(days),
        bars=[one for column in several for one in bars(report, column)],
        sections=sections,
        titles=TITLES,
        advice=[(advised(one), one.sentence) for one in report.advice],
        advice_basis=ADVICE_BASIS,
        others=[
            (heading, _tables(other, ["user"])[0][1], bars(other, "user")) for heading, other in (others or {}).items()
        ],
        columns=[*HOURS, BUSY_PERCENT, AMOUNT, *RESOURCES, *((CARBON,) if report.carbon else ())],
    )


def _sums(report: UsageReport) -> list[tuple[str, str]]:
    said: list[tuple[str, str]] = []
    whole = rolled_up(
        [UsageEntry(of={}, currency="", usage=one.usage, carbon_mg=one.carbon_mg) for one in report.entries], []
    )
    for one in whole:
        usage = one.usage
        said += [
            ("GPU hours reserved", decimals([usage.reserved_share], SHARE_HOUR, 2)[0]),
            ("GPU hours held", decimals([usage.held_share], SHARE_HOUR, 2)[0]),
            ("of these busy", percent_text(usage.busy_share, usage.held_share)),
            ("GPU hours suspended", decimals([usage.suspended_share], SHARE_HOUR, 2)[0]),
        ]
    for one in rolled_up(report.entries, []):
        if one.currency:
            usage, saved_milli = one.usage, max(0, one.usage.resident_milli - one.usage.charge_milli)
            said += [
                ("charged", amount_text(usage.charge_milli, one.currency)),
                ("saved by suspending", amount_text(saved_milli, one.currency)),
                ("whole GPUs would have cost", amount_text(usage.whole_milli, one.currency)),
            ]
    for one in whole:
        if one.usage.energy_mj:
            said.append(("energy", decimals([one.usage.energy_mj], MJ_PER_KWH, 1)[0] + " kWh"))
        if report.carbon:
            said.append(("CO2", decimals([one.carbon_mg], CARBON.unit, 1)[0] + " kg"))
    return said


def _tables(report: UsageReport, by: Sequence[str]) -> list[tuple[str, Table]]:
    return [
        ("GPU hours and amounts", tabulated(report, by, only=lambda one: not one.resource)),
        ("Devices, memory and energy", tabulated(report, by, only=lambda one: one.resource)),
    ]


def bars(report: UsageReport, column: str) -> list[Bars]:
    """Return bars comparing what users, groups and so on are charged, largest first. Without prices, compare their charged GPU hours."""
    entries = rolled_up(of_leases(report.entries), [column])
    name_of, title = names_of(report), TITLES.get(column, column)
    found = []
    for currency in sorted({one.currency for one in entries}):
        value: Callable[[UsageEntry], int] = (
            (lambda one: one.usage.charge_milli) if currency else (lambda one: one.usage.charged_share)
        )
        mine = sorted((one for one in entries if one.currency == currency), key=value, reverse=True)
        most = value(mine[0])
        named = [
            (name_of(column, one), value(one) * 1000 // most if most else 0, value(one)) for one in mine[:MOST_BARS]
        ]
        # The others share one line without a bar.
        named += [(f"{len(mine) - MOST_BARS} others", 0, value(one)) for one in rolled_up(mine[MOST_BARS:], [])]
        hours = decimals([amount for *_, amount in named], SHARE_HOUR, 2)
        rows = [
            (name, width, amount_text(amount, currency) if currency else text)
            for (name, width, amount), text in zip(named, hours, strict=True)
        ]
        heading = f"Cost by {title}, {currency}" if currency else f"Charged GPU hours by {title}"
        found.append(Bars(heading, rows))
    return found


def day_bars(report: UsageReport, *, whole: bool) -> list[Day]:
    """Return the figures for each day, from the first day with any use to the last. If there are many days, return them by month.

    `whole` means that the report covers whole devices and all users, so that time without a lease counts as free.
    """
    used = sorted({one.of["day"] for one in rolled_up(report.entries, ["day"])})
    if not used:
        return []
    first, last = date.fromisoformat(used[0]), date.fromisoformat(used[-1])
    days = [(first + timedelta(days=number)).isoformat() for number in range((last - first).days + 1)]
    by = "day" if len(days) <= _MOST_DAYS else "month"
    found = {one: Day(one) for one in (days if by == "day" else dict.fromkeys(day[:7] for day in days))}
    occupied = dict.fromkeys(found, 0)
    for entry in rolled_up(report.entries, [by]):
        usage, day = entry.usage, found[entry.of[by]]
        occupied[day.when] += usage.occupied_us
        day.busy += usage.busy_share
        day.idle += usage.held_share - usage.busy_share
        day.suspended += usage.suspended_share
    if whole and report.scope == "all":
        for day in found.values():
            day.free = max(0, occupied[day.when] - day.busy - day.idle)
    return list(found.values())


def _drawn(days: Sequence[Day]) -> Svg:
    most = max((one.busy + one.idle + one.free + one.suspended for one in days), default=0) / SHARE_HOUR
    marks, top = count_axis(most)
    marks[-1] = (1, f"{marks[-1][1]} h")
    width, every = 1 / max(1, len(days)), -(-len(days) // _MOST_LABELS) or 1
    parts: list[Svg] = _FRAME.marks_up(marks)
    for number, day in enumerate(days):
        said, rects, share = [], [], 0.0
        left, right = _FRAME.x((number + 0.12) * width), _FRAME.x((number + 0.88) * width)
        for name, words in PARTS.items():
            if value := getattr(day, name):
                base, share = _FRAME.y(share), share + value / SHARE_HOUR / top
                y = _FRAME.y(share)
                rects.append(element("rect", class_=name, x=left, y=y, width=right - left, height=base - y))
                said.append(f"{words.partition(':')[0]} {decimals([value], SHARE_HOUR, 2)[0]}")
        title = element("title", f"{day.when}: {', '.join(said) or 'nothing'} (GPU hours)")
        parts.append(element("g", title, *rects))
        if not number % every:
            text = day.when[5:] if len(day.when) == _DAY_CHARACTERS else day.when
            x = _FRAME.x((number + 0.5) * width)
            parts.append(element("text", text, x=x, y=_FRAME.height - 10, text_anchor="middle"))
    said_first = "GPU hours by day: busy, held idle, free and suspended. The table by day has the figures."
    return _FRAME.drawn([element("title", said_first), *parts], class_="days")


def period_text(report: UsageReport, zone: tzinfo | None = None) -> str:
    return f"{moment_text(report.since_s, zone)} to {moment_text(report.until_s, zone)}"
