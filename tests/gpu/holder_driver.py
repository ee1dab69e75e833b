"""What tests/gpu/holder.py does without a framework: device memory of every kind that the driver has, through the bare bindings."""

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from tests.gpu.driver import DOUBLE, Driver, Noise

__all__ = ["DriverHolding", "location"]

_GIB: Final = 1 << 30
_MIB: Final = 1 << 20
_COPIES: Final = 5
_ATTACH_GLOBAL: Final = 1  # of managed memory: any stream on any device
_HANDLE: Final = 64  # bytes of a CUipcMemHandle
_LAZY_PEER_ACCESS: Final = 1  # the one flag that opening an IPC handle takes
_CONTEXT_S: Final = 30.0
_SPIN: Final = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .pred %again;
    .reg .u64 %begun, %now, %most;
    ld.param.u64 %most, [nanoseconds];
    mov.u64 %begun, %globaltimer;
LOOP:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begun;
    setp.lt.u64 %again, %now, %most;
    @%again bra LOOP;
    ret;
}
"""


class DriverHolding:
    """A process with plain device memory. `context` False: it calls `cuInit` and makes no context."""

    def __init__(self, *, context: bool) -> None:
        self._driver = Driver()
        begun = time.perf_counter()
        if context:
            self._driver.start()
        else:
            self._driver.do("cuInit", 0)
        self._started_s = time.perf_counter() - begun
        self._noise = Noise(self._driver)
        self._parts: list[tuple[int, int]] = []  # pointer and bytes
        self._filling: list[int] = []
        self._kept: list[object] = []  # host memory that the driver points to
        self._children: list[int] = []
        self.also: Mapping[str, Callable[..., dict[str, Any]]] = {
            "started": lambda: {"seconds": round(self._started_s, 4)},
            "context": self._make_context,
            "count": lambda: {"devices": int(self._driver.do("cuDeviceGetCount"))},
            "thread": self._context_of_a_thread,
            "room": lambda: {"free_and_total": [int(one) for one in self._driver.answer("cuMemGetInfo")[2]]},
            "spin": self._spin,
            "where": lambda: {"address": self._parts[0][0]},
            "managed": self._managed,
            "pinned": self._pinned,
            "registered": self._registered,
            "mapped": self._mapped,
            "export": self._export,
            "import": self._import,
            "fork": self._fork,
            "fill_up": self._fill_up,
            "release": self._release,
        }

    def hold(self, mib: int, cached_mib: int) -> None:  # noqa: ARG002 - there is no cache without a framework
        """Replace what is held by noise of this size."""
        for pointer, _ in self._parts:
            self._driver.do("cuMemFree", pointer)
        self._parts.clear()
        for start in range(0, mib << 20, _GIB):
            size = min(_GIB, (mib << 20) - start)
            pointer = int(self._driver.do("cuMemAlloc", size))
            self._parts.append((pointer, size))
            self._noise.fill(pointer, size, start // _MIB)

    def is_intact(self) -> bool:
        """Whether every byte is there. A call of the driver: it waits while the process is locked."""
        starts = [sum(size for _, size in self._parts[:number]) for number in range(len(self._parts))]
        return all(
            self._noise.is_intact(pointer, size, start // _MIB)
            for start, (pointer, size) in zip(starts, self._parts, strict=True)
        )

    def copy(self, mib: int) -> dict[str, float]:
        """Return the fastest of some copies between pinned host memory and the device, seconds."""
        size = mib << 20
        do = self._driver.do
        host, device, stream = int(do("cuMemHostAlloc", size, 0)), int(do("cuMemAlloc", size)), do("cuStreamCreate", 0)
        seconds = {}
        for name, call, there, here in (
            ("to_device_s", "cuMemcpyHtoDAsync", device, host),
            ("to_host_s", "cuMemcpyDtoHAsync", host, device),
        ):
            best = float("inf")
            for _ in range(_COPIES):
                begun = time.perf_counter()
                do(call, there, here, size, stream)
                do("cuStreamSynchronize", stream)
                best = min(best, time.perf_counter() - begun)
            seconds[name] = best
        do("cuStreamDestroy", stream)
        do("cuMemFree", device)
        do("cuMemFreeHost", host)
        return seconds

    def _make_context(self) -> dict[str, Any]:
        begun = time.perf_counter()
        self._driver.start()
        return {"seconds": round(time.perf_counter() - begun, 4)}

    def _context_of_a_thread(self) -> dict[str, Any]:
        """Make the context in another thread, which stays, and use it in this one."""
        made = threading.Event()

        def make() -> None:
            self._driver.start()
            made.set()
            signal.pause()

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        if not made.wait(_CONTEXT_S):
            raise RuntimeError(f"the thread has made no context within {_CONTEXT_S:g} s")
        self._driver.start()
        return {"thread": thread.native_id}

    def _spin(self, ms: int) -> dict[str, Any]:
        """Keep the device at work for this long, and return at once."""
        if os.environ.get(DOUBLE):  # it runs no kernels
            ctypes.CDLL("libcuda.so.1").driverDoubleBusy(ms)
            return {}
        code = ctypes.create_string_buffer(_SPIN)
        module = self._driver.do("cuModuleLoadData", ctypes.addressof(code))
        function = self._driver.do("cuModuleGetFunction", module, b"spin")
        given = ((ms * 1_000_000,), (ctypes.c_uint64,))
        self._driver.do("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, given, 0)
        return {}

    def _managed(self, mib: int) -> dict[str, Any]:
        """Managed memory, small on purpose, written by the host and then by the device."""
        pointer = int(self._driver.do("cuMemAllocManaged", mib << 20, _ATTACH_GLOBAL))
        ctypes.memset(pointer, 0x5A, mib << 20)
        self._driver.do("cuMemsetD32", pointer, 1, (mib << 20) // 8)
        self._driver.do("cuCtxSynchronize")
        return {"address": pointer}

    def _pinned(self, mib: int) -> dict[str, Any]:
        pointer = int(self._driver.do("cuMemHostAlloc", mib << 20, 0))
        ctypes.memset(pointer, 0x5A, mib << 20)
        return {"address": pointer}

    def _registered(self, mib: int) -> dict[str, Any]:
        memory = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(pointer, 0x5A, mib << 20)
        self._kept.append(memory)
        self._driver.do("cuMemHostRegister", pointer, mib << 20, 0)
        return {"address": pointer}

    def _mapped(self, mib: int) -> dict[str, Any]:
        """Memory by the virtual memory calls, as torch's expandable segments use them."""
        do, size = self._driver.do, mib << 20
        properties, access = location(self._driver)
        pointer = int(do("cuMemAddressReserve", size, 0, 0, 0))
        do("cuMemMap", pointer, size, 0, do("cuMemCreate", size, properties, 0), 0)
        do("cuMemSetAccess", pointer, size, [access], 1)
        self._parts.append((pointer, size))
        self._noise.fill(pointer, size, sum(length for _, length in self._parts[:-1]) // _MIB)
        return {"address": pointer}

    def _export(self, mib: int) -> dict[str, Any]:
        pointer = int(self._driver.do("cuMemAlloc", mib << 20))
        handle = self._driver.do("cuIpcGetMemHandle", pointer)
        return {"address": pointer, "handle": ctypes.string_at(handle.getPtr(), _HANDLE).hex()}

    def _import(self, handle: str) -> dict[str, Any]:
        given = self._driver.cuda.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), bytes.fromhex(handle), _HANDLE)  # newer bindings have no attribute for the bytes
        return {"address": int(self._driver.do("cuIpcOpenMemHandle", given, _LAZY_PEER_ACCESS))}

    def _fork(self) -> dict[str, Any]:
        """Fork a child that inherits the context and makes no call; it ends with this process."""
        reading, writing = os.pipe()
        begun, telling = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.write(telling, b"!")  # what the driver's library does in a child at its start is over
            os.close(0)
            os.close(1)
            os.read(reading, 1)
            os._exit(0)
        os.read(begun, 1)
        for descriptor in (reading, begun, telling):
            os.close(descriptor)
        self._children.append(writing)
        return {"child": child}

    def _fill_up(self, leave_mib: float) -> dict[str, Any]:
        """Allocate until only so much is free on the device."""
        for step in (1024, 256, 64, 16, 2):
            while self._driver.free_bytes() - (step << 20) >= leave_mib * _MIB:
                result, _, values = self._driver.answer("cuMemAlloc", step << 20)
                if result != 0:  # what is free is not always in one piece
                    break
                self._filling.append(int(values[0]))
        return {"free_mib": round(self._driver.free_bytes() / _MIB, 1)}

    def _release(self) -> dict[str, Any]:
        for pointer in self._filling:
            self._driver.do("cuMemFree", pointer)
        self._filling.clear()
        return {"free_mib": round(self._driver.free_bytes() / _MIB, 1)}


def location(driver: Driver) -> tuple[Any, Any]:
    """Return the properties and the access that put memory of the virtual memory calls on the first visible device."""
    cuda = driver.cuda
    properties, access = cuda.CUmemAllocationProp(), cuda.CUmemAccessDesc()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    for one in (properties.location, access.location):
        one.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        one.id = 0
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return properties, access
