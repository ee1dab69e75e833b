"""Works out what a cluster can offer a user, based on the summaries published by the nodes' agents.

- A share counts as free on a node if the agent reports it as admissible, the engine can start jobs there, and the summary is recent.
- A summary older than `stale_after_s` is still shown, with its age, but nothing on the node counts as free.
- A pool's wait is the shortest forecast among its nodes that are up, because the engine uses the first node that admits the job.
- The default share is the smallest free share, or the smallest share overall if none is free.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec import structs

from fractional_gpu.core.units import format_duration, format_memory, plural
from fractional_gpu.protocol.nodes import PoolSummary, parse_summary
from fractional_gpu.protocol.seats import FractionOffer, Offers
from fractional_gpu_hub.options import ClusterPoolOffer

WHOLE = 1000  # a whole device, in milli-GPU
ANY_FRACTIONS = (125, 250, 500, 1000)  # the fractions to offer if a pool allows any fraction
NO_AGENT = "no agent has published its GPUs yet"


class NodePool(PoolSummary, frozen=True, kw_only=True):
    node: str
    at_s: float = 0.0  # when the summary was published, in seconds since the epoch
    why_not: str = ""  # why the engine starts no jobs there, such as "drained", or ""
    simulated: bool = False

    def memory_mib(self, milli: int) -> int:
        return self.device_mib * milli // WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node. `state` is in the engine's own words. `problem` describes any problem with the node, and is otherwise empty."""

    name: str
    state: str
    pools: Sequence[NodePool] = ()
    problem: str = ""


Node = TypeVar("Node", bound=ClusterNode)


class NodeReader(Generic[Node]):
    """Reads the nodes on behalf of all callers. Concurrent callers share a single read, and later callers reuse its result for a while."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, list[Node]]]) -> None:
        self._ask = ask
        self.last: list[Node] = []
        self._read_s: float | None = None
        self._task: asyncio.Task[list[Node]] | None = None

    async def read(self, max_age_s: float) -> list[Node]:
        """Return the nodes as read at most `max_age_s` seconds ago. Raises EngineError. Cancelling this does not affect other callers."""
        if self._read_s is not None and time.monotonic() - self._read_s <= max_age_s:
            return self.last
        # A task from another event loop cannot be awaited here. The task is shielded, so that the cancellation of one caller does not end
        # the reading for the others.
        task, loop = self._task, asyncio.get_running_loop()
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._task = loop.create_task(self._read())
        return await asyncio.shield(task)

    async def _read(self) -> list[Node]:
        self.last = await self._ask()
        self._read_s = time.monotonic()
        return self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Decides whether a summary is stale: whether its age at `now_s` (seconds since the epoch) exceeds `stale_after_s` (seconds)."""

    now_s: float
    stale_after_s: float

    def age_s(self, node: NodePool) -> float:
        """Return the age of a summary in seconds, or 0 if the node's clock is ahead."""
        return max(0.0, self.now_s - node.at_s)

    def is_stale(self, node: NodePool) -> bool:
        return self.age_s(node) > self.stale_after_s


def pools_of_text(node: str, text: str | None, why_not: str) -> tuple[list[NodePool], str]:
    """Return the pools published by a node, and a message describing any problem with the node (empty if there is none).

    `why_not` is a short reason why the engine is not starting jobs on the node, or empty.
    """
    if text is None:
        return [], NO_AGENT
    try:
        summary = parse_summary(text)
    except ValueError as error:
        return [], str(error)
    about = {
        "node": node,
        "at_s": summary.at_s,
        "why_not": why_not or ("without its broker" if summary.problem else ""),
        "simulated": summary.simulated,
    }
    pools = [NodePool(**{**structs.asdict(pool), **about}) for pool in summary.pools]
    return pools, summary.problem


def _fractions(node: NodePool) -> Sequence[int]:
    return node.fractions_milli or ANY_FRACTIONS


def offers_of(nodes: Iterable[NodePool], terms: Terms) -> Offers:
    pools: dict[str, list[NodePool]] = {}
    for node in nodes:
        pools.setdefault(node.name, []).append(node)
    offers = [_pool(name, found, terms) for name, found in sorted(pools.items())]
    pool, milli = _default(offers)
    simulated = any(node.simulated for found in pools.values() for node in found)
    return Offers(pools=list(offers), default_pool=pool, default_fraction_milli=milli, simulated=simulated)


def _pool(name: str, nodes: list[NodePool], terms: Terms) -> ClusterPoolOffer:
    up = [node for node in nodes if not node.why_not]
    free_milli = sum(_free(node, terms) for node in up)
    total = sum(node.total_milli for node in up)
    capacity_mib = sum(node.device_mib * node.total_milli // WHOLE for node in up)
    fractions = sorted({milli for node in nodes for milli in _fractions(node)})
    return ClusterPoolOffer(
        pool=name,
        why_not="" if up else f"no node can start servers right now: {_down(nodes)}",
        hours="",
        devices=sum(node.devices for node in up),
        free_mib=capacity_mib * free_milli // total if total else 0,
        capacity_mib=capacity_mib,
        seats=0,
        waiting=sum(node.waiting for node in up),
        fractions=[
            _fraction(milli, [node for node in up or nodes if milli in _fractions(node)], terms) for milli in fractions
        ],
        facts=_facts(nodes, up, terms),
    )


def _free(node: NodePool, terms: Terms) -> int:
    return 0 if node.why_not or terms.is_stale(node) else node.admissible_milli


def _some(words: Iterable[str], most: int = 4) -> str:
    found = sorted(words)
    return ", ".join(found[:most]) + (", ..." if len(found) > most else "")


def _down(nodes: Iterable[NodePool]) -> str:
    return _some(f"{node.node} is {node.why_not}" for node in nodes if node.why_not)


def _facts(nodes: list[NodePool], up: list[NodePool], terms: Terms) -> str:
    held, total = sum(node.held_milli for node in up), sum(node.total_milli for node in up)
    devices = sum(node.devices for node in up)
    parts = [
        f"{plural(len(up), 'node')} with {plural(devices, 'GPU')}",
        f"{devices_of(held)} of {devices_of(total)} GPUs are held, {devices_of(sum(_free(node, terms) for node in up))} are available now",
    ]
    if waiting := sum(node.waiting for node in up):
        parts.append(f"{plural(waiting, 'kernel')} {'is' if waiting == 1 else 'are'} waiting for a GPU")
    if down := _down(nodes):
        parts.append(down)
    if stale := [node for node in up if terms.is_stale(node)]:
        oldest = format_duration(int(max(terms.age_s(node) for node in stale) * 1000))
        parts.append(f"no update from {_some(node.node for node in stale)} for {oldest}")
    return "; ".join(parts)


def devices_of(milli: int) -> str:
    return f"{milli / WHOLE:.2f}".rstrip("0").rstrip(".")


def _fraction(milli: int, nodes: list[NodePool], terms: Terms) -> FractionOffer:
    at_once = [node for node in nodes if _free(node, terms) >= milli]
    waits = [node.wait_p50_ms for node in nodes if not node.why_not]
    return FractionOffer(
        fraction_milli=milli,
        memory_mib=min((node.memory_mib(milli) for node in nodes), default=0),
        price="",
        free=bool(at_once),
        sentence=_sentence(nodes, at_once, terms),
        expected_ms=0 if at_once else min(waits, default=None),
    )


def _sentence(nodes: list[NodePool], at_once: list[NodePool], terms: Terms) -> str:
    if at_once:
        best = min(at_once, key=lambda node: (node.wait_p50_ms, node.node))
        return (
            f"starts at once on {len(at_once)} of {plural(len(nodes), 'node')}; a cell then waits {format_duration(best.wait_p50_ms)} "
            f"for the GPU, and in 1 case in 20 more than {format_duration(best.wait_p95_ms)}"
        )
    if nodes and all(terms.is_stale(node) for node in nodes):
        return "might not start at once: the nodes' figures are out of date"
    return "waits in the cluster's queue until a node has room"


def _default(offers: Sequence[ClusterPoolOffer]) -> tuple[str, int]:
    usable = [(pool, one) for pool in offers if not pool.why_not for one in pool.fractions]
    if not usable:
        return "", 0
    pool, one = min(usable, key=lambda found: (not found[1].free, found[1].fraction_milli, found[0].pool))
    return pool.pool, one.fraction_milli


def host_memory_mib(nodes: Iterable[NodePool], pool: str, milli: int, *, base_mib: int) -> int:
    """Return how many MiB of host memory to request: `base_mib` plus enough to save all of the share's GPU memory.

    A job's memory limit must also cover the memory its kernels save. The node is not known yet, so the largest cap on any node is used.
    """
    return base_mib + max((node.memory_mib(milli) for node in nodes if node.name == pool), default=0)


def on_offer(offers: Offers, pool: str) -> str:
    for one in offers.pools:
        if one.pool == pool:
            return ", ".join(
                f"{fraction.fraction_milli}m ({format_memory(fraction.memory_mib)})" for fraction in one.fractions
            )
    return ", ".join(one.pool for one in offers.pools) or "none, because no node has published its GPUs"
