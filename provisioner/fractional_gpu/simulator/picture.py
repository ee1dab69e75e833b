"""A report of the runs as one HTML file: SVG only, no script, nothing loaded from elsewhere."""

from collections.abc import Callable, Sequence
from html import escape
from math import log10

from fractional_gpu.simulator.result import Point, Result

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 220, 60, 30
_STEPS = 600  # more points than that cannot be told apart
_COLOURS = ("#2563eb", "#d97706", "#059669", "#b91c1c", "#7c3aed", "#0891b2", "#4b5563")
_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#1f2937}"
    "svg{width:100%;height:auto}text{font-size:12px;fill:#4b5563}.grid{stroke:#e5e7eb}"
    "td,th{padding:.2em .8em;text-align:right}th:first-child,td:first-child{text-align:left}"
)


def picture(results: Sequence[Result]) -> str:
    """Return the page: devices held, cells at work and cells that wait over time, and the distribution of waits."""
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Simulated GPUs</title><style>{_STYLE}</style>'
    ]
    parts.append("<h1>Simulated notebook GPUs</h1>")
    parts.append(_legend(results))
    shown: list[tuple[str, Callable[[Point], int]]] = [
        ("Devices on which leases hold memory", lambda point: point.devices_held),
        ("Cells on a GPU", lambda point: point.busy),
        ("Cells and sessions that wait", lambda point: point.waiting),
    ]
    for title, value in shown:
        parts.append(f"<h2>{title}</h2>{_over_time(results, value, title)}")
    parts.append(f"<h2>Waits: share of GPU cells that waited at most so long</h2>{_waits(results)}")
    return "".join([*parts, "</html>\n"])


def _legend(results: Sequence[Result]) -> str:
    rows = []
    for number, result in enumerate(results):
        waits = result.waits.summary()
        rows.append(
            f'<tr><td style="color:{_colour(number)}">&#9632; {escape(result.name)}</td><td>{result.devices}</td>'
            f"<td>{result.peak_devices_held}</td><td>{waits['p50']:g}</td><td>{waits['p95']:g}</td><td>{waits['max']:g}</td>"
            f"<td>{result.doors.percentile_ms(95) / 1000:g}</td><td>{result.lateness.cells.percentile_ms(95) / 1000:g}</td>"
            f"<td>{result.lateness.percentile_of_users_ms(100) / 1000:g}</td>"
            f"<td>{result.out_of_memory}</td><td>{result.lost}</td></tr>"
        )
    head = "<tr><th>run<th>devices<th>most held<th>wait p50, s<th>p95, s<th>longest, s<th>door p95, s"
    head += "<th>late p95, s<th>of the worst user, s<th>out of memory<th>lost</tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _over_time(results: Sequence[Result], value: Callable[[Point], int], title: str) -> str:
    end_ms = max((result.timeline[-1].at_ms for result in results if result.timeline), default=1) or 1
    series = [_steps(result.timeline, value, end_ms) for result in results]
    top = max((max(one, default=0) for one in series), default=0) or 1
    lines = []
    for number, one in enumerate(series):
        points = [(step / _STEPS, height / top) for step, height in enumerate(one)]
        lines.append(_line(points, _colour(number)))
    labels = [(part / 4, f"{end_ms * part / 4 / 3_600_000:.3g} h") for part in range(5)]
    return _frame("".join(lines), labels, [(part / 2, f"{top * part / 2:g}") for part in range(3)], title)


def _steps(timeline: Sequence[Point], value: Callable[[Point], int], end_ms: int) -> list[int]:
    """Return the largest value in each of the equal steps of the time, so that no peak is lost."""
    steps: list[int] = []
    last = at = 0
    for step in range(_STEPS + 1):
        most = last
        while at < len(timeline) and timeline[at].at_ms * _STEPS <= end_ms * step:
            last = value(timeline[at])
            most = max(most, last)
            at += 1
        steps.append(most)
    return steps


def _waits(results: Sequence[Result]) -> str:
    longest = max((result.waits.percentile_ms(100) for result in results), default=0) / 1000
    decades = max(1, -(-int(1000 * log10(max(10.0, longest * 10))) // 1000))  # from 0.1 s up
    lines = []
    for number, result in enumerate(results):
        ordered = result.waits.ordered
        points = []
        for step in range(_STEPS + 1):
            limit_ms = 100 * 10 ** (decades * step / _STEPS)
            points.append((step / _STEPS, _share(ordered, limit_ms)))
        lines.append(_line(points, _colour(number)))
    labels = [(part / decades, f"{0.1 * 10**part:g} s") for part in range(decades + 1)]
    return _frame("".join(lines), labels, [(part / 4, f"{25 * part} %") for part in range(5)], "distribution of waits")


def _share(ordered: Sequence[int], limit_ms: float) -> float:
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] <= limit_ms:
            low = middle + 1
        else:
            high = middle
    return low / len(ordered) if ordered else 1.0


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    """Return a polyline; the points are shares of the width and height."""
    placed = " ".join(f"{_x(across):.1f},{_y(up):.1f}" for across, up in points)
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{placed}"/>'


def _frame(inside: str, across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]], title: str) -> str:
    grid = []
    for share, label in across:
        grid.append(f'<text x="{_x(share):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{label}</text>')
    for share, label in up:
        y = _y(share)
        grid.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(grid)}{inside}</svg>'
    )


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - 20)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - 10)
