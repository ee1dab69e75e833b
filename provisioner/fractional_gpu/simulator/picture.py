"""A report of the runs as one HTML file: SVG only, no script, nothing loaded from elsewhere, for light and dark screens.

The page begins with a sentence about what came out, and ends with all that is needed to make it again (`About`).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from fractional_gpu.core.units import plural
from fractional_gpu.pages import begin_page, end_page, round_step
from fractional_gpu.simulator.result import Result, Timeline

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 240, 60, 20, 12, 44
_STEPS = 600  # more points than that cannot be told apart
_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
_MOST_TICKS = 9
_TIME_STEPS_MS = (
    *(minutes * _MINUTE_MS for minutes in (1, 2, 5, 10, 30)),
    *(hours * _HOUR_MS for hours in (1, 2, 3, 6, 12)),
    *(days * _DAY_MS for days in (1, 2, 5, 10, 20, 50, 100, 200, 500)),
)
_SHORTEST_S = 0.1  # the left end of the axis of waits
_SHARE_SCALES = ((95, 1), (90, 2), (80, 5), (50, 10))  # the lower end of an axis of shares, and its step, percent
_MOST_DECADES_WITH_2_AND_5 = 5
# A run has a colour, in light and in dark, and a dash of its own: colours alone do not reach everybody.
_LIGHT = ("#1d4ed8", "#b45309", "#047857", "#b91c1c", "#6d28d9", "#0e7490", "#4b5563")
_DARK = ("#7cb0ff", "#fbbf24", "#4ade80", "#fca5a5", "#c4b5fd", "#67e8f9", "#d1d5db")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "5 5", "1 4", "12 4")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What made the runs: the users and GPUs of the first of them, and what the command was given.

    `whole_gpus` are the most GPUs that open sessions would have reserved at the same time. `policy` is the text of the configuration file
    that was given. With `hours_of_day`, the trace begins at midnight.
    """

    users: int
    machine: str
    whole_gpus: int
    command: str
    version: str
    policy: str | None = None
    hours_of_day: bool = True


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where its marks are, as shares of its length, and what they say."""

    title: str
    marks: Sequence[tuple[float, str]]


def picture(results: Sequence[Result], about: About) -> str:
    """Return the page: what came out, devices held, cells at work and cells that wait over time, the distribution of waits, the inputs."""
    columns: list[tuple[str, Callable[[Timeline], Sequence[int]]]] = [
        ("Devices on which leases hold memory", lambda timeline: timeline.devices_held),
        ("Cells that run on a GPU (on four GPUs: four)", lambda timeline: timeline.busy),
        ("Cells and sessions that wait", lambda timeline: timeline.waiting),
    ]
    parts = [
        _begin(len(results)),
        f'<main><h1>Simulated notebook GPUs</h1><p class="result">{escape(headline(results[0], about))}</p>',
        _table(results),
        *(f"<h2>{title}</h2>{_over_time(results, column, title, about)}" for title, column in columns),
        f"<h2>Waits: the share of GPU cells that waited at most so long</h2>{_waits(results)}",
        _inputs(about),
    ]
    return "".join([*parts, "</main>", end_page()])


def headline(result: Result, about: About) -> str:
    """Return the sentence about what came out."""
    said = f"{plural(about.users, 'user')} on {about.machine}: "
    waits, free_percent = result.waits, round(100 - result.waits.nonzero_percent(), 3)
    if not waits.ordered:
        said += "no cell used a GPU"
    elif free_percent == 100:
        said += "no GPU cell waited"
    elif not waits.percentile_ms(95):
        longest = _duration(waits.percentile_ms(100))
        said += f"{free_percent:g} % of the GPU cells did not wait, and the others at most {longest}"
    else:
        said += f"95 % of the GPU cells waited at most {_duration(waits.percentile_ms(95))}"
    said += f"; whole GPUs for each open session would have taken {plural(about.whole_gpus, 'device')}"
    if result.out_of_memory:
        said += f"; {plural(result.out_of_memory, 'time')} a cell found too little memory"
    if result.lost:
        said += f"; {plural(result.lost, 'session')} could not run to their end"
    return said + "."


def _duration(time_ms: int) -> str:
    """Return a time in words: seconds up to two minutes, then minutes, then hours."""
    if time_ms < 2 * _MINUTE_MS:
        return f"{round(time_ms / 1000, 1):g} s"
    if time_ms < 2 * _HOUR_MS:
        return f"{round(time_ms / _MINUTE_MS):g} min"
    return f"{round(time_ms / _HOUR_MS, 1):g} h"


def _begin(runs: int) -> str:
    def colours(palette: Sequence[str]) -> dict[str, str]:
        return {f"run{number}": palette[number % len(palette)] for number in range(runs)}

    lines = "".join(
        f".run{number}{{stroke:var(--run{number});stroke-dasharray:{_DASHES[number % len(_DASHES)]}}}"
        for number in range(runs)
    )
    style = (
        "tbody th{font-weight:400;border:0}svg.swatch{width:2.2em;height:.8em;margin-right:.5em}"
        "polyline,.swatch line{fill:none;stroke-width:1.8}"
    )
    return begin_page("Simulated notebook GPUs", style + lines, light=colours(_LIGHT), dark=colours(_DARK))


def _table(results: Sequence[Result]) -> str:
    """Return the figures, a run a column."""
    several = any(result.hosts > 1 for result in results)
    figures: list[tuple[str, Callable[[Result], float]]] = [
        *([("hosts", lambda result: result.hosts)] if several else []),
        ("devices", lambda result: result.devices),
        ("devices held at most", lambda result: result.peak_devices_held),
        ("waits of GPU cells: median, s", lambda result: result.waits.percentile_ms(50) / 1000),
        ("waits of GPU cells: 95th percentile, s", lambda result: result.waits.percentile_ms(95) / 1000),
        ("waits of GPU cells: longest, s", lambda result: result.waits.percentile_ms(100) / 1000),
        *([("waits of GPU cells: 95th percentile on the worst host, s", _worst_host_s)] if several else []),
        ("waits at the door: 95th percentile, s", lambda result: result.doors.percentile_ms(95) / 1000),
        ("lateness of GPU cells: 95th percentile, s", lambda result: result.lateness.cells.percentile_ms(95) / 1000),
        (
            "lateness of GPU cells: 95th percentile of the worst user, s",
            lambda result: result.lateness.percentile_of_users_ms(100) / 1000,
        ),
        ("cells without enough memory", lambda result: result.out_of_memory),
        ("sessions that could not run to their end", lambda result: result.lost),
    ]
    head = "".join(
        f'<th scope="col"><svg class="swatch" viewBox="0 0 30 8" aria-hidden="true"><line class="run{number}" x2="30" y1="4" y2="4"/></svg>'
        f"{escape(result.name)}</th>"
        for number, result in enumerate(results)
    )
    rows = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{value(result):,.12g}</td>" for result in results)}</tr>'
        for name, value in figures
    )
    table = f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="wide" role="region" tabindex="0" aria-label="The runs\' figures">{table}</div>'


def _worst_host_s(result: Result) -> float:
    return max(result.host_p95_ms, default=0) / 1000


def _inputs(about: About) -> str:
    """Return what made the page."""
    policy = f"<p>The configuration file that it names:</p><pre>{escape(about.policy)}</pre>" if about.policy else ""
    return (
        f"<h2>What made this page</h2><p>jupyter-fractional-gpu {escape(about.version)}, with every option that counts:</p>"
        f"<pre>{escape(about.command)}</pre>{policy}"
    )


# -- curves over time ---------------------------------------------------------------------------------------------------


def _over_time(results: Sequence[Result], column: Callable[[Timeline], Sequence[int]], title: str, about: About) -> str:
    timelines = [result.timeline for result in results]
    across, since_ms, until_ms = time_axis(timelines, hours_of_day=about.hours_of_day)
    series = [_steps(one.at_ms, column(one), since_ms, until_ms) for one in timelines]
    up, top = count_axis(max((max(one) for one in series), default=0))
    lines = [
        _line(number, ((step / _STEPS, height / top) for step, height in enumerate(one)))
        for number, one in enumerate(series)
    ]
    return _frame(lines, across, up, title)


def _steps(at_ms: Sequence[int], values: Sequence[int], since_ms: int, until_ms: int) -> list[int]:
    """Return the largest value in each of the equal steps of the time, so that no peak is lost."""
    steps: list[int] = []
    last = at = 0
    for step in range(_STEPS + 1):
        most, end = last, since_ms * _STEPS + (until_ms - since_ms) * step
        while at < len(at_ms) and at_ms[at] * _STEPS <= end:
            last = values[at]
            most = max(most, last)
            at += 1
        steps.append(most)
    return steps


def time_axis(timelines: Sequence[Timeline], *, hours_of_day: bool) -> tuple[_Axis, int, int]:
    """Return the axis over all that happens in the timelines, with marks at round times, and its two ends, ms."""
    began = (next((at for at, *counts in zip(*one.columns, strict=True) if any(counts)), None) for one in timelines)
    first_ms = min((at for at in began if at is not None), default=0)
    last_ms = max((one.at_ms[-1] for one in timelines if len(one)), default=0)
    step_ms = _TIME_STEPS_MS[-1]
    for step in _TIME_STEPS_MS:
        if last_ms // step - first_ms // step < _MOST_TICKS:
            step_ms = step
            break
    since_ms = first_ms // step_ms * step_ms
    until_ms = max(last_ms, since_ms + step_ms)
    marks = [
        ((at - since_ms) / (until_ms - since_ms), _time_of_day(at) if hours_of_day else _since_the_start(at, step_ms))
        for at in range(since_ms, until_ms + 1, step_ms)
    ]
    return _Axis("time of day" if hours_of_day else "time since the trace began", marks), since_ms, until_ms


def _time_of_day(at_ms: int) -> str:
    """Return `09:30`; midnights but the first say which day begins."""
    day, rest_ms = divmod(at_ms, _DAY_MS)
    return (
        f"day {day + 1}" if day and not rest_ms else f"{rest_ms // _HOUR_MS:02}:{rest_ms % _HOUR_MS // _MINUTE_MS:02}"
    )


def _since_the_start(at_ms: int, step_ms: int) -> str:
    """Return a time in the largest unit of which every step is a multiple."""
    unit_ms, unit = next(one for one in ((_DAY_MS, "d"), (_HOUR_MS, "h"), (_MINUTE_MS, "min")) if not step_ms % one[0])
    return f"{at_ms // unit_ms} {unit}"


def count_axis(most: int) -> tuple[_Axis, int]:
    """Return an axis of whole numbers from 0 to a round one that is at least `most`, and that number."""
    step = round_step(most / 4)
    top = max(step, -(-most // step) * step)
    return _Axis("", [(at / top, f"{at:,}") for at in range(0, top + 1, step)]), top


# -- the distribution of waits --------------------------------------------------------------------------------------------


def _waits(results: Sequence[Result]) -> str:
    across, decades = wait_axis(max((result.waits.percentile_ms(100) for result in results), default=0) / 1000)
    shares = [[_share(result, step / _STEPS * decades) for step in range(_STEPS + 1)] for result in results]
    up, least = share_axis(min((min(one) for one in shares), default=1.0))
    lines = [
        _line(number, ((step / _STEPS, (share - least) / (1 - least)) for step, share in enumerate(one)))
        for number, one in enumerate(shares)
    ]
    return _frame(lines, across, up, "distribution of waits")


def wait_axis(longest_s: float) -> tuple[_Axis, int]:
    """Return a logarithmic axis from 0.1 s to at least the longest wait, and its decades: marks at 1, 2 and 5 where there is room."""
    decades = 1
    while _SHORTEST_S * 10**decades < longest_s:
        decades += 1
    digits = (1, 2, 5) if decades <= _MOST_DECADES_WITH_2_AND_5 else (1,)
    seconds = [digit * 10**decade / 10 for decade in range(decades) for digit in digits]
    marks = [(log10(second / _SHORTEST_S) / decades, f"{second:,.12g}") for second in (*seconds, 10**decades / 10)]
    return _Axis("seconds", marks), decades


def share_axis(least: float) -> tuple[_Axis, float]:
    """Return an axis from a round share up to 100 %, and that share: curves of waits lie close to the top."""
    low, step = next((scale for scale in _SHARE_SCALES if least * 100 >= scale[0]), (0, 20))
    marks = [((percent - low) / (100 - low), f"{percent} %") for percent in range(low, 101, step)]
    return _Axis("", marks), low / 100


def _share(result: Result, decade: float) -> float:
    """Return the share of cells that waited at most so many decades more than the axis begins with."""
    ordered = result.waits.ordered
    return bisect_right(ordered, 1000 * _SHORTEST_S * 10**decade) / len(ordered) if ordered else 1.0


# -- the frame ------------------------------------------------------------------------------------------------------------


def _line(number: int, points: Iterable[tuple[float, float]]) -> str:
    """Return the line of a run; the points are shares of the width and height."""
    placed = " ".join(f"{_x(across):.1f},{_y(up):.1f}" for across, up in points)
    return f'<polyline class="run{number}" points="{placed}"/>'


def _frame(lines: Sequence[str], across: _Axis, up: _Axis, title: str) -> str:
    grid = [f'<text x="{_x(0.5):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{across.title}</text>']
    for share, label in across.marks:
        x = _x(share)
        grid.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_y(0):.1f}" y2="{_y(0) + 5:.1f}"/>')
        grid.append(f'<text x="{x:.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{label}</text>')
    for share, label in up.marks:
        y = _y(share)
        grid.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    drawn = "".join((*grid, *reversed(lines)))  # the first run lies on top
    return f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{drawn}</svg>'


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)
