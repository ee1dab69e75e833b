"""A kernel whose extension cannot answer keeps no neighbour waiting for longer than documented, and loses nothing."""

import time
from collections.abc import Callable

import pytest

from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World

# What a cell may do that leaves our extension without a way to answer the broker.
MUTE = {
    "no-sockets": "import socket\nsocket.socket = None",
    "no-descriptors": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
    # Unlike a real one, the simulated device's memory is files, which the kernel opens again and again.
    "another-user": """
import os
for folder, _, files in os.walk(os.environ["JUPYTER_GPU_SIMULATED_DIR"]):
    for path in (folder, *(f"{folder}/{name}" for name in files)):
        os.chown(path, 65534, 65534)
os.setuid(65534)
""",
}
# The simulated device's memory is files, too: with no descriptor nobody can look at it.
MENDS = "import resource\nmost = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\nresource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"


def served_s(notebook: Notebook, cell: str) -> float:
    """Wait for a cell that must succeed; return how long that took."""
    begun_s = time.monotonic()
    reply = notebook.wait(cell)
    assert reply.status == "ok", reply.error
    return time.monotonic() - begun_s


@pytest.mark.parametrize("breaks", MUTE.values(), ids=MUTE)
def test_a_kernel_whose_extension_cannot_answer_steps_aside_when_it_idles(
    world: World, server: Server, breaks: str, record_property: Callable[[str, object], None]
) -> None:
    (name,) = world.install(1000)
    first, second = server.start(name), server.start(name)
    first.must(fill(1, 16) + "\n" + breaks)
    waited_s = served_s(second, second.send(fill(2, 16)))
    record_property("waited_s", round(waited_s, 1))
    assert world.lease(first.kernel_id).suspends == 1
    assert first.must(MENDS + CHECK).text.endswith("intact\n")
    assert second.must(CHECK).text == "intact\n"
