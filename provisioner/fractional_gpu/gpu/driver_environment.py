"""Cleans the environment in which the checkpoint worker and the probe process start the CUDA driver.

A broker started from a kernel, job or container can inherit variables that change how the driver behaves. The worker gets none of these:

- `CUDA_*`, which control device selection, MPS, injected libraries and HAMi-core's limits;
- `NVTX_INJECTION*`, `NSYS_*` and `CUPTI_*`, which load profilers that prevent the driver from checkpointing;
- `LD_PRELOAD` and `LD_AUDIT`, which preload libraries.

A process also becomes an MPS client if an MPS control daemon serves the default folder. If the driver cannot connect to a daemon, it works
without MPS, so `CUDA_MPS_PIPE_DIRECTORY` is set to a path in /proc, where no folder can be created.
"""

from collections.abc import Mapping, MutableMapping
from typing import Final

PRELOAD: Final = "LD_PRELOAD"
PRELOADED_FOR_US: Final = "JUPYTER_GPU_PRELOAD"
"""The variable that names the library the broker preloads into kernels for a pool's sharing mode. Our own processes must not load it."""

_PREFIXES: Final = ("CUDA_", "CUPTI_", "NSYS_", "NVTX_INJECTION")
_NAMES: Final = frozenset({PRELOAD, "LD_AUDIT"})
NO_MPS: Final = {"CUDA_MPS_PIPE_DIRECTORY": "/proc/self/without-mps"}


def cleaned(environment: Mapping[str, str], *, keep: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if not _affects_driver(name)}
    return {**kept, **NO_MPS, **(keep or {})}


def clean(environment: MutableMapping[str, str], *, keep: tuple[str, ...] = ()) -> None:
    """Clean this process's environment before the driver starts. Libraries that are already preloaded stay loaded; see `cleaned`."""
    for name in [name for name in environment if _affects_driver(name) and name not in keep]:
        del environment[name]
    environment.update(NO_MPS)


def _affects_driver(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES
