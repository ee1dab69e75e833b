"""Reads NVIDIA devices through NVML. Creates no CUDA context and needs no privileges.

If the library, the driver or a device is missing, no error is raised: `devices()` returns an empty list, and `why_none` explains why. Each
call tries again, so a driver that is loaded later is picked up. `devices()` leaves out lost devices, and `use()` raises DEVICE_LOST for
them. For a device in MIG mode, `devices()` lists its instances. Activity, power and energy are not available for instances, because NVML
does not document them. Memory reserved by the driver is included neither in a device's memory nor in its usage.

The driver's utilisation samples need care. For each process, the driver returns a single sample: the mean rate since the requested time,
stamped with the time of the newest sample. (Observed with driver 580 on an H200, which samples about every 0.2 s and keeps 14 s of
samples.) A process that used the device only at the start of the period therefore appears to have used it right up to now, so `activity`
requests only the time since its previous request.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

from fractional_gpu.gpu.interface import (
    DeviceActivity,
    DeviceInfo,
    DeviceSensors,
    DeviceUse,
    DeviceUtilisation,
    GPUError,
    GPUErrorCode,
    ProcessKind,
    ProcessUse,
)
from fractional_gpu.gpu.nvidia.support import (
    driver_refusal,
    driver_warnings,
    moving_refusal,
    saves_children,
    sharing_advice,
    sharing_refusal,
    why_no_bindings,
)
from fractional_gpu.host.clock import WallClock
from fractional_gpu.host.process import thread_group

T = TypeVar("T")

_MIB: Final = 1024 * 1024

# NVML's return codes, which are fixed in its binary interface.
_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _INSUFFICIENT_SIZE = 0, 2, 3, 4, 6, 7
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND = 9, 12, 13
_GPU_IS_LOST, _RESET_REQUIRED, _OPERATING_SYSTEM, _VERSION_MISMATCH = 15, 16, 17, 18
_ARGUMENT_VERSION_MISMATCH, _GPU_NOT_FOUND = 25, 28

_CODES: Final[Mapping[int, GPUErrorCode]] = {
    _INVALID_ARGUMENT: GPUErrorCode.NO_SUCH_DEVICE,
    _NOT_FOUND: GPUErrorCode.NO_SUCH_DEVICE,
    _GPU_NOT_FOUND: GPUErrorCode.NO_SUCH_DEVICE,
    _GPU_IS_LOST: GPUErrorCode.DEVICE_LOST,
    _RESET_REQUIRED: GPUErrorCode.DEVICE_LOST,
    _NO_PERMISSION: GPUErrorCode.NOT_PERMITTED,
    _NOT_SUPPORTED: GPUErrorCode.NOT_SUPPORTED,
    _FUNCTION_NOT_FOUND: GPUErrorCode.NOT_SUPPORTED,
    _OPERATING_SYSTEM: GPUErrorCode.OPERATING_SYSTEM,
}

_WHY_NONE: Final[Mapping[int, str]] = {
    _LIBRARY_NOT_FOUND: "NVIDIA's driver is not installed (there is no libnvidia-ml.so.1)",
    _DRIVER_NOT_LOADED: "NVIDIA's driver is installed but its kernel module is not loaded: see `nvidia-smi`",
    _VERSION_MISMATCH: "NVIDIA's driver was updated and the old kernel module is still loaded: reboot",
    _NO_PERMISSION: "this user may not open the device files /dev/nvidia*: add it to the group that owns them",
}

# Leave out devices with these errors. NOT_SUPPORTED means that the device shares the system's memory, so it has no size to divide.
_LEFT_OUT: Final = frozenset({_GPU_IS_LOST, _RESET_REQUIRED, _NO_PERMISSION, _NOT_SUPPORTED})

_CHIP: Final = 0  # NVML_TEMPERATURE_GPU, the sensor of the chip
_SAMPLE_LATE_US: Final = 250_000  # the driver may publish a sample this late
_SETTLE_US: Final = 1_000_000  # the longest period of a sample
_REMEMBERED_US: Final = 10_000_000  # how long `activity` remembers that a process worked
_AHEAD_US: Final = 1_000_000  # a stamp further ahead is wrong, and the process would seem busy until then
_FULL: Final = 100  # percent; NVML is known to report up to 37,100 %
_AT_WORK: Final = 10  # percent; above this, processes are working on the device
_NO_SAMPLES: Final = frozenset({_SUCCESS, _NOT_FOUND})  # pynvml raises an error with the code of success
_READS: Final = 3
_MIG: Final = "MIG-"  # prefix of an instance's id
_ON_MIG: Final = "it is a MIG instance, which the driver cannot checkpoint"

_UNAVAILABLE: Final = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH})


class _Sample(NamedTuple):
    """How heavily a process used a device up to `stamp_us` (wall-clock time). `rates` are percentages; the first one is for compute."""

    pid: int
    stamp_us: int
    rates: tuple[int, ...]

    @property
    def is_sane(self) -> bool:
        return all(0 <= rate <= _FULL for rate in self.rates)


class NvidiaMonitor:
    """The `Monitor` for NVIDIA devices. Thread-safe. The constructor's arguments are for tests."""

    kind: Final = "nvidia"

    def __init__(
        self,
        *,
        nvml: ModuleType | None = None,
        bindings: Callable[[], str] = why_no_bindings,
        clock: WallClock | None = None,
    ) -> None:
        self._clock = WallClock() if clock is None else clock
        self._steps = 0  # how often the wall clock was set
        self._steps_known: dict[str, int] = {}  # `_steps` at the last reading of activity, by device
        self._steps_measured: dict[str, int] = {}  # `_steps` at the last reading of utilisation, by device
        self._reading = threading.Lock()
        self._known_until_us: dict[str, int] = {}  # since boot, at the last reading of activity, by device
        self._worked_us: dict[str, dict[int, int]] = {}  # the same: when each process worked, by device and pid
        # The pids and time stamps of the samples around the last clock change, by device. Their stamps may be from before or after the
        # change, so they never count.
        self._ambiguous: dict[str, set[tuple[int, int]]] = {}
        self._nvml = importlib.import_module("pynvml") if nvml is None else nvml
        self._bindings = bindings
        self._starting = threading.Lock()
        self._started = False
        self._handles: dict[str, object] = {}  # by device id; replaced at each shutdown
        self.why_none = ""  # a sentence that explains why the last `devices()` was empty
        self.warnings: tuple[str, ...] = ()  # warnings about the driver and devices, from the last `devices()`
        self._why_no_move = ""
        self._saves_children = False

    def devices(self) -> list[DeviceInfo]:
        if not self._start():
            return []
        with translated(self._nvml, "listing the devices"):
            version: str = self._nvml.nvmlSystemGetDriverVersion()
            count: int = self._nvml.nvmlDeviceGetCount()
        self.warnings = driver_warnings(version)
        self._why_no_move = moving_refusal(version)
        self._saves_children = saves_children(version)
        refusal = driver_refusal(version) or self._bindings()
        found = [device for index in range(count) for device in self._describe(index, refusal)]
        if any(device.why_not == _ON_MIG for device in found):  # the driver does not number instances
            found = [replace(device, index=index) for index, device in enumerate(found)]
        if found:
            self.why_none = ""
        elif count:
            self.why_none = (
                f"none of the {count} NVIDIA devices can be used: they are not responding, not accessible to this user, have no "
                "dedicated memory, or are in MIG mode without an instance; see `nvidia-smi -L` and `dmesg`"
            )
        else:
            self.why_none = "NVIDIA's driver is loaded but finds no device"
        return found

    def use(self, device_id: str) -> DeviceUse:
        self._must_start(device_id)
        with translated(self._nvml, f"reading device {device_id}"):
            return self._read(device_id, partial(self._use, device_id))

    def _use(self, device_id: str, handle: object) -> DeviceUse:
        # An administrator may enable MIG while no process uses the device. NVML still reports the whole device after that.
        if not device_id.startswith(_MIG) and self._has_mig_instances(handle):
            raise GPUError(
                GPUErrorCode.NO_SUCH_DEVICE,
                f"device {device_id} was switched to MIG mode, so programs see only its instances; restart the broker to offer those",
            )
        total, used = self._memory(handle)
        by_pid: dict[int, int | None] = {}
        kinds: dict[int, ProcessKind] = {}
        for kind, processes in self._processes(handle):
            for process in processes:
                pid = _process_of(process.pid)
                # A process that does both compute and graphics is in both lists, each time with all its memory. Do not add them up.
                known = [one for one in (by_pid.get(pid), process.usedGpuMemory) if one is not None]
                by_pid[pid] = max(known, default=None)
                kinds.setdefault(pid, kind)
        return DeviceUse(
            device_id=device_id,
            memory_mib=total // _MIB,
            used_mib=-(-used // _MIB),
            processes=_shares(by_pid, kinds, used),
        )

    def activity(self, device_id: str, since_us: int) -> DeviceActivity | None:
        if device_id.startswith(_MIG) or not self._start():
            return None
        with self._reading:
            was_set = self._was_set(device_id, self._steps_known)
            offset_us, now_us = self._clock.offset_us(), self._clock.since_boot_us()
            known_us = self._known_until_us.get(device_id, 0)
            begin_us = known_us if known_us > since_us - _REMEMBERED_US else max(0, since_us)
            with translated(self._nvml, f"reading the processes on device {device_id}"):
                samples = self._read(device_id, partial(self._samples, begin_us + offset_us))
            if samples is None:
                return None
            if was_set:
                self._ambiguous[device_id] = {(sample.pid, sample.stamp_us) for sample in samples}
                self._steps_known[device_id] = self._steps
            ambiguous = self._ambiguous.get(device_id, set())
            worked_us = self._worked_us.setdefault(device_id, {})
            for sample in samples:
                stamp_us = sample.stamp_us - offset_us
                if (sample.pid, sample.stamp_us) in ambiguous:
                    continue
                if stamp_us <= now_us + _AHEAD_US and sample.is_sane and any(sample.rates):
                    # The work was at some time since `begin_us`, or earlier if the sample's own period began earlier.
                    at_us = min(stamp_us, now_us) - _SAMPLE_LATE_US
                    at_us = min(at_us, max(at_us - _SETTLE_US, begin_us + 1))
                    worked_us[sample.pid] = max(at_us, worked_us.get(sample.pid, 0))
            self._worked_us[device_id] = {pid: us for pid, us in worked_us.items() if us > now_us - _REMEMBERED_US}
            self._known_until_us[device_id] = now_us - _SAMPLE_LATE_US
            return DeviceActivity(
                known_until_us=now_us - _SAMPLE_LATE_US,
                settle_us=_SETTLE_US,
                worked_us={pid: us for pid, us in worked_us.items() if us > since_us},
            )

    def utilisation(self, device_id: str, since_us: int) -> DeviceUtilisation | None:
        if device_id.startswith(_MIG) or not self._start():
            return None
        was_set = self._was_set(device_id, self._steps_measured)
        offset_us, now_us = self._clock.offset_us(), self._clock.since_boot_us()
        with translated(self._nvml, f"reading the utilisation of device {device_id}"):
            samples = self._read(device_id, partial(self._samples, max(0, since_us + offset_us)))
            busy_percent = self._read(device_id, self._busy_percent)
        if samples is None and busy_percent is None:
            return None
        self._steps_measured[device_id] = self._steps
        until_us, by_pid = now_us - _SAMPLE_LATE_US, None
        if samples is not None and not was_set:  # if the clock was set, the times of samples are unknown
            newest_us = now_us + _AHEAD_US
            sane = [one for one in samples if one.is_sane and since_us < one.stamp_us - offset_us <= newest_us]
            # A busy device without samples works for processes that the driver does not show here.
            if sane or (busy_percent or 0) < _AT_WORK:
                by_pid = _means(sane)
            until_us = max([until_us, *(one.stamp_us - offset_us for one in sane)])
        return DeviceUtilisation(
            since_us=since_us,
            until_us=min(until_us, now_us),
            settle_us=_SETTLE_US,
            by_pid=by_pid,
            device_milli=None if busy_percent is None else busy_percent * 10,
        )

    def _was_set(self, device_id: str, known: dict[str, int]) -> bool:
        """Return whether the wall clock has been set since the device was last read. `known` maps devices to `_steps` at that time."""
        if self._clock.stepped_us():
            self._steps += 1
        return known.setdefault(device_id, self._steps) != self._steps

    def _samples(self, since_us: int, handle: object) -> list[_Sample] | None:
        """Return the listed processes' samples since `since_us` (wall-clock time), or None if the device does not support samples.

        Inside a pid namespace, samples contain the host's pids, so samples for pids that are not listed are dropped.
        """
        try:
            samples = self._read_samples(since_us, handle)
        except self._nvml.NVMLError as error:
            if error.value in {*_UNAVAILABLE, _NO_PERMISSION}:
                return None
            raise
        listed = (
            {_process_of(one.pid) for _, processes in self._processes(handle) for one in processes} if samples else ()
        )
        found = (
            _Sample(
                _process_of(one.pid),
                int(one.timeStamp),
                (int(one.smUtil), int(one.memUtil), int(one.encUtil), int(one.decUtil)),
            )
            for one in samples
        )
        return [sample for sample in found if sample.pid in listed]

    def _read_samples(self, since_us: int, handle: object) -> list[Any]:
        # pynvml first asks for the number of samples and then for the samples. It fails if more samples arrive in between, so retry.
        for _ in range(_READS - 1):
            try:
                return list(self._nvml.nvmlDeviceGetProcessUtilization(handle, since_us))
            except self._nvml.NVMLError as error:
                if error.value in _NO_SAMPLES:
                    return []
                if error.value != _INSUFFICIENT_SIZE:
                    raise
        return list(self._nvml.nvmlDeviceGetProcessUtilization(handle, since_us))

    def sensors(self, device_id: str) -> DeviceSensors:
        # Since Ampere, power is the mean of the last second (the current value on GA100). Since Volta, energy counts from the driver start.
        self._must_start(device_id)
        with translated(self._nvml, f"reading the sensors of device {device_id}"):
            return self._read(device_id, partial(self._sensors, device_id))

    def _sensors(self, device_id: str, handle: object) -> DeviceSensors:
        whole = not device_id.startswith(_MIG)
        return DeviceSensors(
            busy_percent=self._busy_percent(handle),
            temperature_c=self._optional("nvmlDeviceGetTemperature", handle, _CHIP),
            power_mw=self._optional("nvmlDeviceGetPowerUsage", handle) if whole else None,
            energy_mj=self._optional("nvmlDeviceGetTotalEnergyConsumption", handle) if whole else None,
        )

    def _busy_percent(self, handle: object) -> int | None:
        """Return how busy the device was in the last second or less, in percent. Return None if the value is missing or implausible."""
        rates = self._optional("nvmlDeviceGetUtilizationRates", handle)
        return int(rates.gpu) if rates is not None and 0 <= int(rates.gpu) <= _FULL else None

    def _read(self, device_id: str, read: Callable[[object], T]) -> T:
        """Call `read` with the device's cached handle. If that fails, retry with a new handle, in case the cached one is stale."""
        handles = self._handles
        kept = handles.get(device_id)
        if kept is not None:
            try:
                return read(kept)
            except self._nvml.NVMLError:
                handles.pop(device_id, None)
        handle = self._nvml.nvmlDeviceGetHandleByUUID(device_id)
        found = read(handle)
        handles[device_id] = handle
        return found

    def _optional(self, call: str, *arguments: object, **more: object) -> Any:  # noqa: ANN401 - any result of this call
        try:
            return getattr(self._nvml, call)(*arguments, **more)
        except self._nvml.NVMLError as error:
            if error.value in {*_UNAVAILABLE, _NO_PERMISSION, _INVALID_ARGUMENT}:
                return None
            raise

    def kernel_environment(self, device_id: str | None) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": device_id or ""}

    def close(self) -> None:
        """Shut down NVML. Idempotent; calling another method afterwards starts NVML again."""
        with self._starting:
            if self._started:
                self._started = False
                self._handles = {}
                self._nvml.nvmlShutdown()

    def _must_start(self, device_id: str) -> None:
        if not self._start():
            raise GPUError(GPUErrorCode.NO_SUCH_DEVICE, f"there is no device {device_id}: {self.why_none}")

    def _start(self) -> bool:
        with self._starting:
            if not self._started:
                try:
                    self._nvml.nvmlInit()
                except self._nvml.NVMLError as error:
                    self.why_none = _WHY_NONE.get(error.value, f"NVIDIA's driver could not be initialised: {error}")
                    return False
                self._started = True
            return True

    def _describe(self, index: int, refusal: str) -> list[DeviceInfo]:
        with translated(self._nvml, f"reading the device with index {index}"):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if self._has_mig_instances(handle):
                    return [self._info(instance, index, _ON_MIG) for instance in self._instances(handle)]
                if why := sharing_refusal(index, self._optional("nvmlDeviceGetComputeMode", handle)):
                    self.warnings += (f"{why}; {sharing_advice(index)}",)
                return [self._info(handle, index, refusal)]
            except self._nvml.NVMLError as error:
                if error.value in _LEFT_OUT:
                    return []
                raise

    def _info(self, handle: object, index: int, why_not: str) -> DeviceInfo:
        total, _ = self._memory(handle)
        return DeviceInfo(
            device_id=self._nvml.nvmlDeviceGetUUID(handle),
            index=index,
            name=self._nvml.nvmlDeviceGetName(handle),
            memory_mib=total // _MIB,
            simulated=False,
            checkpointable=not why_not,
            why_not=why_not,
            saves_children=self._saves_children,
            why_no_move=self._why_no_move,
        )

    def _has_mig_instances(self, handle: object) -> bool:
        # The current mode and the mode after the next reset. Most devices have no MIG mode.
        modes = self._optional("nvmlDeviceGetMigMode", handle)
        return modes is not None and bool(modes[0])

    def _instances(self, handle: object) -> Iterator[object]:
        for number in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                yield self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except self._nvml.NVMLError as error:
                if error.value not in (_NOT_FOUND, _INVALID_ARGUMENT):
                    raise

    def _memory(self, handle: object) -> tuple[int, int]:
        memory = self._optional("nvmlDeviceGetMemoryInfo", handle, version=self._nvml.nvmlMemory_v2)
        if memory is not None:
            return int(memory.total - memory.reserved), int(memory.used)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)

    def _processes(self, handle: object) -> Iterator[tuple[ProcessKind, list[Any]]]:
        """Yield the processes grouped by kind, MPS clients first, because NVML also lists those as compute processes."""
        yield ProcessKind.MPS, self._optional("nvmlDeviceGetMPSComputeRunningProcesses", handle) or []
        yield ProcessKind.COMPUTE, list(self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        yield ProcessKind.GRAPHICS, self._optional("nvmlDeviceGetGraphicsRunningProcesses", handle) or []


@contextmanager
def translated(nvml: ModuleType, doing: str) -> Iterator[None]:
    """Convert NVML's errors to GPUError."""
    try:
        yield
    except nvml.NVMLError as error:
        code = _CODES.get(error.value, GPUErrorCode.UNKNOWN)
        raise GPUError(code, f"{doing} failed: {error} (NVML error {error.value})") from error


def _process_of(number: int) -> int:
    """Return the pid of the process with this pid or thread id. Drivers before 575.57 report the thread that created the context."""
    try:
        return thread_group(number)
    except (ProcessLookupError, PermissionError, ValueError):
        return number


def _means(samples: Iterable[_Sample]) -> dict[int, int]:
    by_pid: dict[int, list[int]] = {}
    for sample in samples:
        by_pid.setdefault(sample.pid, []).append(sample.rates[0] * 10)
    return {pid: sum(milli) // len(milli) for pid, milli in by_pid.items()}


def _shares(by_pid: Mapping[int, int | None], kinds: Mapping[int, ProcessKind], used: int) -> tuple[ProcessUse, ...]:
    # In some virtual machines and containers NVML does not report the memory of a process. Divide the rest among such processes; this is
    # exact if there is only one.
    unknown = sum(one is None for one in by_pid.values())
    rest = max(0, used - sum(one for one in by_pid.values() if one is not None))
    guess = rest // unknown if unknown else 0
    return tuple(
        ProcessUse(pid=pid, used_mib=-(-(guess if one is None else one) // _MIB), kind=kinds[pid])
        for pid, one in sorted(by_pid.items())
    )
