"""The Jupyter server extension, which gives JupyterLab the broker's status of the kernels of this server.

- There is one subscription to the broker per server. Browsers get changes from Jupyter's event stream and never poll. Idle cullers do not
  count this as activity.
- It sends no messages to kernels, so that only the user's cells make a kernel busy.
- It shows and controls only the kernels of this server, although the broker would let this uid control others, too.
- It starts no broker, and it also works without a broker.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractional_gpu_kernel.server.app import FractionalGPUApp

__all__ = ["_jupyter_server_extension_points"]


def _jupyter_server_extension_points() -> "list[dict[str, str | type[FractionalGPUApp]]]":
    from fractional_gpu_kernel.server.app import FractionalGPUApp  # noqa: PLC0415 - reading the entry point needs no server

    return [{"module": "fractional_gpu_kernel.server.app", "app": FractionalGPUApp}]
