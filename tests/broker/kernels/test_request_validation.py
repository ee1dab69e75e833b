"""Every invalid request gets one JSON error with what was given and what is allowed, and the broker keeps running."""

import json
import threading

import pytest

from fractional_gpu.protocol.codec import decode_request
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES, MAX_STRING
from fractional_gpu.protocol.messages import AttachRequest
from tests.broker.live import LiveBroker

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
        (b'{"fraction_milli": 1e999}', 400, "out of range"),
        (b'{"fraction_milli": ' + b"9" * 5000 + b"}", 400, "out of range"),
        (b"[" * 100_000, 413, "too many values (100000)"),
        (b"[" * 4000, 400, "allowed fields: devices, fraction_milli"),
        (b'"250"', 400, "`str`); allowed fields: devices, fraction_milli"),
        (b"null", 400, "`null`"),
        (b'{"label": [' + b"0," * 5000 + b"0]}", 413, "too many values (5002); the maximum is 4096"),
        (b" " * MAX_BODY_BYTES, 400, "not JSON"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_body_that_is_no_request_is_refused(live: LiveBroker, body: bytes, status: int, says: str) -> None:
    answer = live.call("POST", "/v1/leases", body)
    assert answer.status == status
    assert says in answer.error["message"]


@pytest.mark.parametrize(
    ("connection", "code", "says"),
    [
        ({"a": [[[[[[[[0]]]]]]]]}, "too-large", "$.connection.a.0.0.0.0.0.0.0 is nested deeper than 8 levels"),
        ({"k" * 5000: 1}, "too-large", "is too long (5000 characters); the maximum is 4096"),
        ({"a": {"\0": 1}}, "bad-request", "contains a NUL"),
        ({"a": [1, {"b": 2**63}]}, "bad-request", "$.connection.a.1.b does not fit in 63 bits"),
        ([[0] * 100] * 30, "bad-request", "Expected `object`, got `array` - at `$.connection`"),
        ({"a": [[0] * 100] * 45}, "too-large", "; the maximum is 4096"),
    ],
)
def test_what_may_be_any_object_has_limits_and_the_error_says_where(connection: object, code: str, says: str) -> None:
    body = json.dumps({"pid": 1, "start_time": 1, "boot_id": "b", "connection": connection}).encode()
    with pytest.raises(FractionalGPUError) as raised:
        decode_request(body, AttachRequest)
    assert raised.value.code == code
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("head", "status", "says"),
    [
        (b"Content-Length: %d" % (MAX_BODY_BYTES + 1), b"413", f"the body is too large ({MAX_BODY_BYTES + 1} bytes)"),
        (b"Content-Length: " + b"9" * 400, b"413", f"the maximum is {MAX_BODY_BYTES}"),
        (b"Transfer-Encoding: chunked", b"400", "Content-Length"),
    ],
)
def test_a_body_that_is_too_large_or_of_unknown_length_is_refused_unread(
    live: LiveBroker, head: bytes, status: bytes, says: str
) -> None:
    request = b"POST /v1/leases HTTP/1.1\r\nHost: b\r\n" + head + b"\r\n\r\n"
    for body in (b"", b"1" * (8 * MAX_BODY_BYTES)):  # the answer comes before the body is sent or read
        reply = live.raw(request + body)
        assert reply.startswith(b"HTTP/1.1 %s " % status)
        assert says in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


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
