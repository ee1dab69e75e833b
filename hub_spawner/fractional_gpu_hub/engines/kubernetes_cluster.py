"""Lists a Kubernetes cluster's nodes and the hub's pods on them, for the cluster page.

- This module lists the nodes that have the spawner's labels, and the server pods in the hub's namespace. It does not watch or write
  anything, so the hub's service account only needs permission to `list` nodes and pods.
- A pod's user is read from `kubespawner`'s annotation, which anyone who can create pods in the namespace can set.
- The hub starts the service's process with a clean environment, so `service.configuration` passes it the variables it needs.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from kubernetes_asyncio import client

from fractional_gpu.core.units import format_duration
from fractional_gpu.engines import pods
from fractional_gpu.engines.kubernetes import Page, configuration, listed
from fractional_gpu.engines.pods import Node, Pod
from fractional_gpu_hub.engines.offers import ClusterNode, pools_of_text
from fractional_gpu_hub.service.cluster import Cluster, ClusterServer
from fractional_gpu_hub.service.configuration import COMPONENT_VARIABLE, NAMESPACE_VARIABLE, NODES_VARIABLE

USER: Final = "hub.jupyter.org/username"
LIST_NODES: Final = (  # the request, and how the hub gets permission for it
    "list nodes",
    "bind the ClusterRole jupyter-gpu-hub to the hub's service account (kubectl apply --kustomize examples/kubernetes/hub)",
)
_OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterScope:
    """Selects the nodes and servers to list: nodes by their labels, and servers by namespace and `component` label."""

    namespace: str
    nodes: str = "fractional-gpu.jupyter.org/node=true"
    component: str = "singleuser-server"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "ClusterScope":
        given = {
            "nodes": environment.get(NODES_VARIABLE, ""),
            "component": environment.get(COMPONENT_VARIABLE, ""),
            "namespace": environment.get(NAMESPACE_VARIABLE, "") or _own_namespace(),
        }
        return cls(**{name: value for name, value in given.items() if value})


def _own_namespace() -> str:
    try:
        return _OWN_NAMESPACE.read_text().strip() or "default"
    except OSError:
        return "default"  # outside a pod, `kubespawner` uses this namespace, too


async def settings_of(environment: Mapping[str, str]) -> client.Configuration:
    return await configuration(
        environment.get("KUBECONFIG") or None,
        in_pod=bool(environment.get("KUBERNETES_SERVICE_HOST")),
        remedy="run the hub in a pod with a service account whose token is mounted, or set KUBECONFIG in its environment",
    )


async def read() -> Cluster:
    return await read_from(await settings_of(os.environ), ClusterScope.of(os.environ))


async def read_from(settings: client.Configuration, where: ClusterScope) -> Cluster:
    async with client.ApiClient(settings) as connection:
        api = client.CoreV1Api(connection)
        nodes, _ = await listed(api.list_node, Page[Node], *LIST_NODES, label_selector=where.nodes)
        servers, _ = await listed(
            partial(api.list_namespaced_pod, where.namespace),
            Page[Pod],
            f"list pods in the namespace {where.namespace}",
            "bind a Role of that namespace with the verb 'list' on 'pods' to the hub's service account; KubeSpawner also needs it",
            label_selector=f"component={where.component}",
        )
    now = datetime.now(UTC)
    return Cluster(
        nodes=[node_of(node) for node in nodes], servers=[_server(pod, now) for pod in servers if not pod.ended]
    )


def node_of(node: Node) -> ClusterNode:
    name, why_not = node.metadata.name, node.why_not
    pools, problem = pools_of_text(name, node.summary, why_not)
    return ClusterNode(name=name, state=why_not or "in service", pools=pools, problem=problem)


def _server(pod: Pod, now: datetime) -> ClusterServer:
    begun = pod.status.start_time or pod.metadata.creation_timestamp
    try:
        milli = sum(pods.shares_of(pod.spec).values()) or None
    except ValueError:  # the agent could not parse this either
        milli = None
    return ClusterServer(
        identity=f"pod {pod.metadata.name}",
        user=pod.annotations.get(USER, ""),
        node=pod.spec.node_name or "",
        state=_state(pod),
        milli=milli,
        since=format_duration(max(0, int((now - begun).total_seconds())) * 1000) if begun is not None else "",
    )


def _state(pod: Pod) -> str:
    if pod.metadata.deletion_timestamp is not None:
        return "ending"
    if pod.status.phase == "Pending":
        return "starting" if pod.spec.node_name else "pending"
    return (pod.status.phase or "unknown").lower()
