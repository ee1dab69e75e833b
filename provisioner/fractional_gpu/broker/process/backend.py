"""Opens the devices of a broker: the simulated ones of its options, or the machine's."""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.interface import DeviceInfo, GPUError, Monitor
from fractional_gpu.gpu.open import open_monitor
from fractional_gpu.gpu.simulated.host import choose_directory, create, destroy
from fractional_gpu.gpu.simulated.store import SimulatedHostError

__all__ = ["Backend", "BackendError", "NoDeviceError", "open_backend"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
# Terminals, server logs and JupyterLab's dialogs show this: an environment variable works for all of them.
_WITHOUT: Final = (
    "to try things out without one, set JUPYTER_GPU_SIMULATE=1x2GiB in the environment before you start Jupyter"
)


class BackendError(Exception):
    """There are no devices to manage; the message says why and what to do."""


class NoDeviceError(BackendError):
    """The machine has no GPU that can be used; `why` is the driver's reason."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no GPU was found: {why}; {_WITHOUT}")
        self.why = why


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
        """Remove a simulated host and its contents, unless a process still uses it."""
        if self.folder is not None:
            try:
                destroy(self.folder)
            except SimulatedHostError as error:
                log.info("the simulated host stays: %s", error)


@contextmanager
def open_backend(simulate: str | None, socket: str, *, patient: bool = False) -> Iterator[Backend]:
    """Open the devices. Raises BackendError, ValueError (a bad `simulate`) or GPUError.

    With `patient`, block until the machine has a device, for as long as it takes: a system service may start before the driver is loaded.
    """
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
        devices = _awaited(monitor) if patient and simulate is None else _found(monitor)
        yield Backend(name=name, monitor=monitor, devices=devices, folder=folder)
    finally:
        monitor.close()


def _found(monitor: Monitor) -> tuple[DeviceInfo, ...]:
    devices = tuple(monitor.devices())
    if not devices:
        why = getattr(monitor, "why_none", "") or "the driver reports none"
        raise NoDeviceError(why)
    return devices


def _awaited(monitor: Monitor) -> tuple[DeviceInfo, ...]:
    """Retry until there is a device: after a second, then after twice as long each time, up to a minute."""
    said = ""
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _found(monitor)
        except (BackendError, GPUError) as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting for a device: %s", said)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def simulated_folder(socket: str) -> Path:
    """Return the folder of the simulated host of the broker on this socket; a restart uses the same one."""
    return choose_directory(hashlib.sha256(os.path.realpath(socket).encode()).hexdigest()[:12])
