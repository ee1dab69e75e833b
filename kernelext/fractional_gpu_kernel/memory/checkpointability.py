"""What makes this process impossible to checkpoint: managed (unified) memory, and a profiler. The broker must know before it suspends.

Nothing is imported for this. What is found, and when:

- At their first call: functions that allocate managed memory or choose rmm's memory resource, and functions that make a framework
  subscribe to NVIDIA's profiling interface (CUPTI). Whether it lets go of CUPTI afterwards cannot be seen: the process counts as profiled
  until it ends.
- Before a suspend: rmm's current memory resource, torch with a pluggable allocator, fbgemm_gpu's operators for tensors in managed memory,
  variables that make a framework use it, and a profiler's library that a variable makes the driver load (Nsight Systems, Nsight Compute).

What does not count: `libcupti` among the loaded libraries (torch and JAX link it, used or not), and `cudaProfilerStart` by any name, which
does nothing unless a tool is injected. Code that calls the driver directly (ctypes, an extension module) is not seen.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fractional_gpu_kernel.memory.limits import Call, ImportHooks, mapped_files, note_calls

_MOST_RESOURCES = 20  # of a chain of rmm's


def _cannot_save(what: str) -> str:
    return f"it uses {what}, which the driver cannot save"


def _sets_managed_resource(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of rmm's `set_current_device_resource(mr)` or `set_per_device_resource(device, mr)` sets a managed one."""
    return _is_managed(kwargs.get("mr", args[-1] if args else None))


def _reinitializes_managed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `rmm.reinitialize(pool_allocator, managed_memory, ...)` asks for managed memory."""
    return bool(kwargs.get("managed_memory", args[1] if len(args) > 1 else False))


def _plugs_allocator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch's `MemPool.__init__(self, allocator=None, ...)` has an allocator of which nothing is known."""
    given = kwargs.get("allocator", args[1] if len(args) > 1 else None) is not None
    return given and sys.modules.keys().isdisjoint(_SAVEABLE_ALLOCATORS)


# Their pools (vLLM's sleep mode) are made by the driver's virtual memory calls, and are reported to combine with checkpoints.
_SAVEABLE_ALLOCATORS = ("vllm.cumem_allocator", "torch_memory_saver")
_BNB = "bitsandbytes.functional"
_RMM = _cannot_save("managed memory through rmm")
_BINDINGS = _cannot_save("managed memory through NVIDIA's Python bindings")
_PLUGGED = "torch uses an allocator that was plugged in, and whether the driver can save what that hands out is unknown"

_CALLS = (
    Call("cupy", ("cupy.cuda", "cupy.cuda.memory"), "malloc_managed", _cannot_save("CuPy's managed memory")),
    Call("cupy", ("cupy_backends.cuda.api.runtime",), "mallocManaged", _cannot_save("CuPy's managed memory")),
    Call("numba.cuda", ("numba.cuda", "numba.cuda.api"), "managed_array", _cannot_save("numba's managed arrays")),
    Call(_BNB, (_BNB,), "get_paged", _cannot_save("bitsandbytes' paged optimizers (managed memory)")),
    Call("pycuda.driver", ("pycuda.driver",), "managed_empty", _cannot_save("PyCUDA's managed arrays")),
    Call("cuda.bindings.driver", ("cuda.bindings.driver",), "cuMemAllocManaged", _BINDINGS),
    Call("cuda.bindings.runtime", ("cuda.bindings.runtime",), "cudaMallocManaged", _BINDINGS),
    Call("cuda.cuda", ("cuda.cuda",), "cuMemAllocManaged", _BINDINGS),  # their names before 12.8
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
_VARIABLES = (  # that make a package use managed memory: the values that say so (none: any), and the packages that obey
    ("TF_FORCE_UNIFIED_MEMORY", ("1", "true"), ("tensorflow", "jax")),
    ("GGML_CUDA_ENABLE_UNIFIED_MEMORY", (), ("llama_cpp",)),
    ("FLAGS_use_cuda_managed_memory", ("1", "true", "yes", "on", "t", "y"), ("paddle",)),
)
_INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def _profiled_with(profiler: str) -> str:
    return (
        f"it was profiled with {profiler}: NVIDIA's profiling interface (CUPTI) stays attached until the kernel restarts, and the driver "
        "cannot save a process with it"
    )


def _traces_cuda(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch's `_prepare_profiler(config, activities)` or `_enable_profiler` is about CUDA."""
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
    Call("jax._src.profiler", _JAX_MODULES, "start_server", _JAX),  # traces whenever TensorBoard asks
    Call(_TF_PROFILER, (_TF_PROFILER,), "start", _TENSORFLOW),
    Call(_TF_PROFILER, (_TF_PROFILER,), "start_server", _TENSORFLOW),
    Call(_PROTON[0], _PROTON, "start", _profiled_with("Triton's Proton")),
    Call("cupti.cupti", ("cupti.cupti",), "subscribe", _CUPTI),
    Call("cupti.cupti", ("cupti.cupti",), "activity_enable", _CUPTI),
)


class CheckpointBlockers:
    """Watches one process. `report` gets a sentence, once, in the thread that makes the first such call."""

    def __init__(self, report: Callable[[str], None], hooks: ImportHooks | None = None) -> None:
        self._report = report
        self.hooks = hooks or ImportHooks()
        self.seen = ""  # the first finding, a sentence

    def install(self) -> None:
        for call in (*_CALLS, *PROFILERS):
            self.hooks.after(call.package, lambda _module, call=call: note_calls(call, self._note))  # type: ignore[misc]

    def reason(self) -> str:
        """Return why the process cannot be checkpointed, a sentence, or "". For the kernel's idle main loop: it calls the frameworks."""
        if self.seen:
            return self.seen
        for find in (_rmm, _torch, _fbgemm, _unified, injected):
            try:
                found = find()
            except (RuntimeError, AttributeError, OSError):
                continue  # an error of CUDA's; a module that is half imported, or of another version; a /proc that cannot be read
            if found:
                return found
        return ""

    def _note(self, sentence: str) -> None:
        if not self.seen:
            self.seen = sentence
            self._report(sentence)


def _is_managed(resource: Any) -> bool:  # noqa: ANN401 - one of rmm's memory resources
    """Whether a memory resource of rmm, or one that it gets its memory from, allocates managed memory."""
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
    """An operator that was called from Python is an attribute of its namespace from then on (torch's `_OpNamespace`)."""
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
    """Return why the process cannot be saved if a variable of the environment injected a profiler's library into it, else ""."""
    for variable in _INJECTIONS:
        path = os.environ.get(variable)
        if path and (library := os.path.basename(os.path.realpath(path))) in mapped_files():  # noqa: PTH119 - cheap to import
            return (
                f"the profiler {library} is attached to it ({variable}), and the driver cannot save a process with it"
            )
    return ""
