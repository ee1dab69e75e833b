"""Ordinary programs that start kernels without knowing this project, with various event loops, forks and ways to end."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from fractional_gpu.jupyter.kernelspecs import PROVISIONER_NAME
from tests.support.managed import entered, must
from tests.support.stories import CHECK, fill
from tests.support.world import DEADLINE_S, World, new_world, until

pytestmark = pytest.mark.promise("other-programs")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One broker for all tests of this file."""
    with new_world() as made:
        yield made


_RUN = """
import nbformat
from nbclient import NotebookClient

def run(*codes):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(code) for code in codes]
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return notebook.cells[-1].outputs[0].text.strip()
"""

_POOL_AFTERWARDS = (
    _RUN
    + """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

if __name__ == "__main__":
    print(run(*CODES))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        print(*pool.map(run, *zip(CODES, CODES)))
"""
)

_SHUT_DOWN_AT_EXIT = """
import atexit
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")

@atexit.register
def end():
    client.stop_channels()
    manager.shutdown_kernel()
    print("ended", manager.is_alive())

for code in CODES:
    client.execute_interactive(code, timeout=120)
"""


def run_program(world: World, program: str) -> str:
    """Run it to success, with ours as the default provisioner, and return its output. `CODES` are two cells."""
    world.environment |= {"JUPYTER_DEFAULT_PROVISIONER_NAME": PROVISIONER_NAME, "JUPYTER_GPU_DEFAULT_FRACTION": "1/4"}
    script, said = world.notebooks / "program.py", world.notebooks / "said.txt"
    script.write_text(f"CODES = {(fill(1), CHECK)!r}\n{program}")
    with said.open("wb") as file:  # no pipe: a kernel that outlives the program would hold it open
        command = [sys.executable, str(script)]
        subprocess.run(
            command, env=world.environment, cwd=world.notebooks, stdout=file, timeout=3 * DEADLINE_S, check=True
        )
    return said.read_text()


@pytest.mark.parametrize(
    ("program", "printed"),
    [(_POOL_AFTERWARDS, ["intact", "intact intact"]), (_SHUT_DOWN_AT_EXIT, ["intact", "ended False"])],
    ids=["process-pool", "atexit"],
)
def test_a_program_goes_on_after_its_first_kernel(world: World, program: str, printed: list[str]) -> None:
    assert run_program(world, program).splitlines() == printed
    until(lambda: world.status().leases == [], "no lease is left")


_INDEPENDENT = """
import os
from jupyter_client.manager import KernelManager

manager = KernelManager(kernel_name="python3", connection_file=os.path.abspath("kernel.json"))
manager.start_kernel(independent=True)
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=120)
client.execute_interactive(CODES[0], timeout=120)
print(manager.connection_file, flush=True)
os._exit(0)
"""


def test_a_kernel_that_was_started_to_outlive_its_program_does(world: World) -> None:
    client = BlockingKernelClient(connection_file=run_program(world, _INDEPENDENT).splitlines()[-1])
    client.load_connection_file()
    (lease,) = world.status().leases
    assert lease.pid is not None
    try:
        with entered(world):
            client.start_channels()
            assert must(client, CHECK) == "intact\n"
            assert must(client, "import os; print(os.getpid())") == f"{lease.pid}\n"
            client.shutdown()
            client.stop_channels()
        until(lambda: all(one.pid is None for one in world.status().leases), "the kernel ends")
    finally:
        world.end(lease.pid, signal.SIGKILL)
