"""What the extension adds to a cell of a kernel that is on the GPU and need not wait."""

from collections.abc import Callable

from tests.benchmarks.kernels import PLAIN, BenchKernel
from tests.benchmarks.report import Row
from tests.benchmarks.stats import median, median_estimate

__all__ = ["measure_cells"]

GOAL_US = 1000.0
_CELL = "x = 1"
_TO_THE_GPU = "from fractional_gpu.gpu.simulated import cuda\nbuffer = cuda.allocate(1 << 20)"
_WARM_UP = 20  # cells of each fresh kernel that do not count


def measure_cells(kernelspec: str, pairs: int, blocks: int, cells: int, say: Callable[[str], None]) -> Row:
    """Run `blocks` blocks of `cells` trivial cells in turns on each of `pairs` pairs of kernels; compare neighbouring blocks.

    Several pairs, because two processes of the same program always differ a little.
    """
    ours: list[float] = []
    theirs: list[float] = []
    added: list[float] = []
    for number in range(pairs):
        with BenchKernel(kernelspec) as fractional, BenchKernel(PLAIN) as plain:
            fractional.run(_TO_THE_GPU)
            for kernel in (fractional, plain):
                _block_us(kernel, _WARM_UP)
            for block in range(blocks):
                if block % 2:
                    one, other = _block_us(fractional, cells), _block_us(plain, cells)
                else:
                    other, one = _block_us(plain, cells), _block_us(fractional, cells)
                ours += one
                theirs += other
                added.append(median(one) - median(other))
        say(f"cells, kernels {number + 1}/{pairs}: {median(ours):.0f} us, plain {median(theirs):.0f} us")
    return Row(
        measured="a trivial cell on a resident kernel, to its idle status",
        compared_with="plain ipykernel",
        unit="us",
        ours=median(ours),
        theirs=median(theirs),
        compared=median_estimate(added),
        quotient=False,
        samples=len(ours),
        goal=GOAL_US,
    )


def _block_us(kernel: BenchKernel, cells: int) -> list[float]:
    return [kernel.run(_CELL) * 1e6 for _ in range(cells)]
