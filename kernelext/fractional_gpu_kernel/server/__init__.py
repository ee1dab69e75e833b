"""The Jupyter server extension: what the broker knows about this server's kernels, for JupyterLab.

Rules of this room:

- One subscription to the broker per server, in one thread, whatever the number of browsers; browsers hear of changes through Jupyter's
  event stream and never poll. Reading it is no activity: no idle culler takes a page that is open for a person at work.
- It asks no kernel anything and sends no comm: a kernel is as busy as its user's cells make it.
- It shows and steers the kernels of this server only, though the broker would let this uid steer more.
- It starts no broker and needs none: without one it says that there is none, and looks again now and then.
- Nothing of a kernel imports this room: Jupyter's server and tornado belong to the server's process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractional_gpu_kernel.server.app import FractionalGPUApp

__all__ = ["_jupyter_server_extension_points"]


def _jupyter_server_extension_points() -> "list[dict[str, str | type[FractionalGPUApp]]]":
    """Tell jupyter_server what to load."""
    from fractional_gpu_kernel.server.app import FractionalGPUApp  # noqa: PLC0415 - who only asks where this lies needs no server

    return [{"module": "fractional_gpu_kernel.server.app", "app": FractionalGPUApp}]
