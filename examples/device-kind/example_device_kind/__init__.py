"""An example of a kind of device: copy it, and put your driver's calls in the place of the simulated ones.

A kind is a module (or an object) with two functions. What they return implements `fractional_gpu.gpu.interface`: a `Monitor`, which the
broker asks several times a second, and a `Checkpointer`, which only the checkpoint worker has. Both run in processes of their own, so what
they share lies with the driver; here that is the simulated host in the folder `$EXAMPLE_DEVICES`.
"""

import os
from pathlib import Path

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, Monitor
from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer
from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor

KIND = "example"


class ExampleMonitor(SimulatedMonitor):
    """Reads the devices. A vendor's own asks the management library in each of these methods instead."""

    @property
    def kind(self) -> str:
        """Return the name that status and metrics show. "simulated" is for devices that are none."""
        return KIND


def open_monitor() -> Monitor:
    """Return what reads the devices. Raises GPUError."""
    return ExampleMonitor(_folder())


def open_checkpointer() -> Checkpointer:
    """Return what saves and restores the state of other processes. Raises GPUError."""
    return SimulatedCheckpointer(_folder())


def _folder() -> Path:
    folder = os.environ.get("EXAMPLE_DEVICES", "")
    if not folder:
        # An error says what is wrong and what to do: the broker repeats it to the person who starts a kernel.
        raise GPUError(GPUErrorCode.NOT_INITIALIZED, "EXAMPLE_DEVICES is not set: name the folder of the example's devices there")
    return Path(folder)
