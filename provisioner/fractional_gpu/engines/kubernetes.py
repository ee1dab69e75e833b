"""Talks to the Kubernetes API through `kubernetes_asyncio`. Handles requests and errors for agents and hubs, and provides a node's engine.

Only the fields in `engines.pods` are parsed and checked, because building the client's own models takes milliseconds per pod. The agent
patches only the *status* of the node (extended resources and an annotation), so it can neither taint nor cordon the node. It lists the pods
once, then watches for changes made since then. If the server no longer has those changes (410), it lists the pods again. After a failure it
retries with pauses that double up to one minute, and keeps the known pods in the meantime.
"""

import asyncio
import random
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, Generic, Self, TypeVar

import aiohttp
import msgspec
import yaml
from kubernetes_asyncio import client, config, watch
from kubernetes_asyncio.client.exceptions import ApiException, OpenApiException
from kubernetes_asyncio.config.config_exception import ConfigException
from msgspec import Struct, field

from fractional_gpu.engines import pods
from fractional_gpu.engines.engine import EngineError, EngineUnavailableError, NodeRecord, NodeWrite
from fractional_gpu.engines.pod_seats import in_use
from fractional_gpu.engines.pods import Node, Pod

Answer = TypeVar("Answer")
Item = TypeVar("Item")

_ANSWER_S: Final = 10.0  # the time limit of one request
_RAW: Final[Mapping[str, Any]] = {"_preload_content": False, "_request_timeout": _ANSWER_S}
_WATCH_S: Final = 300  # the server ends a watch after this time, or up to twice as long, to spread the load
_PAGE: Final = 250  # objects on one page of a list
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_SHORT_S: Final = 5.0
_LONGEST_TEXT: Final = 300
_UNUSABLE: Final = (400, 404, 405, 415, 422)  # repeating the request does not help
# The client does not validate the file: for example, it raises TypeError for an empty file.
_NO_SETTINGS: Final = (ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError)

RIGHTS: Final = [
    ("get", "nodes"),
    ("patch", "nodes/status"),
    ("list", "pods"),
    ("watch", "pods"),
    ("patch", "pods/status"),
]
"""The API requests an agent makes. The manifests grant these rights and no others."""


class _PageMetadata(Struct, rename="camel"):
    more: str = field(name="continue", default="")
    resource_version: str = "0"


class Page(Struct, Generic[Item]):
    metadata: _PageMetadata
    items: list[Item] | None = None


class _Refusal(Struct):
    message: str = ""


async def configuration(kubeconfig: str | None, *, in_pod: bool, remedy: str) -> client.Configuration:
    """Return the configuration for the API server, from the pod's service account or a kubeconfig file. Raises EngineError."""
    found = client.Configuration()
    try:
        if in_pod:
            config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(kubeconfig, client_configuration=found, persist_config=False)
    except _NO_SETTINGS as error:
        where = "this pod's service account" if in_pod else kubeconfig or "kubectl's configuration"
        why = str(error) or type(error).__name__
        raise EngineError(f"cannot reach the Kubernetes API with {where}: {why}; {remedy}") from error
    return found


async def ask(call: Awaitable[Any], kind: type[Answer], what: str, right: str) -> Answer:
    try:
        async with await call as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, OpenApiException, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        raise EngineUnavailableError(f"the Kubernetes API is not responding: {why}") from error
    if not 200 <= status < 300:
        try:
            said = msgspec.json.decode(body, type=_Refusal).message
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            said = ""  # the answer comes from a proxy in front of the API server
        raise _failure(status, said or "no reason", what, right)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineUnavailableError(f"the Kubernetes API sent an unexpected answer to {what}: {error}") from error


def _failure(status: int, said: str, what: str, right: str) -> EngineError:
    why = f"{status}: {said[:_LONGEST_TEXT]}"
    if status == 401:
        return EngineError(
            f"the Kubernetes API does not accept the token of this service account ({why}); check that the account exists and that "
            "its token is mounted in this pod"
        )
    if status == 403:
        return EngineError(f"the Kubernetes API refuses permission to {what} ({why}); {right}")
    if status in _UNUSABLE:
        return EngineError(f"the Kubernetes API cannot {what} ({why})")
    return EngineUnavailableError(f"the Kubernetes API cannot {what} at the moment ({why})")


async def listed(
    call: Callable[..., Awaitable[Any]], kind: type[Page[Item]], what: str, right: str, **selectors: str
) -> tuple[list[Item], str]:
    """Read all pages of a list, and return its objects and its version. Raises EngineError."""
    found: list[Item] = []
    more = None
    while True:
        page = await ask(call(limit=_PAGE, _continue=more, **selectors, **_RAW), kind, what, right)
        found += page.items or ()
        more = page.metadata.more
        if not more:
            return found, page.metadata.resource_version


def _use(verb: str, resource: str) -> tuple[str, str]:
    right = f"bind the ClusterRole jupyter-gpu-agent, which must allow {verb!r} on {resource!r}, to the agent's service account"
    return f"{verb} {resource}", right


class KubernetesEngine:
    """The `engine.Engine` for one node. Use it as a context manager. It also lists the node's pods. `say` is called with log lines.

    Counts are in milli-GPU, by extended resource. A count is -1 if the node does not have the resource yet. The client runs on an event
    loop in a separate thread. Methods block for at most a few seconds.
    """

    def __init__(
        self, settings: client.Configuration, node: str, pools: Iterable[str], say: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._node = node
        self._names = {pool: pods.resource_of(pool) for pool in pools}
        self._say = say
        self._pods: dict[str, Pod] | None = None
        self._trouble = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="Kubernetes API", daemon=True)
        self.changed = threading.Event()
        """Set when one of the node's pods has changed. The reader clears it."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        self._client = client.ApiClient(self._settings)
        self._api = client.CoreV1Api(self._client)
        self._watching = asyncio.create_task(self._follow())

    async def _close(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._client.close()

    def pods(self) -> tuple[Pod, ...] | None:
        return None if self._pods is None else tuple(self._pods.values())

    async def _follow(self) -> None:
        selector, failures, version = f"spec.nodeName={self._node}", 0, ""
        clock = asyncio.get_running_loop().time
        ask_pods = self._api.list_pod_for_all_namespaces
        while True:
            begun_s = clock()
            try:
                if not version:
                    found, version = await listed(ask_pods, Page[Pod], *_use("list", "pods"), field_selector=selector)
                    self._pods = {pod.metadata.uid: pod for pod in found}
                    self._report("")
                    self.changed.set()
                limit_s = random.randint(_WATCH_S, 2 * _WATCH_S)  # noqa: S311 - spreads requests
                async with watch.Watch("object").stream(
                    ask_pods,
                    field_selector=selector,
                    resource_version=version,
                    allow_watch_bookmarks=True,
                    timeout_seconds=limit_s,
                    _request_timeout=(_ANSWER_S, limit_s + _ANSWER_S),
                ) as events:
                    async for event in events:
                        self._take(event["type"], event["raw_object"])
                        version = events.resource_version or ""
                        self._report("")
            except ApiException as error:
                if error.status == 410:
                    version = ""
                else:
                    self._report(str(_failure(error.status, str(error.reason), *_use("watch", "pods"))))
            except EngineError as error:
                self._report(str(error))
            except Exception as error:  # noqa: BLE001 - errors of the client for invalid events, and of the connection
                self._report(f"the watch on this node's pods failed: {str(error) or type(error).__name__}")
            # A watch that repeatedly ends right after it began also counts as a failure.
            failures = failures + 1 if clock() - begun_s < _SHORT_S else 0
            if failures:
                pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16), _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads requests

    def _take(self, kind: str, found: object) -> None:
        if kind == "BOOKMARK" or self._pods is None:
            return
        pod = msgspec.convert(found, Pod)
        if kind == "DELETED":
            self._pods.pop(pod.metadata.uid, None)
        else:
            self._pods[pod.metadata.uid] = pod
        self.changed.set()

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._say(trouble or "the API server is responding again; watching this node's pods")
            self._trouble = trouble

    def read_node(self) -> NodeRecord:
        known = self.pods()
        if known is None:
            raise EngineUnavailableError("the API server has not listed this node's pods yet")
        _, right = _use("get", "nodes")
        node = self._run(ask(self._api.read_node(self._node, **_RAW), Node, "get the node given with --node", right))
        counts = {name: _count((node.status.capacity or {}).get(name)) for name in self._names.values()}
        used = in_use(known)
        return NodeRecord(
            counts=counts,
            in_use={name: used.get(pool, 0) for pool, name in self._names.items()},
            most={},
            summary=node.summary or "",
        )

    def write_node(self, write: NodeWrite, record: NodeRecord) -> None:  # noqa: ARG002 - a patch does not change other fields
        self._patch(write.summary, {name: str(count) for name, count in write.counts.items()})

    def remove(self) -> None:
        self._patch(None, dict.fromkeys(self._names.values()))

    def _patch(self, summary: str | None, counts: Mapping[str, str | None]) -> None:
        # The kubelet copies capacity to allocatable only at its next report, up to five minutes later, so write both.
        status = {"capacity": counts, "allocatable": counts}
        body = {"metadata": {"annotations": {pods.SUMMARY: summary}}, "status": status}
        self._run(ask(self._api.patch_node_status(self._node, body, **_RAW), Node, *_use("patch", "nodes/status")))

    def annotate_pod(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Set annotations on a pod, if it still exists. This call blocks. Raises EngineError."""
        about = pod.metadata
        body = {"metadata": {"uid": about.uid, "annotations": dict(annotations)}}
        patch = self._api.patch_namespaced_pod_status(about.name, about.namespace, body, **_RAW)
        try:
            self._run(ask(patch, Pod, *_use("patch", "pods/status")))
        except EngineError as error:
            if re.search(r"\((404|409): ", str(error)) is None:  # 409: another pod now has this name
                raise


def _count(quantity: object) -> int:
    try:
        return pods.whole_quantity(quantity)
    except ValueError:
        return -1
