"""The environment in which the checkpoint worker and the probe process start CUDA's driver.

The driver reads variables that change its behaviour in a process, and a broker inherits them from the process that started it: a
notebook's kernel, a job, a container. None of them may reach the worker:

- `CUDA_*`: the visible devices and their order, MPS, a library to inject (`CUDA_INJECTION64_PATH`), loading and launching, and HAMi-core's
  limits. Without them every device is visible and nothing is limited.
- `NVTX_INJECTION*`, `NSYS_*`, `CUPTI_*`: profilers, with which the driver does not checkpoint.
- `LD_PRELOAD`, `LD_AUDIT`: a library between the process and the driver, such as HAMi-core's.

Even without variables a process is a client of MPS if a control daemon serves the default folder, /tmp/nvidia-mps. According to CUDA's
documentation the driver goes on without MPS if it cannot connect, so `CUDA_MPS_PIPE_DIRECTORY` names a folder that cannot exist: nothing
can be created in /proc.
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
    """Return the environment to start such a process with; the variables in `keep` are added as they are."""
    kept = {name: value for name, value in environment.items() if not _affects_driver(name)}
    return {**kept, **NO_MPS, **(keep or {})}


def clean(environment: MutableMapping[str, str], *, keep: tuple[str, ...] = ()) -> None:
    """Clean this process's environment before the driver starts in it; variables named in `keep` stay.

    A preloaded library is loaded already: only `cleaned` can keep one out.
    """
    for name in [name for name in environment if _affects_driver(name) and name not in keep]:
        del environment[name]
    environment.update(NO_MPS)


def _affects_driver(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES
