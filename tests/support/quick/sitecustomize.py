"""Ends Jupyter's own processes in tests (kernels, servers, hubs) once their `atexit` functions have run, with exit status 0.

What follows otherwise is the teardown of the interpreter, which takes a fifth of a kernel's start and shows nothing that a test asks for.
The processes of tests/jupyter and of the benchmarks have it. Our own processes (broker, worker) load faster: see `kept_dataclasses`.
"""

import atexit
import itertools
import os
import sys

_JUPYTER = {"ipykernel_launcher", "jupyter_server", "jupyterhub", "jupyterhub.singleuser", "jupyterlab"}


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if not _JUPYTER.isdisjoint(sys.orig_argv[1:4]):
    atexit.register(_end)  # the first that is registered is the last that runs

if any(
    option == "-m" and name.startswith("fractional_gpu.") for option, name in itertools.pairwise(sys.orig_argv[1:5])
):
    import kept_dataclasses  # type: ignore[import-not-found]  # beside this file

    kept_dataclasses.use()
