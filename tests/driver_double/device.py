"""Device memory by libcuda's own calls, with the interface of the simulated device's `cuda` module. Standard library only.

The first use initialises the driver and retains the primary context of the first visible device. A call that waits is within the driver:
unlike the simulated device's, it takes an interrupt only when it has ended.
"""

import ctypes
import hashlib
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Buffer", "CudaError", "allocate", "device", "driver", "launch", "memory_info", "reset", "start"]

_MIB: Final = 1 << 20
_CHUNK: Final = 4 * _MIB

_driver: Any = None
_has_context = False


class CudaError(RuntimeError):
    """A call gave `number`."""

    def __init__(self, call: str, number: int) -> None:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(number, ctypes.byref(name))
        super().__init__(f"{call} gave {(name.value or b'?').decode()} ({number})")
        self.number = number


@dataclass(frozen=True)
class Device:
    """The device that the process is on."""

    device_id: str


def driver() -> Any:  # noqa: ANN401 (ctypes)
    """Return the driver's library."""
    global _driver  # noqa: PLW0603 (a process has one)
    if _driver is None:
        _driver = ctypes.CDLL("libcuda.so.1")
    return _driver


def do(call: str, *arguments: object) -> None:
    """Make a call. Raises CudaError."""
    number = getattr(driver(), call)(*arguments)
    if number:
        raise CudaError(call, number)


def start() -> None:
    """Initialise the driver only: no context, no memory."""
    do("cuInit", 0)


def _current() -> None:
    global _has_context  # noqa: PLW0603 (a process has one)
    if not _has_context:
        start()
        context = ctypes.c_void_p()
        do("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        _has_context = True
    here = ctypes.c_void_p()
    do("cuCtxGetCurrent", ctypes.byref(here))  # per thread
    if not here:
        context = ctypes.c_void_p()
        do("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        do("cuDevicePrimaryCtxRelease_v2", 0)
        do("cuCtxSetCurrent", context)


class Buffer:
    """Device memory; only `free` releases it: a finalizer would wait forever in a process that ends while it is suspended."""

    def __init__(self, pointer: int, n_bytes: int) -> None:
        self.pointer, self.n_bytes = ctypes.c_uint64(pointer), n_bytes

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copy to the device. Raises CudaError."""
        do("cuMemcpyHtoD_v2", ctypes.c_uint64(self.pointer.value + offset), bytes(data), ctypes.c_size_t(len(data)))

    def read(self, n_bytes: int | None = None, offset: int = 0) -> bytes:
        """Copy from the device. Raises CudaError."""
        length = self.n_bytes - offset if n_bytes is None else n_bytes
        host = ctypes.create_string_buffer(length)
        do("cuMemcpyDtoH_v2", host, ctypes.c_uint64(self.pointer.value + offset), ctypes.c_size_t(length))
        return host.raw

    def fill(self, pattern: bytes) -> None:
        """Fill with repetitions of the pattern. Raises CudaError."""
        block = pattern * max(1, min(_CHUNK, self.n_bytes) // len(pattern))
        for offset in range(0, self.n_bytes, len(block)):
            self.write(block[: self.n_bytes - offset], offset)

    def sha256(self) -> str:
        """Return the hexadecimal SHA-256 of the contents."""
        digest = hashlib.sha256()
        for offset in range(0, self.n_bytes, _CHUNK):
            digest.update(self.read(min(_CHUNK, self.n_bytes - offset), offset))
        return digest.hexdigest()

    def free(self) -> None:
        """Give the memory back. Raises CudaError."""
        do("cuMemFree_v2", self.pointer)


def allocate(n_bytes: int) -> Buffer:
    """Allocate device memory. Raises CudaError."""
    _current()
    pointer = ctypes.c_uint64()
    do("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(n_bytes))
    return Buffer(pointer.value, n_bytes)


def memory_info() -> tuple[int, int]:
    """Return (free, total) bytes of the device. Raises CudaError."""
    _current()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def launch(seconds: float) -> None:
    """Keep the device at work for this long and wait for it. Raises CudaError."""
    _current()
    do("driverDoubleBusy", max(1, round(seconds * 1000)))
    do("cuCtxSynchronize")


def device() -> Device:
    """Return the device that the process is on now. Raises CudaError."""
    _current()
    raw = ctypes.create_string_buffer(16)
    do("cuDeviceGetUuid_v2", raw, 0)
    text = raw.raw.hex()
    return Device("GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))


def reset() -> None:
    """Destroy the context and all it holds."""
    global _has_context  # noqa: PLW0603 (a process has one)
    if _has_context:
        _has_context = False
        do("cuCtxSetCurrent", None)
        do("cuDevicePrimaryCtxReset_v2", 0)
