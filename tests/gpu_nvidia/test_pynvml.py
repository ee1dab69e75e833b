"""The double of pynvml held against the real one: names, arguments, structures, numbers."""

import inspect

import pynvml
import pytest

from tests.gpu_nvidia import fake_nvml
from tests.gpu_nvidia.fake_nvml import MIB, FakeGPU, FakeNVML

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


def test_errors_tell_their_number_in_the_same_place() -> None:
    assert pynvml.NVMLError(15).value == fake_nvml.NVMLError(15).value == 15
    assert FakeNVML.nvmlMemory_v2 == pynvml.nvmlMemory_v2
