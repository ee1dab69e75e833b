"""`%gpu history`: a kernel's memory use and residency over time, as a picture and as text with the same columns."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fractional_gpu.core.units import format_memory
from fractional_gpu.protocol.names import state_words
from fractional_gpu.protocol.status import History, UsagePoint
from fractional_gpu.svg import Frame, Svg, element
from fractional_gpu_kernel.display.lines import View
from fractional_gpu_kernel.display.views import FREE, SAVED, USED, box, moment

_TEXT_COLUMNS = 60
_PICTURE_COLUMNS = 240
_LEVELS = " ▁▂▃▄▅▆▇█"
_ON_GPU = frozenset({"resident", "suspending", "resuming"})
_IN_HOST = "suspended"
_SIGNS = {"resident": "█", "suspending": "▓", "resuming": "▓", "suspended": "░"}
_LEGEND = "on GPU: █ on the GPU, ▓ being moved, ░ saved in host memory, blank: neither."

_FRAME = Frame(width=640, height=176, left=62, right=8, top=10, bottom=56)
_STRIP = 130  # the y coordinate of the strip that shows the states
_DASHED = {"fill": "none", "style": f"stroke:{SAVED}", "stroke_width": "2", "stroke_dasharray": "5 3"}
_FILLED = {"style": f"fill:{USED}", "fill_opacity": ".45"}
_LIMIT = {"stroke": "currentColor", "stroke_opacity": ".7", "stroke_dasharray": "2 3"}


class Column(NamedTuple):
    """A period of time, with its peak memory in MiB and the state that lasted longest."""

    used_mib: int
    saved_mib: int
    state: str


def columns(points: Sequence[UsagePoint], since_ms: int, until_ms: int, count: int) -> list[Column]:
    """Divide [`since_ms`, `until_ms`) into `count` columns. `points` are in chronological order, and each holds until the next one."""
    width = max(1, until_ms - since_ms) / count
    used, saved = [0] * count, [0] * count
    lasted: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(count)]
    ends = [point.at_ms for point in points[1:]] + [until_ms]
    for point, end_ms in zip(points, ends, strict=True):
        begin, end = max(point.at_ms, since_ms) - since_ms, min(end_ms, until_ms) - since_ms
        if end <= begin:
            continue
        first, last = int(begin / width), min(count - 1, int((end - 0.5) / width))
        for index in range(first, last + 1):
            used[index] = max(used[index], point.used_mib)
            saved[index] = max(saved[index], point.saved_mib)
            lasted[index][point.state] += min(end, (index + 1) * width) - max(begin, index * width)
    states = [max(each, key=lambda state, each=each: each[state], default="") for each in lasted]  # type: ignore[misc]
    return [Column(*each) for each in zip(used, saved, states, strict=True)]


class HistoryView(View):
    """A lease's history up to now. With `last_ms`, only that many milliseconds of it are shown."""

    def __init__(self, history: History, last_ms: int | None = None, now_ms: int | None = None) -> None:
        self._points = history.points
        self._cap_mib = history.cap_mib
        self._until_ms = int(time.time() * 1000) if now_ms is None else now_ms
        first_ms = self._points[0].at_ms if self._points else self._until_ms
        self._since_ms = first_ms if last_ms is None else max(first_ms, self._until_ms - last_ms)

    def summary(self) -> str:
        if not self._points or self._until_ms <= self._since_ms:
            return "This kernel's share has no history yet."
        fine = self._columns(_PICTURE_COLUMNS)
        share = sum(column.state in _ON_GPU for column in fine) * 100 // len(fine)
        saved_mib = max(column.saved_mib for column in fine)
        saved = f", at most {format_memory(saved_mib)} saved in host memory" if saved_mib else ""
        return (
            f"{moment(self._since_ms, self._until_ms)} to {moment(self._until_ms, self._until_ms)}: on the GPU {share} % of the time, "
            f"at most {format_memory(max(column.used_mib for column in fine))} of {format_memory(self._cap_mib)} used{saved}."
        )

    def __repr__(self) -> str:
        if not self._points or self._until_ms <= self._since_ms:
            return self.summary()
        coarse = self._columns(_TEXT_COLUMNS)
        top_mib = self._top_mib(coarse)
        rows = [("used", [column.used_mib for column in coarse])]
        if any(column.saved_mib for column in coarse):
            rows.append(("saved", [column.saved_mib for column in coarse]))
        lines = [f"{name:<6}  {''.join(_level(mib, top_mib) for mib in row)}" for name, row in rows]
        strip = "".join(_SIGNS.get(column.state, " ") for column in coarse)
        return "\n".join(
            [self.summary(), *lines, f"on GPU  {strip}", f"Full height is {format_memory(top_mib)}. {_LEGEND}"]
        )

    def html(self) -> str:
        is_empty = not self._points or self._until_ms <= self._since_ms
        return box("GPU memory of this kernel over time", "" if is_empty else self._picture(), note=self.summary())

    def _columns(self, count: int) -> list[Column]:
        return columns(self._points, self._since_ms, self._until_ms, count)

    def _top_mib(self, row: Sequence[Column]) -> int:
        return max(1, self._cap_mib, *(max(column.used_mib, column.saved_mib) for column in row))

    def _picture(self) -> Svg:
        fine = self._columns(_PICTURE_COLUMNS)
        top_mib = self._top_mib(fine)
        left, base = _FRAME.left, _FRAME.y(0)
        right, cap_y = _FRAME.x(1), _FRAME.y(self._cap_mib / top_mib)
        filled = {**_FILLED, "style": f"fill:{USED};stroke:{USED}", "stroke_width": "1.5"}
        parts = [
            element("path", d=f"M{left} {_FRAME.top}V{base:.0f}H{right:.0f}", fill="none", stroke="currentColor", stroke_opacity=".5"),
            element("path", d=f"M{left} {cap_y:.1f}H{right:.0f}", **_LIMIT),
            _text(left - 6, cap_y + 4, "end", format_memory(self._cap_mib)),
            _text(left - 6, base, "end", "0"),
            _text(left - 6, _STRIP + 9, "end", "on GPU"),
            _text(left, _STRIP + 26, "start", moment(self._since_ms, self._until_ms)),
            _text(right, _STRIP + 26, "end", moment(self._until_ms, self._until_ms)),
            element("path", d=_area([column.saved_mib / top_mib for column in fine]), **_DASHED),
            element("path", d=_area([column.used_mib / top_mib for column in fine]), **filled),
            *_strip(fine),
            *_legend(),
        ]  # fmt: skip
        return _FRAME.drawn(
            parts, aria_label=self.summary(), xmlns="http://www.w3.org/2000/svg",
            style="width:100%;max-width:640px;font-size:11px", fill="currentColor",
        )  # fmt: skip


def _level(mib: int, top_mib: int) -> str:
    return _LEVELS[max(1, min(8, round(8 * mib / top_mib)))] if mib > 0 else " "


def _x(index: int) -> float:
    return _FRAME.x(index / _PICTURE_COLUMNS)


def _area(shares: Sequence[float]) -> str:
    """Return the SVG path of a stepped area. Nothing is drawn for periods without recorded memory use."""
    steps, base = "", f"{_FRAME.y(0):.0f}"
    is_open = False
    for index, share in enumerate([*shares, 0]):
        if share > 0:
            steps += ("" if is_open else f"M{_x(index):.1f} {base}") + f"V{_FRAME.y(share):.1f}H{_x(index + 1):.1f}"
        elif is_open:
            steps += f"V{base}"
        is_open = share > 0
    return steps


def _strip(row: Sequence[Column]) -> list[Svg]:
    looks = {"resident": (USED, 1), "suspending": (USED, 0.5), "resuming": (USED, 0.5), _IN_HOST: (FREE, 1)}
    pieces = []
    begin = 0
    for index in range(1, len(row) + 1):
        if index < len(row) and row[index].state == row[begin].state:
            continue
        colour, opacity = looks.get(row[begin].state, (FREE, 0))
        pieces.append(
            element(
                "rect", element("title", state_words(row[begin].state)), x=_x(begin), y=_STRIP, width=_x(index) - _x(begin), height=10,
                style=f"fill:{colour}", fill_opacity=opacity,
            )
        )  # fmt: skip
        begin = index
    return pieces


def _legend() -> list[Svg]:
    left, y = _FRAME.left, _FRAME.height - 6
    return [
        element("rect", x=left, y=y - 8, width=10, height=9, **_FILLED),
        _text(left + 15, y, "start", "used on the GPU"),
        element("rect", x=left + 130, y=y - 8, width=10, height=9, **_DASHED),
        _text(left + 145, y, "start", "saved in host memory"),
        element("path", d=f"M{left + 290} {y - 4}h18", **_LIMIT),
        _text(left + 313, y, "start", "this kernel's limit"),
    ]


def _text(x: float, y: float, anchor: str, text: str) -> Svg:
    return element("text", text, x=x, y=y, text_anchor=anchor)
