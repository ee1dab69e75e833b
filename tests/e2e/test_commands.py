"""The commands meet real kernels, and a broker that crashed."""

import json
import subprocess
import sys

from tests.support.world import Server, World

HOLD = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(64 << 20)
buffer.write(b"held")
"""


def run(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.commands.main", *words],
        env=world.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_kernel_is_suspended_and_resumed_from_the_command_line(world: World, server: Server) -> None:
    (name,) = world.install(250)
    notebook = server.start(name)
    notebook.must(HOLD)
    lease_id = world.lease(notebook.kernel_id).lease_id
    done = run(world, "suspend", lease_id[:6], "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["leases"][0]["lease"]["state"] == "suspended"
    assert "96 MiB saved" in run(world, "status").stdout
    assert "suspended because of `jupyter gpu suspend`" in run(world, "explain", lease_id).stdout
    done = run(world, "resume", notebook.kernel_id, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["leases"][0]["lease"]["state"] == "resident"
    assert notebook.must("print(buffer.read(4))").text == "b'held'\n"


def test_a_command_starts_a_crashed_broker_again_when_kernels_need_it(world: World, server: Server) -> None:
    (name,) = world.install(250)
    notebook = server.start(name)
    notebook.must(HOLD)
    assert run(world, "suspend", "--all").returncode == 0
    world.kill_broker()
    done = run(world, "resume", "--all", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["leases"][0]["lease"]["state"] == "resident"
    assert notebook.must("print(buffer.read(4))").text == "b'held'\n"


def test_a_command_does_not_start_a_first_broker(world: World) -> None:
    done = run(world, "status", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"running": False}
    assert world.broker_pid() is None
    done = run(world, "suspend", "abc")
    assert done.returncode == 1
    assert "no broker is running" in done.stderr


def test_kernels_suspended_together_take_the_channel_one_after_another(world: World, server: Server) -> None:
    (name,) = world.install(250)
    notebooks = [server.start(name) for _ in range(3)]
    for notebook in notebooks:
        notebook.must(HOLD)
    doing = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "suspend", notebook.kernel_id],
            env=world.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for notebook in notebooks
    ]
    for process in doing:
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == 0, complaint
    assert [world.lease(notebook.kernel_id).state for notebook in notebooks] == ["suspended"] * 3
