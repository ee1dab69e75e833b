"""A double of `pynvml` that behaves as the library does, including failures. It does not know the code under test."""

import uuid
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

GIB = 1024**3
MIB = 1024**2

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND = 2, 3, 4, 6, 13
GPU_IS_LOST, UNKNOWN = 15, 999


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML says {value}")
        self.value = value


@dataclass
class FakeGPU:
    """`processes` and `drawing` map pids to bytes, None if the library does not tell."""

    uuid: str = field(default_factory=lambda: f"GPU-{uuid.uuid4()}")
    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 80 * GIB
    reserved: int = 500 * MIB
    used: int = 0
    address: str = "00000000:65:00.0"  # on the PCI bus
    mig: int | None = None  # None: a device without that mode
    compute_mode: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)
    drawing: dict[int, int | None] = field(default_factory=dict)
    mps: dict[int, int | None] = field(default_factory=dict)
    busy: int = 0
    temperature: int = 30
    power: int = 70_000
    energy: int = 1_000
    samples: list[tuple[int, int, int]] = field(default_factory=list)  # pid, time stamp, utilisation of the SMs
    unlisted: frozenset[int] = frozenset({0})  # pids of samples that no list of processes has
    instances: "dict[int, FakeGPU]" = field(default_factory=dict)  # by number, in MIG mode
    fails: dict[str, int] = field(default_factory=dict)  # call -> error number


class FakeNVML(ModuleType):
    """The library; `fails` maps calls to error numbers, for the library here and for one device there. Handles are devices."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028  # noqa: N815 - the library's spelling

    def __init__(self, *gpus: FakeGPU, version: str = "580.65.06") -> None:
        super().__init__("fake_nvml")
        self.gpus = list(gpus)
        self.version = version
        self.fails: dict[str, int] = {}
        self.started = 0

    def _enter(self, call: str, gpu: FakeGPU | None = None) -> None:
        number = self.fails.get(call) or (gpu.fails.get(call) or gpu.fails.get("*") if gpu else None)
        if number:
            raise NVMLError(number)
        if call != "nvmlInit" and not self.started:
            raise NVMLError(1)

    def nvmlInit(self) -> None:  # noqa: N802
        self._enter("nvmlInit")
        self.started += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._enter("nvmlShutdown")
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._enter("nvmlSystemGetDriverVersion")
        return self.version

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGPU:  # noqa: N802
        self._enter("nvmlDeviceGetHandleByIndex", self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, device_id: str) -> FakeGPU:  # noqa: N802
        instances = [instance for one in self.gpus for instance in one.instances.values()]
        for gpu in [*self.gpus, *instances]:
            if gpu.uuid == device_id:
                self._enter("nvmlDeviceGetHandleByUUID", gpu)
                return gpu
        raise NVMLError(NOT_FOUND if device_id.startswith("GPU-") else INVALID_ARGUMENT)

    def nvmlDeviceGetUUID(self, gpu: FakeGPU) -> str:  # noqa: N802
        self._enter("nvmlDeviceGetUUID", gpu)
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGPU) -> str:  # noqa: N802
        self._enter("nvmlDeviceGetName", gpu)
        return gpu.name

    def nvmlDeviceGetPciInfo(self, gpu: FakeGPU) -> SimpleNamespace:  # noqa: N802
        self._enter("nvmlDeviceGetPciInfo", gpu)
        return SimpleNamespace(busId=gpu.address)

    def nvmlDeviceGetMigMode(self, gpu: FakeGPU) -> list[int]:  # noqa: N802
        self._enter("nvmlDeviceGetMigMode", gpu)
        if gpu.mig is None:
            raise NVMLError(NOT_SUPPORTED)
        return [gpu.mig, gpu.mig]

    def nvmlDeviceGetComputeMode(self, gpu: FakeGPU) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetComputeMode", gpu)
        return gpu.compute_mode

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGPU) -> SimpleNamespace:  # noqa: N802
        self._enter("nvmlDeviceGetUtilizationRates", gpu)
        return SimpleNamespace(gpu=gpu.busy, memory=0)

    def nvmlDeviceGetTemperature(self, gpu: FakeGPU, sensor: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetTemperature", gpu)
        assert sensor == 0
        return gpu.temperature

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGPU) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetPowerUsage", gpu)
        return gpu.power

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGPU) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetTotalEnergyConsumption", gpu)
        return gpu.energy

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGPU) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetMaxMigDeviceCount", gpu)
        return 7 if gpu.mig is not None else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGPU, number: int) -> FakeGPU:  # noqa: N802
        self._enter("nvmlDeviceGetMigDeviceHandleByIndex", gpu)
        if number not in gpu.instances:
            raise NVMLError(NOT_FOUND)
        return gpu.instances[number]

    def nvmlDeviceGetProcessUtilization(self, gpu: FakeGPU, since: int) -> list[SimpleNamespace]:  # noqa: N802
        self._enter("nvmlDeviceGetProcessUtilization", gpu)
        newer: dict[int, list[tuple[int, int]]] = {}
        for pid, stamp, busy in gpu.samples:
            if stamp > since:
                newer.setdefault(pid, []).append((stamp, busy))
        if not newer:
            raise NVMLError(NOT_FOUND)
        return [  # as an H200 with driver 580 does: one for each process, the mean since then
            SimpleNamespace(
                pid=pid,
                timeStamp=max(stamp for stamp, _ in rows),
                smUtil=sum(busy for _, busy in rows) // len(rows),
                memUtil=0,
                encUtil=0,
                decUtil=0,
            )
            for pid, rows in newer.items()
        ]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, gpu: FakeGPU) -> list[SimpleNamespace]:  # noqa: N802
        self._enter("nvmlDeviceGetMPSComputeRunningProcesses", gpu)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.mps.items()]

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGPU, version: int | None = None) -> SimpleNamespace:  # noqa: N802
        if version is None:  # the old form counts the reserved part as used
            self._enter("nvmlDeviceGetMemoryInfo", gpu)
            return SimpleNamespace(total=gpu.total, used=gpu.used + gpu.reserved)
        self._enter("nvmlDeviceGetMemoryInfo_v2", gpu)
        return SimpleNamespace(total=gpu.total, reserved=gpu.reserved, used=gpu.used)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGPU) -> list[SimpleNamespace]:  # noqa: N802
        self._enter("nvmlDeviceGetComputeRunningProcesses", gpu)
        sampled = {pid: 0 for pid, _, _ in gpu.samples if pid not in gpu.unlisted}
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in {**sampled, **gpu.processes}.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGPU) -> list[SimpleNamespace]:  # noqa: N802
        self._enter("nvmlDeviceGetGraphicsRunningProcesses", gpu)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.drawing.items()]
