"""The doctor's checks of the installation: versions, configuration, simulated devices."""

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from fractional_gpu import __version__
from fractional_gpu.commands.doctor.report import (
    Finding,
    note,
    ok,
    problem,
)
from fractional_gpu.config import ConfigError, Settings, load
from fractional_gpu.core.units import format_memory
from fractional_gpu.gpu.simulated.host import parse_devices
from fractional_gpu.gpu.simulated.store import SimulatedHostError

__all__ = ["check_settings", "check_simulation", "check_versions"]

_PACKAGES: Final = ("jupyter_client", "ipykernel", "jupyterlab", "jupyterhub", "nvidia-ml-py", "cuda-bindings")
_LOAD: Final = "no kernelspec of ours can start"


def check_versions() -> Iterator[Finding]:
    """Return the versions that are installed here, and whether Jupyter finds the provisioner."""
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
    """Return whether brokers that start here have simulated devices. `simulate` is `$JUPYTER_GPU_SIMULATE`."""
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
    """Return the broker's settings, None if they cannot be read, and the findings about them."""
    try:
        settings = load()
    except ConfigError as error:
        return None, [problem("configuration", str(error), "mend it: no broker starts before that")]
    files = ", ".join(str(file) for file in settings.files) or "no jupyter_gpu_config.py: everything has its default"
    return settings, [ok("configuration", f"{files}; pools: {', '.join(pool.name for pool in settings.pools)}")]
