"""Ends Jupyter's own processes in tests (kernels, servers, hubs) once their `atexit` functions have run, with exit status 0.

What follows otherwise is the teardown of the interpreter, which takes a fifth of a kernel's start and shows nothing that a test asks for.
The processes of tests/jupyter and of the benchmarks have it. Our own processes (broker, worker) load faster: see `kept_code`.
"""

import atexit
import gc
import itertools
import os
import sys
import types

_JUPYTER = {
    "ipykernel_launcher",
    "jupyter_server",
    "jupyterhub",
    "jupyterhub.singleuser",
    "jupyterhub-singleuser",
    "jupyterlab",
}
_STARTED = {word.rpartition("/")[2] for word in sys.orig_argv[1:5]}


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if not _JUPYTER.isdisjoint(_STARTED):
    atexit.register(_end)  # the first that is registered is the last that runs


def _begin_collecting_later(objects: int) -> None:
    """Collect no garbage before that many objects, and never look at these: they were imported and stay, and looking is slow."""
    usual = gc.get_threshold()

    def collect_as_usual(_phase: str, _info: object) -> None:
        gc.callbacks.remove(collect_as_usual)
        gc.freeze()
        gc.set_threshold(*usual)

    gc.callbacks.append(collect_as_usual)
    gc.set_threshold(objects, *usual[1:])


def _spare_the_hubs_database() -> None:
    """Give a server or service of a hub, which has no database, none of its tables: SQLAlchemy and alembic take half of its imports' time.

    It imports them on the way to the pattern of its log and to the names of scopes. Batchspawner's server needs them: it imports a spawner.
    """

    def stand_in(name: str, **names: object) -> None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)

    stand_in("sqlalchemy", __path__=[], func=None, select=None)
    stand_in("sqlalchemy.exc", SQLAlchemyError=type("SQLAlchemyError", (Exception,), {}))
    stand_in("jupyterhub.orm")
    stand_in("jupyterhub.handlers", __path__=[])
    stand_in("jupyterhub.handlers.pages", HealthCheckHandler=type("HealthCheckHandler", (), {}))


def _spare_a_hub_the_clients_of_other_spawners() -> None:
    """Keep a hub, which loads every registered spawner, from the clients of Kubernetes and Docker: a tenth of its start, and not needed.

    It notes in its debug log that these spawners cannot be loaded. Their own tests import them without a hub's process.
    """
    sys.modules["kubernetes_asyncio"] = sys.modules["docker"] = None  # type: ignore[assignment] # an ImportError
    sys.modules["mako.ext.pygmentplugin"] = None  # type: ignore[assignment] # as above: colours the errors of templates


if not _JUPYTER.isdisjoint(_STARTED):
    _begin_collecting_later(300_000)

if not {"jupyterhub.singleuser", "fractional_gpu_hub.service"}.isdisjoint(_STARTED):
    _spare_the_hubs_database()
elif "jupyterhub" in _STARTED:
    _spare_a_hub_the_clients_of_other_spawners()

if not (_JUPYTER | {"jupyter-gpu"}).isdisjoint(_STARTED) or any(
    option == "-m" and name.startswith("fractional_gpu") for option, name in itertools.pairwise(sys.orig_argv[1:5])
):
    import kept_code  # type: ignore[import-not-found]  # next to this file

    kept_code.use()
