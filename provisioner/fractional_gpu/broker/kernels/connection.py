"""A kernel's two connections: its Jupyter connection, whose fields and endpoints are checked, and the stream to its extension.

The broker connects to a kernel's sockets with its own privileges, so it connects only to sockets that no other user could have put there:

- A UNIX socket must be in a folder owned by the kernel's user. No other user may be able to write to that folder, or to replace a folder
  above it.
- A TCP port must be on a loopback address, even if the kernel listens on all addresses. It must not be a port used by a system service.
"""

import asyncio
import ipaddress
import itertools
import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from zmq.utils import z85

from fractional_gpu.host.namespaces import shows_same_folder
from fractional_gpu.protocol.limits import PULSE_S
from fractional_gpu.protocol.messages import COMMAND, GateAnswer, GateCommand, GateVerb

_LONGEST_PATH: Final = 100  # bytes; UNIX sockets allow 107
_FIRST_PORT: Final = 1024
# Jupyter's default and its larger variant. Other digests may cost the broker much more for each message.
_DIGESTS: Final = ("sha256", "sha512")
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


def command_connection(*, served: bool) -> str:
    return json.dumps({"kind": COMMAND, "served": served})


def is_command(connection: str) -> tuple[bool, bool]:
    if COMMAND not in connection:
        return False, False
    try:
        content = json.loads(connection)
    except ValueError:
        return False, False
    found = isinstance(content, dict) and content.get("kind") == COMMAND
    return found, found and content.get("served") is True


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    iopub: str
    shell: str
    key: bytes = field(repr=False)
    digest: str  # hashlib name
    curve: tuple[bytes, bytes] | None = field(repr=False)  # public and secret key, Z85-encoded


def connection_from_json(info: object) -> Connection:
    if not isinstance(info, dict):
        sentence = f"the connection is {_shown(info)}; expected an object, as in a connection file"
        raise ValueError(sentence)  # noqa: TRY004 - one kind of error for what was sent
    transport, ip = info.get("transport", "tcp"), info.get("ip", "127.0.0.1")
    if transport not in ("tcp", "ipc"):
        raise ValueError(f"connection field transport is {_shown(transport)}; expected tcp or ipc")
    address = _loopback(ip) if transport == "tcp" else ip
    if address is None:
        allowed = "a loopback address such as 127.0.0.1, or 0.0.0.0 for all addresses (c.KernelManager.ip)"
        raise ValueError(f"connection field ip is {_shown(ip)}; expected {allowed}")
    if transport == "ipc" and not (isinstance(ip, str) and ip.startswith("/") and len(ip.encode()) <= _LONGEST_PATH):
        raise ValueError(
            f"connection field ip is {_shown(ip)}; with ipc it must be an absolute path of at most {_LONGEST_PATH} bytes"
        )
    scheme = info.get("signature_scheme", "hmac-sha256")
    digest = scheme.removeprefix("hmac-") if isinstance(scheme, str) else ""
    if digest not in _DIGESTS:
        raise ValueError(
            f"connection field signature_scheme is {_shown(scheme)}; expected one of: {', '.join(f'hmac-{one}' for one in _DIGESTS)}"
        )
    key = info.get("key", "")
    if not isinstance(key, str):
        raise ValueError("connection field key must be text: the kernel's signing key, or ''")  # noqa: TRY004 - one kind of error for what was sent
    return Connection(
        iopub=_endpoint(transport, address, info, "iopub_port"),
        shell=_endpoint(transport, address, info, "shell_port"),
        key=key.encode(),
        digest=digest,
        curve=_curve(info.get("curve_publickey"), info.get("curve_secretkey")),
    )


def check_endpoints(connection: Connection, uid: int, pid: int) -> None:
    """Check the endpoints of a kernel with this uid and pid. Raises ValueError. Blocks, because folders may be on a network filesystem."""
    for endpoint in (connection.iopub, connection.shell):
        transport, _, address = endpoint.partition("://")
        if transport == "ipc":
            _check_folder(Path(address).parent, uid)
            _check_mounts(Path(address).parent, pid)
        elif uid != 0 and int(address.rpartition(":")[2]) < _FIRST_PORT:
            raise ValueError(
                f"the kernel's port {address.rpartition(':')[2]} is reserved for the system; use {_FIRST_PORT} or higher"
            )


def _check_folder(folder: Path, uid: int) -> None:
    why = ""
    try:
        # The folder that the path currently leads to. The checks below refuse it if anyone but the owner or root could redirect the path.
        real = Path(os.path.realpath(folder, strict=True))
        own = real.stat()
        if not stat.S_ISDIR(own.st_mode) or own.st_uid != uid:
            why = f"is not a folder owned by the kernel's user (uid {uid})"
        elif own.st_mode & _WRITABLE:
            why = f"can be written to by other users (mode {stat.S_IMODE(own.st_mode):04o})"
        for one in real.parents:
            status = one.stat()
            if status.st_uid not in {uid, 0} or (status.st_mode & _WRITABLE and not status.st_mode & stat.S_ISVTX):
                why = why or f"could be replaced by other users, who can write to {one}"
    except OSError as error:
        why = f"cannot be used: {error.strerror}"
    if why:
        raise ValueError(
            f"{folder}, where the kernel's sockets are, {why}; set the kernel's `ip` to a path in a folder that only the kernel's "
            "user can write to, such as Jupyter's runtime folder"
        )


def _check_mounts(folder: Path, pid: int) -> None:
    try:
        same = shows_same_folder(pid, folder)
    except PermissionError:
        same = True  # other users' namespaces are unreadable, so check the folder as usual
    except OSError:
        same = False
    if not same:
        raise ValueError(
            f"the kernel's sockets are in {folder} in its mount namespace, but the broker sees a different folder there; start the kernel "
            "with transport tcp"
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _loopback(ip: object) -> str | None:
    if ip == "localhost":
        return "localhost"
    try:
        address = ipaddress.ip_address("0.0.0.0" if ip == "*" else str(ip))  # noqa: S104 - nothing is bound
    except ValueError:
        return None
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return str(address) if address.is_loopback else None


def _curve(public: object, secret: object) -> tuple[bytes, bytes] | None:
    if public is None and secret is None:
        return None
    if not (_is_curve_key(public) and _is_curve_key(secret)):
        raise ValueError(
            "connection fields curve_publickey and curve_secretkey must each be a key of 40 Z85 characters"
        )
    return str(public).encode(), str(secret).encode()


def _is_curve_key(key: object) -> bool:
    if not isinstance(key, str) or len(key) != 40 or not set(key.encode()) <= set(z85.Z85CHARS):
        return False
    try:
        return len(z85.decode(key)) == 32
    except (ValueError, struct.error):  # five characters can encode more than 32 bits
        return False


def _endpoint(transport: str, ip: str, info: dict[str, Any], field: str) -> str:
    port = info.get(field)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ValueError(f"connection field {field} is {_shown(port)}; expected a port from 1 to 65535")
    if transport == "ipc":
        return f"ipc://{ip}-{port}"
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


# The broker's end of the connection to one kernel's extension. Commands go down a stream, and answers come back as requests.
#
# The broker must know whether the kernel still runs Python code. It writes a keep-alive and checks a moment later whether it was read,
# which takes a step of Python (`BrokerClient.gate`). On a system that cannot tell, every extension counts as alive.


# Between keep-alives while the gate is open, since no decision depends on them then.
OPEN_LINE_S: Final = 3 * PULSE_S
_RESERVED: Final = re.compile(r"\breserved_mib=(\d{1,9})\b", re.ASCII)
_MOST_INPUTS = 64
_QUEUE = 64  # commands that the extension has not read; the connection is closed if there are more


class GateLink:
    """The connection to one kernel's extension. It is replaced by any newer connection from the same kernel."""

    def __init__(self, now_s: float, inputs: Iterable[str] = ()) -> None:
        self.last_pulse_s = now_s
        self.exempt = False  # the running cell declared that it does not use the GPU (`%%cpu`, `%gpu`)
        self.inputs = frozenset(inputs)  # the requests that wait for the user's input, and so use no GPU
        self.closed = False
        self.mute = False  # the last command got no answer in time, and the extension has sent nothing since
        self.detail = ""  # the detail of the last answer
        self.reserved_mib: int | None = None  # the frameworks' memory, if the last answer contains it
        self.stream: Any = None  # the route, with `keep_alive` and `is_read`, once it carries anything
        self._line_s = now_s  # when the last keep-alive was written, or was last seen unread
        self._on_its_way = False  # the last keep-alive may still be unread
        self._numbers = itertools.count(1)
        self._queue: asyncio.Queue[GateCommand | None] = asyncio.Queue(_QUEUE)
        self._answers: dict[int, asyncio.Future[str]] = {}

    def send(
        self,
        verb: GateVerb,
        *,
        sentence: str = "",
        environment: Mapping[str, str] | None = None,
        urgent: bool = False,
        topic: str = "",
    ) -> None:
        """Send a command that needs no answer. If the connection is lost, the command is dropped.

        See GateCommand for `urgent` and `topic`.
        """
        environment = dict(environment or {})
        self._put(GateCommand(verb=verb, sentence=sentence, environment=environment, urgent=urgent, topic=topic))

    async def ask(self, verb: GateVerb, timeout_s: float) -> str:
        """Send a command and return the extension's answer, or "" if none arrives in time. On cancellation, the answer is ignored."""
        if self.closed:
            return ""
        self.reserved_mib = None  # left by an older answer
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._put(GateCommand(verb=verb, number=number))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self.mute = True
            return ""
        finally:
            del self._answers[number]

    def take(self, answer: GateAnswer, now_s: float) -> None:
        """Record an answer or a sign of life from the extension. An answer is ignored if no task is waiting for it any more."""
        self.last_pulse_s = now_s
        self.mute = False
        if answer.number == 0:
            self.exempt = answer.word == "exempt" or (self.exempt and answer.word in ("managed", "input"))
            if answer.word == "input":
                self.inputs = frozenset(answer.detail.split()[:_MOST_INPUTS])
            return
        waiting = self._answers.get(answer.number)
        if waiting is not None and not waiting.done():
            self.detail = answer.detail
            reserved = _RESERVED.search(answer.detail)
            self.reserved_mib = int(reserved[1]) if reserved is not None else None
            waiting.set_result(answer.word)

    def look(self, now_s: float, every_s: float = PULSE_S) -> None:
        """Record whether the extension is reading its stream, and write a keep-alive if the last one is `every_s` seconds old.

        This is called often, and never blocks.
        """
        if self.stream is None or self.closed:
            return
        if self._on_its_way:
            if self.stream.is_read() is False:
                self._line_s = now_s
                return  # silence, so write no further keep-alive until this one is read
            self.last_pulse_s = max(self.last_pulse_s, self._line_s)
            self._on_its_way = False
        if now_s - self._line_s >= every_s and self.stream.keep_alive():
            self._on_its_way, self._line_s = True, now_s

    def was_read(self) -> bool:
        return not self.closed and self._queue.empty() and self.stream is not None and self.stream.is_read() is True

    def forgive(self, seconds: float, now_s: float) -> None:
        """Forgive `seconds` of silence, during which the broker was not checking the connection or the process was stopped."""
        self.last_pulse_s = min(now_s, self.last_pulse_s + seconds)
        self._line_s = min(now_s, self._line_s + seconds)

    async def next(self) -> GateCommand | None:
        if self.closed and self._queue.empty():
            return None
        return await self._queue.get()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_result("")
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    def _put(self, command: GateCommand) -> None:
        if self.closed:
            return
        if self._queue.full():
            self.close()
            return
        self._queue.put_nowait(command)
