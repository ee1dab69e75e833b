"""Ordinary programs that start kernels and know nothing of us, in the ways in which they treat event loops, forks and their own end."""

import subprocess
import sys

import pytest

from provisioner.kernelspecs import PROVISIONER_NAME
from tests.support.stories import CHECK, fill
from tests.support.world import DEADLINE_S, World, until

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
        print(*pool.map(run, *zip(CODES, CODES, CODES)))
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


@pytest.mark.parametrize(
    ("program", "printed"),
    [(_POOL_AFTERWARDS, ["intact", "intact intact intact"]), (_SHUT_DOWN_AT_EXIT, ["intact", "ended False"])],
    ids=["process-pool", "atexit"],
)
def test_a_program_goes_on_after_its_first_kernel(world: World, program: str, printed: list[str]) -> None:
    world.environment |= {"JUPYTER_DEFAULT_PROVISIONER_NAME": PROVISIONER_NAME, "JUPYTER_GPU_DEFAULT_FRACTION": "1/4"}
    script = world.notebooks / "program.py"
    script.write_text(f"CODES = {(fill(1, 16), CHECK)!r}\n{program}")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=world.environment,
        cwd=world.notebooks,
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed, done.stderr
    until(lambda: world.status().leases == [], "no lease is left")
