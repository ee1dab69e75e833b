"""A broker whose checkpoint worker another process starts, as in an unprivileged container: either may be killed; nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.stories import CHECK, fill
from tests.support.victims import kill_all, workers
from tests.support.world import Server, World, new_world, until

pytestmark = pytest.mark.promise("worker-container")


@contextmanager
def worker_service(world: World, path: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "fractional_gpu.commands.main"),
            *("node", "worker", "--socket", path, "--backend", "simulated"),
        ],
        env=world.environment,
    )
    try:
        until(lambda: Path(path).is_socket(), "the service listens")
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _start_broker(world: World, path: str) -> None:
    subprocess.run(
        [
            *(sys.executable, "-P", "-m", "fractional_gpu.broker", "--detach"),
            json.dumps({"socket": world.socket, "worker_socket": path}),
        ],
        env=world.environment,
        check=True,
    )


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_worker_and_broker_may_be_killed_apart_and_no_state_is_lost() -> None:
    with new_world() as world:
        path = str(world.folder / "own" / "worker.sock")
        (name,) = world.install(750)
        with worker_service(world, path) as service:
            _start_broker(world, path)
            with Server(world) as server:
                notebook = server.start(name)
                notebook.must(fill(1, 4))
                with world.client() as client:
                    client.suspend(world.lease(notebook.kernel_id).lease_id)
                (worker,) = workers(world)
                assert _parent(worker) == service.pid, "the broker starts none itself"
                # The worker's container is killed with all its processes. The kernel stays saved.
                service.kill()
                os.kill(worker, signal.SIGKILL)
                service.wait()
                with worker_service(world, path) as second:
                    assert notebook.must(CHECK).text == "intact\n"
                    (worker,) = workers(world)
                    assert _parent(worker) == second.pid
                    with world.client() as client:
                        client.suspend(world.lease(notebook.kernel_id).lease_id)
                    # The broker's container is killed. The next cell starts another one, with the same service.
                    world.kill_broker()
                    assert notebook.must(CHECK).text == "intact\n"
                    (worker,) = workers(world)
                    assert _parent(worker) == second.pid
                    second.kill()
                    kill_all(workers(world))
                # Without a service nothing is suspended, but a kernel on its device works.
                assert notebook.must(CHECK).text == "intact\n"
        assert service.returncode == -signal.SIGKILL
