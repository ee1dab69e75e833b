"""Opens devices by backend name: `nvidia`, `simulated:DIRECTORY`, or `kind:NAME` for a kind of device that another package adds.

Another package can add a kind of device with an entry point in the group `fractional_gpu.devices`. The entry point is named after the kind,
and its target is a `DeviceKind`. Only the requested backend is imported.
"""

from typing import Final, Protocol

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, MemoryLimits, Monitor

NVIDIA: Final = "nvidia"
GROUP: Final = "fractional_gpu.devices"
_SIMULATED: Final = "simulated:"
_KIND: Final = "kind:"


class DeviceKind(Protocol):
    """The target of a package's entry point: a module, class or object with these two functions."""

    def open_monitor(self) -> Monitor:
        """Open the devices for reading. Called in the broker. Raises GPUError."""

    def open_checkpointer(self) -> Checkpointer:
        """Open the devices for saving and restoring. Called only in the checkpoint worker. Raises GPUError."""


def backend_name(device_kind: str) -> str:
    """Return the backend name for the setting `device_kind`. Both "" and `nvidia` mean NVIDIA devices."""
    return NVIDIA if device_kind in ("", NVIDIA) else f"{_KIND}{device_kind}"


def open_monitor(backend: str) -> Monitor:
    """Open the devices for reading. Raises GPUError, with code NOT_SUPPORTED if no backend has this name."""
    if backend.startswith(_SIMULATED):
        from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor  # noqa: PLC0415 (see above)

        return SimulatedMonitor(backend.removeprefix(_SIMULATED))
    if backend == NVIDIA:
        from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor  # noqa: PLC0415 (see above)

        return NvidiaMonitor()
    return _kind(backend).open_monitor()


def open_checkpointer(backend: str) -> Checkpointer:
    if backend.startswith(_SIMULATED):
        from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer  # noqa: PLC0415 (see above)

        return SimulatedCheckpointer(backend.removeprefix(_SIMULATED))
    if backend == NVIDIA:
        from fractional_gpu.gpu.nvidia.checkpointer import NvidiaCheckpointer  # noqa: PLC0415 (see above)

        return NvidiaCheckpointer()
    return _kind(backend).open_checkpointer()


def open_memory_limits(backend: str) -> MemoryLimits:
    if backend != NVIDIA:
        raise GPUError(GPUErrorCode.NOT_SUPPORTED, "these devices do not support memory limits for control groups")
    from fractional_gpu.gpu.nvidia.limits import NvidiaMemoryLimits  # noqa: PLC0415 (see above)

    return NvidiaMemoryLimits()


def _kind(backend: str) -> DeviceKind:
    if not backend.startswith(_KIND):
        raise GPUError(
            GPUErrorCode.NOT_SUPPORTED,
            f"there is no GPU backend {backend!r}; expected 'nvidia', 'kind:NAME', or 'simulated:DIRECTORY' with the folder of a "
            "simulated host",
        )
    from importlib.metadata import entry_points  # noqa: PLC0415 - takes a fifth of a worker's start

    name = backend.removeprefix(_KIND)
    found = entry_points(group=GROUP)
    if name not in found.names:
        there = ", ".join(repr(one) for one in sorted({NVIDIA, *found.names}))
        raise GPUError(
            GPUErrorCode.NOT_SUPPORTED,
            f"there is no device kind named {name!r} (c.GPUBroker.device_kind); this Python environment has {there}; install the package "
            "that provides it, or name another kind",
        )
    try:
        kind: DeviceKind = found[name].load()
    except (ImportError, AttributeError) as error:
        raise GPUError(
            GPUErrorCode.NOT_SUPPORTED,
            f"the device kind {name!r} cannot be imported from {found[name].value}: {error}; repair or remove that package",
        ) from error
    return kind
