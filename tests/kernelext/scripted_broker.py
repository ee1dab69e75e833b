"""The fake broker with streams that a test controls line by line."""

import contextlib
import json
import os
import select
from collections import deque
from typing import Any

from msgspec import to_builtins

from fractional_gpu.protocol.messages import GateCommand, GateVerb, Progress
from fractional_gpu.protocol.status import HostStatus
from tests.support.fake_broker import DEADLINE_S, FakeBroker, FakeLease, _Handler, _host_status
from tests.support.statuses import changed

__all__ = ["LEASE", "TOKEN", "ScriptedBroker", "Stream"]

LEASE = "lease-1"
TOKEN = "token-1"  # noqa: S105 - the fake's
_REQUEST = {"pool": "default", "label": "", "kernel_id": "k", "fraction_milli": 250, "gated": True}


class Stream:
    """One stream that a kernel opened. `send` and `end` may be called from the test's thread."""

    def __init__(self, route: str, body: dict[str, Any]) -> None:
        self.route = route
        self.body = body
        self.hung_up = False
        self._lines: deque[bytes | None] = deque()
        self._wake_read, self._wake_write = os.pipe()

    def send(self, line: Progress | GateCommand | HostStatus) -> None:
        self._put(_encode(line))

    def end(self) -> None:
        self._put(None)

    def break_off(self) -> None:
        """Close the connection in the middle, like a broker that dies."""
        self._put(b"")

    def command(self, verb: GateVerb, number: int = 0, **environment: str) -> None:
        self.send(GateCommand(verb=verb, number=number, environment=environment))

    def granted(self, **environment: str) -> None:
        self._put(_encode(Progress(kind="granted", environment=environment)), None)

    def refused(self, sentence: str, reason: str = "no-room") -> None:
        self._put(_encode(Progress(kind="refused", reason=reason, sentence=sentence)), None)

    def waiting(self, sentence: str, position: int | None = 1) -> None:
        self.send(Progress(kind="waiting", sentence=sentence, position=position))

    def _put(self, *lines: bytes | None) -> None:
        """All in one step: the kernel may disconnect after each."""
        self._lines.extend(lines)
        os.write(self._wake_write, b"x" * len(lines))

    def serve(self, handler: _Handler) -> None:
        """Write lines until the stream ends or the kernel disconnects."""
        connection = handler.connection.fileno()
        try:
            while True:
                ready, _, _ = select.select([connection, self._wake_read], [], [], DEADLINE_S)
                if self._wake_read not in ready:
                    self.hung_up = True
                    return
                os.read(
                    self._wake_read, 1
                )  # before checking the connection: a client that has its answer may disconnect
                line = self._lines.popleft()
                if line is None:
                    with contextlib.suppress(ConnectionError):
                        handler.wfile.write(b"0\r\n\r\n")
                    return
                if not line:
                    return
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
        except ConnectionError:
            self.hung_up = True
        finally:
            os.close(self._wake_read)
            os.close(self._wake_write)


def _encode(line: Progress | GateCommand | HostStatus) -> bytes:
    return json.dumps(to_builtins(line)).encode() + b"\n"


class ScriptedBroker(FakeBroker):
    """Knows one lease. `on_acquire` handles each acquire stream; by default the test does that through `streams`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.leases[LEASE] = FakeLease(request=dict(_REQUEST), token=TOKEN, state="unarmed")
        self.streams: list[Stream] = []
        self.grant_at_once = False

    def handler(self) -> type[_Handler]:
        return _ScriptedHandler

    def add(self, stream: Stream) -> None:
        with self._changed:
            self.streams.append(stream)
            self._changed.notify_all()

    def done(self, stream: Stream) -> None:
        with self._changed:
            if stream.hung_up:
                self.hung_up.append(stream.route)
            self._changed.notify_all()

    def stream(self, route: str, number: int = 1) -> Stream:
        self.wait_for(lambda: len(self._of(route)) >= number)
        return self._of(route)[number - 1]

    def count(self, route: str) -> int:
        return len(self._of(route))

    def answer_to(self, number: int) -> str:
        self.wait_for(lambda: self._answers(number))
        return self._answers(number)[0]

    def words(self, number: int = 0) -> list[str]:
        return self._answers(number)

    def host_status(self, **lease: Any) -> HostStatus:  # noqa: ANN401 - fields of LeaseStatus
        return _host_status(self.path, [changed(self._status(LEASE), **lease)], None)

    def _of(self, route: str) -> list[Stream]:
        return [stream for stream in self.streams if stream.route == route]

    def _answers(self, number: int) -> list[str]:
        return [str(body["word"]) for body in self.bodies("answer") if body["number"] == number]


class _ScriptedHandler(_Handler):
    def _call(self) -> Any:  # noqa: ANN401 - the base's Call
        call = self._last = super()._call()
        return call

    def _stream(self, route: str) -> None:
        broker = self.server.broker
        assert isinstance(broker, ScriptedBroker)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        stream = Stream(route, self._last.body)
        if route == "acquire" and broker.grant_at_once:
            stream.granted()
        broker.add(stream)
        try:
            stream.serve(self)
        finally:
            self.close_connection = True
            broker.done(stream)
