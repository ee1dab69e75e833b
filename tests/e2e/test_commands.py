"""The commands with real kernels, and with a broker that crashed."""

import json

from tests.support.world import Server, World

HOLD = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(64 << 20)
buffer.write(b"held")
"""


def test_a_kernel_is_suspended_and_resumed_from_the_command_line_which_starts_a_crashed_broker_again(
    world: World, server: Server
) -> None:
    (name,) = world.install(250)
    notebook = server.start(name)
    notebook.must(HOLD)
    lease_id = world.lease(notebook.kernel_id).lease_id
    done = world.command("suspend", lease_id[:6], "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["leases"][0]["lease"]["state"] == "suspended"
    assert "96 MiB saved" in world.command("status").stdout
    assert "suspended because of `jupyter gpu suspend`" in world.command("explain", lease_id).stdout
    done = world.command("resume", notebook.kernel_id, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["leases"][0]["lease"]["state"] == "resident"
    assert notebook.must("print(buffer.read(4))").text == "b'held'\n"
    assert world.command("suspend", "--all").returncode == 0
    world.kill_broker()
    done = world.command("resume", "--all", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["leases"][0]["lease"]["state"] == "resident"
    assert notebook.must("print(buffer.read(4))").text == "b'held'\n"


def test_a_command_does_not_start_a_first_broker(world: World) -> None:
    done = world.command("status", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"running": False}
    assert world.broker_pid() is None
    done = world.command("suspend", "abc")
    assert done.returncode == 1
    assert "no broker is running" in done.stderr
