"""NVIDIA's devices: `NvidiaMonitor` reads them (for the broker), `NvidiaCheckpointer` drives processes (for the worker)."""

from provisioner.gpu.nvidia_checkpointer import NvidiaCheckpointer
from provisioner.gpu.nvidia_monitor import NvidiaMonitor

__all__ = ["NvidiaCheckpointer", "NvidiaMonitor"]
