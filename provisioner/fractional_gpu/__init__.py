"""Jupyter kernels on fractions of a GPU.

Kernels import this package, so importing it loads nothing else. Classes named in configurations are imported on first use:

- `fractional_gpu.FractionalGPUProvisioner`: starts kernels with a lease
- `fractional_gpu.KeepingKernelManager`: a server's kernel manager, with kernels that outlive the server
- `fractional_gpu.SeatKernelSpecManager`: a server's kernelspec manager that shows only the kernels the server's seat allows
"""

from typing import Any

__version__ = "0.1.0"
__distribution__ = "jupyter-fractional-gpu"  # distinguishes this package from another one of its name
__all__ = ["FractionalGPUProvisioner", "KeepingKernelManager", "SeatKernelSpecManager"]

_MODULES = {
    "FractionalGPUProvisioner": "fractional_gpu.jupyter.provisioner",
    "KeepingKernelManager": "fractional_gpu.jupyter.kernel_manager",
    "SeatKernelSpecManager": "fractional_gpu.jupyter.kernelspecs",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - classes of several modules
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - only for these classes

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
