"""What a node agent publishes of the broker's capacity, in steps coarse enough that small changes are no news."""

from collections.abc import Mapping

from msgspec import structs

from fractional_gpu.core.nodes.counts import rounded_memory_mib, rounded_wait_ms
from fractional_gpu.protocol.nodes import Capacity, NodeSummary, PoolCapacity, PoolSummary


def summary_of(capacity: Capacity, counts: Mapping[str, str], at_s: int) -> NodeSummary:
    """Return the summary of those pools that the engine counts; `counts`: the name by which jobs ask for each pool's thousandths."""
    return NodeSummary(
        at_s=at_s,
        simulated=capacity.simulated,
        memory_left_mib=rounded_memory_mib(capacity.host_memory_left_mib),
        pools=[_pool(pool, counts[pool.name]) for pool in capacity.pools if pool.name in counts],
    )


def summary_without_broker(last: NodeSummary | None, problem: str, at_s: int) -> NodeSummary:
    """Return the summary of a node whose broker does not answer: nothing is free there."""
    pools = [structs.replace(pool, free_milli=0) for pool in last.pools] if last is not None else []
    return NodeSummary(at_s=at_s, simulated=last is not None and last.simulated, pools=pools, problem=problem)


def says_the_same(one: NodeSummary, other: NodeSummary) -> bool:
    """Whether two summaries differ at most in their time."""
    return structs.replace(one, at_s=0) == structs.replace(other, at_s=0)


def _pool(pool: PoolCapacity, count: str) -> PoolSummary:
    return PoolSummary(
        name=pool.name,
        devices=len(pool.devices),
        total_milli=pool.total_milli,
        held_milli=pool.held_milli,
        free_milli=pool.admissible_milli,
        waiting=pool.waiting,
        wait_p50_ms=rounded_wait_ms(round(pool.wait_p50_s * 1000)),
        wait_p95_ms=rounded_wait_ms(round(pool.wait_p95_s * 1000)),
        fraction_milli=pool.fraction_milli,
        fractions_milli=list(pool.fractions_milli),
        device_mib=pool.device_mib,
        count=count,
    )
