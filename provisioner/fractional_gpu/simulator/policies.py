"""Placement policies of the benchmark: those that the FGD paper compares, re-implemented from its description, and this project's.

Fragmentation, as FGD measures it: what is left of a node's GPUs and a pod drawn from the workload cannot use, in thousandths, expected
over the workload's typical pods. For pods of one GPU it is a sum over the node's GPUs, and pods of several GPUs only ask how many are
wholly free, so a table per amount of CPU left answers in as many look-ups as there are GPUs, whatever the number of typical pods.
Counts of pods are the weights, so everything is exact in integers.
"""

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

from fractional_gpu.simulator.placement import MILLI, Node, PodKind, Policy

_MOST_CPU = 128_000
_MOST_GPU = 8 * MILLI
_POPULAR_PERCENT = 95  # the typical pods are the commonest kinds that make up this share of the workload


class RandomFit(Policy):
    """Any node on which the pod fits, and any GPU."""

    any_of_equals = True

    def score(self, node: Node, kind: PodKind) -> int:
        """All are equal."""
        del node, kind
        return 0

    def gpu(self, node: Node, kind: PodKind, rng: random.Random) -> int:
        """Any that has the room."""
        return rng.choice([gpu for gpu, left in enumerate(node.left) if left >= kind.milli])


class BestFit(Policy):
    """The node that keeps least: CPU and GPU, each as a share of the largest node's, weigh the same. Whole percents, as published."""

    def score(self, node: Node, kind: PodKind) -> int:
        """Return 100 less the percentage that is left."""
        cpu = (node.cpu_left - kind.cpu_milli) / _MOST_CPU
        gpu = (sum(node.left) - kind.demand_milli) / _MOST_GPU
        return int(100 * (1 - (cpu + gpu) / 2))


class DotProduct(Policy):
    """The node whose free resources align least with the pod's demand. Whole percents, as published."""

    def score(self, node: Node, kind: PodKind) -> int:
        """Return 100 less half the dot product of what is free and what is asked, both as shares of the largest node."""
        cpu = node.cpu_left * kind.cpu_milli / _MOST_CPU**2
        gpu = sum(node.left) * kind.demand_milli / _MOST_GPU**2
        return int(100 * (1 - (cpu + gpu) / 2))


@dataclass(frozen=True, slots=True)
class _Tables:
    """For one amount of CPU left. `waste[g]`: what of a GPU with g left is wasted on single-GPU pods; `multi[f]`: what f free GPUs save."""

    waste: list[int]
    multi: list[int]


class _Workload:
    """The typical pods as one kind of node sees them."""

    def __init__(self, kinds: Sequence[tuple[PodKind, int]], model: str) -> None:
        allowed = [(kind, weight) for kind, weight in kinds if not kind.models or model in kind.models]
        self._total = sum(weight for _, weight in kinds)
        self._steps = sorted({kind.cpu_milli for kind, _ in allowed})
        self._tables = [self._table(allowed, cpu) for cpu in (-1, *self._steps)]

    def at(self, cpu_left: int) -> _Tables:
        """Return the tables for a node with that much CPU left."""
        return self._tables[bisect_right(self._steps, cpu_left)]

    def _table(self, allowed: Sequence[tuple[PodKind, int]], cpu_left: int) -> _Tables:
        shares = [0] * (MILLI + 1)
        several = [0] * 9
        for kind, weight in allowed:
            if kind.cpu_milli > cpu_left or kind.gpus == 0:
                continue
            if kind.gpus == 1:
                shares[kind.milli] += weight
            else:
                several[min(8, kind.gpus)] += weight
        waste, usable = [], 0
        for left, weight in enumerate(shares):
            usable += weight
            waste.append(left * (self._total - usable))
        return _Tables(waste, [free * MILLI * sum(several[: free + 1]) for free in range(9)])


def typical_pods(pods: Sequence[PodKind]) -> list[tuple[PodKind, int]]:
    """Return the commonest kinds of pods that make up 95 % of them, with their counts, commonest first."""
    counts = Counter(pods)
    chosen: list[tuple[PodKind, int]] = []
    covered = 0
    for kind, count in counts.most_common():
        if covered * 100 >= _POPULAR_PERCENT * len(pods):
            break
        chosen.append((kind, count))
        covered += count
    return chosen


class FragmentationDescent(Policy):
    """FGD: the node and the GPU on which the placement makes fragmentation grow least; steps as coarse as published."""

    def __init__(self, pods: Sequence[PodKind]) -> None:
        self._kinds = typical_pods(pods)
        self._total = sum(weight for _, weight in self._kinds)
        self._models: dict[str, _Workload] = {}

    def _workload(self, model: str) -> _Workload:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _Workload(self._kinds, model)
        return found

    def _best(self, node: Node, kind: PodKind) -> tuple[int, int]:
        """Return by how much fragmentation shrinks (times the weight of the workload) and the GPU for a share, else -1."""
        workload = self._workload(node.shape.model)
        now, then = workload.at(node.cpu_left), workload.at(node.cpu_left - kind.cpu_milli)
        free = node.left.count(MILLI)
        before = sum([now.waste[left] for left in node.left]) - now.multi[free]
        if kind.gpus != 1 or kind.milli == MILLI:
            taken = kind.gpus
            after = sum([then.waste[left] for left in node.left]) - taken * then.waste[MILLI] - then.multi[free - taken]
            return before - after, -1
        waste = then.waste
        kept = sum([waste[left] for left in node.left])
        best: tuple[int, int] | None = None
        for gpu, left in enumerate(node.left):
            if left >= kind.milli:
                after = kept - waste[left] + waste[left - kind.milli] - then.multi[free - (left == MILLI)]
                if best is None or before - after > best[0]:
                    best = (before - after, gpu)
        return best if best is not None else (before - kept, -1)

    def score(self, node: Node, kind: PodKind) -> int:
        """Return the shrinkage through the sigmoid, in whole percents."""
        shrinks = self._best(node, kind)[0] / self._total / MILLI
        return int(100 / (1 + exp(-shrinks)))

    def gpu(self, node: Node, kind: PodKind, rng: random.Random) -> int:
        """Return the GPU on which fragmentation grows least."""
        del rng
        return self._best(node, kind)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What `BalancedDescent` weighs how; chosen by `tuning` on the seeds 1 to 3."""

    stranded: int = 40  # GPU beyond what the CPU left can serve, percent of fragmentation
    surplus: int = 30  # CPU beyond what the GPU left can use, percent
    step: int = 10  # differences below this, thousandths of a GPU, do not count


class BalancedDescent(FragmentationDescent):
    """This project's: fragmentation descent that also weighs the balance of CPU and GPU.

    The benchmark's `default`. Only the simulator uses it: the broker places leases by the arbiter's own rules (`core.scheduler`).

    FGD looks one pod ahead, so it does not see a node run out of CPU while it has whole GPUs left until the next pod no longer fits.
    Here a node has its due of CPU per GPU left, as much as the workload asks for on average. GPU beyond the CPU left is stranded and
    weighs like fragmentation; CPU beyond the GPU left is surplus, and using it up is worth a little. All kinds of pods count, and the
    steps are finer than published.
    """

    def __init__(self, pods: Sequence[PodKind], weights: Weights = Weights()) -> None:
        super().__init__(pods)
        self._weights = weights
        self._kinds = list(Counter(pods).items())
        self._total = len(pods)
        self._cpu = sum(pod.cpu_milli for pod in pods)
        self._gpu = max(1, sum(pod.demand_milli for pod in pods))

    def score(self, node: Node, kind: PodKind) -> int:
        """Return what the placement saves, in steps."""
        left = sum(node.left)
        now = self._imbalance(node.cpu_left, left)
        then = self._imbalance(node.cpu_left - kind.cpu_milli, left - kind.demand_milli)
        saved = 100 * self._best(node, kind)[0] // self._total + now - then
        return max(0, _OFFSET + saved // (100 * self._weights.step))

    def _imbalance(self, cpu_left: int, gpu_left: int) -> int:
        """Return stranded GPU and surplus CPU, weighted, in hundredths of thousandths of a GPU."""
        surplus = cpu_left * self._gpu // self._cpu - gpu_left if self._cpu else 0
        return surplus * self._weights.surplus if surplus > 0 else -surplus * self._weights.stranded


_OFFSET = 1_000_000

POLICIES: dict[str, Callable[[Sequence[PodKind]], Policy]] = {
    "random": lambda _pods: RandomFit(),
    "best-fit": lambda _pods: BestFit(),
    "dot-product": lambda _pods: DotProduct(),
    "fgd": FragmentationDescent,
    "default": BalancedDescent,
}
"""Every policy by its name, made from the pods whose kinds it may know beforehand."""
