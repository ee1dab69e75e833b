"""Failpoints in Jupyter servers and kernels: Python imports this at its start where this folder is in PYTHONPATH.

It is not installed: kernels stay light. Each function below is a point before it and one after it, named by who runs
it, such as `kernel.Gate.close.before`. A function that is no longer there is an error at once.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

POINTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fractional_gpu.jupyter.provisioner": (
        "server",
        (
            "FractionalGPUProvisioner.pre_launch",
            "FractionalGPUProvisioner.launch_kernel",
            "FractionalGPUProvisioner.shutdown_requested",
            "FractionalGPUProvisioner.cleanup",
        ),
    ),
    "fractional_gpu.jupyter.kernel_lease": (
        "server",
        (
            "take_lease",
            "renew_lease",
            "_write_token",
            "KernelLease.attach",
            "KernelLease.detach",
            "KernelLease.release",
        ),
    ),
    "fractional_gpu.jupyter.kernel_record": ("server", ("RecordFile.write", "RecordFile.remove")),
    "fractional_gpu.client.client": ("kernel", ("BrokerClient.answer",)),
    "fractional_gpu_kernel.cells.broker_channel": ("kernel", ("BrokerChannel._follow", "BrokerChannel._obey")),
    "fractional_gpu_kernel.cells.acquire": ("kernel", ("Acquirer._call",)),
    "fractional_gpu_kernel.cells.gate": ("kernel", ("Gate.open", "Gate.close", "Gate.enter", "Gate.leave")),
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in POINTS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        who, functions = POINTS[module.__name__]
        for name in functions:
            *owners, last = name.split(".")
            owner: Any = functools.reduce(getattr, owners, module)
            setattr(owner, last, _between(f"{who}.{name}", getattr(owner, last)))


def _between(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    from fractional_gpu.host.files import reach  # noqa: PLC0415 - not before a module of ours is wanted

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes and gives
            reach(f"{name}.before")
            value = await function(*args, **kwargs)
            reach(f"{name}.after")
            return value

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as above
        reach(f"{name}.before")
        value = function(*args, **kwargs)
        reach(f"{name}.after")
        return value

    return called


sys.meta_path.insert(0, _Finder())
