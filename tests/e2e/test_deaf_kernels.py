"""A kernel whose extension cannot answer delays its neighbours no longer than documented, and loses nothing."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from fractional_gpu.protocol.status import LeaseStatus
from tests.e2e.test_edges import WORKING_CHILD
from tests.e2e.test_more_edges import STUCK
from tests.support.stopping import stop
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("deaf-kernels")

# Without a free descriptor, IPython's history thread prints an error, and ipykernel's output thread, which opens a socket for its first
# output, loses messages: no history, and output before that.
QUIET = "get_ipython().history_manager.enabled = False\nprint(flush=True)\n"
# Ways in which a cell leaves our extension unable to answer the broker.
MUTE = {
    "no-descriptors": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
    # Unlike a real device, the simulated one keeps memory in files, which the kernel keeps reopening.
    "another-user": """
import os
for folder, _, files in os.walk(os.environ["JUPYTER_GPU_SIMULATED_DIR"]):
    for path in (folder, *(f"{folder}/{name}" for name in files)):
        os.chown(path, 65534, 65534)
os.setuid(65534)
""",
}
STACKS = "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR2, open({file!r}, 'w'))\n"
PATIENCE_S = 55.0  # far longer than docs/policies.md says, for slow machines; it does not end earlier
# The simulated device's memory consists of files: without a free descriptor no process can look at it.
MENDS = "import resource\nmost = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\nresource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"


def served_s(notebook: Notebook, cell: str) -> float:
    begun_s = time.monotonic()
    reply = notebook.wait(cell)
    assert reply.status == "ok", reply.error
    return time.monotonic() - begun_s


def test_a_kernel_whose_extension_cannot_answer_steps_aside_when_it_idles(world: World, server: Server) -> None:
    (name,) = world.install(1000)
    second = server.start(name)
    for what, breaks in MUTE.items():
        first = server.start(name)
        stacks = world.state / "stacks"
        first.must(fill(1) + QUIET + STACKS.format(file=str(stacks)) + breaks)
        assert served_s(second, second.send(fill(2))) < PATIENCE_S, what
        assert world.lease(first.kernel_id).suspends == 1, what
        # Not by its output: ipykernel can lose what it publishes for a while without descriptors.
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o777)  # one kernel is another user by now
            came_back = Path(folder, "file")
            cell = first.send(f"{MENDS}{CHECK}\nopen({str(came_back)!r}, 'w').close()")
            try:
                until(came_back.exists, f"{what}: it is back, with every byte")
            except AssertionError:  # say where it hangs
                os.kill(world.lease(first.kernel_id).pid or 0, signal.SIGUSR2)
                print(until(stacks.read_text, "its threads are listed"))  # noqa: T201 - pytest shows it
                print(vars(first.wait(cell)))  # noqa: T201 - as above
                raise
        assert second.must(CHECK).text == "intact\n", what
        first.shut_down()


def test_a_kernel_that_is_stopped_or_whose_interpreter_is_held_while_its_child_works(
    world: World, server: Server
) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'preempt': 'never'}}")
    (name,) = world.install(1000)
    first, second = server.start(name), server.start(name)
    first.must(fill(1))
    stopped_and_named(world, first, second)
    held_and_busy(world, first, second)


def stopped_and_named(world: World, first: Notebook, second: Notebook) -> None:
    """The waiting kernel is told the name of a stopped one, and what to do."""
    pid = world.lease(first.kernel_id).pid
    assert pid is not None
    stop(pid)
    cell = second.send(fill(2))

    def told() -> LeaseStatus | None:
        waits = world.lease(second.kernel_id)
        return waits if f"kill -CONT {pid}" in waits.sentence else None

    waits = until(told, "the kernel that waits hears of it")
    until(lambda: f"kill -CONT {pid}" in world.lease(first.kernel_id).lease.unsuspendable_reason, "its status says it")
    stopped = world.lease(first.kernel_id)
    assert f"process {pid} is stopped" in waits.sentence
    assert stopped.spec.label[:50] in waits.sentence
    with world.client() as client:
        reasons = [line.reason for line in client.story(stopped.lease_id).lines]
    assert "process.stopped" in reasons
    os.kill(pid, signal.SIGCONT)
    assert second.wait(cell).status == "ok"
    assert first.must(CHECK).text == "intact\n"
    assert world.lease(first.kernel_id).lease.unsuspendable_reason == ""


def held_and_busy(world: World, first: Notebook, second: Notebook) -> None:
    """A kernel whose interpreter is blocked counts as busy while its child works, and is suspended when its counters are quiet."""
    stuck = world.notebooks / "stuck"
    try:
        child = int(first.must(f"{WORKING_CHILD}print(child.pid){STUCK}").text)
        before = world.lease(first.kernel_id).suspends
        stuck.touch()
        cell = second.send(fill(2))
        until(lambda: world.lease(first.kernel_id).working, "the counters show the work")
        assert world.lease(first.kernel_id).suspends == before
        os.kill(child, signal.SIGKILL)
        assert served_s(second, cell) < PATIENCE_S
        assert world.lease(first.kernel_id).suspends == before + 1
    finally:
        stuck.unlink()
    for notebook in (first, second):
        assert notebook.must(CHECK).text == "intact\n"
