"""GUI event loops in kernels (`%gui`): such a kernel is suspended when idle, and its loop runs before and after the resume."""

import os
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, Server, World, new_world, until

pytestmark = pytest.mark.promise("race-main-loop")

COUNT = """
def tick():
    with open("ticks", "a") as file:
        file.write(".")
"""
QT = """
from PyQt5.QtCore import QTimer
from PyQt5.QtWidgets import QLabel
%gui qt
window = QLabel("in a window")
window.show()
timer = QTimer(window)
timer.timeout.connect(tick)
timer.start(10)
"""
TK = """
import tkinter
window = tkinter.Tk()
def tick_again():
    tick()
    window.after(10, tick_again)
tick_again()
%gui tk
"""
ASYNCIO = """
import asyncio
async def tick_on():
    while True:
        tick()
        await asyncio.sleep(0.01)
task = asyncio.create_task(tick_on())
%gui asyncio
"""
REGISTERED = """
import time
from ipykernel.eventloops import get_shell_stream, register_integration
@register_integration("polled")
def poll(kernel):
    stream, ends_s = get_shell_stream(kernel), time.monotonic() + 20
    while not stream.flush(limit=1) and time.monotonic() < ends_s:  # ipykernel may leave a message until the loop ends
        tick()
        time.sleep(0.01)
%gui polled
"""
LOOPS = {"qt": QT, "tk": TK, "asyncio": ASYNCIO}


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    readable, writable = os.pipe()
    with subprocess.Popen(
        ["Xvfb", "-displayfd", str(writable), "-nolisten", "tcp"], pass_fds=[writable], stderr=subprocess.DEVNULL
    ) as server:
        os.close(writable)
        with os.fdopen(readable) as number:
            yield f":{number.readline().strip()}"
        server.terminate()


@pytest.fixture(scope="module")
def desk(display: str) -> Iterator[Server]:
    """A server whose kernels can open windows, and leave the GPU as soon as they are idle."""
    with new_world() as world:
        world.environment |= {"DISPLAY": display, "QT_QPA_PLATFORM": "offscreen", "XDG_RUNTIME_DIR": str(world.folder)}
        world.configure("c.GPUBroker.pools = {'default': {'idle_after': 0, 'min_residency': 0}}")
        with Server(world) as server:
            yield server


@contextmanager
def nudged(notebook: Notebook) -> Iterator[None]:
    """Send a small message every five seconds: ipykernel may leave a message that comes while it enters a GUI loop until the next one."""
    over = threading.Event()

    def nudge() -> None:
        while not over.wait(5):
            notebook._send("shell", "kernel_info_request", uuid.uuid4().hex, {})

    thread = threading.Thread(target=nudge)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def await_ticks(world: World) -> None:
    """Wait until the loop has run on. This sends no message, which would wake the loop."""
    ticks = world.notebooks / "ticks"
    before = ticks.stat().st_size if ticks.exists() else 0
    until(lambda: ticks.exists() and ticks.stat().st_size > before, "the loop continues")


def await_suspend(world: World, notebook: Notebook, number: int) -> None:
    until(lambda: world.lease(notebook.kernel_id).suspends >= number, f"suspend {number} of the kernel with a GUI")
    world.await_state(notebook.kernel_id, "suspended")


@pytest.mark.parametrize("loop", list(LOOPS))
def test_an_idle_kernel_with_a_gui_event_loop_is_suspended_and_its_loop_runs_after_the_resume(
    desk: Server, loop: str
) -> None:
    world = desk.world
    (name,) = world.install(250)
    notebook = desk.start(name)
    with nudged(notebook):
        notebook.must(fill(1))
        await_suspend(world, notebook, 1)
        notebook.must(COUNT + LOOPS[loop])
        await_suspend(world, notebook, 2)
        await_ticks(world)
        assert world.lease(notebook.kernel_id).suspends == 2
        assert notebook.must(CHECK).text == "intact\n"
        await_ticks(world)
        await_suspend(world, notebook, 3)
    notebook.shut_down()


def test_a_kernel_with_a_gui_event_loop_is_suspended_when_it_is_asked_to_and_makes_room(
    desk: Server,
) -> None:
    world = desk.world
    assert world.command("pool", "default", "idle_after=on-demand").returncode == 0
    (name,) = world.install(750)
    first, second = desk.start(name), desk.start(name)
    with nudged(first):
        first.must(fill(1) + COUNT + REGISTERED)
        await_ticks(world)  # ipykernel may leave a message that comes while it enters the loop until the next one
        asked = first.send("%gpu suspend")
        while "Suspended" not in str(first.await_message("update_display_data", asked)):
            pass
        assert world.lease(first.kernel_id).state == "suspended"
        assert first.must(CHECK).text == "intact\n"
        second.must(fill(2))
        world.await_state(first.kernel_id, "suspended")
        assert first.must(CHECK).text == "intact\n"
