"""`%gpu` against a real broker: what it shows is true, and what it asks for happens."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.support import faults
from tests.support.shared_server import SharedServer
from tests.support.stories import SLEEPS
from tests.support.world import Notebook, Server, World, until

# The whole buffer counts as used; bytes that no test reads are not written, as moving them takes a second of
# processor time per GiB.
FILL = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(192 << 20)
buffer.write(b"x" * (1 << 20))
"""
MORE = "more = cuda.allocate(8 << 20), *globals().get('more', ())\n"


@pytest.fixture(scope="module")
def world(shared_server: SharedServer) -> Iterator[World]:
    """One broker for all tests of this file."""
    with shared_server.borrowed() as lent:
        yield lent


def text(shown: list[dict[str, str]]) -> str:
    return shown[-1]["text/plain"]


def test_what_the_notebook_shows_is_what_the_broker_knows_and_a_resize_takes_effect_at_once(
    world: World, server: Server
) -> None:
    quarter, half = world.install(250, 500)
    first, second = server.start(quarter), server.start(half)
    first.must(FILL)
    second.must(FILL)
    status = text(first.must("%gpu").data)
    assert "1/4 GPU, 256 MiB of device memory, pool default" in status
    assert "224 MiB of 256 MiB used" in status, "the cell before has just allocated it"
    for used in (232, 240, 248):
        assert f"{used} MiB of 256 MiB used" in text(first.must(f"{MORE}%gpu").data), "its first line has allocated it"
    assert "neighbours" in status
    assert "1/2 GPU" in status.partition("neighbours")[2]
    top = text(first.must("%gpu top").data)
    assert re.search(r"1/4 GPU, 256 MiB +this kernel +on the GPU", top)
    assert re.search(r"1/2 GPU, 512 MiB +Python 3 .*on the GPU", top)
    first.send("%gpu suspend")
    world.await_state(first.kernel_id, "suspended")
    assert "saved in host memory" in text(first.must("%gpu").data)
    first.must("buffer.read(1)")
    history = text(first.must("%gpu history").data)
    assert "░" in history
    assert "█" in history
    story = text(first.must("%gpu explain").data)
    assert "248 MiB restored" in story
    a_resize_takes_effect_without_a_restart_and_back(world, first)


BIG = """
big = cuda.allocate(512 << 20)
big.write(b"y" * (1 << 20))
"""


def a_resize_takes_effect_without_a_restart_and_back(world: World, notebook: Notebook) -> None:
    assert notebook.run(BIG).status == "error", "more than a quarter"
    assert "Its share is now 3/4 GPU, 768 MiB of device memory." in text(notebook.must("%gpu resize 3/4").data)
    notebook.must(BIG)
    assert world.lease(notebook.kernel_id).lease.reserved_mib == 768
    assert notebook.run("%gpu resize 1/4").status == "error", "less than is in use"
    assert text(notebook.must("%gpu explain").data).count("its size is now 3/4 GPU") == 1, "a refusal changed nothing"
    notebook.must("big.free()\ndel big")
    assert "Its share is now 1/4 GPU, 256 MiB" in text(notebook.must("%gpu resize 1/4").data)
    assert notebook.must("print(buffer.read(1))").text == "b'x'\n"
    assert notebook.run(BIG).status == "error"


def test_a_burst_takes_an_idle_neighbours_room_waits_for_a_busy_one_and_gives_it_back_however_it_ends(
    world: World, server: Server
) -> None:
    (half,) = world.install(500)
    first, second = server.start(half), server.start(half)
    assert world.command("pool", "default", "preempt=never").returncode == 0
    first.must(FILL)
    second.must(FILL)
    first.must("%%gpu 1\nbig = cuda.allocate(512 << 20)\nbig.write(b'y' * (1 << 20))\nbig.free()\ndel big")
    lease = world.lease(first.kernel_id)
    assert (lease.spec.fraction_milli, lease.spec.reserve_mib) == (500, 512)
    assert world.lease(second.kernel_id).suspends == 1
    assert second.must("print(buffer.read(1))").text == "b'x'\n"
    assert first.must("print(buffer.read(1))").text == "b'x'\n"
    assert world.lease(first.kernel_id).state == "resident", "both fit again"
    waits_says_why_and_can_be_interrupted(world, first, second)
    assert first.run("%%gpu 1\n1/0").status == "error"
    assert world.lease(first.kernel_id).spec.fraction_milli == 500
    running = first.send(f"%%gpu 1\nprint('on')\n{SLEEPS}")
    printed(first, running)
    assert world.lease(first.kernel_id).spec.fraction_milli == 1000
    first.interrupt()
    assert first.wait(running).status == "error"
    assert world.lease(first.kernel_id).spec.fraction_milli == 500


def printed(notebook: Notebook, cell: str) -> str:
    for message in notebook.messages(cell):
        if message["msg_type"] == "stream":
            return str(message["content"]["text"])
    raise AssertionError("the cell ended and printed nothing")


def waits_says_why_and_can_be_interrupted(world: World, first: Notebook, second: Notebook) -> None:
    """The first kernel's larger request does not fit next to a cell of the second one."""
    working = second.send(f"print('on')\n{SLEEPS}")
    printed(second, working)
    asking = first.send("%%gpu 1\nprint('ran')")
    for message in first.messages(asking):
        if "is waiting for its new share" in message["content"].get("data", {}).get("text/plain", ""):
            break
    first.interrupt()
    reply = first.wait(asking)
    assert (reply.status, "ran" in reply.text) == ("error", False)
    until(lambda: world.lease(first.kernel_id).position is None, "the broker has seen that it gave up")
    assert world.lease(first.kernel_id).spec.fraction_milli == 500
    second.interrupt()
    assert second.wait(working).status == "error"
    assert first.must("%%gpu 1\nprint('ran')").text == "ran\n"


def test_a_resume_may_overlap_a_cell_and_an_idle_suspension_is_announced_beneath_the_last_one_unless_pinned(
    world: World, server: Server
) -> None:
    (whole,) = world.install(1000)
    notebook = server.start(whole)
    notebook.must(FILL)
    a_pool_may_let_a_cell_run_on_while_its_memory_comes_back(world, notebook)
    assert world.command("pool", "default", "idle_after=10s", "warn_before=9s", "min_residency=0").returncode == 0
    notebook.must("buffer.read(1)")
    while True:  # after the cell's end: the kernel is idle
        message = json.loads(notebook.socket.recv())
        if "This kernel is idle" in message["content"].get("data", {}).get("text/plain", ""):
            break
    assert world.lease(notebook.kernel_id).state == "resident"
    assert "Pinned for 10 min" in text(notebook.must("%gpu pin 10m").data)
    assert world.lease(notebook.kernel_id).pinned_ms > 500_000
    notebook.must("%gpu unpin")
    assert world.command("pool", "default", "idle_after=1s", "warn_before=0").returncode == 0
    world.await_state(notebook.kernel_id, "suspended")
    told = text(notebook.must("%gpu explain").data)
    assert "pinned" in told
    with world.client() as client:
        reasons = [line.reason for line in client.story(world.lease(notebook.kernel_id).lease_id).lines]
    assert reasons.index("suspend.announced") < reasons.index("suspend.idle")
    assert notebook.must("print(buffer.read(1))").text == "b'x'\n"


def a_pool_may_let_a_cell_run_on_while_its_memory_comes_back(world: World, notebook: Notebook) -> None:
    assert world.command("pool", "default", "overlap_resume=true").returncode == 0
    notebook.send("%gpu suspend")
    world.await_state(notebook.kernel_id, "suspended")
    fault = faults.inject(world.simulated_folder, "restore", "hang")
    request = notebook.send("print('on the processor'); print(buffer.read(1))")
    for message in notebook.messages(request):
        if message["msg_type"] == "stream":
            assert message["content"]["text"] == "on the processor\n"
            break
    assert world.lease(notebook.kernel_id).state == "resuming"
    faults.remove(world.simulated_folder, fault)
    assert notebook.wait(request).text == "b'x'\n"
    assert notebook.must("print(buffer.read(1))").text == "b'x'\n"
    assert world.lease(notebook.kernel_id).position is None
    assert world.command("pool", "default", "overlap_resume=false").returncode == 0
