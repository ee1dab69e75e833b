"""How much later a kernel with a fraction of a GPU answers for the first time than a plain ipykernel does."""

from collections.abc import Callable

from tests.benchmarks.kernels import PLAIN, BenchKernel, KernelDiedError
from tests.benchmarks.report import Row
from tests.benchmarks.stats import median, median_estimate

__all__ = ["measure_starts"]

GOAL = 1.05
_MOST_DEATHS = 3


def measure_starts(kernelspec: str, pairs: int, say: Callable[[str], None]) -> Row:
    """Start both in turns, changing who goes first, and compare pair by pair. Two more starts come first and do not count."""
    for name in (PLAIN, kernelspec):
        _start_s(name)  # profiles, bytecode and the answer to "is the extension installed?" are made once
    ours: list[float] = []
    theirs: list[float] = []
    died = 0
    while (number := len(ours)) < pairs:
        names = (kernelspec, PLAIN) if number % 2 else (PLAIN, kernelspec)
        try:
            found = {name: _start_s(name) for name in names}
        except KernelDiedError as error:  # both are started again: neighbours in time are compared
            died += 1
            say(f"a kernel ended at its start: {error}")
            if died > _MOST_DEATHS:
                raise
            continue
        ours.append(found[kernelspec])
        theirs.append(found[PLAIN])
        say(f"start {number + 1}/{pairs}: {ours[-1]:.3f} s, plain {theirs[-1]:.3f} s")
    return Row(
        measured="kernel start, to its first answer",
        compared_with="plain ipykernel",
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
