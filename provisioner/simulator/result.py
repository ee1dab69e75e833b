"""What a run comes to, in the figures that people compare."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Point", "Result", "Waits", "quantile_ms"]

_HOUR_MILLI_MS = 3_600_000 * 1000


def quantile_ms(ordered: Sequence[int], percent: int) -> int:
    """Return the smallest value that `percent` of the values do not exceed (nearest rank); 0 of none."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits from asking to running, ms, sorted; zeros are in."""

    ordered: tuple[int, ...]

    def percentile_ms(self, percent: int) -> int:
        """Return a percentile, ms."""
        return quantile_ms(self.ordered, percent)

    def summary(self) -> dict[str, float]:
        """Return the percentiles in seconds."""
        named = {f"p{percent}": self.percentile_ms(percent) / 1000 for percent in (50, 90, 95, 99)}
        return {**named, "max": self.percentile_ms(100) / 1000}


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of the run: devices on which somebody holds memory, cells on a GPU, cells that wait for one."""

    at_ms: int
    devices_held: int
    busy: int
    waiting: int


@dataclass(slots=True, kw_only=True)
class Result:
    """The figures of a run. GPU time is counted in milli-GPU times ms: one GPU for a second is 1,000,000."""

    name: str
    sessions: int
    cells: int
    gpu_cells: int
    devices: int
    reserved: int = 0  # what the sessions would have reserved, whole GPUs from open to close
    busy: int = 0  # cells on a GPU, each counted as the GPUs it uses
    held: int = 0  # devices on which somebody holds memory
    peak_devices_held: int = 0
    waits: Waits = field(default_factory=lambda: Waits(()))
    suspends: int = 0
    resumes: int = 0
    preemptions: int = 0
    moved_mib: int = 0
    host_peak_mib: int = 0
    out_of_memory: int = 0
    lost: int = 0
    wall_s: float = 0.0
    timeline: list[Point] = field(default_factory=list)
    forecast_error: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # by what was forecast; empty: nothing was

    def as_json(self) -> dict[str, object]:
        """Return what `--json` prints."""
        return {
            "sessions": self.sessions,
            "cells": self.cells,
            "gpu_cells": self.gpu_cells,
            "devices": self.devices,
            "reserved_gpu_hours": _hours(self.reserved),
            "busy_gpu_hours": _hours(self.busy),
            "held_gpu_hours": _hours(self.held),
            "saved_gpu_hours": _hours(self.reserved - self.held),
            "peak_devices_held": self.peak_devices_held,
            "wait_s": self.waits.summary(),
            "suspends": self.suspends,
            "resumes": self.resumes,
            "preemptions": self.preemptions,
            "moved_gib": round(self.moved_mib / 1024, 3),
            "host_peak_mib": self.host_peak_mib,
            "out_of_memory": self.out_of_memory,
            "lost": self.lost,
            "wall_s": round(self.wall_s, 3),
            "forecast_error": self.forecast_error,
        }


def _hours(milli_ms: int) -> float:
    return round(milli_ms / _HOUR_MILLI_MS, 3)
