"""A program without a share grows on a device: idle kernels leave, nothing is lost or killed, and they come back when it has gone."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.paths import STRANGER
from tests.support.world import Notebook, Server, World, until

pytestmark = pytest.mark.promise("yielding")

DATA = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(150 << 20)
buffer.write(b"{name}" * 1000)
"""


class Stranger:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._heard()

    def hold(self, mib: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        self._heard()

    def _heard(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"holding {self.process.pid}\n"


@contextmanager
def stranger(world: World, mib: int) -> Iterator[Stranger]:
    argv = [sys.executable, "-P", str(STRANGER), str(world.simulated_folder), "0", str(mib)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, env=world.environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield Stranger(process)
        finally:
            process.kill()


def start(world: World, server: Server, *names: str) -> dict[str, Notebook]:
    (kernelspec,) = world.install(250)
    notebooks = {name: server.start(kernelspec) for name in names}
    for name, notebook in notebooks.items():
        notebook.must(DATA.format(name=name))
    return notebooks


def intact(notebook: Notebook, name: str) -> None:
    assert notebook.must(f"print(buffer.read(1000 * {len(name)}) == b'{name}' * 1000)").text == "True\n"


def states(world: World) -> list[str]:
    return [lease.state for lease in world.status().leases]


POOL = "{'default': {'idle_after': 'on-demand', 'min_residency': 0, 'min_residency_swaps': 0, 'strangers': 'yield'}}"


def test_idle_kernels_leave_for_a_program_that_grows_and_come_back_and_a_busy_one_leaves_if_the_pool_says_so(
    world: World, server: Server
) -> None:
    world.configure(f"c.GPUBroker.pools = {POOL}")
    notebooks = start(world, server, "a", "b")
    with stranger(world, 100) as program:
        until(lambda: world.status().devices[0].strangers, "it is seen")
        assert states(world) == ["resident"] * 2
        for suspended, mib in enumerate((600, 750), 1):
            program.hold(mib)
            until(lambda count=suspended: states(world).count("suspended") == count, f"{suspended} have left")  # type: ignore[misc]
        waiting = notebooks["b"].send("print(buffer.read(3))")
        until(lambda: any(one.reason == "wait.stranger" for one in world.status().leases), "it waits for the program")
        assert program.process.poll() is None, "nobody ended it"
        program.hold(10)
        assert notebooks["b"].wait(waiting).text == "b'bbb'\n"
    for name, notebook in notebooks.items():
        intact(notebook, name)
    notebooks["b"].shut_down()
    a_busy_kernel_leaves_only_in_a_pool_that_says_so(world, notebooks["a"])


def a_busy_kernel_leaves_only_in_a_pool_that_says_so(world: World, notebook: Notebook) -> None:
    gate = world.state / "go"
    running = notebook.send(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint('on')")
    until(lambda: world.lease(notebook.kernel_id).busy, "its cell runs")
    with stranger(world, 770):
        until(lambda: world.status().devices[0].over_committed, "it is seen")
        assert world.lease(notebook.kernel_id).state == "resident"
        assert world.command("pool", "default", "strangers=yield-busy").returncode == 0
        world.await_state(notebook.kernel_id, "suspended")
    world.await_state(notebook.kernel_id, "resident")
    gate.touch()
    assert notebook.wait(running).text == "on\n"
    intact(notebook, "a")
