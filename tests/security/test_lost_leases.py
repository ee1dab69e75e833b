"""Requests for a lease whose record was lost: its kernel learns what to do, and a claim gains nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fractional_gpu.host.process import identify
from tests.broker.live import LiveBroker, attach_fields, live_broker

pytestmark = pytest.mark.promise("lost-ledger")

# Sends the requests on its input, a JSON list [method, route, body, token] per line, and answers each with status and
# body.
PEER = """
import http.client, json, socket, sys
class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(sys.argv[1])
print(flush=True)
for line in sys.stdin:
    method, route, body, token = json.loads(line)
    connection = Connection("broker")
    connection.request(method, route, json.dumps(body), {"Authorization": f"Bearer {token}"} if token else {})
    reply = connection.getresponse()
    text = reply.readline() if reply.getheader("Transfer-Encoding") == "chunked" else reply.read()
    print(json.dumps([reply.status, json.loads(text)]), flush=True)
    connection.close()
"""

# Starts a kernel of another lease as a child, which answers instead.
NESTED = f"""
import os, sys
if os.fork() == 0:
    os.environ["JUPYTER_GPU_LEASE"] = "inner"
    os.execv(sys.executable, [sys.executable, "-S", "-c", {PEER!r}, sys.argv[1]])
os.wait()
"""


class Kernel:
    """A process started for a lease, which calls the broker itself."""

    def __init__(self, live: LiveBroker, lease_id: str | None, *, first: str = "") -> None:
        environment = {"PATH": os.environ["PATH"], "JUPYTER_GPU_SOCKET": live.socket}
        if lease_id is not None:
            environment["JUPYTER_GPU_LEASE"] = lease_id
        self.lease_id = lease_id or ""
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", first + PEER, live.socket],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def ask(
        self, route: str, *, lease_id: str = "", token: str = "", body: object = None
    ) -> tuple[int, dict[str, Any]]:
        """Make one request on a route of the lease; of a stream, the first line is the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = ["POST", f"/v1/leases/{lease_id or self.lease_id}/{route}", body or {}, token]
        print(json.dumps(request), file=self.process.stdin, flush=True)
        status, answer = json.loads(self.process.stdout.readline())
        return status, answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live


@pytest.fixture
def kernels(live: LiveBroker) -> Iterator[list[Kernel]]:
    started: list[Kernel] = []
    yield started
    for one in started:
        one.close()
    assert live.is_alive()


def lose(live: LiveBroker, *kernels: Kernel) -> None:
    """Make the broker treat these kernels as those with lost records."""
    live.broker.lost = {one.lease_id: identify(one.process.pid) for one in kernels}


def test_only_a_kernel_whose_record_was_lost_is_told_the_remedy(live: LiveBroker, kernels: list[Kernel]) -> None:
    [kernel, other, bare] = kernels[:] = [Kernel(live, "lost-1"), Kernel(live, "lost-2"), Kernel(live, None)]
    lose(live, kernel)
    status, answer = kernel.ask("acquire", token="forgotten")  # noqa: S106 - a test's
    assert (status, answer["error"]["reason"]) == (409, "lost-lease")
    assert "`jupyter gpu broker --stop && jupyter gpu rescue`" in answer["error"]["message"]
    for stranger in (other, bare):
        status, answer = stranger.ask("acquire", lease_id="lost-1", token="t")  # noqa: S106 - a test's
        assert (status, answer["error"]["reason"]) == (404, "unknown-lease")
    assert live.broker.arbiter.leases() == [], "none gets anything by a claim"


def test_a_lease_that_was_ended_is_not_asked_back(live: LiveBroker, kernels: list[Kernel]) -> None:
    reply = live.lease()
    kernels.append(kernel := Kernel(live, reply.lease_id))
    kernel.ask("attach", token=reply.token, body=attach_fields(kernel.process.pid))
    assert live.call("DELETE", f"/v1/leases/{reply.lease_id}").status == 200
    status, answer = kernel.ask("acquire", token=reply.token)
    assert (status, answer["error"]["reason"]) == (404, "unknown-lease")


def test_the_kernel_below_a_kernel_is_not_that_kernel(live: LiveBroker, kernels: list[Kernel]) -> None:
    """Only the process's own environment counts, not that of its ancestors."""
    kernels.append(nested := Kernel(live, "outer", first=NESTED))
    lose(live, nested)
    status, answer = nested.ask("acquire", lease_id="outer")
    assert (status, answer["error"]["reason"]) == (404, "unknown-lease"), "what answers is the inner one"
