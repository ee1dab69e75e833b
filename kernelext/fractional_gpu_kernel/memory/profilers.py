"""Is a profiler attached to this process? A checkpoint does not work with NVIDIA's profiling interface (CUPTI) in use.

What is no sign: `libcupti` among the loaded libraries (torch and JAX link it, used or not), and `cudaProfilerStart`, by whatever name
(`torch.cuda.profiler`, `cupy.cuda.profiler`, `numba.cuda.profile_start`), which does nothing unless a tool is injected.

What is one:
- a call that makes a framework subscribe to CUPTI: the profilers of torch (with CUDA activities), JAX, TensorFlow and Triton, and
  cupti-python. Whether a framework lets go of CUPTI afterwards cannot be seen (torch does so only where `TEARDOWN_CUPTI` says so, and
  then at some later CUDA call), so the process counts as attached until it ends;
- a library that `CUDA_INJECTION64_PATH` makes the driver load (Nsight Systems, Nsight Compute), if it is loaded. The broker looks for
  the libraries of these tools in all processes of the kernel (`fractional_gpu.broker.swap.checkpointability`).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fractional_gpu_kernel.memory.imports import Call

__all__ = ["PROFILERS", "injected"]

_INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def _sentence(profiler: str) -> str:
    return (
        f"it was profiled with {profiler}: NVIDIA's profiling interface (CUPTI) stays attached until the kernel restarts, and the driver "
        "cannot save a process with it"
    )


def _traces_cuda(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch's `_prepare_profiler(config, activities)` or `_enable_profiler` is about CUDA."""
    activities = args[1] if len(args) > 1 else kwargs.get("activities", ())
    return any(getattr(activity, "name", "") == "CUDA" for activity in activities)


_TORCH, _JAX = _sentence("torch's profiler"), _sentence("JAX's profiler")
_TENSORFLOW, _CUPTI = _sentence("TensorFlow's profiler"), _sentence("cupti-python")
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
    Call(
        "triton.profiler.profile", ("triton.profiler.profile", "triton.profiler"), "start", _sentence("Triton's Proton")
    ),
    Call("cupti.cupti", ("cupti.cupti",), "subscribe", _CUPTI),
    Call("cupti.cupti", ("cupti.cupti",), "activity_enable", _CUPTI),
)


def injected(maps: Path = Path("/proc/self/maps")) -> str:
    """Return why the process cannot be saved if a variable of the environment injected a profiler's library into it, else ""."""
    libraries = {
        variable: Path(os.environ.get(variable, "")).resolve().name
        for variable in _INJECTIONS
        if os.environ.get(variable)
    }
    if not libraries:
        return ""
    with maps.open(encoding="utf-8", errors="surrogateescape") as lines:
        loaded = {line.rstrip("\n").rpartition("/")[2] for line in lines}
    for variable, library in libraries.items():
        if library in loaded:
            return (
                f"the profiler {library} is attached to it ({variable}), and the driver cannot save a process with it"
            )
    return ""
