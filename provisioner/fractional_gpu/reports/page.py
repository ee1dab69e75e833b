"""A report as one HTML page without scripts, and its parts for other pages: tables, a picture of days, bars of what groups or users cost.

The parts stand in an element of the class `gpu-report`, for which `STYLE`, `LIGHT` and `DARK` are made. Whatever is drawn is also text.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import tzinfo
from html import escape
from typing import Final

from fractional_gpu.core.metering.usage import MJ_PER_KWH, SHARE_HOUR
from fractional_gpu.pages import begin_page, end_page
from fractional_gpu.protocol.accounts import UsageEntry, UsageReport
from fractional_gpu.reports.columns import (
    ADVICE_BASIS,
    AMOUNT,
    BUSY_PERCENT,
    CARBON,
    HOURS,
    RESOURCES,
    Column,
    Table,
    advice_names,
    amount_text,
    decimals,
    names_of,
    percent_text,
    scope_text,
    tabulated,
)
from fractional_gpu.reports.days import DARK as DAYS_DARK
from fractional_gpu.reports.days import LIGHT as DAYS_LIGHT
from fractional_gpu.reports.days import STYLE as DAYS_STYLE
from fractional_gpu.reports.days import days_picture
from fractional_gpu.reports.periods import moment_text
from fractional_gpu.reports.sums import ACCOUNT, of_leases, rolled_up

MOST_BARS: Final = 20
TITLES: Final[Mapping[str, str]] = {"hour": "hour", "lease": "kernel's lease"}
LIGHT: Final = {**DAYS_LIGHT, "bar": "#1d4ed8"}
DARK: Final = {**DAYS_DARK, "bar": "#7cb0ff"}
STYLE: Final = DAYS_STYLE + (
    ".gpu-report table{font-variant-numeric:tabular-nums}.gpu-report .wide{margin:.4em 0 1em}"
    ".gpu-report caption{text-align:left;color:var(--faint);padding:.2em 0}"
    ".gpu-report td.name,.gpu-report th.name{text-align:left}.gpu-report tr{background:var(--page)}"
    ".gpu-report tbody tr:nth-child(even){background:var(--stripe)}"
    ".gpu-report .wide .name:first-child{position:sticky;left:0;background:inherit}"
    ".gpu-report tr.rest td{font-style:italic}.gpu-report tfoot td{font-weight:600;border-top:2px solid var(--grid)}"
    ".gpu-report .sums{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(13em,45%),1fr));gap:.6em;margin:1em 0;padding:0}"
    ".gpu-report .sums div{border:1px solid var(--grid);border-radius:6px;padding:.5em .8em}"
    ".gpu-report .sums dt{color:var(--faint);font-size:.87em}"
    ".gpu-report .sums dd{margin:0;font-size:1.2em;font-weight:600;overflow-wrap:anywhere}"
    ".gpu-report .bars{width:100%;max-width:44em}.gpu-report .bars td{border:0}.gpu-report .bars td.bar{width:55%;padding-right:0}"
    ".gpu-report .bars td.name{white-space:normal;overflow-wrap:anywhere;min-width:5em}"
    ".gpu-report .bars svg{display:block;height:.9em;width:100%}.gpu-report .bars rect{fill:var(--bar)}"
    ".gpu-report .meaning{display:grid;grid-template-columns:max-content 1fr;gap:.1em 1em}.gpu-report .meaning dd{margin:0}"
    ".gpu-report .faint{color:var(--faint)}"
    ".gpu-report .advice{padding-left:1.2em;max-width:60em}.gpu-report .advice li{margin:.4em 0;overflow-wrap:anywhere}"
    "@media(max-width:40em){.gpu-report td,.gpu-report th{padding:.2em .45em}.gpu-report .bars td.bar{width:35%}"
    ".gpu-report .meaning{display:block}.gpu-report .meaning dt{font-weight:600}}"
    "@media print{body{max-width:none;margin:0}.gpu-report .wide{overflow:visible}.gpu-report tr,.gpu-report svg{break-inside:avoid}"
    ".gpu-report table{font-size:10px}.gpu-report h2{break-after:avoid}.gpu-report *{print-color-adjust:exact}}"
)


def page(
    report: UsageReport, by: Sequence[str], *, made_by: str, whole: bool = True, zone: tzinfo | None = None
) -> str:
    """Return the page. The report is by day, user, group and pool, and by what is asked.

    `made_by`: the command and the version that made it. `whole`: the report is of whole devices, so that what is left of them is free.
    `zone`: in which its time is shown; none: the machine's.
    """
    title = "GPU use and cost" + (" (simulated)" if report.simulated else "")
    return "".join(
        [
            begin_page(title, STYLE, light=LIGHT, dark=DARK),
            f'<main class="gpu-report"><h1>{escape(title)}</h1>',
            f'<p class="result">{period_text(report, zone)}<br>{escape(scope_text(report))}</p>',
            body(report, by, whole=whole),
            f"{meaning(report)}<p class='faint'>{escape(made_by)}</p></main>",
            end_page(),
        ]
    )


def body(report: UsageReport, by: Sequence[str], *, whole: bool = True) -> str:
    """Return the sums, the picture, the bars and the tables, as `page` has them."""
    parts = [summary(report)]
    if not report.entries:
        return "".join([*parts, "<p>No kernel used a GPU in this time, or none that you may see.</p>", advised(report)])
    parts += ["<h2>Day by day</h2>", days_picture(report, whole=whole)]
    leases = of_leases(report.entries)
    for column in ("group", "user"):
        if len({(one.of[column], one.of.get(ACCOUNT) if column == "user" else "") for one in leases}) > 1:
            parts.append(bars(report, column))
    parts.append(f"<h2>By {escape(and_list([heading(one) for one in by]))}</h2>" if by else "<h2>In all</h2>")
    parts.append(both_tables(report, by))
    if "pool" not in by and len({one.of["pool"] for one in report.entries}) > 1:
        parts += ["<h2>By pool</h2>", both_tables(report, ["pool"])]
    if list(by) != ["day"]:
        parts += ["<h2>By day</h2>", html_table(tabulated(report, ["day"], only=lambda one: not one.resource))]
    return "".join([*parts, advised(report)])


def advised(report: UsageReport) -> str:
    """Return a list of what is suggested for notebooks' shares; items name their users where there are several. Empty: nothing is."""
    if not report.advice:
        return ""
    name = advice_names(report.advice)
    items = "".join(f"<li><strong>{escape(name(one))}</strong>: {escape(one.sentence)}.</li>" for one in report.advice)
    return f'<h2>Advice on shares</h2><p>{escape(ADVICE_BASIS)}.</p><ul class="advice">{items}</ul>'


def summary(report: UsageReport) -> str:
    """Return the totals in words: hours, amounts, what suspending has saved, energy."""
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
            usage = one.usage
            said.append(("charged", amount_text(usage.charge_milli, one.currency)))
            said.append(
                ("saved by suspending", amount_text(max(0, usage.resident_milli - usage.charge_milli), one.currency))
            )
            said.append(("whole GPUs would have cost", amount_text(usage.whole_milli, one.currency)))
    for one in whole:
        if one.usage.energy_mj:
            said.append(("energy", decimals([one.usage.energy_mj], MJ_PER_KWH, 1)[0] + " kWh"))
        if report.carbon:
            said.append(("CO2", decimals([one.carbon_mg], CARBON.unit, 1)[0] + " kg"))
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in said)
    return f'<dl class="sums">{cards}</dl>' if cards else ""


def both_tables(report: UsageReport, by: Sequence[str]) -> str:
    """Return two tables: of time and amounts, and of devices, memory and energy."""
    time = html_table(tabulated(report, by, only=lambda one: not one.resource))
    return time + html_table(tabulated(report, by, only=lambda one: one.resource), "Devices, memory and energy")


def html_table(table: Table, caption: str = "GPU hours and amounts") -> str:
    """Return a table with its totals at the foot."""
    named = len(table.by)
    head = "".join(f'<th scope="col" class="name">{escape(heading(one).capitalize())}</th>' for one in table.by)
    head += "".join(f'<th scope="col">{escape(one.name)}</th>' for one in table.columns)
    rows = {"": "", "total": ""}
    for line in table.lines:
        cells = "".join(f'<td class="name">{escape(one)}</td>' for one in line.names[:named])
        cells += "".join(f"<td>{escape(one)}</td>" for one in line.cells)
        kind = f' class="{line.kind}"' if line.kind else ""
        rows["total" if line.kind == "total" else ""] += f"<tr{kind}>{cells}</tr>"
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows['']}</tbody><tfoot>{rows['total']}</tfoot></table></div>"
    )


def bars(report: UsageReport, column: str) -> str:
    """Return what each user, group or the like was charged, as bars, largest first; without prices, the GPU hours that count."""
    entries = rolled_up(of_leases(report.entries), [column])
    parts: list[str] = []
    for currency in sorted({one.currency for one in entries}):
        mine = [one for one in entries if one.currency == currency]
        value: Callable[[UsageEntry], int] = (
            (lambda one: one.usage.charge_milli) if currency else (lambda one: one.usage.charged_share)
        )
        title = f"Cost by {heading(column)}, {currency}" if currency else f"GPU hours that count, by {heading(column)}"
        parts.append(
            f"<h2>{escape(title)}</h2>{_bar_rows(report, column, sorted(mine, key=value, reverse=True), value)}"
        )
    return "".join(parts)


def _bar_rows(
    report: UsageReport, column: str, entries: Sequence[UsageEntry], value: Callable[[UsageEntry], int]
) -> str:
    name_of = names_of(report)
    named = [(name_of(column, one), one) for one in entries[:MOST_BARS]]
    most = max((value(one) for one in entries), default=0)
    named += [
        (f"{len(entries) - MOST_BARS} others", one) for one in rolled_up(entries[MOST_BARS:], [])
    ]  # without a bar
    hours = decimals([value(one) for _, one in named], SHARE_HOUR, 2)
    rows: list[str] = []
    for number, (name, one) in enumerate(named):
        width = value(one) * 1000 // most if most and number < MOST_BARS else 0
        shown = amount_text(value(one), one.currency) if one.currency else hours[number]
        rows.append(
            f'<tr><td class="name">{escape(name)}</td><td class="bar"><svg viewBox="0 0 1000 10" preserveAspectRatio="none" '
            f'aria-hidden="true"><rect width="{width}" height="10"/></svg></td><td>{escape(shown)}</td></tr>'
        )
    return f'<table class="bars"><tbody>{"".join(rows)}</tbody></table>'


def meaning(report: UsageReport) -> str:
    """Return what the figures mean, where the carbon figures come from, and what is missing."""
    columns: list[Column] = [*HOURS, BUSY_PERCENT, AMOUNT, *RESOURCES, *((CARBON,) if report.carbon else ())]
    said = "".join(f"<dt>{escape(one.name)}</dt><dd>{escape(one.says)}</dd>" for one in columns)
    notes = "".join(f"<p>{escape(one)}</p>" for one in (report.carbon, report.note) if one)
    return (
        f'<h2>What the figures mean</h2><dl class="meaning">{said}</dl>'
        "<p>A GPU hour is a whole GPU for an hour: half a GPU for two hours is one, too. Parts are rounded so that they add up "
        "to their totals; amounts are exact. Use counts for a group that its pool (<code>groups</code>, <code>group_limits</code>) or a "
        f"budget names; use that neither names has no group, although its user may be in some.</p>{notes}"
    )


def period_text(report: UsageReport, zone: tzinfo | None = None) -> str:
    """Return the time of the report for people. No zone: the machine's."""
    return f"{moment_text(report.since_s, zone)} to {moment_text(report.until_s, zone)}"


def heading(column: str) -> str:
    """Return what a column is called for people."""
    return TITLES.get(column, column)


def and_list(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
