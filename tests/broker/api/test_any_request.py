"""Any bytes sent to any route get one JSON answer, and never an internal error."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fractional_gpu.protocol.routes import ROUTES as ALL_ROUTES
from tests.broker.live import Answer, LiveBroker

pytestmark = pytest.mark.promise("any-bytes")

ABOUT = "/v1/leases"
ROUTES: Mapping[str, type[Any]] = {
    route.path.removeprefix(ABOUT).removeprefix("/{lease}"): route.request_type
    for route in ALL_ROUTES
    if route.method == "POST" and route.path.startswith(ABOUT)
}
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text()
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)
LIKELY = {
    "fraction_milli": st.integers(-10, 1100),
    "pool": st.sampled_from(["default", "", "gold"]),
    "gated": st.booleans(),
    "wait_ms": st.integers(max_value=1),  # a wait that is granted would only slow the test down
    "pid": st.integers(-1, 50),
    "number": st.integers(-1, 5),
    "connection": st.dictionaries(st.sampled_from(["ip", "iopub_port", "shell_port", "key", "transport"]), JSON),
}


def _value(field: str) -> st.SearchStrategy[object]:
    likely = LIKELY.get(field)
    if likely is None:
        return JSON
    return likely if field == "wait_ms" else likely | JSON


def _bodies(kind: type[Any]) -> st.SearchStrategy[bytes]:
    names = list(kind.__struct_fields__)
    fitting = st.fixed_dictionaries({}, optional={name: _value(name) for name in [*names, "unknown"]})
    whole = st.fixed_dictionaries({name: _value(name) for name in names})
    return st.binary(max_size=200) | (fitting | whole | JSON).map(lambda value: json.dumps(value).encode())


REQUESTS = st.sampled_from(sorted(ROUTES)).flatmap(lambda route: st.tuples(st.just(route), _bodies(ROUTES[route])))


def _check(answer: Answer) -> None:
    assert 200 <= answer.status < 500, answer
    if answer.status >= 400:
        assert answer.error["code"] != "internal"
        assert 0 < len(answer.error["message"]) < 2000
        assert answer.error["message"].isprintable(), answer


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=REQUESTS)
def test_any_body_gets_one_answer(live: LiveBroker, request: tuple[str, bytes]) -> None:
    route, body = request
    lease = live.lease()
    try:
        if not route:
            answer = live.call("POST", "/v1/leases", body)
            if answer.status == 200:
                live.call("DELETE", f"/v1/leases/{answer.body['lease_id']}")
        else:
            answer = live.call("POST", f"/v1/leases/{lease.lease_id}{route}", body, token=lease.token)
        _check(answer)
        assert live.is_alive()
    finally:
        live.call("DELETE", f"/v1/leases/{lease.lease_id}")


TARGETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60).map(lambda text: "/" + text)
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"]) | st.from_regex(
    r"[A-Z]{1,12}", fullmatch=True
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=METHODS, target=TARGETS | st.sampled_from(["/v1/ping", "/v1/status", "/v1/leases", "/v1/leases/x/gate"]))
def test_any_target_and_method_get_one_answer(live: LiveBroker, method: str, target: str) -> None:
    request = f"{method} {target} HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n".encode()
    head, _, body = live.raw(request).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if method != "HEAD" and body:
        _check(Answer(status, json.loads(body)))
    assert status < 500
    assert live.is_alive()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=300)
    | st.binary(max_size=100).map(lambda junk: b"GET /v1/ping HTTP/1.1\r\n" + junk + b"\r\n\r\n")
)
def test_any_bytes_on_the_socket_leave_the_broker_alive(live: LiveBroker, data: bytes) -> None:
    live.raw(data, end=True)
    assert live.is_alive()
