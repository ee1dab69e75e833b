"""The measuring method: which steps to run, when to stop, and what the samples show. This module does no I/O and never reads the clock.

- A setting is a share and a number of tenants on the device. The baseline is a single tenant that runs alone with the largest share.
- A round runs one step for each setting. Every other round runs in reverse order (A B B A), so that a steady drift cancels out.
- A step's typical time per unit of work is the mean of the middle half of its times, because stalls on the host make some units much
  slower, whatever the share. This is divided by the baseline's typical time in the same round. A setting's result is the centre of these
  ratios over all rounds. The signed-rank test and the sign test each give a confidence interval, and the narrower one is used
  (`fractional_gpu.stats`). The tests need at least 8 rounds.
- The tests use the logarithms of the ratios. If both times carry the same kind of multiplicative noise, however skewed, these logarithms
  are distributed symmetrically, as the signed-rank test assumes.
- Checking the interval after every round makes errors more likely. Each check therefore uses 98.5 % confidence to achieve 95 % overall.
- Once a setting's interval is narrow enough, it is not measured again. Steps disturbed by another program are discarded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from fractional_gpu.core.units import format_fraction
from fractional_gpu.stats import Estimate, centre_estimate, median, midmean, percentile
from fractional_gpu_kernel.measure import MOST_UNITS


class TickError(ValueError):
    """A program's report of its units of work is malformed."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A report of completed units of work, with its time on CLOCK_MONOTONIC."""

    at_ns: int
    units: int


@dataclass(frozen=True, slots=True)
class Pace:
    latencies_s: list[float]  # the time between reports, per unit
    unit_s: float
    units: int


def read_ticks(path: Path) -> list[Tick]:
    lines = path.read_bytes().split(b"\n")[:-1]
    return sorted((_parsed(line) for line in lines), key=lambda one: one.at_ns)


def _parsed(line: bytes) -> Tick:
    words = line.split()
    if len(words) == 2 and all(word.isdigit() and len(word) < 20 for word in words):
        at_ns, units = map(int, words)
        if 1 <= units <= MOST_UNITS:
            return Tick(at_ns, units)
    shown = line[:60].decode("utf-8", "replace")
    raise TickError(
        f"the program reported {shown!r} as a unit of work; expected NANOSECONDS UNITS, a CLOCK_MONOTONIC time and a number"
    )


def overlap(tenants: Sequence[Sequence[Tick]]) -> tuple[int, int]:
    return max(ticks[0].at_ns for ticks in tenants), min(ticks[-1].at_ns for ticks in tenants)


def pace(ticks: Sequence[Tick], since_ns: int, until_ns: int) -> Pace | None:
    inside = [one for one in ticks if since_ns <= one.at_ns <= until_ns]
    if len(inside) < 2 or inside[-1].at_ns == inside[0].at_ns:
        return None
    units = sum(one.units for one in inside[1:])
    times = [(after.at_ns - before.at_ns) / 1e9 / after.units for before, after in pairwise(inside)]
    return Pace(times, (inside[-1].at_ns - inside[0].at_ns) / 1e9 / units, units)


def units_between(ticks: Sequence[Tick], since_ns: int, until_ns: int) -> int:
    return sum(one.units for one in ticks if since_ns < one.at_ns <= until_ns)


WHOLE_MILLI: Final = 1000
LOOK_CONFIDENCE: Final = 0.985
"""The confidence level of the interval computed after each round.

It is higher than the overall 95 %, because stopping at the first interval that is narrow enough makes errors more likely.
"""
LEAST_ROUNDS: Final = 8  # fewer rounds do not give such an interval


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    fraction_milli: int
    tenants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The figures measured in one step. Unknown figures are None."""

    unit_s: float  # mean time over the step, per unit of work of one tenant
    latencies_s: Sequence[float]  # times between the reports of each tenant, per unit
    measured: int = 1  # number of tenants that reported units: all copies, or only the first tenant of a mix
    memory_mib: int | None = None  # the most memory that a measured tenant used
    busy_percent: float | None = None
    unit_mj: float | None = None  # the device's energy per unit of work of all tenants
    hour_milli: int = 0  # the share's hourly price in thousandths of the currency, or 0 if there is none
    currency: str = ""
    is_company_unknown: bool = False  # others were on the device, and the device does not report whether they worked

    @property
    def typical_s(self) -> float:
        return midmean(self.latencies_s)

    @property
    def device_units_s(self) -> float:
        return self.measured / self.unit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    setting: Setting
    rounds: int
    why_not: str = ""  # a sentence that explains why the finding is unknown
    slower: Estimate | None = None  # a unit's typical time as a multiple of its time alone; exactly 1 for the baseline
    unit_s: float = math.nan  # the mean, including pauses and stalls, from which throughput and cost are computed
    median_s: float = math.nan  # the median latency
    p95_s: float = math.nan
    device_units_s: float = math.nan
    memory_mib: int | None = None
    busy_percent: float | None = None
    unit_mj: float | None = None
    unit_gpu_s: float = math.nan  # GPU seconds per unit, which is share times time
    unit_price: float | None = None  # in the currency
    currency: str = ""
    cost: float | None = None  # cost per unit, relative to its cost alone

    def suffices(self, most_slower: float) -> bool | None:
        """Return whether a unit of work takes at most `most_slower` times as long as in the baseline, or None if unknown."""
        if self.slower is None:
            return None
        if self.slower.high <= most_slower:
            return True
        return False if self.slower.low > most_slower else None


@dataclass(slots=True)
class Study:
    """A study of several settings.

    `baseline` is one of the settings. `interval` is the maximum width of a confidence interval, relative to the measured value.
    """

    baseline: Setting
    settings: Sequence[Setting]
    interval: float
    samples: dict[Setting, list[Sample]] = field(default_factory=dict)
    quotients: dict[Setting, list[float]] = field(default_factory=dict)
    failed: dict[Setting, str] = field(default_factory=dict)
    trouble: dict[Setting, str] = field(default_factory=dict)  # why the last failed step of each setting failed
    rounds: int = 0

    def next_round(self) -> list[Setting]:
        open_ones = [
            one for one in self.settings if one != self.baseline and one not in self.failed and not self.is_narrow(one)
        ]
        if self.baseline in self.failed or (not open_ones and self.rounds):
            return []
        steps = [self.baseline, *open_ones]
        return steps[::-1] if self.rounds % 2 else steps

    def add(self, found: Mapping[Setting, Sample]) -> None:
        self.rounds += 1
        alone = found.get(self.baseline)
        for setting, sample in found.items():
            self.samples.setdefault(setting, []).append(sample)
            if alone is not None and setting != self.baseline:
                self.quotients.setdefault(setting, []).append(sample.typical_s / alone.typical_s)

    def is_narrow(self, setting: Setting) -> bool:
        quotients = self.quotients.get(setting, ())
        if len(quotients) < LEAST_ROUNDS:
            return False
        found = quotient_estimate(quotients)
        return found.high - found.low <= self.interval * found.value

    def findings(self) -> list[Finding]:
        return [self._finding(setting) for setting in self.settings]

    def _finding(self, setting: Setting) -> Finding:
        samples = self.samples.get(setting, [])
        quotients = self.quotients.get(setting, [])
        rounds = len(samples if setting == self.baseline else quotients)
        if setting in self.failed or not samples:
            why = self.failed.get(setting) or self.trouble.get(setting, "there was no time to measure it")
            return Finding(setting=setting, rounds=rounds, why_not=why)
        slower: Estimate | None = Estimate(1.0, 1.0, 1.0)
        why = ""
        if setting != self.baseline:
            slower = quotient_estimate(quotients) if len(quotients) >= LEAST_ROUNDS else None
            if slower is None:
                why = f"only {rounds} of the {LEAST_ROUNDS} rounds required could be measured"
                why += f"; {self.trouble[setting]}" if setting in self.trouble else ""
        unit_s = median([one.unit_s for one in samples])
        alone = self.samples.get(self.baseline)
        hour_milli = samples[-1].hour_milli
        return Finding(
            setting=setting,
            rounds=rounds,
            why_not=why,
            slower=slower,
            unit_s=unit_s,
            median_s=median([percentile(one.latencies_s, 50) for one in samples]),
            p95_s=median([percentile(one.latencies_s, 95) for one in samples]),
            device_units_s=median([one.device_units_s for one in samples]),
            memory_mib=max((one.memory_mib for one in samples if one.memory_mib is not None), default=None),
            busy_percent=_middle([one.busy_percent for one in samples]),
            unit_mj=_middle([one.unit_mj for one in samples]),
            unit_gpu_s=unit_s * setting.fraction_milli / WHOLE_MILLI,
            unit_price=unit_s * hour_milli / 3_600_000 if hour_milli else None,
            currency=samples[-1].currency,
            # A pool charges by share and time.
            cost=slower.value * setting.fraction_milli / self.baseline.fraction_milli if alone and slower else None,
        )


def quotient_estimate(quotients: Sequence[float]) -> Estimate:
    found = centre_estimate([math.log(one) for one in quotients], LOOK_CONFIDENCE)
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high))


def _middle(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return median(known) if known else None


def settings_of_fractions(fractions_milli: Sequence[int]) -> list[Setting]:
    """Return the baseline, then a setting for each share (largest first) with as many tenants as fit on a device.

    The baseline is a single tenant with the largest share.
    """
    largest = max(fractions_milli)
    full = {Setting(one, WHOLE_MILLI // one) for one in fractions_milli}
    return [Setting(largest, 1), *sorted(full - {Setting(largest, 1)}, reverse=True)]


def settings_of_copies(copies: Sequence[int], offered_milli: Sequence[int]) -> list[Setting]:
    """Return the baseline and, for each number of extra copies, the largest share at which the program and its copies all fit on a device.

    Only shares in `offered_milli` are considered. Raises ValueError if none of them is small enough.
    """
    found = [Setting(max(offered_milli), 1)]
    for number in sorted(set(copies)):
        fitting = [one for one in offered_milli if one * (number + 1) <= WHOLE_MILLI]
        if not fitting:
            least = min(offered_milli)
            raise ValueError(
                f"{number} copies next to the program do not fit on a device: the smallest share on offer is {format_fraction(least)}, "
                f"so use at most {WHOLE_MILLI // least - 1}"
            )
        found.append(Setting(max(fitting), number + 1))
    return found


def right_share(findings: Sequence[Finding], most_slower: float) -> Finding | None:
    known = [one for one in findings if one.suffices(most_slower)]
    return min(known, key=lambda one: (one.setting.fraction_milli, -one.setting.tenants), default=None)
