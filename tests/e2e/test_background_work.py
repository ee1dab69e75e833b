"""A kernel whose threads or children use the GPU is not idle, although no cell runs."""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.kept import Kept
from tests.support.pair import NO_TURNS, Pair, new_pair
from tests.support.stories import CHECK
from tests.support.world import Notebook, World, until

pytestmark = pytest.mark.promise("race-background")

WORKER = """
import threading, time
from fractional_gpu.gpu.simulated import cuda
stop = threading.Event()
def work():
    while not stop.is_set():
        cuda.launch(5)
"""
THREAD = """
import threading
thread = threading.Thread(target=work, daemon=True)
thread.start()
"""
CHILD = """
import subprocess, sys
program = "from fractional_gpu.gpu.simulated import cuda; cuda.launch(0); print(flush=True); cuda.launch(600)"
child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
child.stdout.readline()
"""


def waits_for(world: World, second: Notebook, first: Notebook) -> bool:
    lease = world.lease(second.kernel_id)
    return lease.reason == "wait.busy-neighbour" and world.lease(first.kernel_id).working


@pytest.fixture(scope="module")
def kept_pair() -> Iterator[Kept[Pair]]:
    with Kept(partial(new_pair, NO_TURNS)) as kept:
        yield kept


@pytest.mark.parametrize(
    ("begin", "end"),
    [(THREAD, "stop.set(); thread.join()"), (CHILD, "child.kill(); child.wait()")],
    ids=["thread", "child"],
)
def test_a_kernel_that_works_in_the_background_keeps_its_device(pair: Pair, begin: str, end: str) -> None:
    world = pair.world
    first, second = pair.ready()
    first.must(WORKER + begin)
    before = world.lease(first.kernel_id).suspends
    cell = second.send(CHECK)
    until(lambda: waits_for(world, second, first), "the second kernel waits for the first one's background work")
    assert world.lease(first.kernel_id).suspends == before
    first.must(end)
    assert second.wait(cell).text == "intact\n"
    assert world.await_state(first.kernel_id, "suspended").suspends == before + 1


def test_who_asks_for_a_suspend_gets_it_between_two_pieces_of_work(pair: Pair) -> None:
    world = pair.world
    notebook, _ = pair.ready()
    notebook.must(WORKER.replace("launch(5)", "launch(0.01)") + THREAD)
    until(lambda: world.lease(notebook.kernel_id).working, "the work is seen")
    with world.client() as client:
        assert client.suspend(world.lease(notebook.kernel_id).lease_id).state == "suspended"
    notebook.must("stop.set(); thread.join()")
