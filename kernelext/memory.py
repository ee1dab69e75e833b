"""Telling frameworks their memory limit, without importing any of them.

A lease's cap is everything that is charged to its process tree, the CUDA context included. A framework limits only what its own
allocator takes, so it is told the cap less `CONTEXT_MIB`. These limits keep honest programs within their share and give them a
framework's own out-of-memory error; what allocates past them is seen by the broker.

- JAX, CuPy and TensorFlow read environment variables when they are imported: set at load and at each grant, where the user has not
  set them.
- torch has a call, `torch.cuda.set_per_process_memory_fraction`, which would initialise CUDA. It is handed to torch's own queue of
  things to do when CUDA is first initialised, right after torch is imported (an entry of `sys.meta_path` sees that; until then it
  costs one string comparison per module that is imported).
- A cap that changes (a resize) reaches torch and CuPy where they are loaded already: on the kernel's main loop while no cell runs, or
  before the next cell. JAX and TensorFlow read theirs once: there a changed cap needs a restart of the kernel to be felt.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["CONTEXT_MIB", "MemoryLimits", "framework_mib"]

MEMORY = "JUPYTER_GPU_MEMORY_MIB"
DEVICE = "JUPYTER_GPU_DEVICE_MIB"
CUPY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"

CONTEXT_MIB = 512
"""What a CUDA context with the kernels of a framework and cuBLAS's workspace takes; 300 to 600 MiB on data-centre GPUs."""


def framework_mib(cap_mib: int) -> int:
    """Return what a framework's allocator may take of a cap, MiB: the cap less the context, and at least half of it."""
    return max(cap_mib - CONTEXT_MIB, cap_mib // 2, 1)


class MemoryLimits:
    """The limits of this process. Not thread-safe by itself: the gate calls `bind` under its lock."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._ours: dict[str, str] = {}  # what we set, so that a resize may change it and a user's own setting stays
        self._cap_mib = _positive(environment.get(MEMORY))
        self._told_mib = self._cap_mib  # what frameworks that are loaded work with; 0: torch has to be looked at
        self._finder = _TorchFinder(self)

    def install(self) -> None:
        """Set what can be set now, and watch for torch."""
        self._hint()
        torch = sys.modules.get("torch")
        if torch is not None and not _is_half_imported(torch):
            self.torch_imported(torch)
        elif self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def uninstall(self) -> None:
        """Stop watching; limits that were set stay."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def bind(self, environment: Mapping[str, str]) -> None:
        """Take the variables that come with a grant, then renew the hints. Values that an environment cannot hold are left out."""
        for name, value in environment.items():
            if name and "=" not in name and "\0" not in name + value:
                self._environment[name] = value
        self._cap_mib = _positive(self._environment.get(MEMORY))
        self._hint()

    @property
    def is_stale(self) -> bool:
        """Whether loaded frameworks work with another cap than the lease's present one."""
        return self._told_mib != self._cap_mib

    @property
    def is_lowered(self) -> bool:
        """Whether loaded frameworks work with a larger cap than the lease's present one."""
        return bool(self._told_mib and self._cap_mib and self._told_mib > self._cap_mib)

    @property
    def cap_mib(self) -> int | None:
        """The cap of the process tree, MiB; None: no cap."""
        return self._cap_mib

    def torch_imported(self, torch: ModuleType) -> None:
        """Torch is complete: limit it when it initialises CUDA (at once if it has)."""
        cuda = getattr(torch, "cuda", None)
        when_initialised = getattr(cuda, "_lazy_call", None)
        if self.cap_mib is None or cuda is None:
            return
        if when_initialised is not None:
            when_initialised(lambda: self._limit(torch))
        elif cuda.is_initialized():
            self._limit(torch)
        else:
            self._told_mib = 0  # stale: looked at again before each cell

    def refresh(self) -> None:
        """Apply a changed cap to what is loaded. For the thread that runs cells, when `is_stale` says so.

        Raises nothing of CUDA's (a device-side assert spoils the context for good): cells go on, and `is_stale` stays.
        """
        try:
            is_told = self._tell_loaded()
        except (RuntimeError, AttributeError):  # CUDA's errors; a module that is still being imported
            return
        if is_told:
            self._told_mib = self._cap_mib

    def _tell_loaded(self) -> bool:
        """Return whether everything that is loaded has been told, or will be. Raises what CUDA raises."""
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and not _is_half_imported(torch):
            if torch.cuda.is_initialized():
                self._limit(torch)
            elif not hasattr(torch.cuda, "_lazy_call"):
                return False  # there is nothing that would limit it later: look again before the next cell
        if cupy is not None and self._told_mib and not _is_half_imported(cupy):
            self._limit_cupy(cupy)
        return True

    def _limit(self, torch: ModuleType) -> None:
        cap = self.cap_mib
        if cap is None:
            return
        cuda: Any = torch.cuda
        for index in range(cuda.device_count()):
            total_mib = cuda.get_device_properties(index).total_memory // 2**20
            cuda.set_per_process_memory_fraction(min(1.0, framework_mib(cap) / max(total_mib, 1)), index)

    def _limit_cupy(self, cupy: Any) -> None:  # noqa: ANN401 - CuPy is not ours to import
        """CuPy read its limit from the environment when it was imported; a user's own limit there stays."""
        cap = self.cap_mib
        if cap is not None and self._environment.get(CUPY_LIMIT) == self._ours.get(CUPY_LIMIT):
            cupy.get_default_memory_pool().set_limit(size=framework_mib(cap) * 2**20)

    def _hint(self) -> None:
        cap = self.cap_mib
        if cap is None:
            return
        mib = framework_mib(cap)
        hints = {
            CUPY_LIMIT: str(mib * 2**20),  # bytes
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        }
        device_mib = _positive(self._environment.get(DEVICE))
        if device_mib is not None:
            hints["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{min(1.0, mib / device_mib):.4f}"
        for name, value in hints.items():
            if self._environment.get(name) == self._ours.get(name):  # absent, or as we left it
                self._environment[name] = self._ours[name] = value


class _TorchFinder:
    """Finds nothing itself; lets the import of torch end with `torch_imported`."""

    def __init__(self, limits: MemoryLimits) -> None:
        self._limits = limits

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib's signature
        target: ModuleType | None = None,  # noqa: ARG002 - importlib's signature
    ) -> ModuleSpec | None:
        """Importlib asks every finder for every module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec("torch")
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            self._hook(spec.loader)
        return spec

    def _hook(self, loader: Any) -> None:  # noqa: ANN401 - a loader is whatever importlib found
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as it was before anybody looks at it
            execute(module)
            self._limits.uninstall()
            self._limits.torch_imported(module)

        loader.exec_module = exec_module


def _is_half_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _positive(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and int(text) > 0 else None
