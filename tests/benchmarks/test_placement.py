"""The placement benchmark on clusters small enough to work out by hand, and its fragmentation against a plain count."""

import random
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from fractional_gpu.core.events import Attached, LeaseRequested
from fractional_gpu.simulator import SimulationError, TraceError
from tests.benchmarks.placement.cluster import (
    MILLI,
    Node,
    NodeShape,
    PodKind,
    Policy,
    arrivals,
    place,
    read_nodes,
    read_pods,
)
from tests.benchmarks.placement.policies import (
    POLICIES,
    BestFit,
    BrokerScorer,
    DotProduct,
    FragmentationDescent,
    typical_pods,
)
from tests.benchmarks.placement.tuning import LEAST_GAIN, START, Step, tune
from tests.core.driving import Hand, device, pool, spec

WHOLE = PodKind(4000, 1, 1000)
HALF = PodKind(4000, 1, 500)
PAIR = PodKind(8000, 2, 1000)
CPU = PodKind(2000, 0, 0)
PODS = [*[WHOLE] * 20, *[HALF] * 30, *[PAIR] * 10, *[CPU] * 8, *[PodKind(1000, 1, 190)] * 12]
NODES = [NodeShape(64_000, 8, "large"), *[NodeShape(16_000, 2, "small")] * 6]


def fragmentation(node: Node, kinds: list[tuple[PodKind, int]]) -> int:
    """As the paper defines it: per typical pod, what of the node's free GPU the pod cannot use."""
    total = 0
    for kind, weight in kinds:
        allowed = not kind.models or node.shape.model in kind.models
        enough = sum(left >= kind.milli for left in node.left) >= kind.gpus > 0
        if allowed and enough and kind.cpu_milli <= node.cpu_left:
            total += weight * sum(left for left in node.left if left < kind.milli)
        else:
            total += weight * sum(node.left)
    return total


def test_the_tables_count_fragmentation_as_it_is_defined() -> None:
    rng = random.Random(1)
    picky = [*PODS, *[PodKind(3000, 1, 1000, frozenset({"large"}))] * 9]
    policy = FragmentationDescent(picky)
    checked = 0
    for _ in range(500):
        shape = rng.choice(NODES)
        left = [rng.choice([0, 190, 500, 1000, 1000, rng.randrange(1001)]) for _ in range(shape.gpus)]
        node = Node(shape, rng.randrange(shape.cpu_milli + 1), left)
        kind = rng.choice(picky)
        if not node.fits(kind):
            continue
        shrinks, gpu = policy._best(node, kind)
        after = deepcopy(node)
        after.take(kind, gpu if gpu >= 0 else None)
        kinds = typical_pods(picky)
        assert shrinks == fragmentation(node, kinds) - fragmentation(after, kinds)
        checked += 1
    assert checked > 200


def test_descent_takes_the_gpu_that_is_broken_already() -> None:
    policy = FragmentationDescent(PODS)
    node = Node(NODES[1], 16_000, [1000, 500])
    assert policy.gpu(node, HALF, random.Random(1)) == 1


def test_best_fit_prefers_the_fuller_node_and_dot_product_the_less_alike() -> None:
    empty, fuller = Node(NODES[0], 64_000, [1000] * 8), Node(NODES[1], 8_000, [1000, 0])
    assert BestFit().score(fuller, HALF) > BestFit().score(empty, HALF)
    wide = PodKind(32_000, 8, 1000)
    narrow = Node(NODES[1], 16_000, [1000, 1000])
    assert DotProduct().score(narrow, wide) > DotProduct().score(empty, wide)


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_run_never_gives_more_than_there_is_and_repeats_itself(name: str) -> None:
    outcome = place(NODES, PODS, POLICIES[name](PODS), 5)
    assert outcome == place(NODES, PODS, POLICIES[name](PODS), 5)
    assert len(outcome.curve) == 131
    assert list(outcome.curve) == sorted(outcome.curve)
    assert 50 < outcome.alloc_at_100 <= outcome.alloc_at_130 <= 100
    assert outcome.placed + outcome.dropped == len(arrivals(PODS, 20_000, random.Random(5)))


def test_pods_arrive_until_130_percent_are_asked_for() -> None:
    coming = arrivals(PODS, 80_000, random.Random(1))
    asked = sum(pod.demand_milli for pod in coming)
    assert 104_000 - 2000 < asked <= 104_000
    assert all(coming.count(kind) >= PODS.count(kind) for kind in set(PODS))
    assert sum(pod.demand_milli for pod in arrivals(PODS, 10_000, random.Random(1))) <= 13_000


@pytest.mark.parametrize("name", ["broker", "broker-cpu"])
def test_the_brokers_policies_know_no_pod_beforehand(name: str) -> None:
    assert place(NODES, PODS, POLICIES[name](PODS), 5) == place(NODES, PODS, POLICIES[name]([]), 5)


@pytest.mark.parametrize("seed", range(4))
def test_on_one_host_the_policy_named_broker_chooses_the_devices_that_the_arbiter_chooses(seed: int) -> None:
    rng, ids = random.Random(seed), [f"d{number}" for number in range(8)]
    hand = Hand(*(device(name, memory_mib=MILLI) for name in ids), pools=[pool(*ids)])
    node, policy, placed = Node(NodeShape(10**6, 8, "H"), 10**6, [MILLI] * 8), BrokerScorer(), 0
    kinds = [PodKind(1, 1, milli) for milli in (125, 190, 250, 500, 810, 1000)] + [PodKind(1, 2, MILLI)]
    for number in range(60):
        kind = rng.choice(kinds)
        if not node.fits(kind):
            continue
        policy.arrived(kind)
        before = list(node.left)
        node.take(kind, policy.gpu(node, kind, rng) if kind.gpus == 1 and kind.milli < MILLI else None)
        lease = replace(spec(f"k{number}", kind.milli, milli=kind.milli), devices=kind.gpus)
        hand.send(LeaseRequested(at_ms=hand.now, spec=lease))
        hand.send(Attached(at_ms=hand.now, lease_id=f"k{number}", gated=True))
        hand.want(f"k{number}")
        hand.work(f"k{number}")
        taken = [ids[gpu] for gpu in range(8) if node.left[gpu] != before[gpu]]
        assert sorted(hand.view(f"k{number}").device_ids) == taken
        placed += 1
    assert placed >= 9


class _Slow(Policy):
    """Scores like best fit, and says how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def score(self, node: Node, kind: PodKind) -> int:
        self.asked += 1
        return BestFit().score(node, kind)


def test_only_nodes_that_changed_are_scored_again() -> None:
    nodes = NODES[1:] * 20
    policy = _Slow()
    outcome = place(nodes, PODS, policy, 1)
    assert policy.asked < outcome.placed * len(nodes) / 4
    assert outcome.curve == place(nodes, PODS, BestFit(), 1).curve


def test_the_files_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("sn,cpu_milli,memory_mib,gpu,model\nn2,1,1,2,T4\nn1,3,1,1,V100\n")
    assert read_nodes(tmp_path / "nodes.csv") == [NodeShape(3, 1, "V100"), NodeShape(1, 2, "T4")]
    header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"
    (tmp_path / "pods.csv").write_text(header + "p0,1,1,0,0,,LS\np1,2,1,1,470,,BE\np2,3,1,4,1000,T4|V100,LS\n")
    assert read_pods(tmp_path / "pods.csv") == [
        PodKind(1, 0, 0),
        PodKind(2, 1, 470),
        PodKind(3, 4, 1000, frozenset({"T4", "V100"})),
    ]
    (tmp_path / "pods.csv").write_text(header + "p1,2,1,1,0,,BE\n")
    with pytest.raises(
        TraceError, match=r"line 2: pod 'p1' asks for one GPU and 0 thousandths of it; allowed: 1 to 1000"
    ):
        read_pods(tmp_path / "pods.csv")
    (tmp_path / "pods.csv").write_text(header)
    with pytest.raises(TraceError, match=r"pods\.csv lists no pods"):
        read_pods(tmp_path / "pods.csv")


def test_weights_are_chosen_by_what_they_allocate_and_the_choice_can_be_repeated() -> None:
    tried: list[Step] = []
    best = tune(NODES, PODS, [1, 2], tried.append)
    assert tried[0].weights == START
    assert best in tried
    assert best.alloc_at_130 >= max(step.alloc_at_130 for step in tried) - LEAST_GAIN * len(tried)
    assert best.alloc_at_130 >= tried[0].alloc_at_130
    assert len({step.weights for step in tried}) == len(tried)
    assert tune(NODES, PODS, [1, 2]) == best


def test_weights_are_not_chosen_on_the_seeds_that_are_compared() -> None:
    with pytest.raises(SimulationError, match="may not be chosen on seed 42"):
        tune(NODES, PODS, [7, 42])
