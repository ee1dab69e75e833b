"""Sets driver-enforced memory limits on control groups. NVML has supported this since release 615, for cgroup v2 groups.

Setting a limit requires root. A limit covers all device memory (including CUDA contexts) used by the group and the groups below it.
"""

import importlib
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any, Final

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, MemoryLimit
from fractional_gpu.gpu.nvidia.monitor import translated
from fractional_gpu.host.control_groups import mounts

_MIB: Final = 1 << 20
_NO_LIMIT: Final = 2**64 - 1
_NOT_FOUND: Final = 6  # NVML's code: the group has no limit there
_OLD_BINDINGS: Final = "the installed nvidia-ml-py has no memory limits: pip install --upgrade 'nvidia-ml-py>=13.615'"


class NvidiaMemoryLimits:
    """The `MemoryLimits` for NVIDIA devices, used by the checkpoint worker. The constructor raises GPUError if NVML can't be started."""

    def __init__(self, nvml: ModuleType | None = None) -> None:
        self._nvml = importlib.import_module("pynvml") if nvml is None else nvml
        if not hasattr(self._nvml, "nvmlDeviceSetMemoryLimits_v1"):
            raise GPUError(GPUErrorCode.NOT_SUPPORTED, _OLD_BINDINGS)
        with translated(self._nvml, "starting NVML"):
            self._nvml.nvmlInit()

    def set(self, device_id: str, group: str, mib: int | None) -> None:
        limits = self._nvml.c_nvmlSetMemoryLimits_v1_t()
        limits.nameSpace = _folder(group)
        limits.softLimit = 0  # a soft limit would guarantee memory to the group, and evict other processes
        limits.hardLimit = _NO_LIMIT if mib is None else mib * _MIB
        with translated(self._nvml, f"limiting the memory of control group {group}"):
            self._nvml.nvmlDeviceSetMemoryLimits_v1(self._handle(device_id), limits)

    def read(self, device_id: str, group: str) -> MemoryLimit | None:
        limits = self._nvml.c_nvmlGetMemoryLimits_v1_t()
        limits.nameSpace = _folder(group)
        with translated(self._nvml, f"reading the memory limit of control group {group}"):
            try:
                self._nvml.nvmlDeviceGetMemoryLimits_v1(self._handle(device_id), limits)
            except self._nvml.NVMLError as error:
                if error.value == _NOT_FOUND:
                    return None
                raise
        if limits.hardLimit == _NO_LIMIT:
            return None
        return MemoryLimit(hard_mib=limits.hardLimit // _MIB, used_mib=-(-limits.currentUsed // _MIB))

    def _handle(self, device_id: str) -> Any:  # noqa: ANN401 - the bindings have no types
        return self._nvml.nvmlDeviceGetHandleByUUID(device_id)


def _folder(group: str) -> bytes:
    path = PurePosixPath(group)
    folders = [mount.folder(path) for mount in mounts() if mount.version == 2]
    found = next((folder for folder in folders if folder is not None and folder.is_dir()), None)
    if found is None:
        raise GPUError(GPUErrorCode.OPERATING_SYSTEM, f"control group {group} is not in a mounted cgroup v2 hierarchy")
    return str(found).encode()
