"""How long a kernel takes to leave the simulated device and to return, compared with a plain copy of that size in memory.

Everything between the request and its answer counts: the gate, the locks, the ledger's three writes, and the bytes, which really move.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.gpu.simulated.store import Store
from tests.benchmarks.kernels import BenchKernel
from tests.benchmarks.report import Row
from tests.benchmarks.stats import median, median_estimate

__all__ = ["measure_swaps"]

_MIB = 1 << 20
_FILL = """
import random
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate({mib} << 20)
buffer.write(random.Random(1).randbytes(1 << 20) * {mib})
"""


def measure_swaps(
    socket: str,
    simulated: Path,
    kernelspec: str,
    *,
    sizes_mib: Sequence[int],
    times: int,
    say: Callable[[str], None],
) -> list[Row]:
    """Move each size to and fro `times` times. `simulated` is the simulated host's folder; copies are made next to it.

    Raises RuntimeError if that file system has no room for the largest size, its checkpoint and the two copies.
    """
    needed_mib = 4 * max(sizes_mib)
    with closing(Store(simulated)) as store:
        free_mib = store.available_bytes() // _MIB
    if free_mib < needed_mib:
        raise RuntimeError(
            f"{simulated.parent} has room for {free_mib} MiB, but {needed_mib} MiB are needed; make room there, or leave this part out"
        )
    rows: list[Row] = []
    for mib in sizes_mib:
        rows += _measure_size(socket, simulated.parent, kernelspec, mib, times)
        say(
            f"suspend and resume, {mib} MiB: {rows[-2].ours:.3f} s and {rows[-1].ours:.3f} s, a copy {rows[-1].theirs:.3f} s"
        )
    return rows


def _measure_size(socket: str, parent: Path, kernelspec: str, mib: int, times: int) -> list[Row]:
    samples: dict[str, list[float]] = {"suspend": [], "resume": [], "copy": []}
    with (
        BenchKernel(kernelspec) as kernel,
        BrokerClient(socket) as broker,
        tempfile.TemporaryDirectory(dir=parent) as folder,
    ):
        kernel.run(_FILL.format(mib=mib))
        lease_id = kernel.lease(broker).lease_id
        original, copy = Path(folder, "original"), Path(folder, "copy")
        original.write_bytes(b"".join(bytes([number % 251 + 1]) * _MIB for number in range(mib)))
        for number in range(times + 1):
            found = {
                "copy": _seconds(lambda: shutil.copyfile(original, copy)),
                "suspend": _seconds(lambda: broker.suspend(lease_id)),
                "resume": _seconds(lambda: broker.resume(lease_id)),
            }
            copy.unlink()
            if number:  # the first swap starts the worker
                for name, seconds in found.items():
                    samples[name].append(seconds)
        lease = kernel.lease(broker)
        if (lease.suspends, lease.resumes) != (times + 1, times + 1):
            raise RuntimeError(f"{times + 1} swaps were asked for, {lease.suspends} and {lease.resumes} were made")
    return [_row(name, mib, samples[name], samples["copy"]) for name in ("suspend", "resume")]


def _row(name: str, mib: int, ours: list[float], copies: list[float]) -> Row:
    return Row(
        measured=f"{name} {mib} MiB on the simulated device",
        compared_with="copying a file of that size on the same tmpfs",
        unit="s",
        ours=median(ours),
        theirs=median(copies),
        compared=median_estimate([one / copy for one, copy in zip(ours, copies, strict=True)]),
        quotient=True,
        samples=len(ours),
        mib=mib,
    )


def _seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun
