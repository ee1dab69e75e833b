"""Slow, silent or greedy clients are cut off after a stated time, or refused with the limit, while others are served."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import pytest

from fractional_gpu.broker import cost
from fractional_gpu.broker.api import handler, lease_service, routes, server
from fractional_gpu.broker.clock import TokenBucket
from fractional_gpu.broker.services.status import Viewer, host_status
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol import limits
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.messages import GateVerb
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker, started_for
from tests.support.paths import ROOT
from tests.support.world import until

pytestmark = pytest.mark.promise("hostile", "slow-clients")

PING = b"GET /v1/ping HTTP/1.1\r\nHost: b\r\n"
PAGE = ROOT / "docs" / "limits.md"
SOON_S = 0.4


@contextmanager
def connected(live: LiveBroker) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(DEADLINE_S)
        line.connect(live.socket)
        yield line


def trickle(line: socket.socket, text: bytes) -> bytes:
    """Send a byte at every pause; return what arrived until the broker closed the connection."""
    line.settimeout(0.01)
    received = b""
    for number in range(len(text)):
        try:
            line.sendall(text[number : number + 1])
            part = line.recv(65536)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return received
        if not part:
            return received
        received += part
    raise AssertionError("the broker took all of it")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBroker]:
    """A broker that waits only briefly for requests."""
    monkeypatch.setattr(routes, "IDLE_S", SOON_S)
    monkeypatch.setattr(routes, "BODY_S", SOON_S)
    with live_broker() as live:
        yield live


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBroker]:
    """A broker whose replies must be read at once."""
    monkeypatch.setattr(handler, "TAKEN_S", SOON_S)
    with live_broker() as live:
        yield live


def serves(live: LiveBroker) -> bool:
    """Whether others are served; on a slow machine a question may be too late for a broker this hasty."""

    def ask() -> bool:
        try:
            with BrokerClient(live.socket) as client:
                return client.ping().pid == os.getpid()
        except BrokerUnavailableError:
            return False

    return until(ask, "others are served")


def test_a_head_that_comes_byte_by_byte_is_cut_off_and_delays_no_other(hasty: LiveBroker) -> None:
    with connected(hasty) as line:
        assert trickle(line, PING + b"X-Slow: " + b"x" * 8000) == b""
        assert serves(hasty)


def test_a_body_that_comes_byte_by_byte_is_cut_off(hasty: LiveBroker) -> None:
    with connected(hasty) as line:
        line.sendall(b"POST /v1/leases HTTP/1.1\r\nHost: b\r\nContent-Length: 9000\r\n\r\n")
        assert trickle(line, b" " * 9000) == b""
        assert serves(hasty)


def test_a_connection_that_says_nothing_is_closed(hasty: LiveBroker) -> None:
    with connected(hasty) as line:
        assert serves(hasty)
        assert line.recv(1) == b""


def test_a_connection_that_is_kept_and_not_used_is_closed(hasty: LiveBroker) -> None:
    answer = b""
    while not answer:  # a late question is not answered
        with connected(hasty) as line, suppress(BrokenPipeError, ConnectionResetError):
            line.sendall(PING + b"\r\n")
            answer = line.recv(65536)
            assert line.recv(1) == b""
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_who_asks_and_never_reads_is_cut_off(unread: LiveBroker) -> None:
    def ask_for_ever(line: socket.socket) -> None:
        while True:  # the replies fill the connection, then our questions do; then the broker's patience ends, or ours
            line.sendall((PING + b"\r\n") * 100)

    with connected(unread) as line, pytest.raises((BrokenPipeError, ConnectionResetError)):
        ask_for_ever(line)
    assert serves(unread)


def test_a_follower_who_never_reads_is_cut_off(unread: LiveBroker) -> None:
    for _ in range(300):
        unread.lease(label="x" * 200, kernel_id="k" * 200)

    async def line_size() -> int:
        return len(msgspec.json.encode(host_status(unread.broker, unread.socket, Viewer())))

    assert unread.on_loop(line_size) > 250_000, "more than an unread connection holds"
    with connected(unread) as line:
        line.sendall(b"GET /v1/events HTTP/1.1\r\nHost: b\r\n\r\n")
        application: Any = unread.server.request_callback
        stream = application.settings["shared"].statuses
        until(lambda: stream._subscribers == 1, "it follows")
        until(lambda: stream._subscribers == 0, "it is cut off")


def test_a_gate_that_never_reads_is_cut_off_and_its_lease_lives_on(unread: LiveBroker) -> None:
    lease = unread.lease()
    kernel = unread.broker.kernels[lease.lease_id]
    hello = json.dumps({"version": "1", "open": False, "busy": False}).encode()
    head = f"POST /v1/leases/{lease.lease_id}/gate HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {lease.token}\r\n"

    async def talk() -> None:
        assert kernel.link is not None
        for _ in range(60):
            kernel.link.send(GateVerb.NOTICE, sentence="x" * 10_000)

    with connected(unread) as line:
        line.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(hello) + hello)
        until(lambda: kernel.link is not None, "the gate is connected")
        unread.on_loop(talk)
        until(lambda: kernel.link is None, "it is cut off")
    assert unread.state(lease.lease_id) == "unattached"


# -- many ------------------------------------------------------------------------------------------------------------------------

HOLD = """
import os, pwd, socket, sys
entry = pwd.getpwnam(sys.argv[2])
os.setgroups([]); os.setgid(entry.pw_gid); os.setuid(entry.pw_uid)
lines = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[3]))]
for line in lines:
    line.connect(sys.argv[1])
lines[-1].settimeout(30)
try:
    lines[-1].sendall(b"GET /v1/ping HTTP/1.1\\r\\nHost: b\\r\\n\\r\\n")
except BrokenPipeError:
    pass  # turned away before it could ask
print(lines[-1].recv(65536).partition(b"\\r\\n\\r\\n")[2].decode(), flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(live: LiveBroker, user: str, lines: int) -> Iterator[dict[str, dict[str, str]]]:
    """Another user with this many connections; yields the answer on the last one."""
    argv = [sys.executable, "-S", "-c", HOLD, live.socket, user, str(lines)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


SQUAT = """
import os, pwd, socket, sys, threading
entry = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(entry.pw_gid); os.setuid(entry.pw_uid)
body = b'{"fraction_milli": 1000, "gated": false, "wait_ms": 60000}'
head = b"POST /v1/leases HTTP/1.1\\r\\nHost: b\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
sent = threading.Barrier(7)

def squat():
    first = True
    while True:  # a lease, and never a process behind it
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(sys.argv[1])
                line.sendall(head + body)
                if first:
                    first = False
                    sent.wait()
                while line.recv(65536):
                    pass
        except OSError:
            pass

for _ in range(6):
    threading.Thread(target=squat, daemon=True).start()
sent.wait()
print("asked", flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def squatting(live: LiveBroker) -> Iterator[None]:
    """Another user whose six threads ask for the whole device again and again, and never start a kernel."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SQUAT, live.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"asked\n"
            until(lambda: squatted(live) >= 6, "all six have been asked for")
            yield
        finally:
            process.stdin.close()


def squatted(live: LiveBroker) -> int:
    return sum(lease["lease"]["spec"]["owner"] == "nobody" for lease in live.call("GET", "/v1/status").body["leases"])


@pytest.mark.promise("unstarted")
def test_leases_that_never_attach_keep_no_other_user_out() -> None:
    """Each user is in after one hold, of a second here, however many leases the others may have (64 of them would take a minute)."""
    with live_broker(pools={"default": {"unattached_hold": "1s"}}) as live, squatting(live):
        for _ in range(3):
            lease = live.lease(fraction_milli=1000, gated=False, wait_ms=25_000)
            with started_for(lease.lease_id) as process:
                attached = live.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
                assert (attached.status, attached.body["lease"]["state"]) == (200, "resident")
            assert live.call("DELETE", f"/v1/leases/{lease.lease_id}").status == 200


def test_leases_that_never_attach_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_service, "_START_PATIENCE_S", 0.0)
    with live_broker(pools={"default": {"unattached_leases": 3}}) as live:
        leases = [live.lease() for _ in range(3)]
        refused = live.call("POST", "/v1/leases", {"fraction_milli": 250})
        assert (refused.status, refused.error["reason"]) == (409, "unattached-limit")
        assert (
            "(at most 3 allowed); wait until these kernels have started, or shut down those" in refused.error["message"]
        )
        with started_for(leases[0].lease_id) as process:
            live.call("POST", f"/v1/leases/{leases[0].lease_id}/attach", process, token=leases[0].token)
            assert live.lease().lease_id


def test_users_who_hold_all_their_connections_keep_neither_each_other_nor_an_administrator_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fractional_gpu.broker.api.server.resource.getrlimit", lambda _: (16, 16))
    monkeypatch.setattr(routes, "IDLE_S", 600.0)
    with live_broker() as live, ExitStack() as stack:
        first = stack.enter_context(holding(live, "nobody", 5))
        assert first["error"]["code"] == "too-many"
        assert (
            "4 open connections to the broker and requested another; at most 4 are allowed" in first["error"]["message"]
        )
        assert "pid" in stack.enter_context(holding(live, "daemon", 4)), "each user has separate connections"
        third = stack.enter_context(holding(live, "games", 1))
        assert "all users together may have 8" in third["error"]["message"]
        assert live.is_alive(), "an administrator gets in"


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBroker]:
    """A broker without administrators, and with little patience for users who are overdrawn."""
    monkeypatch.setattr(server, "is_admin", lambda *_: False)
    monkeypatch.setattr(server, "COST_WAIT_S", 0.05)
    with live_broker() as live:
        yield live


def charge(live: LiveBroker, seconds: float) -> None:
    """Charge this user."""

    async def do() -> None:
        live.broker.costs.of_user(os.getuid()).charge(seconds)

    live.on_loop(do)


def test_who_asks_too_much_is_told_when_to_ask_again(strict: LiveBroker) -> None:
    charge(strict, limits.COST_BURST_S + limits.COST_RESERVE_S / 2)
    refused = strict.call("GET", "/v1/status")
    assert (refused.status, refused.error["reason"]) == (429, "too-many-requests")
    assert re.search(
        r"is sending more requests than the broker accepts from one user \(25% .*; try again in \d+ s",
        refused.error["message"],
    )
    assert strict.call("GET", "/nowhere").status == 429, "routes that are none count, too"
    assert strict.call("GET", "/v1/ping", Authorization="Basic x").status == 429, "and so does what is refused anyway"
    assert b"\r\nRetry-After: " in strict.raw(PING + b"\r\n")
    refused = strict.call("POST", "/v1/leases", b"{" * 100_000)
    assert refused.status == 429, "decided before the body is read"


def test_every_request_is_charged_for_its_steps_and_its_bytes(
    strict: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = strict.broker.costs.of_user(os.getuid())
    monkeypatch.setattr(cost, "COST_SHARE", 0.0)  # no time is earned in between

    def cost_of(body: bytes) -> float:
        before_s = account._left
        strict.call("POST", "/v1/leases", body)
        return before_s - account._left

    small, large = cost_of(b" "), cost_of(b" " * limits.MAX_BODY_BYTES)
    assert small > limits.COST_REQUEST_S
    assert large - small > limits.MAX_BODY_BYTES * limits.COST_BYTE_S * 0.9


def test_neighbours_do_not_wait_for_the_gate_or_the_end_of_one_who_is_overdrawn(strict: LiveBroker) -> None:
    lease, idle = strict.lease(), strict.lease()
    with started_for(lease.lease_id) as process:
        strict.call("POST", f"/v1/leases/{lease.lease_id}/attach", process, token=lease.token)
        charge(strict, limits.COST_BURST_S + limits.COST_RESERVE_S / 2)
        pulse = {"number": 0, "word": "done"}
        assert strict.call("POST", f"/v1/leases/{lease.lease_id}/answer", pulse, token=lease.token).status == 200
        assert strict.call("GET", f"/v1/leases/{lease.lease_id}", token=lease.token).status == 429
        assert strict.call("DELETE", f"/v1/leases/{idle.lease_id}", token=idle.token).status == 429, "it holds nothing"
        assert strict.call("DELETE", f"/v1/leases/{lease.lease_id}", token=lease.token).status == 200


def test_of_one_who_has_spent_the_reserve_nothing_is_read_until_it_is_earned_back(strict: LiveBroker) -> None:
    with connected(strict) as kept, connected(strict) as fresh:
        kept.sendall(PING + b"\r\n")
        reply = b""
        while not reply.endswith(b"}"):
            reply += kept.recv(65536)
        charge(strict, 2 * limits.COST_BURST_S)
        account = strict.broker.costs.of_user(os.getuid())
        for line in (kept, fresh):
            line.sendall((PING + b"\r\n") * 10)
        until(lambda: len(account._paused) == 2, "both connections are put aside")
        kept.setblocking(False)
        with pytest.raises(BlockingIOError):
            kept.recv(1)
        kept.settimeout(DEADLINE_S)
        charge(strict, -3 * limits.COST_BURST_S)
        for line in (kept, fresh):
            assert b" 200 " in line.recv(65536)


def test_our_client_waits_as_long_as_it_is_told_and_goes_on(strict: LiveBroker) -> None:
    charge(strict, limits.COST_BURST_S + limits.COST_RESERVE_S / 2)
    with BrokerClient(strict.socket) as client:
        assert client.ping().pid == os.getpid()


def test_an_overdrawn_user_does_not_hold_up_the_brokers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "is_admin", lambda *_: False)
    with live_broker() as live, connected(live) as line:
        charge(live, limits.COST_BURST_S + 1)
        account = live.broker.costs.of_user(os.getuid())
        line.sendall(PING + b"\r\n")
        until(lambda: bool(account._waiting), "it waits for its turn")

        async def end() -> None:
            live.broker.costs.release()

        live.on_loop(end)
        assert b" 200 " in line.recv(65536)


def test_no_client_pushes_important_lines_out_of_the_log(live: LiveBroker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    application: Any = live.server.request_callback
    application.settings["shared"].log_lines = TokenBucket(1 / 3600, burst=10)
    for _ in range(30):
        live.call("GET", "/v1/leases/nobody")
    assert sum("refused" in record.message for record in caplog.records) == 10


def test_the_leases_of_all_users_have_a_limit(live: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    have = len(live.broker.kernels)
    monkeypatch.setattr(lease_service, "MAX_LEASES", have + 1)
    live.lease()
    refused = live.call("POST", "/v1/leases", {"fraction_milli": 250})
    assert (refused.status, refused.error["reason"]) == (413, "too-many-leases")


def test_the_page_names_every_limit_with_its_value() -> None:
    page = PAGE.read_text()
    named = dict(re.findall(r"`([A-Z_]+)` = ([0-9.,]+)", page))
    values = {name: value for name, value in vars(limits).items() if name.isupper() and isinstance(value, int | float)}
    assert {name: float(text.replace(",", "")) for name, text in named.items()} == values
