"""The cluster page: all nodes, as published by their agents, and the servers on them.

- The engine is queried every `EVERY_S` seconds while a page is open, and for `LINGER_S` seconds afterwards.
- Users see totals for every node, and their own servers. Administrators see all servers. The engine and the hub must use the same user
  names.
- If a node's summary is old or the engine does not answer, the page shows the last known figures and their age.
"""

import asyncio
import importlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fractional_gpu.core.units import format_duration, format_fraction, format_memory, plural
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.nodes import STALE_S
from fractional_gpu_hub.engines.offers import ClusterNode, NodePool, Terms, devices_of
from fractional_gpu_hub.service.views import Viewer

log = logging.getLogger(__name__)

EVERY_S, LINGER_S = 10.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterServer:
    """A user's server. `milli` is its share in milli-GPU, or None if it has no GPU. `since` says how long it has been running, as text."""

    identity: str
    user: str
    node: str
    state: str
    milli: int | None = None
    since: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes that have an agent, all servers, and the number of nodes that have no agent (`others`)."""

    nodes: Sequence[ClusterNode] = ()
    servers: Sequence[ClusterServer] = ()
    others: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """The last known state of the cluster. `problem` explains why it is out of date, and is empty while it is current."""

    cluster: Cluster = field(default_factory=Cluster)
    problem: str = "the cluster has not responded yet"


def reader_of(engine: str) -> Callable[[], Awaitable[Cluster]]:
    module = importlib.import_module(f"fractional_gpu_hub.engines.{engine}_cluster")
    return cast("Callable[[], Awaitable[Cluster]]", module.read)


class ClusterFollower:
    def __init__(self, read: Callable[[], Awaitable[Cluster]]) -> None:
        self.changed = asyncio.Event()
        self._read = read
        self._snapshot = ClusterSnapshot()
        self._asked = asyncio.Event()
        self._asked_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def snapshot(self) -> ClusterSnapshot:
        """The last known state of the cluster. The engine is queried until `LINGER_S` seconds after this was last read."""
        self._asked_s = time.monotonic()
        self._asked.set()
        return self._snapshot

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self) -> None:
        while True:
            if time.monotonic() - self._asked_s > LINGER_S:
                self._asked.clear()
            await self._asked.wait()
            try:
                fresh = ClusterSnapshot(cluster=await self._read(), problem="")
            except FractionalGPUError as error:
                fresh = replace(self._snapshot, problem=str(error))
            if fresh.problem != self._snapshot.problem and fresh.problem:
                log.warning("could not read the cluster's state: %s", fresh.problem)
            self._snapshot = fresh
            self.changed.set()
            self.changed = asyncio.Event()
            await asyncio.sleep(EVERY_S)


def cluster_view(snapshot: ClusterSnapshot, viewer: Viewer, *, now_s: float | None = None) -> dict[str, Any]:
    cluster, terms = snapshot.cluster, Terms(now_s=time.time() if now_s is None else now_s, stale_after_s=STALE_S)
    servers = [one for one in cluster.servers if viewer.admin or one.user == viewer.name]
    return {
        "you": {"name": viewer.name, "admin": viewer.admin},
        "problem": snapshot.problem,
        "simulated": any(pool.simulated for node in cluster.nodes for pool in node.pools),
        "summary": _summary(cluster, servers, viewer, terms),
        "nodes": [row for node in sorted(cluster.nodes, key=lambda one: one.name) for row in _rows(node, terms)],
        "servers": [_server(one) for one in sorted(servers, key=lambda one: (one.user, one.identity))],
        "devices": [],
        "kernels": [],
    }


def _summary(cluster: Cluster, servers: Sequence[ClusterServer], viewer: Viewer, terms: Terms) -> str:
    pools = [pool for node in cluster.nodes for pool in node.pools if not pool.why_not]
    free = sum(pool.admissible_milli for pool in pools if not terms.is_stale(pool))
    parts = [
        plural(len(cluster.nodes), "node"),
        f"{devices_of(sum(pool.held_milli for pool in pools))} of {devices_of(sum(pool.total_milli for pool in pools))} GPUs held",
        f"{devices_of(free)} available now",
        plural(len(servers), "server") + ("" if viewer.admin else " of yours"),
    ]
    if cluster.others:
        parts.append(f"{plural(cluster.others, 'more node')} without an agent")
    return ", ".join(parts)


def _rows(node: ClusterNode, terms: Terms) -> list[dict[str, Any]]:
    if not node.pools:
        return [
            {
                "id": node.name,
                "name": node.name,
                "pool": "none",
                "gpus": "not known",
                "gpus_note": "",
                "held": "not known",
                "level": 0,
                "free": "none",
                "queue": "not known",
                "queue_note": "",
                "state": node.state,
                "note": _sentence(node.problem),
            }
        ]
    return [_row(node, pool, terms) for pool in sorted(node.pools, key=lambda one: one.name)]


def _row(node: ClusterNode, pool: NodePool, terms: Terms) -> dict[str, Any]:
    stale = terms.is_stale(pool)
    usable = not pool.why_not and not stale
    notes = [f"published {format_duration(int(terms.age_s(pool)) * 1000)} ago{', too old to rely on' if stale else ''}"]
    return {
        "id": f"{node.name}/{pool.name}",
        "name": node.name,
        "pool": pool.name,
        "gpus": f"{plural(pool.devices, 'GPU')}",
        "gpus_note": f"{format_memory(pool.device_mib)} each" if pool.device_mib else "",
        "held": f"{devices_of(pool.held_milli)} of {devices_of(pool.total_milli)} held",
        "level": min(100, 100 * pool.held_milli // max(1, pool.total_milli)),
        "free": f"{devices_of(pool.admissible_milli)} GPUs at once" if usable else "none",
        "queue": plural(pool.waiting, "kernel") if pool.waiting else "none",
        "queue_note": _wait(pool),
        "state": node.state,
        "note": ". ".join(_sentence(one).rstrip(".") for one in ([node.problem] if node.problem else []) + notes) + ".",
    }


def _wait(pool: NodePool) -> str:
    half, most = format_duration(pool.wait_p50_ms), format_duration(pool.wait_p95_ms)
    return f"with one more server, half of its cells would wait at most {half}, and 95 % at most {most}"


def _server(one: ClusterServer) -> dict[str, Any]:
    return {
        "id": one.identity,
        "name": one.identity,
        "owner": one.user,
        "share": f"{format_fraction(one.milli)} GPU" if one.milli else "no GPU",
        "node": one.node or "none yet",
        "state": one.state,
        "since": one.since,
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
