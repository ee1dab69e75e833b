"""Any bytes on the socket get a reply or are hung up on, and byte by byte the same as in one piece."""

import re
import socket

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.broker.live import DEADLINE_S, LiveBroker

pytestmark = pytest.mark.promise("any-bytes")

BODY = b'{"fraction_milli":0}'
PIECES = [
    b"GET /v1/ping HTTP/1.1\r\nHost: b\r\n\r\n",
    b"GET /v1/ping HTTP/1.0\r\n\r\n",
    b"POST /v1/leases HTTP/1.1\r\nHost: b\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"POST /v1/leases HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(BODY), BODY),
    b"GET /v1/leases/nobody HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer x\r\n\r\n",
    b"GET /\x1b[2J\xff HTTP/1.1\r\nHost: b\r\n\r\n",
    b"X-Acting-For: \xff\r\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
]
BYTES = st.lists(st.sampled_from(PIECES) | st.binary(max_size=30), max_size=4).map(b"".join)


def said(live: LiveBroker, data: bytes, size: int, *, end: bool = True) -> bytes:
    """Send so many bytes at a time, say that this was all (`end`), and return what came."""
    received = b""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(DEADLINE_S)
        line.connect(live.socket)
        try:
            for start in range(0, len(data), size):
                line.sendall(data[start : start + size])
            if end:
                line.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # hung up in the middle of it
        try:
            while part := line.recv(65536):
                received += part
        except ConnectionResetError:
            pass
    return re.sub(rb"\r\nDate: [^\r]*", b"", received)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BYTES)
@example(b"".join(PIECES[:4]))
@example(PIECES[5])
def test_any_bytes_get_the_same_in_one_piece_and_byte_by_byte(live: LiveBroker, data: bytes) -> None:
    whole, pieces = said(live, data, 1 << 20), said(live, data, 1)
    statuses = [int(code) for code in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", whole)]
    assert all(200 <= code < 500 for code in statuses), whole
    # What was answered before the hang-up may be lost on the way: who ends a line without reading it wants no answer.
    assert whole.startswith(pieces) or pieces.startswith(whole)
    assert live.is_alive()


@pytest.mark.parametrize("data", PIECES[:5])
def test_what_is_a_request_is_answered_in_both_ways(live: LiveBroker, data: bytes) -> None:
    data = data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    whole, pieces = said(live, data, 1 << 20, end=False), said(live, data, 1, end=False)
    assert whole == pieces
    assert whole.startswith(b"HTTP/1.1 ")
