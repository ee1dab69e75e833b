"""The shipped pool and other settings: is another one much better?

    python -m tests.benchmarks.policies [--seeds 20] [--users 50] [--jobs 2] [--json FILE] [--several-gpus PERCENT] [--gpus-per-host 8]

For each seed the benchmark finds the hosts that the shipped pool needs for a 95th percentile of waits of 3 s; all settings of `GRID` run
on those. It compares three figures: the 95th percentile of each user's lateness, for 95 % of the users and for the worst user, and the
mean lateness of a cell. A setting is better if its mean over the seeds is smaller. A sign test over the seeds, corrected for the number
of settings, tells whether that is luck; the best of thirty settings is always better on the days that chose it. The command exits with 1
if a setting is better than the shipped one by more than 10 % in a figure beyond luck; what may be luck is listed. Settings under which
users hold other amounts of memory (`OTHER_OFFERS`), or more cells run out of memory, are in the table but not compared.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from fractional_gpu.core.model import Compute, Foresight, PoolSpec, ReserveBy
from fractional_gpu.simulator.load import Load, synthetic_sessions
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session
from tests.benchmarks.simulated import (
    GOAL,
    SHIPPED,
    heading,
    machine,
    mean_s,
    needed,
    of_seeds,
    parser,
    read,
    spread_out,
    table,
    with_pool,
    write_json,
)
from tests.benchmarks.stats import SignTest, sign_test

DEFAULT = "as shipped"
GRID: dict[str, PoolSpec] = {
    DEFAULT: SHIPPED,
    "idle_after 0s": replace(SHIPPED, idle_after_ms=0),
    "idle_after 1m": replace(SHIPPED, idle_after_ms=60_000),
    "idle_after 10m": replace(SHIPPED, idle_after_ms=600_000),
    "idle_after 1h": replace(SHIPPED, idle_after_ms=3_600_000),
    "compute pack": replace(SHIPPED, compute=Compute.PACK),
    "slowdown_bound 0.9": replace(SHIPPED, slowdown_bound_milli=900),
    "slowdown_bound 1.1": replace(SHIPPED, slowdown_bound_milli=1100),
    "slowdown_bound 1.25": replace(SHIPPED, slowdown_bound_milli=1250),
    "slowdown_bound 1.5": replace(SHIPPED, slowdown_bound_milli=1500),
    "slowdown_bound 2.0": replace(SHIPPED, slowdown_bound_milli=2000),
    "preempt priorities": replace(SHIPPED, preempt_equals=False),
    "preempt never": replace(SHIPPED, preempt_equals=False, preempt_priorities=False),
    "may_move off": replace(SHIPPED, may_move=False),
    "move_busy on": replace(SHIPPED, move_busy=True),
    "min_residency 1m": replace(SHIPPED, min_residency_ms=60_000),
    "min_residency 5m": replace(SHIPPED, min_residency_ms=300_000),
    "min_residency_swaps 3": replace(SHIPPED, min_residency_swaps_milli=3_000),
    "min_residency_swaps 9": replace(SHIPPED, min_residency_swaps_milli=9_000),
    "min_residency_swaps 18": replace(SHIPPED, min_residency_swaps_milli=18_000),
    "min_residency_swaps 60": replace(SHIPPED, min_residency_swaps_milli=60_000),
    "min_residency_swaps 120": replace(SHIPPED, min_residency_swaps_milli=120_000),
    "max_passed_over 2": replace(SHIPPED, max_passed_over=2),
    "max_passed_over 32": replace(SHIPPED, max_passed_over=32),
    "foresight off": replace(SHIPPED, foresight=Foresight.OFF),
    "foresight displace": replace(SHIPPED, foresight=Foresight.DISPLACE),
    "hold_price 2": replace(SHIPPED, hold_price_milli=2_000),
    "any fraction": replace(SHIPPED, fractions_milli=()),
    "min_residency_swaps 60, foresight displace": replace(
        SHIPPED, min_residency_swaps_milli=60_000, foresight=Foresight.DISPLACE
    ),
    "reserve use, half requested": replace(SHIPPED, reserve_by=ReserveBy.USE, headroom_mib=1024),
}
"""One setting each that differs from the shipped pool, and two that may help each other."""
HALF_REQUESTED = frozenset({"reserve use, half requested"})
OTHER_OFFERS = HALF_REQUESTED | {"any fraction"}
"""Users get less memory than the shipped pool gives them: no other way to share the same, and not compared."""
COMPARED = ("95 of 100 users' p95 late, s", "worst user's p95 late, s", "mean late, s")
COLUMNS = ("devices", "waited, %", *COMPARED, "out of memory")
BETTER_PERCENT = 10
LUCK_PERCENT = 5


@dataclass(frozen=True, slots=True)
class Task:
    """One seed."""

    seed: int
    users: int
    several_percent: int
    each: int


def hosts_for(name: str, hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts with a setting."""
    request = 50 if name in HALF_REQUESTED else 100
    return [replace(with_pool(host, GRID[name]), request_percent=request) for host in hosts]


def _on(trace: Sequence[Session], each: int, count: int) -> Result:
    return simulate(machine(count, each=each), trace, goal=GOAL)


def measure(task: Task) -> dict[str, dict[str, float]]:
    """Return COLUMNS of every setting on the hosts that the shipped one needs."""
    trace = synthetic_sessions(task.users, 1, task.seed, Load(several_percent=task.several_percent))
    devices = needed(partial(_on, trace, task.each), trace, task.each).devices
    hosts = machine(devices, each=task.each)
    found = {}
    for name in GRID:
        result = simulate(hosts_for(name, hosts), trace)
        values = (
            float(devices),
            result.waits.nonzero_percent(),
            result.lateness.percentile_of_users_ms(95) / 1000,
            result.lateness.percentile_of_users_ms(100) / 1000,
            mean_s(result.lateness.cells),
            float(result.out_of_memory),
        )
        found[name] = dict(zip(COLUMNS, values, strict=True))
    return found


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much a setting is better than the shipped one in a figure: percent of the mean, and the seeds that say so."""

    figure: str
    name: str
    percent: float
    seeds: SignTest

    @property
    def luck(self) -> float:
        """The chance that one of all settings is so often lower where none is better (sign test, Bonferroni)."""
        return self.seeds.luck(len(GRID) - 1)


def gains(done: Sequence[Mapping[str, Mapping[str, float]]]) -> list[Gain]:
    """Return, for each figure that is compared, how much better each setting is; the best first."""
    found = []
    for figure in COMPARED:
        shipped = [one[DEFAULT][figure] for one in done]
        of_figure = []
        for name in GRID:
            other = [one[name][figure] for one in done]
            if name == DEFAULT or name in OTHER_OFFERS:
                continue
            if sum(one[name]["out of memory"] > one[DEFAULT]["out of memory"] for one in done):
                continue  # who lets cells fail has fewer of them to wait
            percent = 100 * (1 - fmean(other) / fmean(shipped)) if any(shipped) else 0.0
            of_figure.append(Gain(figure, name, percent, sign_test(other, shipped)))
        found += sorted(of_figure, key=lambda gain: -gain.percent)
    return found


def verdict(done: Sequence[Mapping[str, Mapping[str, float]]]) -> tuple[str, bool]:
    """Return what to say about each figure, and whether a setting is better than the shipped one by too much."""
    said, beaten = [], False
    every = gains(done)
    for figure in COMPARED:
        of_figure = [gain for gain in every if gain.figure == figure]
        better = [gain for gain in of_figure if gain.percent > BETTER_PERCENT]
        best = max(0.0, of_figure[0].percent)
        said.append(
            f"{figure}: the best setting has a mean {best:.0f} % below the shipped pool's. More than {BETTER_PERCENT} %:"
        )
        said += [
            f"- {gain.name} by {gain.percent:.0f} %, lower in {gain.seeds.lower} seeds and higher in {gain.seeds.higher}: "
            + (
                f"BEATS the shipped pool (luck: {100 * gain.luck:.2g} %)"
                if gain.luck * 100 < LUCK_PERCENT
                else "may be luck"
            )
            for gain in better
        ] or ["- none"]
        beaten = beaten or any(gain.luck * 100 < LUCK_PERCENT for gain in better)
    said.append(
        f"A setting BEATS the shipped pool by more than {BETTER_PERCENT} %."
        if beaten
        else f"No setting is better than the shipped pool by more than {BETTER_PERCENT} % beyond luck."
    )
    return "\n".join(said) + "\n", beaten


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and the verdict."""
    options = read(parser(__doc__.splitlines()[0], several_gpus=True), arguments)
    tasks = [Task(seed, options.users, options.several_gpus, options.gpus_per_host) for seed in options.seeds]
    done = spread_out(measure, tasks, options.jobs, "seeds")
    sys.stdout.write(heading(options, "medians:") + table("setting", COLUMNS, of_seeds(done, COLUMNS)))
    said, beaten = verdict(done)
    sys.stdout.write(f"\n{said}")
    write_json(options.json, {"seeds": list(options.seeds), "settings": done})
    return int(beaten)


if __name__ == "__main__":
    sys.exit(main())
