"""What a fraction costs a notebook on this device: the time added to a cell, and two kernels that share beside one after the other."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tests.benchmarks.kernels import PLAIN, BenchKernel
from tests.benchmarks.stats import median, median_estimate
from tests.gpu.kernels import Kernel
from tests.gpu.lab import Lab

__all__ = ["measure_cells", "measure_sharing"]

_WARM_UP = 20
_TORCH_LOAD = """
import torch
matrix = torch.randn(4096, 4096, device="cuda")
def work(times):
    global matrix
    for _ in range(times):
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    torch.cuda.synchronize()
work(10)
"""
_SIMULATED_LOAD = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(1 << 20)
def work(times):
    for _ in range(times):
        cuda.launch(0.001)
"""


def measure_cells(lab: Lab, *, blocks: int, cells: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the microseconds that a trivial cell takes on a resident kernel beside a plain one, in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    added: list[float] = []
    with BenchKernel(lab.install(2)) as fractional, BenchKernel(PLAIN) as plain:
        fractional.run(_load(lab))  # so that it is on the device
        for kernel in (fractional, plain):
            _block_us(kernel, _WARM_UP)
        for number in range(blocks):
            turns = [(fractional, ours), (plain, theirs)]
            found: dict[BenchKernel, list[float]] = {}
            for kernel, samples in turns if number % 2 else reversed(turns):
                found[kernel] = _block_us(kernel, cells)
                samples.extend(found[kernel])
            added.append(median(found[fractional]) - median(found[plain]))
    estimate = median_estimate(added)
    say(f"a trivial cell: {median(ours):.0f} us, plain {median(theirs):.0f} us")
    low, high = (round(end, 1) if math.isfinite(end) else None for end in (estimate.low, estimate.high))
    return {
        "fractional_us": round(median(ours), 1),
        "plain_us": round(median(theirs), 1),
        "added_us": {"value": round(estimate.value, 1), "low": low, "high": high},
        "samples": len(ours),
    }


def measure_sharing(lab: Lab, *, work: int, times: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return seconds for the same work of two kernels: at once on the device, one after the other, and taking turns on room for one."""
    rows: dict[str, Any] = {"work_per_kernel": work, "samples": times}
    with _pair(lab, units=4) as pair:
        rows["one_after_the_other_s"] = _median_s(times, partial(_one_after_the_other, pair, work))
        rows["at_once_s"] = _median_s(times, partial(_at_once, pair, work))
    with _pair(lab, units=5) as pair:
        rows["turns_on_room_for_one_s"] = _median_s(times, partial(_at_once, pair, work))
        rows["suspends_in_turns"] = sum(kernel.lease.suspends for kernel in pair)
    say(f"two kernels, the same work: {rows}")
    return rows


def _load(lab: Lab) -> str:
    return _SIMULATED_LOAD if lab.simulated else _TORCH_LOAD


def _block_us(kernel: BenchKernel, cells: int) -> list[float]:
    return [kernel.run("x = 1") * 1e6 for _ in range(cells)]


@contextmanager
def _pair(lab: Lab, *, units: int) -> Iterator[list[Kernel]]:
    """Two kernels of so many units each, that have used the device."""
    with ExitStack() as stack:
        spec = lab.install(units)
        kernels = [stack.enter_context(Kernel(lab, spec)) for _ in range(2)]
        for kernel in kernels:
            kernel.must(_load(lab))
        yield kernels


def _one_after_the_other(kernels: list[Kernel], work: int) -> None:
    for kernel in kernels:
        kernel.must(f"work({work})")


def _at_once(kernels: list[Kernel], work: int) -> None:
    sent = [(kernel, kernel.send(f"work({work})")) for kernel in kernels]
    for kernel, message_id in sent:
        reply = kernel.wait(message_id)
        if reply.status != "ok":
            raise RuntimeError(f"the cell failed: {reply.error}")


def _median_s(times: int, act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begun)
    return round(median(seconds), 4)
