"""How long a killed broker takes to serve again with many kernels, compared with one that has none.

Each kernel is a separate process with a context on the simulated device, so the broker asks /proc, the devices and the driver about it.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.host.process import identify
from fractional_gpu.protocol.messages import AttachRequest, LeaseReply, LeaseRequest
from tests.benchmarks.report import Row
from tests.benchmarks.stats import median, median_estimate
from tests.support.world import World, new_world

__all__ = ["measure_recovery"]

_GOAL_S = 1.0
_DEVICE = "1x8GiB"
_MEMORY_MIB = 64  # of each kernel; its context takes half of it
_CONNECTION = {"transport": "tcp", "ip": "127.0.0.1", "iopub_port": 9, "shell_port": 9, "key": "k"}
_PROGRAM = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(1 << 20)
print(flush=True)
open(0).read()
"""


def measure_recovery(kernels: int, times: int, say: Callable[[str], None]) -> list[Row]:
    """Kill and start the brokers of two worlds in turns; one has the kernels, the other a lease without a process."""
    with new_world(_DEVICE) as full, new_world(_DEVICE) as empty, ExitStack() as stack:
        for world in (full, empty):
            world.configure("c.GPUBroker.pools = {'default': {'fractions': 'any', 'unattached_ttl': '1h'}}")
            world.start_broker()
        with empty.client() as client:
            client.create_lease(LeaseRequest(fraction_milli=10))  # else its broker would leave no ledger to be found
        say(f"recovery: starting {kernels} processes")
        for _ in range(kernels):
            stack.enter_context(_kernel(full))
        found: dict[str, list[float]] = {"full": [], "empty": []}
        for number in range(times):
            turns = [("full", full), ("empty", empty)]
            for name, world in turns if number % 2 else reversed(turns):
                found[name].append(_restart_s(world))
        states = {lease.state for lease in full.status().leases}
        if states != {"resident"}:
            raise RuntimeError(f"kernels with a context are resident, but these were found {sorted(states)}")
    added = [ours - theirs for ours, theirs in zip(found["full"], found["empty"], strict=True)]
    return [
        Row(
            measured=f"a killed broker serves again, with {kernels} kernels",
            compared_with="the same without kernels",
            unit="s",
            ours=median(found["full"]),
            theirs=median(found["empty"]),
            compared=median_estimate(added),
            quotient=False,
            samples=times,
            goal=_GOAL_S,
        )
    ]


@contextmanager
def _kernel(world: World) -> Iterator[None]:
    """A process with a lease and a context; it ends with the block, and its lease with it."""
    with BrokerClient(world.socket) as client:
        reply = client.create_lease(LeaseRequest(fraction_milli=10, memory_mib=_MEMORY_MIB))
        process = _started(world, reply, client.status().devices[0].device_id)
        with process:
            try:
                connection = BrokerClient(world.socket, token=reply.token)
                identity = identify(process.pid)
                request = AttachRequest(
                    pid=identity.pid,
                    start_time=identity.start_time,
                    boot_id=identity.boot_id,
                    connection=_CONNECTION,
                )
                connection.attach(reply.lease_id, request)
                connection.close()
                yield
            finally:
                process.kill()
                client.release(reply.lease_id)


def _started(world: World, reply: LeaseReply, device_id: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM],
        env={
            **world.environment,
            **reply.environment,
            "JUPYTER_GPU_LEASE": reply.lease_id,
            "JUPYTER_GPU_SIMULATED_DEVICE": device_id,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    if process.stdout is None or not process.stdout.readline():
        raise RuntimeError("a process could not allocate on the simulated device")
    return process


def _restart_s(world: World) -> float:
    world.kill_broker()
    begun = time.perf_counter()
    world.start_broker()
    return time.perf_counter() - begun
