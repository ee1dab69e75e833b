"""NVIDIA's devices: `NvidiaMonitor` reads them (for the broker), `NvidiaCheckpointer` drives processes (for the worker)."""

from fractional_gpu.gpu.nvidia_checkpointer import NvidiaCheckpointer
from fractional_gpu.gpu.nvidia_monitor import NvidiaMonitor

__all__ = ["NvidiaCheckpointer", "NvidiaMonitor"]
