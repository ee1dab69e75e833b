"""Is `idle_after: "auto"` as good as every fixed idle time, for all habits of users and numbers of devices?

    python -m tests.benchmarks.frontier [--seeds 10] [--users 10] [--jobs 2] [--load NAME] [--pods FILE] [--svg FILE]
        [--json FILE] [--read FILE]

Loads are the habits of `jupyter gpu simulate --set habit=...`, and with `--pods` the days of a list of pods (`pods.py`), for which no rule
was tuned. Each runs on three numbers of devices, all in one host:

- enough: fixed fractions keep the 95th percentile of waits, at the door too, within 3 s;
- just enough: kernels that leave only if another one needs their room (`on-demand`) do;
- tight: three quarters of just enough, or what the largest session needs.

Two figures judge a rule: the GPU hours for which kernels hold devices, and the 95th percentile of the waits. A kernel that leaves sooner
holds less and waits more. A rule's point has the medians of both over the seeds. A fixed time beats `auto` if it holds less and waits less,
both beyond luck (sign test over the seeds, corrected for the number of fixed times). `auto` is also compared with the curve of the fixed
times: with the mixture of two neighbours that holds as much as `auto`. So `auto` is

- below the frontier if a fixed time beats it, or if it waits longer than the curve, beyond luck,
- above it if it waits less than the curve, beyond luck,
- on it otherwise.

The same holds for mean lateness. With a `hold_price` `auto` holds less; these points are a separate curve. Exits with 1 if the shipped
`auto` is below the frontier of the waits anywhere.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from fractional_gpu.curves import Panel, Series, curves
from fractional_gpu.simulator import TraceError
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.load import Habit, Load, synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session
from tests.benchmarks.pods import GPU_MIB, Run, read_days, sessions_of
from tests.benchmarks.simulated import (
    DEVICE_MIB,
    GOAL,
    SHIPPED,
    least,
    machine,
    mean_s,
    needed,
    of_seeds,
    parser,
    read,
    spread_out,
    table,
    write_json,
)
from tests.benchmarks.stats import median, sign_test

PODS = "pods"
LOADS = (*(habit.value for habit in Habit), PODS)
USERS = {
    Habit.PUBLISHED.value: 4,
    Habit.TEACHING_LAB.value: 2,
    Habit.TRAINERS.value: 2,
}
"""Multiples of `--users` for habits with few cells, or with classes. Others: 1."""
SITUATIONS = ("enough", "just enough", "tight")
_MINUTE_MS = 60_000
FIXED = {
    "0s": replace(SHIPPED, idle_after_ms=0),
    "10s": replace(SHIPPED, idle_after_ms=10_000),
    "1m": replace(SHIPPED, idle_after_ms=_MINUTE_MS),
    "5m": replace(SHIPPED, idle_after_ms=5 * _MINUTE_MS),
    "10m": replace(SHIPPED, idle_after_ms=10 * _MINUTE_MS),
    "30m": replace(SHIPPED, idle_after_ms=30 * _MINUTE_MS),
    "1h": replace(SHIPPED, idle_after_ms=60 * _MINUTE_MS),
    "3h": replace(SHIPPED, idle_after_ms=180 * _MINUTE_MS),
    "on-demand": replace(SHIPPED, idle_auto=False),
}
"""Fixed idle times, the shortest first."""
AUTO = "auto"
PRICED = {f"auto, {price:g} an hour": replace(SHIPPED, hold_price_milli=round(price * 1000)) for price in (0.1, 0.3)}
RULES = {**FIXED, AUTO: SHIPPED, **PRICED}
HELD, WAIT, LATE = "held, GPU hours", "p95 wait, s", "mean late, s"
COLUMNS = ("devices", HELD, WAIT, "mean wait, s", LATE, "waited, %")
LUCK = 0.05

Figures = Mapping[str, Mapping[str, float]]  # of one seed: by rule and column


@dataclass(frozen=True, slots=True)
class Task:
    """One load of one seed; of pods, the day with that number."""

    load: str
    seed: int
    users: int
    pods: Path | None = None


@lru_cache(maxsize=1)
def _days(pods: Path) -> list[list[Run]]:
    return read_days(pods)


def trace_of(task: Task) -> tuple[list[Session], int]:
    """Return the sessions, and the memory of each device, MiB. Raises TraceError."""
    if task.load != PODS:
        users = task.users * USERS.get(task.load, 1)
        return synthetic_sessions(users, 1, task.seed, Load(habit=Habit(task.load))), DEVICE_MIB
    if task.pods is None:
        raise TraceError("the load 'pods' needs a list of pods; name it with --pods FILE")
    return sessions_of(_days(task.pods)[task.seed - 1]), GPU_MIB


def devices_for(trace: Sequence[Session], memory_mib: int) -> dict[str, int]:
    """Return the devices of each situation. Raises SimulationError if no number keeps the goal."""

    def fewest(run: Callable[[Sequence[Host]], Result]) -> int:
        return needed(
            lambda count: run(machine(count, FIXED["on-demand"], memory_mib=memory_mib)), trace, 0, memory_mib
        ).devices

    fixed = fewest(partial(run_baseline, "static-fraction", trace=trace, goal=GOAL))
    just = fewest(partial(simulate, trace=trace, goal=GOAL))
    counts = (max(fixed, just), just, max(least(trace), just * 3 // 4))
    return dict(zip(SITUATIONS, counts, strict=True))


def measure(task: Task) -> dict[str, dict[str, dict[str, float]]]:
    """Return COLUMNS of every rule in every situation."""
    trace, memory_mib = trace_of(task)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for situation, devices in devices_for(trace, memory_mib).items():
        rules = {}
        for name, pool in RULES.items():
            result = simulate(machine(devices, pool, memory_mib=memory_mib), trace)
            values = (
                float(devices),
                result.held / 3.6e9,
                result.waits.percentile_ms(95) / 1000,
                mean_s(result.waits),
                mean_s(result.lateness.cells),
                result.waits.nonzero_percent(),
            )
            rules[name] = dict(zip(COLUMNS, values, strict=True))
        found[situation] = rules
    return found


# -- the verdict -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a rule stands against the fixed times: in held hours, and in what users feel (a column)."""

    rule: str
    felt: str
    beaten_by: tuple[str, ...]  # fixed times that are better in both, beyond luck
    perhaps_by: tuple[str, ...]  # those whose medians are better in both, which may be luck
    beats: tuple[str, ...]  # fixed times that are worse in both, beyond luck
    between: tuple[str, str] | None  # the neighbours of the mixture; None: it holds less or more than every fixed time
    above_curve: float  # the median over the seeds of the difference to the mixture
    curve_luck: float  # the chance that the seeds are on one side of the mixture by luck

    @property
    def place(self) -> str:
        """Where the rule is: below the frontier, on it or above it."""
        if self.beaten_by or (self.above_curve > 0 and self.curve_luck < LUCK):
            return "below"
        return "above" if self.above_curve < 0 and self.curve_luck < LUCK else "on"

    def sentence(self) -> str:
        """Return the verdict in one line."""
        said = [f"{self.rule} is {self.place} the frontier of {self.felt.removesuffix(', s')}"]
        if self.beaten_by:
            said.append(f"BEATEN in both by {', '.join(self.beaten_by)}")
        if self.perhaps_by:
            said.append(f"medians of {', '.join(self.perhaps_by)} are better in both, which may be luck")
        if self.beats:
            said.append(f"beats {', '.join(self.beats)} in both")
        if self.between is None:
            said.append("holds less than every fixed time, or more")
        else:
            said.append(
                f"{self.above_curve:+.2f} s against {' and '.join(self.between)} with the same held hours "
                f"(luck: {_percent(self.curve_luck)})"
            )
        return "; ".join(said)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def verdict(done: Sequence[Figures], rule: str, felt: str = WAIT) -> Verdict:
    """Compare a rule with the fixed times over the seeds of one situation."""

    def of(name: str, column: str) -> list[float]:
        return [one[name][column] for one in done]

    def better(one: str, other: str) -> bool:
        tests = [sign_test(of(one, column), of(other, column)) for column in (HELD, felt)]
        return max(test.luck(len(FIXED)) for test in tests) < LUCK

    beaten = tuple(name for name in FIXED if better(name, rule))
    perhaps = tuple(
        name
        for name in FIXED
        if name not in beaten and all(median(of(name, column)) < median(of(rule, column)) for column in (HELD, felt))
    )
    beats = tuple(name for name in FIXED if better(rule, name))
    between, above, luck = _against_curve(done, rule, felt)
    return Verdict(rule, felt, beaten, perhaps, beats, between, above, luck)


def _against_curve(done: Sequence[Figures], rule: str, felt: str) -> tuple[tuple[str, str] | None, float, float]:
    """Return two neighbouring fixed times, how much longer the rule's waits are than their mixture's, and the luck in that.

    Of several pairs of neighbours between whose held hours the rule lies, the pair whose mixture is best counts.
    """
    held = {name: median([one[name][HELD] for one in done]) for name in RULES}
    found: list[tuple[float, tuple[str, str], float]] = []
    for pair in zip(FIXED, list(FIXED)[1:], strict=False):
        low, high = sorted(pair, key=lambda name: held[name])
        if not held[low] <= held[rule] <= held[high]:
            continue
        share = (held[rule] - held[low]) / ((held[high] - held[low]) or 1.0)
        mixed = [round(one[low][felt] * (1 - share) + one[high][felt] * share, 6) for one in done]
        own = [round(one[rule][felt], 6) for one in done]
        longer = median([mine - other for mine, other in zip(own, mixed, strict=True)])
        test = sign_test(own, mixed) if longer < 0 else sign_test(mixed, own)
        found.append((longer, pair, test.luck(2)))
    if not found:
        return None, 0.0, 1.0
    longer, pair, luck = max(found)
    return pair, longer, luck


# -- what is shown -------------------------------------------------------------------------------------------------------


def panel(load: str, situation: str, done: Sequence[Figures]) -> Panel:
    """Return the picture of one load in one situation: the medians of held hours and waits."""

    def point(name: str) -> tuple[str, float, float]:
        held, wait = (median([one[name][column] for one in done]) for column in (HELD, WAIT))
        return name.removeprefix("auto, "), held, wait

    devices = median([one[AUTO]["devices"] for one in done])
    return Panel(
        f"{load}, {situation}: {devices:g} devices",
        (
            Series("fixed idle_after", [point(name) for name in FIXED]),
            Series("auto with a hold_price", [point(name) for name in PRICED]),
            Series("auto, as shipped", [point(AUTO)]),
        ),
    )


SUMMARY = ("devices", HELD, WAIT, LATE, "frontier of the waits", "frontier of mean lateness")


def summary(runs: Mapping[str, Sequence[Mapping[str, Figures]]]) -> str:
    """Return a Markdown table with the shipped `auto` on each load in each situation: medians, and where it stands."""
    lines = [f"| load | {' | '.join(SUMMARY)} |", "|---|" + "---:|" * 4 + "---|---|"]
    for load, done in runs.items():
        for situation in SITUATIONS:
            figures = [one[situation] for one in done]
            values = [median([one[AUTO][column] for one in figures]) for column in SUMMARY[:4]]
            places = [_short(verdict(figures, AUTO, felt)) for felt in (WAIT, LATE)]
            shown = [f"{value:,.2f}".removesuffix(".00") for value in values]
            lines.append(f"| {load}, {situation} | {' | '.join([*shown, *places])} |")
    return "\n".join(lines) + "\n"


def _short(one: Verdict) -> str:
    why = ""
    if one.beaten_by:
        why = f": {', '.join(one.beaten_by)} better in both"
    elif one.place != "on":
        why = f": {one.above_curve:+.2f} s"
    elif one.perhaps_by:
        why = f" (perhaps {', '.join(one.perhaps_by)} better in both)"
    return one.place + why


def show(load: str, done: Sequence[Mapping[str, Figures]], about: str) -> bool:
    """Print the tables of one load and what follows; return whether the shipped `auto` is below the frontier of the waits."""
    below = False
    for situation in SITUATIONS:
        figures = [one[situation] for one in done]
        sys.stdout.write(
            f"{load}, {situation}, {about}" + table("idle_after", COLUMNS, of_seeds(figures, COLUMNS)) + "\n"
        )
        for rule in (AUTO, *PRICED):
            for felt in (WAIT, LATE):
                one = verdict(figures, rule, felt)
                below = below or (rule == AUTO and felt == WAIT and one.place == "below")
                sys.stdout.write(f"- {one.sentence()}\n")
        sys.stdout.write("\n")
    return below


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and where `auto` stands, and draw the curves."""
    made = parser(__doc__.splitlines()[0])
    made.set_defaults(users=10, seeds=10)
    made.add_argument("--load", action="append", choices=LOADS, help="only this one (repeatable; default: all)")
    made.add_argument(
        "--pods", type=Path, metavar="FILE", help="a list of pods (openb_pod_list_*.csv), for the load 'pods'"
    )
    made.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves there")
    made.add_argument(
        "--read",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="take figures of --json from there (repeatable)",
    )
    options = read(made, arguments)
    runs: dict[str, list[dict[str, dict[str, dict[str, float]]]]] = {}
    for file in options.read:
        runs |= json.loads(file.read_text(encoding="utf-8"))["runs"]
    chosen = options.load or ([] if runs else [load for load in LOADS if load != PODS or options.pods])
    try:
        days = len(_days(options.pods)) if PODS in chosen and options.pods is not None else 0
    except TraceError as error:
        made.error(str(error))
    if PODS in chosen and not days:
        made.error("--load pods needs a list of pods; name it with --pods FILE")
    for load in chosen:
        seeds = [seed for seed in options.seeds if load != PODS or seed <= days]
        runs[load] = spread_out(
            measure, [Task(load, seed, options.users, options.pods) for seed in seeds], options.jobs, load
        )
    below = [show(load, done, f"{len(done)} seeds:\n\n") for load, done in runs.items()]
    sys.stdout.write(summary(runs))
    if options.svg is not None:
        rows = [[panel(load, each, [one[each] for one in done]) for each in SITUATIONS] for load, done in runs.items()]
        options.svg.write_text(curves(rows, across=HELD, up=WAIT), encoding="utf-8")
    write_json(options.json, {"seeds": list(options.seeds), "users": options.users, "runs": runs})
    return int(any(below))


if __name__ == "__main__":
    sys.exit(main())
