"""How far off forecasts are, and how many outcomes their bounds cover, next to naive predictors.

    python -m tests.benchmarks.forecast_error [--users 24] [--days 4] [--seed 1] [--pods FILE]... [--json FILE]

Users of each habit of `simulator.load` share too few devices, so that cells wait; the simulator runs them, and every forecast that
the arbiter states is seen with what happened. So are the sessions made of public lists of pods (`tests.benchmarks.pods`), where files are
named. Forecasts of the first half of the time only teach; those of the second half are counted. Learning continues, for all predictors
alike: each predicts before it is shown what happened. The simulator's swaps take exactly a fixed time and one for each MiB, so they are
left out there. They are drawn separately, in five sizes: on a steady device (8 % noise), on a contended one (one swap in eight takes
three to ten times as long), and on one that becomes 2.5 times slower after the first few of the second half.

The naive predictors have what ours have: cells, rests and slowdowns are predicted from the same kernel's, or, before it has two,
from all; swaps from the same device's of that size; waits from all.

- `last value`: the last outcome, with bounds of 1.28 standard deviations of the steps from one outcome to the next.
- `mean`: the mean of all outcomes, with bounds of 1.28 of their standard deviations: what covers 80 % of normally distributed ones.

The error is |expected - happened| / happened, with at least 100 ms below the line, as in the broker's own figures; the median counts.
Coverage is the share of outcomes between the bounds, which promise 80 %. The width is the median of high - low over what happened: a
predictor may cover all with bounds that say nothing.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median

from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.forecasts.outcomes import CELL, REST, RESUME, SLOWDOWN, SUSPEND, WAIT, ForecastOutcome
from fractional_gpu.core.model import Span
from fractional_gpu.simulator import TraceError
from fractional_gpu.simulator.load import Habit, Load, synthetic_sessions
from fractional_gpu.simulator.search import devices_for_cells
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session
from tests.benchmarks.pods import GPU_MIB, read_days, sessions_of
from tests.benchmarks.simulated import DEVICE_MIB, least, machine, write_json

HABITS = (Habit.PUBLISHED, Habit.TEACHING_LAB, Habit.BUILDERS, Habit.TRAINERS, Habit.NIGHT_JOBS)
KINDS = {WAIT: "wait", CELL: "cell", REST: "rest of a cell", SLOWDOWN: "slowdown", SUSPEND: "suspend", RESUME: "resume"}
OURS, LAST, MEAN = PREDICTORS = ("ours", "last value", "mean")
LEAST = 30
"""Fewer counted outcomes are left out of the table."""
_LEAST_BELOW = 100  # ms, or thousandths
_SCARCE_PERCENT = 60  # of the devices that short waits would need
_DAY_MS = 86_400_000
_SIGMAS = 1.2816  # between the tenths of a normal distribution
_SWAPS = 600


@dataclass
class Naive:
    """What naive predictors keep of one sequence."""

    count: int = 0
    last: int = 0
    total: float = 0.0
    squares: float = 0.0
    steps: float = 0.0  # squares of the differences from one to the next

    def saw(self, value: int) -> None:
        """Take an outcome in."""
        if self.count:
            self.steps += (value - self.last) ** 2
        self.count, self.last = self.count + 1, value
        self.total, self.squares = self.total + value, self.squares + value * value

    def spans(self) -> dict[str, Span]:
        """Return the forecasts of the next one. There must have been two."""
        mean = self.total / self.count
        deviation = max(0.0, self.squares / self.count - mean * mean) ** 0.5
        step = (self.steps / (self.count - 1)) ** 0.5
        return {LAST: _around(self.last, step), MEAN: _around(round(mean), deviation)}


def _around(value: int, deviation: float) -> Span:
    off = round(_SIGMAS * deviation)
    return Span(expected_ms=value, low_ms=max(0, value - off), high_ms=value + off)


@dataclass
class Score:
    """What was counted of one predictor for one kind of forecast."""

    errors: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    covered: int = 0

    def count(self, stated: Span, happened: int) -> None:
        """Count a forecast."""
        under = max(_LEAST_BELOW, happened)
        self.errors.append(abs(stated.expected_ms - happened) / under)
        self.widths.append((stated.high_ms - stated.low_ms) / under)
        self.covered += stated.low_ms <= happened <= stated.high_ms

    def figures(self) -> dict[str, float]:
        """Return what the table shows."""
        return {
            "count": len(self.errors),
            "median_error": median(self.errors),
            "coverage": self.covered / len(self.errors),
            "width": median(self.widths),
        }


class Judge:
    """Sees every forecast of ours, makes the naive ones next to it, and counts those of the second half."""

    def __init__(self) -> None:
        self.counts = False  # the second half has begun
        self.size = ""  # of the swap that comes next
        self.scores: dict[str, dict[str, Score]] = {}
        self._known: dict[tuple[str, str], Naive] = {}

    def __call__(self, one: ForecastOutcome) -> None:
        """See one."""
        common = self._known.setdefault((one.kind, ""), Naive())
        key = f"{one.name} {self.size}" if one.kind in (SUSPEND, RESUME) else one.lease_id
        own = self._known.setdefault((one.kind, key), Naive()) if key else common
        naive = own if own.count > 1 else common
        if self.counts and naive.count > 1:
            scores = self.scores.setdefault(one.kind, {name: Score() for name in PREDICTORS})
            for name, stated in {OURS: one.stated, **naive.spans()}.items():
                scores[name].count(stated, one.happened)
        for seen in (own, common) if own is not common else (common,):
            seen.saw(one.happened)

    def figures(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the figures by kind and predictor."""
        return {
            kind: {name: score.figures() for name, score in self.scores[kind].items()}
            for kind in KINDS
            if kind in self.scores and len(self.scores[kind][OURS].errors) >= LEAST
        }


def of_sessions(trace: Sequence[Session], memory_mib: int = DEVICE_MIB) -> Judge:
    """Run the sessions on too few devices, and judge the forecasts of the second half of the time."""
    (host,) = machine(least(trace), memory_mib=memory_mib)
    count = max(least(trace), devices_for_cells(trace, host) * _SCARCE_PERCENT // 100)
    half_ms = (min(one.open_ms for one in trace) + max(one.close_ms for one in trace)) // 2
    judge = Judge()

    def watch(event: object, _: object) -> None:
        judge.counts = getattr(event, "at_ms", 0) >= half_ms

    def judged(one: ForecastOutcome) -> None:
        if one.kind not in (SUSPEND, RESUME):
            judge(one)

    simulate(machine(count, memory_mib=memory_mib), trace, watch=watch, judged=judged)
    return judge


def of_habit(habit: Habit, users: int, days: int, seed: int) -> Judge:
    """Judge the forecasts for users of one habit."""
    return of_sessions(synthetic_sessions(users, days, seed, Load(habit=habit)))


def of_pods(file: Path, days: int) -> Judge:
    """Judge the forecasts for the first days of the list of pods. Raises TraceError."""
    trace = []
    for number, runs in enumerate(read_days(file)[:days]):
        offset = number * _DAY_MS
        for session in sessions_of(runs):
            cells = tuple(replace(cell, start_ms=cell.start_ms + offset) for cell in session.cells)
            name = f"{number}-{session.session_id}"
            opens, closes = session.open_ms + offset, session.close_ms + offset
            trace.append(replace(session, session_id=name, user=name, open_ms=opens, close_ms=closes, cells=cells))
    return of_sessions(trace, GPU_MIB)


def of_swaps(seed: int) -> dict[str, Judge]:
    """Judge the forecasts of swaps on devices of three kinds."""

    def steady(random: Random, _: int) -> float:
        return random.lognormvariate(0, 0.08)

    def contended(random: Random, number: int) -> float:
        return steady(random, number) * (random.uniform(3, 10) if random.random() < 1 / 8 else 1)

    def slowing(random: Random, number: int) -> float:
        return steady(random, number) * (2.5 if number >= _SWAPS // 2 + 20 else 1)

    kinds: dict[str, Callable[[Random, int], float]] = {
        "steady device": steady,
        "contended device": contended,
        "device that becomes slower": slowing,
    }
    found = {}
    for name, factor in kinds.items():
        random, forecasts, judge = Random(seed), Forecasts(), Judge()
        forecasts.watch = judge
        for number in range(_SWAPS):
            judge.counts = number >= _SWAPS // 2
            mib = random.choice([500, 2_300, 4_600, 12_000, 38_000])
            judge.size = f"{mib} MiB"
            for kind, mib_per_s in ((SUSPEND, 2_400), (RESUME, 6_000)):
                took_ms = (450 + mib * 1000 / mib_per_s) * factor(random, number)
                forecasts.swap_finished(kind, name, mib, round(took_ms))
        found[name] = judge
    return found


def as_table(found: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    """Return a Markdown table; the predictor with the least error of a row is in bold, and so is coverage from 75 to 90 %."""
    heads = [f"{name}: {what}" for what in ("error", "covered", "width") for name in PREDICTORS]
    lines = [f"| load | forecast | count | {' | '.join(heads)} |", "|---|---|---:|" + "---:|" * len(heads)]
    for load, kinds in found.items():
        for kind, figures in kinds.items():
            best = min(figures[name]["median_error"] for name in PREDICTORS)
            errors = [
                _percent(figures[name]["median_error"], figures[name]["median_error"] == best) for name in PREDICTORS
            ]
            covers = [
                _percent(figures[name]["coverage"], 0.75 <= figures[name]["coverage"] <= 0.9) for name in PREDICTORS
            ]
            widths = [f"{figures[name]['width']:.2f}" for name in PREDICTORS]
            row = (load, KINDS[kind], f"{figures[OURS]['count']:,.0f}", *errors, *covers, *widths)
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _percent(share: float, is_bold: bool) -> str:
    shown = f"{100 * share:.0f} %"
    return f"**{shown}**" if is_bold else shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--users", type=int, default=24, metavar="N", help="of each habit (default: 24)")
    made.add_argument("--days", type=int, default=4, metavar="N", help="that they work, 2 or more (default: 4)")
    made.add_argument("--seed", type=int, default=1, metavar="S", help="of what is drawn (default: 1)")
    made.add_argument(
        "--pods",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="a public list of pods; also several times",
    )
    made.add_argument("--pod-days", type=int, default=8, metavar="N", help="of the list, 2 or more (default: 8)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = made.parse_args(arguments)
    if options.users < 1 or options.days < 2 or options.pod_days < 2:
        made.error("--users must be 1 or more, --days and --pod-days 2 or more: the second half is judged")
    found = {}
    for habit in HABITS:
        sys.stderr.write(f"{habit} ...\n")
        found[str(habit)] = of_habit(habit, options.users, options.days, options.seed).figures()
    for file in options.pods:
        sys.stderr.write(f"{file.name} ...\n")
        try:
            found[file.stem] = of_pods(file, options.pod_days).figures()
        except TraceError as error:
            made.error(str(error))
    found |= {name: judge.figures() for name, judge in of_swaps(options.seed).items()}
    sys.stdout.write(as_table(found))
    write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
