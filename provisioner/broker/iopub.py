"""Is the kernel busy? The broker's own subscription to a kernel's IOPub.

IOPub says busy and idle for every message on the shell and control channels; what counts as use are the types in `USES`. Subshells
overlap, so the watch keeps a *set* of busy parent message ids, never a flag. IOPub can lose messages and a late subscriber
gets no current state, so a fresh watch is in doubt, and doubt counts as busy, until the kernel has answered a `kernel_info`
request on its shell channel *and* the idle status of that very request came over IOPub: then the subscription is live and the
main shell is idle. The same probe is repeated while a kernel stays busy without a sound, in case an idle was lost.
"""

import asyncio
import hashlib
import hmac
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import zmq
import zmq.asyncio

__all__ = ["USES", "Connection", "IOPubWatch", "connection_from_json"]

log = logging.getLogger(__name__)

USES = frozenset({"execute_request", "complete_request", "inspect_request", "comm_open", "comm_msg", "comm_close"})
"""Parent message types that may run the user's code or touch a tensor."""

_DELIMITER = b"<IDS|MSG>"
_PROBE_PATIENCE_S = 10.0  # a probe without an answer is sent again after this long, while in doubt
_SILENCE_S = 60.0  # busy without a message for this long: ask again
_MOST_BUSY = 10_000  # parents kept; more than this is doubt, not memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A kernel's Jupyter connection, checked."""

    iopub: str
    shell: str
    key: bytes
    digest: str  # hashlib name
    curve: tuple[bytes, bytes] | None  # public and secret key, Z85


def connection_from_json(info: dict[str, Any]) -> Connection:
    """Check a connection file's contents. Raises ValueError naming the field, what was given and what is allowed."""
    transport, ip = info.get("transport", "tcp"), info.get("ip", "127.0.0.1")
    if transport not in ("tcp", "ipc"):
        raise ValueError(f"connection field transport is {transport!r}; allowed: tcp, ipc")
    if not isinstance(ip, str) or (transport == "tcp" and not _is_loopback(ip)):
        raise ValueError(f"connection field ip is {ip!r}; allowed: a loopback address")
    scheme = info.get("signature_scheme", "hmac-sha256")
    digest = scheme.removeprefix("hmac-") if isinstance(scheme, str) else ""
    if digest not in hashlib.algorithms_guaranteed or digest.startswith("shake"):
        raise ValueError(f"connection field signature_scheme is {scheme!r}; allowed: hmac- and a digest of hashlib")
    key = info.get("key", "")
    if not isinstance(key, str):
        raise ValueError("connection field key is not text")  # noqa: TRY004 - one kind of error for what was sent
    public, secret = info.get("curve_publickey"), info.get("curve_secretkey")
    curve = (public.encode(), secret.encode()) if isinstance(public, str) and isinstance(secret, str) else None
    return Connection(
        iopub=_endpoint(transport, ip, info, "iopub_port"),
        shell=_endpoint(transport, ip, info, "shell_port"),
        key=key.encode(),
        digest=digest,
        curve=curve,
    )


def _is_loopback(ip: str) -> bool:
    return ip in ("localhost", "::1") or (ip.startswith("127.") and ip.replace(".", "").isdigit())


def _endpoint(transport: str, ip: str, info: dict[str, Any], field: str) -> str:
    port = info.get(field)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ValueError(f"connection field {field} is {port!r}; allowed: a port from 1 to 65535")
    if transport == "ipc":
        return f"ipc://{ip}-{port}"
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


class _Header(msgspec.Struct):
    msg_id: str = ""
    msg_type: str = ""


class _Status(msgspec.Struct):
    execution_state: str = ""


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_status = msgspec.json.Decoder(_Status).decode


class IOPubWatch:
    """Watches one kernel. `changed(busy, executing)` is called on the loop whenever one of the two changes.

    `busy` counts doubt; `executing` is True while a message is known to be handled.
    """

    def __init__(
        self, context: zmq.asyncio.Context, connection: Connection, *, ipykernel: bool, changed: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._changed = changed
        self._busy: dict[str, None] = {}
        self._probe: str | None = None
        self._certain = False
        self._heard = asyncio.Event()
        self._iopub: zmq.asyncio.Socket = self._socket(context, zmq.SUB)
        # Our kernelspecs run ipykernel, whose topics tell status from output; what other kernels call theirs is unknown.
        self._iopub.subscribe(b"kernel." if ipykernel else b"")
        self._iopub.connect(connection.iopub)
        self._shell: zmq.asyncio.Socket = self._socket(context, zmq.DEALER)
        self._shell.connect(connection.shell)
        self._tasks = [
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._doubt()),
            asyncio.create_task(self._drain()),
        ]

    @property
    def busy(self) -> bool:
        """Whether a use is under way or nobody knows."""
        return not self._certain or bool(self._busy)

    @property
    def executing(self) -> bool:
        """Whether a message that counts as use is being handled for certain."""
        return bool(self._busy)

    def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        self._iopub.close(linger=0)
        self._shell.close(linger=0)

    def _socket(self, context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        socket.linger = 0
        if self._connection.curve is not None:
            public, secret = self._connection.curve
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public, secret, public
        return socket

    async def _listen(self) -> None:
        while True:
            frames = await self._iopub.recv_multipart()
            before = (self.busy, self.executing)
            self._take(frames)
            self._heard.set()
            if (self.busy, self.executing) != before:
                self._changed()

    def _take(self, frames: list[bytes]) -> None:
        """Learn from one IOPub message; what cannot be read or is not signed with the kernel's key teaches nothing."""
        with suppress(ValueError, msgspec.DecodeError):
            at = frames.index(_DELIMITER)
            signature, header, parent, _metadata, content = frames[at + 1], *frames[at + 2 : at + 6]
            if self._connection.key and not hmac.compare_digest(signature, self._sign(frames[at + 2 : at + 6])):
                return
            if _decode_header(header).msg_type != "status":
                return
            about, state = _decode_header(parent), _decode_status(content).execution_state
            if state == "starting":
                self._busy.clear()
            elif state == "idle":
                self._busy.pop(about.msg_id, None)
                if about.msg_id == self._probe:
                    # Whatever the main shell was doing when we asked is over: it answers in order.
                    self._probe, self._certain = None, True
            elif state == "busy" and about.msg_type in USES:
                self._busy[about.msg_id] = None
                if len(self._busy) > _MOST_BUSY:
                    self._busy.clear()
                    self._certain = False

    def _sign(self, parts: list[bytes]) -> bytes:
        digest = hmac.new(self._connection.key, digestmod=self._connection.digest)
        for part in parts:
            digest.update(part)
        return digest.hexdigest().encode()

    async def _doubt(self) -> None:
        """Probe until certain; go back to doubt after a long busy silence."""
        while True:
            if not self._certain:
                await self._ask()
                await self._hear(_PROBE_PATIENCE_S)
            elif not await self._hear(_SILENCE_S) and self._busy:
                old = dict(self._busy)
                await self._ask()
                if await self._answered():
                    for msg_id in old:
                        self._busy.pop(msg_id, None)
                    self._changed()

    async def _answered(self) -> bool:
        """Wait for the probe's idle; False after the patience (a cell really runs)."""
        try:
            async with asyncio.timeout(_PROBE_PATIENCE_S):
                while self._probe is not None:
                    await self._hear(None)
        except TimeoutError:
            return False
        return True

    async def _hear(self, patience_s: float | None) -> bool:
        self._heard.clear()
        try:
            async with asyncio.timeout(patience_s):
                await self._heard.wait()
        except TimeoutError:
            return False
        return True

    async def _ask(self) -> None:
        self._probe = uuid.uuid4().hex
        header = {
            "msg_id": self._probe,
            "msg_type": "kernel_info_request",
            "username": "broker",
            "session": self._probe,
            "date": datetime.now(UTC).isoformat(),
            "version": "5.3",
        }
        parts = [msgspec.json.encode(header), b"{}", b"{}", b"{}"]
        await self._shell.send_multipart([_DELIMITER, self._sign(parts) if self._connection.key else b"", *parts])

    async def _drain(self) -> None:
        """Throw the shell replies away; IOPub tells what matters."""
        while True:
            await self._shell.recv_multipart()
