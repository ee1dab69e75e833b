"""How much later a kernel with a fraction of a GPU answers for the first time than a plain ipykernel does."""

from collections.abc import Callable

from tests.benchmarks.kernels import PLAIN, BenchKernel
from tests.benchmarks.report import Row
from tests.benchmarks.stats import median, median_estimate

__all__ = ["measure_starts"]

GOAL = 1.05


def measure_starts(kernelspec: str, pairs: int, say: Callable[[str], None]) -> Row:
    """Start both in turns, changing who goes first, and compare pair by pair. Two more starts come first and do not count."""
    for name in (PLAIN, kernelspec):
        _start_s(name)  # profiles, bytecode and the answer to "is the extension installed?" are made once
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(pairs):
        turns = [(kernelspec, ours), (PLAIN, theirs)]
        for name, samples in turns if number % 2 else reversed(turns):
            samples.append(_start_s(name))
        say(f"start {number + 1}/{pairs}: {ours[-1]:.3f} s, plain {theirs[-1]:.3f} s")
    return Row(
        measured="kernel start, to its first answer",
        beside="plain ipykernel",
        unit="s",
        ours=median(ours),
        theirs=median(theirs),
        compared=median_estimate([one / other for one, other in zip(ours, theirs, strict=True)]),
        quotient=True,
        samples=pairs,
        goal=GOAL,
    )


def _start_s(kernelspec: str) -> float:
    with BenchKernel(kernelspec) as kernel:
        return kernel.start_s
