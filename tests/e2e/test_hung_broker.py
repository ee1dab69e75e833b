"""A broker that runs but does not answer: its callers learn which process it is and what to do, and nothing is lost.

A broker whose loop is blocked ends itself. A stopped process does not, however long it is stopped.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.pair import NO_TURNS
from tests.support.paths import failing
from tests.support.stopping import stopped
from tests.support.stories import CHECK, fill
from tests.support.victims import brokers
from tests.support.world import DEADLINE_S, Notebook, Server, World

pytestmark = pytest.mark.promise("hung-broker", "watchdog")

HANG_LIMIT_S = 3


@pytest.fixture(autouse=True)
def _limited(world: World) -> None:
    """Start a broker that soon ends itself when its loop is blocked, and that a test can block."""
    world.configure(f"{NO_TURNS}c.GPUBroker.hang_limit = '{HANG_LIMIT_S}s'")
    world.environment |= failing(world.folder / "failpoint")
    world.start_broker()


def command(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.commands.main", *words],
        env=world.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def shown(notebook: Notebook, text: str) -> str:
    while text not in (message := str(notebook.socket.recv())):
        pass
    return message


def suspend(world: World, notebook: Notebook) -> None:
    notebook.send("%gpu suspend")
    world.await_state(notebook.kernel_id, "suspended")


def test_cells_say_that_the_broker_is_stopped_keep_their_place_and_are_served_by_the_next_if_its_loop_is_blocked(
    world: World, server: Server
) -> None:
    (name,) = world.install(1000)
    notebook = server.start(name)
    notebook.must(fill(1))
    suspend(world, notebook)
    pid = world.broker_pid()
    assert pid is not None
    with stopped(pid):
        cell = notebook.send(CHECK)
        line = shown(notebook, "did not answer")
    assert f"(process {pid})" in line
    assert f"kill -CONT {pid}" in line
    assert "continues once the broker is responding" in line
    reply = notebook.wait(cell)
    assert (reply.status, reply.text) == ("ok", "intact\n")
    assert world.broker_pid() == pid
    suspend(world, notebook)
    a_broker_whose_loop_is_blocked_ends_itself_and_the_next_serves_the_cell(world, notebook)
    a_cell_that_waits_already_says_it_too_and_keeps_its_place(world, notebook, server.start(name))


def a_broker_whose_loop_is_blocked_ends_itself_and_the_next_serves_the_cell(world: World, notebook: Notebook) -> None:
    pid = world.broker_pid()
    point = "event.Wanted@suspended.before"
    reached = world.folder / "failpoint.reached"
    times = reached.read_text().split("\n").count(point)
    (world.folder / "failpoint").write_text(f"{point} {times + 1} hang")
    assert notebook.must(CHECK).text == "intact\n"
    assert pid not in brokers(world)
    log = Path(world.socket).with_name("broker.log").read_text()
    assert "CRITICAL the event loop has been blocked" in log
    assert "in reach" in log, "the stack shows where"
    assert "Traceback" not in log.rpartition("most recent call first")[2]


def a_cell_that_waits_already_says_it_too_and_keeps_its_place(world: World, holder: Notebook, waiter: Notebook) -> None:
    stop = world.folder / "stop"
    busy = holder.send(
        f"import os, time\nwhile not os.path.exists({str(stop)!r}):\n    buffer.read()\n    time.sleep(0.05)"
    )
    cell = waiter.send(fill(2) + CHECK)
    shown(waiter, "This cell is waiting for the GPU")
    pid = world.broker_pid()
    assert pid is not None
    with stopped(pid):
        shown(waiter, f"kill -CONT {pid}")
    shown(waiter, "place 1 in the queue")  # the broker's last message is shown again
    stop.touch()
    assert holder.wait(busy).status == "ok"
    assert waiter.wait(cell).text == "intact\n"
    what_looks_and_asks_says_it_instead_of_hanging(world, waiter)


def what_looks_and_asks_says_it_instead_of_hanging(world: World, notebook: Notebook) -> None:
    lease = world.lease(notebook.kernel_id).lease_id
    pid = world.broker_pid()
    assert pid is not None
    remedy = f"use `kill -CONT {pid}` to continue it"
    with stopped(pid), ThreadPoolExecutor() as pool:  # each of them waits for five seconds
        asked = [pool.submit(command, world, *words) for words in (["status"], ["suspend", lease], ["doctor"])]
        assert remedy in notebook.must("%gpu").data[-1]["text/plain"]
        for done in (one.result() for one in asked):
            assert remedy in done.stdout + done.stderr, done
            assert done.returncode == 1
    assert notebook.must(CHECK).text == "intact\n"
