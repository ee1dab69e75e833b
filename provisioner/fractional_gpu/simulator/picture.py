"""Renders a report on the runs as one HTML file for light and dark screens. Charts are SVG, so it needs no scripts or other files."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10

from fractional_gpu.core.units import plural
from fractional_gpu.pages import render
from fractional_gpu.simulator.result import Result, Timeline
from fractional_gpu.svg import Frame, Svg, count_axis, element

_FRAME = Frame(width=900, height=240, left=60, right=20, top=12, bottom=44)
_STYLES = 7  # number of styles for runs in the page's stylesheet
_STEPS = 600  # more points would look the same
_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
_MOST_TICKS = 9
_TIME_STEPS_MS = (
    *(minutes * _MINUTE_MS for minutes in (1, 2, 5, 10, 30)),
    *(hours * _HOUR_MS for hours in (1, 2, 3, 6, 12)),
    *(days * _DAY_MS for days in (1, 2, 5, 10, 20, 50, 100, 200, 500)),
)
_SHORTEST_S = 0.1  # left end of the waits axis
_SHARE_SCALES = ((95, 1), (90, 2), (80, 5), (50, 10))  # lower end and step of the shares axis, percent
_MOST_DECADES_WITH_2_AND_5 = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A description of what was simulated. `users` and `machine` describe the first run.

    `whole_gpus` is the largest number of GPUs that open sessions would have reserved at any one time. `policy` is the text of the
    configuration file. `hours_of_day` is true if the trace begins at midnight.
    """

    users: int
    machine: str
    whole_gpus: int
    command: str
    version: str
    policy: str | None = None
    hours_of_day: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    title: str
    marks: Sequence[tuple[float, str]]


def picture(results: Sequence[Result], about: RunDescription, answer: str = "") -> str:
    """Return the page. It begins with `answer` (the result of a search). Without one, it begins with the first result's headline."""
    over_time: list[tuple[str, Callable[[Timeline], Sequence[int]]]] = [
        ("Devices on which leases hold memory", lambda timeline: timeline.devices_held),
        ("Cells that run on a GPU (on four GPUs: four)", lambda timeline: timeline.busy),
        ("Cells and sessions that wait", lambda timeline: timeline.waiting),
    ]
    charts = [(title, _over_time(results, column, title, about)) for title, column in over_time]
    charts.append(("Waits: the share of GPU cells that waited at most this long", _waits(results)))
    figures = [(name, [f"{value(one):,.12g}" for one in results]) for name, value in _figures(results)]
    return render(
        "runs.html", headline=answer or headline(results[0], about), names=[one.name for one in results], figures=figures,
        charts=charts, about=about,
    )  # fmt: skip


def headline(result: Result, about: RunDescription) -> str:
    said = f"{plural(about.users, 'user')} on {about.machine}: "
    waits, free_percent = result.waits, round(100 - result.waits.nonzero_percent(), 3)
    if not waits.ordered:
        said += "no cell used a GPU"
    elif free_percent == 100:
        said += "no GPU cell waited"
    elif not waits.percentile_ms(95):
        longest = _duration(waits.percentile_ms(100))
        said += f"{free_percent:g} % of the GPU cells did not wait, and the others waited at most {longest}"
    else:
        said += f"95 % of the GPU cells waited at most {_duration(waits.percentile_ms(95))}"
    if late_percent := result.doors.nonzero_percent():
        said += f"; {late_percent:g} % of the sessions waited to begin, and 5 % waited at least {_duration(result.doors.percentile_ms(95))}"
    said += f"; whole GPUs for each open session would have taken {plural(about.whole_gpus, 'device')}"
    if result.out_of_memory:
        said += f"; a cell ran out of memory {plural(result.out_of_memory, 'time')}"
    if result.lost:
        said += f"; {plural(result.lost, 'session')} could not finish"
    return said + "."


def _duration(time_ms: int) -> str:
    if time_ms < 2 * _MINUTE_MS:
        return f"{round(time_ms / 1000, 1):g} s"
    if time_ms < 2 * _HOUR_MS:
        return f"{round(time_ms / _MINUTE_MS):g} min"
    return f"{round(time_ms / _HOUR_MS, 1):g} h"


def _figures(results: Sequence[Result]) -> list[tuple[str, Callable[[Result], float]]]:
    several = any(result.hosts > 1 for result in results)
    worst_host = "waits of GPU cells: 95th percentile on the worst host, s"
    return [
        *([("hosts", lambda result: result.hosts)] if several else []),
        ("devices", lambda result: result.devices),
        ("devices held at most", lambda result: result.peak_devices_held),
        ("waits of GPU cells: median, s", lambda result: result.waits.percentile_ms(50) / 1000),
        ("waits of GPU cells: 95th percentile, s", lambda result: result.waits.percentile_ms(95) / 1000),
        ("waits of GPU cells: longest, s", lambda result: result.waits.percentile_ms(100) / 1000),
        *([(worst_host, lambda result: max(result.host_p95_ms, default=0) / 1000)] if several else []),
        ("waits for a host: 95th percentile, s", lambda result: result.doors.percentile_ms(95) / 1000),
        ("lateness of GPU cells: 95th percentile, s", lambda result: result.lateness.cells.percentile_ms(95) / 1000),
        (
            "lateness of GPU cells: 95th percentile of the worst user, s",
            lambda result: result.lateness.percentile_of_users_ms(100) / 1000,
        ),
        ("cells without enough memory", lambda result: result.out_of_memory),
        ("sessions that could not finish", lambda result: result.lost),
    ]


def _over_time(
    results: Sequence[Result], column: Callable[[Timeline], Sequence[int]], title: str, about: RunDescription
) -> Svg:
    timelines = [result.timeline for result in results]
    across, since_ms, until_ms = time_axis(timelines, hours_of_day=about.hours_of_day)
    series = [_steps(one.at_ms, column(one), since_ms, until_ms) for one in timelines]
    up, top = count_axis(max((max(one) for one in series), default=0))
    return _chart([[height / top for height in one] for one in series], across, up, title)


def _steps(at_ms: Sequence[int], values: Sequence[int], since_ms: int, until_ms: int) -> list[int]:
    """Divide the time into equal steps and return the largest value in each, so that no peak is lost."""
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


def time_axis(timelines: Sequence[Timeline], *, hours_of_day: bool) -> tuple[Axis, int, int]:
    began = (next((at for at, *counts in zip(*one.columns, strict=True) if any(counts)), None) for one in timelines)
    first_ms = min((at for at in began if at is not None), default=0)
    last_ms = max((one.at_ms[-1] for one in timelines if one.at_ms), default=0)
    short_enough = (step for step in _TIME_STEPS_MS if last_ms // step - first_ms // step < _MOST_TICKS)
    step_ms = next(short_enough, _TIME_STEPS_MS[-1])
    since_ms = first_ms // step_ms * step_ms
    until_ms = max(last_ms, since_ms + step_ms)
    marks = [
        ((at - since_ms) / (until_ms - since_ms), _time_of_day(at) if hours_of_day else _since_the_start(at, step_ms))
        for at in range(since_ms, until_ms + 1, step_ms)
    ]
    return Axis("time of day" if hours_of_day else "time since the trace began", marks), since_ms, until_ms


def _time_of_day(at_ms: int) -> str:
    """Return the time of day, such as `09:30`. Midnights after the first are shown as `day 2`, `day 3` and so on."""
    day, rest_ms = divmod(at_ms, _DAY_MS)
    return (
        f"day {day + 1}" if day and not rest_ms else f"{rest_ms // _HOUR_MS:02}:{rest_ms % _HOUR_MS // _MINUTE_MS:02}"
    )


def _since_the_start(at_ms: int, step_ms: int) -> str:
    unit_ms, unit = next(one for one in ((_DAY_MS, "d"), (_HOUR_MS, "h"), (_MINUTE_MS, "min")) if not step_ms % one[0])
    return f"{at_ms // unit_ms} {unit}"


def _waits(results: Sequence[Result]) -> Svg:
    across, decades = wait_axis(max((result.waits.percentile_ms(100) for result in results), default=0) / 1000)
    shares = [[_share(result, step / _STEPS * decades) for step in range(_STEPS + 1)] for result in results]
    up, least = share_axis(min((min(one) for one in shares), default=1.0))
    heights = [[(share - least) / (1 - least) for share in one] for one in shares]
    return _chart(heights, across, up, "distribution of waits")


def wait_axis(longest_s: float) -> tuple[Axis, int]:
    decades = 1
    while _SHORTEST_S * 10**decades < longest_s:
        decades += 1
    digits = (1, 2, 5) if decades <= _MOST_DECADES_WITH_2_AND_5 else (1,)
    seconds = [digit * 10**decade / 10 for decade in range(decades) for digit in digits]
    marks = [(log10(second / _SHORTEST_S) / decades, f"{second:,.12g}") for second in (*seconds, 10**decades / 10)]
    return Axis("seconds", marks), decades


def share_axis(least: float) -> tuple[list[tuple[float, str]], float]:
    low, step = next((scale for scale in _SHARE_SCALES if least * 100 >= scale[0]), (0, 20))
    marks = [((percent - low) / (100 - low), f"{percent} %") for percent in range(low, 101, step)]
    return marks, low / 100


def _share(result: Result, decade: float) -> float:
    ordered = result.waits.ordered
    return bisect_right(ordered, 1000 * _SHORTEST_S * 10**decade) / len(ordered) if ordered else 1.0


def _chart(curves: Sequence[Sequence[float]], across: Axis, up: Sequence[tuple[float, str]], title: str) -> Svg:
    parts = [element("text", across.title, x=_FRAME.x(0.5), y=_FRAME.height - 6, text_anchor="middle")]
    parts += [*_FRAME.marks_across(across.marks), *_FRAME.marks_up(up)]
    for number, heights in reversed([*enumerate(curves)]):  # the first run is on top
        points = ((step / _STEPS, height) for step, height in enumerate(heights))
        parts.append(_FRAME.line(points, f"run{number % _STYLES}"))
    return _FRAME.drawn(parts, aria_label=title)
