"""What the manifests for Kubernetes set up, without Kubernetes: each part runs as its container does, as far as possible on one machine.

- The broker has the capabilities of its container, the control group namespace of a container, and the host's pids; no CUDA privilege.
- The checkpoint worker is the child of a separate service.
- The kernel runs as another user, in a pod's control group, with separate pids, network and mounts. It has no token.
- The agent's real code does what it does for a pod. There was no cluster: validated, never seen running.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from msgspec import convert

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.engines.pod_seats import PodSeats
from fractional_gpu.engines.pods import Pod
from fractional_gpu.protocol.status import LeaseStatus
from tests.e2e.test_namespaces import SCRIPT, Inside, inside
from tests.e2e.test_worker_container import worker_service
from tests.support.control_group import JOIN, pod_group
from tests.support.stories import CHECK, fill
from tests.support.victims import workers
from tests.support.world import World, new_world, until

pytestmark = pytest.mark.promise("worker-container", "pods")

USER = 212_345
_DAEMON_SET = Path(__file__).parents[2] / "examples" / "kubernetes" / "daemonset.yaml"
_LOOPBACK = """
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as up:
    fcntl.ioctl(up, 0x8914, struct.pack("16sH14x", b"lo", 1))
"""
_AS_USER = "import os; os.setgroups([]); os.setgid(100); os.setuid({uid}); os.umask(0o22)"
_POOLS = """
c.GPUBroker.pools = {"default": {"idle_after": "0s", "min_residency": "0s", "retry_refused": "0s"}}
c.GPUBroker.seats_required = True
"""


def _capabilities() -> list[str]:
    (broker, *_) = yaml.safe_load(_DAEMON_SET.read_text())["spec"]["template"]["spec"]["containers"]
    assert broker["name"] == "broker"
    added: list[str] = broker["securityContext"]["capabilities"]["add"]
    return [name.lower() for name in added]


@contextmanager
def _broker(world: World, worker_socket: str) -> Iterator["subprocess.Popen[bytes]"]:
    bounds = "-all" + "".join(f",+{name}" for name in _capabilities())
    process = subprocess.Popen(
        [
            *("unshare", "--cgroup", "setpriv", f"--bounding-set={bounds}", "--inh-caps=-all", "--no-new-privs"),
            *(sys.executable, "-P", "-m", "fractional_gpu.commands.main", "broker", "--service"),
            *("--socket", world.socket, "--worker-socket", worker_socket, "--simulate", world.simulate),
            *("--config", str(world.folder / "config" / "jupyter_gpu_config.py")),
        ],
        env=world.environment,
    )
    try:
        until(lambda: world.broker_pid() is not None, "the broker serves")
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _kernel(world: World, group: Path, kernelspec: str) -> AbstractContextManager[Inside]:
    program = f"{JOIN.format(group=str(group))}\n{_LOOPBACK}\n{_AS_USER.format(uid=USER)}\n{SCRIPT}"
    flags = ["--pid", "--fork", "--mount-proc", "--mount", "--net", "--cgroup"]
    return inside(world, flags, kernelspec, program)


@pytest.fixture
def world() -> Iterator[World]:
    with new_world() as world:
        for folder in (world.folder, Path(world.socket).parent):
            folder.chmod(0o755)
        world.configure(_POOLS)
        yield world


def _give(world: World) -> None:
    for name in ("data", "home", "notebooks", "ipython"):
        for path in (world.folder / name, *(world.folder / name).rglob("*")):
            os.chown(path, USER, 100)
    runtime = world.folder / "own"
    runtime.mkdir(mode=0o700)
    os.chown(runtime, USER, 100)
    world.environment["JUPYTER_RUNTIME_DIR"] = str(runtime)


def _pod(uid: str) -> Pod:
    resource = {"fractional-gpu.jupyter.org/default": "500"}
    return convert(
        {
            "metadata": {
                "uid": uid,
                "namespace": "jhub",
                "name": "jupyter-ada",
                "annotations": {"fractional-gpu.jupyter.org/owner": "ada"},
            },
            "spec": {"containers": [{"name": "notebook", "resources": {"limits": resource, "requests": resource}}]},
            "status": {"phase": "Running"},
        },
        Pod,
    )


def test_a_pods_kernel_idles_is_suspended_and_comes_back_whole(world: World) -> None:
    uid = str(uuid4())
    said: list[str] = []
    (name,) = world.install(500)
    _give(world)
    worker_socket = str(world.folder / "worker" / "own.sock")
    with ExitStack() as stack:
        service = stack.enter_context(worker_service(world, worker_socket))
        stack.enter_context(_broker(world, worker_socket))
        seats = PodSeats(
            lambda: SeatClient(world.socket, timeout_s=60), said.append, lambda *_: None, hub_namespaces=("jhub",)
        )
        seats.keep([_pod(uid)])
        assert said[0].startswith("pod jhub/jupyter-ada: granted: 500"), said
        group = stack.enter_context(pod_group(uid))
        with _kernel(world, group, name) as kernel:
            assert kernel.run(fill(1)) == []
            (lease,) = world.status().leases
            assert lease.spec.owner == "ada"

            def suspended() -> LeaseStatus | None:
                (one,) = world.status().leases
                return one if one.state == "suspended" else None

            until(suspended, "its idleness was seen, and it was suspended")
            (worker,) = workers(world)
            assert int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]) == service.pid
            assert kernel.run(CHECK) == ["intact\n"]
            until(suspended, "and again")
        until(lambda: not world.status().leases, "the lease ended with its kernel")
        seats.keep([])
        with SeatClient(world.socket, timeout_s=60) as client:
            assert client.seats().seats == []
