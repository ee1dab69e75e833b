"""Before its first grant a kernel sees no device: CUDA must not remember that answer.

Until then `CUDA_VISIBLE_DEVICES` is empty. A `%%cpu` cell or start-up code that asks for a GPU rightly gets "none", but the answer can
stay for the life of the process: the driver reads the variable once, at `cuInit`, and torch keeps the count of devices in a static
variable of its library from the first `torch.cuda.is_available()` on. To bind a device earlier would hand out memory that is not
reserved. So:

- torch does not reach the driver until the grant: its two ways from Python (`torch._C._cuda_getDeviceCount`, behind `is_available` and
  `device_count`, and `torch._C._cuda_init`, behind everything that needs CUDA) are replaced and answer "no device" by themselves.
- Code that reached the driver in another way (another framework, torch's C++ code in a backward pass) is found before the first cell with
  the GPU, if the driver's library is loaded by then, and that cell reports it. `cuDeviceGetCount` starts nothing. Where it returns "not
  initialised" and a framework is known to have searched for a GPU, `cuInit` repeats its first answer. It is not called otherwise: it
  would start CUDA in kernels that never use it.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fractional_gpu_kernel.memory.imports import ImportHooks

__all__ = ["NO_DEVICE_KEPT", "FirstGrant"]

Function = Callable[[], Any]

VISIBLE = "CUDA_VISIBLE_DEVICES"
SIMULATED = "JUPYTER_GPU_SIMULATED_DEVICE"
NO_DEVICE_KEPT = (
    "Restart the kernel to use the GPU: CUDA was started before this kernel had one (by a %%cpu cell or start-up code), and the driver "
    "keeps the answer “no device” for as long as the process lives. "
    "A restart loses the variables: save what you need first, in %%cpu cells."
)
_NOT_YET = (
    "CUDA cannot be used yet: this code runs before the kernel has its GPU (in a %%cpu cell, or at start-up). "
    "Run it in an ordinary cell."
)
_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED, _NO_DEVICE = 3, 100  # CUDA_ERROR_...


class FirstGrant:
    """Guards one process until its first grant. `bind` is called under the gate's lock, `check` by the thread that runs cells."""

    def __init__(self, hooks: ImportHooks, environment: Mapping[str, str] = os.environ) -> None:
        self._hooks = hooks
        self._held: list[tuple[Any, str, Function, Function]] = []  # module, name, stand-in, original
        self.is_awaited = environment.get(VISIBLE) == ""  # the kernel has not been bound to a device yet
        self.is_due = False  # it has been, and `check` is still to be called

    def install(self) -> None:
        """Keep torch from the driver, if it is imported before the grant."""
        if self.is_awaited:
            self._hooks.after("torch", self._hold)

    def bind(self, environment: Mapping[str, str]) -> None:
        """Let torch reach the driver, if the variables bind the process to a device. Cheap, and safe to repeat."""
        if self.is_awaited and (environment.get(VISIBLE) or environment.get(SIMULATED)):
            self.is_due = True
            self.release()

    def release(self) -> None:
        """Put torch's functions back, where they are still ours."""
        self.is_awaited = False
        for core, name, stand_in, original in self._held:
            if getattr(core, name, None) is stand_in:
                setattr(core, name, original)
        self._held = []

    def check(self) -> str:
        """Return the sentence for the user if this process will find no device, else ""."""
        self.is_due = False
        return NO_DEVICE_KEPT if _is_loaded(_DRIVER) and _answer() == _NO_DEVICE else ""

    def _hold(self, torch: ModuleType) -> None:
        core = getattr(torch, "_C", None)
        if not hasattr(core, "_cuda_getDeviceCount"):
            return  # a torch without CUDA, which is known by this very attribute
        for name, answer in (("_cuda_getDeviceCount", _no_devices), ("_cuda_init", _not_yet)):
            original: Function | None = getattr(core, name, None)
            if self.is_awaited and original is not None:
                stand_in = self._until_bound(answer, original)
                self._held.append((core, name, stand_in, original))
                setattr(core, name, stand_in)

    def _until_bound(self, answer: Function, original: Function) -> Function:
        """Return a function that answers by itself until the grant, which may come while torch is being imported."""
        return lambda: answer() if self.is_awaited else original()


def _no_devices() -> int:
    return 0


def _not_yet() -> None:
    raise RuntimeError(_NOT_YET)


def _is_loaded(library: str, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether the process has mapped the driver's library. Its file has the driver's version in place of the "1"."""
    stem = f"/{library.rpartition('.')[0]}."
    try:
        with maps.open(encoding="utf-8", errors="surrogateescape") as lines:
            return any(stem in line for line in lines)
    except OSError:
        return False


def _answer() -> int:
    """Return the driver's answer to a count of devices, as CUDA's error number."""
    import ctypes  # noqa: PLC0415 - off the kernel's start

    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return 0  # another library of a similar name
    answer = int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
    return int(driver.cuInit(0)) if answer == _NOT_INITIALIZED and _has_searched() else answer


def _has_searched() -> bool:
    """Whether a framework that keeps its answer has searched for a GPU and found none."""
    numba = getattr(sys.modules.get("numba.cuda.cudadrv.driver"), "driver", None)
    jax = getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None)
    tensorflow = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    return (
        getattr(numba, "initialization_error", None) is not None
        or bool(jax and "cuda" not in jax)
        or getattr(tensorflow, "_physical_devices", None) is not None
    )
