"""Kernelspecs for what the pools of a broker offer."""

from collections.abc import Mapping, Sequence

from provisioner.core.model import PoolSpec
from provisioner.kernelspecs import InstalledSpec, install, list_installed, remove

__all__ = ["ANY_OFFERS_MILLI", "install_offers"]

ANY_OFFERS_MILLI: tuple[int, ...] = PoolSpec(name="", devices=()).fractions_milli
"""What is installed for a pool that offers any fraction: the usual ones."""


def install_offers(pools: Mapping[str, Sequence[int]], *, directory: str, simulated: bool) -> list[InstalledSpec]:
    """Make the folder of kernelspecs hold exactly what the pools offer (milli-GPU each; none: any).

    Raises what `install` and `remove` raise.
    """
    installed: list[InstalledSpec] = []
    for pool, offered in pools.items():
        installed += install(pool, offered or ANY_OFFERS_MILLI, directory=directory, simulated=simulated)
    names = {spec.name for spec in installed}
    stale = [spec.name for spec in list_installed(directory=directory) if spec.name not in names]
    remove(stale, directory=directory)
    return installed
