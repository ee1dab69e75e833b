"""Reads the simulated devices. This is the `Monitor` for the simulated host."""

import math
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from fractional_gpu.gpu.interface import (
    DeviceActivity,
    DeviceInfo,
    DeviceSensors,
    DeviceUse,
    DeviceUtilisation,
    GPUError,
    GPUErrorCode,
    ProcessUse,
)
from fractional_gpu.gpu.simulated.load import WHOLE, used_milli
from fractional_gpu.gpu.simulated.processes import (
    WORK,
    Process,
    is_dead,
    processes_of,
    reap,
    settle_if_abandoned,
    users_of,
)
from fractional_gpu.gpu.simulated.store import MIB, NoSuchDeviceError, SimulatedHostError, Store
from fractional_gpu.host.clock import since_boot_us

_SETTLE_US: Final = 100_000  # a thread begins its next piece of work within this time
_RECENT_US: Final = 1_000_000
_IDLE_MW: Final = 75_000  # the power of an idle device; this and the next figure are roughly those of an H200
_PEAK_MW: Final = 700_000  # the power of a fully used device
_REAP_S: Final = 10.0

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def open_store(directory: str | Path) -> Store:
    try:
        return Store(directory)
    except SimulatedHostError as error:
        raise GPUError(GPUErrorCode.NOT_INITIALIZED, str(error)) from error


def translated(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Convert the simulated host's errors to GPUError: NO_SUCH_DEVICE for an unknown device, otherwise OPERATING_SYSTEM."""

    @wraps(function)
    def call(*arguments: _P.args, **named: _P.kwargs) -> _Result:
        try:
            return function(*arguments, **named)
        except NoSuchDeviceError as error:
            raise GPUError(GPUErrorCode.NO_SUCH_DEVICE, str(error)) from error
        except (OSError, sqlite3.Error, SimulatedHostError) as error:
            raise GPUError(GPUErrorCode.OPERATING_SYSTEM, f"the simulated GPU host failed: {error}") from error

    return call


class SimulatedMonitor:
    kind: Final = "simulated"

    def __init__(self, directory: str | Path) -> None:
        self._store = open_store(directory)
        self._reaped_s = -math.inf
        self._opened_us = since_boot_us()
        # The time at which the energy of each device was last counted, and the energy until then in microjoules.
        self._drawn: dict[str, tuple[int, int]] = {}

    @translated
    def devices(self) -> list[DeviceInfo]:
        return [
            DeviceInfo(
                device_id=device.device_id,
                index=device.index,
                name=device.name,
                memory_mib=device.memory_mib,
                simulated=True,
                checkpointable=True,
            )
            for device in self._store.devices()
        ]

    @translated
    def activity(self, device_id: str, since_us: int) -> DeviceActivity:
        now_us = since_boot_us()
        worked_us = {}
        for process in users_of(self._store, device_id):
            with suppress(FileNotFoundError):  # the process has ended
                # Use no Path, because this runs every second for many processes.
                work = os.stat(f"{self._store.memory}/{process.key}/{WORK}")  # noqa: PTH116
                until_us = work.st_mtime_ns // 1000
                if since_us < until_us:
                    worked_us[process.pid] = min(until_us, now_us)
        return DeviceActivity(known_until_us=now_us, settle_us=_SETTLE_US, worked_us=worked_us)

    @translated
    def utilisation(self, device_id: str, since_us: int) -> DeviceUtilisation:
        now_us = since_boot_us()
        by_pid = {
            process.pid: used_milli(self._store, process, since_us * 1000, now_us * 1000)
            for process in users_of(self._store, device_id)
        }
        device_milli = min(WHOLE, sum(by_pid.values()))
        return DeviceUtilisation(
            since_us=since_us, until_us=now_us, settle_us=0, by_pid=by_pid, device_milli=device_milli
        )

    @translated
    def sensors(self, device_id: str) -> DeviceSensors:
        """Return the current utilisation and power, and the energy used since this monitor was opened. Raises GPUError.

        Energy is added up at each reading, so any energy a process uses between the last reading and its exit is missing.
        """
        self._check(device_id)
        now_us = since_boot_us()
        use_milli = self.utilisation(device_id, now_us - _RECENT_US).device_milli or 0
        since_us, drawn_uj = self._drawn.get(device_id, (self._opened_us, 0))
        used_milli = self.utilisation(device_id, since_us).device_milli or 0
        drawn_uj += (now_us - since_us) * (1000 * _IDLE_MW + (_PEAK_MW - _IDLE_MW) * used_milli) // 1_000_000
        self._drawn[device_id] = now_us, drawn_uj
        power_mw = _IDLE_MW + (_PEAK_MW - _IDLE_MW) * use_milli // 1000
        return DeviceSensors(busy_percent=use_milli // 10, power_mw=power_mw, energy_mj=drawn_uj // 1000)

    def kernel_environment(self, device_id: str | None) -> dict[str, str]:
        environment = {"JUPYTER_GPU_SIMULATED_DIR": str(self._store.directory)}
        if device_id is not None:
            environment["JUPYTER_GPU_SIMULATED_DEVICE"] = device_id
        return environment

    def close(self) -> None:
        self._store.close()

    def _check(self, device_id: str) -> int:
        device = self._store.device(device_id)
        if device.lost:
            raise GPUError(GPUErrorCode.DEVICE_LOST, f"the simulated device {device_id} is lost")
        return device.memory_mib

    @translated
    def use(self, device_id: str) -> DeviceUse:
        memory_mib = self._check(device_id)
        holding = users_of(self._store, device_id)
        reaped = self._reap(holding)
        abandoned = [process for process in processes_of(self._store) if process.phase in ("saving", "restoring")]
        for process in abandoned:
            settle_if_abandoned(self._store, process.key)
        if reaped or abandoned:
            holding = users_of(self._store, device_id)
        return DeviceUse(
            device_id=device_id,
            memory_mib=memory_mib,
            used_mib=_mib(sum(process.n_bytes for process in holding)),
            processes=tuple(ProcessUse(pid=process.pid, used_mib=_mib(process.n_bytes)) for process in holding),
        )

    def _reap(self, holding: list[Process]) -> bool:
        """Clean up after dead processes if any process in `holding` is dead, and at least every 10 s. Return whether anything was done."""
        now_s = time.monotonic()
        due = now_s - self._reaped_s >= _REAP_S
        if due or any(is_dead(self._store, process.key, int(process.key.partition("-")[0])) for process in holding):
            self._reaped_s = now_s
            reap(self._store)
            return True
        return False


def _mib(n_bytes: int) -> int:
    return -(-n_bytes // MIB)
