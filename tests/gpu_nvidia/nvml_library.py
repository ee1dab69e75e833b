"""A stand-in for libnvidia-ml.so.1 beneath the real pynvml: one device with one process. It fills the structures that pynvml hands it.

With it the monitor goes through pynvml's own functions, conversions and exceptions, where the double of pynvml has only their likeness.
"""

import time
from collections.abc import Callable
from ctypes import Array, c_char
from typing import Any

__all__ = ["PID", "UUID", "Library"]

UUID = "GPU-6a1d2f0e-7a34-4c09-9a57-1f5f2a4b8c11"
PID = 4711
MIB = 1024**2
_INSUFFICIENT_SIZE = 7


class Library:
    """What pynvml takes for the loaded library. `gives[function]` are return codes of its next calls, before it is asked itself."""

    def __init__(self) -> None:
        self.gives: dict[str, list[int]] = {}
        self.lacks: set[str] = set()  # functions of newer drivers
        self.tells_memory = True
        self.stamp_us = time.time_ns() // 1000

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml") or name in self.lacks:
            raise AttributeError(name)
        try:
            answer: Callable[..., int] = object.__getattribute__(self, f"_{name}")
        except AttributeError:
            raise AssertionError(f"nobody has thought of {name}") from None

        def call(*arguments: Any) -> int:  # noqa: ANN401 - what ctypes is given
            queued = self.gives.get(name)
            return queued.pop(0) if queued else answer(*arguments)

        return call

    def _nvmlInitWithFlags(self, _flags: int) -> int:  # noqa: N802
        return 0

    def _nvmlShutdown(self) -> int:  # noqa: N802
        return 0

    def _nvmlSystemGetDriverVersion(self, buffer: Array[c_char], _size: object) -> int:  # noqa: N802
        buffer.value = b"580.65.06"
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: ANN401, N802
        count._obj.value = 1
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, _device: object) -> int:  # noqa: ANN401, N802
        return 0 if index.value == 0 else 2

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, _device: object) -> int:  # noqa: ANN401, N802
        return 0 if uuid.value == UUID.encode() else 6

    def _nvmlDeviceGetUUID(self, _device: object, buffer: Array[c_char], _size: object) -> int:  # noqa: N802
        buffer.value = UUID.encode()
        return 0

    def _nvmlDeviceGetName(self, _device: object, buffer: Array[c_char], _size: object) -> int:  # noqa: N802
        buffer.value = b"NVIDIA H200"
        return 0

    def _nvmlDeviceGetMigMode(self, *_given: object) -> int:  # noqa: N802
        return 3

    def _nvmlDeviceGetMemoryInfo(self, _device: object, memory: Any) -> int:  # noqa: ANN401, N802
        memory._obj.total, memory._obj.used = 143_771 * MIB, 1_500 * MIB
        return 0

    def _nvmlDeviceGetMemoryInfo_v2(self, _device: object, memory: Any) -> int:  # noqa: ANN401, N802
        told = memory._obj
        assert told.version == 2 << 24 | 40, "the version is the structure's size and 2"
        told.total, told.reserved, told.used = 143_771 * MIB, 500 * MIB, 1_000 * MIB
        return 0

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, _device: object, count: Any, processes: Any) -> int:  # noqa: ANN401, N802
        if processes is None:
            count._obj.value = 1
            return _INSUFFICIENT_SIZE
        count._obj.value = 1
        processes[0].pid, processes[0].usedGpuMemory = PID, 900 * MIB if self.tells_memory else 2**64 - 1
        return 0

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, *_given: object) -> int:  # noqa: N802
        return 0  # nobody draws

    def _nvmlDeviceGetMPSComputeRunningProcesses_v3(self, *_given: object) -> int:  # noqa: N802
        return 0

    def _nvmlDeviceGetProcessUtilization(self, _device: object, samples: Any, count: Any, since: Any) -> int:  # noqa: ANN401, N802
        if since.value >= self.stamp_us:
            return 6
        count._obj.value = 1
        if samples is None:
            return _INSUFFICIENT_SIZE
        samples[0].pid, samples[0].timeStamp, samples[0].smUtil = PID, self.stamp_us, 55
        return 0

    def _nvmlDeviceGetUtilizationRates(self, _device: object, rates: Any) -> int:  # noqa: ANN401, N802
        rates._obj.gpu = 43
        return 0

    def _nvmlDeviceGetTemperature(self, _device: object, sensor: Any, celsius: Any) -> int:  # noqa: ANN401, N802
        assert sensor.value == 0
        celsius._obj.value = 51
        return 0

    def _nvmlDeviceGetPowerUsage(self, _device: object, milliwatts: Any) -> int:  # noqa: ANN401, N802
        milliwatts._obj.value = 230_000
        return 0

    def _nvmlDeviceGetTotalEnergyConsumption(self, _device: object, _millijoules: object) -> int:  # noqa: N802
        return 3
