"""The client of the lease API, for kernels, provisioners, spawners and commands. Standard library only, synchronous.

Rules:

- Every error is one of `fractional_gpu.protocol.errors`; BrokerUnavailableError when nothing answers, the connection
  breaks or a wait takes too long.
- A client may be used by several threads at once. Each call has its own connection while it lasts; finished ones are
  kept and used again.
- A kept connection that the broker has closed meanwhile is noticed before use; if it breaks under an idempotent
  call, the call is made once more. A call that `close` gave up sends nothing more, whatever it was at.
- An interrupt (KeyboardInterrupt, a generator that is closed) closes the connection it interrupts: the broker sees
  the hang-up, and withdraws a ticket.
- After a fork the child makes connections of its own and leaves its parent's alone.
- Replies are read leniently: unknown fields are ignored, so that a newer broker may say more. Of requests only what differs
  from its default is sent, so that an older broker understands what it knows.
- A broker that has too much to do for this user says when to ask again: the call waits and does, for up to `timeout_s`.
"""

import json
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import MISSING, fields, replace
from typing import Any, Self
from urllib.parse import quote

from fractional_gpu.client.http import Call, Connection, decode_json
from fractional_gpu.client.replies import decode_message
from fractional_gpu.protocol.acting import ACTING_FOR, to_header
from fractional_gpu.protocol.errors import (
    BadRequestError,
    BrokerUnavailableError,
    FractionalGPUError,
    InternalBrokerError,
    NotFoundError,
    TooManyRequestsError,
    error_from_reply,
)
from fractional_gpu.protocol.limits import MAX_WAIT_S, PULSE_S
from fractional_gpu.protocol.messages import (
    AcquireRequest,
    AttachRequest,
    DeviceStatus,
    DrainRequest,
    EvictRequest,
    GateAnswer,
    GateCommand,
    GateHello,
    History,
    HostStatus,
    LeaseReply,
    LeaseRequest,
    LeaseStatus,
    MoveRequest,
    PinRequest,
    Pong,
    Progress,
    ProgressKind,
    ResizeRequest,
    Story,
)
from fractional_gpu.protocol.versions import OWN, hint

__all__ = ["BrokerClient", "spoken_fields"]

_KEPT_CONNECTIONS = 2
_END_S = 60.0  # SIGTERM, SIGKILL, and the driver that frees what the processes had
_SILENCE_S = 3 * PULSE_S  # a stream with keep-alives that is silent for so long is dead
_EVENTS = "/v1/events?changes=1"  # a broker of an earlier version sends whole statuses all the same
_FRESH = "?fresh=1"  # a broker of an earlier version answers all the same
_NO_BODY: dict[str, Any] = {}
_OF_VERSIONS = frozenset({"bad-request", "unknown-route", "bad-method"})  # reasons behind which another version may be


class BrokerClient:
    """Speaks to the broker at `socket_path`; nothing is opened before the first call.

    `token` is the lease's (None: only what the peer's uid allows). `timeout_s` bounds, in seconds, each wait for an
    answer, except where the call waits for the GPU itself; those calls say so. `acting_for` names whom an administrator's
    program asks for: the broker writes it into its audit log, and refuses it from who is no administrator. Raises
    BadRequestError for a name that is none.
    """

    def __init__(
        self, socket_path: str, *, token: str | None = None, timeout_s: float = 30.0, acting_for: str | None = None
    ) -> None:
        self.socket_path = socket_path
        self.token = token
        self.timeout_s = timeout_s
        self.acting_for = acting_for
        self._idle: deque[Connection] = deque()  # append and pop are atomic: no lock that a fork could leave locked
        self._active: set[Call] = set()
        self._headers = {} if acting_for is None else {ACTING_FOR: to_header(acting_for)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._close_kept()

    def ping(self, timeout_s: float | None = None) -> Pong:
        """Who answers, within `timeout_s` seconds (default: the client's)."""
        return decode_message(Pong, self._call("GET", "/v1/ping", timeout_s=timeout_s))

    def status(self, *, fresh: bool = False) -> HostStatus:
        """Devices, pools and the leases that this user may see. `fresh`: with what is in use now, not some seconds ago."""
        return decode_message(HostStatus, self._call("GET", "/v1/status" + _FRESH * fresh))

    def events(self) -> Iterator[HostStatus]:
        """Yield what `status` would return: at once, and again after each change, for as long as the caller wants.

        Between changes it blocks; the broker's keep-alives are not passed on, and without them for `timeout_s` it raises
        BrokerUnavailableError. `close` from another thread wakes it: it then raises BrokerUnavailableError, too. Ends
        when the broker ends the stream.
        """
        status: HostStatus | None = None
        with closing(self._stream(_EVENTS, None, max(self.timeout_s, _SILENCE_S), method="GET")) as stream:
            for payload in stream:
                if payload:
                    status = _next_status(status, payload)
                    yield status

    def create_lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for a new lease; waits `request.wait_ms` longer than usual, for that long the broker may make room.

        Raises NoRoomError.
        """
        timeout_s = self.timeout_s + request.wait_ms / 1000
        return decode_message(
            LeaseReply, self._call("POST", "/v1/leases", _spoken(request), timeout_s=timeout_s, idempotent=False)
        )

    def lease(self, lease_id: str, *, fresh: bool = False) -> LeaseStatus:
        """One lease. `fresh`: with what it uses now, not some seconds ago. Raises NotFoundError."""
        return decode_message(LeaseStatus, self._call("GET", _route(lease_id) + _FRESH * fresh))

    def release(self, lease_id: str) -> None:
        """End a lease. A lease that has ended already is no error."""
        self._call("DELETE", _route(lease_id))

    def end_left(self, lease_id: str) -> None:
        """End the processes that a lease's kernel left behind; returns when their device memory is free.

        Raises ConflictError where there are none, or where one may not be ended or does not end.
        """
        self._call("POST", _route(lease_id, "end"), timeout_s=_END_S + self.timeout_s)

    def attach(self, lease_id: str, request: AttachRequest) -> LeaseStatus:
        """Tell which process stands behind the lease, and how to listen to it."""
        return decode_message(LeaseStatus, self._call("POST", _route(lease_id, "attach"), _spoken(request)))

    def detach(self, lease_id: str) -> None:
        """Tell that the process is gone or about to be replaced."""
        self._call("POST", _route(lease_id, "detach"))

    def suspend(self, lease_id: str) -> LeaseStatus:
        """Suspend now; returns when it is done, up to an hour later.

        Raises ConflictError with the reason when it is refused.
        """
        return decode_message(
            LeaseStatus, self._call("POST", _route(lease_id, "suspend"), timeout_s=MAX_WAIT_S + self.timeout_s)
        )

    def resume(self, lease_id: str) -> LeaseStatus:
        """Bring the lease back; waits in the queue, up to an hour.

        Raises ConflictError or NoRoomError with the reason when it is refused.
        """
        return decode_message(
            LeaseStatus, self._call("POST", _route(lease_id, "resume"), timeout_s=MAX_WAIT_S + self.timeout_s)
        )

    def pin(self, lease_id: str, request: PinRequest) -> LeaseStatus:
        """Keep the lease resident for a while; replaces the pin there was. Raises ConflictError with the limit that forbids it."""
        return decode_message(LeaseStatus, self._call("POST", _route(lease_id, "pin"), _spoken(request)))

    def unpin(self, lease_id: str) -> LeaseStatus:
        """End the pin. A lease that is not pinned is no error."""
        return decode_message(LeaseStatus, self._call("POST", _route(lease_id, "unpin")))

    def resize(self, lease_id: str, request: ResizeRequest) -> LeaseStatus:
        """Give the lease another size; returns when it has it, `request.wait_ms` later at most.

        Raises BadRequestError, ConflictError or NoRoomError with the reason when it is refused: the lease is as it was.
        `close` from another thread hangs up; a later `resize` replaces one that waits.
        """
        timeout_s = self.timeout_s + request.wait_ms / 1000
        return decode_message(
            LeaseStatus, self._call("POST", _route(lease_id, "resize"), _spoken(request), timeout_s=timeout_s)
        )

    def move(self, lease_id: str, request: MoveRequest) -> LeaseStatus:
        """Have an idle kernel go to another device; returns when it is there, up to an hour later. For administrators.

        Raises ForbiddenError, NotFoundError, or ConflictError with the reason why it stays.
        """
        timeout_s = MAX_WAIT_S + self.timeout_s
        return decode_message(
            LeaseStatus, self._call("POST", _route(lease_id, "move"), _spoken(request), timeout_s=timeout_s)
        )

    def evict(self, lease_id: str, request: EvictRequest) -> None:
        """End the kernel and its lease: its variables are lost. For administrators.

        Raises ForbiddenError, BadRequestError without `confirm`, or ConflictError for a process that cannot be ended.
        """
        self._call("POST", _route(lease_id, "evict"), _spoken(request), timeout_s=MAX_WAIT_S)

    def story(self, lease_id: str) -> Story:
        """Why everything happened to the lease. Raises NotFoundError."""
        return decode_message(Story, self._call("GET", _route(lease_id, "story")))

    def history(self, lease_id: str) -> History:
        """The lease's memory and state over time. Raises NotFoundError."""
        return decode_message(History, self._call("GET", _route(lease_id, "history")))

    def drain(self, device: str, request: DrainRequest) -> DeviceStatus:
        """Begin to empty a device (id, beginning of one, or number). Raises ForbiddenError for who is no administrator."""
        return decode_message(
            DeviceStatus, self._call("POST", f"/v1/devices/{quote(device, safe='')}/drain", _spoken(request))
        )

    def undrain(self, device: str) -> DeviceStatus:
        """Let a drained device take part again; one that is not drained is no error. Raises ForbiddenError."""
        return decode_message(DeviceStatus, self._call("POST", f"/v1/devices/{quote(device, safe='')}/undrain"))

    def acquire(self, lease_id: str, request: AcquireRequest) -> Iterator[Progress]:
        """Yield what the broker says while this lease waits for the GPU; the last line is `granted` or `refused`.

        Closing the generator, or an interrupt in it, hangs up, which withdraws the ticket. Waits `request.wait_ms`
        and `timeout_s` at most for each line. Raises BrokerUnavailableError when the broker goes away before the last
        line.
        """
        timeout_s = self.timeout_s + request.wait_ms / 1000
        with closing(self._stream(_route(lease_id, "acquire"), _spoken(request), timeout_s)) as stream:
            for payload in stream:
                progress = decode_message(Progress, payload)
                yield progress
                if progress.kind in {ProgressKind.GRANTED, ProgressKind.REFUSED}:
                    return
        raise BrokerUnavailableError(
            f"the GPU broker at {self.socket_path} hung up before it answered", reason="hung-up"
        )

    def gate(self, lease_id: str, hello: GateHello) -> Iterator[GateCommand]:
        """Yield the broker's commands for this kernel's gate; between them it blocks, for as long as the broker keeps it alive.

        Keep-alives have an empty verb. That one was read tells the broker that Python runs in this process: with a
        timeout, however long, Python polls and reads in a further step; without one the system does it alone.

        Ends when the broker ends the stream. `close` from another thread wakes it: it then raises
        BrokerUnavailableError.
        """
        with closing(self._stream(_route(lease_id, "gate"), _spoken(hello), MAX_WAIT_S)) as stream:
            for payload in stream:
                yield decode_message(GateCommand, payload)

    def answer(self, lease_id: str, answer: GateAnswer) -> None:
        """Answer one command of the gate, or pulse."""
        self._call("POST", _route(lease_id, "answer"), _spoken(answer))

    def close(self) -> None:
        """Close kept connections and give up every call that is under way: it raises BrokerUnavailableError, and is not repeated.

        The client may be used again.
        """
        for call in list(self._active):
            call.give_up()
        self._close_kept()

    def _call(
        self,
        method: str,
        target: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        idempotent: bool = True,
    ) -> object:
        """Make one call and return the decoded reply."""
        if body is None and method == "POST":
            body = _NO_BODY
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + self.timeout_s
        with self._under_way() as call:
            while True:
                try:
                    return self._attempt(call, method, target, body, timeout_s=timeout_s, idempotent=idempotent)
                except TooManyRequestsError as error:
                    _pause(call, error, deadline_s)

    @contextmanager
    def _under_way(self) -> Iterator[Call]:
        """One call, which `close` gives up."""
        call = Call()
        self._active.add(call)
        try:
            yield call
        finally:
            self._active.discard(call)

    def _attempt(
        self,
        call: Call,
        method: str,
        target: str,
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float,
        idempotent: bool,
    ) -> object:
        """Make the call on a kept connection, or on a new one if there is none or it broke."""
        kept = self._idle_connection()
        if kept is not None:
            kept.set_timeout(timeout_s)
            try:
                return self._exchange(call, kept, method, target, body)
            except BrokerUnavailableError as error:
                if kept.answered or error.reason == "timeout" or not idempotent or call.is_given_up:
                    raise
        return self._exchange(call, Connection(self.socket_path, timeout_s), method, target, body)

    def _exchange(
        self, call: Call, connection: Connection, method: str, target: str, body: Mapping[str, Any] | None
    ) -> object:
        reusable = False
        try:
            call.use(connection)
            self._send(connection, method, target, body)
            payload = _payload(connection)
            reusable = connection.keeps_alive
        finally:  # whatever interrupts, a half-used connection does not survive
            call.use(None)
            if reusable and len(self._idle) < _KEPT_CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()
        if connection.status >= 300:
            raise _error(payload, connection)
        return payload

    def _stream(
        self, target: str, body: Mapping[str, Any] | None, timeout_s: float | None, *, method: str = "POST"
    ) -> Generator[object, None, None]:
        """Yield the decoded lines of a streamed reply."""
        deadline_s = time.monotonic() + self.timeout_s
        with self._under_way() as call:
            while True:
                try:
                    yield from self._stream_once(call, target, body, timeout_s, method)
                except TooManyRequestsError as error:  # comes before the first line only
                    _pause(call, error, deadline_s)
                else:
                    return

    def _stream_once(
        self, call: Call, target: str, body: Mapping[str, Any] | None, timeout_s: float | None, method: str
    ) -> Generator[object, None, None]:
        connection = Connection(self.socket_path, self.timeout_s)
        try:
            call.use(connection)
            self._send(connection, method, target, body)
            connection.set_timeout(timeout_s)
            connection.read_head()
            if connection.status >= 300:
                raise _error(decode_json(connection.read_body()), connection)
            for line in connection.lines():
                payload = decode_json(line)
                if isinstance(payload, dict) and "error" in payload:
                    raise error_from_reply(payload, 500)
                yield payload
        finally:
            call.use(None)
            connection.close()

    def _send(self, connection: Connection, method: str, target: str, body: Mapping[str, Any] | None) -> None:
        encoded = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        connection.send(method, target, self.token, encoded, self._headers)

    def _close_kept(self) -> None:
        while (kept := self._take_kept()) is not None:
            kept.close()

    def _take_kept(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _idle_connection(self) -> Connection | None:
        while (connection := self._take_kept()) is not None:
            if connection.is_idle():
                return connection
            connection.close()
        return None


def _next_status(status: HostStatus | None, payload: object) -> HostStatus:
    """Return the whole status after a line of events: the line itself, or `status` with what the line says has changed.

    What did not change is not decoded again: with many kernels that is nearly all of it. Raises InternalBrokerError.
    """
    if not isinstance(payload, dict) or "ended" not in payload:
        return decode_message(HostStatus, payload)
    changed, ended = decode_message(HostStatus, payload.get("changed")), payload["ended"]
    if status is None or not isinstance(ended, list):
        raise InternalBrokerError("the broker's answer is not a HostChange after a HostStatus")
    devices = {device.device_id: device for device in (*status.devices, *changed.devices)}
    leases = {lease.lease_id: lease for lease in (*status.leases, *changed.leases)}
    return replace(
        changed,
        devices=list(devices.values()),
        leases=[lease for lease_id, lease in leases.items() if lease_id not in ended],
    )


def _pause(call: Call, error: TooManyRequestsError, deadline_s: float) -> None:
    """Wait as long as the broker said.

    Raises the error if that is past the deadline, and BrokerUnavailableError if the call is given up.
    """
    if time.monotonic() + error.retry_s > deadline_s:
        raise error
    call.pause(error.retry_s)


def _error(payload: object, connection: Connection) -> FractionalGPUError:
    """Return the error that a reply says, with what its head adds."""
    error = error_from_reply(payload, connection.status)
    if isinstance(error, TooManyRequestsError):
        error.retry_s = connection.retry_s
    elif isinstance(error, BadRequestError | NotFoundError) and error.reason in _OF_VERSIONS:
        return type(error)(f"{error}{hint(client=OWN, broker=connection.version)}", reason=error.reason)
    return error


def _spoken(request: object) -> dict[str, Any]:
    """Return the fields of a request that differ from their defaults: a broker that lacks the others need not know them."""
    spoken: dict[str, Any] = {}
    for field in fields(request):  # type: ignore[arg-type]
        value = getattr(request, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if default is MISSING or value != default:
            spoken[field.name] = value
    return spoken


def _payload(connection: Connection) -> object:
    connection.read_head()
    body = connection.read_body()
    if connection.status >= 300 and not body.lstrip().startswith(b"{"):
        return None  # somebody else's error page: the status alone speaks
    return decode_json(body) if body else {}


def _route(lease_id: str, action: str = "") -> str:
    route = f"/v1/leases/{quote(lease_id, safe='')}"
    return f"{route}/{action}" if action else route


spoken_fields = _spoken


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise InternalBrokerError("the broker's answer has something else where a list belongs")
    return value
