"""The broker's subscription to a kernel's IOPub, which shows whether the kernel is busy.

- IOPub reports busy and idle for every message. Only the message types in `USES` count as GPU use. Subshells can be busy at the same time,
  so `IOPubWatch` keeps a *set* of busy parent message ids rather than a flag.
- While the watch is in doubt, the kernel counts as busy, because IOPub can lose messages and does not send a late subscriber the current
  state. The watch is certain again once the kernel has answered a `kernel_info` request on its shell channel *and* that request's idle
  status has arrived over IOPub. If a kernel stays busy without sending a message, it gets this request on each busy shell, and an answer
  clears that shell's earlier messages. These requests become less and less frequent, because each one costs the user processor time.
- While the user's account is overdrawn, no messages are read and the watch is in doubt. The watch subscribes only to the topic of the
  kernel's first status, so the kernel's output is not sent to it. A frame longer than `_LONGEST_FRAME` breaks the connection.
"""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from fractional_gpu.broker.clock import within
from fractional_gpu.broker.cost import Account
from fractional_gpu.broker.kernels.connection import Connection
from fractional_gpu.core.model import Sign
from fractional_gpu.protocol.limits import COST_BYTE_S, COST_REQUEST_S

log = logging.getLogger(__name__)

USES = frozenset(
    {"execute_request", "complete_request", "inspect_request", "debug_request", "comm_open", "comm_msg", "comm_close"}
)
"""Types of parent messages that may make the kernel run the user's code or touch a tensor."""
SIGNS = {"complete_request": Sign.COMPLETION, "inspect_request": Sign.INSPECTION, "comm_msg": Sign.WIDGET}
"""Message types that suggest that someone is working in the notebook and will probably run a cell soon."""

_JOINED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_DELIMITER = b"<IDS|MSG>"
_MAIN = ""  # the main shell
# While in doubt, an unanswered probe is sent again after this time, which then doubles each time.
_PROBE_PATIENCE_S = 0.5
_SILENCE_S = 60.0  # a kernel busy for this long without a message gets a probe; the time then doubles each time
_LONGEST_PATIENCE_S = 3600.0
_MOST_BUSY = 10_000  # parent messages to keep; if there are more, the watch is in doubt again
_LONGEST_ID = 200
_LONGEST_STATUS = 2**16  # bytes; a status consists of two headers and a word
_LONGEST_FRAME = 2**17  # bytes
_MOST_WAITING = 4  # messages
_STATUS_TOPIC = re.compile(rb"status|kernel(?:_core)?\.[^.]{1,200}\.status")
_REJOIN_S, _LONGEST_REJOIN_S = 0.2, 30.0  # pauses after a broken connection; each is twice the last ...
_LASTING_S = 10.0  # ... unless the connection lasted this long
_START_S = 30.0  # a kernel may take this long to listen; attempts are frequent, to get its first messages
_START_RETRY_S = 0.05
_RETRY_S, _LONGEST_RETRY_S = 0.1, 15.0  # growing pause between refused attempts after that
_SHELL_RETRY_S = 2.0


class _Header(msgspec.Struct):
    msg_id: str = ""
    msg_type: str = ""
    subshell_id: str | None = None


class _Status(msgspec.Struct):
    execution_state: str = ""


_NO_PARENT = _Header()
_decode_header = msgspec.json.Decoder(_Header).decode
_decode_parent = msgspec.json.Decoder(_Header | None).decode  # xeus kernels send null if there was no request
_decode_status = msgspec.json.Decoder(_Status).decode


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def _try_rarely(socket: zmq.asyncio.Socket) -> None:
    # This applies to connections from now on.
    socket.reconnect_ivl, socket.reconnect_ivl_max = _ms(_RETRY_S), _ms(_LONGEST_RETRY_S)


class IOPubWatch:
    """Watches one kernel's messages, and charges this work to its user's account.

    `busy` is also true while the watch is in doubt. `executing` is true only if the kernel is known to be handling a message. The watch
    calls `changed()` on the loop when the set of busy messages changes. If a message is a sign that a cell will run soon, it calls
    `signed(sign)` first.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        connection: Connection,
        account: Account,
        *,
        ipykernel: bool,
        changed: Callable[[], None],
        signed: Callable[[Sign], None],
    ) -> None:
        self._connection = connection
        self._account = account
        self._changed = changed
        self._signed = signed
        self._busy: dict[str, str] = {}  # message id -> the shell that handles it
        self._cells: set[str] = set()  # ids of messages that run cells
        self._probes: dict[str, str] = {}  # our own message id -> the shell that was probed
        self.is_certain = False
        self._doubt_since_s = time.monotonic()
        self._message_came = asyncio.Event()
        self._iopub: zmq.asyncio.Socket = self._socket(context, zmq.SUB)
        # ipykernel, which our kernelspecs run, separates status and output by topic. The topics of other kernels are unknown.
        self._all_topics = self._topic = b"kernel." if ipykernel else b""
        self._iopub.subscribe(self._topic)
        self._line_events: zmq.asyncio.Socket = self._iopub.get_monitor_socket(_JOINED | _BROKEN)
        self._iopub.reconnect_ivl = _ms(_START_RETRY_S)
        self._iopub.connect(connection.iopub)
        self._shell: zmq.asyncio.Socket = self._socket(context, zmq.DEALER)
        _try_rarely(self._shell)
        self._shell.reconnect_ivl = _ms(_SHELL_RETRY_S)
        self._shell_joined = self._rejoined = False
        work = (self._listen(), self._keep_line(), self._resolve_doubt(), self._drain())
        self._tasks = [asyncio.create_task(one) for one in work]

    @property
    def busy(self) -> bool:
        return not self.is_certain or bool(self._busy)

    @property
    def doubt_s(self) -> float:
        return 0.0 if self.is_certain else time.monotonic() - self._doubt_since_s

    @property
    def executing(self) -> bool:
        return bool(self._busy)

    @property
    def runs_cell(self) -> bool:
        """Whether a cell is or might be running. Completions, tooltips, and messages from widgets or debuggers do not count."""
        return not self.is_certain or not self._cells.isdisjoint(self._busy)

    @property
    def handled(self) -> frozenset[str]:
        return frozenset(self._busy)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._iopub.disable_monitor()
        for socket in (self._line_events, self._iopub, self._shell):
            socket.close(linger=0)

    def _socket(self, context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        socket.linger = 0
        socket.rcvhwm, socket.maxmsgsize = _MOST_WAITING, _LONGEST_FRAME
        socket.ipv6 = "[" in self._connection.iopub
        if self._connection.curve is not None:
            public, secret = self._connection.curve
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public
        return socket

    async def _next(self, socket: zmq.asyncio.Socket) -> list[bytes]:
        """Yield to other tasks, then wait for a message and charge it to the account. No message is lost on cancellation."""
        await asyncio.sleep(0)
        if self._account.left_s <= 0:
            self._lose_certainty()
        await self._account.turn()
        frames: list[bytes] = await socket.recv_multipart()
        self._account.charge(COST_REQUEST_S + sum(map(len, frames)) * COST_BYTE_S)
        return frames

    async def _listen(self) -> None:
        while True:
            frames = await self._next(self._iopub)
            begun_s = time.thread_time()
            before = (self.busy, len(self._busy))
            sign = self._take(frames)
            self._message_came.set()
            if sign is not None:
                self._signed(sign)
            if (self.busy, len(self._busy)) != before:
                self._changed()
            self._account.charge(time.thread_time() - begun_s)

    def _lose_certainty(self) -> None:
        """Mark the watch as in doubt, because it may have missed that the kernel is busy."""
        if self.is_certain:
            self.is_certain, self._doubt_since_s = False, time.monotonic()
            self._message_came.set()
            self._changed()

    def _subscribe(self, topic: bytes) -> None:
        if topic != self._topic:
            self._iopub.subscribe(topic)  # subscribe before the old topic ends, so that nothing is missed
            self._iopub.unsubscribe(self._topic)
            self._topic = topic

    async def _keep_line(self) -> None:
        """Monitor the IOPub connection. If it breaks, mark the watch as in doubt and reconnect, pausing longer each time.

        ZeroMQ retries a refused connection less and less often. If a connection is accepted and then closed, it retries ten times a second,
        and if an overlong frame broke the connection, it never retries. The watch therefore disconnects and reconnects explicitly.
        """
        pause_s = _REJOIN_S
        joined_s: float | None = None
        started = await self._line_events.poll(_ms(_START_S))
        _try_rarely(self._iopub)
        if not started:
            self._iopub.disconnect(self._connection.iopub)
            self._iopub.connect(self._connection.iopub)
        while True:
            if parse_monitor_message(await self._line_events.recv_multipart())["event"] & _JOINED:
                joined_s = time.monotonic()
                self._join_shell()
                continue
            self._iopub.disconnect(self._connection.iopub)
            self._lose_certainty()
            self._subscribe(self._all_topics)
            lasted = joined_s is not None and time.monotonic() - joined_s >= _LASTING_S
            pause_s, joined_s = _REJOIN_S if lasted else pause_s, None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_REJOIN_S)
            while await self._line_events.poll(0):  # events of the connection that was closed
                await self._line_events.recv_multipart()
            self._iopub.connect(self._connection.iopub)

    def _join_shell(self) -> None:
        """Connect to the shell channel once IOPub is connected. By then the kernel is listening, and will answer a probe."""
        if self._shell_joined:
            self._shell.disconnect(self._connection.shell)
            self._rejoined = True  # a probe may have been lost, so send another one
            self._message_came.set()
        self._shell_joined = True
        self._shell.connect(self._connection.shell)

    def _take(self, frames: list[bytes]) -> Sign | None:
        """Process one IOPub message. Return the sign that a cell will run soon, or None.

        Messages that are too long, malformed or wrongly signed are ignored.
        """
        with suppress(ValueError, msgspec.DecodeError, RecursionError):
            signature, *parts = frames[frames.index(_DELIMITER) + 1 :][:5]
            if sum(map(len, parts)) > _LONGEST_STATUS:
                return None
            if self._connection.key and not hmac.compare_digest(signature, self._sign(parts)):
                return None
            header, parent, _metadata, content = parts
            if _decode_header(header).msg_type == "status":
                if _STATUS_TOPIC.fullmatch(frames[0]):
                    self._subscribe(frames[0])
                return self._apply_status(_decode_parent(parent) or _NO_PARENT, _decode_status(content).execution_state)
        return None

    def _apply_status(self, about: _Header, state: str) -> Sign | None:
        if state == "starting":
            self._forget()  # nothing is known yet about the restarted kernel
        elif state == "idle":
            self._busy.pop(about.msg_id, None)
            self._cells.discard(about.msg_id)
            if (shell := self._probes.get(about.msg_id)) is not None:
                self._clear_shell(shell)
        elif state == "busy" and about.msg_type in USES and len(about.msg_id) <= _LONGEST_ID:
            self._busy[about.msg_id] = (about.subshell_id or _MAIN)[:_LONGEST_ID]
            if about.msg_type == "execute_request":
                self._cells.add(about.msg_id)
            if len(self._busy) > _MOST_BUSY:
                self._forget()
            return SIGNS.get(about.msg_type)
        return None

    def _forget(self) -> None:
        self._busy.clear()
        self._cells.clear()
        if self.is_certain:
            self.is_certain, self._doubt_since_s = False, time.monotonic()

    def _clear_shell(self, shell: str) -> None:
        # A shell answers in order, so it has finished all messages before the probe.
        self._busy = {msg_id: by for msg_id, by in self._busy.items() if by != shell}
        self._cells.intersection_update(self._busy)
        self._probes = {msg_id: asked for msg_id, asked in self._probes.items() if asked != shell}
        if shell == _MAIN:
            self.is_certain = True

    def _sign(self, parts: list[bytes]) -> bytes:
        digest = hmac.new(self._connection.key, digestmod=self._connection.digest)
        for part in parts:
            digest.update(part)
        return digest.hexdigest().encode()

    async def _resolve_doubt(self) -> None:
        while True:
            await self._become_certain()
            patience_s = _SILENCE_S
            while self.is_certain:
                self._message_came.clear()
                if await within(patience_s, self._message_came):
                    patience_s = _SILENCE_S
                    continue
                for shell in set(self._busy.values()):
                    await self._probe(shell)
                patience_s = min(2 * patience_s, _LONGEST_PATIENCE_S)

    async def _become_certain(self) -> None:
        patience_s = _PROBE_PATIENCE_S
        while not self.is_certain:
            self._rejoined = False
            await self._probe(_MAIN)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    while not (self.is_certain or self._rejoined):
                        self._message_came.clear()
                        await self._message_came.wait()
            patience_s = _PROBE_PATIENCE_S if self._rejoined else min(2 * patience_s, _LONGEST_PATIENCE_S)

    async def _probe(self, shell: str) -> None:
        probe = uuid.uuid4().hex
        self._probes[probe] = shell
        header = {"msg_id": probe, "msg_type": "kernel_info_request", "username": "broker", "session": probe}
        header |= {"date": datetime.now(UTC).isoformat(), "version": "5.3"}
        if shell != _MAIN:
            header["subshell_id"] = shell
        parts = [msgspec.json.encode(header), b"{}", b"{}", b"{}"]
        await self._shell.send_multipart([_DELIMITER, self._sign(parts) if self._connection.key else b"", *parts])

    async def _drain(self) -> None:
        while True:
            await self._next(self._shell)  # IOPub has everything that matters
