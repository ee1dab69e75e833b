"""A broker that can write neither ledger nor log tells waiting kernels so, and continues when it can write again."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fractional_gpu.commands.terminal.render import render_status
from fractional_gpu.commands.terminal.text import plain
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("full-disk-told")

LEAST_BYTES = 1


@contextmanager
def no_room(pid: int) -> Iterator[None]:
    """No file of the process can grow: meanwhile every write of its ledger and its log fails."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LEAST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def shown(notebook: Notebook, text: str) -> str:
    while text not in (message := str(notebook.socket.recv())):
        pass
    return message


def test_a_cell_and_status_say_that_nothing_can_be_written_and_the_cell_goes_on(world: World, server: Server) -> None:
    (name,) = world.install(1000)
    notebook = server.start(name)
    notebook.must(fill(1))
    notebook.send("%gpu suspend")
    world.await_state(notebook.kernel_id, "suspended")
    pid = world.broker_pid()
    assert pid is not None
    with no_room(pid):
        cell = notebook.send(CHECK)
        line = shown(notebook, "the broker cannot write its state")
        assert "continues" in line
        trouble = until(lambda: world.status().trouble, "status tells it")
        assert "ledger" in trouble
        assert f"Trouble: {trouble}" in plain(render_status(world.status()))
    reply = notebook.wait(cell)
    assert (reply.status, reply.text) == ("ok", "intact\n")
    until(lambda: not world.status().trouble, "it is over")
    assert world.broker_pid() == pid
    log = Path(world.socket).with_name("broker.log").read_text()
    assert "of this log could not be written" in log
    assert log.count("cannot write the ledger") <= 6  # no message repeats without end
