"""Lists a Slurm cluster's nodes and the servers' jobs on them, for the cluster page."""

import re
import secrets

from fractional_gpu_hub.engines.offers import NO_AGENT
from fractional_gpu_hub.engines.slurm_commands import JOB_PREFIX, NODES, SEPARATOR, SlurmNode, run
from fractional_gpu_hub.service.cluster import Cluster, ClusterServer

_COLUMNS = ("%A", "%T", "%N", "%b", "%M", "%u", "%j")
_MAX_AGE_S = 2.0
_COUNT = re.compile(r"([a-z][a-z0-9_]*(?::[a-z][a-z0-9_]*)?):(\d{1,9})")


async def read() -> Cluster:
    nodes, mark = await NODES.read(_MAX_AGE_S), secrets.token_hex(8) + SEPARATOR
    text = await run("squeue", "--noheader", f"--format={mark}{SEPARATOR.join(_COLUMNS)}")
    return cluster_of(nodes, text, mark)


def cluster_of(found: list[SlurmNode], text: str, mark: str) -> Cluster:
    """Return the cluster's nodes, and the servers of all hubs. In `text`, each job is listed as `mark` followed by its columns.

    The job's name comes last, because users choose it and it may contain separators and line breaks. It cannot contain the mark, which is
    random for each call.
    """
    counts = {pool.count for node in found for pool in node.pools if pool.count}
    nodes = [node for node in found if node.problem != NO_AGENT]
    servers = []
    for line in text.splitlines():
        parts = line.removeprefix(mark).strip().split(SEPARATOR, len(_COLUMNS) - 1)
        if line.startswith(mark) and len(parts) == len(_COLUMNS) and parts[-1].startswith(JOB_PREFIX):
            job_id, state, node, gres, since, user, _ = parts
            # The milli-GPU that the job requested, by the name of the generic resource.
            asked = {name: int(number) for name, number in _COUNT.findall(gres.replace("gres:", ""))}
            milli = next((asked[name] for name in sorted(counts & set(asked))), None)
            server = ClusterServer(
                identity=f"job {job_id}", user=user, node=node, state=state.lower(), milli=milli, since=since
            )
            servers.append(server)
    return Cluster(nodes=nodes, servers=servers, others=len(found) - len(nodes))
