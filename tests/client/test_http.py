"""What answers may be anything: each reply that is no HTTP of ours becomes one clear error, within limits."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fractional_gpu.client import http
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError, InternalBrokerError
from tests.support.descriptors import no_free_descriptors

PONG = b'{"version":"1","protocol":1,"pid":5,"simulated":false}'


def answering(path: Path, reply: bytes) -> tuple[threading.Thread, str]:
    """Serve one connection with these bytes, for any request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, str(path)


@pytest.fixture
def ask(short_path: Path) -> Callable[[bytes], int]:
    def ask(reply: bytes) -> int:
        thread, path = answering(short_path / "s", reply)
        try:
            with BrokerClient(path) as client:
                return client.ping().pid
        finally:
            thread.join()

    return ask


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(PONG), PONG),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n%b\r\n%x;x=y\r\n%b\r\n0\r\nT: 1\r\n\r\n"
        % (PONG[:7], len(PONG) - 7, PONG[7:]),
    ],
    ids=["length", "chunked"],
)
def test_every_way_to_end_a_body_is_understood(ask: Callable[[bytes], int], reply: bytes) -> None:
    assert ask(reply) == 5


@pytest.mark.parametrize(
    ("reply", "error", "says"),
    [
        (b"", BrokerUnavailableError, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", BrokerUnavailableError, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}", BrokerUnavailableError, "closed"),
        (b"SSH-2.0-OpenSSH\r\n", InternalBrokerError, "does not speak HTTP"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + PONG, InternalBrokerError, "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + PONG, InternalBrokerError, "no valid Content-Length or"),
        (b"HTTP/1.1 OK\r\n\r\n", InternalBrokerError, "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{{{", InternalBrokerError, "not JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", InternalBrokerError, "not a Pong"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", InternalBrokerError, "required field .version"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 6\r\n\r\n<html>", InternalBrokerError, "answered 502"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", InternalBrokerError, "longer than"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", InternalBrokerError, "chunks"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", InternalBrokerError, "longer than"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20000 + b"\r\n\r\n", InternalBrokerError, "more than 16384 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000, InternalBrokerError, "more than 16384 bytes"),
    ],
    ids=lambda value: "" if isinstance(value, (bytes, type)) else str(value).replace(" ", "-"),
)
def test_a_bad_reply_is_one_clear_error(
    ask: Callable[[bytes], int], reply: bytes, error: type[FractionalGPUError], says: str
) -> None:
    with pytest.raises(error, match=says):
        ask(reply)


def test_a_chunked_body_may_not_grow_without_end(ask: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_REPLY_BYTES", 10)
    with pytest.raises(InternalBrokerError, match="longer than 10 bytes"):
        ask(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"8\r\n{       \r\n" * 2)


def test_a_full_backlog_is_waited_out_until_the_timeout(short_path: Path) -> None:
    path = str(short_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            with BrokerClient(path, timeout_s=0.1) as client, pytest.raises(BrokerUnavailableError, match="overloaded"):
                client.ping()


@pytest.mark.parametrize(
    ("error", "reason", "says"),
    [
        (PermissionError(13, "Permission denied"), "no-access", "this user is not permitted to open"),
        (OSError(99, "Some reason"), "no-broker", ": Some reason"),
    ],
    ids=["no access", "another error"],
)
def test_a_socket_that_cannot_be_opened_says_why(error: OSError, reason: str, says: str) -> None:
    unavailable = http._no_connection("/run/broker.sock", error)
    assert unavailable.reason == reason
    assert says in str(unavailable)


def test_a_process_without_descriptors_is_told_so_and_not_that_no_broker_serves(short_path: Path) -> None:
    with (
        no_free_descriptors(),
        BrokerClient(str(short_path / "s")) as client,
        pytest.raises(
            BrokerUnavailableError, match=r"cannot open a socket to the GPU broker .*: Too many open files"
        ) as caught,
    ):
        client.ping()
    assert caught.value.reason == "no-descriptor", "a client that finds no broker starts one"
