"""What `jupyter gpu measure` says: sentences with their intervals, a table, JSON, and a picture. Findings in, text out."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from fractional_gpu.commands.measuring.study import WHOLE_MILLI, Finding, right_share
from fractional_gpu.commands.terminal.layout import table
from fractional_gpu.core.units import format_fraction, format_memory, plural
from fractional_gpu.curves import Panel, Series, curves
from fractional_gpu.stats import median

if TYPE_CHECKING:
    from rich.text import Text

_UNKNOWN: Final = "-"
_CLOSE: Final = 0.04  # a cost within so much of a simple part is called that part
_PARTS: Final = {
    Fraction(1, 2): "half",
    Fraction(1, 3): "a third",
    Fraction(2, 3): "two thirds",
    Fraction(1, 4): "a quarter",
    Fraction(3, 4): "three quarters",
    Fraction(1, 5): "a fifth",
    Fraction(1, 8): "an eighth",
    Fraction(1, 10): "a tenth",
}


def sentences(findings: Sequence[Finding], most_slower: float) -> list[str]:
    """Return a sentence for each setting, the baseline first, and the verdict last. `most_slower`: see `Finding.suffices`."""
    alone, *others = findings
    return [_alone(alone), *(_compared(one) for one in others), verdict(findings, most_slower)]


def _alone(found: Finding) -> str:
    share = format_fraction(found.setting.fraction_milli)
    if math.isnan(found.unit_s):
        return f"alone on {share}: cannot be known in this time: {found.why_not}"
    memory = f", {format_memory(found.memory_mib)} of GPU memory at most" if found.memory_mib else ""
    return f"alone on {share}: {seconds(found.unit_s)} for a unit of work, 95 % within {seconds(found.p95_s)}{memory}"


def name(found: Finding) -> str:
    """Return `1/4 beside 3 others`."""
    others = found.setting.tenants - 1
    beside = f" beside {plural(others, 'other')}" if others else ""
    return f"{format_fraction(found.setting.fraction_milli)}{beside}"


def _compared(found: Finding) -> str:
    if found.slower is None or found.cost is None:
        return f"{name(found)}: cannot be known in this time: {found.why_not}"
    return f"{name(found)}: {slower(found)}, {cost_text(found.cost)}"


def slower(found: Finding) -> str:
    """Return `3 % slower than alone (1 to 5 %)`, from a finding that is compared."""
    assert found.slower is not None  # noqa: S101 - the caller's promise
    value, low, high = ((part - 1) * 100 for part in (found.slower.value, found.slower.low, found.slower.high))
    if value < 0 and round(-value):
        return f"{-value:.0f} % faster than alone ({_percent(-high)} to {_percent(-low)} %)"
    return f"{_percent(value)} % slower than alone ({_percent(low)} to {_percent(high)} %)"


def percent_slower(quotients: Sequence[float]) -> str:
    """Return what rounds say so far: `+3 %`."""
    return f"{(median(quotients) - 1) * 100:+.0f} %"


def _percent(value: float) -> str:
    return f"{value:.0f}".replace("-0", "0") if abs(value) < 1000 else f"{value:,.0f}"


def cost_text(part: float) -> str:
    """Return `a third of the cost`, or with the percentage where no simple part is close."""
    close = min(_PARTS, key=lambda one: abs(float(one) - part))
    if abs(part / float(close) - 1) <= _CLOSE:
        return f"{_PARTS[close]} of the cost"
    return "the same cost" if abs(part - 1) <= _CLOSE else f"{part * 100:.0f} % of the cost"


def verdict(findings: Sequence[Finding], most_slower: float) -> str:
    """Return which share suffices, and what is not known about smaller ones."""
    limit = f"at most {(most_slower - 1) * 100:g} % slower than alone"
    best = right_share(findings[1:], most_slower)
    least_milli = best.setting.fraction_milli if best is not None else findings[0].setting.fraction_milli
    unknown = [
        format_fraction(one.setting.fraction_milli)
        for one in findings[1:]
        if one.suffices(most_slower) is None and one.setting.fraction_milli < least_milli
    ]
    doubt = f" Whether {' or '.join(unknown)} does cannot be said." if unknown else ""
    if best is None:
        return f"No smaller share is known to suffice ({limit}).{doubt}"
    return f"{format_fraction(least_milli)} suffices ({limit}), also on a full device.{doubt}"


def figures(findings: Sequence[Finding], width: int | None = None) -> "list[Text]":
    """Return the lines of a table of all figures. `width`: of the terminal, in characters."""
    header = [
        "SHARE",
        "TENANTS",
        "UNITS/s",
        "ALL TENANTS",
        "MEDIAN",
        "P95",
        "MEMORY",
        "BUSY",
        "ENERGY",
        "COST",
        "ROUNDS",
    ]
    rows = [
        [
            format_fraction(one.setting.fraction_milli),
            str(one.setting.tenants),
            _number(1 / one.unit_s),
            _number(one.device_units_s),
            seconds(one.median_s),
            seconds(one.p95_s),
            format_memory(one.memory_mib) if one.memory_mib else _UNKNOWN,
            f"{one.busy_percent:.0f} %" if one.busy_percent is not None else _UNKNOWN,
            f"{one.unit_mj / 1000:.3g} J" if one.unit_mj is not None else _UNKNOWN,
            _price(one),
            str(one.rounds),
        ]
        for one in findings
        if not math.isnan(one.unit_s)
    ]
    return table(header, rows, width=width, figures_from=1)


def _price(found: Finding) -> str:
    if found.unit_price is not None:
        return f"{found.unit_price:.3g} {found.currency}"
    return f"{found.unit_gpu_s:.3g} GPU s"


def _number(value: float) -> str:
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """Return `52 ms` or `1.25 s`."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def as_json(findings: Sequence[Finding], most_slower: float, about: Mapping[str, object]) -> str:
    """Return all figures, and the sentences. Times in seconds, shares in milli-GPU; null: unknown."""
    best = right_share(findings[1:], most_slower)
    content = {
        **about,
        "most_slower": most_slower,
        "suffices_milli": best.setting.fraction_milli if best is not None else None,
        "settings": [_plain(asdict(one)) for one in findings],
        "sentences": sentences(findings, most_slower),
        "table": [one.plain for one in figures(findings)],
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def picture(findings: Sequence[Finding]) -> str:
    """Return throughput, latency and cost over the number of tenants as SVG, beside what a device for each tenant would give.

    Of several shares with as many tenants the largest is drawn. Raises ValueError where nothing was measured alone.
    """
    alone = findings[0]
    if math.isnan(alone.unit_s):
        raise ValueError("nothing was measured alone, so there is nothing to draw")
    shown: dict[int, Finding] = {}
    for one in sorted(findings, key=lambda one: -one.setting.fraction_milli):
        if not math.isnan(one.unit_s):
            shown.setdefault(one.setting.tenants, one)
    ordered = [shown[tenants] for tenants in sorted(shown)]
    whole_gpu_s = alone.unit_s * alone.setting.fraction_milli / WHOLE_MILLI

    def panel(title: str, ours: Sequence[float], apart: Sequence[float]) -> Panel:
        def points(values: Sequence[float]) -> list[tuple[str, float, float]]:
            return [("", float(one.setting.tenants), value) for one, value in zip(ordered, values, strict=True)]

        return Panel(title, [Series("on one device", points(ours)), Series("on a device each", points(apart))])

    rows = [
        [
            panel(
                "units of work in a second, all tenants",
                [one.device_units_s for one in ordered],
                [one.setting.tenants / alone.unit_s for one in ordered],
            ),
            panel(
                "median latency, ms", [one.median_s * 1000 for one in ordered], [alone.median_s * 1000 for _ in ordered]
            ),
        ],
        [
            panel("95th percentile, ms", [one.p95_s * 1000 for one in ordered], [alone.p95_s * 1000 for _ in ordered]),
            panel(
                "GPU seconds for a unit of work",
                [one.unit_gpu_s for one in ordered],
                [whole_gpu_s for _ in ordered],
            ),
        ],
    ]
    return curves(rows, across="tenants", up="see each panel", note="")
