"""What holds for every test: what the ordinary run leaves out, interrupts that work, ports that nobody else takes.

tests/gpu needs a GPU and has its own command: docs/gpu-tests.md.
"""

import itertools
import os
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from jupyter_client.connect import LocalPortCache

collect_ignore = [] if os.environ.get("JUPYTER_GPU_HARDWARE") else ["gpu"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = ("hub", "e2e", "launcher", "labextension", "kernelext", "provisioning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the folders with the longest tests first: with several processes, none is left with them alone at the end."""
    order = {folder: place for place, folder in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


# A machine that pauses for a second says nothing about a test.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

_PORTS = range(10_000, 32_000)  # below those that the system hands out


@pytest.fixture(scope="session", autouse=True)
def own_ports() -> Iterator[None]:
    """Kernels of this process get ports that the system hands to nobody.

    jupyter_client asks the system for a free port and lets it go before the kernel starts; meanwhile any connection may get it, and
    the kernel ends with "Address already in use". A server starts another one then; a bare kernel manager does not.
    """
    start = random.SystemRandom().randrange(len(_PORTS))
    numbers = itertools.cycle([*_PORTS[start:], *_PORTS[:start]])

    def free_port(_cache: LocalPortCache, ip: str) -> int:
        while True:
            port = next(numbers)
            with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as tried:
                tried.bind((ip, port))
                return int(port)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPortCache, "find_available_port", free_port)
        yield
