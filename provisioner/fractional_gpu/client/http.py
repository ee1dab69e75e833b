"""The little HTTP/1.1 that the lease API needs, over a UNIX socket, by hand.

Why by hand: every kernel imports this. `http.client` brings the whole `email` package with it, which no kernel has
loaded; this file brings nothing new.

Rules: one request is under way on a connection at a time; a connection that did not finish cleanly (error, interrupt,
a stream left early) is closed, never used again; everything read has a limit. Replies with Content-Length, chunked
replies and replies that end with the connection are understood.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from fractional_gpu.client.broker_process import listener_pid, not_answering
from fractional_gpu.protocol.errors import (
    BadRequestError,
    BrokerUnavailableError,
    InternalBrokerError,
    RequestTooLargeError,
)
from fractional_gpu.protocol.limits import (
    IDLE_S,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    MAX_STRING,
    VERSION_HEADER,
)
from fractional_gpu.protocol.versions import OWN, Version, from_header

__all__ = ["Call", "Connection"]

_open_socket = socket.socket  # a cell may replace it in its module, and its kernel must still be heard

MAX_REPLY_BYTES = 32 * 1024 * 1024  # a whole host's status
MAX_LINE_BYTES = 8 * 1024 * 1024  # one line of a stream: a whole host again
_BACKLOG_RETRY_S = 0.02
_VERSION = f"{VERSION_HEADER}: {OWN.to_header()}"
_LONGEST_RETRY_S = 30.0
_LONGEST_IDLE_S = IDLE_S / 2
_LONGEST_NUMBER = 15  # digits


class Connection:
    """One connection to the broker. Not for two threads at once; `abort` alone may be called from another thread.

    `timeout_s` bounds each wait for the broker in seconds; None waits for ever. Raises BrokerUnavailableError when
    nobody listens at `path`, or no socket can be had.
    """

    def __init__(self, path: str, timeout_s: float | None) -> None:
        self.path = path
        self.pid = os.getpid()  # a fork's child must not speak on its parent's connection
        self.status = 0
        self.answered = False  # the first byte of the last request's reply has come
        self._headers: dict[str, str] = {}
        self._used_s = time.monotonic()
        self._socket = _connect(path, timeout_s)
        self._reader = self._socket.makefile("rb")

    def close(self) -> None:
        """Close this end only: harmless in a forked child."""
        self._reader.close()
        self._socket.close()

    def abort(self) -> None:
        """Wake whoever is blocked reading (it sees the end of the stream). Safe from any thread."""
        if self.pid == os.getpid():
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # already closed: nobody is blocked

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound each following wait, in seconds."""
        self._socket.settimeout(timeout_s)

    def is_idle(self) -> bool:
        """Whether a kept-alive connection can carry another request: still open, ours, and nothing unasked in it.

        One that the broker may be closing at this moment, because it was not used for long, cannot.
        """
        if self.pid != os.getpid() or time.monotonic() - self._used_s > _LONGEST_IDLE_S:
            return False
        self._socket.settimeout(
            0
        )  # with a timeout Python would wait for it before it looks; the next call sets its own
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the end of the stream, or bytes that nobody asked for

    def send(
        self,
        method: str,
        target: str,
        token: str | None,
        body: bytes | None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Send one request; `headers` are further ones, each one line of printable ASCII.

        Raises BrokerUnavailableError when the broker is gone or takes nothing in time.

        Raises BadRequestError or RequestTooLargeError, before anything is sent, for what the broker could not read.
        """
        if token is not None and not (0 < len(token) <= MAX_STRING and token.isascii() and token.isprintable()):
            raise BadRequestError(
                f"the lease's token is not one line of 1 to {MAX_STRING} printable characters; its file was changed: "
                "remove it (a kernel is known without it), and try again",
                reason="bad-token",
            )
        if body is not None and len(body) > MAX_BODY_BYTES:
            raise RequestTooLargeError(f"the request has {len(body)} bytes; allowed: {MAX_BODY_BYTES}")
        lines = [f"{method} {target} HTTP/1.1", "Host: broker", "Accept: application/json", _VERSION]
        if token is not None:
            lines.append(f"Authorization: Bearer {token}")
        lines.extend(f"{name}: {value}" for name, value in headers.items())
        if body is not None:
            lines.append("Content-Type: application/json")
        if body is not None or method == "POST":
            lines.append(f"Content-Length: {len(body or b'')}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self.status, self.answered, self._headers = 0, False, {}
        self._used_s = time.monotonic()
        try:
            self._socket.sendall(head + (body or b""))
        except (BrokenPipeError, ConnectionResetError):
            return  # the broker may have said why before it hung up: reading tells, and raises what this would have
        except OSError as error:
            raise self._broken(error) from error

    def read_head(self) -> None:
        """Read the reply's status line and headers into `status`.

        Raises BrokerUnavailableError, InternalBrokerError.
        """
        status_line = self._line(MAX_HEADER_BYTES)
        parts = status_line.split(None, 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or len(parts[1]) != 3 or not parts[1].isdigit():
            raise InternalBrokerError(f"what answers at {self.path} is not a broker: it does not speak HTTP/1.1")
        self.status = int(parts[1])
        total = len(status_line)
        while line := self._line(MAX_HEADER_BYTES).rstrip(b"\r\n"):
            total += len(line)
            if total > MAX_HEADER_BYTES:
                raise InternalBrokerError(f"the broker's answer has headers of more than {MAX_HEADER_BYTES} bytes")
            name, _, value = line.partition(b":")
            self._headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
        if self._headers.get("connection", "").lower() == "close" or parts[0] == b"HTTP/1.0":
            self._headers["connection"] = "close"

    @property
    def version(self) -> Version | None:
        """Which version answered, if it said so."""
        return from_header(self._headers.get(VERSION_HEADER.lower()))

    @property
    def retry_s(self) -> float:
        """After how many seconds the broker wants to be asked again."""
        text = self._headers.get("retry-after", "")
        return (
            float(min(int(text), _LONGEST_RETRY_S))
            if text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER
            else 1.0
        )

    @property
    def keeps_alive(self) -> bool:
        """Whether the broker keeps the connection open after this reply."""
        return self._headers.get("connection") != "close" and (self._is_chunked or self._length is not None)

    def read_body(self) -> bytes:
        """Return the whole body. Raises BrokerUnavailableError (cut short) and InternalBrokerError (too long)."""
        length = self._length
        if length is not None and not self._is_chunked:
            if length > MAX_REPLY_BYTES:
                raise InternalBrokerError(f"the broker's answer is longer than {MAX_REPLY_BYTES} bytes")
            return self._exactly(length)
        parts: list[bytes] = []
        total = 0
        for part in self._parts():
            total += len(part)
            if total > MAX_REPLY_BYTES:
                raise InternalBrokerError(f"the broker's answer is longer than {MAX_REPLY_BYTES} bytes")
            parts.append(part)
        return b"".join(parts)

    def lines(self) -> Iterator[bytes]:
        """Yield the non-empty lines of a streamed body, as they come, until the broker ends it in an orderly way."""
        rest = b""
        for part in self._parts():
            *whole, rest = (rest + part).split(b"\n")
            yield from (line for line in whole if line.strip())
            if len(rest) > MAX_LINE_BYTES:
                raise InternalBrokerError(f"the broker sent a line of more than {MAX_LINE_BYTES} bytes")
        if rest.strip():
            yield rest

    @property
    def _is_chunked(self) -> bool:
        return self._headers.get("transfer-encoding", "").lower() == "chunked"

    @property
    def _length(self) -> int | None:
        if self.status in {204, 304}:
            return 0
        text = self._headers.get("content-length", "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER else None

    def _parts(self) -> Iterator[bytes]:
        """Yield pieces of the body as they arrive."""
        if not self._is_chunked:
            while part := self._some():
                yield part
            return
        while True:
            size_text = self._line(MAX_HEADER_BYTES).split(b";")[0].strip()
            try:
                size = int(size_text, 16)
            except ValueError:
                raise InternalBrokerError(
                    "the broker's answer is cut into chunks in a way that HTTP does not know"
                ) from None
            if not 0 <= size <= MAX_REPLY_BYTES:
                raise InternalBrokerError(f"the broker's answer is longer than {MAX_REPLY_BYTES} bytes")
            if size == 0:
                while self._line(MAX_HEADER_BYTES).rstrip(b"\r\n"):  # trailers
                    pass
                return
            yield self._exactly(size)
            self._line(MAX_HEADER_BYTES)

    def _line(self, limit: int) -> bytes:
        try:
            line = self._reader.readline(limit + 1)
        except OSError as error:
            raise self._broken(error) from error
        if len(line) > limit:
            raise InternalBrokerError(f"the broker's answer has a line of more than {limit} bytes")
        if not line.endswith(b"\n"):
            raise self._broken(None)
        self.answered = True
        return line

    def _exactly(self, size: int) -> bytes:
        try:
            data = self._reader.read(size)
        except OSError as error:
            raise self._broken(error) from error
        if len(data) < size:
            raise self._broken(None)
        return data

    def _some(self) -> bytes:
        try:
            return self._reader.read1(64 * 1024)
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError | None) -> BrokerUnavailableError:
        if isinstance(error, TimeoutError):
            seconds = self._socket.gettimeout() or 0.0
            return BrokerUnavailableError(
                not_answering(self.path, seconds, listener_pid(self._socket)), reason="timeout"
            )
        what = f": {error.strerror}" if error is not None and error.strerror else ""
        return BrokerUnavailableError(f"the GPU broker at {self.path} closed the connection{what}", reason="hung-up")


class Call:
    """One call, on whichever connections it is made. `give_up` may be called from another thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()  # the lock of an event may be held when a child is forked
        self._given_up = threading.Event()
        self._connection: Connection | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants its answer any more."""
        return self._given_up.is_set()

    def use(self, connection: Connection | None) -> None:
        """Go on on this connection (None: on none). Raises BrokerUnavailableError if the call is given up."""
        self._connection = connection
        if connection is not None:
            self._check()

    def pause(self, seconds: float) -> None:
        """Wait. Raises BrokerUnavailableError, at once, if the call is given up."""
        self._given_up.wait(seconds)
        self._check()

    def give_up(self) -> None:
        """Wake it, whatever it waits for: it raises BrokerUnavailableError, and sends nothing more."""
        if self._pid == os.getpid():
            self._given_up.set()  # first: a connection that is taken from now on is looked at by `use`
            if (connection := self._connection) is not None:
                connection.abort()

    def _check(self) -> None:
        if self.is_given_up:
            raise BrokerUnavailableError("the call to the GPU broker was given up", reason="hung-up")


def _connect(path: str, timeout_s: float | None) -> socket.socket:
    """Return a connected socket.

    A full backlog (EAGAIN on UNIX sockets, where TCP would wait) is waited out until the timeout. Raises BrokerUnavailableError,
    with the reason "no-descriptor" where it is this process that cannot have a socket: that says nothing of the broker.
    """
    try:
        sock = _open_socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        why = f"this process can open no socket to the GPU broker at {path}: {error.strerror}"
        raise BrokerUnavailableError(why, reason="no-descriptor") from error
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                time.sleep(_BACKLOG_RETRY_S)  # nothing signals that the backlog has room again
            else:
                return sock
    except OSError as error:
        sock.close()
        # A full backlog is a broker's that is there, and takes nobody in: another must not be started beside it.
        reasons: dict[type[OSError], str] = {BlockingIOError: "timeout", PermissionError: "no-access"}
        reason = reasons.get(type(error), "no-broker")
        raise BrokerUnavailableError(_why_no_connection(path, error), reason=reason) from error
    except BaseException:
        sock.close()
        raise


def _why_no_connection(path: str, error: OSError) -> str:
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return (
            f"no GPU broker serves at {path}; start one with `jupyter gpu broker`, "
            "or set JUPYTER_GPU_SOCKET to the socket of one that runs"
        )
    if isinstance(error, PermissionError):
        return f"the socket of the GPU broker, {path}, may not be opened by this user; ask the administrator for access"
    if isinstance(error, BlockingIOError) or error.errno == errno.EAGAIN:
        return (
            f"the GPU broker at {path} takes no connections now: it is overloaded or stopped; if it stays so, "
            f"`jupyter gpu broker --restart --socket {path}` replaces it, which loses nothing of any kernel"
        )
    return f"the GPU broker at {path} cannot be reached: {error.strerror or error}"
