"""The environment in which our own processes start CUDA's driver: the checkpoint worker, and the process on which checkpoints are tried.

The driver reads variables that change what it is to a process, and a broker inherits them from whatever started it: a notebook's kernel, a
job, a container. None of them may reach the worker:

- `CUDA_*`: which devices it sees and in which order, whether it is a client of MPS, what library is injected into it
  (`CUDA_INJECTION64_PATH`), how it loads and launches, and HAMi-core's limits. No device is hidden and nothing is limited without them.
- `NVTX_INJECTION*`, `NSYS_*`, `CUPTI_*`: profilers, with which the driver does not checkpoint.
- `LD_PRELOAD`, `LD_AUDIT`: a library between the process and the driver, such as HAMi-core's.

A process without any variable is a client of MPS all the same where a control daemon serves the default folder, /tmp/nvidia-mps. CUDA's
documentation has the driver go on without MPS where it cannot connect, so `CUDA_MPS_PIPE_DIRECTORY` names a folder that cannot exist:
nothing can be made in /proc.
"""

from collections.abc import Mapping, MutableMapping
from typing import Final

__all__ = ["PRELOAD", "PRELOADED_FOR_US", "clean", "cleaned"]

PRELOAD: Final = "LD_PRELOAD"
PRELOADED_FOR_US: Final = "JUPYTER_GPU_PRELOAD"
"""Names what the broker put into PRELOAD for the sharing mode of a pool, so that no process of ours inherits it."""

_PREFIXES: Final = ("CUDA_", "CUPTI_", "NSYS_", "NVTX_INJECTION")
_NAMES: Final = frozenset({PRELOAD, "LD_AUDIT"})
_NO_MPS: Final = {"CUDA_MPS_PIPE_DIRECTORY": "/proc/self/without-mps"}


def cleaned(environment: Mapping[str, str], *, keep: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment to start such a process with; what is in `keep` is in it as it is there."""
    kept = {name: value for name, value in environment.items() if not _is_driver_s(name)}
    return {**kept, **_NO_MPS, **(keep or {})}


def clean(environment: MutableMapping[str, str], *, keep: tuple[str, ...] = ()) -> None:
    """Do so in place, before the driver starts in this process; variables named in `keep` stay.

    What was preloaded is loaded already: that can only be kept out by `cleaned`.
    """
    for name in [name for name in environment if _is_driver_s(name) and name not in keep]:
        del environment[name]
    environment.update(_NO_MPS)


def _is_driver_s(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES
