"""Implements the part of HTTP/1.1 that the lease API needs, over a UNIX socket, and identifies the process listening on the socket.

Every kernel imports this module. It does not use `http.client`, which would add 1.7 ms to the client's import time of 3.2 ms, double the
time of each call, and set no limit on the size of a reply.

Each connection carries one request. The reply's body has a Content-Length or is chunked. All reads are limited in size.
"""

import errno
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from fractional_gpu.protocol.errors import BrokerUnavailableError, InternalBrokerError
from fractional_gpu.protocol.limits import MAX_HEADER_BYTES, VERSION_HEADER
from fractional_gpu.protocol.names import VERSION

ANSWER_S = 5.0  # after this time, users are told that the broker does not answer


def is_service_socket(path: str) -> bool:
    """Return whether the socket belongs to a system service, that is, whether it is under /run but not under /run/user."""
    real = Path(os.path.realpath(path))
    return real.is_relative_to("/run") and not real.is_relative_to("/run/user")


def claim_address(path: str) -> bytes:
    """Return the abstract address claimed by a socket's broker. Links are not followed, since one may have replaced a deleted folder."""
    digest = hashlib.sha256(os.fsencode(Path(path).absolute())).hexdigest()
    return f"\0jupyter-gpu-broker-{digest[:32]}".encode("ascii")


def claim_holder(path: str) -> int | None:
    """Return the pid of this socket's broker, even if the socket was deleted. Return None unless this user or root is running one."""
    from fractional_gpu.host.claims import holder  # noqa: PLC0415 - kernels import this and never look for brokers

    pid, uid = holder(claim_address(path))
    return pid or None if uid in (0, os.geteuid()) else None


def not_answering(path: str, seconds: float, pid: int | None) -> str:
    """Return a sentence about a broker that did not answer within `seconds`. It names the process and its state, and suggests a remedy."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace")
    except OSError:
        status = ""
    if "\nState:\tT" in status:
        remedy = f"that process is stopped; use `kill -CONT {pid}` to continue it"
    elif "\nState:\tt" in status:
        remedy = "a debugger has stopped that process; continue it in the debugger"
    else:
        restart = (
            "an administrator can restart it with `systemctl restart jupyter-gpu`, or on Kubernetes by deleting its pod"
            if is_service_socket(path)
            else f"restart it with `jupyter gpu broker --restart --socket {path}`"
        )
        remedy = f"the machine may be overloaded or the broker stuck. If it is stuck, {restart}; kernels lose nothing"
    who = f"the GPU broker at {path}{f' (process {pid})' if pid is not None else ''}"
    return f"{who} did not answer within {seconds:g} s: {remedy}"


_open_socket = socket.socket  # cells may replace `socket.socket`, but kernels must still reach the broker

MAX_REPLY_BYTES = 32 * 1024 * 1024  # enough for the status of a whole host
MAX_LINE_BYTES = 8 * 1024 * 1024  # a line of a stream, which may also be the status of a whole host
_BACKLOG_RETRY_S = 0.02
_VERSION = f"{VERSION_HEADER}: {VERSION}"
_LONGEST_RETRY_S = 30.0


class Connection:
    """One connection to the broker, for one thread at a time. Any thread may call `abort`.

    `timeout_s` limits each wait for the broker in seconds; None means no limit. Raises BrokerUnavailableError if no broker listens at
    `path`, or if this process cannot open another socket.
    """

    def __init__(self, path: str, timeout_s: float | None) -> None:
        self.path = path
        self.status = 0
        self._headers: dict[str, str] = {}
        self._socket = _connect(path, timeout_s)
        self._reader = self._socket.makefile("rb")

    def close(self) -> None:
        """Close this process's end of the connection. If a forked child does this, its parent can still use the connection."""
        self._reader.close()
        self._socket.close()

    def abort(self) -> None:
        """Wake a thread that is blocked in a read. The thread then sees the end of the stream. Thread-safe."""
        with suppress(OSError):  # already closed: no thread is blocked
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(
        self,
        method: str,
        target: str,
        token: str | None,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> None:
        """Send one request. `headers` are additional headers, each one line of printable ASCII. Raises BrokerUnavailableError."""
        lines = [
            f"{method} {target} HTTP/1.1",
            "Host: broker",
            "Accept: application/json",
            "Connection: close",
            _VERSION,
        ]
        if token is not None:
            lines.append(f"Authorization: Bearer {token}")
        lines.extend(f"{name}: {value}" for name, value in headers.items())
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")  # a token's file may have been changed
        try:
            self._socket.sendall(head + (body or b""))
        except (BrokenPipeError, ConnectionResetError):
            return  # reading returns the reason, if the broker sent it before it hung up, or raises this error
        except OSError as error:
            raise self._broken(error) from error

    def read_head(self, timeout_s: float) -> None:
        """Read the status line and the headers. `timeout_s` limits all later waits.

        Raises BrokerUnavailableError or InternalBrokerError.
        """
        self._socket.settimeout(timeout_s)
        version, status, *_ = [*self._line().split(None, 2), b"", b""]
        if version != b"HTTP/1.1" or len(status) != 3 or not status.isdigit():
            raise InternalBrokerError(
                f"the program listening at {self.path} is not a broker: it does not speak HTTP/1.1"
            )
        self.status = int(status)
        total = 0
        while line := self._line().rstrip(b"\r\n"):
            total += len(line)
            if total > MAX_HEADER_BYTES:
                raise InternalBrokerError(f"the broker's answer has more than {MAX_HEADER_BYTES} bytes of headers")
            name, _, value = line.decode("latin-1").partition(":")
            self._headers[name.strip().lower()] = value.strip()

    @property
    def retry_s(self) -> float:
        """The number of seconds to wait before repeating the request."""
        text = self._headers.get("retry-after", "")
        return min(float(text), _LONGEST_RETRY_S) if text.isascii() and text.isdigit() else 1.0

    def read_body(self) -> bytes:
        """Return the whole body. Raises BrokerUnavailableError if it is cut short, and InternalBrokerError if it is too long."""
        body = bytearray()
        for part in self._parts():
            body += part
            _check_size(len(body))
        return bytes(body)

    def lines(self) -> Iterator[bytes]:
        """Yield the non-empty lines of a streamed body as they arrive, until the broker ends it cleanly."""
        rest = b""
        for part in self._parts():
            *whole, rest = (rest + part).split(b"\n")
            yield from (line for line in whole if line.strip())
            if len(rest) > MAX_LINE_BYTES:
                raise InternalBrokerError(f"the broker sent a line of more than {MAX_LINE_BYTES} bytes")
        if rest.strip():
            yield rest

    def _parts(self) -> Iterator[bytes]:
        if self._headers.get("transfer-encoding", "").lower() != "chunked":
            yield self._exactly(self._size(self._headers.get("content-length", ""), 10))
            return
        while size := self._size(self._line().split(b";")[0], 16):
            yield self._exactly(size)
            self._line()
        while self._line().rstrip(b"\r\n"):  # trailers
            pass

    @staticmethod
    def _size(text: str | bytes, base: int) -> int:
        try:
            size = int(text, base)
        except ValueError:
            raise InternalBrokerError("the broker's answer has no valid Content-Length or chunks") from None
        _check_size(size)
        return size

    def _line(self) -> bytes:
        line = self._receive(self._reader.readline, MAX_HEADER_BYTES + 1)
        if len(line) > MAX_HEADER_BYTES:
            raise InternalBrokerError(f"the broker's answer has a line of more than {MAX_HEADER_BYTES} bytes")
        if not line.endswith(b"\n"):
            raise self._broken(None)
        return line

    def _exactly(self, size: int) -> bytes:
        data = self._receive(self._reader.read, size)
        if len(data) < size:
            raise self._broken(None)
        return data

    def _receive(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError | None) -> BrokerUnavailableError:
        if isinstance(error, TimeoutError):
            seconds = self._socket.gettimeout() or 0.0
            return BrokerUnavailableError(not_answering(self.path, seconds, claim_holder(self.path)), reason="timeout")
        what = f": {error.strerror}" if error is not None and error.strerror else ""
        return BrokerUnavailableError(f"the GPU broker at {self.path} closed the connection{what}", reason="hung-up")


class Call:
    """One call, which may use several connections in turn. Any thread may call `give_up`."""

    def __init__(self) -> None:
        self._pid = os.getpid()  # a fork may happen while the event's lock is held
        self._given_up = threading.Event()
        self._connection: Connection | None = None

    def use(self, connection: Connection) -> None:
        """Continue on this connection. Raises BrokerUnavailableError if the call was given up."""
        self._connection = connection
        self._check()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`. Raises BrokerUnavailableError as soon as the call is given up."""
        self._given_up.wait(seconds)
        self._check()

    def give_up(self) -> None:
        """Make the call raise BrokerUnavailableError, even if it is waiting, and send nothing more."""
        if self._pid == os.getpid():
            # Set the flag first, because `use` checks it for each new connection.
            self._given_up.set()
            if (connection := self._connection) is not None:
                connection.abort()

    def _check(self) -> None:
        if self._given_up.is_set():
            raise BrokerUnavailableError("the call to the GPU broker was cancelled", reason="hung-up")


def _check_size(size: int) -> None:
    if not 0 <= size <= MAX_REPLY_BYTES:
        raise InternalBrokerError(f"the broker's answer is longer than {MAX_REPLY_BYTES} bytes")


def _connect(path: str, timeout_s: float | None) -> socket.socket:
    """Return a connected socket. Wait if the backlog is full. Raises BrokerUnavailableError."""
    try:
        sock = _open_socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        why = f"this process cannot open a socket to the GPU broker at {path}: {error.strerror}"
        raise BrokerUnavailableError(why, reason="no-descriptor") from error
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:  # the backlog is full: TCP would wait, but UNIX sockets fail with EAGAIN
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise
                time.sleep(_BACKLOG_RETRY_S)  # no event signals that the backlog has room again
            else:
                return sock
    except OSError as error:
        sock.close()
        raise _no_connection(path, error) from error
    except BaseException:
        sock.close()
        raise


def _no_connection(path: str, error: OSError) -> BrokerUnavailableError:
    reason = "no-broker"
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        from fractional_gpu.host.workload import own_workload  # noqa: PLC0415 - only if none serves

        start = (
            "an administrator must start the node's"
            if own_workload(os.environ)
            else "start one with `jupyter gpu broker`"
        )
        why = f"no GPU broker is running at {path}; {start}, or set JUPYTER_GPU_SOCKET to the socket of a running one"
    elif isinstance(error, PermissionError):
        reason = "no-access"
        why = f"this user is not permitted to open the GPU broker's socket, {path}; ask the administrator for access"
    elif error.errno == errno.EAGAIN:
        # A full backlog means that a broker runs but accepts no connections. Do not start a second broker.
        reason = "timeout"
        why = (
            f"the GPU broker at {path} is not accepting connections: it is overloaded or stopped. If this lasts, `jupyter gpu broker "
            f"--restart --socket {path}` replaces it; kernels lose nothing"
        )
    else:
        why = f"cannot reach the GPU broker at {path}: {error.strerror or error}"
    return BrokerUnavailableError(why, reason=reason)
