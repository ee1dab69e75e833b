"""How fast the broker answers a kernel that asks for the GPU it already has, among many leases, compared with an empty request."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner
from fractional_gpu.protocol.messages import AcquireRequest, LeaseRequest, ProgressKind
from tests.benchmarks.kernels import BenchKernel
from tests.benchmarks.report import Row
from tests.benchmarks.stats import compare_percentiles, percentile

__all__ = ["measure_acquires"]

_TO_THE_GPU = "from fractional_gpu.gpu.simulated import cuda\nbuffer = cuda.allocate(1 << 20)"


def measure_acquires(socket: str, kernelspec: str, leases: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Ask in turns, each time on a fresh connection as kernels do, with `leases` leases in all; one of them is a real kernel's."""
    with BenchKernel(kernelspec) as kernel, BrokerClient(socket) as broker:
        kernel.run(_TO_THE_GPU)
        mine = kernel.lease(broker)
        others = [broker.create_lease(LeaseRequest(fraction_milli=mine.spec.fraction_milli)) for _ in range(leases - 1)]
        try:
            say(f"acquire: {len(broker.status().leases)} leases")
            token = _token(kernel)
            asked: list[float] = []
            pinged: list[float] = []
            for number in range(rounds):
                turns = [
                    (asked, partial(_acquire_ms, socket, mine.lease_id, token)),
                    (pinged, partial(_ping_ms, socket)),
                ]
                for samples, turn in turns if number % 2 else reversed(turns):
                    samples.append(turn())
                    broker.ping()  # the broker's work after its answer has ended before the next turn
        finally:
            for other in others:
                broker.release(other.lease_id)
    return [_row(percent, leases, asked, pinged) for percent in (50, 99)]


def _row(percent: int, leases: int, asked: list[float], pinged: list[float]) -> Row:
    return Row(
        measured=f"acquire, with {leases} leases, p{percent}",
        compared_with=f"an empty request on the same socket, p{percent}",
        unit="ms",
        ours=percentile(asked, percent),
        theirs=percentile(pinged, percent),
        compared=compare_percentiles(asked, pinged, percent),
        quotient=True,
        samples=len(asked),
    )


def _token(kernel: BenchKernel) -> str:
    provisioner = kernel.manager.provisioner
    if not isinstance(provisioner, FractionalGPUProvisioner):
        raise TypeError(f"the kernel was started by {type(provisioner).__name__}")
    info = asyncio.run(provisioner.get_provisioner_info())
    return Path(info["gpu_lease"]["token_file"]).read_text(encoding="ascii")


def _acquire_ms(socket: str, lease_id: str, token: str) -> float:
    begun = time.perf_counter()
    with BrokerClient(socket, token=token) as client:
        last = list(client.acquire(lease_id, AcquireRequest()))[-1]
        took = time.perf_counter() - begun
    if last.kind != ProgressKind.GRANTED:
        raise RuntimeError(f"the resident kernel was refused: {last.sentence}")
    return took * 1000


def _ping_ms(socket: str) -> float:
    begun = time.perf_counter()
    with BrokerClient(socket) as client:
        client.ping()
        took = time.perf_counter() - begun
    return took * 1000
