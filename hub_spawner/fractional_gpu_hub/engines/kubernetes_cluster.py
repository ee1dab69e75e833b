"""Kubernetes' nodes and the hub's pods on them, for the page of the cluster.

- Two lists, each in pages: the nodes with the spawner's labels, and the pods of the hub's namespace with the label that `kubespawner` gives
  servers. Nothing is watched and nothing written, so the hub's service account needs `list` of both and no other verb.
- Of each answer the fields below are read and checked; the rest, such as what pods have in their environment, is not kept.
- A pod's user is the annotation that `kubespawner` writes: anyone who may create pods in the namespace can write it, too.
- The service's process is started by the hub in the hub's pod, with a clean environment: `service.configuration` hands on what it needs.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import aiohttp
import msgspec
import yaml
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import OpenApiException
from kubernetes_asyncio.config.config_exception import ConfigException
from msgspec import Struct, field

from fractional_gpu.core.units import format_duration
from fractional_gpu.protocol import pods
from fractional_gpu.protocol.nodes import parse_summary
from fractional_gpu_hub.engines.offers import NO_AGENT, pools_of_summary
from fractional_gpu_hub.engines.spawner import EngineUnavailableError
from fractional_gpu_hub.service.cluster import Cluster, ClusterNode, ClusterServer
from fractional_gpu_hub.service.configuration import COMPONENT_VARIABLE, NAMESPACE_VARIABLE, NODES_VARIABLE

Item = TypeVar("Item")

USER: Final = "hub.jupyter.org/username"
"""The annotation in which `kubespawner` writes a pod's user, as the hub names them."""
_OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_ANSWER_S: Final = 10.0  # of one page
_PAGE: Final = 250  # objects
_LONGEST_TEXT: Final = 300
# The client reads a file of another form without checking it: an empty one, say, is a TypeError.
_NO_SETTINGS: Final = (ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What is listed: the labels of nodes, the namespace of servers, and their label `component`, as the spawner has them."""

    namespace: str
    nodes: str = "fractional-gpu.jupyter.org/node=true"
    component: str = "singleuser-server"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Where":
        """Return what the service was told; by default the spawner's own defaults hold. Reads the namespace's file in a pod."""
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
        return "default"  # not in a pod: `kubespawner` takes it, too


async def settings_of(environment: Mapping[str, str]) -> client.Configuration:
    """Return how the API server is reached: as this pod's service account, outside a pod by the file of kubectl.

    Raises EngineUnavailableError.
    """
    found = client.Configuration()
    try:
        if environment.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(
                environment.get("KUBECONFIG") or None, client_configuration=found, persist_config=False
            )
    except _NO_SETTINGS as error:
        raise EngineUnavailableError(
            f"the hub's page does not know how to reach the Kubernetes API: {str(error) or type(error).__name__}; run the hub in a pod "
            "with a service account whose token is mounted, or set KUBECONFIG in its environment"
        ) from error
    return found


class _Read(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """An object of the API, of which some fields are read."""


class _Metadata(_Read):
    name: str
    annotations: dict[str, str] | None = None
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class _Condition(_Read):
    type: str
    status: str


class _NodeSpec(_Read):
    unschedulable: bool | None = None


class _NodeStatus(_Read):
    conditions: list[_Condition] | None = None


class _Node(_Read):
    metadata: _Metadata
    spec: _NodeSpec = field(default_factory=_NodeSpec)
    status: _NodeStatus = field(default_factory=_NodeStatus)


class _Resources(_Read):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class _Container(_Read):
    resources: _Resources | None = None
    restart_policy: str | None = None


class _PodSpec(_Read):
    node_name: str | None = None
    containers: list[_Container] = []
    init_containers: list[_Container] | None = None


class _PodStatus(_Read):
    phase: str | None = None
    start_time: datetime | None = None


class _Pod(_Read):
    metadata: _Metadata
    spec: _PodSpec
    status: _PodStatus = field(default_factory=_PodStatus)


class _ListMetadata(_Read):
    more: str = field(name="continue", default="")


class _Page(_Read, Generic[Item]):
    metadata: _ListMetadata
    items: list[Item] | None = None


class _Refusal(_Read):
    message: str = ""


async def read() -> Cluster:
    """Return the cluster. Raises EngineUnavailableError. Cancelled: nothing has changed."""
    return await read_from(await settings_of(os.environ), Where.of(os.environ))


async def read_from(settings: client.Configuration, where: Where) -> Cluster:
    """Return the cluster behind this API server. Raises EngineUnavailableError. Cancelled: nothing has changed."""
    async with client.ApiClient(settings) as connection:
        api = client.CoreV1Api(connection)
        nodes = await _listed(
            lambda **page: api.list_node(label_selector=where.nodes, **page),
            _Page[_Node],
            "list nodes",
            "bind the ClusterRole jupyter-gpu-hub to its service account (kubectl apply --kustomize examples/kubernetes/hub)",
        )
        servers = await _listed(
            lambda **page: api.list_namespaced_pod(
                where.namespace, label_selector=f"component={where.component}", **page
            ),
            _Page[_Pod],
            f"list pods in the namespace {where.namespace}",
            "bind a Role of that namespace with the verb 'list' on 'pods' to its service account; KubeSpawner needs it as well",
        )
    now = datetime.now(UTC)
    found = [_server(pod, now) for pod in servers if pod.status.phase not in ("Succeeded", "Failed")]
    return Cluster(nodes=[_node(node) for node in nodes], servers=found)


async def _listed(ask: Callable[..., Awaitable[Any]], kind: type[_Page[Item]], what: str, right: str) -> list[Item]:
    """Return all objects of a list. `what` is done, and `right`: how it is allowed, for errors. Raises EngineUnavailableError."""
    found: list[Item] = []
    more = ""
    while True:
        try:
            page = {"_continue": more} if more else {}
            response = await ask(limit=_PAGE, _preload_content=False, _request_timeout=_ANSWER_S, **page)
            async with response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, OpenApiException, TimeoutError, OSError) as error:
            raise EngineUnavailableError(
                f"the Kubernetes API does not answer: {str(error) or type(error).__name__}"
            ) from error
        if status != 200:
            raise _refused(status, body, what, right)
        try:
            answer = msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineUnavailableError(f"the Kubernetes API's answer to {what} is not understood: {error}") from error
        found += answer.items or ()
        more = answer.metadata.more
        if not more:
            return found


def _refused(status: int, body: bytes, what: str, right: str) -> EngineUnavailableError:
    try:
        said = msgspec.json.decode(body, type=_Refusal).message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = ""  # of a proxy before the API server
    why = f"{status}: {said[:_LONGEST_TEXT]}" if said else str(status)
    if status == 403:
        return EngineUnavailableError(f"the hub may not {what} ({why}); {right}")
    if status == 401:
        return EngineUnavailableError(
            f"the Kubernetes API does not accept the token of the hub's service account ({why}); see whether the account exists and its "
            "token is mounted in the hub's pod"
        )
    return EngineUnavailableError(f"the Kubernetes API does not {what} now ({why}); the page tries again")


def _node(node: _Node) -> ClusterNode:
    """Return a node of the page: what its agent published, or why there is nothing to show."""
    name, why_not = node.metadata.name, _why_not(node)
    state = why_not or "in service"
    text = (node.metadata.annotations or {}).get(pods.SUMMARY)
    if text is None:
        return ClusterNode(name=name, state=state, problem=NO_AGENT)
    try:
        summary = parse_summary(text)
    except ValueError as error:
        return ClusterNode(name=name, state=state, problem=str(error))
    usable = why_not or ("without its broker" if summary.problem else "")
    return ClusterNode(name=name, state=state, pools=pools_of_summary(name, summary, usable), problem=summary.problem)


def _why_not(node: _Node) -> str:
    if node.spec.unschedulable:
        return "cordoned"
    ready = next((one.status for one in node.status.conditions or () if one.type == "Ready"), "True")
    return "" if ready == "True" else "not ready"


def _server(pod: _Pod, now: datetime) -> ClusterServer:
    begun = pod.status.start_time or pod.metadata.creation_timestamp
    return ClusterServer(
        identity=f"pod {pod.metadata.name}",
        user=(pod.metadata.annotations or {}).get(USER, ""),
        node=pod.spec.node_name or "",
        state=_state(pod),
        milli=_milli(pod.spec),
        since=format_duration(max(0, int((now - begun).total_seconds())) * 1000) if begun is not None else "",
    )


def _state(pod: _Pod) -> str:
    if pod.metadata.deletion_timestamp is not None:
        return "ending"
    if pod.status.phase == "Pending":
        return "starting" if pod.spec.node_name else "pending"
    return (pod.status.phase or "unknown").lower()


def _milli(spec: _PodSpec) -> int | None:
    """Return the thousandths that a pod has of a GPU, None for none. What its agent would not read is no share."""
    try:
        return sum(pods.shares_of(msgspec.to_builtins(spec)).values()) or None
    except ValueError:
        return None
