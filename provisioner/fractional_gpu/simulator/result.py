"""Defines the statistics reported for a run, and the accounts used to track them.

Accounts track the memory kernels actually hold, not what they reserve. `out_of_memory` therefore counts what a real driver would have
refused.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from fractional_gpu.core.forecasts.outcomes import ForecastError
from fractional_gpu.simulator.experience import (
    USERS_TOO_LATE,
    Goal,
    Lateness,
    Spread,
    UserExperience,
    nearest_rank,
    too_long,
)
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.traces import Session


@dataclass(slots=True)
class Timeline:
    """The moments of a run, stored as columns, because a day with ten thousand users has a million of them. `at_ms` never decreases."""

    at_ms: "array[int]" = field(default_factory=partial(array, "q"))
    devices_held: "array[int]" = field(default_factory=partial(array, "i"))  # devices on which memory is held
    busy: "array[int]" = field(default_factory=partial(array, "i"))  # GPUs running cells
    waiting: "array[int]" = field(default_factory=partial(array, "i"))  # cells waiting for a GPU

    @property
    def columns(self) -> tuple["array[int]", "array[int]", "array[int]", "array[int]"]:
        return self.at_ms, self.devices_held, self.busy, self.waiting

    def add(self, at_ms: int, devices_held: int, busy: int, waiting: int) -> None:
        for column, value in zip(self.columns, (at_ms, devices_held, busy, waiting), strict=True):
            column.append(value)

    def add_changed(self, at_ms: int, devices_held: int, busy: int, waiting: int) -> None:
        if not self.at_ms or (self.devices_held[-1], self.busy[-1], self.waiting[-1]) != (devices_held, busy, waiting):
            self.add(at_ms, devices_held, busy, waiting)


@dataclass(slots=True, kw_only=True)
class Result:
    """The statistics of a run. GPU time is in milli-GPU milliseconds, so one GPU for one second is 1,000,000.

    `finish` computes waits and lateness from `experience`, and forecast errors from the hosts' `errors`.
    """

    name: str
    experience: UserExperience = field(compare=False)
    errors: list[Sequence[ForecastError]] = field(default_factory=list, compare=False)
    closed_ms: int = 0  # when the last session closed
    sessions: int
    cells: int
    gpu_cells: int
    devices: int
    hosts: int = 1
    reserved: int = 0  # time of the whole GPUs that sessions would have reserved from open to close
    busy: int = 0  # time of GPU cells, multiplied by the number of GPUs that each uses
    held: int = 0  # time of the devices on which memory is held
    peak_devices_held: int = 0
    owned: int = 0  # time of all devices, from the first session's opening to the last session's closing
    waits: Spread = field(default_factory=Spread)
    host_p95_ms: tuple[int, ...] = ()  # the 95th percentile of the waits on each host, sorted
    doors: Spread = field(default_factory=Spread)  # the wait of each session at the door
    lateness: Lateness = field(default_factory=Lateness)
    hopeless: str = ""  # why the run stopped early; its figures then end there
    suspends: int = 0
    resumes: int = 0
    failed_swaps: int = 0  # suspends and resumes that began and changed nothing
    early_resumes: int = 0  # resumes that began before a cell asked, because one was expected
    vain_mib: int = 0  # memory that early resumes moved to devices although no cell followed
    preemptions: int = 0
    moved_mib: int = 0
    host_peak_mib: int = 0  # the most saved on one host
    out_of_memory: int = 0
    lost: int = 0
    wall_s: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)
    forecast_error: dict[str, dict[str, float]] = field(default_factory=dict)  # by kind of forecast

    def as_json(self) -> dict[str, object]:
        return {
            "sessions": self.sessions,
            "cells": self.cells,
            "gpu_cells": self.gpu_cells,
            "hosts": self.hosts,
            "devices": self.devices,
            "reserved_gpu_hours": _hours(self.reserved),
            "busy_gpu_hours": _hours(self.busy),
            "held_gpu_hours": _hours(self.held),
            "owned_gpu_hours": _hours(self.owned),
            "saved_gpu_hours": _hours(self.reserved - self.held),
            "peak_devices_held": self.peak_devices_held,
            "wait_s": self.waits.summary(),
            "waited_percent": self.waits.nonzero_percent(),
            "nonzero_wait_s": self.waits.nonzero().summary(),
            "host_p95_wait_s": {
                "median": nearest_rank(self.host_p95_ms, 50) / 1000,
                "worst": nearest_rank(self.host_p95_ms, 100) / 1000,
            },
            "door_wait_s": self.doors.summary(),
            "door_waited_percent": self.doors.nonzero_percent(),
            "late_s": self.lateness.cells.summary(),
            "user_p95_late_s": self.lateness.of_users(),
            "user_p95_stretch": self.lateness.stretch_of_users(),
            "jain_late": self.lateness.jain(),
            "suspends": self.suspends,
            "resumes": self.resumes,
            "failed_swaps": self.failed_swaps,
            "early_resumes": self.early_resumes,
            "vain_gib": round(self.vain_mib / 1024, 3),
            "preemptions": self.preemptions,
            "moved_gib": round(self.moved_mib / 1024, 3),
            "host_peak_mib": self.host_peak_mib,
            "out_of_memory": self.out_of_memory,
            "lost": self.lost,
            "wall_s": round(self.wall_s, 3),
            "forecast_error": self.forecast_error,
        }

    def missed(self, goal: Goal) -> str:
        if self.hopeless:
            return self.hopeless
        kinds = (("GPU cells' waits", self.waits, goal.waits()), ("waits for a host", self.doors, goal.doors()))
        for what, spread, limits in kinds:
            for percent, limit_ms in limits:
                if spread.percentile_ms(percent) > limit_ms:
                    return too_long(what, percent, limit_ms)
        if goal.p95_late_ms is not None and self.lateness.percentile_of_users_ms(95) > goal.p95_late_ms:
            return USERS_TOO_LATE.format(goal.p95_late_ms / 1000)
        return ""

    def finish(self, trace: Sequence[Session]) -> None:
        experience = self.experience
        self.waits, self.doors = Spread.of(chain(*experience.waits_ms.values())), Spread.of(experience.doors_ms)
        self.host_p95_ms = tuple(sorted(Spread.of(waits).percentile_ms(95) for waits in experience.waits_ms.values()))
        self.lateness, self.hopeless = Lateness.of(experience), experience.hopeless
        opened_ms = min((session.open_ms for session in trace), default=0)
        self.owned = self.devices * max(0, self.closed_ms - opened_ms) * 1000
        self.forecast_error = _merged_errors(self.errors)


def _hours(milli_ms: int) -> float:
    return round(milli_ms / 3.6e9, 3)


def begin_result(name: str, trace: Sequence[Session], hosts: Sequence[Host], goal: Goal | None = None) -> Result:
    return Result(
        name=name,
        experience=UserExperience(trace, goal),
        sessions=len(trace),
        cells=sum(len(session.cells) for session in trace),
        gpu_cells=sum(cell.gpus > 0 for session in trace for cell in session.cells),
        devices=sum(len(host.devices) for host in hosts),
        hosts=len(hosts),
        reserved=sum(session.gpus * (session.close_ms - session.open_ms) * 1000 for session in trace),
    )


def _merged_errors(errors: Sequence[Sequence[ForecastError]]) -> dict[str, dict[str, float]]:
    merged: dict[str, dict[str, float]] = {}
    for views in zip(*errors, strict=True):
        count = sum(view.count for view in views)
        weighted = [(view, view.count if count else 1) for view in views]
        weights = sum(weight for _, weight in weighted)
        merged[views[0].what] = {
            "count": count,
            "median_relative": sum(view.median_error_permille * weight for view, weight in weighted) / weights / 1000,
            "within_bounds": sum(view.covered_permille * weight for view, weight in weighted) / weights / 1000,
        }
    return merged


class Accounts:
    """The accounts used to track a run on all its hosts. The run updates `running_gpus` and `waiting`. Hosts are numbered from 0."""

    def __init__(self, result: Result, hosts: Sequence[Host]) -> None:
        self.result = result
        self.running_gpus = self.waiting = 0
        self._sizes = [{device.device_id: device.memory_mib for device in host.devices} for host in hosts]
        self._used = [dict.fromkeys(sizes, 0) for sizes in self._sizes]
        self._holders = [dict.fromkeys(sizes, 0) for sizes in self._sizes]
        self._host_mib = [0 for _ in hosts]
        self._devices_held = self._accounted_ms = 0

    def advance(self, now_ms: int) -> None:
        passed = now_ms - self._accounted_ms
        if passed <= 0:
            return
        result = self.result
        result.busy += self.running_gpus * passed * 1000
        result.held += self._devices_held * passed * 1000
        result.peak_devices_held = max(result.peak_devices_held, self._devices_held)
        result.timeline.add_changed(self._accounted_ms, self._devices_held, self.running_gpus, self.waiting)
        self._accounted_ms = now_ms

    def finish(self) -> None:
        self.result.timeline.add(self._accounted_ms, self._devices_held, self.running_gpus, self.waiting)

    def hold(self, host: int, device_ids: Iterable[str]) -> None:
        holders = self._holders[host]
        for device_id in device_ids:
            self._devices_held += holders[device_id] == 0
            holders[device_id] += 1

    def let_go(self, host: int, device_ids: Iterable[str]) -> None:
        holders = self._holders[host]
        for device_id in device_ids:
            holders[device_id] -= 1
            self._devices_held -= holders[device_id] == 0

    def use(self, host: int, device_ids: Iterable[str], mib: int) -> None:
        used, sizes = self._used[host], self._sizes[host]
        for device_id in device_ids:
            used[device_id] += mib
            if mib > 0 and used[device_id] > sizes[device_id]:
                self.result.out_of_memory += 1

    def save(self, host: int, mib: int) -> None:
        self.drop_saved(host, -mib)
        self.result.moved_mib += abs(mib)

    def drop_saved(self, host: int, mib: int) -> None:
        self._host_mib[host] -= mib
        self.result.host_peak_mib = max(self.result.host_peak_mib, self._host_mib[host])
