"""A kernel that waits in `input()` delays no neighbour, and has the GPU again before its cell continues."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fractional_gpu.protocol.messages import ResumeRequest
from tests.e2e.test_edges import WORKING_CHILD
from tests.support.kept import Kept
from tests.support.pair import Pair, new_pair
from tests.support.stories import CHECK, fill
from tests.support.world import DEADLINE_S, Notebook, until

pytestmark = pytest.mark.promise("input")

ASK = "text = input('go on? ')\n"
GOES_ON = """
import os, time
try:
    input('go on? ')
except KeyboardInterrupt:
    while not os.path.exists('end'):
        time.sleep(0.01)
"""
BUSY = "import os, time\nopen('running', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)"


@pytest.fixture(scope="module")
def kept_pair() -> Iterator[Kept[Pair]]:
    with Kept(new_pair) as kept:
        yield kept


def two(pair: Pair) -> tuple[Notebook, Notebook]:
    first, second = pair.ready()
    assert first.must(CHECK).text == "intact\n"
    return first, second


def test_a_neighbour_has_the_device_while_a_cell_waits_for_input_which_goes_on_with_its_bytes(pair: Pair) -> None:
    first, second = two(pair)
    cell = first.send(ASK + CHECK, stdin=True)
    assert first.prompted() == "go on? "
    second.must(fill(2))
    assert pair.world.lease(first.kernel_id).state == "suspended"
    first.answer("yes")
    assert first.wait(cell).text == "intact\n"
    assert first.must("print(text)").text == "yes\n"
    assert second.must(CHECK).text == "intact\n"


def test_the_answer_waits_for_its_turn_and_says_so_and_an_interrupt_ends_the_wait(pair: Pair) -> None:
    first, second = two(pair)
    cell = first.send(ASK + CHECK, stdin=True)
    first.prompted()
    busy = second.send(BUSY)
    until((pair.world.notebooks / "running").exists, "the neighbour's cell runs")
    first.answer("yes")
    until(lambda: pair.world.lease(first.kernel_id).position == 1, "the answer has a ticket")
    while "is waiting for the GPU" not in str(json.loads(first.socket.recv())["content"]):
        pass
    first.interrupt()
    assert first.wait(cell).error.startswith("KeyboardInterrupt")
    until(lambda: pair.world.lease(first.kernel_id).position is None, "the ticket is withdrawn")
    (pair.world.notebooks / "go").touch()
    assert second.wait(busy).status == "ok"
    assert first.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-interrupt")
def test_what_an_interrupt_asks_for_a_kernel_that_may_be_blocked_is_withdrawn_when_it_is_not(pair: Pair) -> None:
    """After an interrupt a cell runs without its memory and may block in a GPU call, so the server asks for the memory a second later.

    By then, or while it waits, the cell may have ended: a busy neighbour must not make room for an idle kernel.
    """
    first, second = two(pair)
    cell = first.send(GOES_ON, stdin=True)
    first.prompted()
    busy = second.send(BUSY)
    until((pair.world.notebooks / "running").exists, "the neighbour's cell runs")
    lease = pair.world.lease(first.kernel_id)
    assert lease.pid is not None
    os.kill(lease.pid, signal.SIGINT)  # not by the server, which would ask too
    until(lambda: pair.world.lease(first.kernel_id).busy, "the cell continues")
    with ThreadPoolExecutor() as threads, pair.world.client() as client:
        asked = threads.submit(client.resume, lease.lease_id, ResumeRequest(if_blocked=True))
        until(lambda: pair.world.lease(first.kernel_id).position == 1, "it waits to come back")
        (pair.world.notebooks / "end").touch()
        assert first.wait(cell).status == "ok"
        assert asked.result(DEADLINE_S).state == "suspended"
        assert client.resume(lease.lease_id, ResumeRequest(if_blocked=True)).state == "suspended", "it is idle"
    ended = pair.world.lease(first.kernel_id)
    assert (ended.busy, ended.position, ended.resumes) == (False, None, lease.resumes)
    (pair.world.notebooks / "go").touch()
    assert second.wait(busy).status == "ok"
    assert first.must(CHECK).text == "intact\n"


def test_a_kernel_whose_child_works_while_its_cell_waits_for_input_is_not_idle(pair: Pair) -> None:
    world = pair.world
    first, second = two(pair)
    assert world.command("pool", "default", "preempt=never").returncode == 0
    suspends = world.lease(first.kernel_id).suspends
    asking = first.send(WORKING_CHILD + ASK + CHECK, stdin=True)
    first.prompted()
    cell = second.send(fill(2))
    until(lambda: world.lease(first.kernel_id).working, "the counters show the work")
    assert world.lease(first.kernel_id).suspends == suspends
    first.answer("yes")
    assert first.wait(asking).text == "intact\n"
    first.must("child.kill(); child.wait()")
    assert second.wait(cell).status == "ok"
    assert world.command("pool", "default", "preempt=fair").returncode == 0


def test_a_kernel_that_is_shut_down_while_it_waits_for_input_without_its_share_leaves_nothing(pair: Pair) -> None:
    first, second = two(pair)
    first.send(ASK, stdin=True)
    first.prompted()
    second.must(fill(2))
    first.shut_down()
    assert second.must(CHECK).text == "intact\n"
    until(lambda: [lease.kernel_id for lease in pair.world.status().leases] == [second.kernel_id], "its lease is over")
