"""Placement policies of the benchmark: those that the FGD paper compares, re-implemented from its description, and this project's.

Two of this project's, `broker` and `broker-cpu`, choose GPUs by what the broker runs: `core.rules.fragmentation`, which learns the mix of
sizes from the pods that have arrived. `default` and `fgd` know the whole list of pods beforehand, and only the simulator has them.

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

from fractional_gpu.core.forecasts.asks import RequestedSizes
from fractional_gpu.core.place import DeviceChoice
from tests.benchmarks.placement.cluster import MILLI, Node, PodKind, Policy

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

    The benchmark's `default`: a choice of nodes, with the list of pods known beforehand. Only the simulator uses it.

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
        now = imbalance(node.cpu_left, left, self._cpu, self._gpu, self._weights)
        then = imbalance(node.cpu_left - kind.cpu_milli, left - kind.demand_milli, self._cpu, self._gpu, self._weights)
        saved = 100 * self._best(node, kind)[0] // self._total + now - then
        return max(0, _OFFSET + saved // (100 * self._weights.step))


def imbalance(cpu_left: int, gpu_left: int, cpu: int, gpu: int, weights: Weights) -> int:
    """Return stranded GPU and surplus CPU, weighted, in hundredths of thousandths of a GPU, where `cpu` is asked for with `gpu`."""
    surplus = cpu_left * gpu // cpu - gpu_left if cpu else 0
    return surplus * weights.surplus if surplus > 0 else -surplus * weights.stranded


_OFFSET = 1_000_000


class BrokerScorer(Policy):
    """The broker's own choice of devices, on all nodes that have the CPU: `core.rules.fragmentation`, with the mix of pods so far.

    A thousandth of a GPU stands for a MiB, a node for a host. A pod that asks for no GPU, which a broker never sees, goes where `BestFit`
    sends it. Nothing is known of the pods beforehand.
    """

    def __init__(self) -> None:
        self._mix = RequestedSizes()
        self._asks = 0
        self._found: dict[tuple[tuple[int, ...], int, int], tuple[int, int, int]] = {}
        self._without_gpu = BestFit()

    def arrived(self, kind: PodKind) -> None:
        """Learn the size."""
        if kind.gpus:
            self._mix.add(kind.milli, kind.gpus)
            self._asks += 1
            if self._asks % _NEWS == 0:  # what one more ask changes is little, and takes long to work out
                self.version += 1
                self._found.clear()

    def _best(self, node: Node, kind: PodKind) -> tuple[int, int, int]:
        """Return by how much the pod fragments the node at least, what is free on the GPUs that it takes, and the first of them."""
        key = (tuple(node.left), kind.gpus, kind.milli)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._choose(node.left, kind)
        return found

    def _choose(self, left: Sequence[int], kind: PodKind) -> tuple[int, int, int]:
        places = [(str(gpu), free) for gpu, free in enumerate(left)]
        choice = DeviceChoice(self._mix, kind.milli, places, lambda _: "")
        fitting = [place for place in places if place[1] >= kind.milli]
        one = choice.best(fitting) if kind.gpus == 1 else None
        chosen = (one,) if one is not None else choice.best_set(fitting, kind.gpus) or ()
        taken = [place for place in places if place[0] in chosen]
        return choice.fragmentation(taken), sum(free for _, free in taken), int(taken[0][0])

    def score(self, node: Node, kind: PodKind) -> int:
        """Return a number that orders nodes as the broker orders devices: the least fragmentation, then the least left."""
        if not kind.gpus:
            return self._without_gpu.score(node, kind)
        fragmentation, free, _ = self._best(node, kind)
        return _MOST_FRAGMENTATION - (fragmentation << _FREE_BITS) - free

    def gpu(self, node: Node, kind: PodKind, rng: random.Random) -> int:
        """Return the GPU that the broker would choose."""
        del rng
        return self._best(node, kind)[2]


_FREE_BITS = 16
_NEWS = 16  # asks after which a choice is worked out again
_MOST_FRAGMENTATION = 1 << 80


class BrokerScorerOnNodes(BrokerScorer):
    """The same choice of GPUs, and of nodes by the balance of CPU and GPU that `BalancedDescent` weighs, as learnt from the pods so far.

    A broker has one host, and chooses no nodes: that is up to the engine above it.
    """

    def __init__(self, weights: Weights = Weights()) -> None:
        super().__init__()
        self._weights = weights
        self._cpu = self._gpu = 0  # asked for so far

    def arrived(self, kind: PodKind) -> None:
        """Learn the size, and how much CPU goes with a GPU."""
        super().arrived(kind)
        self._cpu, self._gpu = self._cpu + kind.cpu_milli, self._gpu + kind.demand_milli

    def score(self, node: Node, kind: PodKind) -> int:
        """Return what the placement saves, in steps."""
        fragmentation = self._best(node, kind)[0] if kind.gpus else 0
        left = sum(node.left)
        now = imbalance(node.cpu_left, left, self._cpu, self._gpu, self._weights)
        then = imbalance(node.cpu_left - kind.cpu_milli, left - kind.demand_milli, self._cpu, self._gpu, self._weights)
        saved = now - then - 100 * fragmentation // max(1, len(self._mix.recent))
        return max(0, _OFFSET + saved // (100 * self._weights.step))


POLICIES: dict[str, Callable[[Sequence[PodKind]], Policy]] = {
    "random": lambda _pods: RandomFit(),
    "best-fit": lambda _pods: BestFit(),
    "dot-product": lambda _pods: DotProduct(),
    "fgd": FragmentationDescent,
    "default": BalancedDescent,
    "broker": lambda _pods: BrokerScorer(),
    "broker-cpu": lambda _pods: BrokerScorerOnNodes(),
}
"""Every policy by its name, made from the pods whose kinds it may know beforehand."""
