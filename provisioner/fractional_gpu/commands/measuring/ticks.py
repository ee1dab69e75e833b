"""The units of work that a program has reported (`fractional_gpu_kernel.measure`), and what follows for the time that tenants overlap."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fractional_gpu_kernel.measure import MOST_UNITS


class TickError(ValueError):
    """A program wrote something else than the protocol says."""


@dataclass(frozen=True, slots=True)
class Tick:
    """At that time of CLOCK_MONOTONIC, ns, so many units of work were done."""

    at_ns: int
    units: int


@dataclass(frozen=True, slots=True)
class Pace:
    """What one tenant did within a span. Times in seconds."""

    latencies_s: list[float]  # from report to report, for a unit
    unit_s: float
    units: int


def read_ticks(path: Path) -> list[Tick]:
    """Return what is in the file so far, in the order of time; a line that is being written is left out. Raises TickError, OSError."""
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
        f"the program reported {shown!r} as a unit of work; allowed: NANOSECONDS UNITS, the time of CLOCK_MONOTONIC and a number"
    )


def overlap(tenants: Sequence[Sequence[Tick]]) -> tuple[int, int]:
    """Return the span in which all tenants work: from the last one's first report to the first one's last report, ns.

    Its end is not after its beginning where they do not overlap. Raises ValueError if one has reported nothing.
    """
    return max(ticks[0].at_ns for ticks in tenants), min(ticks[-1].at_ns for ticks in tenants)


def pace(ticks: Sequence[Tick], since_ns: int, until_ns: int) -> Pace | None:
    """Return what a tenant did between its first and its last report within the span; None with fewer than two."""
    inside = [one for one in ticks if since_ns <= one.at_ns <= until_ns]
    if len(inside) < 2 or inside[-1].at_ns == inside[0].at_ns:
        return None
    units = sum(one.units for one in inside[1:])
    times = [(after.at_ns - before.at_ns) / 1e9 / after.units for before, after in pairwise(inside)]
    return Pace(times, (inside[-1].at_ns - inside[0].at_ns) / 1e9 / units, units)


def units_between(ticks: Sequence[Tick], since_ns: int, until_ns: int) -> int:
    """Return how many units were done after the one time and up to the other."""
    return sum(one.units for one in ticks if since_ns < one.at_ns <= until_ns)
