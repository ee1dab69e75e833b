"""What frameworks' own allocators hold and may hold, asked of those that are loaded. Nothing is imported.

torch's `set_per_process_memory_fraction` makes a context on the device in its older releases, and may leave that device current
(`SetDevice`, then `cudaMemGetInfo`; newer releases only note a number). So the device that is current is limited when CUDA is
initialised, all others when their first allocation has been seen, and at once where the first limit made no context.
"""

import sys
from typing import Any

from fractional_gpu_kernel.memory.imports import is_half_imported

__all__ = ["TorchLimits", "reserved_mib"]

_MIB = 2**20
_UNCOUNTED = ("numba.cuda", "paddle", "pycuda.driver", "rmm", "tensorflow")
"""Packages that allocate device memory of which no figure is taken here. (torch itself imports `cuda.bindings`.)"""


class TorchLimits:
    """Limits torch's allocator on each device of this process. For the thread that runs cells."""

    def __init__(self) -> None:
        self._limited: set[int] = set()
        self._others: set[int] = set()  # devices without a limit: not used when the others were limited

    def apply(self, torch: Any, mib: int) -> None:  # noqa: ANN401 - torch is not ours to import
        """Limit what is in use to `mib` on each device, and leave the current device as it is. Raises what CUDA raises (RuntimeError)."""
        cuda = torch.cuda
        devices = set(range(cuda.device_count()))
        if not devices:
            return
        current = cuda.current_device() if len(devices) > 1 else 0
        wanted = {current} | self._limited & devices | {index for index in devices if _torch_bytes(cuda, index)}
        try:
            for index in [current, *sorted(wanted - {current})]:
                self._limit(cuda, index, mib)
            if wanted != devices and not _has_context(torch, current):  # a limit is only a number in this release
                for index in sorted(devices - wanted):
                    self._limit(cuda, index, mib)
        finally:
            if len(devices) > 1 and cuda.current_device() != current:
                cuda.set_device(current)
            self._others = devices - self._limited

    def is_stale(self) -> bool:
        """Return whether a device without a limit is in use by now. Asks the allocator's books only, never the driver."""
        torch = sys.modules.get("torch") if self._others else None
        return torch is not None and any(_torch_bytes(torch.cuda, index) for index in self._others)

    def _limit(self, cuda: Any, index: int, mib: int) -> None:  # noqa: ANN401 - as above
        total_mib = cuda.get_device_properties(index).total_memory // _MIB
        cuda.set_per_process_memory_fraction(min(1.0, mib / max(total_mib, 1)), index)
        self._limited.add(index)


def reserved_mib() -> int | None:
    """Return what the allocators of torch, CuPy and JAX hold on the process's devices, MiB; None if that is not all there may be.

    For the kernel's idle main loop (CuPy asks which device is current). Raises nothing of CUDA's.
    """
    if any(name in sys.modules for name in _UNCOUNTED):
        return None
    try:
        counts = [count() for count in (_torch_reserved, _cupy_reserved, _jax_reserved)]
    except (RuntimeError, AttributeError, KeyError, TypeError):  # half imported, or another version
        return None
    known = [count for count in counts if count is not None]
    return -(-sum(known) // _MIB) if known else None


def _torch_reserved() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or is_half_imported(torch) or not torch.cuda.is_initialized():
        return None
    return sum(_torch_bytes(torch.cuda, index) for index in range(torch.cuda.device_count()))


def _torch_bytes(cuda: Any, index: int) -> int:  # noqa: ANN401 - as above
    reserved = getattr(cuda, "memory_reserved", None)
    return int(reserved(index)) if reserved is not None else 0


def _has_context(torch: Any, index: int) -> bool:  # noqa: ANN401 - as above
    """Whether the process has a context on the device; in doubt, yes."""
    has_context = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None)
    return has_context is None or bool(has_context(index))


def _cupy_reserved() -> int | None:
    """CuPy counts the device that is current. It does not tell whether it uses CUDA at all, so a pool that holds nothing says nothing."""
    cupy = sys.modules.get("cupy")
    if cupy is None or is_half_imported(cupy):
        return None
    return int(cupy.get_default_memory_pool().total_bytes()) or None


def _jax_reserved() -> int | None:
    bridge = sys.modules.get("jax._src.xla_bridge")
    backends = getattr(bridge, "_backends", None)
    client = (backends or {}).get("cuda")
    if client is None:
        return None
    return sum(int(device.memory_stats()["pool_bytes"]) for device in client.local_devices())
