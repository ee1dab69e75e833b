"""Real kernels in private namespaces: their idleness is noticed, they are suspended, and every byte comes back.

The process that starts the kernel is in the namespaces as well, like a server in a container. The broker is outside.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fractional_gpu.protocol.status import LeaseStatus
from tests.support.stories import CHECK, fill
from tests.support.world import World, until

pytestmark = pytest.mark.promise("namespaces")

FORMS = {
    "pid": ["--pid", "--fork"],
    "net": ["--net"],
    "user": ["--user", "--map-root-user"],
    "mount": ["--mount"],
    "all": ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--mount", "--net"],
}
ALL_FORMS = bool(os.environ.get("JUPYTER_GPU_ALL_FORMS"))
"""Each namespace alone, too."""

# Starts a kernel and runs the cells on its input, a JSON line each; prints the kernel's pid as seen there, then each
# cell's output.
SCRIPT = """
import fcntl, json, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as up:  # what `ip link set lo up` does
    try:
        fcntl.ioctl(up, 0x8914, struct.pack("16sH14x", b"lo", 1))
    except PermissionError:
        pass  # it is up: this network is not its own
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name=sys.argv[1])
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
print(manager.provisioner.pid, flush=True)
for line in sys.stdin:
    said = []
    client.execute_interactive(json.loads(line), output_hook=said.append, timeout=60)
    said = [one["content"] for one in said if one["msg_type"] in ("stream", "error")]
    print(json.dumps([one.get("text") or one.get("evalue") for one in said]), flush=True)
manager.shutdown_kernel(now=True)
"""


class Inside:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = int(self.read())

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def begin(self, code: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def run(self, code: str) -> Any:  # noqa: ANN401 - JSON
        self.begin(code)
        return json.loads(self.read())


@contextmanager
def inside(world: World, flags: list[str], kernelspec: str, program: str = SCRIPT) -> Iterator[Inside]:
    with subprocess.Popen(
        ["unshare", *flags, sys.executable, "-c", program, kernelspec],
        env=world.environment,
        cwd=world.notebooks,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Inside(process)
            process.communicate()
        finally:
            process.kill()


@pytest.mark.parametrize("form", FORMS if ALL_FORMS else ["all"])
def test_a_kernel_in_namespaces_of_its_own_idles_is_suspended_and_comes_back_whole(world: World, form: str) -> None:
    world.configure('c.GPUBroker.pools = {"default": {"idle_after": "0s", "min_residency": "0s"}}\n')
    world.start_broker()
    (name,) = world.install(500)
    with inside(world, FORMS[form], name) as kernel:
        assert kernel.run(fill(1)) == []
        (lease,) = world.status().leases
        if form in ("pid", "all"):
            assert kernel.pid != lease.pid, "inside, it has another pid"

        def suspended() -> LeaseStatus | None:
            (one,) = world.status().leases
            return one if one.state == "suspended" else None

        until(suspended, "its idleness was seen, and it was suspended")
        assert kernel.run(CHECK) == ["intact\n"]
        until(suspended, "and again")
        (lease,) = world.status().leases
        assert lease.resumes >= 1
        with world.client() as client:
            story = [line.reason for line in client.story(lease.lease_id).lines]
        assert "iopub.no-permission" not in story
    until(lambda: not world.status().leases, "the lease ended with its kernel")


def test_where_the_broker_may_not_enter_the_kernel_counts_as_idle_by_the_counters_alone(world: World) -> None:
    world.configure(
        'c.GPUBroker.pools = {"default": {"idle_after": "0s", "min_residency": "0s", "retry_refused": "0s"}}\n'
    )
    world.start_broker(through=["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"])
    (name,) = world.install(500)
    with inside(world, FORMS["net"], name) as kernel:
        assert kernel.run(fill(1)) == []
        (lease,) = world.status().leases
        with world.client() as client:
            (said,) = [
                line.sentence for line in client.story(lease.lease_id).lines if line.reason == "iopub.no-permission"
            ]
        assert "is not permitted to enter this kernel's network namespace" in said
        until(lambda: world.status().leases[0].state == "suspended", "the counters are quiet and its gate is closed")
        assert kernel.run(CHECK) == ["intact\n"]
