"""Makes our provisioner the default in jobs with a share of a GPU. Python imports this at startup, through `jupyter-fractional-gpu.pth`.

If JUPYTER_DEFAULT_PROVISIONER_NAME were set, the whole job would inherit it, and environments without this package could not start any
kernels. So this module makes jupyter_client read a different variable.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "JUPYTER_GPU_DEFAULT_PROVISIONER"
_FACTORY = "jupyter_client.provisioning.factory"


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _FACTORY:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                factory = module.KernelProvisionerFactory
                if factory.default_provisioner_name_env not in os.environ:
                    factory.default_provisioner_name_env = VARIABLE

            spec.loader.exec_module = exec_module  # type: ignore[method-assign] # for this spec only
        return spec


sys.meta_path.insert(0, _Finder())
