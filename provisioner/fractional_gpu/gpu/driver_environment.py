"""The environment in which the checkpoint worker and the probe process start the CUDA driver.

A broker may inherit variables that change the driver from a kernel, a job or a container. The worker gets none of them: `CUDA_*` (visible
devices, MPS, injected libraries, HAMi-core's limits), profilers, under which the driver does not checkpoint (`NVTX_INJECTION*`,
`NSYS_*`, `CUPTI_*`), and preloaded libraries (`LD_PRELOAD`, `LD_AUDIT`).

A process also becomes an MPS client if a control daemon serves the default folder. The driver does without MPS if it cannot connect, so
`CUDA_MPS_PIPE_DIRECTORY` names a folder that cannot exist: nothing can be created in /proc.
"""

from collections.abc import Mapping, MutableMapping
from typing import Final

PRELOAD: Final = "LD_PRELOAD"
PRELOADED_FOR_US: Final = "JUPYTER_GPU_PRELOAD"
"""Names the library that the broker put into PRELOAD for the sharing mode of a pool, so that no process of this package inherits it."""

_PREFIXES: Final = ("CUDA_", "CUPTI_", "NSYS_", "NVTX_INJECTION")
_NAMES: Final = frozenset({PRELOAD, "LD_AUDIT"})
NO_MPS: Final = {"CUDA_MPS_PIPE_DIRECTORY": "/proc/self/without-mps"}


def cleaned(environment: Mapping[str, str], *, keep: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if not _affects_driver(name)}
    return {**kept, **NO_MPS, **(keep or {})}


def clean(environment: MutableMapping[str, str], *, keep: tuple[str, ...] = ()) -> None:
    """Clean this process's environment before the driver starts. Libraries already preloaded stay: only `cleaned` keeps them out."""
    for name in [name for name in environment if _affects_driver(name) and name not in keep]:
        del environment[name]
    environment.update(NO_MPS)


def _affects_driver(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES
