"""Chooses the weights of `BalancedDescent` by coordinate search: each weight is tried at every value of its grid, and the best is kept.

The start is fragmentation descent alone (all further weights 0). Rounds over all weights are made until a whole round changes nothing.
Better is: more GPUs allocated when 130 % were asked for, on average over the seeds, by more than `LEAST_GAIN` points, so that a chance
in the last digit changes nothing. The seeds must not be those that the policies are compared on. The same arguments give the same weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fractional_gpu.simulator import SimulationError
from tests.benchmarks.placement.cluster import NodeShape, PodKind, place
from tests.benchmarks.placement.policies import BalancedDescent, Weights

COMPARED_SEEDS = range(42, 52)
LEAST_GAIN = 0.002  # points
START = Weights(stranded=0, surplus=0, step=10)
GRID: dict[str, tuple[int, ...]] = {
    "stranded": (0, 20, 40, 60, 80, 110, 150, 200),
    "surplus": (0, 8, 15, 22, 30, 40, 50),
    "step": (5, 10, 15, 20, 40),
}
_MOST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Step:
    """Weights that were tried, and what they came to: percent allocated at 130 %, on average."""

    weights: Weights
    alloc_at_130: float


def tune(
    nodes: Sequence[NodeShape],
    pods: Sequence[PodKind],
    seeds: Sequence[int],
    tried: Callable[[Step], None] = lambda _step: None,
) -> Step:
    """Return the best weights found. `tried` is called with each set of weights. Raises SimulationError for forbidden seeds."""
    if forbidden := sorted(set(seeds) & set(COMPARED_SEEDS)):
        raise SimulationError(
            f"weights may not be chosen on seed {forbidden[0]}: the policies are compared on the seeds {COMPARED_SEEDS[0]} to "
            f"{COMPARED_SEEDS[-1]}; choose on others, such as --seeds 1-3"
        )
    known: dict[Weights, Step] = {}

    def outcome(weights: Weights) -> Step:
        if weights not in known:
            runs = [place(nodes, pods, BalancedDescent(pods, weights), seed) for seed in seeds]
            known[weights] = Step(weights, sum(run.alloc_at_130 for run in runs) / len(runs))
            tried(known[weights])
        return known[weights]

    best = outcome(START)
    for _ in range(_MOST_ROUNDS):
        before = best
        for name, values in GRID.items():
            for value in values:
                step = outcome(replace(best.weights, **{name: value}))
                if step.alloc_at_130 > best.alloc_at_130 + LEAST_GAIN:
                    best = step
        if best == before:
            break
    return best
