"""Is managed (unified) memory in use? A checkpoint cannot save it, so the broker must know before it tries.

Nothing is imported for this. What can be seen:

- CuPy's `malloc_managed` and numba's `managed_array`: their names are wrapped when the package is imported (an entry of `sys.meta_path`
  sees that; it costs one dictionary lookup per module that is imported), and told about at the first call.
- RAPIDS rmm: the chain of the current memory resource is looked at before a suspend.
- torch with a pluggable allocator, which may do anything: likewise.
- TensorFlow and JAX told by `TF_FORCE_UNIFIED_MEMORY` to use it.

What calls the driver or the runtime directly (ctypes, an extension module) is not seen.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["ManagedMemory"]

_WATCHED = {  # by package: where the function may be found, and what a person calls it
    "cupy": (("cupy.cuda", "cupy.cuda.memory"), "malloc_managed", "CuPy's managed memory"),
    "numba.cuda": (("numba.cuda", "numba.cuda.api"), "managed_array", "numba's managed arrays"),
}
_MARK = "__noted_by_jupyter_gpu__"  # that a function is wrapped already: numba's has a wrapper of numba's own
_MOST_RESOURCES = 20  # of a chain of rmm's


class ManagedMemory:
    """Watches one process. `tell` takes a sentence, once, from whatever thread allocates."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.seen = ""  # what was allocated, a sentence

    def install(self) -> None:
        """Watch from now on."""
        for package in _WATCHED:
            if package in sys.modules:
                self._wrap(package)
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Stop watching imports; what is wrapped stays."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def reason(self) -> str:
        """Return why the process should not be checkpointed, a sentence, or "". For the kernel's idle main loop: it asks the frameworks."""
        if self.seen:
            return self.seen
        for look in (_rmm, _torch, _unified):
            try:
                found = look()
            except (
                RuntimeError,
                AttributeError,
            ):  # CUDA's errors; a module that is still being imported, or is another version
                continue
            if found:
                return found
        return ""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib's signature
        target: ModuleType | None = None,  # noqa: ARG002 - importlib's signature
    ) -> ModuleSpec | None:
        """Importlib asks every finder for every module; this one finds nothing itself."""
        if name not in _WATCHED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            self._hook(spec.loader, name)
        return spec

    def _hook(self, loader: Any, name: str) -> None:  # noqa: ANN401 - a loader is whatever importlib found
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as it was before anybody looks at it
            execute(module)
            self._wrap(name)

        loader.exec_module = exec_module

    def _wrap(self, package: str) -> None:
        modules, function, what = _WATCHED[package]
        for name in modules:
            module = sys.modules.get(name)
            original = getattr(module, function, None)
            if module is not None and callable(original) and not hasattr(original, _MARK):
                setattr(module, function, self._noting(original, what))

    def _noting(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def allocate(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the framework's function takes and gives
            if not self.seen:
                self.seen = f"it uses {what}, which the driver cannot save"
                self._tell(self.seen)
            return original(*args, **kwargs)

        setattr(allocate, _MARK, True)
        return allocate


def _rmm() -> str:
    rmm = sys.modules.get("rmm")
    if rmm is None:
        return ""
    resource: Any = rmm.mr.get_current_device_resource()
    for _ in range(_MOST_RESOURCES):
        if resource is None:
            break
        if "Managed" in type(resource).__name__:
            return "rmm allocates managed memory, which the driver cannot save"
        resource = getattr(resource, "upstream_mr", None)
    return ""


def _torch() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() != "pluggable":
        return ""
    return "torch uses an allocator that was plugged in, of which nobody knows whether the driver can save what it hands out"


def _unified() -> str:
    if os.environ.get("TF_FORCE_UNIFIED_MEMORY", "").lower() not in ("1", "true"):
        return ""
    loaded = [name for name in ("tensorflow", "jax") if name in sys.modules]
    return (
        f"TF_FORCE_UNIFIED_MEMORY makes {loaded[0]} use managed memory, which the driver cannot save" if loaded else ""
    )
