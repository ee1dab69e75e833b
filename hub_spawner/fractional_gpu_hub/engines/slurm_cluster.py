"""Slurm's nodes and the hub's jobs on them, for the page of the cluster."""

import re

from fractional_gpu_hub.engines.offers import NO_AGENT
from fractional_gpu_hub.engines.slurm_commands import NODES, ServerJob, SlurmNode, read_servers
from fractional_gpu_hub.service.cluster import Cluster, ClusterServer

_MAX_AGE_S = 2.0
_COUNT = re.compile(r"([a-z][a-z0-9_]*(?::[a-z][a-z0-9_]*)?):(\d{1,9})")


async def read() -> Cluster:
    """Return the cluster. Raises EngineError."""
    return cluster_of(await NODES.read(_MAX_AGE_S), await read_servers())


def cluster_of(found: list[SlurmNode], jobs: list[ServerJob]) -> Cluster:
    counts = {pool.count for node in found for pool in node.pools if pool.count}
    nodes = [node for node in found if node.problem != NO_AGENT]
    servers = [
        ClusterServer(
            identity=f"job {job.job_id}",
            user=job.user,
            node=job.node,
            state=job.state.lower(),
            milli=_milli(job.gres, counts),
            since=job.since,
        )
        for job in jobs
    ]
    return Cluster(nodes=nodes, servers=servers, others=len(found) - len(nodes))


def _milli(gres: str, counts: set[str]) -> int | None:
    asked = {name: int(number) for name, number in _COUNT.findall(gres)}
    return next((asked[name] for name in sorted(counts & set(asked))), None)
