"""The process on which checkpoints are tried."""

import ctypes
from enum import IntEnum

import pytest

from fractional_gpu.gpu.probe_process import MEMORY_MIB, hold_nvidia


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """A double of the driver's memory calls, with the signatures and results of `cuda.bindings.driver`."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.calls: list[str] = []
        self.memory = (ctypes.c_char * 0)()

    def cuInit(self, flags: int) -> tuple[Result]:  # noqa: N802
        assert flags == 0
        self.calls.append("init")
        return (Result.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, str]:  # noqa: N802
        return Result.CUDA_SUCCESS, f"device {ordinal}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Result, str]:  # noqa: N802
        return Result.CUDA_SUCCESS, f"context of {device}"

    def cuCtxSetCurrent(self, context: str) -> tuple[Result]:  # noqa: N802
        self.calls.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuMemAlloc(self, n_bytes: int) -> tuple[Result, int | None]:  # noqa: N802
        if n_bytes > self.room:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        self.memory = (ctypes.c_char * n_bytes)()
        return Result.CUDA_SUCCESS, ctypes.addressof(self.memory)

    def cuMemsetD32(self, pointer: int, value: int, count: int) -> tuple[Result]:  # noqa: N802
        assert pointer == ctypes.addressof(self.memory)
        self.memory.raw = value.to_bytes(4, "little") * count
        return (Result.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Result]:  # noqa: N802
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, host: int, pointer: int, n_bytes: int) -> tuple[Result]:  # noqa: N802
        ctypes.memmove(host, pointer, n_bytes)
        return (Result.CUDA_SUCCESS,)


def test_the_process_reads_back_what_it_wrote_through_the_driver() -> None:
    driver = Driver()
    read = hold_nvidia(driver).read
    assert driver.calls == ["init", "context of device 0"]
    assert read() == b"\xa5\x5a\x3c\xc3" * (MEMORY_MIB << 18)
    driver.memory.raw = bytes(MEMORY_MIB << 20)
    assert set(read()) == {0}


def test_the_process_says_which_call_failed() -> None:
    with pytest.raises(RuntimeError, match=r"cuMemAlloc gave CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        hold_nvidia(Driver(room=1))
