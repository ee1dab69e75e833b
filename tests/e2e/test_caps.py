"""A kernel that allocates past its cap behind the framework's back is caught, and the pool's choice is carried out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import websocket

from tests.support.paths import STRANGER
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("race-limits", "caps")

PAST = """
from fractional_gpu.gpu.simulated import context, cuda
context.memory_cap_bytes = lambda: None  # what allocates directly knows no cap, whenever the kernel is told of it
buffer = cuda.allocate(400 << 20)
buffer.write(b"abc")
"""


def story(world: World, notebook: Notebook) -> list[str]:
    with world.client() as client:
        return [line.reason for line in client.story(world.lease(notebook.kernel_id).lease_id).lines]


def past_its_cap(world: World, server: Server, breach: str) -> tuple[Notebook, str]:
    """A notebook that has more than its cap, and what that cell showed."""
    world.configure(f"c.GPUBroker.pools = {{'default': {{'breach': {breach!r}, 'idle_after': 'on-demand'}}}}")
    (name,) = world.install(250)
    notebook = server.start(name)
    return notebook, str(notebook.must(PAST).data)


def heard(notebook: Notebook, words: str, before: str = "") -> str:
    """The first of what was shown before and of the messages that has these words; fails when nothing comes any more."""
    came = [before]
    while words not in came[-1]:
        try:
            came.append(str(json.loads(notebook.socket.recv())["content"]))
        except websocket.WebSocketTimeoutException:
            pytest.fail(f"the notebook does not show {words!r}, but {came}")
    return came[-1]


def test_it_is_warned(world: World, server: Server) -> None:
    notebook, shown = past_its_cap(world, server, "warn")
    until(lambda: "breach.warn" in story(world, notebook), "the breach is noted")
    assert "432 MiB" in heard(
        notebook, "more than its cap of 256 MiB", shown
    )  # the context's memory is the kernel's, too
    assert world.lease(notebook.kernel_id).suspends == 0


def test_it_is_suspended_and_comes_back_with_all_it_had(world: World, server: Server) -> None:
    notebook, _ = past_its_cap(world, server, "suspend")
    lease = world.await_state(notebook.kernel_id, "suspended")
    assert lease.lease.saved_mib >= 400
    assert "suspend.breach" in story(world, notebook)
    assert notebook.must("print(buffer.read(3))").text == "b'abc'\n"


def test_it_is_ended_and_the_next_kernel_says_why(world: World, server: Server) -> None:
    notebook, _ = past_its_cap(world, server, "kill")
    pid = world.lease(notebook.kernel_id).pid

    def restarted() -> bool:
        return world.lease(notebook.kernel_id).pid not in (None, pid)

    until(restarted, "the server starts the kernel anew")
    anew = server.connect(notebook.kernel_id)
    anew.send("1")
    # Above that cell, or beneath it when the broker's word comes later.
    assert "256 MiB" in heard(anew, "more than its cap")
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


def used_by_strangers(world: World) -> dict[int, int]:
    """How much of the one device the processes without a lease have, MiB."""
    return {one.pid: one.used_mib for one in world.status().devices[0].strangers}


@pytest.mark.parametrize("refused", [False, True])
def test_a_stranger_is_shown_and_if_the_pool_says_so_ended(world: World, server: Server, refused: bool) -> None:
    strangers = "refuse" if refused else "show"
    world.configure(f"c.GPUBroker.pools = {{'default': {{'strangers': {strangers!r}}}}}")
    (name,) = world.install(250)
    server.start(name)
    (device,) = world.status().devices
    argv = [sys.executable, "-P", STRANGER, str(world.simulated_folder), "0", "64"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=world.environment) as stranger:
        try:
            until(lambda: used_by_strangers(world) == {stranger.pid: 96}, "it is shown, with all that it takes")
            if refused:
                assert stranger.wait(60) < 0
            else:
                assert stranger.poll() is None
        finally:
            stranger.kill()
    until(lambda: not world.status().devices[0].strangers, f"device {device.device_id} is free of it")
