"""Gives cached device memory back before a suspend: memory that is free need not be copied.

Only frameworks that are loaded and have initialised CUDA are called, and only on the kernel's idle main loop: a garbage collection runs
finalisers, and those belong to the thread that runs the user's code.

A collection visits every container object, which takes tens of milliseconds in a bare kernel and more with large libraries. It is made
only where a package is loaded whose Python objects hold device memory.
"""

import gc
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from fractional_gpu_kernel.memory.limits import reserved_mib

__all__ = ["TIME_LIMIT_S", "Shrinker", "free_caches"]

_HOLDERS = frozenset(
    {
        "torch",
        "cupy",
        "jax",
        "tensorflow",
        "numba.cuda",
        "paddle",
        "mxnet",
        "warp",
        "taichi",
        "pycuda.driver",
        "cuda.core",
        "rmm",
        "xgboost",
        "tensorrt",
        "onnxruntime",
        "llama_cpp",
        "fractional_gpu.gpu.simulated.cuda",
    }
)
"""Packages whose Python objects own device memory (those of `cuda.bindings` are numbers). One that is missing costs bytes, never state."""

TIME_LIMIT_S = 8.0  # less than a broker waits for the answer


def free_caches() -> str:
    """Collect garbage that may hold device memory and empty the caching allocators; returns what was done, for the broker's log.

    Raises nothing of CUDA's.
    """
    done = []
    if not _HOLDERS.isdisjoint(sys.modules):
        gc.collect()
        done.append("gc")
    for name, free in (("torch", _free_torch), ("cupy", _free_cupy)):
        if name in sys.modules:
            try:
                free()
            except (RuntimeError, AttributeError) as error:  # CUDA's errors; a module that is still being imported
                done.append(f"{name} failed: {error}"[:200])
            else:
                done.append(name)
    return ", ".join(done) or "nothing that holds device memory is loaded"


def _free_torch() -> None:
    cuda = sys.modules["torch"].cuda
    if cuda.is_initialized():
        cuda.empty_cache()


def _free_cupy() -> None:
    cupy = sys.modules["cupy"]
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()


class RunningCells(Protocol):
    """The part of the gate that is used here: whether a cell runs."""

    @property
    def is_running(self) -> bool: ...


class Shrinker:
    """Runs `free_caches` on the main loop, or answers why not.

    `schedule` hands a callback to the main loop and returns whether there is one. `why_not`, called on the main loop, returns why the
    process cannot be saved at all; the answer is then "managed". While a cell `waits_for_input`, nothing is freed, and a suspend may go on.
    """

    def __init__(
        self,
        schedule: Callable[[Callable[[], None]], bool],
        gate: RunningCells,
        time_limit_s: float = TIME_LIMIT_S,
        *,
        why_not: Callable[[], str] = str,
        waits_for_input: Callable[[], bool] = bool,
    ) -> None:
        self._why_not = why_not
        self._waits_for_input = waits_for_input
        self._schedule = schedule
        self._gate = gate
        self._time_limit_s = time_limit_s

    def shrink(self, answer: Callable[[str, str], None]) -> None:
        """Call `answer(word, detail)` once, from some thread: "done", or "busy" if the main loop was not free in time. Never blocks."""
        if self._gate.is_running:
            answer("busy", "a cell runs")
            return
        if self._waits_for_input():  # this cell holds the main loop, so nothing else runs there
            why_not = self._why_not()
            answer("managed" if why_not else "done", why_not or "nothing freed: a cell waits for input")
            return
        late = f"the main loop was not free within {self._time_limit_s:g} s"
        once = _Once(answer)
        timer = threading.Timer(self._time_limit_s, once, ("busy", late))
        timer.daemon = True
        timer.start()
        if not self._schedule(lambda: self._on_main_loop(once, timer)):
            timer.cancel()
            once("done", "nothing freed: this kernel has no main loop")

    def _on_main_loop(self, once: "_Once", timer: threading.Timer) -> None:
        if once.is_spent:
            return  # too late: the answer was "busy"
        if self._gate.is_running:
            once("busy", "a cell runs")
        elif why_not := self._why_not():
            once("managed", why_not)
        else:
            once("done", _freed())
        timer.cancel()


def _freed() -> str:
    """Free caches; return what was done, and what the allocators hold now, from which the broker learns the size of a context."""
    done, held_mib = free_caches(), reserved_mib()
    return done if held_mib is None else f"{done}, reserved_mib={held_mib}"


class _Once:
    """Passes the first answer on and drops the others."""

    def __init__(self, answer: Callable[[str, str], None]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self.is_spent = False

    def __call__(self, word: str, detail: str) -> None:
        with self._lock:
            if self.is_spent:
                return
            self.is_spent = True
        self._answer(word, detail)
