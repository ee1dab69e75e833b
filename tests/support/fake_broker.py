"""A broker for tests of the other side: real HTTP on a real UNIX socket, in threads of the test, with no GPU behind it.

It keeps leases in a dict and can be told to misbehave: `fail` answers a route with an error, `hang_up` closes the
connection under a request, `held` makes a route wait. Tests wait for what it saw with `wait_for`, never by sleeping.
"""

import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from msgspec import Struct, to_builtins

from fractional_gpu.protocol.accounts import Cost
from fractional_gpu.protocol.errors import FractionalGPUError, NotFoundError, UnauthorizedError
from fractional_gpu.protocol.limits import PROTOCOL_VERSION
from fractional_gpu.protocol.messages import (
    AcquireRequest,
    AttachRequest,
    DrainRequest,
    EvictRequest,
    GateAnswer,
    GateHello,
    LeaseReply,
    LeaseRequest,
    MoveRequest,
    PinRequest,
    Pong,
    Progress,
    ResizeRequest,
)
from fractional_gpu.protocol.status import DeviceStatus, HostStatus, LeaseStatus
from tests.support.statuses import a_status, changed

__all__ = ["DEADLINE_S", "Call", "FakeBroker", "FakeLease"]

DEADLINE_S = 60.0


_KINDS: dict[str, type[Any]] = {  # clients omit default values; they are filled in here, as by a broker
    "create": LeaseRequest,
    "attach": AttachRequest,
    "acquire": AcquireRequest,
    "pin": PinRequest,
    "resize": ResizeRequest,
    "move": MoveRequest,
    "evict": EvictRequest,
    "gate": GateHello,
    "answer": GateAnswer,
    "drain": DrainRequest,
}


@dataclass
class FakeLease:
    request: dict[str, Any]
    token: str
    state: str = "unattached"
    attach: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A request that came in.

    `route` is `create`, `lease`, `release`, `ping`, `status` or the action behind a lease's id.
    """

    route: str
    lease_id: str
    body: dict[str, Any]
    connection: int


class FakeBroker:
    """Serves on `path` between `start` and `stop`. The test's thread may use everything public."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.leases: dict[str, FakeLease] = {}
        self.calls: list[Call] = []
        self.fail: dict[str, FractionalGPUError] = {}
        self.hang_up: dict[str, int] = {}  # route -> how many requests to hang up on
        self.held: dict[str, threading.Event] = {}  # route -> set to let it continue
        self.extra: dict[str, Any] = {}  # fields that this version does not know, added to every reply
        self.lease_fields: dict[str, Any] = {}  # of each lease's status (`tests.support.statuses.changed`)
        self.environment: dict[str, str] = {"CUDA_VISIBLE_DEVICES": ""}
        self.progress: list[Progress] = [Progress(kind="granted", environment={"CUDA_VISIBLE_DEVICES": "GPU-0"})]
        self.gate_bytes: list[bytes] = []  # sent as one chunk each on the gate stream, which then stays open
        self.protocol = PROTOCOL_VERSION
        self.connections = 0
        self.device = DeviceStatus(
            device_id="GPU-0",
            index=0,
            name="H100",
            pool="default",
            memory_mib=1024,
            leasable_mib=1024,
            used_mib=0,
            reserved_mib=512,
            stranger_mib=0,
            over_committed=False,
            lost=False,
            draining=True,
        )
        self.devices: list[DeviceStatus] = []  # for further statuses
        self.cost: Cost | None = None  # what a lease costs
        self.hung_up: list[str] = []  # routes whose stream the client left
        self._changed = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def handler(self) -> "type[_Handler]":
        return _Handler

    def start(self) -> None:
        self._server = _Server(self)
        self._server.RequestHandlerClass = self.handler()
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self.drop_connections()
            for event in self.held.values():
                event.set()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None
        with suppress(FileNotFoundError):
            os.unlink(self.path)  # noqa: PTH108 - a socket, by its name

    def drop_connections(self) -> None:
        with self._changed:
            sockets = list(self._sockets)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.wait_for(lambda: not self._sockets)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Return when the condition holds; it is checked after each event."""
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_S), f"did not happen; calls: {self.routes()}"

    def routes(self) -> list[str]:
        return [call.route for call in self.calls]

    def bodies(self, route: str) -> list[dict[str, Any]]:
        return [call.body for call in self.calls if call.route == route]

    def only_lease(self) -> tuple[str, FakeLease]:
        ((lease_id, lease),) = [(name, each) for name, each in self.leases.items() if each.state != "ended"]
        return lease_id, lease

    @contextmanager
    def connected(self, connection: socket.socket) -> Iterator[int]:
        with self._changed:
            self.connections += 1
            number = self.connections
            self._sockets.add(connection)
        try:
            yield number
        finally:
            with self._changed:
                self._sockets.discard(connection)
                self._changed.notify_all()

    def note(self, call: Call) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()

    def note_hang_up(self, route: str) -> None:
        with self._changed:
            self.hung_up.append(route)
            self._changed.notify_all()

    def takes_hang_up(self, route: str) -> bool:
        with self._changed:
            left = self.hang_up.get(route, 0)
            self.hang_up[route] = left - 1
            return left > 0

    def answer(self, call: Call, token: str) -> dict[str, Any]:
        """Carry out one call that is no stream. Raises the error to answer."""
        if call.route in self.fail:
            raise self.fail[call.route]
        match call.route:
            case "ping":
                return _as_dict(Pong(version="0", protocol=self.protocol, pid=os.getpid(), simulated=True))
            case "status":
                leases = [self._status(lease_id) for lease_id in self.leases]
                return _as_dict(_host_status(self.path, leases, self.devices.pop(0) if self.devices else None))
            case "create":
                return _as_dict(self._create(call.body))
            case "drain" | "undrain":
                return _as_dict(self.device)
        return self._about_lease(call, token)

    def _about_lease(self, call: Call, token: str) -> dict[str, Any]:
        lease = self.leases.get(call.lease_id)
        if lease is None or (lease.state == "ended" and call.route != "release"):
            raise NotFoundError(f"there is no lease {call.lease_id}")
        if token != lease.token:
            raise UnauthorizedError("the token is not the lease's")
        with self._changed:
            self._move(lease, call)
            self._changed.notify_all()
        if call.route == "cost":
            assert self.cost is not None
            return _as_dict(self.cost)
        if call.route in {"story", "history"}:
            return {"lease_id": call.lease_id, **({"cap_mib": 2048} if call.route == "history" else {})}
        if call.route in {"lease", "attach", "suspend", "resume", "pin", "unpin", "note", "resize", "move"}:
            return _as_dict(self._status(call.lease_id))
        return {"ok": True}

    def _move(self, lease: FakeLease, call: Call) -> None:
        states = {
            "attach": "unarmed" if lease.request["gated"] else "resident",
            "detach": "unattached",
            "release": "ended",
            "suspend": "suspended",
            "resume": "resident",
        }
        lease.state = states.get(call.route, lease.state)
        if call.route == "attach":
            lease.attach = call.body
        if call.route == "detach":
            lease.attach = {}
        if call.route == "resize":
            lease.request["fraction_milli"] = call.body["fraction_milli"] or lease.request["fraction_milli"]

    def _create(self, request: dict[str, Any]) -> LeaseReply:
        with self._changed:
            lease_id, token = f"lease-{len(self.leases) + 1}", f"token-{len(self.leases) + 1}"
            self.leases[lease_id] = FakeLease(request=request, token=token)
            self._changed.notify_all()
        return LeaseReply(
            lease_id=lease_id,
            token=token,
            reserve_mib=2048,
            device_id=None,
            simulated=True,
            environment=self.environment,
        )

    def _status(self, lease_id: str) -> LeaseStatus:
        lease = self.leases[lease_id]
        status = a_status(
            lease_id=lease_id,
            state=lease.state,
            pool=lease.request["pool"],
            owner="me",
            label=lease.request["label"],
            kernel_id=lease.request["kernel_id"],
            pid=lease.attach.get("pid"),
            fraction_milli=lease.request["fraction_milli"],
            reserve_mib=2048,
            used_mib=0,
            saved_mib=0,
            device_id=None,
            device_name="",
            simulated=True,
            busy=False,
            gated=lease.request["gated"],
            age_ms=0,
            reason="",
            sentence="",
        )
        return changed(status, **self.lease_fields)


def _as_dict(message: Struct) -> dict[str, Any]:
    fields: dict[str, Any] = to_builtins(message)
    return fields


def _host_status(path: str, leases: list[LeaseStatus], device: DeviceStatus | None) -> HostStatus:
    return HostStatus(
        version="0",
        pid=os.getpid(),
        simulated=True,
        socket=path,
        host_budget_mib=1024,
        host_saved_mib=0,
        devices=[] if device is None else [device],
        leases=leases,
        pools={"default": [250]},
    )


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 64

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        super().__init__(broker.path, _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle(self) -> None:
        with self.server.broker.connected(self.connection) as self.number, suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing: pytest shows what matters."""

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _call(self) -> Call:
        call = self._sent()
        kind = _KINDS.get(call.route)
        return call if kind is None else replace(call, body=to_builtins(kind(**call.body)))

    def _sent(self) -> Call:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        words = self.path.partition("?")[0].strip("/").split("/")
        if words[1] == "devices":
            return Call(words[3], words[2], body, self.number)
        if words[1] != "leases":
            return Call(words[1], "", body, self.number)
        if len(words) == 2:
            return Call("create", "", body, self.number)
        plain = "release" if self.command == "DELETE" else "lease"
        return Call(words[3] if len(words) > 3 else plain, words[2], body, self.number)

    def _serve(self) -> None:
        broker = self.server.broker
        call = self._call()
        broker.note(call)
        if call.route in broker.held:
            broker.held[call.route].wait(DEADLINE_S)
        if broker.takes_hang_up(call.route):
            self.close_connection = True
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        try:
            payload = {} if call.route == "events" else broker.answer(call, token)
        except FractionalGPUError as error:
            self._reply(error.status, {"error": {"code": error.code, "reason": error.reason, "message": str(error)}})
            return
        if call.route in {"acquire", "gate", "events"}:
            self._stream(call.route)
        else:
            self._reply(200, {**payload, **broker.extra})

    def _reply(self, status: int, payload: dict[str, Any]) -> None:
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, route: str) -> None:
        broker = self.server.broker
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces = broker.gate_bytes
        if route == "acquire":
            pieces = [json.dumps(to_builtins(line)).encode() + b"\n" for line in broker.progress]
        for piece in pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if pieces and route == "acquire" and broker.progress[-1].kind in {"granted", "refused"}:
            self.wfile.write(b"0\r\n\r\n")
            return
        self.connection.recv(1)  # until the client hangs up
        self.close_connection = True
        broker.note_hang_up(route)
