"""A kernel whose extension cannot answer keeps no neighbour waiting for longer than documented, and loses nothing."""

import os
import signal
import time

import pytest

from fractional_gpu.protocol.messages import LeaseStatus
from tests.e2e.test_background_work import CHILD
from tests.e2e.test_more_edges import STUCK
from tests.support.stopping import stop
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until

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
PATIENCE_S = 55.0  # far beyond what docs/policies.md says, for slow machines; without an end before
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
    world: World, server: Server, breaks: str
) -> None:
    (name,) = world.install(1000)
    first, second = server.start(name), server.start(name)
    first.must(fill(1) + "\n" + breaks)
    waited_s = served_s(second, second.send(fill(2)))
    assert waited_s < PATIENCE_S
    assert world.lease(first.kernel_id).suspends == 1
    assert first.must(MENDS + CHECK).text.endswith("intact\n")
    assert second.must(CHECK).text == "intact\n"


def test_a_stopped_kernel_is_named_to_the_one_that_waits_with_what_to_do(world: World, server: Server) -> None:
    (name,) = world.install(1000)
    first, second = server.start(name), server.start(name)
    first.must(fill(1))
    pid = world.lease(first.kernel_id).pid
    assert pid is not None
    stop(pid)
    cell = second.send(fill(2))

    def told() -> LeaseStatus | None:
        waits = world.lease(second.kernel_id)
        return waits if f"kill -CONT {pid}" in waits.sentence else None

    waits = until(told, "the kernel that waits hears of it")
    until(lambda: f"kill -CONT {pid}" in world.lease(first.kernel_id).stays, "its status says it")
    stopped = world.lease(first.kernel_id)
    assert f"process {pid} is stopped" in waits.sentence
    assert stopped.label[:50] in waits.sentence
    with world.client() as client:
        reasons = [line.reason for line in client.story(stopped.lease_id).lines]
    assert "process.stopped" in reasons
    os.kill(pid, signal.SIGCONT)
    assert second.wait(cell).status == "ok"
    assert first.must(CHECK).text == "intact\n"
    assert world.lease(first.kernel_id).stays == ""


def test_a_kernel_whose_interpreter_is_held_steps_aside_while_its_counters_are_quiet(
    world: World, server: Server
) -> None:
    (name,) = world.install(1000)
    first, second = server.start(name), server.start(name)
    stuck = world.notebooks / "stuck"
    try:
        first.must(fill(1) + STUCK)
        stuck.touch()
        assert served_s(second, second.send(fill(2))) < PATIENCE_S
    finally:
        stuck.unlink()
    assert first.must(CHECK).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"


def test_a_kernel_whose_interpreter_is_held_counts_as_busy_as_long_as_its_child_works(
    world: World, server: Server
) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'preempt': 'never'}}")
    (name,) = world.install(1000)
    first, second = server.start(name), server.start(name)
    stuck = world.notebooks / "stuck"
    try:
        child = int(first.must(f"{fill(1)}{CHILD}print(child.pid){STUCK}").text)
        stuck.touch()
        cell = second.send(fill(2))
        until(lambda: world.lease(first.kernel_id).working, "the counters show the work")
        assert world.lease(first.kernel_id).suspends == 0
        os.kill(child, signal.SIGKILL)
        assert second.wait(cell).status == "ok"
        assert world.lease(first.kernel_id).suspends == 1
    finally:
        stuck.unlink()
    assert first.must(CHECK).text == "intact\n"
