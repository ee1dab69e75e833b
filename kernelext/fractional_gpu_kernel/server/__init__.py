"""The Jupyter server extension, which relays the broker's view of this server's kernels to JupyterLab.

- Each server has one subscription to the broker. Browsers receive changes through Jupyter's event stream instead of polling. Idle cullers
  do not treat this as activity.
- It sends no messages to kernels, so only the user's cells make a kernel busy.
- It shows and controls only this server's kernels, even though the broker would let this uid control others.
- It does not start a broker, and works without one.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractional_gpu_kernel.server.app import FractionalGPUApp

__all__ = ["_jupyter_server_extension_points"]


def _jupyter_server_extension_points() -> "list[dict[str, str | type[FractionalGPUApp]]]":
    from fractional_gpu_kernel.server.app import FractionalGPUApp  # noqa: PLC0415 - reading the entry point needs no server

    return [{"module": "fractional_gpu_kernel.server.app", "app": FractionalGPUApp}]
