"""Draws curves as a single SVG image.

The image is a grid of small panels, with ticks at round numbers and labels next to the points. It is readable on light and dark pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fractional_gpu.svg import Frame, Svg, element, ticks

_FRAME = Frame(width=330, height=220, left=52, right=14, top=30, bottom=34)
_HEAD, _LINE, _CHARACTER = 64, 12, 6.2  # the height of the legend and of a label, and the width of a label's character
_STYLE = (
    "svg{--paper:#fff;--ink:#1f2937;--soft:#4b5563;--grid:#e5e7eb;--a:#2563eb;--b:#d97706;--c:#b91c1c}"
    "@media(prefers-color-scheme:dark){"
    "svg{--paper:#0d1117;--ink:#e5e7eb;--soft:#9ca3af;--grid:#30363d;--a:#60a5fa;--b:#fbbf24;--c:#f87171}}"
    ".paper{fill:var(--paper)}text{font:10px system-ui,sans-serif;fill:var(--soft)}"
    "text.a,text.b,text.c{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}"
    ".title{font-size:12px;font-weight:600;fill:var(--ink)}.grid{stroke:var(--grid)}"
    ".line{fill:none;stroke-width:1.5}"
    ".line.a{stroke:var(--a)}.line.b{stroke:var(--b)}.line.c{stroke:var(--c)}"
    ".dot.a,text.a{fill:var(--a)}.dot.b,text.b{fill:var(--b)}.dot.c,text.c{fill:var(--c)}"
)
LOWER_LEFT = "Lower and further left is better; the axes begin where the figures do."
_KINDS = "abc"  # the classes of the style, one for each colour


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one series, with their labels and positions. Two or more points are joined by a line."""

    name: str
    points: Sequence[tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the small plots. Every panel has the same series, at most three."""

    title: str
    series: Sequence[Series]


def curves(rows: Sequence[Sequence[Panel]], *, across: str, up: str, note: str = LOWER_LEFT) -> str:
    """Return the image as SVG. `across` and `up` name the axes of all panels. The sentence `note` is shown after the axis names."""
    width, height = max(len(row) for row in rows) * _FRAME.width, _HEAD + len(rows) * _FRAME.height
    parts = [
        element("title", f"{up} against {across}"),
        element("style", Svg(_STYLE)),
        element("rect", class_="paper", width=width, height=height),
    ]
    at = 14
    for kind, one in zip(_KINDS, rows[0][0].series, strict=False):
        parts.append(_dot(kind, at, 22, large=len(one.points) == 1))
        parts.append(element("text", one.name, class_="title", x=at + 10, y=26))
        at += 34 + round(6.6 * len(one.name))
    parts.append(element("text", f"across: {across}; up: {up}. {note}", x=10, y=46))
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            moved = f"translate({column * _FRAME.width},{_HEAD + row * _FRAME.height})"
            parts.append(element("g", *_panel(panel), transform=moved))
    size: dict[str, str | int] = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", role="img", **size) + "\n"


def _dot(kind: str, x: float, y: float, *, large: bool) -> Svg:
    return element("circle", class_=f"dot {kind}", cx=float(x), cy=float(y), r=5 if large else 3)


class _Labels:
    """Places labels so that they do not overlap. A label is left out if there is no room for it."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float, float, float]] = []

    def block(self, x: float, y: float) -> None:
        """Keep labels away from a point."""
        self._taken.append((x - 3, y - 3, x + 3, y + 3))

    def place(self, kind: str, text: str, x: float, y: float) -> list[Svg]:
        """Return the label next to its point, or an empty list if there is no room for it."""
        wide = _CHARACTER * len(text)
        for left, base in ((x + 6, y - 4), (x + 6, y + 12), (x - 6 - wide, y - 4), (x - 6 - wide, y + 12)):
            box = (left, base - _LINE + 3, left + wide, base + 2)
            inside = box[0] >= _FRAME.left and box[2] <= _FRAME.width - 4
            inside = inside and box[1] >= _FRAME.top - 8 and box[3] <= _FRAME.y(0)
            if inside and not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
                for other in self._taken
            ):
                self._taken.append(box)
                return [element("text", text, class_=kind, x=left, y=base)]
        return []


def _panel(panel: Panel) -> list[Svg]:
    points = [point for one in panel.series for point in one.points]
    across = ticks(min(x for _, x, _ in points), max(x for _, x, _ in points))
    up = ticks(0.0, max(y for _, _, y in points) or 1.0)

    def share(x: float) -> float:
        return (x - across[0]) / (across[-1] - across[0])

    parts = [element("text", panel.title, class_="title", x=_FRAME.left, y=_FRAME.top - 12)]
    parts += _FRAME.marks_up((value / up[-1], _number(value)) for value in up)
    parts += _FRAME.marks_across((share(value), _number(value)) for value in across)
    labels = _Labels()
    for kind, one in zip(_KINDS, panel.series, strict=False):
        shares = [(share(x), y / up[-1]) for _, x, y in one.points]
        if len(shares) > 1:
            parts.append(_FRAME.line(shares, f"line {kind}"))
        for x, y in shares:
            parts.append(_dot(kind, _FRAME.x(x), _FRAME.y(y), large=len(shares) == 1))
            labels.block(_FRAME.x(x), _FRAME.y(y))
    for kind, one in reversed([*zip(_KINDS, panel.series, strict=False)]):  # the last series gets its labels first
        for text, x, y in one.points:
            parts += labels.place(kind, text, _FRAME.x(share(x)), _FRAME.y(y / up[-1]))
    return parts


def _number(value: float) -> str:
    return f"{round(value, 6):,.10g}"
