"""The kernel's end of its Jupyter connection, under the test's control: it sends exactly what the test says."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any, Self

import zmq
import zmq.asyncio

from fractional_gpu.broker.cost import Account
from fractional_gpu.broker.kernels.connection import connection_from_json
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.core.model import Sign
from tests.support.ports import free_ports

__all__ = ["DEADLINE_S", "KernelLine", "Watched"]

DEADLINE_S = 30.0
KEY = "a signing key"


class KernelLine:
    """An IOPub publisher that sees subscriptions (XPUB), and a shell channel that answers only when told to."""

    def __init__(self, host: str = "127.0.0.1", curve: tuple[bytes, bytes] | None = None) -> None:
        self.context = zmq.asyncio.Context()
        self.host = host
        self.curve = curve
        self.iopub, self.iopub_port = self._bind(zmq.XPUB, *free_ports(1))  # `mend_line` takes it again
        self.shell, self.shell_port = self._bind(zmq.ROUTER, 0)

    def _bind(self, kind: int, port: int) -> tuple[zmq.asyncio.Socket, int]:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.ipv6 = ":" in self.host
        if self.curve is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self.curve
        host = f"[{self.host}]" if ":" in self.host else self.host
        socket.bind(f"tcp://{host}:{port or '*'}")
        return socket, int(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rpartition(b":")[2].rstrip(b"\0"))

    @property
    def info(self) -> dict[str, Any]:
        """The contents of the connection file."""
        curve = (
            {}
            if self.curve is None
            else {"curve_publickey": self.curve[0].decode(), "curve_secretkey": self.curve[1].decode()}
        )
        return {
            "transport": "tcp",
            "ip": self.host,
            "iopub_port": self.iopub_port,
            "shell_port": self.shell_port,
            "key": KEY,
            "signature_scheme": "hmac-sha256",
            **curve,
        }

    async def subscribed(self) -> bytes:
        """Wait for a subscription and return its topic."""
        async with asyncio.timeout(DEADLINE_S):
            (frame,) = await self.iopub.recv_multipart()
        assert frame[:1] == b"\1", frame
        return bytes(frame[1:])

    async def asked(self) -> dict[str, Any]:
        """Wait for a request on the shell channel and return its header."""
        async with asyncio.timeout(DEADLINE_S):
            frames = await self.shell.recv_multipart()
        parts = frames[frames.index(b"<IDS|MSG>") + 1 :]
        assert parts[0].decode() == sign(parts[1:5], KEY)
        header: dict[str, Any] = json.loads(parts[1])
        assert header["msg_type"] == "kernel_info_request"
        return header

    async def answer(self, header: dict[str, Any]) -> None:
        """Publish busy and idle for a request."""
        await self.say("busy", header)
        await self.say("idle", header)

    async def say(self, state: str, parent: dict[str, Any] | None, key: str = KEY) -> None:
        """Publish a status message about a request (None: without a parent, as xeus kernels do)."""
        header = {"msg_id": f"{state} {parent}", "msg_type": "status"}
        parts = [json.dumps(part).encode() for part in (header, parent, {}, {"execution_state": state})]
        await self.iopub.send_multipart([b"kernel.x.status", b"<IDS|MSG>", sign(parts, key).encode(), *parts])

    async def busy(self, msg_id: str, msg_type: str = "execute_request", **header: object) -> dict[str, Any]:
        """Publish busy for a request of this kind; return the request's header."""
        parent = {"msg_id": msg_id, "msg_type": msg_type, **header}
        await self.say("busy", parent)
        return parent

    def break_line(self) -> None:
        """Cut the IOPub connection; `mend_line` accepts subscribers on the same port again."""
        self.iopub.close(linger=0)

    def mend_line(self) -> None:
        """Publish again."""
        self.iopub, _ = self._bind(zmq.XPUB, self.iopub_port)

    def close(self) -> None:
        """Close the sockets."""
        self.context.destroy(linger=0)


def sign(parts: list[bytes], key: str) -> str:
    """Sign a message as Jupyter does."""
    return hmac.new(key.encode(), b"".join(parts), hashlib.sha256).hexdigest()


class _Watch(IOPubWatch):
    """Signals each message it has processed."""

    taken: asyncio.Event

    def _take(self, frames: list[bytes]) -> Sign | None:
        sign = super()._take(frames)
        self.taken.set()
        return sign


class Watched:
    """A watch on a connection; `until` waits for its next changes."""

    def __init__(self, line: KernelLine, *, ipykernel: bool = True) -> None:
        self.line = line
        self.changes = 0
        self._change = asyncio.Event()
        self._context = zmq.asyncio.Context()
        connection = connection_from_json(line.info)
        self.signs: list[Sign] = []
        self.account = Account("user x")
        self.watch = _Watch(
            self._context,
            connection,
            self.account,
            ipykernel=ipykernel,
            changed=self._changed,
            signed=self.signs.append,
        )
        self.watch.taken = asyncio.Event()

    def _changed(self) -> None:
        self.changes += 1
        self._change.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; fails after a while."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._change.clear()
                await self._change.wait()

    async def settle(self) -> None:
        """Subscribe, answer the first probe, and wait until the watch is certain."""
        await self.line.subscribed()
        await self.line.answer(await self.line.asked())
        await self.until(lambda: not self.watch.busy)

    async def has_heard_all(self) -> None:
        """Return once everything published so far has been processed: messages come in order."""
        marker = await self.line.busy("marker", subshell_id="marker's own")
        await self._until_taken(lambda: "marker" in self.watch._busy)
        await self.line.say("idle", marker)
        await self._until_taken(lambda: "marker" not in self.watch._busy)

    async def _until_taken(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.watch.taken.clear()
                await self.watch.taken.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.watch.close()
        self._context.destroy(linger=0)
