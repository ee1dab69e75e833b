"""Limits, measures and empties frameworks' allocators, and detects anything that prevents a checkpoint.

A lease's cap includes the CUDA context, but a framework only limits its own allocator, so its limit is the cap minus the context. The
broker sends the context's measured size with each grant, and notices allocations beyond these limits.

- JAX and CuPy read environment variables, which are set when the extension is loaded and at each grant, unless the user has set them. JAX
  accepts only one of its two variables, and reads its limit only once, so a change requires a kernel restart.
- For TensorFlow, only the variable that lets its memory grow as needed is set. A limit would rule out `set_memory_growth`, which many
  notebooks call.
- torch's `set_per_process_memory_fraction` would initialise CUDA, so the call is queued until torch does so. Child processes get the limit
  in a variable, if the installed torch reads it. accelerate, transformers and vLLM ask torch for the device's size and get the limit.
- In older releases of torch, setting the limit creates a context on the device and may make it the current device, so the current device is
  limited first. Other devices are limited after their first allocation, or immediately if the first limit created no context.
- Once torch or CuPy is loaded, a changed limit is applied on the main loop while no cell is running, or before the next cell.
"""

import contextlib
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fractional_gpu_kernel.extension import LeasedKernel

Callback = Callable[[ModuleType], None]
_MARK = "__noted_by_jupyter_gpu__"  # marks wrapped functions; wrappers of other code copy it with the attributes


class ImportHooks:
    """An entry in `sys.meta_path` that calls functions after imports. Use one per process, as two would unwrap each other's loaders."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}

    def after(self, name: str, callback: Callback) -> None:
        """Call `callback` in the importing thread after the module `name` has been executed, or now if it is already loaded."""
        module = sys.modules.get(name)
        if module is not None and not is_half_imported(module):
            callback(module)
        self._callbacks.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def close(self) -> None:
        self._callbacks = {}
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec for a watched module, with the callbacks added. Return None for other modules."""
        if name not in self._callbacks:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None and not isinstance(spec.loader, type):  # for built-in modules it is a class
                    self._hook(spec.loader, name)
                return spec
        return None

    def _hook(self, loader: Any, name: str) -> None:  # noqa: ANN401 - importlib may find any loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if vars(loader).get("exec_module") is exec_module:  # unless other code has wrapped it
                del loader.exec_module  # remove this before other code uses the loader
            execute(module)
            for callback in self._callbacks.get(name, ()):
                callback(module)

        loader.exec_module = exec_module


class Call(NamedTuple):
    """A function whose calls should be reported. Each module in `modules` has it as an attribute once `package` has been imported.

    `function` may be `Class.method`. `applies` decides from a call's arguments whether to report it. If it is None, every call is reported.
    """

    package: str
    modules: tuple[str, ...]
    function: str
    sentence: str
    applies: Callable[[Sequence[Any], Mapping[str, Any]], bool] | None = None


def note_calls(call: Call, report: Callable[[str], None]) -> None:
    """Run `report(call.sentence)` before each call to report, in the same thread. Functions that do not exist are skipped."""
    for name in call.modules:
        owner: Any = sys.modules.get(name)
        *parents, function = call.function.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        original = getattr(owner, function, None)
        if owner is None or not callable(original) or hasattr(original, _MARK):
            continue

        @functools.wraps(original)
        def noted(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:  # noqa: ANN401 - as in the framework
            if call.applies is None or call.applies(args, kwargs):
                report(call.sentence)
            return _original(*args, **kwargs)

        setattr(noted, _MARK, True)
        setattr(owner, function, noted)


def mapped_files() -> set[str]:
    """Return the names of files mapped into this process's memory, or an empty set if /proc cannot be read."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return {line.rpartition("/")[2] for line in lines}
    return set()


def is_half_imported(module: ModuleType) -> bool:
    """Return whether another thread or an outer cell is still executing the module."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


MEMORY = "JUPYTER_GPU_MEMORY_MIB"
DEVICE = "JUPYTER_GPU_DEVICE_MIB"
CONTEXT = "JUPYTER_GPU_CONTEXT_MIB"
CAP = "JUPYTER_GPU_CAP"  # with "driver", the driver shows the share as the device's size and refuses more
CUPY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"
MEMORY_INFO = "JUPYTER_GPU_MEMORY_INFO"

_MIB = 2**20
_JAX_READS = Call("jaxlib.xla_client", ("jaxlib.xla_client",), "generate_pjrt_gpu_plugin_options", "")
_JAX_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # older releases read only the second
_JAX_READER = ("jaxlib", "xla_client.py", _JAX_FRACTIONS[0])  # a package, its file that reads the name, and the name
_TORCH_FRACTION = "per_process_memory_fraction"
_TORCH_READER = ("torch", "include/c10/cuda/CUDAAllocatorConfig.h", _TORCH_FRACTION)
_TORCH_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the CUDA allocator reads the first that is set
_UNCOUNTED = ("numba.cuda", "paddle", "pycuda.driver", "rmm", "tensorflow")  # their device memory is not counted here
CONTEXT_MIB = 512  # a context with a framework's kernels and the cuBLAS workspace, until the broker measures more


def framework_mib(cap_mib: int, context_mib: int = CONTEXT_MIB) -> int:
    """Return a framework's limit in MiB: the cap minus the context, but at least half of the cap (a quarter if the context is large)."""
    least = cap_mib // 2 if context_mib <= CONTEXT_MIB else cap_mib // 4
    return max(cap_mib - max(context_mib, CONTEXT_MIB), least, 1)


class TorchLimits:
    def __init__(self) -> None:
        self._limited: set[int] = set()
        self._others: set[int] = set()  # devices without a limit, which were not in use when the others were limited

    def apply(self, torch: Any, mib: int) -> None:  # noqa: ANN401 - torch is not ours to import
        """Set the limit of each device in use to `mib`. The current device stays the same. Raises RuntimeError if CUDA fails."""
        cuda = torch.cuda
        devices = set(range(cuda.device_count()))
        if not devices:
            return
        # Limit only devices in use, because in older releases a limit creates a context, which takes hundreds of MiB on each device.
        current = cuda.current_device() if len(devices) > 1 else 0
        wanted = {current} | self._limited & devices | {index for index in devices if _torch_bytes(cuda, index)}
        try:
            for index in [current, *sorted(wanted - {current})]:
                self._limit(cuda, index, mib)
            if wanted != devices and not _has_context(torch, current):  # in this release a limit creates no context
                for index in sorted(devices - wanted):
                    self._limit(cuda, index, mib)
        finally:
            if len(devices) > 1 and cuda.current_device() != current:
                cuda.set_device(current)
            self._others = devices - self._limited

    def is_stale(self) -> bool:
        """Return whether a device without a limit is in use. This reads only the allocator's counters and does not call the driver."""
        torch = sys.modules.get("torch") if self._others else None
        return torch is not None and any(_torch_bytes(torch.cuda, index) for index in self._others)

    def _limit(self, cuda: Any, index: int, mib: int) -> None:  # noqa: ANN401 - as above
        total_mib = cuda.get_device_properties(index).total_memory // _MIB
        cuda.set_per_process_memory_fraction(min(1.0, mib / max(total_mib, 1)), index)
        self._limited.add(index)


class MemoryLimits:
    """This process's memory limits. This class is not thread-safe; the gate calls `bind` under its own lock."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ, hooks: ImportHooks | None = None) -> None:
        self._environment = environment
        self.hooks = hooks or ImportHooks()
        self._torch = TorchLimits()
        self._ours: dict[str, str] = {}  # variables that we set, not the user, so a resize may change them
        self._torch_setting = ""  # the part that we added to the user's torch settings
        self.cap_mib: int | None = None  # the cap of the process tree, or None if there is no cap
        self._limit_mib: int | None = None  # how much of the cap a framework may allocate
        self._read()
        # The limit that loaded frameworks have. 0 means that torch must be checked.
        self._applied_mib: int | None = self._limit_mib

    def install(self) -> None:
        self._hint()
        self.hooks.after("torch", self.torch_imported)
        self.hooks.after("torch._utils", lambda _: self._hint())  # before torch's libraries, which read the variables
        self.hooks.after(_JAX_READS.package, lambda _: note_calls(_JAX_READS, lambda _: self._hint()))

    def bind(self, environment: Mapping[str, str]) -> None:
        """Set the environment variables from a grant, except any with invalid names or values, and update those that frameworks read."""
        for name, value in environment.items():
            if name and "=" not in name and "\0" not in name + value:
                self._environment[name] = value
        self._read()
        self._hint()

    @property
    def is_stale(self) -> bool:
        """Whether loaded frameworks still have an old limit, or torch uses a device that has no limit."""
        return self._applied_mib != self._limit_mib or self._torch.is_stale()

    @property
    def is_lowered(self) -> bool:
        """Whether loaded frameworks still have a limit that is larger than the current one."""
        limit = self._limit_mib
        return bool(limit and ((self._applied_mib and self._applied_mib > limit) or self._torch.is_stale()))

    def torch_imported(self, torch: ModuleType) -> None:
        """Limit torch now, or when it initialises CUDA."""
        cuda = getattr(torch, "cuda", None)
        when_initialised = getattr(cuda, "_lazy_call", None)
        if cuda is None:
            return
        self._report_share(torch, cuda)
        if when_initialised is not None:
            when_initialised(lambda: self._limit(torch))
        elif cuda.is_initialized():
            self._limit(torch)
        else:
            self._applied_mib = 0  # this counts as outdated, so it is checked again before each cell

    def refresh(self) -> None:
        """Apply a changed limit. Call this in the thread that runs cells. If CUDA fails, cells still run and `is_stale` stays true."""
        try:
            is_applied = self._limit_loaded()
        except (RuntimeError, AttributeError):  # CUDA failed, or a module is still being imported
            return
        if is_applied:
            self._applied_mib = self._limit_mib

    def _read(self) -> None:
        self.cap_mib = cap = _positive(self._environment.get(MEMORY))
        context_mib = _positive(self._environment.get(CONTEXT)) or CONTEXT_MIB
        self._limit_mib = None if cap is None else framework_mib(cap, context_mib)

    @property
    def _is_told(self) -> bool:
        return self._environment.get(CAP) == "driver"

    def _limit_loaded(self) -> bool:
        torch = sys.modules.get("torch")
        cupy: Any = sys.modules.get("cupy")
        if torch is not None and not is_half_imported(torch):
            if torch.cuda.is_initialized():
                self._limit(torch)
            elif not hasattr(torch.cuda, "_lazy_call"):
                return False  # no queued call would limit torch later, so check again before the next cell
        # CuPy read its limit from the environment when it was imported. A limit that the user has set is not changed.
        is_there = cupy is not None and self._applied_mib and not is_half_imported(cupy)
        if is_there and self._limit_mib is not None and self._is_free(CUPY_LIMIT):
            cupy.get_default_memory_pool().set_limit(size=self._limit_mib * _MIB)
        return True

    def _report_share(self, torch: ModuleType, cuda: Any) -> None:  # noqa: ANN401 - as above
        """Make torch's functions report free and total memory, in bytes, as if the device were only as large as the allocator's limit."""

        def reporting(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
            @functools.wraps(original)
            def report(*device: Any, **named: Any) -> tuple[int, int]:  # noqa: ANN401 - anything that torch accepts as a device
                free, total = original(*device, **named)
                if self._limit_mib is None or self._is_told or self._environment.get(MEMORY_INFO) == "device":
                    return free, total
                total = min(total, self._limit_mib * _MIB)
                return max(min(free, total - cuda.memory_reserved(*device, **named)), 0), total

            setattr(report, _MARK, True)
            return report

        accelerator = getattr(torch, "accelerator", None)
        for owner in (cuda, getattr(cuda, "memory", None), accelerator, getattr(accelerator, "memory", None)):
            for name in ("mem_get_info", "get_memory_info"):
                original = getattr(owner, name, None)
                if original is not None:  # after a reload, the earlier extension has already wrapped it
                    setattr(owner, name, reporting(original.__wrapped__ if hasattr(original, _MARK) else original))

    def _limit(self, torch: ModuleType) -> None:
        # In some releases a fraction refers to the size that the driver shows, in others to the real size of the device.
        if self._limit_mib is not None and not self._is_told:
            self._torch.apply(torch, self._limit_mib)

    def _hint(self) -> None:
        mib = self._limit_mib
        if mib is None:
            return
        hints = {
            CUPY_LIMIT: str(mib * 2**20),  # in bytes
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        }
        device_mib = _positive(self._environment.get(DEVICE))
        torch_settings = {}
        if device_mib is not None:
            fraction = f"{min(1.0, mib / device_mib):.4f}"
            hints |= dict.fromkeys(_JAX_FRACTIONS, "")
            if all(
                map(self._is_free, _JAX_FRACTIONS)
            ):  # JAX refuses to start with both variables, so set only the one that this release reads
                hints[_JAX_FRACTIONS[not self._reads(*_JAX_READER)]] = fraction
            if self._reads(*_TORCH_READER) and not self._is_told:
                torch_settings = self._with_torch_fraction(fraction)
        changes = {name: value for name, value in hints.items() if self._is_free(name)}
        self._ours |= changes
        for name, value in (changes | torch_settings).items():
            if value:
                self._environment[name] = value
            else:
                self._environment.pop(name, None)

    def _with_torch_fraction(self, fraction: str) -> dict[str, str]:
        """Return the user's settings for torch's allocator, with the fraction added unless the user has set one."""
        before, self._torch_setting = self._torch_setting, f"{_TORCH_FRACTION}:{fraction}"
        settings = {
            name: [one for one in self._environment.get(name, "").split(",") if one not in ("", before)]
            for name in _TORCH_SETTINGS
        }
        read = next((name for name in _TORCH_SETTINGS if settings[name]), _TORCH_SETTINGS[0])
        if not any(_TORCH_FRACTION in one for one in settings[read]):
            settings[read].append(self._torch_setting)
        return {name: ",".join(those) for name, those in settings.items()}

    def _reads(self, package: str, file: str, name: str) -> bool:
        """Return whether the installed package reads this variable, or False if the environment is for another process."""
        spec = PathFinder.find_spec(package) if self._environment is os.environ else None
        for folder in (spec and spec.submodule_search_locations) or ():
            with contextlib.suppress(OSError):
                return name in Path(folder, file).read_text(encoding="utf-8", errors="replace")
        return False

    def _is_free(self, name: str) -> bool:
        return self._environment.get(name, "") == self._ours.get(name, "")


def _positive(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and int(text) > 0 else None


def reserved_mib() -> int | None:
    """Return how many MiB the allocators of torch, CuPy and JAX hold, or None if unknown. Never raises CUDA errors."""
    if any(name in sys.modules for name in _UNCOUNTED):
        return None
    try:
        counts = [count() for count in (_torch_reserved, _cupy_reserved, _jax_reserved)]
    except (RuntimeError, AttributeError, KeyError, TypeError):  # a module is half imported or has another version
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
    """Return whether the process has, or might have, a context on the device."""
    has_context = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None)
    return has_context is None or bool(has_context(index))


def _cupy_reserved() -> int | None:
    """Return the size of CuPy's pool on the current device, in bytes. Return None if it is empty, as CuPy may not be using CUDA at all."""
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


# Memory that is freed before a suspend need not be copied. Only frameworks that have initialised CUDA are called. This happens on the idle
# main loop of the kernel, because a garbage collection runs finalisers, which must run in the thread of the user's code. A garbage
# collection takes tens of milliseconds, so it is skipped unless a package whose objects own device memory is loaded.

_HOLDERS = frozenset([
    "torch", "cupy", "jax", "tensorflow", "numba.cuda", "paddle", "mxnet", "warp", "taichi", "pycuda.driver", "cuda.core", "rmm",
    "xgboost", "tensorrt", "onnxruntime", "llama_cpp", "fractional_gpu.gpu.simulated.cuda",
])  # fmt: skip
"""Packages whose objects own device memory. If one is missing from this list, suspends may copy more bytes, but no state is lost."""

TIME_LIMIT_S = 8.0  # less than a broker waits for the answer


def free_caches() -> str:
    """Collect garbage and empty the caching allocators. Return a short summary for the broker's log. Never raises CUDA errors."""
    done = []
    if not _HOLDERS.isdisjoint(sys.modules):
        gc.collect()
        done.append("gc")
    for name in ("torch", "cupy"):
        package: Any = sys.modules.get(name)
        if package is None:
            continue
        try:
            if name == "torch" and package.cuda.is_initialized():
                package.cuda.empty_cache()
            elif name == "cupy":
                package.get_default_memory_pool().free_all_blocks()
                package.get_default_pinned_memory_pool().free_all_blocks()
        except (RuntimeError, AttributeError) as error:  # CUDA failed, or a module is still being imported
            done.append(f"{name} failed: {error}"[:200])
        else:
            done.append(name)
    return ", ".join(done) or "no loaded package holds device memory"


def shrink(kernel: "LeasedKernel", answer: Callable[[str, str], None], time_limit_s: float = TIME_LIMIT_S) -> None:
    """Run `free_caches` on the main loop, and call `answer(word, detail)` once, from any thread. Never blocks.

    The word is "done", "managed" if the process cannot be saved, or "busy" if a cell is running or the main loop was not free in time.
    While a cell is waiting for input, nothing is freed and the suspend can go ahead. The same applies if the callback is late in a kernel
    with a GUI event loop, which may be showing a dialog while the kernel is idle.
    """

    def leave(why: str) -> None:
        why_not = kernel.blockers.reason()
        answer("managed" if why_not else "done", why_not or f"nothing freed: {why}")

    if kernel.gate.is_running:
        answer("busy", "a cell runs")
        return
    if kernel.inputs.waiting:  # a cell that waits for input blocks the main loop
        leave("a cell waits for input")
        return
    answered = threading.Lock()  # the timer and the callback try to take it, and the first one answers

    def give_up() -> None:
        late = f"the main loop did not become free within {time_limit_s:g} s"
        if not answered.acquire(blocking=False):
            return
        if kernel.has_gui_loop():
            leave(late)
        else:
            answer("busy", late)

    def on_main_loop() -> None:
        timer.cancel()
        if not answered.acquire(blocking=False):
            return
        if kernel.gate.is_running:
            answer("busy", "a cell runs")
        elif why_not := kernel.blockers.reason():
            answer("managed", why_not)
        else:
            # The broker computes the size of the context from the amount that the allocators still hold.
            done, held_mib = free_caches(), reserved_mib()
            answer("done", done if held_mib is None else f"{done}, reserved_mib={held_mib}")

    timer = threading.Timer(time_limit_s, give_up)
    timer.daemon = True
    timer.start()
    if not kernel.on_main_loop(on_main_loop):
        timer.cancel()
        leave("this kernel's main loop is not running")


# The driver cannot checkpoint a process with managed (unified) memory or a profiler. The broker must know this before it suspends the
# kernel. We detect it without importing anything:
#
# - We watch for the first call of functions that allocate managed memory, select a memory resource of rmm, or attach NVIDIA's profiling
#   interface (CUPTI) to a framework. We cannot see when profiling ends, so the process counts as profiled until it exits.
# - Before a suspend we check rmm's current memory resource, torch's pluggable allocator, the operators of fbgemm_gpu, variables that select
#   managed memory, and variables that make the driver load a profiler's library (Nsight Systems or Nsight Compute).
#
# We ignore a loaded `libcupti`, because torch and JAX always link it, and `cudaProfilerStart`, which does nothing unless a tool is
# injected. Direct calls to the driver, through ctypes or an extension module, are not detected.

_MOST_RESOURCES = 20  # in a chain of rmm resources


def _cannot_save(what: str) -> str:
    return f"it uses {what}, which the driver cannot save"


def _sets_managed_resource(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether rmm's `set_current_device_resource(mr)` or `set_per_device_resource(device, mr)` is given a managed resource."""
    return _is_managed(kwargs.get("mr", args[-1] if args else None))


def _reinitializes_managed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call to `rmm.reinitialize(pool_allocator, managed_memory, ...)` requests managed memory."""
    return bool(kwargs.get("managed_memory", args[1] if len(args) > 1 else False))


def _plugs_allocator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether torch's `MemPool.__init__(self, allocator=None, ...)` is given an unknown allocator."""
    given = kwargs.get("allocator", args[1] if len(args) > 1 else None) is not None
    return given and sys.modules.keys().isdisjoint(_SAVEABLE_ALLOCATORS)


# The pools of these allocators (for vLLM's sleep mode) use the driver's virtual memory calls, which reportedly work with checkpoints.
_SAVEABLE_ALLOCATORS = ("vllm.cumem_allocator", "torch_memory_saver")
_BNB = "bitsandbytes.functional"
_RMM = _cannot_save("managed memory through rmm")
_BINDINGS = _cannot_save("managed memory through NVIDIA's Python bindings")
_PLUGGED = "torch uses a pluggable allocator, whose memory the driver may not be able to save"

_CALLS = (
    Call("cupy", ("cupy.cuda", "cupy.cuda.memory"), "malloc_managed", _cannot_save("CuPy's managed memory")),
    Call("cupy", ("cupy_backends.cuda.api.runtime",), "mallocManaged", _cannot_save("CuPy's managed memory")),
    Call("numba.cuda", ("numba.cuda", "numba.cuda.api"), "managed_array", _cannot_save("numba's managed arrays")),
    Call(_BNB, (_BNB,), "get_paged", _cannot_save("bitsandbytes' paged optimizers (managed memory)")),
    Call("pycuda.driver", ("pycuda.driver",), "managed_empty", _cannot_save("PyCUDA's managed arrays")),
    Call("cuda.bindings.driver", ("cuda.bindings.driver",), "cuMemAllocManaged", _BINDINGS),
    Call("cuda.bindings.runtime", ("cuda.bindings.runtime",), "cudaMallocManaged", _BINDINGS),
    Call("cuda.cuda", ("cuda.cuda",), "cuMemAllocManaged", _BINDINGS),  # the module's name before 12.8
    Call("cuda.cudart", ("cuda.cudart",), "cudaMallocManaged", _BINDINGS),
    Call("rmm.mr", ("rmm.mr",), "set_current_device_resource", _RMM, _sets_managed_resource),
    Call("rmm.mr", ("rmm.mr",), "set_per_device_resource", _RMM, _sets_managed_resource),
    Call("rmm", ("rmm", "rmm.rmm"), "reinitialize", _RMM, _reinitializes_managed),
    Call("torch.cuda.memory", ("torch.cuda.memory", "torch.cuda"), "_use_uvm", _cannot_save("torch's managed memory")),
    Call("torch.cuda.memory", ("torch.cuda.memory",), "MemPool.__init__", _PLUGGED, _plugs_allocator),
)
_FBGEMM_OPERATORS = frozenset(
    {"new_managed_tensor", "new_managed_tensor_meta", "new_unified_tensor", "new_vanilla_managed_tensor"}
)
_VARIABLES = (  # a variable, the values (or any) that select managed memory, and the packages that read the variable
    ("TF_FORCE_UNIFIED_MEMORY", ("1", "true"), ("tensorflow", "jax")),
    ("GGML_CUDA_ENABLE_UNIFIED_MEMORY", (), ("llama_cpp",)),
    ("FLAGS_use_cuda_managed_memory", ("1", "true", "yes", "on", "t", "y"), ("paddle",)),
)
_INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def _profiled_with(profiler: str) -> str:
    return (
        f"it was profiled with {profiler}: NVIDIA's profiling interface (CUPTI) stays attached until the kernel restarts, and the driver "
        "cannot save such a process"
    )


def _traces_cuda(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call to torch's `_prepare_profiler(config, activities)` or `_enable_profiler` profiles CUDA."""
    activities = args[1] if len(args) > 1 else kwargs.get("activities", ())
    return any(getattr(activity, "name", "") == "CUDA" for activity in activities)


_TORCH, _JAX = _profiled_with("torch's profiler"), _profiled_with("JAX's profiler")
_TENSORFLOW, _CUPTI = _profiled_with("TensorFlow's profiler"), _profiled_with("cupti-python")
_PROTON = ("triton.profiler.profile", "triton.profiler")
_JAX_MODULES = ("jax._src.profiler", "jax.profiler")
_TF_PROFILER = "tensorflow.python.profiler.profiler_v2"
_CUPTI_MONITOR = "torch.profiler._cupti_monitor"
PROFILERS = (
    Call("torch.autograd.profiler", ("torch.autograd.profiler",), "_prepare_profiler", _TORCH, _traces_cuda),
    Call("torch.autograd.profiler", ("torch.autograd.profiler",), "_enable_profiler", _TORCH, _traces_cuda),
    Call(_CUPTI_MONITOR, (_CUPTI_MONITOR,), "start_collection", _TORCH),
    Call("jax._src.profiler", _JAX_MODULES, "start_trace", _JAX),
    Call("jax._src.profiler", _JAX_MODULES, "start_server", _JAX),  # TensorBoard may start a trace at any time
    Call(_TF_PROFILER, (_TF_PROFILER,), "start", _TENSORFLOW),
    Call(_TF_PROFILER, (_TF_PROFILER,), "start_server", _TENSORFLOW),
    Call(_PROTON[0], _PROTON, "start", _profiled_with("Triton's Proton")),
    Call("cupti.cupti", ("cupti.cupti",), "subscribe", _CUPTI),
    Call("cupti.cupti", ("cupti.cupti",), "activity_enable", _CUPTI),
)


class CheckpointBlockers:
    """Watches this process for calls that prevent a checkpoint. Reports the first such call, as a sentence, in the thread that made it."""

    def __init__(self, report: Callable[[str], None], hooks: ImportHooks | None = None) -> None:
        self._report = report
        self.hooks = hooks or ImportHooks()
        self.seen = ""  # a sentence about the first call that was seen

    def install(self) -> None:
        for call in (*_CALLS, *PROFILERS):
            self.hooks.after(call.package, lambda _module, call=call: note_calls(call, self._note))  # type: ignore[misc]

    def reason(self) -> str:
        """Explain in a sentence why the process cannot be checkpointed. Return "" if it can. Call this only on the idle main loop."""
        if self.seen:
            return self.seen
        for find in (_rmm, _torch, _fbgemm, _unified, injected):
            try:
                found = find()
            except (RuntimeError, AttributeError, OSError):
                continue  # CUDA failed, a module is half imported or has another version, or /proc cannot be read
            if found:
                return found
        return ""

    def _note(self, sentence: str) -> None:
        if not self.seen:
            self.seen = sentence
            self._report(sentence)


def _is_managed(resource: Any) -> bool:  # noqa: ANN401 - a memory resource of rmm
    """Return whether an rmm memory resource, or a resource upstream of it, allocates managed memory."""
    for _ in range(_MOST_RESOURCES):
        if "Managed" in type(resource).__name__:
            return True
        resource = getattr(resource, "upstream_mr", None)
    return False


def _rmm() -> str:
    rmm = sys.modules.get("rmm")
    return _RMM if rmm is not None and _is_managed(rmm.mr.get_current_device_resource()) else ""


def _torch() -> str:
    torch = sys.modules.get("torch")
    plugged = torch and torch.cuda.is_initialized() and torch.cuda.get_allocator_backend() == "pluggable"
    return _PLUGGED if plugged else ""


def _fbgemm() -> str:
    """Return why the process cannot be saved if fbgemm_gpu's managed-memory operators have been used. Otherwise return ""."""
    torch = sys.modules.get("torch")
    if torch is None or "fbgemm_gpu" not in sys.modules or not _FBGEMM_OPERATORS & vars(torch.ops.fbgemm).keys():
        return ""
    return _cannot_save("fbgemm_gpu's tensors in managed memory")


def _unified() -> str:
    for variable, values, packages in _VARIABLES:
        value = os.environ.get(variable)
        loaded = [name for name in packages if name in sys.modules]
        if value is not None and loaded and (not values or value.lower() in values):
            return f"{variable} makes {loaded[0]} use managed memory, which the driver cannot save"
    return ""


def injected() -> str:
    """Return why the process cannot be saved if an environment variable has injected a profiler's library into it. Otherwise return ""."""
    for variable in _INJECTIONS:
        path = os.environ.get(variable)
        if path and (library := os.path.basename(os.path.realpath(path))) in mapped_files():  # noqa: PTH119 - cheap to import
            return f"the profiler {library} is attached to it ({variable}), and the driver cannot save such a process"
    return ""
