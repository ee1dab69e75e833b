"""Kernelspecs for what the pools of a broker offer."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from fractional_gpu.core.model import PoolSpec
from fractional_gpu.jupyter.kernelspecs import (
    InstalledSpec,
    install,
    list_installed,
    remove,
)
from fractional_gpu.protocol.messages import HostStatus

__all__ = ["ANY_OFFERS_MILLI", "install_offers", "simulated_devices"]

ANY_OFFERS_MILLI: tuple[int, ...] = PoolSpec(name="", devices=()).fractions_milli
"""What is installed for a pool that offers any fraction: the usual ones."""


def install_offers(
    pools: Mapping[str, Sequence[int]], *, directory: str, simulated: bool, simulate: str | None = None
) -> list[InstalledSpec]:
    """Make the folder of kernelspecs hold exactly what the pools offer (milli-GPU each; none: any).

    Raises what `install` and `remove` raise.
    """
    installed: list[InstalledSpec] = []
    for pool, offered in pools.items():
        installed += install(
            pool, offered or ANY_OFFERS_MILLI, directory=directory, simulated=simulated, simulate=simulate
        )
    names = {spec.name for spec in installed}
    stale = [spec.name for spec in list_installed(directory=directory) if spec.name not in names]
    remove(stale, directory=directory)
    return installed


def simulated_devices(status: HostStatus) -> str | None:
    """Return what makes a broker simulate the same devices, such as 1x2048MiB; None where they are real."""
    if not status.simulated:
        return None
    sizes = [device.memory_mib for device in sorted(status.devices, key=lambda device: device.index)]
    return ",".join(f"{len(list(same))}x{mib}MiB" for mib, same in groupby(sizes)) or None
