"""Curves as one SVG picture: small panels in rows and columns, round ticks, labels beside points; readable on light and on dark pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 330, 220, 52, 14, 30, 34
_HEAD, _LINE, _CHARACTER = 64, 12, 6.2  # the legend; a label's height and the width of one of its characters
_INTERVALS = 4  # about so many between the ticks of an axis
_STYLE = (
    "svg{--paper:#fff;--ink:#1f2937;--soft:#4b5563;--grid:#e5e7eb;--a:#2563eb;--b:#d97706;--c:#b91c1c}"
    "@media(prefers-color-scheme:dark){"
    "svg{--paper:#0d1117;--ink:#e5e7eb;--soft:#9ca3af;--grid:#30363d;--a:#60a5fa;--b:#fbbf24;--c:#f87171}}"
    ".paper{fill:var(--paper)}text{font:10px system-ui,sans-serif;fill:var(--soft)}"
    "text.a,text.b,text.c{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}"
    ".title{font-size:12px;font-weight:600;fill:var(--ink)}.grid{stroke:var(--grid)}.axis{stroke:var(--soft)}"
    ".line{fill:none;stroke-width:1.5}"
    ".line.a{stroke:var(--a)}.line.b{stroke:var(--b)}.line.c{stroke:var(--c)}"
    ".dot.a,text.a{fill:var(--a)}.dot.b,text.b{fill:var(--b)}.dot.c,text.c{fill:var(--c)}"
)
LOWER_LEFT = "Lower and further left is better; the axes begin where the figures do."
_KINDS = "abc"  # the classes of the style, a colour each


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together: their labels, and where they are. They are joined by a line if there are several."""

    name: str
    points: Sequence[tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One small picture. Panels have at most three series, the same in all of them."""

    title: str
    series: Sequence[Series]


def ticks(low: float, high: float, intervals: int = _INTERVALS) -> list[float]:
    """Return round values (1, 2 or 5 times a power of ten apart) from below `low` to above `high`, in about so many intervals."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(span / intervals))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * intervals >= span * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def curves(rows: Sequence[Sequence[Panel]], *, across: str, up: str, note: str = LOWER_LEFT) -> str:
    """Return the picture. `across` and `up` name the axes of all panels; `note` is the sentence after them."""
    columns = max(len(row) for row in rows)
    width, height = columns * _WIDTH, _HEAD + len(rows) * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{escape(up)} against {escape(across)}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        _legend(rows[0][0].series, across, up, note),
    ]
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            moved = f"translate({column * _WIDTH},{_HEAD + row * _HEIGHT})"
            parts.append(f'<g transform="{moved}">{_panel(panel)}</g>')
    return "".join([*parts, "</svg>\n"])


def _legend(series: Sequence[Series], across: str, up: str, note: str) -> str:
    parts, at = [], 14.0
    for kind, one in zip(_KINDS, series, strict=False):
        parts.append(_dot(kind, at, 22, large=len(one.points) == 1))
        parts.append(f'<text class="title" x="{at + 10:.0f}" y="26">{escape(one.name)}</text>')
        at += 34 + 6.6 * len(one.name)
    axes = f"across: {across}; up: {up}. {note}"
    return "".join([*parts, f'<text x="10" y="46">{escape(axes)}</text>'])


def _dot(kind: str, x: float, y: float, *, large: bool) -> str:
    return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{5 if large else 3}"/>'


class _Labels:
    """Places of labels that do not cover one another; those without a free place are left out."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float, float, float]] = []

    def block(self, x: float, y: float) -> None:
        """Keep a point free."""
        self._taken.append((x - 3, y - 3, x + 3, y + 3))

    def place(self, kind: str, text: str, x: float, y: float) -> str:
        """Return the label beside its point, or nothing."""
        wide = _CHARACTER * len(text)
        for left, base in ((x + 6, y - 4), (x + 6, y + 12), (x - 6 - wide, y - 4), (x - 6 - wide, y + 12)):
            box = (left, base - _LINE + 3, left + wide, base + 2)
            inside = box[0] >= _LEFT and box[2] <= _WIDTH - 4 and box[1] >= _TOP - 8 and box[3] <= _HEIGHT - _BOTTOM
            if inside and not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
                for other in self._taken
            ):
                self._taken.append(box)
                return f'<text class="{kind}" x="{left:.1f}" y="{base:.1f}">{escape(text)}</text>'
        return ""


def _panel(panel: Panel) -> str:
    points = [point for one in panel.series for point in one.points]
    across = ticks(min(x for _, x, _ in points), max(x for _, x, _ in points))
    up = ticks(0.0, max(y for _, _, y in points) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + (x - across[0]) / (across[-1] - across[0]) * (_WIDTH - _LEFT - _RIGHT)
        return right, _HEIGHT - _BOTTOM - y / up[-1] * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<text class="title" x="{_LEFT}" y="{_TOP - 12}">{escape(panel.title)}</text>']
    for value in up:
        _, y = place(across[0], value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in across:
        x, _ = place(value, 0.0)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM + 3}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{_number(value)}</text>')
    labels = _Labels()
    drawn = [
        (kind, one, [place(x, y) for _, x, y in one.points]) for kind, one in zip(_KINDS, panel.series, strict=False)
    ]
    for kind, _, places in drawn:
        if len(places) > 1:
            parts.append(f'<polyline class="line {kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        for x, y in places:
            parts.append(_dot(kind, x, y, large=len(places) == 1))
            labels.block(x, y)
    for kind, one, places in reversed(drawn):  # the last series is named first
        parts += [labels.place(kind, text, x, y) for (text, _, _), (x, y) in zip(one.points, places, strict=True)]
    return "".join(parts)


def _number(value: float) -> str:
    return f"{round(value, 6):,.10g}"
