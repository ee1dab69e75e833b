"""The page's port answers before the service is ready; then the service takes over."""

import http.client
import socket
import threading

import pytest

from fractional_gpu_hub.service import broker_follower
from fractional_gpu_hub.service.broker_follower import StartupPlaceholder
from tests.support.ports import free_port

pytestmark = pytest.mark.promise("accessibility")


def test_an_early_request_is_told_to_repeat_and_none_is_lost() -> None:
    port = free_port()
    early = StartupPlaceholder(f"http://127.0.0.1:{port}")
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/services/gpu/")
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("Retry-After")) == (425, "1")
        assert b"The GPU page is starting" in reply.read()
        connection.close()
    with early.hand_over() as listener, socket.create_connection(("127.0.0.1", port), timeout=30) as late:
        listener.settimeout(30)
        peer, address = listener.accept()
        with peer:
            assert address == late.getsockname(), "who came meanwhile is the service's"


def test_one_who_says_nothing_does_not_keep_the_service_from_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_follower, "_PEER_S", 0.05)
    port = free_port()
    early = StartupPlaceholder(f"http://127.0.0.1:{port}")
    with socket.create_connection(("127.0.0.1", port), timeout=30), early.hand_over() as listener:
        assert listener.getsockname()[1] == port


def test_a_port_that_is_still_held_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
        made: list[StartupPlaceholder] = []
        thread = threading.Thread(target=lambda: made.append(StartupPlaceholder(url)))
        thread.start()
    thread.join(60)
    assert not thread.is_alive()
    with made[0].hand_over() as listener:
        assert url.endswith(f":{listener.getsockname()[1]}")


def test_one_that_stays_held_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_follower, "_PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(OSError, match="in use"):
        StartupPlaceholder(f"http://127.0.0.1:{holder.getsockname()[1]}")
