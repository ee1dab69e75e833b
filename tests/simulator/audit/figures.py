"""The figures of a run, under the names that `jupyter gpu simulate --json` prints."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.simulator.audit.sessions import Session

NOT_AUDITED = ("wall_s", "forecast_error", "baselines")
HOUR_MS = 3_600_000


@dataclass(slots=True)
class Books:
    """What is added up. GPU time in ms of one GPU."""

    busy: int = 0
    held: int = 0
    peak_held: int = 0
    suspends: int = 0
    resumes: int = 0
    failed_swaps: int = 0
    early: int = 0
    vain_mib: int = 0
    preemptions: int = 0
    moved_mib: int = 0
    host_peak_mib: int = 0
    out_of_memory: int = 0
    culled: int = 0
    last_close_ms: int = 0
    waits_of: dict[int | None, list[int]] = field(default_factory=dict)  # by host
    doors: list[int] = field(default_factory=list)
    late: dict[str, list[int]] = field(default_factory=dict)  # by user
    stretch: dict[str, list[int]] = field(default_factory=dict)  # by user, in thousandths

    def waited(self, host: int | None, wait_ms: int) -> None:
        """Count the wait of a GPU cell that begins on a host."""
        self.waits_of.setdefault(host, []).append(wait_ms)

    def figures(self, sessions: Sequence[Session], hosts: int, devices: int, lost: int) -> dict[str, object]:
        """Return the figures of the run."""
        cells = [cell for session in sessions for cell in session.cells]
        reserved = sum(session.gpus * (session.close_ms - session.open_ms) for session in sessions)
        opened = min((session.open_ms for session in sessions), default=0)
        waits = [wait for host in self.waits_of.values() for wait in host]
        on_hosts = [percentile(host, 95) for host in self.waits_of.values()]
        late = [late for user in self.late.values() for late in user]
        return {
            "sessions": len(sessions),
            "cells": len(cells),
            "gpu_cells": sum(cell.gpus > 0 for cell in cells),
            "hosts": hosts,
            "devices": devices,
            "reserved_gpu_hours": _hours(reserved),
            "busy_gpu_hours": _hours(self.busy),
            "held_gpu_hours": _hours(self.held),
            "owned_gpu_hours": _hours(devices * max(0, self.last_close_ms - opened)),
            "saved_gpu_hours": _hours(reserved - self.held),
            "peak_devices_held": self.peak_held,
            "wait_s": spread(waits),
            "waited_percent": _nonzero_percent(waits),
            "nonzero_wait_s": spread([wait for wait in waits if wait]),
            "host_p95_wait_s": {name: percentile(on_hosts, at) / 1000 for name, at in (("median", 50), ("worst", 100))},
            "door_wait_s": spread(self.doors),
            "door_waited_percent": _nonzero_percent(self.doors),
            "late_s": spread(late),
            "user_p95_late_s": _of_users(self.late),
            "user_p95_stretch": _of_users(self.stretch),
            "jain_late": _jain([sum(times) / len(times) for _, times in sorted(self.late.items())]),
            "suspends": self.suspends,
            "resumes": self.resumes,
            "failed_swaps": self.failed_swaps,
            "early_resumes": self.early,
            "vain_gib": round(self.vain_mib / 1024, 3),
            "preemptions": self.preemptions,
            "moved_gib": round(self.moved_mib / 1024, 3),
            "host_peak_mib": self.host_peak_mib,
            "out_of_memory": self.out_of_memory,
            "lost": lost,
        }


def compare(own: dict[str, object], result: dict[str, object]) -> list[str]:
    """Return a sentence for each figure of the result that differs, or that the audit does not know."""
    said = []
    for name in dict.fromkeys([*own, *result]):
        value = result.get(name)
        if name in NOT_AUDITED:
            continue
        if name not in own or name not in result:
            said.append(f"{name}: {'the audit' if name in result else 'the run'} has no such figure")
        elif isinstance(value, dict) and isinstance(parts := own[name], dict):
            said += [
                f"{name} {part}: the run says {value.get(part)}, the record {parts.get(part)}"
                for part in sorted({*value, *parts})
                if value.get(part) != parts.get(part)
            ]
        elif own[name] != value:
            said.append(f"{name}: the run says {value}, the record {own[name]}")
    return said


def _hours(gpu_ms: int) -> float:
    return round(gpu_ms / HOUR_MS, 3)


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest of the values that at least `percent` of them do not exceed; 0 of none."""
    return next((value for at, value in enumerate(sorted(values), 1) if at * 100 >= percent * len(values)), 0)


def _of_users(values: dict[str, list[int]]) -> dict[str, float]:
    """Return thousandths of the 95th percentile of a user's own values: of the median user, of the 95th in a hundred, of the worst."""
    ordered = sorted(percentile(user, 95) for user in values.values())
    return {name: percentile(ordered, at) / 1000 for name, at in (("median", 50), ("p95", 95), ("worst", 100))}


def spread(times_ms: Sequence[int]) -> dict[str, float]:
    """Return percentiles and the largest in seconds."""
    named = {f"p{percent}": percentile(times_ms, percent) / 1000 for percent in (50, 90, 95, 99)}
    return {**named, "max": max(times_ms, default=0) / 1000}


def _nonzero_percent(times_ms: Sequence[int]) -> float:
    return round(100 * sum(time_ms != 0 for time_ms in times_ms) / len(times_ms), 3) if times_ms else 0.0


def _jain(means: Sequence[float]) -> float:
    """Return Jain's index of fairness, (Σx)² / (n · Σx²)."""
    squares = sum(mean * mean for mean in means)
    return round(sum(means) ** 2 / (len(means) * squares), 4) if squares else 1.0
