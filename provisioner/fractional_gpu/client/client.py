"""The synchronous client for the lease API, used by kernels, provisioners, spawners and commands.

- All errors are from `fractional_gpu.protocol.errors`. BrokerUnavailableError means that no broker answered, that the connection broke, or
  that a wait took too long. A rate-limited call is retried for up to `timeout_s`.
- Threads may share a client, because each call has its own connection. After a fork, the child does not touch its parent's connections.
- An interrupt (KeyboardInterrupt, or closing a generator) closes the connection, and the broker then withdraws any ticket.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlencode

from msgspec import Struct
from msgspec.structs import replace

from fractional_gpu.client.http import ANSWER_S, Call, Connection
from fractional_gpu.protocol import routes
from fractional_gpu.protocol.codec import changed_fields, decode_json, decode_reply, encode_request
from fractional_gpu.protocol.errors import (
    BrokerUnavailableError,
    FractionalGPUError,
    TooManyRequestsError,
    error_from_reply,
)
from fractional_gpu.protocol.limits import MAX_WAIT_S, PULSE_S
from fractional_gpu.protocol.messages import (
    AcquireRequest,
    AttachRequest,
    DrainRequest,
    EvictRequest,
    ExpectRequest,
    GateAnswer,
    GateCommand,
    GateHello,
    LeaseNews,
    LeaseReply,
    LeaseRequest,
    MoveRequest,
    OthersUse,
    PinRequest,
    Pong,
    Progress,
    ProgressKind,
    ResizeRequest,
    ResumeRequest,
    WaitLine,
)
from fractional_gpu.protocol.names import ACTING_FOR, CAUSE, encode_acting_for
from fractional_gpu.protocol.routes import FreshQuery, OthersQuery, Route

if TYPE_CHECKING:
    from fractional_gpu.protocol.accounts import BudgetExtension, BudgetList, Cost, UsageReport
    from fractional_gpu.protocol.nodes import Capacity
    from fractional_gpu.protocol.status import DeviceStatus, History, HostStatus, LeaseStatus, Story

Request = TypeVar("Request", bound=Struct)
Reply = TypeVar("Reply", bound=Struct)
Line = TypeVar("Line", bound=WaitLine)

_UNLIMITED_S = 20 * 86_400.0  # for a stream that is silent while nothing changes; sockets allow 24 days
_SILENCE_S = 3 * PULSE_S  # a stream without a keep-alive for this long is considered dead


class BrokerClient:
    """Talks to the broker at `socket_path`. It connects only when a method is called.

    Pass the lease's `token`, or None to act with the permissions of this process's user. `timeout_s` limits each wait for an answer, except
    in calls that wait for the GPU (see their docstrings). `acting_for` is the name of the administrator a program is acting for, to be
    recorded in the broker's audit log. Raises BadRequestError if this name is invalid.
    """

    def __init__(
        self, socket_path: str, *, token: str | None = None, timeout_s: float = 30.0, acting_for: str | None = None
    ) -> None:
        self.socket_path = socket_path
        self.token = token
        self.timeout_s = timeout_s
        self.acting_for = acting_for
        self._active: set[Call] = set()
        self._headers = {} if acting_for is None else {ACTING_FOR: encode_acting_for(acting_for)}

    def because_of(self, cause: str) -> Self:
        """Set the cause that `story` will show for later requests, such as "`%gpu suspend`". Return the client."""
        self._headers[CAUSE] = cause
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self,
        route: Route[Request, Reply],
        request: Request | None = None,
        about: str = "",
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Call a route once and return its reply. `about` is the lease, seat, device or pool in the route's path.

        Wait for `timeout_s` (the client's by default) plus the time the broker is allowed by the route or by the request's `wait_ms`.
        Raises the errors in `fractional_gpu.protocol.errors`.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        with closing(self._payloads(route, request, about, timeout_s, timeout_s + _wait_s(route, request))) as payloads:
            return decode_reply(next(payloads), route.reply_type)

    def stream(
        self, route: Route[Request, Reply], request: Request | None = None, about: str = "", *, silence_s: float
    ) -> Generator[Reply, None, None]:
        """Yield the lines of a route's reply until the broker ends the stream. Each line must arrive within `silence_s` seconds.

        Closing the generator closes the connection. Raises the same errors as `call`.
        """
        with closing(self._payloads(route, request, about, self.timeout_s, silence_s)) as payloads:
            for payload in payloads:
                yield decode_reply(payload, route.reply_type)

    def ping(self, timeout_s: float | None = None) -> Pong:
        """Ask the broker to identify itself, within `timeout_s` seconds (by default the client's timeout)."""
        return self.call(routes.PING, timeout_s=timeout_s)

    def status(self, *, fresh: bool = False) -> "HostStatus":
        """Return the devices, pools and leases this user may see. With `fresh`, the broker samples the devices first."""
        return self.call(routes.STATUS, FreshQuery(fresh=fresh))

    def capacity(self) -> "Capacity":
        """Return the host's remaining capacity, by pool."""
        return self.call(routes.CAPACITY)

    def events(self) -> Iterator["HostStatus"]:
        """Yield the `status` at once and again after each change. Blocks between changes. Raises BrokerUnavailableError."""
        status: HostStatus | None = None
        with closing(
            self._payloads(routes.EVENTS, None, "", self.timeout_s, max(self.timeout_s, _SILENCE_S))
        ) as payloads:
            for payload in payloads:
                if payload:
                    status = _next_status(status, payload)
                    yield status

    def create_lease(self, request: LeaseRequest) -> LeaseReply:
        """Request a new lease. The broker may take up to `request.wait_ms` longer to make room. Raises NoRoomError."""
        return self.call(routes.CREATE, request)

    def lease(self, lease_id: str, *, fresh: bool = False) -> "LeaseStatus":
        """Return one lease. With `fresh`, the broker samples the lease's devices first. Raises NotFoundError."""
        return self.call(routes.SHOW, FreshQuery(fresh=fresh), lease_id)

    def release(self, lease_id: str) -> None:
        """End a lease. Do nothing if it has already ended."""
        self.call(routes.RELEASE, about=lease_id)

    def end_left(self, lease_id: str) -> None:
        """End the processes a lease's kernel left behind, and wait until their device memory is free. Raises ConflictError."""
        self.call(routes.END, about=lease_id)

    def attach(self, lease_id: str, request: AttachRequest) -> "LeaseStatus":
        """Report the lease's process, and the Jupyter connection on which the broker can listen to it."""
        return self.call(routes.ATTACH, request, lease_id)

    def detach(self, lease_id: str) -> None:
        """Report that the lease's process has exited or is about to be replaced."""
        self.call(routes.DETACH, about=lease_id)

    def suspend(self, lease_id: str) -> "LeaseStatus":
        """Suspend the lease, waiting up to an hour. Raises ConflictError."""
        return self.call(routes.SUSPEND, about=lease_id)

    def resume(self, lease_id: str, request: ResumeRequest | None = None) -> "LeaseStatus":
        """Resume the lease, waiting up to an hour. Raises ConflictError or NoRoomError."""
        return self.call(routes.RESUME, request, lease_id)

    def expect(self, lease_id: str, request: ExpectRequest) -> None:
        """Tell the broker that the lease is likely to run a cell soon. Raises BadRequestError."""
        self.call(routes.EXPECT, request, lease_id)

    def pin(self, lease_id: str, request: PinRequest) -> "LeaseStatus":
        """Keep the lease resident for a while, replacing any earlier pin. Raises ConflictError, which names any exceeded limit."""
        return self.call(routes.PIN, request, lease_id)

    def unpin(self, lease_id: str) -> "LeaseStatus":
        """Remove the pin. Do nothing if the lease is not pinned."""
        return self.call(routes.UNPIN, about=lease_id)

    def resize(self, lease_id: str, request: ResizeRequest) -> "LeaseStatus":
        """Resize the lease, waiting up to `request.wait_ms`. A later `resize` replaces this one. Raises ConflictError or NoRoomError."""
        return self.call(routes.RESIZE, request, lease_id)

    def move(self, lease_id: str, request: MoveRequest) -> "LeaseStatus":
        """Move an idle kernel to another device, waiting up to an hour. For administrators only."""
        return self.call(routes.MOVE, request, lease_id)

    def evict(self, lease_id: str, request: EvictRequest) -> None:
        """End the kernel and its lease. The kernel's variables are lost. For administrators only.

        Raises BadRequestError unless the request has `confirm` set.
        """
        self.call(routes.EVICT, request, lease_id)

    def story(self, lease_id: str) -> "Story":
        """Return everything that has happened to the lease, with the reasons."""
        return self.call(routes.STORY, about=lease_id)

    def history(self, lease_id: str) -> "History":
        """Return the lease's memory and state over time."""
        return self.call(routes.HISTORY, about=lease_id)

    def cost(self, lease_id: str) -> "Cost":
        """Return the usage and costs of the lease and of its user."""
        return self.call(routes.COST, about=lease_id)

    def others(self, lease_id: str, last_ms: int, without: Sequence[str] = ()) -> OthersUse:
        """Return how much others used the lease's device in the last `last_ms` (at most a minute), ignoring the leases in `without`."""
        return self.call(routes.OTHERS, OthersQuery(last_ms=last_ms, without=",".join(without)), lease_id)

    def usage(
        self,
        by: Sequence[str],
        since_s: int,
        until_s: int,
        only: Mapping[str, Any] | None = None,
        *,
        advice: bool = False,
    ) -> "UsageReport":
        """Return the usage totals this user may see, as described in `UsageQuery`. Raises BadRequestError."""
        from fractional_gpu.protocol.accounts import UsageQuery  # noqa: PLC0415 - few kernels ask

        query = UsageQuery(by=",".join(by), since_s=since_s, until_s=until_s, advice=advice, **(only or {}))
        return self.call(routes.USAGE, query)

    def budgets(self) -> "BudgetList":
        """Return the budgets this user may see."""
        return self.call(routes.BUDGETS)

    def extend_budget(self, request: "BudgetExtension") -> "BudgetList":
        """Give a user or a group more budget. For administrators only."""
        return self.call(routes.EXTEND_BUDGET, request)

    def drain(self, device: str, request: DrainRequest) -> "DeviceStatus":
        """Begin draining a device, given its id, the beginning of its id, or its number. For administrators only."""
        return self.call(routes.DRAIN, request, device)

    def undrain(self, device: str) -> "DeviceStatus":
        """Put a drained device back into use. Do nothing if it is not drained. For administrators only."""
        return self.call(routes.UNDRAIN, about=device)

    def acquire(self, lease_id: str, request: AcquireRequest) -> Generator[Progress, None, None]:
        """Yield the lease's progress while it waits for the GPU. The last line is `granted` or `refused`.

        Closing the generator withdraws the ticket. Each line may take `request.wait_ms` plus `timeout_s` to arrive. Raises
        BrokerUnavailableError.
        """
        return self.wait(routes.ACQUIRE, request, lease_id)

    def hold(self, lease_id: str, request: AcquireRequest) -> Generator[Progress, None, None]:
        """Acquire the GPU as `acquire` does, but continue after `granted`. The lease stays in use until the generator or client is closed.

        If the lease is preempted, the stream reports this and the lease waits again. The stream ends with `refused`. Raises
        BrokerUnavailableError.
        """
        return self.stream(routes.ACQUIRE, replace(request, hold=True), lease_id, silence_s=_UNLIMITED_S)

    def follow(self, lease_id: str) -> Generator[LeaseNews, None, None]:
        """Yield the state and notices of a `jupyter gpu run` command as they change, until its lease ends. Blocks between changes."""
        return self.stream(routes.FOLLOW, about=lease_id, silence_s=_UNLIMITED_S)

    def gate(self, lease_id: str, hello: GateHello) -> Iterator[GateCommand]:
        """Yield the broker's commands for this kernel's gate until the broker ends the stream. Blocks between commands.

        A command with an empty verb keeps the stream alive. Reading it proves to the broker that Python is running. For this, the socket
        has a timeout, so Python polls before each read. Without it, the system call would read even while Python is blocked.
        """
        return self.stream(routes.GATE, hello, lease_id, silence_s=MAX_WAIT_S)

    def answer(self, lease_id: str, answer: GateAnswer) -> None:
        """Answer one of the broker's commands to the gate, or report what the cells are doing."""
        self.call(routes.ANSWER, answer, lease_id)

    def close(self) -> None:
        """Abort all running calls, which then raise BrokerUnavailableError. The client can still be used."""
        for call in list(self._active):
            call.give_up()

    def wait(self, route: Route[Request, Line], request: Request, about: str = "") -> Generator[Line, None, None]:
        """Yield the lines of a route's reply up to `granted` or `refused`. Raises BrokerUnavailableError if the stream ends earlier."""
        silence_s = self.timeout_s + _wait_s(route, request)
        with closing(self.stream(route, request, about, silence_s=silence_s)) as lines:
            for line in lines:
                yield line
                if line.kind in {ProgressKind.GRANTED, ProgressKind.REFUSED}:
                    return
        raise BrokerUnavailableError(
            f"the GPU broker at {self.socket_path} closed the connection before it answered", reason="hung-up"
        )

    def _payloads(
        self, route: Route[Any, Any], request: object, about: str, timeout_s: float, silence_s: float
    ) -> Generator[object, None, None]:
        """Yield the reply's decoded body or lines. `silence_s` limits each wait for the broker after the request is sent."""
        target, body = _encode(route, request, about)
        deadline_s = time.monotonic() + self.timeout_s
        call = Call()
        self._active.add(call)
        try:
            while True:
                try:
                    with closing(Connection(self.socket_path, timeout_s)) as connection:
                        call.use(connection)
                        connection.send(route.method, target, self.token, body, self._headers)
                        connection.read_head(silence_s)
                        if connection.status >= 300:
                            raise _error(connection)
                        if not route.lines:
                            yield decode_json(connection.read_body() or b"{}")
                            return
                        for line in connection.lines():
                            payload = decode_json(line)
                            if isinstance(payload, dict) and "error" in payload:
                                raise error_from_reply(payload, 500)
                            yield payload
                        return
                except TooManyRequestsError as error:  # raised only before the first line
                    if time.monotonic() + error.retry_s > deadline_s:
                        raise
                    call.pause(error.retry_s)
        finally:
            self._active.discard(call)


def _wait_s(route: Route[Any, Any], request: object) -> float:
    wait_ms: int = getattr(request, "wait_ms", 0)
    return route.waits_s + wait_ms / 1000


def _encode(route: Route[Any, Any], request: Any, about: str) -> tuple[str, bytes | None]:  # noqa: ANN401 - the route's
    """Return a request's target and body. A GET request may have a query, and a POST request always has a body. Raises BadRequestError."""
    before, placeholder, after = route.path.partition("{")
    target = before + quote(about, safe="") + after.partition("}")[2] if placeholder else before
    if route.method == "GET":
        if fields := {} if request is None else changed_fields(request):
            target += "?" + urlencode(
                {name: int(one) if isinstance(one, bool) else one for name, one in fields.items()}
            )
        return target, None
    if request is not None:
        return target, encode_request(request)
    return target, b"{}" if route.method == "POST" else None


def _next_status(status: "HostStatus | None", payload: object) -> "HostStatus":
    """Apply a line of events to `status`, and return the new status.

    The first line is the status itself, and later lines are changes to it. Raises InternalBrokerError.
    """
    from fractional_gpu.protocol.status import HostChange, HostStatus  # noqa: PLC0415 - kernels do not follow hosts

    if status is None:
        return decode_reply(payload, HostStatus)
    change = decode_reply(payload, HostChange)
    devices = {device.device_id: device for device in (*status.devices, *change.changed.devices)}
    leases = {lease.lease_id: lease for lease in (*status.leases, *change.changed.leases)}
    return replace(
        change.changed,
        devices=list(devices.values()),
        leases=[lease for lease_id, lease in leases.items() if lease_id not in change.ended],
    )


def _error(connection: Connection) -> FractionalGPUError:
    body = connection.read_body()
    # An error page that is not JSON does not come from the broker. Only its HTTP status counts.
    error = error_from_reply(decode_json(body) if body.lstrip().startswith(b"{") else None, connection.status)
    if isinstance(error, TooManyRequestsError):
        error.retry_s = connection.retry_s
    return error


_PAUSE_S = 1.5  # between two pings
PATIENCE_S = ANSWER_S - _PAUSE_S - 0.5  # wait for an answer; 5 s with the pause and 0.5 s for a busy machine


class SilenceWatch:
    """Pings the broker in a thread, from `start` to `stop`, to notice if it hangs during a long call.

    `connect` creates a client with the given timeout in seconds. Each time the broker does not answer, the thread calls `report` with the
    error. When the broker answers again, the thread calls `report` with None.
    """

    def __init__(
        self,
        connect: Callable[[float], BrokerClient],
        report: Callable[[BrokerUnavailableError | None], None],
    ) -> None:
        self._connect = connect
        self._report = report
        self._stop = threading.Event()
        self._started = False

    def start(self) -> None:
        """Start watching, unless already started. If the process can't start a thread, nothing is watched."""
        if not self._started:
            self._started = True
            with suppress(RuntimeError):
                threading.Thread(target=self._run, name="gpu-silence", daemon=True).start()

    def stop(self) -> None:
        """Stop reporting. Returns at once; the thread exits within a few seconds."""
        self._stop.set()

    def _run(self) -> None:
        silent = False
        while not self._stop.wait(_PAUSE_S):
            silence = None
            try:
                with self._connect(PATIENCE_S) as client:
                    client.ping()
            except FractionalGPUError as error:  # the broker is not silent if it refuses or does not exist
                if isinstance(error, BrokerUnavailableError) and error.reason == "timeout":
                    silence = error
            if self._stop.is_set():
                return
            if silence is not None or silent:
                self._report(silence)
            silent = silence is not None
