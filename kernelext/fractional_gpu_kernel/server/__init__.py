"""The Jupyter server extension: the broker's status of this server's kernels, for JupyterLab.

- One subscription to the broker per server. Browsers get changes from Jupyter's event stream and never poll. Idle cullers ignore this.
- It sends no message to a kernel: only the user's cells make a kernel busy.
- It shows and controls only this server's kernels, though the broker would let this uid control more.
- It starts no broker and works without.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractional_gpu_kernel.server.app import FractionalGPUApp

__all__ = ["_jupyter_server_extension_points"]


def _jupyter_server_extension_points() -> "list[dict[str, str | type[FractionalGPUApp]]]":
    from fractional_gpu_kernel.server.app import FractionalGPUApp  # noqa: PLC0415 - reading the entry point needs no server

    return [{"module": "fractional_gpu_kernel.server.app", "app": FractionalGPUApp}]
