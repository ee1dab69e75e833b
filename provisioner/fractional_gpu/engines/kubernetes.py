"""Kubernetes for a node agent: the node's counts and summary, and the pods of the node, by `kubernetes_asyncio`.

The rules:
- Everything is one kind of write: a patch of the node's *status*, with the extended resources and the annotation of the summary. It needs
  no right to change a node's spec, so the agent can neither taint nor cordon a node.
- Pods are listed once and then watched from the list's version on, with a field selector for the node. Bookmarks move the version on. The
  server ends a watch now and then: the next one begins where it ended. An expired version (410) begins with a list anew.
- A list or a watch that fails is repeated after twice as long each time, up to a minute, with jitter. Meanwhile the pods known so far stay.
- A conflict (409) is repeated a few times. A refusal (401, 403) is no error of the moment: the message names the right that is missing.
- `Cluster` runs the client on an event loop of its own in a thread; its methods, and the engine's, block for some seconds at most.
"""

import asyncio
import json
import random
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, Self, TypeVar

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import OpenApiException
from kubernetes_asyncio.config.config_exception import ConfigException

from fractional_gpu.engines.engine import EngineError, EngineUnavailableError, NodeRecord, NodeWrite
from fractional_gpu.engines.pod_seats import Pod, in_use
from fractional_gpu.protocol import pods

Answer = TypeVar("Answer")
Api = client.CoreV1Api

_ANSWER_S: Final = 10.0  # of one request
_WATCH_S: Final = 300  # the server ends a watch then; up to twice as long, so that agents do not begin anew together
_PAGE: Final = 250  # pods
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_SHORT_S: Final = 5.0
_CONFLICTS: Final = 5
_LONGEST_TEXT: Final = 300

RIGHTS: Final = {
    "node": ("get", "nodes"),
    "status": ("patch", "nodes/status"),
    "list": ("list", "pods"),
    "watch": ("watch", "pods"),
    "pod": ("patch", "pods/status"),
}
"""The rights that each use of the API needs; the manifests give these and no others."""


class ExpiredError(EngineUnavailableError):
    """The version from which to watch is too old (410 Gone): list anew."""


def configuration(kubeconfig: str | None = None) -> client.Configuration:
    """Return how the API server is reached: from a file, or as a pod's service account. Raises EngineError."""
    found = client.Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
        else:
            asyncio.run(config.load_kube_config(kubeconfig, client_configuration=found, persist_config=False))
    except (ConfigException, OSError, ValueError) as error:
        where = "this pod's service account" if kubeconfig is None else kubeconfig
        raise EngineError(
            f"the Kubernetes API cannot be reached by {where}: {error}; run the agent in a pod with a service account, or give "
            "--kubeconfig FILE"
        ) from error
    return found


def _failure(status: int, reason: str, use: str) -> EngineError:
    """Return the error for an HTTP status; `use` is a key of RIGHTS."""
    verb, resource = RIGHTS[use]
    if status in (401, 403):
        return EngineError(
            f"the API server does not let this agent {verb} {resource} ({status}: {reason}); bind the ClusterRole "
            f"jupyter-gpu-agent with the verb {verb!r} on {resource!r} to the agent's service account"
        )
    if status == 404:
        return EngineError(
            f"the API server knows no such object to {verb} {resource} (404: {reason}); is --node the node's name?"
        )
    if status == 410:
        return ExpiredError(f"the version to watch from has expired (410: {reason})")
    if status in (400, 405, 415, 422):
        return EngineError(f"the API server does not understand a request to {verb} {resource} ({status}: {reason})")
    return EngineUnavailableError(f"the API server cannot {verb} {resource} now ({status}: {reason})")


def _reason(body: bytes) -> str:
    """Return the message of an API server's Status object, or what it said instead."""
    with suppress(ValueError, AttributeError):
        message = json.loads(body).get("message")
        if isinstance(message, str):
            return message[:_LONGEST_TEXT]
    return body[:_LONGEST_TEXT].decode("utf-8", "replace").strip() or "no reason"


async def _answer(call: Callable[[], Awaitable[Any]], use: str) -> dict[str, Any]:
    """Return the object that a request answers. Raises EngineError."""
    try:
        response = await call()
        async with response:
            body = await response.read()
            status = response.status
    except (aiohttp.ClientError, OpenApiException, TimeoutError, OSError) as error:
        raise EngineUnavailableError(f"the API server does not answer: {str(error) or type(error).__name__}") from error
    if not 200 <= status < 300:
        raise _failure(status, _reason(body), use)
    try:
        found = json.loads(body)
    except ValueError as error:
        raise EngineUnavailableError(f"the API server's answer is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise EngineUnavailableError("the API server's answer is no object")
    return found


async def _patched(call: Callable[[], Awaitable[Any]], use: str) -> dict[str, Any]:
    """Return what a patch answers; a conflict is repeated. Raises EngineError."""
    for attempt in range(_CONFLICTS):
        try:
            return await _answer(call, use)
        except EngineUnavailableError as error:
            if "(409:" not in str(error) or attempt == _CONFLICTS - 1:
                raise
            await asyncio.sleep(_pause_s(attempt, _FIRST_PAUSE_S / 5))
    raise AssertionError("unreachable")


def _pause_s(failures: int, first_s: float) -> float:
    """Return the pause after so many failures, seconds: between half and all of what the back-off allows."""
    return min(first_s * 2.0 ** min(failures, 16), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads requests


class PodWatch:
    """The pods of one node. `changed` is called after each change, on the loop that runs `run`."""

    def __init__(
        self,
        api: Api,
        node: str,
        say: Callable[[str], None],
        changed: Callable[[], None],
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._api = api
        self._selector = f"spec.nodeName={node}"
        self._say = say
        self._changed = changed
        self._first_pause_s = first_pause_s
        self._pods: dict[str, Pod] = {}
        self._synced = False
        self._trouble = ""

    def pods(self) -> tuple[Pod, ...] | None:
        """Return the pods, None until they were listed."""
        return tuple(self._pods.values()) if self._synced else None

    @property
    def trouble(self) -> str:
        """Why the pods are not watched now, a sentence; empty: they are."""
        return self._trouble

    async def run(self) -> None:
        failures = 0
        version: str | None = None
        clock = asyncio.get_running_loop().time
        while True:
            begun_s = clock()
            try:
                if version is None:
                    version = await self._list()
                async with aclosing(self._events(version)) as events:
                    async for event in events:
                        version = self._take(event) or version
                        self._report("")
                # A watch that ends as soon as it began, again and again, is a failure without an error.
                failures = 0 if clock() - begun_s >= _SHORT_S else failures + 1
            except ExpiredError:
                version = None
                failures += 1
            except EngineError as error:
                self._report(str(error))
                failures = failures + 1 if clock() - begun_s < _SHORT_S else 1
            if failures:
                await asyncio.sleep(_pause_s(failures - 1, self._first_pause_s))

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._say(trouble or "the API server answers again: the pods of this node are watched")
            self._trouble = trouble

    async def _list(self) -> str:
        """Replace the pods by those that the server lists, and return the version. Raises EngineError."""
        found: dict[str, Pod] = {}
        more = ""
        while True:
            pages = {"_continue": more} if more else {}
            page = await _answer(
                lambda pages=pages: self._api.list_pod_for_all_namespaces(  # type: ignore[misc]
                    field_selector=self._selector, limit=_PAGE, **pages, **_raw(_ANSWER_S)
                ),
                "list",
            )
            for one in page.get("items") or ():
                pod = Pod.of(one)
                found[pod.uid] = pod
            metadata = page.get("metadata") or {}
            more = metadata.get("continue") or ""
            if not more:
                break
        self._pods, self._synced = found, True
        self._report("")
        self._changed()
        return str(metadata.get("resourceVersion") or "0")

    async def _events(self, version: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events since the version until the server ends the watch. Raises EngineError."""
        limit_s = random.randint(_WATCH_S, 2 * _WATCH_S)  # noqa: S311 - spreads requests
        times = aiohttp.ClientTimeout(sock_connect=_ANSWER_S, sock_read=limit_s + _ANSWER_S)
        try:
            response: Any = await self._api.list_pod_for_all_namespaces(
                field_selector=self._selector,
                watch=True,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=limit_s,
                **_raw(times),
            )
            async with response:
                if response.status != 200:
                    raise _failure(response.status, _reason(await response.read()), "watch")
                while line := await response.content.readline():
                    yield _event(line)
        except (aiohttp.ClientError, OpenApiException, TimeoutError, OSError) as error:
            raise EngineUnavailableError(
                f"the watch of this node's pods broke: {str(error) or type(error).__name__}"
            ) from error
        except ValueError as error:  # a line that is no JSON, or longer than an object can be
            raise EngineUnavailableError(f"the watch of this node's pods sent what is no event: {error}") from error

    def _take(self, event: Mapping[str, Any]) -> str | None:
        """Apply an event, and return the version after it. Raises EngineError."""
        kind, found = event["type"], event["object"]
        if kind == "ERROR":
            code = found.get("code")
            raise _failure(code if type(code) is int else 500, str(found.get("message"))[:_LONGEST_TEXT], "watch")
        metadata = found.get("metadata")
        seen = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        version = seen if isinstance(seen, str) else None
        if kind == "BOOKMARK":
            return version
        pod = Pod.of(found)
        if kind == "DELETED":
            self._pods.pop(pod.uid, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._pods[pod.uid] = pod
        else:
            raise EngineUnavailableError(f"the watch of this node's pods sent an event {str(kind)[:40]!r}")
        self._changed()
        return version


def _event(line: bytes) -> dict[str, Any]:
    """Return the event of a line of a watch. Raises ValueError."""
    event = json.loads(line)
    if (
        not isinstance(event, dict)
        or not isinstance(event.get("object"), dict)
        or not isinstance(event.get("type"), str)
    ):
        raise ValueError(f"an event has type and object; got {line[:100]!r}")  # noqa: TRY004 - as for a line that is no JSON
    return event


def _raw(timeout: float | aiohttp.ClientTimeout) -> dict[str, Any]:
    """Return the options of a call whose answer is read here, as JSON."""
    return {"_preload_content": False, "_request_timeout": timeout}


class Cluster:
    """The API server, from a thread of its own. Use it as a context. `say` is given lines for the log."""

    def __init__(
        self,
        settings: client.Configuration,
        node: str,
        say: Callable[[str], None],
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._settings = settings
        self._node = node
        self._say = say
        self._first_pause_s = first_pause_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="Kubernetes API", daemon=True)
        self.changed = threading.Event()
        """Set when a pod of the node has changed; the reader clears it."""

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self._open())
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Return the result of a coroutine on the loop. Blocks. Raises as it does."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        self._client = client.ApiClient(self._settings)
        self.api = Api(self._client)
        self._watch = PodWatch(self.api, self._node, self._say, self.changed.set, first_pause_s=self._first_pause_s)
        self._watching = asyncio.create_task(self._watch.run())
        self._watching.add_done_callback(lambda _: self.changed.set())

    async def _close(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._client.close()

    def pods(self) -> tuple[Pod, ...] | None:
        """Return the node's pods, None until they were listed. Raises what ended the watch, which only a defect does."""
        if self._watching.done() and not self._watching.cancelled():
            self._watching.result()
        return self._watch.pods()

    def annotate_pod(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Write annotations of a pod. Blocks. Raises EngineError; a pod that is gone is none."""
        body = {"metadata": {"uid": pod.uid, "annotations": dict(annotations)}}
        with suppress(_GoneError):
            self.run(_annotated(self.api, pod, body))


class _GoneError(EngineError):
    """The pod to annotate is gone, or another one has its name."""


async def _annotated(api: Api, pod: Pod, body: dict[str, Any]) -> None:
    try:
        await _patched(lambda: api.patch_namespaced_pod_status(pod.name, pod.namespace, body, **_raw(_ANSWER_S)), "pod")
    except EngineError as error:
        if "(404:" in str(error) or "(409:" in str(error):
            raise _GoneError(str(error)) from error
        raise


class KubernetesEngine:
    """The engine of one node, as `engine.Engine`. Counts are thousandths, by the name of the extended resource.

    `pools`: the pools to count. A count that the node does not have yet is -1 in its record, so that it is written.
    """

    def __init__(self, cluster: Cluster, node: str, pools: tuple[str, ...]) -> None:
        self._cluster = cluster
        self._node = node
        self._names = {pool: pods.resource_of(pool) for pool in pools}

    def read_node(self) -> NodeRecord:
        """Return the node's record. Blocks. Raises EngineUnavailableError or EngineError."""
        known = self._cluster.pods()
        if known is None:
            raise EngineUnavailableError("the API server has not listed this node's pods yet")
        api = self._cluster.api
        node = self._cluster.run(_answer(lambda: api.read_node(self._node, **_raw(_ANSWER_S)), "node"))
        capacity = (node.get("status") or {}).get("capacity") or {}
        counts = {name: _count(capacity.get(name)) for name in self._names.values()}
        used = in_use(known)
        return NodeRecord(
            counts=counts,
            in_use={name: used.get(pool, 0) for pool, name in self._names.items()},
            most={},
            text=", ".join(f"{name}: {count}" for name, count in sorted(counts.items())),
            summary=str(((node.get("metadata") or {}).get("annotations") or {}).get(pods.SUMMARY, "")),
        )

    def write_node(self, write: NodeWrite, record: NodeRecord) -> None:
        """Write counts and summary in one patch of the node's status. Blocks. Raises EngineUnavailableError or EngineError.

        The kubelet copies capacity to allocatable when it next reports, up to five minutes later: both are written.
        """
        del record
        counts = {name: str(count) for name, count in write.counts.items()}
        self._patch({pods.SUMMARY: write.summary}, counts)

    def remove(self) -> None:
        """Remove counts and summary from the node. Blocks. Raises as `write_node`."""
        self._patch({pods.SUMMARY: None}, dict.fromkeys(self._names.values()))

    def _patch(self, annotations: Mapping[str, str | None], counts: Mapping[str, str | None]) -> None:
        body = {
            "metadata": {"annotations": dict(annotations)},
            "status": {"capacity": dict(counts), "allocatable": dict(counts)},
        }
        api = self._cluster.api
        self._cluster.run(_patched(lambda: api.patch_node_status(self._node, body, **_raw(_ANSWER_S)), "status"))


def _count(quantity: object) -> int:
    """Return a count of the node, -1 for one that is not there or is none."""
    if quantity is None:
        return -1
    try:
        return pods.whole_quantity(quantity)
    except ValueError:
        return -1


__all__ = ["RIGHTS", "Cluster", "KubernetesEngine", "PodWatch", "configuration"]
