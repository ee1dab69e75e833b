"""Builds SVG elements and chart axes.

All functions escape the text passed to them. Kernels import this module, so it uses only the standard library.
"""

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple


class Svg(str):
    """Text that is already SVG. Jinja2 inserts it unchanged."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def element(name: str, *inside: str, **attributes: str | float) -> Svg:
    """Return an SVG element.

    In attribute names, `class_` stands for `class` and `text_anchor` for `text-anchor`. Floats are written with one decimal.
    """
    written = ""
    for key, value in attributes.items():
        shown = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
        written += f' {key.rstrip("_").replace("_", "-")}="{shown}"'
    content = "".join(one if isinstance(one, Svg) else escape(one) for one in inside)
    return Svg(f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>")


def ticks(low: float, high: float, intervals: int = 4, *, least_step: float = 0) -> list[float]:
    """Return round values that cover the range from `low` to `high` in about the requested number of intervals.

    The values are 1, 2 or 5 times a power of ten apart.
    """
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(span / intervals))
    step = max(least_step, next(power * one for one in (1, 2, 5, 10) if power * one * intervals >= span * 0.999))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def count_axis(most: float) -> tuple[list[tuple[float, str]], float]:
    """Return tick marks at round whole numbers from 0 up, and the last of these numbers. A mark is (fraction of the axis, label)."""
    at = ticks(0, most, least_step=1)
    return [(one / at[-1], f"{one:,.0f}") for one in at], at[-1]


class Frame(NamedTuple):
    """The size of a chart and its margins.

    Positions in the chart are fractions of its width and height, measured from the lower left corner.
    """

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    def x(self, share: float) -> float:
        return self.left + share * (self.width - self.left - self.right)

    def y(self, share: float) -> float:
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    def marks_up(self, marks: Iterable[tuple[float, str]]) -> list[Svg]:
        """Return grid lines across the chart, each with a label on its left."""
        parts = []
        for share, label in marks:
            y = self.y(share)
            parts.append(element("line", class_="grid", x1=self.left, x2=self.width - self.right, y1=y, y2=y))
            parts.append(element("text", label, x=self.left - 8, y=y + 4, text_anchor="end"))
        return parts

    def marks_across(self, marks: Iterable[tuple[float, str]]) -> list[Svg]:
        """Return short tick marks below the chart, each with a label."""
        parts, y = [], self.y(0)
        for share, label in marks:
            x = self.x(share)
            parts.append(element("line", class_="grid", x1=x, x2=x, y1=y, y2=y + 5))
            parts.append(element("text", label, x=x, y=y + 18, text_anchor="middle"))
        return parts

    def line(self, points: Iterable[tuple[float, float]], class_: str) -> Svg:
        placed = " ".join(f"{self.x(across):.1f},{self.y(up):.1f}" for across, up in points)
        return element("polyline", class_=class_, points=placed)

    def drawn(self, parts: Sequence[str], **attributes: str) -> Svg:
        return element("svg", *parts, role="img", **attributes, viewBox=f"0 0 {self.width} {self.height}")
