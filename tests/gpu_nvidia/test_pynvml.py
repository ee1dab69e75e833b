"""The monitor through the real pynvml, and the double of pynvml held against it: names, arguments, structures, numbers."""

import inspect
from collections.abc import Iterator

import pynvml
import pytest

from provisioner.gpu import nvidia_monitor
from provisioner.gpu.interface import GPUError, GPUErrorCode, ProcessUse
from provisioner.gpu.nvidia import NvidiaMonitor
from tests.gpu_nvidia import fake_nvml
from tests.gpu_nvidia.fake_nvml import FakeGPU, FakeNVML
from tests.gpu_nvidia.nvml_library import MIB, PID, UUID, Library

CALLS = sorted(name for name in vars(FakeNVML) if name.startswith("nvml") and callable(getattr(FakeNVML, name)))
STRUCTURES = {
    "nvmlDeviceGetMemoryInfo": (pynvml.c_nvmlMemory_v2_t, {"total", "reserved", "used"}),
    "nvmlDeviceGetUtilizationRates": (pynvml.c_nvmlUtilization_t, {"gpu", "memory"}),
    "nvmlDeviceGetProcessUtilization": (
        pynvml.c_nvmlProcessUtilizationSample_t,
        {"pid", "timeStamp", "smUtil", "memUtil", "encUtil", "decUtil"},
    ),
    "nvmlDeviceGetComputeRunningProcesses": (pynvml.c_nvmlProcessInfo_v3_t, {"pid", "usedGpuMemory"}),
}
NUMBERS = {
    "_SUCCESS": "NVML_SUCCESS",
    "_INVALID_ARGUMENT": "NVML_ERROR_INVALID_ARGUMENT",
    "_NOT_SUPPORTED": "NVML_ERROR_NOT_SUPPORTED",
    "_NO_PERMISSION": "NVML_ERROR_NO_PERMISSION",
    "_NOT_FOUND": "NVML_ERROR_NOT_FOUND",
    "_INSUFFICIENT_SIZE": "NVML_ERROR_INSUFFICIENT_SIZE",
    "_DRIVER_NOT_LOADED": "NVML_ERROR_DRIVER_NOT_LOADED",
    "_LIBRARY_NOT_FOUND": "NVML_ERROR_LIBRARY_NOT_FOUND",
    "_FUNCTION_NOT_FOUND": "NVML_ERROR_FUNCTION_NOT_FOUND",
    "_GPU_IS_LOST": "NVML_ERROR_GPU_IS_LOST",
    "_RESET_REQUIRED": "NVML_ERROR_RESET_REQUIRED",
    "_OPERATING_SYSTEM": "NVML_ERROR_OPERATING_SYSTEM",
    "_VERSION_MISMATCH": "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    "_ARGUMENT_VERSION_MISMATCH": "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "_GPU_NOT_FOUND": "NVML_ERROR_GPU_NOT_FOUND",
    "_CHIP": "NVML_TEMPERATURE_GPU",
}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library


@pytest.fixture
def monitor(library: Library) -> Iterator[NvidiaMonitor]:  # noqa: ARG001 - it stands beneath
    monitor = NvidiaMonitor(bindings=lambda: "")
    yield monitor
    monitor.close()


# ---- the double ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_each_call_of_the_double_is_one_of_pynvml_with_as_many_arguments(call: str) -> None:
    real = inspect.signature(getattr(pynvml, call)).parameters.values()
    double = list(inspect.signature(getattr(FakeNVML, call)).parameters.values())[1:]
    assert [one.default is one.empty for one in double] == [one.default is one.empty for one in real]


@pytest.mark.parametrize("call", STRUCTURES)
def test_what_the_double_gives_has_the_fields_of_the_real_structure(call: str) -> None:
    structure, fields = STRUCTURES[call]
    assert fields <= {name for name, *_ in structure._fields_}
    gpu = FakeGPU(processes={1: MIB}, samples=[(1, 10, 1)])
    double = FakeNVML(gpu)
    double.nvmlInit()
    more = {"nvmlDeviceGetMemoryInfo": (pynvml.nvmlMemory_v2,), "nvmlDeviceGetProcessUtilization": (0,)}.get(call, ())
    given = getattr(double, call)(gpu, *more)
    assert set(vars(given[0] if isinstance(given, list) else given)) <= {name for name, *_ in structure._fields_}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_numbers_are_those_of_the_library(name: str) -> None:
    assert getattr(nvidia_monitor, name) == getattr(pynvml, NUMBERS[name])
    assert getattr(fake_nvml, name.removeprefix("_"), getattr(nvidia_monitor, name)) == getattr(pynvml, NUMBERS[name])


def test_errors_tell_their_number_in_the_same_place() -> None:
    assert pynvml.NVMLError(15).value == fake_nvml.NVMLError(15).value == 15
    assert FakeNVML.nvmlMemory_v2 == pynvml.nvmlMemory_v2


# ---- through pynvml --------------------------------------------------------------------------------------------------------


def test_a_device_is_described(monitor: NvidiaMonitor) -> None:
    (device,) = monitor.devices()
    assert (device.device_id, device.name, device.memory_mib) == (UUID, "NVIDIA H200", 143_271)
    assert monitor.use(UUID).used_mib == 1_000
    assert monitor.use(UUID).processes == (ProcessUse(pid=PID, used_mib=900),)


def test_an_older_driver_tells_memory_in_the_old_form(library: Library, monitor: NvidiaMonitor) -> None:
    library.lacks.add("nvmlDeviceGetMemoryInfo_v2")
    assert [device.memory_mib for device in monitor.devices()] == [143_771]
    assert monitor.use(UUID).used_mib == 1_500


def test_memory_that_is_not_told_is_what_nobody_else_has(library: Library, monitor: NvidiaMonitor) -> None:
    library.tells_memory = False
    assert monitor.use(UUID).processes == (ProcessUse(pid=PID, used_mib=1_000),)


def test_sensors_are_read_and_one_that_is_not_there_is_none(monitor: NvidiaMonitor) -> None:
    told = monitor.sensors(UUID)
    assert (told.busy_percent, told.temperature_c, told.power_mw, told.energy_mj) == (43, 51, 230_000, None)


def test_a_device_that_is_not_there_is_told(monitor: NvidiaMonitor) -> None:
    with pytest.raises(GPUError, match="NVML error 6") as caught:
        monitor.use("GPU-00000000-0000-0000-0000-000000000000")
    assert caught.value.code is GPUErrorCode.NO_SUCH_DEVICE


@pytest.mark.parametrize(
    ("codes", "seen"),
    [
        ([], {PID}),
        ([6], set()),  # no sample
        ([0], set()),  # none to count: pynvml makes an error of that success
        ([7, 7], {PID}),  # how many there are; and then there were more
    ],
)
def test_who_works_is_read_whatever_order_samples_come_in(
    library: Library, monitor: NvidiaMonitor, codes: list[int], seen: set[int]
) -> None:
    library.gives["nvmlDeviceGetProcessUtilization"] = codes
    activity = monitor.activity(UUID, library.stamp_us - 2_000_000)
    assert activity is not None
    assert set(activity.worked_us) == seen
    assert library.gives["nvmlDeviceGetProcessUtilization"] == []


def test_samples_that_are_never_as_many_as_said_are_an_error(library: Library, monitor: NvidiaMonitor) -> None:
    library.gives["nvmlDeviceGetProcessUtilization"] = [7] * 6
    with pytest.raises(GPUError, match="NVML error 7"):
        monitor.activity(UUID, library.stamp_us - 2_000_000)
