"""A model server with the device's memory, and two notebooks: the server yields while cells wait, and they run."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.ports import free_port
from tests.support.world import Server, World, until

pytestmark = pytest.mark.promise("model-servers")

ALLOCATE = "from fractional_gpu.gpu.simulated import cuda\nbuffer = cuda.allocate(64 << 20)\nbuffer.write(b'x' * 1000)"
CHECK = "assert buffer.read(1000) == b'x' * 1000"


@contextmanager
def model_server(world: World, kind: str, port: int) -> Iterator["subprocess.Popen[str]"]:
    """A stub server that holds 900 MiB, as a separate process: it prints each request that it gets, and frees memory a second later."""
    words = ["-P", "-m", "tests.support.model_servers", kind, str(port), str(world.simulated_folder), "0", "900", "1"]
    with subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=world.environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{port}\n"
            until(lambda: world.status().devices[0].stranger_mib > 900, "the broker sees it")
            yield process
        finally:
            process.communicate()


def configured(world: World, kind: str) -> int:
    port = free_port()
    world.configure(f"c.GPUBroker.yielders = ['{kind}=http://127.0.0.1:{port}']")
    world.start_broker("1x1GiB")
    return port


def test_cells_of_two_kernels_wait_ollama_unloads_and_they_run(world: World, server: Server) -> None:
    port = configured(world, "ollama")
    (name,) = world.install(250)
    with model_server(world, "ollama", port) as ollama:
        notebooks = [server.start(name) for _ in range(2)]
        cells = [notebook.send(ALLOCATE) for notebook in notebooks]
        replies = [notebook.wait(cell) for notebook, cell in zip(notebooks, cells, strict=True)]
        assert [reply.status for reply in replies] == ["ok"] * 2
        for notebook, reply in zip(notebooks, replies, strict=True):
            assert "asked Ollama to unload its models" in str(reply.data)
            notebook.must(CHECK)
        leases = [world.lease(notebook.kernel_id).lease_id for notebook in notebooks]
        stories = [world.command("explain", lease_id).stdout for lease_id in leases]
        assert any("asked Ollama" in story for story in stories), "those that waited when it was asked say so"
        ollama.terminate()
        printed, _ = ollama.communicate()
    assert printed.splitlines() == ["GET /api/ps ", 'POST /api/generate {"model": "llama3:latest", "keep_alive": 0}']


def test_vllm_sleeps_for_a_cell_and_wakes_when_its_kernel_has_ended(world: World, server: Server) -> None:
    port = configured(world, "vllm")
    (name,) = world.install(500)
    with model_server(world, "vllm", port) as vllm:
        assert vllm.stdout is not None
        notebook = server.start(name)
        reply = notebook.must(ALLOCATE)
        assert "asked vLLM to sleep" in str(reply.data)
        assert [vllm.stdout.readline().strip() for _ in range(2)] == [
            "GET /is_sleeping",
            "POST /sleep?level=1&mode=wait",
        ]
        notebook.shut_down()
        assert [vllm.stdout.readline().strip() for _ in range(2)] == ["GET /is_sleeping", "POST /wake_up"]
        until(lambda: world.status().devices[0].stranger_mib > 900, "it has its memory back")
