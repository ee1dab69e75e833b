"""The doctor's look at the machine and the installation: host memory, control groups, versions, configuration."""

import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from fractional_gpu import __version__
from fractional_gpu.commands.doctor.finding import (
    Finding,
    note,
    ok,
    problem,
    warning,
)
from fractional_gpu.config import ConfigError, Settings, load
from fractional_gpu.core.units import format_memory
from fractional_gpu.gpu.interface import DeviceInfo
from fractional_gpu.gpu.simulated.host import parse_devices
from fractional_gpu.gpu.simulated.store import SimulatedHostError
from fractional_gpu.host.memory import headroom, system_headroom
from fractional_gpu.host.process import PROC

__all__ = ["check_memory", "check_settings", "check_simulation", "check_versions"]

_PACKAGES: Final = ("jupyter_client", "ipykernel", "jupyterlab", "jupyterhub", "nvidia-ml-py", "cuda-bindings")
_LOAD: Final = "no kernelspec of ours can start"


def check_versions() -> Iterator[Finding]:
    """Say which versions work together here, and whether Jupyter can find the provisioner."""
    found = [f"jupyter-fractional-gpu {__version__}", f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    yield ok("versions", ", ".join(found))
    names = {entry.name for entry in metadata.entry_points(group="jupyter_client.kernel_provisioners")}
    if "fractional-gpu-provisioner" not in names:
        yield problem(
            "provisioner",
            f"Jupyter does not find the kernel provisioner in this environment: {_LOAD}",
            "install jupyter-fractional-gpu with pip in the environment of the Jupyter server",
        )


def check_simulation(simulate: str | None) -> Iterator[Finding]:
    """Say whether brokers that start from here have simulated devices. `simulate` is `$JUPYTER_GPU_SIMULATE`."""
    if not simulate:
        return
    try:
        sizes = parse_devices(simulate)
    except SimulatedHostError as error:
        yield problem("simulated", f"JUPYTER_GPU_SIMULATE: {error}", "set it to such a text, or unset it")
        return
    devices = ", ".join(format_memory(mib) for mib in sizes)
    yield note(
        "simulated", f"JUPYTER_GPU_SIMULATE={simulate}: brokers that start here have simulated devices ({devices})"
    )


def check_settings() -> tuple[Settings | None, list[Finding]]:
    """Return the broker's settings, None where they cannot be read, and what is to be said of them."""
    try:
        settings = load()
    except ConfigError as error:
        return None, [problem("configuration", str(error), "mend it: no broker starts before that")]
    files = ", ".join(str(file) for file in settings.files) or "no jupyter_gpu_config.py: everything has its default"
    return settings, [ok("configuration", f"{files}; pools: {', '.join(pool.name for pool in settings.pools)}")]


def check_memory(devices: Sequence[DeviceInfo], settings: Settings | None, *, proc: Path = PROC) -> Iterator[Finding]:
    """Compare the room for suspended state with what the devices hold, in the system and in this process's control groups."""
    try:
        system, here = system_headroom(proc=proc), headroom(os.getpid(), proc=proc)
    except (OSError, ValueError) as error:
        yield problem(
            "host-memory", f"cannot be read: {error}", "suspending needs it: mend the access to /proc and cgroups"
        )
        return
    total_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    budget_mib = total_mib if settings is None else settings.host_budget_mib(total_mib)
    room_mib = min(system.mib, budget_mib)
    device_mib = sum(device.memory_mib for device in devices)
    what = f"{format_memory(room_mib)} for suspended kernels (free: {format_memory(system.mib)}, budget: {format_memory(budget_mib)})"
    if device_mib > room_mib:
        yield warning(
            "host-memory",
            f"{what}, less than the {format_memory(device_mib)} that the devices hold: not all of it can be suspended at once",
            "raise host_memory in jupyter_gpu_config.py, or add memory: what does not fit stays on the device",
        )
    else:
        yield ok("host-memory", what if not devices else f"{what}, devices hold {format_memory(device_mib)}")
    if here.mib >= system.mib:
        yield ok("cgroup", "no control group limits this process more than the system does")
        return
    largest_mib = max((device.memory_mib for device in devices), default=0)
    limit = f"a process started here can take {format_memory(here.mib)} more, by {here.limited_by}"
    if here.mib < largest_mib:
        yield warning(
            "cgroup",
            f"{limit}: a kernel that fills a device of {format_memory(largest_mib)} cannot be suspended",
            "give the kernels' control group (container, unit, job) the device's memory on top of its own",
        )
    else:
        yield note("cgroup", limit)
