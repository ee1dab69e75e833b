"""Kernels with running forked children, such as DataLoader workers, are suspended and come back."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fractional_gpu.protocol.errors import ConflictError
from tests.support.nvidia_mode import CHECK, CONFIG, NvidiaMode, fill, nvidia_mode
from tests.support.world import Notebook, Server

pytestmark = pytest.mark.promise("children")

FORK = """
import os
wait, release = os.pipe()
if os.fork() == 0:
    os.close(release)
    os.read(wait, 1)
    os._exit(0)
"""
EXECUTED = """
import subprocess, sys
code = "import os; os.stat(os.environ['CUDA_CHECKPOINT_JOB_FILE'])"
print(subprocess.run([sys.executable, "-c", code]).returncode)
"""


@contextmanager
def served(driver: str) -> Iterator[tuple[NvidiaMode, Server]]:
    with nvidia_mode(driver=driver) as mode:
        mode.world.configure(f'{CONFIG}\nc.GPUBroker.pools["default"]["checkpoint_children"] = True\n')
        mode.double.set(forked_known=True, children_break_restore=True)
        mode.world.start_broker()
        with Server(mode.world) as server:
            yield mode, server


def forked(mode: NvidiaMode, server: Server) -> Notebook:
    """A kernel with data and a forked child."""
    notebook = mode.start(server)
    notebook.must(fill(1))
    notebook.must(FORK)
    return notebook


def test_a_kernel_in_a_job_comes_back_with_its_forked_children_and_without_the_setting_it_stays() -> None:
    with served("610") as (mode, server):
        notebook = forked(mode, server)
        for _ in range(2):
            mode.suspend(notebook)
            assert notebook.must(CHECK).text == "intact\n"
        assert notebook.must(EXECUTED).text == "0\n"
        assert mode.world.command("pool", "default", "checkpoint_children=false").returncode == 0
        stays(mode, forked(mode, server))


def stays(mode: NvidiaMode, notebook: Notebook) -> None:
    with pytest.raises(ConflictError, match="was forked by the kernel"):
        mode.suspend(notebook)


def test_with_an_older_driver_it_stays() -> None:
    with served("580") as (mode, server):
        stays(mode, forked(mode, server))
