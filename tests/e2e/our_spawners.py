"""A plugin for pytest that puts our mixin over the spawners of JupyterHub's tests.

`strangers.py` loads it for the suites whose `plugin` in `strangers.toml` is its name, in the runs with this project. It runs in the suite's
own environment, so it imports nothing of `tests`.
"""

import pytest
from jupyterhub.tests import mocking

from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu_hub.mixin import FractionalGPUMixin

_SITE = {
    "gpu_wait": 0.0,  # the limit of a start is then JupyterHub's own default
    "gpu_filter_kernels": False,  # one of JupyterHub's tests counts the server's arguments
}


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Start the broker that gives the seats, and replace the spawners before the tests look at them."""
    ensure_broker().close()
    mocked = mocking.MockSpawner
    for name, below in vars(mocking).copy().items():
        if isinstance(below, type) and issubclass(below, mocked):
            setattr(mocking, name, type(name, (FractionalGPUMixin, below), {"__module__": mocking.__name__, **_SITE}))
