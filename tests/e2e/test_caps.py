"""A kernel that allocates past its cap without the framework's knowledge is caught, and the pool's policy is applied."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import websocket

from fractional_gpu.protocol.messages import LeaseRequest
from tests.support.paths import STRANGER
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("race-limits", "caps")

PAST = """
from fractional_gpu.gpu.simulated import context, cuda
context.memory_cap_bytes = lambda: None  # a direct allocation ignores the cap, whenever the kernel learns it
buffer = cuda.allocate(400 << 20)
buffer.write(b"abc")
"""


def story(world: World, notebook: Notebook) -> list[str]:
    with world.client() as client:
        return [line.reason for line in client.story(world.lease(notebook.kernel_id).lease_id).lines]


def heard(notebook: Notebook, words: str, before: str = "") -> str:
    came = [before]
    while words not in came[-1]:
        try:
            came.append(str(json.loads(notebook.socket.recv())["content"]))
        except websocket.WebSocketTimeoutException:
            pytest.fail(f"the notebook does not show {words!r}, but {came}")
    return came[-1]


def choose(world: World, choice: str) -> None:
    assert world.command("pool", "default", choice).returncode == 0


def test_it_is_warned_suspended_or_ended_as_the_pool_says(world: World, server: Server) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'breach': 'warn', 'idle_after': 'on-demand'}}")
    (name,) = world.install(250)
    notebook = server.start(name)
    shown = str(notebook.must(PAST).data)
    until(lambda: "breach.warn" in story(world, notebook), "the breach is noted")
    context_and_all = "432 MiB"
    assert context_and_all in heard(notebook, "more than its cap of 256 MiB", shown)
    assert world.lease(notebook.kernel_id).suspends == 0

    choose(world, "breach=suspend")
    lease = world.await_state(notebook.kernel_id, "suspended")
    assert lease.lease.saved_mib >= 400
    assert "suspend.breach" in story(world, notebook)
    choose(world, "breach=warn")
    assert notebook.must("print(buffer.read(3))").text == "b'abc'\n"

    pid = world.lease(notebook.kernel_id).pid
    assert pid is not None
    choose(world, "breach=kill")
    world.await_restart(notebook.kernel_id, pid)
    again = server.connect(notebook.kernel_id)
    again.send("1")
    # The cell's output is above the broker's message, or below it if that comes later.
    assert "256 MiB" in heard(again, "more than its cap")
    assert not Path(f"/proc/{pid}").exists()


def used_by_strangers(world: World) -> dict[int, int]:
    return {one.pid: one.used_mib for one in world.status().devices[0].strangers}


def test_a_stranger_is_shown_and_if_the_pool_says_so_ended(world: World) -> None:
    world.configure("c.GPUBroker.pools = {'default': {'strangers': 'ignore'}}")
    world.start_broker()
    with world.client() as client:
        client.create_lease(LeaseRequest(fraction_milli=250))  # otherwise the broker seldom looks at the device
    argv = [sys.executable, "-P", STRANGER, str(world.simulated_folder), "0", "64"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=world.environment) as stranger:
        try:
            until(lambda: used_by_strangers(world) == {stranger.pid: 96}, "it is shown, with all that it takes")
            assert stranger.poll() is None
            choose(world, "strangers=refuse")
            assert stranger.wait(60) < 0
        finally:
            stranger.kill()
    until(lambda: not world.status().devices[0].strangers, "the device is free of it")
