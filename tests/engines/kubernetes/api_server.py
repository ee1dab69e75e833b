"""A stand-in for the Kubernetes API server, as strict as the published schemas and RBAC are.

- It has nodes and pods, and the operations that the agent and the hub's page may use.
- It checks each request's path, parameters, content type, and rights under the given rules.
- It validates the result of each patch strictly against the published schemas of two Kubernetes versions, and by rules that no schema
  has: extended resources are whole, quantities are canonical, annotations have a limit.
- It answers what it does not understand as the real server would, and notes it in `defects`: a test that leaves one there has failed.
"""

import asyncio
import copy
import json
import re
import ssl
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Self

import jsonschema
from aiohttp import web
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

VERSIONS = ("1.35", "1.37")
TOKEN = "of-the-agent"  # noqa: S105 - of the stand-in
_LIST_PARAMETERS = {
    "fieldSelector": str,
    "labelSelector": str,
    "limit": int,
    "continue": str,
    "resourceVersion": str,
    "resourceVersionMatch": str,
    "timeoutSeconds": int,
    "watch": bool,
    "allowWatchBookmarks": bool,
    "sendInitialEvents": bool,
    "pretty": str,
}
_PATCH_TYPES = ("application/strategic-merge-patch+json", "application/merge-patch+json")
_QUALIFIED = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_LABELS = re.compile(r"[^=!,()\s]+=[^=!,()\s]*(,[^=!,()\s]+=[^=!,()\s]*)*")  # `name=value`, all of them
_ANNOTATION_BYTES = 256 * 1024


def validate(found: Mapping[str, Any]) -> None:
    """Raise ValidationError unless the object is one of both versions."""
    for version in VERSIONS:
        if "type" in found:
            _schema(version, "watchevent", "meta-v1").validate(dict(found))
        elif found["kind"] == "Status":
            _schema(version, "status", "meta-v1").validate(dict(found))
        else:
            api = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", found["apiVersion"])
            _schema(version, found["kind"].lower(), api).validate(dict(found))


@cache
def _registry(version: str) -> Registry:
    return Resource.from_contents(schema_contents(f"{_folder(version)}/_definitions.json", version)) @ Registry()


@cache
def _schema(version: str, kind: str, api: str) -> jsonschema.Draft202012Validator:
    """Return a schema. `kubernetes_validate.validate` does the same, but takes a quarter of a second to read its files each time."""
    schema = schema_contents(f"{_folder(version)}/{kind}-{api}.json", version)
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _registry(version))


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict"


def canonical(quantity: str) -> str:
    """Return a whole quantity in canonical form: 2000 is `2k`."""
    number = int(quantity)
    for suffix in ("", "k", "M", "G"):
        if number % 1000 or not number or suffix == "G":
            return f"{number}{suffix}"
        number //= 1000
    raise AssertionError("unreachable")


class ApiServer:
    """The server, on a separate loop in a thread. `rules`: the rules of the ClusterRoles bound to its client.

    `roles`: the rules of its Roles, by namespace.
    """

    def __init__(
        self,
        rules: Sequence[Mapping[str, Any]],
        roles: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self.rules = list(rules)
        self.roles = {namespace: list(some) for namespace, some in (roles or {}).items()}
        self.used: set[tuple[str, str]] = set()
        self.defects: list[str] = []
        self.requests: list[str] = []
        self.nodes: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}  # by namespace/name
        self.version = 1000
        self.oldest = 0  # earlier versions have expired
        self.failures: list[tuple[str, int]] = []  # (verb and resource, status) for the next requests of that kind
        self.page = 250
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._watches: set[asyncio.Event] = set()
        self._ending: set[asyncio.Event] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:  # noqa: ANN401 - a coroutine and its result
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self) -> None:
        application = web.Application(client_max_size=4 * 2**20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _close(self) -> None:
        for event in (*self._watches, *self._ending):
            event.set()
        server = self._runner.server
        assert server is not None
        # A connection forgets its transport when it is shut down, even if unread bytes keep the socket open.
        opened = {connection.transport for connection in server.connections}
        await self._runner.cleanup()
        for _ in range(5):  # iterations of the loop in which a connection accepted meanwhile is set up
            await asyncio.sleep(0)
        for transport in opened | {connection.transport for connection in server.connections}:
            if transport is not None:
                transport.abort()
        for _ in range(2):  # ... and in which it is closed, before the loop ends
            await asyncio.sleep(0)

    # -- the world ---------------------------------------------------------------------------------------------------------

    def add_node(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        ready: str = "True",
        cordoned: bool = False,
    ) -> None:
        """Add a node with a kubelet's status."""
        amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "uid": f"node-{name}",
                "resourceVersion": self._next(),
                "labels": dict(labels or {}),
                "annotations": dict(annotations or {}),
            },
            "spec": {"unschedulable": True} if cordoned else {},
            "status": {
                "capacity": dict(amounts),
                "allocatable": dict(amounts),
                "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}],
            },
        }
        validate(node)
        self.nodes[name] = node

    def put(self, pod: dict[str, Any]) -> None:
        """Add or replace a pod."""
        self._run(self._put(pod))

    async def _put(self, pod: dict[str, Any]) -> None:
        validate(pod)
        key = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        kind = "MODIFIED" if key in self.pods else "ADDED"
        found = copy.deepcopy(pod)
        found["metadata"]["resourceVersion"] = self._next()
        self.pods[key] = found
        self._tell(kind, found)

    def delete(self, key: str) -> None:
        """Delete a pod by namespace/name."""

        async def work() -> None:
            found = self.pods.pop(key)
            self._tell("DELETED", {**found, "metadata": {**found["metadata"], "resourceVersion": self._next()}})

        self._run(work())

    def bookmark(self) -> str:
        """Send a bookmark to all watches and return its version."""

        async def work() -> str:
            version = self._next()
            self._tell("BOOKMARK", {"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": version}})
            return version

        found: str = self._run(work())
        return found

    def expire(self, *, ending: bool = True) -> None:
        """Forget all events so far: from now on earlier versions are 410 Gone. `ending`: running watches end."""

        async def work() -> None:
            self.oldest = self.version
            self._events.clear()
            if ending:
                self._end()

        self._run(work())

    def send_error(self, code: int) -> None:
        """Send an ERROR event to all watches."""

        async def work() -> None:
            status = _status(code, "too old resource version", "Expired")
            self._tell("ERROR", status)

        self._run(work())

    def end_watches(self) -> None:
        """End all watches properly, as the server sometimes does."""

        async def work() -> None:
            self._end()

        self._run(work())

    @property
    def watching(self) -> int:
        """Return the number of running watches."""
        return len(self._watches)

    def _end(self) -> None:
        for event in self._ending:
            event.set()

    def _next(self) -> str:
        self.version += 1
        return str(self.version)

    def _tell(self, kind: str, found: dict[str, Any]) -> None:
        self._events.append((self.version, kind, copy.deepcopy(found)))
        for event in self._watches:
            event.set()

    # -- requests ----------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - one for each operation
        self.requests.append(f"{request.method} {request.path_qs}")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "Unauthorized")
        if "application/json" not in request.headers.get("Accept", "application/json"):
            return self._defect(406, f"Accept: {request.headers['Accept']}")
        if request.path == "/api/v1/nodes" and request.method == "GET":
            return self._list_by_labels(request, "Node", self.nodes, "")
        found = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods", request.path)
        if found and request.method == "GET":
            return self._list_by_labels(request, "Pod", self.pods, found[1])
        found = re.fullmatch(r"/api/v1/nodes/([^/]+)(/status)?", request.path)
        if found and request.method == "GET" and not found[2]:
            return self._read_node(request, found[1])
        if found and request.method == "PATCH" and found[2]:
            return await self._patch(request, "nodes/status", self.nodes, found[1])
        if request.path == "/api/v1/pods" and request.method == "GET":
            return await self._list(request)
        found = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/status", request.path)
        if found and request.method == "PATCH":
            return await self._patch(request, "pods/status", self.pods, f"{found[1]}/{found[2]}")
        return self._defect(404, f"there is no operation {request.method} {request.path}")

    def _denied(self, verb: str, resource: str, namespace: str = "") -> web.Response | None:
        """Return RBAC's refusal, or a failure that the test requested; None: the request is allowed. `namespace`: the request's."""
        self.used.add((verb, resource))
        for number, (kind, status) in enumerate(self.failures):
            if kind == f"{verb} {resource}":
                del self.failures[number]
                return self._refuse(
                    status, {409: "the object has been modified", 410: "too old resource version"}.get(status, "busy")
                )
        for rule in (*self.rules, *self.roles.get(namespace, ())):
            if "" in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                return None
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        return self._refuse(403, f'User "agent" cannot {verb} resource "{resource}" in API group "" {where}')

    def _read_node(self, request: web.Request, name: str) -> web.Response:
        if refusal := self._denied("get", "nodes"):
            return refusal
        if set(request.query) - {"pretty"}:
            return self._defect(400, f"parameters {dict(request.query)}")
        if name not in self.nodes:
            return self._refuse(404, f'nodes "{name}" not found')
        return web.json_response(self.nodes[name])

    async def _patch(
        self, request: web.Request, resource: str, objects: dict[str, dict[str, Any]], key: str
    ) -> web.Response:
        if request.content_type not in _PATCH_TYPES:
            return self._defect(415, f"content type {request.content_type}")
        if set(request.query) - {"fieldManager", "fieldValidation", "force", "dryRun", "pretty"}:
            return self._defect(400, f"parameters {dict(request.query)}")
        if refusal := self._denied("patch", resource):
            return refusal
        if key not in objects:
            return self._refuse(404, f"{key} not found")
        before, body = objects[key], json.loads(await request.read())
        if not isinstance(body, dict):
            return self._defect(400, "a merge patch is an object")
        uid = (body.get("metadata") or {}).get("uid")
        if uid is not None and uid != before["metadata"]["uid"]:
            return self._refuse(409, "Precondition failed: UID in precondition")
        after = _merged(before, body)
        after["spec"] = before["spec"]  # a status cannot change the spec
        if wrong := _wrong(after):
            return self._defect(422, wrong)
        if after != before:
            after["metadata"]["resourceVersion"] = self._next()
            objects[key] = after
            if resource == "pods/status":
                self._tell("MODIFIED", after)
        return web.json_response(after)

    def _list_by_labels(
        self, request: web.Request, kind: str, objects: Mapping[str, dict[str, Any]], namespace: str
    ) -> web.Response:
        """List nodes, or the pods of a namespace, with these labels."""
        if wrong := _wrong_parameter(request):
            return self._defect(400, wrong)
        if set(request.query) - {"labelSelector", "limit", "continue"}:
            return self._defect(400, f"a list by labels is no watch and has no fields: {dict(request.query)}")
        selector = _LABELS.fullmatch(request.query.get("labelSelector", ""))
        if selector is None:
            return self._defect(400, f"all of them, or labels that are not understood: {dict(request.query)}")
        if refusal := self._denied("list", f"{kind.lower()}s", namespace):
            return refusal
        wanted = {tuple(word.split("=")) for word in selector[0].split(",")}
        found = [
            one
            for one in objects.values()
            if one["metadata"].get("namespace", "") == namespace
            and wanted <= set((one["metadata"].get("labels") or {}).items())
        ]
        return self._page_of(request, kind, found)

    def _page_of(self, request: web.Request, kind: str, found: list[dict[str, Any]]) -> web.Response:
        begin, limit = (
            int(request.query.get("continue") or 0),
            min(int(request.query.get("limit") or self.page), self.page),
        )
        page, rest = found[begin : begin + limit], found[begin + limit :]
        metadata = {"resourceVersion": str(self.version), **({"continue": str(begin + limit)} if rest else {})}
        answer = {"apiVersion": "v1", "kind": f"{kind}List", "metadata": metadata, "items": page}
        validate(answer)
        return web.json_response(answer)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if wrong := _wrong_parameter(request):
            return self._defect(400, wrong)
        selector = request.query.get("fieldSelector", "")
        if not selector.startswith("spec.nodeName="):
            return self._defect(400, "pods of the whole cluster were asked for")
        node = selector.partition("=")[2]
        if request.query.get("watch", "").lower() == "true":
            return await self._watch(request, node)
        if refusal := self._denied("list", "pods"):
            return refusal
        found = [pod for pod in self.pods.values() if pod["spec"].get("nodeName") == node]
        return self._page_of(request, "Pod", found)

    async def _watch(self, request: web.Request, node: str) -> web.StreamResponse:
        if refusal := self._denied("watch", "pods"):
            return refusal
        if "timeoutSeconds" not in request.query or request.query.get("allowWatchBookmarks", "").lower() != "true":
            return self._defect(400, "a watch without a time limit or without bookmarks")
        after = int(request.query["resourceVersion"])
        if after < self.oldest:
            return self._refuse(410, f"too old resource version: {after} ({self.oldest})")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        news, end = asyncio.Event(), asyncio.Event()
        self._watches.add(news)
        self._ending.add(end)
        ended = asyncio.create_task(end.wait())
        try:
            while not end.is_set():
                news.clear()
                for version, kind, found in list(self._events):
                    mine = kind in ("BOOKMARK", "ERROR") or found["spec"].get("nodeName") == node
                    if version > after or kind == "ERROR":
                        after = max(after, version)
                        if mine:
                            event = {"type": kind, "object": found}
                            validate(event)
                            await response.write(json.dumps(event).encode() + b"\n")
                        if kind == "ERROR":
                            self._events.remove((version, kind, found))
                            return response
                came = asyncio.create_task(news.wait())
                await asyncio.wait([came, ended], return_when=asyncio.FIRST_COMPLETED)
                came.cancel()
        except (ConnectionResetError, asyncio.CancelledError):
            pass  # the client has gone
        finally:
            ended.cancel()
            self._watches.discard(news)
            self._ending.discard(end)
        return response

    def _refuse(self, code: int, message: str) -> web.Response:
        return web.json_response(_status(code, message, "Failure"), status=code)

    def _defect(self, code: int, message: str) -> web.Response:
        self.defects.append(message)
        return self._refuse(code, message)


def _wrong_parameter(request: web.Request) -> str:
    """Return the first parameter of a list that the operation does not have, or whose value it does not accept."""
    for name, value in request.query.items():
        kind = _LIST_PARAMETERS.get(name)
        if (
            kind is None
            or (kind is int and not value.isdecimal())
            or (kind is bool and value.lower() not in ("true", "false"))
        ):
            return f"parameter {name}={value}"
    return ""


def _status(code: int, message: str, reason: str) -> dict[str, Any]:
    found = {
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    validate(found)
    return found


def _merged(before: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a merge patch: maps are merged, null removes. The agent patches only maps, for which both kinds of patch agree."""
    after = copy.deepcopy(before)
    for name, value in patch.items():
        if value is None:
            after.pop(name, None)
        elif isinstance(value, dict):
            after[name] = _merged(after.get(name) or {}, value)
        else:
            after[name] = value
    return after


def _wrong(found: dict[str, Any]) -> str:
    """Return what the API server rejects in the object, and make its quantities canonical."""
    annotations = found["metadata"].get("annotations") or {}
    if sum(len(name) + len(value.encode()) for name, value in annotations.items()) > _ANNOTATION_BYTES:
        return "metadata.annotations: Too long: may not be more than 262144 bytes"
    for name in annotations:
        if not _QUALIFIED.fullmatch(name):
            return f"metadata.annotations: Invalid value: {name}"
    for amounts in (found["status"].get("capacity") or {}, found["status"].get("allocatable") or {}):
        for name, quantity in amounts.items():
            if not _QUALIFIED.fullmatch(name):
                return f"status.capacity: Invalid value: {name}"
            if "/" in name:
                if not re.fullmatch("[0-9]{1,18}", quantity) and not re.fullmatch("[0-9]{1,15}[kMG]", quantity):
                    return f"status.capacity[{name}]: Invalid value: {quantity}: must be an integer"
                if quantity.isdecimal():
                    amounts[name] = canonical(quantity)
    try:
        validate(found)
    except jsonschema.ValidationError as error:
        return str(error.message)
    return ""
