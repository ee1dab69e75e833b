"""The doctor's checks of NVIDIA's driver and devices, through NVML: nothing is changed and no CUDA context is created.

No driver and no device are a warning, not an error: without them everything works but real GPUs.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fractional_gpu.commands.doctor.memory import SYS, check_nodes, pci_address
from fractional_gpu.commands.doctor.report import Finding, note, ok, problem, warning
from fractional_gpu.config import Settings
from fractional_gpu.core.model import Sharing
from fractional_gpu.core.units import format_memory
from fractional_gpu.gpu.interface import DeviceInfo, GPUError
from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor
from fractional_gpu.gpu.nvidia.support import (
    MOVING_CUDA_VERSION,
    driver_refusal,
    driver_warnings,
    sharing_advice,
    sharing_refusal,
    why_no_bindings,
)
from fractional_gpu.host.process import PROC

NO_GPU: Final = "no GPU was found"
SIMULATE: Final = (
    "install NVIDIA's driver; to try things out without a GPU: jupyter gpu demo, or JUPYTER_GPU_SIMULATE=1x2GiB in the environment of "
    "the Jupyter server"
)
_MPS: Final = "nvidia-cuda-mps"  # the kernel keeps 15 characters of nvidia-cuda-mps-control and nvidia-cuda-mps-server


# Newest first: old libraries lack one, and one may fail where the other works.
_LEVEL_CALLS: Final = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion")
_READ_LEVEL: Final = """
import ctypes
level = ctypes.c_int()
raise SystemExit(ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(level)) or print(level.value))
"""
_READ_S: Final = 20.0


class NvidiaReport:
    def __init__(self, devices: tuple[DeviceInfo, ...], findings: tuple[Finding, ...]) -> None:
        self.devices = devices
        self.findings = findings


def cuda_level() -> int | None:
    """Return the newest CUDA that the driver's own library serves (13010: 13.1), read in a child process; None if it fails."""
    argv = [sys.executable, "-I", "-S", "-c", _READ_LEVEL]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_READ_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    level = done.stdout.strip()
    return int(level) if done.returncode == 0 and level.isdigit() and int(level) else None


def check_nvidia(
    *,
    nvml: ModuleType | None = None,
    bindings: Callable[[], str] = why_no_bindings,
    level: Callable[[], int | None] = cuda_level,
    proc: Path = PROC,
    sysfs: Path = SYS,
) -> NvidiaReport:
    """Return the devices and the findings.

    In tests `nvml` stands in for pynvml, `bindings` for the check of cuda-bindings, `level` for `cuda_level`.
    """
    library = importlib.import_module("pynvml") if nvml is None else nvml
    monitor = NvidiaMonitor(nvml=library, bindings=bindings)
    try:
        try:
            devices = tuple(monitor.devices())
        except GPUError as error:
            return NvidiaReport((), (problem("driver", str(error), "`nvidia-smi` and `dmesg` tell more"),))
        if not devices:
            return NvidiaReport((), tuple(_none(monitor.why_none, bindings())))
        findings = [
            *_driver(library, level),
            *_bindings(bindings()),
            *(_device(device) for device in devices),
            *(finding for device in devices for finding in _modes(library, device)),
            *check_nodes(devices, {one.device_id: pci_address(library, one.device_id) for one in devices}, sysfs),
            *_mps(proc),
        ]
        return NvidiaReport(devices, tuple(findings))
    finally:
        monitor.close()


def mps_processes(proc: Path = PROC) -> list[int]:
    found = []
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "comm").read_text(errors="replace")
            except OSError:  # it ended, or is hidden from this user
                continue
            if command.startswith(_MPS):
                found.append(int(folder.name))
    return sorted(found)


def _none(why: str, no_bindings: str) -> Iterator[Finding]:
    yield warning("driver", f"{NO_GPU}: {why}; kernels with a share of a real GPU do not start here", SIMULATE)
    if no_bindings:
        yield note("cuda-bindings", f"{no_bindings} (needed for real GPUs only)")


def _driver(nvml: ModuleType, read_level: Callable[[], int | None]) -> Iterator[Finding]:
    version: str = nvml.nvmlSystemGetDriverVersion()
    level = next((found for call in _LEVEL_CALLS if (found := _read(nvml, call)[0])), None) or read_level()
    api = f", CUDA {level // 1000}.{level % 1000 // 10}" if level else ""
    refusal = driver_refusal(version)
    if refusal:
        now = f" (now {version}{api})" if api else ""
        yield problem("driver", f"{refusal}{now}", "kernels run, and are never suspended, until it is replaced")
    else:
        yield ok("driver", f"{version}{api}")
    if level and level < MOVING_CUDA_VERSION:
        yield note(
            "moving",
            f"driver {version} cannot bring a kernel's state back on another device than its own",
            "install driver 580 or newer; until then a suspended kernel waits for its own device",
        )
    for sentence in driver_warnings(version):
        yield warning("driver", sentence, "plan for another release, and try it before use")


def _bindings(why_not: str) -> Iterator[Finding]:
    if why_not:
        what, _, command = why_not.partition(": ")
        yield problem("cuda-bindings", f"{what}: kernels cannot be suspended", f"{command} (where the broker runs)")
    else:
        yield ok("cuda-bindings", "installed, and new enough for checkpoints")


def _device(device: DeviceInfo) -> Finding:
    what = f"{device.index}: {device.name}, {format_memory(device.memory_mib)}, {device.device_id}"
    if device.checkpointable:
        return ok("device", what)
    advice = "its kernels stay on it until they end"
    return warning("device", f"{what}; kernels on it cannot be suspended: {device.why_not}", advice)


def _modes(nvml: ModuleType, device: DeviceInfo) -> Iterator[Finding]:
    handle = nvml.nvmlDeviceGetHandleByUUID(device.device_id)
    persistent, _ = _read(nvml, "nvmlDeviceGetPersistenceMode", handle)
    if persistent == 0:
        yield warning(
            "persistence",
            f"device {device.index} is not in persistence mode: the first kernel after a pause waits seconds for the driver",
            f"as root: nvidia-smi -i {device.index} -pm 1, or enable nvidia-persistenced",
        )
    elif persistent == 1:
        yield ok("persistence", f"device {device.index} is in persistence mode")
    mode, _ = _read(nvml, "nvmlDeviceGetComputeMode", handle)
    if refusal := sharing_refusal(device.index, mode):
        yield problem("compute-mode", refusal, sharing_advice(device.index))
    mig, _ = _read(nvml, "nvmlDeviceGetMigMode", handle)
    if mig and mig[0] != mig[1]:
        turn = "on" if mig[1] else "off"
        yield warning(
            "mig",
            f"MIG is to be switched {turn} on device {device.index}",
            "reset the device or reboot, then look again",
        )


def check_pools(settings: Settings | None, devices: Sequence[DeviceInfo], proc: Path = PROC) -> Iterator[Finding]:
    for pool in settings.pools if settings is not None else ():
        if pool.sharing is Sharing.MPS and not mps_processes(proc):
            yield problem(
                "mps-pool",
                f"pool {pool.name!r} shares through MPS, and no MPS control daemon runs: its kernels would have no limit on compute",
                "nvidia-cuda-mps-control -d, as the user of the kernels or as root",
            )
        if pool.sharing is Sharing.MIG and not any(device.device_id.startswith("MIG-") for device in devices):
            yield problem(
                "mig-pool",
                f"pool {pool.name!r} hands out MIG instances, and there is none",
                "as root: nvidia-smi -mig 1, then nvidia-smi mig -cgi PROFILE -C",
            )
        library = pool.hami_library
        if library and not Path(library).is_file():
            yield problem(
                "hami", f"pool {pool.name!r} preloads {library}, and there is no such file", "install HAMi-core there"
            )


def _mps(proc: Path) -> Iterator[Finding]:
    pids = mps_processes(proc)
    if pids:
        yield warning(
            "mps",
            f"MPS runs (process {pids[0]}): its clients cannot be checkpointed",
            "echo quit | nvidia-cuda-mps-control, or keep kernels that are to be suspended away from it",
        )
    else:
        yield ok("mps", "not running")


def _read(nvml: ModuleType, call: str, *arguments: object) -> tuple[Any, str]:
    """Return the reading, or None and the reason: not every device and library supports every call."""
    read = getattr(nvml, call, None)
    if read is None:
        return None, f"this nvidia-ml-py has no {call}"
    try:
        return read(*arguments), ""
    except nvml.NVMLError as error:
        return None, str(error)
