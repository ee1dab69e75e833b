"""ipykernel in a fork of a process that has already imported it: the imports take most of a kernel's start."""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess

__all__ = ["start"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "ipykernel.kernelapp",
        "IPython.core.completerlib",
        "IPython.core.logger",
        "IPython.core.oinspect",
        "IPython.extensions.storemagic",
        "fractional_gpu.client.client",
        "psutil",
        "tornado.platform.asyncio",
        "tornado.queues",
        "traitlets.config.argcomplete_config",
        __name__,
    ]
)


def start(connection_file: str, environment: Mapping[str, str]) -> BaseProcess:
    """Start a kernel in a separate session. Its `sys.path` is this process's, regardless of the environment."""
    process = _CONTEXT.Process(target=_run, args=(connection_file, {**environment, "JPY_PARENT_PID": str(os.getpid())}))
    process.start()
    return process


def _run(connection_file: str, environment: dict[str, str]) -> None:
    from ipykernel.kernelapp import IPKernelApp  # noqa: PLC0415 - not in the process that starts kernels

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["ipykernel_launcher", "-f", connection_file]
    application = IPKernelApp.instance()
    application.default_extensions = [*application.default_extensions, "fractional_gpu_kernel"]
    # Its thread writes after each cell, and prints into that cell if it has no descriptor left for its database.
    application.config.HistoryManager.enabled = False
    IPKernelApp.launch_instance()
