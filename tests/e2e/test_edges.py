"""What else may happen to a kernel that is suspended or about to be: no process hangs for ever, and nothing is lost."""

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest

from fractional_gpu.gpu.simulated.processes import processes_of
from fractional_gpu.gpu.simulated.store import Store
from tests.support.kept import Kept
from tests.support.pair import Pair, new_pair
from tests.support.stories import BLOCKED, CHECK, UNINTERRUPTIBLE, fill
from tests.support.victims import stopped_or_traced
from tests.support.world import Notebook, World, until

CHILD = """
import hashlib, sys
from fractional_gpu.gpu.simulated import cuda
def work(lines, answer):
    buffer = cuda.allocate(8 << 20)
    buffer.fill(b"child")
    answer("ready")
    for _ in lines:
        answer(buffer.sha256())
"""
SUBPROCESS = f"""
import hashlib, subprocess, sys
code = {CHILD!r} + "work(sys.stdin, lambda line: print(line, flush=True))"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
ask = lambda: (child.stdin.write("\\n"), child.stdin.flush())
answer = lambda: child.stdout.readline().strip()
end = lambda: child.communicate()
"""
FORK = f"""
import multiprocessing
exec({CHILD!r})
def forked(pipe):
    def lines():
        while True:
            yield pipe.recv()
    work(lines(), pipe.send)
pipe, other = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=forked, args=(other,), daemon=True)
child.start()
ask = lambda: pipe.send("")
answer = lambda: pipe.recv()
end = lambda: child.join()
"""
CHILDREN = {
    "its own session": SUBPROCESS,
    "fork": FORK,
}
BEGIN = """
assert answer() == "ready"
ask()
child_digest = answer()
"""
TOUCHING = """
class Touching:
    __doc__ = property(lambda self: str(buffer.read(1)))
    def __dir__(self):
        return [f"found_{buffer.read(1)[0]}"]
touching = Touching()
"""
IN_THREAD = """
import threading
count, stop = 0, threading.Event()
def use():
    global count
    while not stop.wait(0.001):
        assert buffer.read(4) == start
        count += 1
start = buffer.read(4)
thread = threading.Thread(target=use, daemon=True)
thread.start()
"""


TASK = """%%cpu
import asyncio
async def later():
    global seen
    seen = buffer.sha256() == digest
task = asyncio.create_task(later())
"""


@pytest.fixture(scope="module")
def kept_pair() -> Iterator[Kept[Pair]]:
    pools = {"default": {"preempt": "priorities", "retry_refused": "1s", "min_residency": "1s"}}
    with Kept(partial(new_pair, f"c.GPUBroker.pools = {pools}")) as kept:
        yield kept


def phases(world: World) -> list[str]:
    store = Store(world.simulated_folder)
    try:
        return sorted(process.phase for process in processes_of(store))
    finally:
        store.close()


def shown(notebook: Notebook, text: str) -> None:
    while text not in json.dumps(json.loads(notebook.socket.recv())["content"].get("data", {})):
        pass


def test_gpu_suspend_and_resume_in_a_notebook(pair: Pair) -> None:
    world = pair.world
    other, notebook = pair.ready()
    notebook.send("%gpu suspend")
    shown(notebook, "Suspended: this kernel's GPU memory is saved")
    assert world.lease(notebook.kernel_id).state == "suspended"
    assert phases(world) == ["saved", "saved"]
    assert "saved in host memory" in notebook.must("%gpu").data[0]["text/plain"]
    assert "suspended because of `%gpu suspend`" in notebook.must("%gpu explain").data[0]["text/plain"]
    assert world.lease(notebook.kernel_id).state == "suspended"  # looking does not bring it back
    assert "on the GPU" in notebook.must("%gpu resume").data[-1]["text/plain"]
    assert world.lease(notebook.kernel_id).state == "resident"
    assert notebook.must(CHECK).text == "intact\n"
    notebook.must("%gpu suspend\n%gpu suspend")  # twice in one cell
    world.await_state(notebook.kernel_id, "suspended")
    assert notebook.must(CHECK).text == "intact\n"
    assert other.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-requests")
def test_a_silent_execute_brings_the_memory_back(pair: Pair) -> None:
    first, second = pair.ready()
    assert first.wait(first.send("silent_result = buffer.sha256() == digest", silent=True)).status == "ok"
    assert pair.world.lease(first.kernel_id).state == "resident"
    assert first.must("print(silent_result)").text == "True\n"
    assert second.must(CHECK).text == "intact\n"


WARM_COMPLETION = """%%cpu
# The first completion of a process may take longer than the moment after which a busy kernel is taken for blocked.
from IPython.core.completer import provisionalcompleter
with provisionalcompleter():
    list(get_ipython().Completer.completions("buffer.rea", 10))
"""


def test_completion_on_a_suspended_kernel_answers_at_once_and_leaves_it_suspended(pair: Pair) -> None:
    first, second = pair.ready()
    first.must(WARM_COMPLETION)
    answer = first.ask("complete_request", {"code": "buffer.rea", "cursor_pos": 10})
    assert "read" in " ".join(answer["matches"])
    assert pair.world.lease(first.kernel_id).state == "suspended"
    assert second.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-requests")
def test_completion_and_inspection_that_touch_the_gpu_bring_the_memory_back(pair: Pair) -> None:
    first, second = pair.ready(TOUCHING)
    for kind, code in (("complete_request", "touching.found"), ("inspect_request", "touching")):
        begun = time.monotonic()
        answer = first.ask(kind, {"code": code, "cursor_pos": len(code), "detail_level": 0})
        assert answer["status"] == "ok"
        assert time.monotonic() - begun < 15  # noticed within a moment, not at some later look
        pair.world.await_state(first.kernel_id, "resident")
        assert first.must(CHECK).text == "intact\n"
        assert second.must(CHECK).text == "intact\n"
        pair.world.await_state(first.kernel_id, "suspended")


@pytest.mark.promise("race-background")
def test_a_background_thread_is_held_while_suspended_and_goes_on_afterwards(pair: Pair) -> None:
    first, second = pair.ready(IN_THREAD)
    counted = [first.must("%%cpu\nprint(count)").text for _ in range(3)]
    assert len(set(counted)) == 1
    assert second.must(CHECK).text == "intact\n"
    first.must(f"while count <= {int(counted[0])}: pass")
    first.must("stop.set()\nthread.join()\nassert not thread.is_alive()")
    assert first.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-background")
def test_a_task_that_outlives_its_cell_and_blocks_on_the_gpu_gets_a_suspended_kernel_back(pair: Pair) -> None:
    first, second = pair.ready()
    first.must(TASK)  # runs after the cell and blocks the main loop
    assert first.must("%%cpu\nprint(seen)").text == "True\n"
    assert pair.world.lease(first.kernel_id).state == "resident"
    assert second.must(CHECK).text == "intact\n"
    assert first.must(CHECK).text == "intact\n"


@pytest.mark.promise("race-background")
@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_process_is_suspended_and_resumed_with_its_kernel(pair: Pair, kind: str) -> None:
    world = pair.world
    first, second = pair.ready(CHILDREN[kind] + BEGIN)
    digest = first.must("%%cpu\nprint(child_digest)").text
    lease = world.lease(first.kernel_id)
    assert phases(world) == ["device", "saved", "saved"]
    assert lease.lease.saved_mib >= 4 + 8
    first.must("%%cpu\nask()")  # the child tries to use the GPU, and must wait
    assert second.must(CHECK).text == "intact\n"
    assert first.must("print(answer())").text == digest
    assert first.must(CHECK).text == "intact\n"
    world.await_state(second.kernel_id, "suspended")
    assert phases(world) == ["device", "device", "saved"]
    first.must("child.kill()\nend()")


@pytest.mark.promise("race-cell")
def test_a_cell_that_starts_in_the_middle_of_a_swap_loses_nothing(pair: Pair) -> None:
    world = pair.world
    first, second = pair.ready()
    for step in ("restore", "lock", "checkpoint"):  # each makes the other one leave
        with stopped_or_traced(world, step, "slow:1000"):
            cell = first.send(CHECK)
            if step == "restore":
                world.await_state(first.kernel_id, "resuming")
            else:
                world.await_state(second.kernel_id, "suspending")
            meanwhile = second.send(CHECK)
            assert second.wait(meanwhile).text == "intact\n"
            assert first.wait(cell).text == "intact\n"
        for notebook in (first, second):
            assert notebook.must(CHECK).text == "intact\n"
        assert "failed" not in phases(world)


def test_an_interrupt_reaches_a_cell_that_said_it_needs_no_gpu_and_is_blocked_on_it(pair: Pair) -> None:
    _, second = pair.ready()
    first = pair.server.start(pair.spec)
    first.must(UNINTERRUPTIBLE + fill(1))
    assert second.must(CHECK).text == "intact\n"
    pair.world.await_state(first.kernel_id, "suspended")
    cell = first.send(BLOCKED)
    until((pair.world.notebooks / "blocked").exists, "the first one is blocked")
    first.interrupt()
    assert first.wait(cell).error.startswith("KeyboardInterrupt")
    assert first.must(CHECK).text == "intact\n"
    assert second.must(CHECK).text == "intact\n"


def test_a_kernel_that_was_blocked_by_its_finished_work_becomes_idle_again(pair: Pair) -> None:
    """GPU work that a cell leaves running in a thread delays the suspend without breaking it."""
    first, _ = pair.ready("import threading\nthreading.Thread(target=cuda.launch, args=(1.0,), daemon=True).start()")
    assert first.must(CHECK).text == "intact\n"
    assert until(lambda: "saved" in phases(pair.world), "the second one is suspended for the first")


WORKER = """
import threading, time
from fractional_gpu.gpu.simulated import cuda
stop = threading.Event()
def work():
    while not stop.is_set():
        cuda.launch(5)
"""
WORKING_THREAD = """
import threading
thread = threading.Thread(target=work, daemon=True)
thread.start()
"""
WORKING_CHILD = """
import subprocess, sys
program = "from fractional_gpu.gpu.simulated import cuda; cuda.launch(0); print(flush=True); cuda.launch(600)"
child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
child.stdout.readline()
"""


def waits_for(world: World, second: Notebook, first: Notebook) -> bool:
    lease = world.lease(second.kernel_id)
    return lease.reason == "wait.busy-neighbour" and world.lease(first.kernel_id).working


@pytest.mark.promise("race-background")
@pytest.mark.parametrize(
    ("begin", "end"),
    [(WORKING_THREAD, "stop.set(); thread.join()"), (WORKING_CHILD, "child.kill(); child.wait()")],
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


@pytest.mark.promise("race-background")
def test_who_asks_for_a_suspend_gets_it_between_two_pieces_of_work(pair: Pair) -> None:
    world = pair.world
    notebook, _ = pair.ready()
    notebook.must(WORKER.replace("launch(5)", "launch(0.01)") + WORKING_THREAD)
    until(lambda: world.lease(notebook.kernel_id).working, "the work is seen")
    with world.client() as client:
        assert client.suspend(world.lease(notebook.kernel_id).lease_id).state == "suspended"
    notebook.must("stop.set(); thread.join()")
