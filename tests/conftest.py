"""What holds for every test: what the ordinary run leaves out, and interrupts that work.

tests/gpu needs a GPU and has its own command: docs/gpu-tests.md.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

collect_ignore = [] if os.environ.get("JUPYTER_GPU_HARDWARE") else ["gpu"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_state() -> Iterator[None]:
    """Brokers that the tests start in this process, or give its environment, keep their state in no folder of the user's."""
    with tempfile.TemporaryDirectory(prefix="jfg-state-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", folder)
        yield


SLOW = ("hub", "e2e", "launcher", "labextension", "kernelext", "jupyter")
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the folders with the longest tests first: with several processes, none is left with them alone at the end."""
    order = {folder: place for place, folder in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.relative_to(_TESTS).parts[0], len(order)))


# A machine that pauses for a second says nothing about a test.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
