"""Ends Jupyter's own processes in tests (kernels, servers, hubs) once their `atexit` functions have run, with exit status 0.

What follows otherwise is the teardown of the interpreter, which takes a fifth of a kernel's start and shows nothing that a test asks for.
The processes of tests/jupyter and of the benchmarks have it. Our own processes (broker, worker) load faster: see `kept_dataclasses`.
"""

import atexit
import gc
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


def _begin_collecting_later(objects: int) -> None:
    """Collect no garbage before that many objects: those of imports all stay, and finding that again and again takes a tenth of a start."""
    usual = gc.get_threshold()

    def collect_as_usual(_phase: str, _info: object) -> None:
        gc.callbacks.remove(collect_as_usual)
        gc.set_threshold(*usual)

    gc.callbacks.append(collect_as_usual)
    gc.set_threshold(objects, *usual[1:])


def _spare_jinja_a_pattern() -> None:
    """Give jinja2 a short pattern of identifiers: its own one, of every letter there is, takes a twentieth of a start to compile."""
    module = types.ModuleType("jinja2._identifier")
    module.pattern = re.compile(r"\w+")  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


if not (_JUPYTER - {"ipykernel_launcher"}).isdisjoint(sys.orig_argv[1:4]):
    import re
    import types

    _begin_collecting_later(100_000)
    _spare_jinja_a_pattern()

if any(
    option == "-m" and name.startswith("fractional_gpu.") for option, name in itertools.pairwise(sys.orig_argv[1:5])
):
    import kept_dataclasses  # type: ignore[import-not-found]  # beside this file

    kept_dataclasses.use()
