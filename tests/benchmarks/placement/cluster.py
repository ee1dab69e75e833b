"""The placement benchmark: how much of a cluster's GPUs a policy can allocate before what is left fits no pod.

The method is from the FGD paper (Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation
Gradient Descent", USENIX ATC 2023) and of its published experiments: every pod of the list arrives once, and further ones are drawn
from the list with replacement until the GPU demand that has arrived is 130 % of the cluster's GPUs; all of them come in random order;
nothing departs; a pod that fits nowhere is dropped. CPU and GPUs of a node have to suffice; the published
experiments do not count memory, and neither do we. Of equally good nodes the one with the smallest name is taken, as there.
A figure is allocated milli-GPU over all milli-GPU, in percent, when that much demand has arrived.

Nothing departs, so a node that cannot take a pod never can again, and the score of a node for a kind of pod changes only when that
node does, unless the policy has learnt something. The scores are kept per kind, and only the scores of nodes that changed since the kind
came last are computed again.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from fractional_gpu.simulator import TraceError
from fractional_gpu.simulator.traces import read_table, whole

MILLI = 1000
_Item = TypeVar("_Item")
LAST_PERCENT = 130


@dataclass(frozen=True, slots=True)
class PodKind:
    """What pods ask for: `gpus` GPUs of `milli` thousandths each (`milli` is below 1000 only for one GPU), and where they may go."""

    cpu_milli: int
    gpus: int
    milli: int
    models: frozenset[str] = frozenset()  # empty: any

    @property
    def demand_milli(self) -> int:
        """GPU demand in thousandths."""
        return self.gpus * self.milli


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A node as bought."""

    cpu_milli: int
    gpus: int
    model: str


@dataclass(slots=True)
class Node:
    """A node as it is now: CPU left and what is left of each GPU, thousandths."""

    shape: NodeShape
    cpu_left: int
    left: list[int] = field(default_factory=list)

    def fits(self, kind: PodKind) -> bool:
        """Return whether such a pod can run here."""
        if kind.cpu_milli > self.cpu_left or (kind.models and self.shape.model not in kind.models):
            return False
        if kind.gpus == 0:
            return True
        if kind.gpus == 1:
            return max(self.left, default=0) >= kind.milli
        return self.left.count(MILLI) >= kind.gpus

    def take(self, kind: PodKind, gpu: int | None) -> None:
        """Place a pod; `gpu` is the GPU of one that asks for a share, whole ones take the first free GPUs."""
        self.cpu_left -= kind.cpu_milli
        if gpu is not None:
            self.left[gpu] -= kind.milli
            return
        for _ in range(kind.gpus):
            self.left[self.left.index(MILLI)] = 0


class Policy:
    """Which node, and which GPU of it. A higher score is better; of equals the first is taken, or any (`any_of_equals`)."""

    any_of_equals = False
    version = 0  # grows when scores that were given before hold no more, though their nodes did not change

    def arrived(self, kind: PodKind) -> None:
        """Learn from a pod before it is placed."""

    def score(self, node: Node, kind: PodKind) -> int:
        """Return the score of placing such a pod on this node, on which it fits; 0 or more."""
        raise NotImplementedError

    def gpu(self, node: Node, kind: PodKind, rng: random.Random) -> int:
        """Return the GPU for a share, the tightest unless the policy knows better."""
        del rng
        return tightest(node, kind)


def tightest(node: Node, kind: PodKind) -> int:
    """Return the GPU on which the share leaves least."""
    return min((gpu for gpu, left in enumerate(node.left) if left >= kind.milli), key=lambda gpu: (node.left[gpu], gpu))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to: `curve[p]` is the allocated share, in percent, when p % of the GPUs' demand had arrived."""

    seed: int
    curve: tuple[float, ...]
    placed: int
    dropped: int

    @property
    def alloc_at_100(self) -> float:
        """Percent of the GPUs allocated when 100 % were asked for."""
        return self.curve[100]

    @property
    def alloc_at_130(self) -> float:
        """Percent of the GPUs allocated when 130 % were asked for."""
        return self.curve[130]


def arrivals(pods: Sequence[PodKind], total_milli: int, rng: random.Random) -> list[PodKind]:
    """Return the pods in the order in which they arrive: demand of up to 130 % of `total_milli`."""
    limit = total_milli * LAST_PERCENT // 100
    coming = list(pods)
    demand = sum(pod.demand_milli for pod in coming)
    while demand > limit:
        demand -= coming.pop(rng.randrange(len(coming))).demand_milli
    while (pod := rng.choice(pods)).demand_milli + demand <= limit:
        coming.append(pod)
        demand += pod.demand_milli
    rng.shuffle(coming)
    return coming


@dataclass(slots=True)
class _Scores:
    """Scores of all nodes for one kind of pod, -1 where it does not fit (and never will); `seen` changes of the log are in them."""

    values: list[int]
    seen: int
    version: int  # of the policy


def place(nodes: Sequence[NodeShape], pods: Sequence[PodKind], policy: Policy, seed: int) -> Outcome:
    """Run the benchmark once. The same arguments give the same outcome."""
    rng = random.Random(seed)
    total = sum(node.gpus for node in nodes) * MILLI
    cluster = [Node(shape, shape.cpu_milli, [MILLI] * shape.gpus) for shape in nodes]
    known: dict[PodKind, _Scores] = {}
    changed: list[int] = []
    arrived = allocated = placed = dropped = 0
    curve: list[float] = []
    for pod in arrivals(pods, total, rng):
        policy.arrived(pod)
        scores = _fresh(known, pod, cluster, changed, policy)
        best = max(scores)
        arrived += pod.demand_milli
        if best < 0:
            dropped += 1
        else:
            placed += 1
            allocated += pod.demand_milli
            chosen = _any(scores, best, rng) if policy.any_of_equals else scores.index(best)
            node = cluster[chosen]
            node.take(pod, policy.gpu(node, pod, rng) if pod.gpus == 1 and pod.milli < MILLI else None)
            changed.append(chosen)
        while len(curve) <= LAST_PERCENT and arrived * 100 >= len(curve) * total:
            curve.append(100 * allocated / total)
    curve.extend(repeat(100 * allocated / total, LAST_PERCENT + 1 - len(curve)))
    return Outcome(seed=seed, curve=tuple(curve), placed=placed, dropped=dropped)


def _any(scores: list[int], best: int, rng: random.Random) -> int:
    return rng.choice([index for index, score in enumerate(scores) if score == best])


def _fresh(
    known: dict[PodKind, _Scores], kind: PodKind, cluster: list[Node], changed: list[int], policy: Policy
) -> list[int]:
    """Return the scores of all nodes for the kind, computing only what has changed."""
    scores = known.get(kind)
    if scores is None:
        scores = known[kind] = _Scores([0] * len(cluster), len(changed), policy.version)
        stale: Iterable[int] = range(len(cluster))
    else:
        stale = set(changed[scores.seen :]) if scores.version == policy.version else range(len(cluster))
        scores.seen, scores.version = len(changed), policy.version
    values = scores.values
    for index in stale:
        if values[index] >= 0:
            node = cluster[index]
            values[index] = policy.score(node, kind) if node.fits(kind) else -1
    return values


# -- the files --------------------------------------------------------------------------------------------------------


def read_nodes(path: Path) -> list[NodeShape]:
    """Read `sn,cpu_milli,gpu,model`, in the order of the names. Raises TraceError with the line and what is wrong."""
    named = _all(path, "nodes", read_table(path, ("sn", "cpu_milli", "gpu", "model"), _node))
    return [node for _, node in sorted(named, key=itemgetter(0))]


def _node(row: dict[str, str]) -> tuple[str, NodeShape]:
    return row["sn"], NodeShape(whole(row, "cpu_milli"), whole(row, "gpu", most=8), row["model"])


def read_pods(path: Path) -> list[PodKind]:
    """Read `name,cpu_milli,num_gpu,gpu_milli,gpu_spec`. Raises TraceError with the line and what is wrong."""
    return _all(path, "pods", read_table(path, ("name", "cpu_milli", "num_gpu", "gpu_milli", "gpu_spec"), _pod))


def _pod(row: dict[str, str]) -> PodKind:
    gpus = whole(row, "num_gpu", most=8)
    share = whole(row, "gpu_milli", most=MILLI)
    if gpus == 1 and share == 0:
        raise TraceError(f"pod {row['name']!r} asks for one GPU and 0 thousandths of it; allowed: 1 to {MILLI}")
    milli = 0 if gpus == 0 else share if gpus == 1 else MILLI
    models = frozenset(filter(None, row["gpu_spec"].split("|")))
    return PodKind(whole(row, "cpu_milli"), gpus, milli, models)


def _all(path: Path, what: str, items: Iterator[_Item]) -> list[_Item]:
    found = list(items)
    if not found:
        raise TraceError(f"{path} lists no {what}")
    return found
