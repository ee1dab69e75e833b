"""Which devices this broker has: the simulated ones it was asked for, or the machine's own."""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from provisioner.gpu.interface import DeviceInfo, Monitor
from provisioner.gpu.open import open_monitor
from provisioner.gpu.simulated.host import choose_directory, create, destroy
from provisioner.gpu.simulated.store import SimulatedHostError

__all__ = ["Backend", "BackendError", "open_backend"]

log = logging.getLogger(__name__)


class BackendError(Exception):
    """There are no devices to manage; the sentence says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """An open monitor, its devices, and the name under which a checkpoint worker opens the same."""

    name: str  # "nvidia" or "simulated:DIR"
    monitor: Monitor
    devices: tuple[DeviceInfo, ...]
    folder: Path | None  # of the simulated host

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated."""
        return self.monitor.kind == "simulated"

    def remove_if_unused(self) -> None:
        """Remove a simulated host that no process uses any more, and its contents with it."""
        if self.folder is not None:
            try:
                destroy(self.folder)
            except SimulatedHostError as error:
                log.info("the simulated host stays: %s", error)


@contextmanager
def open_backend(simulate: str | None, socket: str) -> Iterator[Backend]:
    """Open the devices. Raises BackendError, ValueError (a bad `simulate`) or GPUError."""
    if simulate is None:
        name, folder = "nvidia", None
    else:
        folder = simulated_folder(socket)
        try:
            create(folder, simulate)
        except (SimulatedHostError, ValueError) as error:
            raise BackendError(str(error)) from None
        name = f"simulated:{folder}"
    monitor = open_monitor(name)
    try:
        devices = tuple(monitor.devices())
        if not devices:
            why = getattr(monitor, "why_none", "") or "the driver reports none"
            raise BackendError(f"no GPU was found: {why}; to try things out without one, add --simulate 1x2GiB")
        yield Backend(name=name, monitor=monitor, devices=devices, folder=folder)
    finally:
        monitor.close()


def simulated_folder(socket: str) -> Path:
    """Return where the simulated host of the broker on this socket lives: the same after a restart."""
    return choose_directory(hashlib.sha256(os.path.realpath(socket).encode()).hexdigest()[:12])
