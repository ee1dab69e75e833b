"""Whatever is sent gets one JSON error that says what was given and what is allowed, and the broker lives on."""

import json
import os
import socket
import threading

import pytest

from fractional_gpu.broker.api import lease_routes, server
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES, MAX_STRING
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker

WISH = {"fraction_milli": 250}


@pytest.mark.parametrize(
    ("change", "status", "code", "says"),
    [
        ({"pool": "gold"}, 400, "bad-request", ["'gold'", "default"]),
        ({"fraction_milli": 0}, 400, "bad-request", ["fraction_milli", "0", "1 to 1000"]),
        ({"fraction_milli": 1500}, 400, "bad-request", ["fraction_milli", "1500", "1 to 1000"]),
        ({"fraction_milli": -250}, 400, "bad-request", ["fraction_milli", "-250", "1 to 1000"]),
        ({"fraction_milli": "abc"}, 400, "bad-request", ["`int`", "`str`", "$.fraction_milli"]),
        ({"fraction_milli": 0.25}, 400, "bad-request", ["`int`", "`float`", "$.fraction_milli"]),
        ({"fraction_milli": True}, 400, "bad-request", ["`int`", "`bool`", "$.fraction_milli"]),
        ({"fraction_milli": None}, 400, "bad-request", ["`int`", "`null`", "$.fraction_milli"]),
        ({"fraction_milli": 2**63}, 400, "bad-request", ["$.fraction_milli", "63 bits"]),
        ({"fraction_milli": 10**500}, 400, "bad-request", ["63 bits"]),
        ({"fraction_milli": 260}, 409, "no-room", ["0.26", "1/4"]),
        ({"memory_mib": 0}, 400, "bad-request", ["memory_mib", "0", "1 or more"]),
        ({"memory_mib": 2048}, 400, "bad-request", ["2 GiB", "1 GiB"]),
        ({"memory_mib": 2**62}, 400, "bad-request", ["1 GiB"]),
        ({"memory_mib": -1}, 400, "bad-request", ["memory_mib", "-1", "1 or more"]),
        ({"devices": 2}, 400, "bad-request", ["devices", "2", "1"]),
        ({"priority": 5000}, 400, "bad-request", ["priority", "5000", "-1000 to 1000"]),
        ({"label": "x" * 201}, 413, "too-large", ["label", "201", "200"]),
        ({"kernel_id": "x" * 201}, 413, "too-large", ["kernel_id", "201", "200"]),
        ({"label": "x" * (MAX_STRING + 1)}, 413, "too-large", ["$.label", "4097", "4096"]),
        ({"label": "a\0b"}, 400, "bad-request", ["$.label", "NUL"]),
        ({"pool": "x" * 4000}, 400, "bad-request", ["'xxx", "default"]),
        ({"gated": 1}, 400, "bad-request", ["`bool`", "`int`", "$.gated"]),
        (
            {"memmory_mib": 5},
            400,
            "bad-request",
            ["'memmory_mib'", "devices, fraction_milli", "memory_mib"],
        ),
        ({"x" * 5000: 5}, 400, "bad-request", ["'xxx", "devices"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_wish_that_cannot_be_granted_is_refused_with_what_is_allowed(
    live: LiveBroker, change: dict[str, object], status: int, code: str, says: list[str]
) -> None:
    answer = live.call("POST", "/v1/leases", {**WISH, **change})
    assert (answer.status, answer.error["code"]) == (status, code), answer
    message = answer.error["message"]
    assert all(part in message for part in says), message
    assert len(message) < 600
    assert "\n" not in message


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "`fraction_milli`"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b'{"label": "\\ud800"}', 400, "not JSON"),
        (b'{"fraction_milli": NaN}', 400, "not JSON"),
        (b'{"fraction_milli": 1e999}', 400, "not JSON"),
        (b'{"fraction_milli": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'"250"', 400, "str; allowed: an object with devices, fraction_milli"),
        (b"null", 400, "NoneType"),
        (b'{"label": ' + b"[" * 50 + b"]" * 50 + b"}", 413, "8 levels"),
        (b'{"label": [' + b"0," * 5000 + b"0]}", 413, "$.label has 5001"),
        (b'{"label": {"' + b"k" * 5000 + b'": 1}}', 413, "4096"),
        (b'{"label": {"\\u0000": 1}}', 400, "NUL"),
        (b" " * MAX_BODY_BYTES, 400, "not JSON"),
        (b" " * (MAX_BODY_BYTES + 1), 413, str(MAX_BODY_BYTES)),
        (b" " * (8 * MAX_BODY_BYTES), 413, str(MAX_BODY_BYTES)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_body_that_is_no_request_is_refused(live: LiveBroker, body: bytes, status: int, says: str) -> None:
    answer = live.call("POST", "/v1/leases", body)
    assert answer.status == status
    assert says in answer.error["message"]


def test_a_body_in_chunks_has_the_same_limit(live: LiveBroker) -> None:
    chunk = b"%x\r\n%s\r\n" % (65536, b" " * 65536)
    head = b"POST /v1/leases HTTP/1.1\r\nHost: b\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    head_line, _, body = live.raw(head + chunk * 5 + b"0\r\n\r\n").partition(b"\r\n\r\n")
    assert head_line.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error"]["code"] == "too-large"


def test_a_body_is_json_whatever_it_is_called(live: LiveBroker) -> None:
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data", "multipart/form-data; boundary=x", "\xff"):
        answer = live.call(
            "POST", "/v1/leases", {"fraction_milli": 0}, **{"Content-Type": kind, "Content-Encoding": "gzip"}
        )
        assert answer.error["reason"] == "bad-fraction", kind


def test_headers_have_a_limit(live: LiveBroker) -> None:
    answer = live.call("GET", "/v1/ping", **{"X-Large": "x" * MAX_HEADER_BYTES})
    assert answer.status == 413
    assert str(MAX_HEADER_BYTES) in answer.error["message"]
    assert live.raw(b"GET /v1/ping HTTP/1.1\r\nHost: b\r\nX: " + b"x" * 8 * MAX_HEADER_BYTES) == b"", "hung up on"


@pytest.mark.parametrize(
    ("method", "target", "status", "reason"),
    [
        ("GET", "/", 404, "unknown-route"),
        ("GET", "/v1/", 404, "unknown-route"),
        ("GET", "/v2/ping", 404, "unknown-route"),
        ("GET", "/v1/ping/", 404, "unknown-route"),
        ("GET", "/v1/leases/../ping", 404, "unknown-route"),
        ("GET", "/v1/leases/%00", 404, "unknown-route"),
        ("GET", "/v1/leases/" + "x" * 65, 404, "unknown-route"),
        ("POST", "/v1/leases/nobody/steal", 404, "unknown-route"),
        ("PUT", "/v1/leases", 400, "bad-method"),
        ("DELETE", "/v1/ping", 400, "bad-method"),
        ("GET", "/v1/leases/nobody/attach", 400, "bad-method"),
        ("BREW", "/v1/ping", 400, "bad-method"),
        ("GET", "/v1/leases/nobody", 404, "unknown-lease"),
        ("POST", "/v1/leases/nobody/suspend", 404, "unknown-lease"),
        ("POST", "/v1/leases/nobody/acquire", 404, "unknown-lease"),
    ],
)
def test_a_route_that_is_not_there_or_not_taken_so_is_an_error(
    live: LiveBroker, *, method: str, target: str, status: int, reason: str
) -> None:
    answer = live.call(method, target)
    assert (answer.status, answer.error["reason"]) == (status, reason)


@pytest.mark.parametrize(
    "junk", [b"\0" * 100, b"GET\r\n\r\n", b"\x16\x03\x01junk\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50]
)
def test_what_is_not_http_is_hung_up_on(live: LiveBroker, junk: bytes) -> None:
    assert live.raw(junk, end=True) in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: -1",
        b"Content-Length: abc",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b": no name",
        b"no colon",
    ],
)
def test_headers_that_contradict_themselves_are_hung_up_on(live: LiveBroker, head: bytes) -> None:
    reply = live.raw(b"POST /v1/leases HTTP/1.1\r\nHost: b\r\n" + head + b"\r\n\r\n{}", end=True)
    assert reply == b"" or reply.startswith(b"HTTP/1.1 400 ")


def test_a_body_that_is_cut_short_changes_nothing(live: LiveBroker) -> None:
    before = len(live.call("GET", "/v1/status").body["leases"])
    body = json.dumps(WISH).encode()
    head = b"POST /v1/leases HTTP/1.1\r\nHost: b\r\nContent-Length: %d\r\n\r\n" % (len(body) + 1)
    assert live.raw(head + body, end=True) == b""
    assert len(live.call("GET", "/v1/status").body["leases"]) == before


def test_a_body_that_trickles_is_hung_up_on_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_routes, "BODY_S", 0.3)
    with live_broker() as live, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(DEADLINE_S)
        line.connect(live.socket)
        line.sendall(b'POST /v1/leases HTTP/1.1\r\nHost: b\r\nContent-Length: 100\r\n\r\n{"frac')
        assert live.is_alive()
        assert line.recv(1) == b"", "the broker answered half a request"
        assert live.is_alive()


def test_more_connections_than_allowed_are_turned_away_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS_PER_UID", 3)
    with live_broker() as live:
        lines = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(4)]
        for line in lines:
            line.settimeout(DEADLINE_S)
            line.connect(live.socket)
        head, _, body = lines[3].recv(65536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert json.loads(body)["error"]["reason"] == "too-many-connections"
        assert lines[3].recv(1) == b""
        for line in lines:
            line.close()
        with BrokerClient(live.socket) as client:  # waits and asks again while the broker has not seen the hang-ups yet
            assert client.ping().pid == os.getpid()


def test_a_user_has_a_most_leases(live: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    have = len(live.call("GET", "/v1/status").body["leases"])
    monkeypatch.setattr("fractional_gpu.broker.api.lease_service.MAX_LEASES_PER_UID", have + 1)
    live.lease()
    answer = live.call("POST", "/v1/leases", WISH)
    assert (answer.status, answer.error["code"]) == (413, "too-large")
    assert str(have + 1) in answer.error["message"]


def test_a_label_cannot_steer_the_terminal_that_shows_it(live: LiveBroker) -> None:
    lease = live.lease(label="a\x1b[2Jb\nc·d", kernel_id="k\r1")
    status = live.call("GET", f"/v1/leases/{lease.lease_id}").body
    assert (status["label"], status["kernel_id"]) == ("a?[2Jb?c·d", "k?1")


def test_many_who_hang_up_in_the_middle_leave_the_broker_alone(live: LiveBroker) -> None:
    lease = live.lease()
    request = f"POST /v1/leases/{lease.lease_id}/acquire HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {lease.token}\r\n"

    def hang_up(number: int) -> None:
        for _ in range(10):
            live.raw(request.encode() + b"Content-Length: 2\r\n\r\n{}"[: 10 + number], end=True)

    threads = [threading.Thread(target=hang_up, args=(number,)) for number in range(14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert live.state(lease.lease_id) == "unattached"
