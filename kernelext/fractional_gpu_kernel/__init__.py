"""The IPython extension: gate, magics, memory limits, displays.

`python -m fractional_gpu_kernel ipykernel_launcher ...` starts a kernel with it. Rules:

- Loading takes milliseconds (a thread imports the rest later). An open gate delays a cell by microseconds.
- A kernel on the GPU works without a broker; a kernel that needs the GPU and has no broker starts one.
- A forked child inherits the kernel's memory but not its lease: its gate is inert.
"""

import os

TYPE_CHECKING = False  # a kernel's folder is on `sys.path` here, and may have a module `typing`
if TYPE_CHECKING:
    from typing import Any

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

__distribution__ = "jupyter-fractional-gpu"  # tells this package from another module of the same name

_loaded: "dict[int, Any]" = {}  # what was loaded into which shell, by id


def _after_fork_in_child() -> None:
    for extension in _loaded.values():
        extension.become_inert()


os.register_at_fork(after_in_child=_after_fork_in_child)


def load_ipython_extension(ipython: "Any") -> None:  # noqa: ANN401 - IPython is untyped
    """Load the extension into a shell, once. IPython calls this."""
    if id(ipython) in _loaded:
        return
    # Here, because a Jupyter server imports this package for its server extension and is no kernel.
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
    """Restore the shell. The kernel keeps its lease but has no extension."""
    extension = _loaded.pop(id(ipython), None)
    if extension is not None:
        extension.unload()
