"""Scripts that start kernels through jupyter_client and never shut them down leave nothing behind, however they end."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.world import DEADLINE_S, World, until

pytestmark = pytest.mark.promise("abandoned")

# Prints the process of its kernel, and ends in the way it is told.
SCRIPT = """
import os, sys
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name=sys.argv[1], connection_file=os.path.abspath(f"kernel-{os.getpid()}.json"))
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
print(manager.provisioner.pid, flush=True)
exec(sys.stdin.readline())
"""
ENDS: dict[str, str | int] = {
    "end": "",
    "SIGKILL": signal.SIGKILL,
    "its kernel first": "os.kill(manager.provisioner.pid, 9); manager.provisioner.process.wait()",
}


def _token_files(world: World) -> list[Path]:
    return list((world.folder / "run").rglob("*.token"))


def _started(world: World, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name],
        env=world.environment,
        cwd=world.notebooks,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _end(script: subprocess.Popen[str], how: str | int) -> None:
    if isinstance(how, int):
        script.send_signal(how)
    script.communicate(how + "\n" if isinstance(how, str) else None, timeout=DEADLINE_S)


def test_leases_and_token_files_end_with_scripts_that_shut_no_kernel_down(world: World) -> None:
    world.configure('c.GPUBroker.pools = {"default": {"unattached_ttl": "1h"}}\n')
    (name,) = world.install(125)
    with ExitStack() as stack:
        scripts = [stack.enter_context(_started(world, name)) for _ in ENDS]
        for script in scripts:
            stack.callback(script.kill)
        for script in scripts:
            assert script.stdout is not None
            assert script.stdout.readline().strip().isdecimal(), "its kernel runs"
        assert len(world.status().leases) == len(_token_files(world)) == len(ENDS)
        for script, how in zip(scripts, ENDS.values(), strict=True):
            _end(script, how)
    until(lambda: not world.status().leases, "no lease is left")
    until(lambda: not _token_files(world), "no token's file is left")
