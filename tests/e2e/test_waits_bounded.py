"""A kernel that always wants the GPU delays another one no longer than its turn.

Each neighbour continues as long as the other kernel waits. The tests print the waits; `docs/policies.md` gives their bounds.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.stories import CHECK as INTACT
from tests.support.stories import fill
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("race-gate", "bounded-wait")

ALLOCATE = (
    "from fractional_gpu.gpu.simulated import cuda\nbuffer = cuda.allocate(64 << 20)\nbuffer.write(b'x' * (4 << 20))"
)
CHECK = "assert buffer.read(4 << 20) == b'x' * (4 << 20), 'the bytes differ'"
WORK = "import pathlib\nwhile not pathlib.Path({end!r}).exists():\n    cuda.launch(0.02)"
EXECV = "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'])"
TURN_S = 1.0
SHORT_TURN_S = 0.5  # while it lasts, cells without a pause keep a processor busy


@contextmanager
def cells(notebook: Notebook, pause_s: float) -> Iterator[Callable[[], int]]:
    over, done = threading.Event(), 0

    def work() -> None:
        nonlocal done
        while not over.is_set():
            notebook.must("1 + 1")
            done += 1
            over.wait(pause_s)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(lambda: done > 20, "the neighbour runs cells")
        yield lambda: done
    finally:
        over.set()
        thread.join()


@contextmanager
def one_cell(notebook: Notebook, end: Path) -> Iterator[None]:
    cell = notebook.send(WORK.format(end=str(end)))
    try:
        yield
    finally:
        end.touch()
    assert notebook.wait(cell).status == "ok"


def wait_of(notebook: Notebook, world: World, neighbour: Notebook, kind: str) -> None:
    before, begun_s = world.lease(neighbour.kernel_id), time.monotonic()
    notebook.must(ALLOCATE)
    waited_s = time.monotonic() - begun_s
    print(f"beside {kind}: waited {waited_s:.2f} s")  # noqa: T201 - the figure is printed on purpose
    after = world.lease(neighbour.kernel_id)  # on a slow machine it may have had its next turn since
    assert after.state != "resident" or after.suspends > before.suspends


def _configure(world: World, preempt: str, more: str = "") -> None:
    policy = {"min_residency": f"{TURN_S:g}s", "min_residency_swaps": 1} | ({"preempt": preempt} if preempt else {})
    world.configure(f"c.GPUBroker.pools = {{'default': {policy!r}}}\n{more}")


def small_cells(world: World, first: Notebook, second: Notebook, pause_s: float) -> None:
    with cells(first, pause_s) as done:
        wait_of(second, world, first, f"small cells, pauses of {pause_s:g} s")
        before = done()
        until(lambda: done() > before, "the neighbour continues when its turn comes again")
    second.must(CHECK)


@pytest.mark.promise("race-unused-room")
def test_a_kernel_makes_room_after_its_turn_whatever_it_does(world: World, server: Server) -> None:
    _configure(world, "")
    (name,) = world.install(1000)
    first, second = server.start(name), server.start(name)
    first.must("1 + 1")
    small_cells(world, first, second, pause_s=0.05)  # it has no context yet
    its_cell_keeps_its_room_and_the_wait_says_what_to_do(world, first, second)
    a_pool_may_take_the_room_until_the_cell_uses_it(world, first, second)
    turn = ("preempt=fair", f"min_residency={SHORT_TURN_S:g}s")
    assert world.command("pool", "default", *turn).returncode == 0
    small_cells_one_that_never_ends_and_another_program_make_room(world, first, second)


def small_cells_one_that_never_ends_and_another_program_make_room(
    world: World, first: Notebook, second: Notebook
) -> None:
    first.must(ALLOCATE)
    small_cells(world, first, second, pause_s=0.0)
    first.must(CHECK)
    with one_cell(first, world.folder / "end"):
        wait_of(second, world, first, "a cell that never ends")
    second.must(CHECK)
    first.must(CHECK)
    assert world.command("pool", "default", "preempt=never").returncode == 0
    small_cells(world, first, second, pause_s=0.05)
    first.must(CHECK)
    assert world.command("pool", "default", "preempt=fair").returncode == 0
    first.send(EXECV)
    wait_of(second, world, first, "os.execv")
    second.must(CHECK)


UNTIL = "import pathlib, time\nwhile not pathlib.Path({go!r}).exists():\n    time.sleep(0.01)\n"


def looked(world: World) -> bool:
    """Make the broker look at the device at once; if nothing changes it seldom does."""
    with world.client() as client:
        client.status(fresh=True)
    return True


def its_cell_keeps_its_room_and_the_wait_says_what_to_do(world: World, first: Notebook, second: Notebook) -> None:
    go = world.folder / "keeps"
    cell = first.send(UNTIL.format(go=str(go)))
    until(lambda: world.lease(first.kernel_id).state == "resident", "its cell runs, with room")
    looked(world)
    waits = second.send(ALLOCATE)
    lines = (str(message["content"].get("data", {}).get("text/plain", "")) for message in second.messages(waits))
    line = next(line for line in lines if "has not used the GPU, and keeps its room until the cell ends" in line)
    assert "start it with %%cpu, or have an administrator evict the kernel" in line
    go.touch()
    assert first.wait(cell).status == second.wait(waits).status == "ok"


def a_pool_may_take_the_room_until_the_cell_uses_it(world: World, first: Notebook, second: Notebook) -> None:
    assert world.command("pool", "default", "max_unused_hold=1s", "preempt=never").returncode == 0
    go, end = world.folder / "go", world.folder / "end"
    cell = first.send(UNTIL.format(go=str(go)) + ALLOCATE + "\n" + UNTIL.format(go=str(end)))
    until(lambda: world.lease(first.kernel_id).state == "resident", "its cell runs, with room")
    looked(world)
    wait_of(second, world, first, "a cell that has not used the GPU")
    assert world.lease(first.kernel_id).state == "unarmed"
    go.touch()  # nothing keeps the cell from the GPU: there it counts as a stranger until its ticket is served
    until(
        lambda: looked(world) and world.lease(first.kernel_id).state == "resident",
        "it is admitted on the device that it uses",
    )
    assert world.lease(second.kernel_id).state == "suspended"
    end.touch()
    reply = first.wait(cell)
    assert reply.status == "ok"
    assert any("has held its share of the GPU without using it" in str(shown) for shown in reply.data)
    for notebook in (first, second):
        notebook.must(CHECK)


USE_MIB, CONTEXT_MIB, CAP_MIB, BUDGET_MIB = 72, 32, 128, 220


@pytest.mark.promise("race-host-memory")
def test_busy_kernels_whose_caps_the_host_could_not_hold_take_turns(world: World, server: Server) -> None:
    """Of four kernels two are saved at any time, and a third while they change places: three fit in host memory by use, not by cap."""
    assert 3 * USE_MIB <= BUDGET_MIB < 2 * USE_MIB + CAP_MIB
    _configure(world, "fair", f"c.GPUBroker.host_memory = '{BUDGET_MIB}MiB'")
    world.start_broker("1x256MiB")
    with ExitStack() as busy:
        (name,) = world.install(500)
        notebooks = [server.start(name) for _ in range(4)]
        for seed, notebook in enumerate(notebooks):
            notebook.must(fill(seed, USE_MIB - CONTEXT_MIB))
        for notebook in notebooks[2:]:
            busy.enter_context(one_cell(notebook, world.folder / f"{notebook.kernel_id}.end"))
        for notebook in notebooks[:2]:
            assert notebook.must(INTACT).text == "intact\n"
        busy.close()
        for notebook in notebooks:
            assert notebook.must(INTACT).text == "intact\n"
        assert {world.lease(notebook.kernel_id).lease.saved_mib for notebook in notebooks} == {0, USE_MIB}
