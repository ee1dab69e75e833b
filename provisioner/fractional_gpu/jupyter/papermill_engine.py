"""The engine behind papermill's `--engine fractional-gpu`. Waiting for the GPU does not count towards its execution timeout."""

from types import SimpleNamespace
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from papermill.engines import NBClientEngine

from fractional_gpu.jupyter.notebook_runs import wait_before_cells


class FractionalGPUEngine(NBClientEngine):  # type: ignore[misc] # not installed with this project
    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> None:  # noqa: ANN401 - papermill's
        waits = SimpleNamespace(km=None, on_cell_execute=kwargs.get("on_cell_execute"))
        wait_before_cells(waits)

        class Known(AsyncKernelManager):
            """A kernel manager that registers itself for the hook, since papermill does not pass the manager to it."""

            def __init__(self, **options: Any) -> None:  # noqa: ANN401 - traits
                super().__init__(**options)
                waits.km = self

        options = {**kwargs, "kernel_manager_class": Known, "on_cell_execute": waits.on_cell_execute}
        super().execute_managed_notebook(nb_man, kernel_name, **options)
