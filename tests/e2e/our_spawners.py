"""A pytest plugin that adds our mixin to the spawners of JupyterHub's tests.

`strangers.py` loads it for the suites that name it as `plugin` in `strangers.toml`, in the runs with this project. It runs in the
suite's environment, so it imports nothing from `tests`.
"""

import pytest
from jupyterhub.tests import mocking

from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu_hub.mixin import FractionalGPUMixin

_SITE = {
    "gpu_wait": 0.0,  # so that starts have JupyterHub's default time limit
    "gpu_filter_kernels": False,  # one of JupyterHub's tests counts the server's arguments
}


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Start the broker that gives the seats, and replace the spawners before the tests import them."""
    ensure_broker().close()
    mocked = mocking.MockSpawner
    for name, below in vars(mocking).copy().items():
        if isinstance(below, type) and issubclass(below, mocked):
            setattr(mocking, name, type(name, (FractionalGPUMixin, below), {"__module__": mocking.__name__, **_SITE}))
