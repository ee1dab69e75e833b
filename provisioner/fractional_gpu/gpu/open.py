"""Opening a backend by name: `nvidia`, or `simulated:DIRECTORY`. Only the named backend is imported."""

from typing import Final

from fractional_gpu.gpu.interface import Checkpointer, GPUError, GPUErrorCode, Monitor

_SIMULATED: Final = "simulated:"


def open_monitor(backend: str) -> Monitor:
    """Return the backend's monitor. Raises GPUError: NOT_SUPPORTED for an unknown name, else why it cannot be opened."""
    if backend.startswith(_SIMULATED):
        from fractional_gpu.gpu.simulated.monitor import SimulatedMonitor  # noqa: PLC0415 (see above)

        return SimulatedMonitor(_directory(backend))
    if backend == "nvidia":
        from fractional_gpu.gpu.nvidia.monitor import NvidiaMonitor  # noqa: PLC0415 (see above)

        return NvidiaMonitor()
    raise _unknown(backend)


def open_checkpointer(backend: str) -> Checkpointer:
    """Return the backend's checkpointer, for the worker alone. Raises GPUError as `open_monitor` does."""
    if backend.startswith(_SIMULATED):
        from fractional_gpu.gpu.simulated.checkpointer import SimulatedCheckpointer  # noqa: PLC0415 (see above)

        return SimulatedCheckpointer(_directory(backend))
    if backend == "nvidia":
        from fractional_gpu.gpu.nvidia.checkpointer import NvidiaCheckpointer  # noqa: PLC0415 (see above)

        return NvidiaCheckpointer()
    raise _unknown(backend)


def _directory(backend: str) -> str:
    directory = backend.removeprefix(_SIMULATED)
    if not directory:
        raise _unknown(backend)
    return directory


def _unknown(backend: str) -> GPUError:
    return GPUError(
        GPUErrorCode.NOT_SUPPORTED,
        f"there is no GPU backend {backend!r}; allowed: 'nvidia', or 'simulated:DIRECTORY' with the folder of a simulated host",
    )
