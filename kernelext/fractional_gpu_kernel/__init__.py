"""The IPython extension: the gate, the magics, the memory limits and the displays.

`python -m fractional_gpu_kernel ipykernel_launcher ...` starts a kernel with the extension. These rules apply:

- Loading takes milliseconds, because most of the code is imported later, in a thread. An open gate delays a cell by microseconds.
- A kernel that is on the GPU keeps working without a broker. A kernel that needs the GPU starts a broker if none is running.
- A forked child inherits the kernel's memory but not its lease, so the gate has no effect in the child.
"""

import os

TYPE_CHECKING = False  # not imported, because the kernel's folder is on `sys.path` and may have a module `typing`
if TYPE_CHECKING:
    from typing import Any

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

__distribution__ = "jupyter-fractional-gpu"  # distinguishes this package from another module with the same name

_loaded: "dict[int, Any]" = {}  # the loaded extensions, by the id of their shell


def _after_fork_in_child() -> None:
    for extension in _loaded.values():
        extension.become_inert()


os.register_at_fork(after_in_child=_after_fork_in_child)


def load_ipython_extension(ipython: "Any") -> None:  # noqa: ANN401 - IPython is untyped
    """Load the extension into a shell, unless it is already loaded. IPython calls this function."""
    if id(ipython) in _loaded:
        return
    # Import this here, because a Jupyter server also imports this package, for the server extension, but is not a kernel.
    from fractional_gpu_kernel.settings import NOTICE, Settings  # noqa: PLC0415

    settings = Settings.from_environment(os.environ)
    if settings is None:
        from fractional_gpu_kernel.no_lease import UnleasedKernel as Extension  # noqa: PLC0415 - only one of the two is ever needed

        _loaded[id(ipython)] = Extension(ipython, os.environ.get(NOTICE, ""))
    else:
        from fractional_gpu_kernel.extension import LeasedKernel  # noqa: PLC0415 - as above

        _loaded[id(ipython)] = LeasedKernel(ipython, settings, os.environ.get(NOTICE, ""))
    _loaded[id(ipython)].load()


def unload_ipython_extension(ipython: "Any") -> None:  # noqa: ANN401 - as above
    """Remove the extension from the shell. The kernel keeps its lease."""
    extension = _loaded.pop(id(ipython), None)
    if extension is not None:
        extension.unload()
