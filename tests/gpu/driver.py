"""The CUDA driver through the bare bindings, for processes that need no framework: cuda-bindings and the standard library only."""

import ctypes
import importlib
import random
from typing import Any, Final

__all__ = ["BLOCK", "DOUBLE", "Driver", "DriverError", "Noise"]

DOUBLE: Final = "DRIVER_DOUBLE"  # set where the driver is a double: its times say nothing about GPUs
BLOCK: Final = 16 << 20  # bytes that are filled and compared at a time
_PART: Final = (1 << 20) + 61  # bytes of noise that are repeated; no multiple of a page, so all pages of a block differ
_STAMP: Final = 4096  # bytes at the start of each block that hold the block's number
_SEED: Final = 17


class DriverError(RuntimeError):
    """A call failed. `result` is CUDA's number; -1 where the bindings could not make the call or did not know its answer."""

    def __init__(self, call: str, result: int, name: str) -> None:
        super().__init__(f"{call} gave {name} ({result})")
        self.call, self.result, self.name = call, result, name


class Driver:
    """The driver of this process. `start` makes the first visible device's primary context current."""

    def __init__(self) -> None:
        self.cuda: Any = importlib.import_module("cuda.bindings.driver")

    def answer(self, call: str, *given: object) -> tuple[int, str, list[Any]]:
        """Return the result's number and name, and the call's other results. Raises no error of the driver or the bindings."""
        try:
            result, *values = getattr(self.cuda, call)(*given)
        except AttributeError:
            return -1, "these bindings have no such call", []
        except (
            RuntimeError,
            ValueError,
            KeyError,
        ) as error:  # not in this driver, or an answer that the bindings do not know
            return -1, " ".join(f"{type(error).__name__}: {error}".split()), []
        return int(result), str(getattr(result, "name", result)), values

    def do(self, call: str, *given: object) -> Any:  # noqa: ANN401 - whatever this call of the driver gives
        """Return what the call gives. Raises DriverError."""
        result, name, values = self.answer(call, *given)
        if result != 0:
            raise DriverError(call, result, name)
        return values[0] if values else None

    def start(self) -> None:
        """Initialise CUDA and make a context. Raises DriverError."""
        self.do("cuInit", 0)
        self.do("cuCtxSetCurrent", self.do("cuDevicePrimaryCtxRetain", self.do("cuDeviceGet", 0)))

    def free_bytes(self) -> int:
        """Return what the device has left. Raises DriverError."""
        result, name, values = self.answer("cuMemGetInfo")
        if result != 0:
            raise DriverError("cuMemGetInfo", result, name)
        return int(values[0])


class Noise:
    """Pseudo-random bytes on the device: every byte is compared, and each block of 16 MiB holds its own number, so order counts."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        part = random.Random(_SEED).randbytes(_PART)
        self._block = ctypes.create_string_buffer(BLOCK)
        for start in range(0, BLOCK, _PART):
            ctypes.memmove(ctypes.addressof(self._block) + start, part, min(_PART, BLOCK - start))
        self._libc = ctypes.CDLL(None)
        self._libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def fill(self, pointer: int, size: int, first: int = 0) -> None:
        """Write blocks number `first` and following. Sizes in bytes, multiples of 1 MiB. Raises DriverError."""
        for number, start in enumerate(range(0, size, BLOCK), first):
            there, length = pointer + start, min(BLOCK, size - start)
            self._driver.do("cuMemcpyHtoD", there, ctypes.addressof(self._block), length)
            self._driver.do("cuMemsetD32", there, number + 1, _STAMP // 4)
        self._driver.do("cuCtxSynchronize")

    def is_intact(self, pointer: int, size: int, first: int = 0) -> bool:
        """Whether every byte is what `fill` wrote. Raises DriverError."""
        buffer = ctypes.create_string_buffer(BLOCK)  # of this call: several threads may compare at once
        block, back = ctypes.addressof(self._block), ctypes.addressof(buffer)
        for number, start in enumerate(range(0, size, BLOCK), first):
            length = min(BLOCK, size - start)
            self._driver.do("cuMemcpyDtoH", back, pointer + start, length)
            if ctypes.string_at(back, _STAMP) != (number + 1).to_bytes(4, "little") * (_STAMP // 4):
                return False
            if self._libc.memcmp(back + _STAMP, block + _STAMP, length - _STAMP) != 0:
                return False
        return True
