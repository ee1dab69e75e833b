"""`%gpu history`: a kernel's memory and residency over time, as a picture and as characters.

Both are made of the same columns: a stretch of time, the most that was used on the device and saved in host memory in it, and the
state that took up most of it.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fractional_gpu.core.units import format_memory
from fractional_gpu.protocol.messages import History, UsagePoint
from fractional_gpu.protocol.names import state_words
from fractional_gpu_kernel.display.lines import Bundle
from fractional_gpu_kernel.display.views import FREE, SAVED, USED, box, escape, moment

_TEXT_COLUMNS = 60
_PICTURE_COLUMNS = 240
_LEVELS = " ▁▂▃▄▅▆▇█"
_ON_GPU = frozenset({"resident", "suspending", "resuming"})
_IN_HOST = "suspended"
_SIGNS = {"resident": "█", "suspending": "▓", "resuming": "▓", "suspended": "░"}
_LEGEND = "on GPU: █ on the GPU, ▓ on its way, ░ saved in host memory, blank: neither."

_LEFT, _RIGHT, _TOP, _BOTTOM, _STRIP, _HEIGHT = 62, 632, 10, 120, 130, 176  # of the picture, in its own units


class Column(NamedTuple):
    """A stretch of time: MiB at most, and the state that lasted longest."""

    used_mib: int
    saved_mib: int
    state: str


def columns(points: Sequence[UsagePoint], since_ms: int, until_ms: int, count: int) -> list[Column]:
    """Cut [`since_ms`, `until_ms`) into `count` columns. `points` are in order of time; each holds until the next one."""
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


class HistoryView:
    """A lease over time, up to now. `last_ms` None: all there is."""

    def __init__(self, history: History, last_ms: int | None = None, now_ms: int | None = None) -> None:
        self._points = history.points
        self._cap_mib = history.cap_mib
        self._until_ms = int(time.time() * 1000) if now_ms is None else now_ms
        first_ms = self._points[0].at_ms if self._points else self._until_ms
        self._since_ms = first_ms if last_ms is None else max(first_ms, self._until_ms - last_ms)

    def summary(self) -> str:
        """Return the whole in one sentence."""
        if not self._points or self._until_ms <= self._since_ms:
            return "There is no history of this kernel's share yet."
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

    def bundle(self) -> Bundle:
        """Return text and HTML."""
        title = "GPU memory of this kernel over time"
        if not self._points or self._until_ms <= self._since_ms:
            return {"text/plain": repr(self), "text/html": box(title, note=self.summary())}
        return {"text/plain": repr(self), "text/html": box(title, self._picture(), note=self.summary())}

    def _columns(self, count: int) -> list[Column]:
        return columns(self._points, self._since_ms, self._until_ms, count)

    def _top_mib(self, row: Sequence[Column]) -> int:
        return max(1, self._cap_mib, *(max(column.used_mib, column.saved_mib) for column in row))

    def _picture(self) -> str:
        fine = self._columns(_PICTURE_COLUMNS)
        top_mib = self._top_mib(fine)
        parts = [
            self._axes(top_mib),
            _area(
                [column.saved_mib for column in fine],
                top_mib,
                f'fill="none" style="stroke:{SAVED}" stroke-width="2" stroke-dasharray="5 3"',
            ),
            _area(
                [column.used_mib for column in fine],
                top_mib,
                f'style="fill:{USED};stroke:{USED}" fill-opacity=".45" stroke-width="1.5"',
            ),
            *_strip(fine),
            _legend(),
        ]
        return (
            f'<svg role="img" aria-label="{escape(self.summary())}" viewBox="0 0 640 {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" '
            f'style="width:100%;max-width:640px;font-size:11px" fill="currentColor">{"".join(parts)}</svg>'
        )

    def _axes(self, top_mib: int) -> str:
        cap_y = _y(self._cap_mib, top_mib)
        frame = f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="currentColor" stroke-opacity=".5"/>'
        cap = f'<path d="M{_LEFT} {cap_y:.1f}H{_RIGHT}" stroke="currentColor" stroke-opacity=".7" stroke-dasharray="2 3"/>'
        texts = [
            (_LEFT - 6, cap_y + 4, "end", format_memory(self._cap_mib)),
            (_LEFT - 6, _BOTTOM, "end", "0"),
            (_LEFT - 6, _STRIP + 9, "end", "on GPU"),
            (_LEFT, _STRIP + 26, "start", moment(self._since_ms, self._until_ms)),
            (_RIGHT, _STRIP + 26, "end", moment(self._until_ms, self._until_ms)),
        ]
        return frame + cap + "".join(_text(*each) for each in texts)


def _level(mib: int, top_mib: int) -> str:
    if mib <= 0:
        return _LEVELS[0]
    return _LEVELS[max(1, min(8, round(8 * mib / top_mib)))]


def _x(index: int) -> float:
    return _LEFT + (_RIGHT - _LEFT) * index / _PICTURE_COLUMNS


def _y(mib: int, top_mib: int) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * mib / top_mib


def _area(row: Sequence[int], top_mib: int, style: str) -> str:
    """Return a stepped area; stretches without memory are left out, so that no line lies on the axis."""
    steps = []
    open_ = False
    for index, mib in enumerate([*row, 0]):
        if mib > 0:
            steps.append(f"{'' if open_ else f'M{_x(index):.1f} {_BOTTOM}'}V{_y(mib, top_mib):.1f}H{_x(index + 1):.1f}")
        elif open_:
            steps.append(f"V{_BOTTOM}")
        open_ = mib > 0
    return f'<path d="{"".join(steps)}" {style}/>' if steps else ""


def _strip(row: Sequence[Column]) -> list[str]:
    """Return the residency: runs of equal states."""
    looks = {"resident": (USED, 1.0), "suspending": (USED, 0.5), "resuming": (USED, 0.5), _IN_HOST: (FREE, 1.0)}
    pieces = []
    begin = 0
    for index in range(1, len(row) + 1):
        if index < len(row) and row[index].state == row[begin].state:
            continue
        colour, opacity = looks.get(row[begin].state, (FREE, 0.0))
        pieces.append(
            f'<rect x="{_x(begin):.1f}" y="{_STRIP}" width="{_x(index) - _x(begin):.1f}" height="10" style="fill:{colour}" '
            f'fill-opacity="{opacity}"><title>{escape(state_words(row[begin].state))}</title></rect>'
        )
        begin = index
    return pieces


def _legend() -> str:
    y = _HEIGHT - 6
    square = f'<rect x="{{}}" y="{y - 8}" width="10" height="9" {{}}/>'
    return "".join(
        [
            square.format(_LEFT, f'style="fill:{USED}" fill-opacity=".45"'),
            _text(_LEFT + 15, y, "start", "used on the GPU"),
            square.format(_LEFT + 130, f'fill="none" style="stroke:{SAVED}" stroke-width="2" stroke-dasharray="5 3"'),
            _text(_LEFT + 145, y, "start", "saved in host memory"),
            f'<path d="M{_LEFT + 290} {y - 4}h18" stroke="currentColor" stroke-opacity=".7" stroke-dasharray="2 3"/>',
            _text(_LEFT + 313, y, "start", "this kernel's limit"),
        ]
    )


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
