"""Every decoder of what others wrote, as a function of bytes: it returns, or it failed in a way that nothing expects.

A decoder may refuse in the one way that it says; then the refusal is checked, too. What arrives over a line in pieces is
decoded whole and byte by byte, and both must come to the same. The fuzzer (tests/fuzz/fuzz.py) and the ordinary tests
(tests/fuzz/test_targets.py) run the same functions.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec

from fractional_gpu.broker.kernels.connection import Connection, connection_from_json
from fractional_gpu.broker.kernels.iopub import IOPubWatch
from fractional_gpu.broker.persistence.ledger_writer import read_learnt
from fractional_gpu.client import http
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.config import hub, values
from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.engines.engine import EngineError
from fractional_gpu.engines.pod_seats import request_of
from fractional_gpu.engines.pods import Pod
from fractional_gpu.gpu import worker, worker_process, worker_service
from fractional_gpu.gpu.interface import GPUError
from fractional_gpu.host import process, workload
from fractional_gpu.jupyter.kernel_command import parse_kernel_config
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord, LedgerError
from fractional_gpu.protocol.codec import decode_json, decode_reply, decode_request, error_body
from fractional_gpu.protocol.errors import (
    BadRequestError,
    FractionalGPUError,
    InternalBrokerError,
    RequestTooLargeError,
)
from fractional_gpu.protocol.messages import (
    AcquireRequest,
    AttachRequest,
    Done,
    DrainRequest,
    EvictRequest,
    GateAnswer,
    GateCommand,
    GateHello,
    LeaseRequest,
    MoveRequest,
    PinRequest,
    Pong,
    ResizeRequest,
)
from fractional_gpu.protocol.names import decode_acting_for, refusal
from fractional_gpu.protocol.seats import OfferRequest, PoolChange, SeatRequest
from fractional_gpu.protocol.status import HostStatus
from tests.support.records import a_record

__all__ = ["TARGETS"]

REQUESTS = (
    LeaseRequest,
    AttachRequest,
    AcquireRequest,
    GateHello,
    GateAnswer,
    PinRequest,
    ResizeRequest,
    DrainRequest,
    MoveRequest,
    EvictRequest,
    Done,
    SeatRequest,
    OfferRequest,
    PoolChange,
)
SETTINGS: tuple[Callable[[object], object], ...] = (
    values.duration(),
    values.or_word("never", values.duration(least_ms=1000)),
    values.memory,
    values.host_memory,
    values.fraction,
    values.fractions,
    values.or_word("unlimited", values.number(1, 1000)),
    values.number(0, 10),
    values.choice({"cap": 1, "use": 2}),
    values.limits,
    values.group_limits,
    values.boolean,
    values.whole_number(0, 10),
    values.device_references,
    values.log_level,
    values.path("/a"),
    values.metrics_address,
    hub.hours,
)


def _is_short(error: Exception, most: int) -> None:
    """Bytes may not fill a log through the error about them."""
    assert len(str(error)) < most


def request(data: bytes) -> None:
    """The body of a request, its kind chosen by the first byte."""
    kind = REQUESTS[data[0] % len(REQUESTS)] if data else Done
    try:
        message = decode_request(data[1:], kind)
    except (BadRequestError, RequestTooLargeError) as error:
        said = error_body(error)["error"]["message"]
        assert said.isprintable()
        assert len(said) < 5000, said
        return
    assert type(message) is kind
    json.dumps(msgspec.to_builtins(message))  # what is believed can be written down


class Canned:
    """A socket's double: it answers with these bytes in pieces, and then hangs up."""

    def __init__(self, data: bytes, size: int) -> None:
        self._raw = _Pieces(data, size)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the reading end."""
        return io.BufferedReader(self._raw)

    def sendall(self, _data: bytes) -> None:
        """Take what is asked."""

    def settimeout(self, _seconds: float | None) -> None:
        """Wait for nothing."""

    def shutdown(self, _how: int) -> None:
        """Nothing to wake."""

    def close(self) -> None:
        """Nothing to free."""


class _Pieces(io.RawIOBase):
    def __init__(self, data: bytes, size: int) -> None:
        self._data = io.BytesIO(data)
        self._size = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - whatever io passes
        part = self._data.read(min(self._size, len(buffer)))
        buffer[: len(part)] = part
        return len(part)


def _said(ask: Callable[[BrokerClient], object], data: bytes, size: int) -> tuple[type, str]:
    with mock.patch.object(http, "_connect", return_value=Canned(data, size)):
        client = BrokerClient("/nowhere", timeout_s=0)
        try:
            answer = ask(client)
        except FractionalGPUError as error:
            return type(error), str(error)
        finally:
            client.close()
    return type(answer), repr(answer)


def reply(data: bytes) -> None:
    """The bytes of a reply, to the client."""
    whole = _said(lambda client: client.ping(), data, 1 << 20)
    assert whole == _said(lambda client: client.ping(), data, 1)
    assert issubclass(whole[0], Pong | FractionalGPUError)


def stream(data: bytes) -> None:
    """The bytes of a gate's stream, to the client."""

    def obey(client: BrokerClient) -> list[GateCommand]:
        commands = list(client.gate("lease", GateHello(version="1", open=True, busy=False)))
        for command in commands:
            assert isinstance(command.verb, str)
            assert type(command.number) is int
            assert all(isinstance(text, str) for pair in command.environment.items() for text in pair)
        return commands

    assert _said(obey, data, 1 << 20) == _said(obey, data, 1)


def status(data: bytes) -> None:
    """A reply of many parts."""
    try:
        payload = decode_json(data)
        decode_reply(payload, HostStatus)
    except InternalBrokerError as error:
        _is_short(error, 500)


def _watch() -> IOPubWatch:
    watch = object.__new__(IOPubWatch)  # no sockets: frames are given
    connection = Connection(iopub="tcp://127.0.0.1:9", shell="tcp://127.0.0.1:9", key=b"k", digest="sha256", curve=None)  # noqa: S604
    vars(watch).update(
        _connection=connection,
        _busy={},
        _cells=set(),
        _probes={"probe": ""},
        is_certain=True,
        _topic=b"kernel.x.status",
    )
    return watch


def iopub(data: bytes) -> None:
    """The frames of an IOPub message, cut at 0xFF: signed as the kernel would, and as they are."""
    frames = data.split(b"\xff")
    watch = _watch()
    watch._take(frames)
    watch._take([b"kernel.x.status", b"<IDS|MSG>", watch._sign(frames[:4]), *frames])
    assert all(isinstance(text, str) and len(text) <= 200 for pair in watch._busy.items() for text in pair)
    assert isinstance(watch.busy, bool)


def connection(data: bytes) -> None:
    """The contents of a connection file."""
    payload = _json(data)
    try:
        found = connection_from_json(payload)
    except ValueError as error:
        _is_short(error, 500)
        return
    assert found.iopub.startswith(("tcp://127.", "tcp://localhost", "tcp://[", "ipc:///"))


def _json(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data.decode("latin-1")


class _NoDriver:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        def act(pid: int, *_: object) -> None:
            raise AssertionError(f"{name} of {pid}: no such process was meant")

        return act


def worker_request(data: bytes) -> None:
    """A request to the checkpoint worker."""
    answer = json.dumps(worker._answer(cast("Any", _NoDriver()), cast("Any", _NoDriver), data))
    worker_process.parse(answer.encode(), worker_process.Reply)


def worker_reply(data: bytes) -> None:
    """A reply of the checkpoint worker or of its service."""
    try:
        str(worker_process.parse(data, worker_process.Reply).failure())
    except (GPUError, ConnectionResetError) as error:
        str(error)


def service_request(data: bytes) -> None:
    """A broker's message to the service of the checkpoint worker."""
    service = worker_service.WorkerService("/nowhere/s", "simulated")
    try:
        service._check(worker_process.parse(data, worker_process.Request), 1)
    except (GPUError, ConnectionResetError) as error:
        str(error)


def pod(data: bytes) -> None:
    """A line of a watch of pods."""
    try:
        request_of(msgspec.convert(_json(data), Pod))
    except (EngineError, msgspec.ValidationError) as error:
        str(error)


GOOD_RECORD: Mapping[str, Any] = msgspec.to_builtins(a_record())


def ledger(data: bytes) -> None:
    """The document of a lease in which some fields hold anything: `{"field": value}`."""
    changes = _json(data)
    document = {**GOOD_RECORD, **(changes if isinstance(changes, dict) else {"spec": changes})}
    reader = object.__new__(Ledger)
    reader.path = Path("/nowhere")
    try:
        record = reader._record(cast("Any", {"id": "a", "document": json.dumps(document)}), LeaseRecord)
    except LedgerError:
        return
    assert record.spec.lease_id is not None
    json.dumps(msgspec.to_builtins(record))


def learnt(data: bytes) -> None:
    """What forecasts were kept."""
    try:
        again = read_learnt(data.decode(errors="replace"), Forecasts)
    except ValueError:
        return
    msgspec.json.encode(again)


def settings(data: bytes) -> None:
    """The value of a setting, which one is chosen by the first byte."""
    parse = SETTINGS[data[0] % len(SETTINGS)] if data else values.boolean
    try:
        parse(_json(data[1:]))
    except ValueError as error:
        _is_short(error, 2000)


def kernelspec(data: bytes) -> None:
    """The stanza of a kernelspec."""
    stanza = _json(data)
    try:
        parse_kernel_config(
            stanza if isinstance(stanza, dict) else {"fraction": stanza}, default_pool="p", default_fraction="1/4"
        )
    except BadRequestError as error:
        _is_short(error, 2000)


def headers(data: bytes) -> None:
    """The headers of ours in a request."""
    text = data.decode("latin-1")
    assert refusal(client=text).isascii()
    try:
        name = decode_acting_for(text.split("\n"))
    except BadRequestError:
        return
    assert name is not None
    assert name.isprintable()


def _variable(data: bytes) -> None:
    """A variable is found whether its environment comes in one piece or byte by byte."""
    whole = process._find_variable(iter([data]), b"A")
    assert process._find_variable((data[at : at + 1] for at in range(len(data))), b"A") == whole


def proc(data: bytes) -> None:
    """What /proc shows of a process, which chooses its own name."""
    for parse in (process.parse_stat, process.parse_uid, _variable):
        try:
            parse(data)
        except ValueError as error:
            _is_short(error, 2000)
    name = data.replace(b"\\", b"").replace(b"\n", b"")
    assert process.parse_uid(b"Name:\t" + name + b"\nUmask:\t0022\nUid:\t7\t7\t7\t7\n") == 7
    named = b"7 (" + data.replace(b"\0", b"") + b") S 1 2 3 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 99 0"
    stat = process.parse_stat(named)
    assert (stat.pid, stat.ppid, stat.session, stat.start_time) == (7, 1, 3, 99)
    workload.parse_workload(data)
    below = b"0::/user.slice/user-7.slice/" + data.replace(b"\n", b"") + b"\n"
    assert workload.parse_workload(below) is None, "users name the groups below one that was delegated to them"


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    function.__name__: function
    for function in (
        request, reply, stream, status, iopub, connection, worker_request, worker_reply, ledger, learnt, settings, kernelspec,
        headers, proc, service_request, pod,
    )
}  # fmt: skip


def seeds() -> Iterator[tuple[str, bytes]]:
    """Yield well-formed inputs of each target, with which the fuzzer starts."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    line = b'{"verb":"close","number":3,"environment":{"A":"b"}}\n'
    yield "request", b'\x00{"fraction_milli":250,"label":"x","memory_mib":null}'
    yield "request", b'\x01{"pid":1,"start_time":2,"boot_id":"b","connection":{"ip":"127.0.0.1"}}'
    pong = b'{"version":"1","protocol":1,"pid":5,"simulated":false}'
    yield "reply", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(pong), pong)
    yield "reply", head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(pong), pong)
    yield "reply", b'HTTP/1.1 429 Too\r\nRetry-After: 99\r\nContent-Length: 29\r\n\r\n{"error":{"code":"too-many"}}'
    yield "stream", head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(line), line)
    yield (
        "status",
        b'{"version":"1","pid":1,"simulated":true,"socket":"s","host_budget_mib":1,"host_saved_mib":0,"devices":[],"leases":[]}',
    )
    yield (
        "iopub",
        b'{"msg_type":"status"}\xff{"msg_id":"m","msg_type":"execute_request"}\xff{}\xff{"execution_state":"busy"}',
    )
    yield "iopub", b"topic\xff<IDS|MSG>\xffno signature\xff{}\xff{}\xff{}\xff{}"
    yield "iopub", b'{}\xff{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}\xff{}\xff{}"
    yield "iopub", b'{"msg_type":"status"}\xffnull\xff{}\xff{"execution_state":"starting"}'
    yield (
        "connection",
        b'{"transport":"tcp","ip":"127.0.0.1","iopub_port":1,"shell_port":2,"key":"k","signature_scheme":"hmac-sha256"}',
    )
    yield (
        "worker_request",
        b'{"op":"lock","target":{"boot_id":"b","pid":999999999,"start_time":3},"timeout_ms":5,"deadline_s":1}',
    )
    yield "service_request", b'{"backend":"simulated:/x","pid":1}'
    yield "worker_reply", b'{"protocol":1}'
    yield "pod", b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"7"}}}'
    yield "pod", b'{"type":"ERROR","object":{"code":410,"message":"old"}}'
    added = {
        "metadata": {
            "uid": "u",
            "namespace": "n",
            "name": "p",
            "annotations": {"fractional-gpu.jupyter.org/pool": "a"},
        },
        "spec": {"containers": [{"resources": {"limits": {"fractional-gpu.jupyter.org/a": "1k"}}}]},
        "status": {"phase": "Running"},
    }
    yield "pod", json.dumps({"type": "ADDED", "object": added}).encode()
    yield "worker_reply", b'{"state":null,"elapsed_us":1,"error":{"code":"x","message":"y"}}'
    yield "ledger", b'{"state":"suspended","device_ids":"[\\"a\\"]","pid":3}'
    yield "learnt", msgspec.json.encode(Forecasts())
    yield "settings", b'\x00"30s"'
    yield "settings", b'\x0a{"gpus":2}'
    yield "kernelspec", b'{"pool":"p","fraction":"1/4","memory":"20GiB","devices":1,"priority":0}'
    yield "headers", b"0.1.0; protocol=1"
    yield "proc", b"0::/system.slice/slurmstepd.scope/job_12/step_0"
    yield "proc", b"7 (x) S 1 2 3 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 99 0"
