"""The placement benchmark on clusters small enough to work out by hand, and its fragmentation against a plain count."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest

from fractional_gpu.core.events import Attached, LeaseRequested
from tests.benchmarks.placement.cluster import MILLI, Node, NodeShape, PodKind, arrivals, place
from tests.benchmarks.placement.policies import POLICIES, BrokerScorer, FragmentationDescent, typical_pods
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


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_run_never_gives_more_than_there_is_and_repeats_itself(name: str) -> None:
    outcome = place(NODES, PODS, POLICIES[name](PODS), 5)
    assert outcome == place(NODES, PODS, POLICIES[name](PODS), 5)
    assert len(outcome.curve) == 131
    assert list(outcome.curve) == sorted(outcome.curve)
    assert 50 < outcome.alloc_at_100 <= outcome.alloc_at_130 <= 100
    assert outcome.placed + outcome.dropped == len(arrivals(PODS, 20_000, random.Random(5)))


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
