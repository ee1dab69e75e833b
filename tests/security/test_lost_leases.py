"""Who asks in the name of a lease that the broker lost: a kernel may have its own back, and nobody gets another's by a claim."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fractional_gpu.broker.kernels.kernel import Kernel as LeaseKernel
from fractional_gpu.broker.kernels.request_validation import Peer
from fractional_gpu.broker.persistence.lease_files import LeaseFiles, lease_folder
from fractional_gpu.broker.recovery import lost_leases
from fractional_gpu.broker.recovery.lost_leases import LostLeases
from fractional_gpu.host.peers import PeerCredentials
from fractional_gpu.host.process import identify
from tests.broker.live import BECOME_NOBODY, LiveBroker, attach_fields, live_broker

IMPORTS = "import http.client, json, socket, sys\n"  # before it becomes somebody who may not read them
# Sends the requests that it reads, a JSON list [method, route, body, token] a line, and answers each with status and body.
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

# Starts a kernel of another lease below itself, which answers in its place.
NESTED = f"""
import os, sys
if os.fork() == 0:
    os.environ["JUPYTER_GPU_LEASE"] = "inner"
    os.execv(sys.executable, [sys.executable, "-S", "-c", {PEER!r}, sys.argv[1]])
os.wait()
"""


class Kernel:
    """A process that was started for a lease, and talks to the broker by itself."""

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
        """End it."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def live() -> Iterator[LiveBroker]:
    """A broker for everybody, whose ledger knows nobody."""
    with live_broker() as live:
        broker = live.broker

        async def lose() -> None:
            files = broker.records.files = LeaseFiles(lease_folder(live.socket, simulated=True))
            swaps = broker._operations._swaps
            live.service.access.lost = LostLeases(
                broker, swaps, broker.writer.ledger, files, socket=live.socket, everyone=True
            )

        live.on_loop(lose)
        yield live


@pytest.fixture
def kernels(live: LiveBroker) -> Iterator[list[Kernel]]:
    started: list[Kernel] = []
    yield started
    for one in started:
        one.close()
    assert live.is_alive()


def test_a_kernel_whose_lease_was_lost_asks_and_has_one(live: LiveBroker, kernels: list[Kernel]) -> None:
    kernels.append(kernel := Kernel(live, "lost-1"))
    status, progress = kernel.ask("acquire", token="forgotten")  # noqa: S106 - a test's
    assert (status, progress["kind"]) == (200, "granted")
    lease = live.broker.kernels["lost-1"]
    assert lease.identity == identify(kernel.process.pid)
    (view,) = live.broker.arbiter.leases()
    assert (view.spec.pool, view.spec.priority, view.spec.fraction_milli, view.spec.seat) == ("default", 0, 250, "")
    # The token that its own process has is the lease's from now on, and no other is.
    assert live.call("GET", "/v1/leases/lost-1", token="forgotten").status == 200  # noqa: S106 - as above
    assert live.call("GET", "/v1/leases/lost-1", token="guessed").error["reason"] == "foreign-token"  # noqa: S106 - as above


def test_a_claim_is_only_for_the_claimant(live: LiveBroker, kernels: list[Kernel]) -> None:
    """Whoever does not carry the lease gets none by its name, nor does a token make the lease another's."""
    [kernel, other, bare] = kernels[:] = [Kernel(live, "lost-1"), Kernel(live, "lost-2"), Kernel(live, None)]
    for stranger in (other, bare):
        status, answer = stranger.ask("acquire", lease_id="lost-1", token="t")  # noqa: S106 - a test's
        assert (status, answer["error"]["reason"]) == (404, "unknown-lease")
    assert kernel.ask("acquire")[0] == 200
    for token, reason in (("", "no-token"), ("t", "foreign-token")):
        for stranger in (other, bare):
            status, answer = stranger.ask("acquire", lease_id="lost-1", token=token)
            assert (status, answer["error"]["reason"]) == (401, reason)
    assert live.broker.kernels["lost-1"].token_sha256 == "", "it has learnt none of theirs"


@pytest.mark.skipif(os.getuid() != 0, reason="starts processes of another user")
def test_another_user_neither_gets_nor_blocks_a_lease(live: LiveBroker, kernels: list[Kernel]) -> None:
    [thief, owner] = kernels[:] = [Kernel(live, "lost-1", first=IMPORTS + BECOME_NOBODY), Kernel(live, "lost-2")]
    assert thief.ask("acquire", lease_id="lost-2")[0] == 404
    assert owner.ask("acquire")[0] == 200
    assert thief.ask("acquire", lease_id="lost-2")[0] == 404
    assert thief.ask("acquire")[0] == 200, "it has one of its own, as it could have asked for"
    assert live.broker.kernels["lost-1"].uid == 65534
    assert {view.spec.owner for view in live.broker.arbiter.leases()} == {"nobody", "root"}


def test_a_lease_that_was_ended_is_not_asked_back(live: LiveBroker, kernels: list[Kernel]) -> None:
    reply = live.lease()
    kernels.append(kernel := Kernel(live, reply.lease_id))
    kernel.ask("attach", token=reply.token, body=attach_fields(kernel.process.pid))
    assert live.call("DELETE", f"/v1/leases/{reply.lease_id}").status == 200
    status, answer = kernel.ask("acquire", token=reply.token)
    assert (status, answer["error"]["reason"]) == (404, "unknown-lease")


def test_claims_are_within_the_limits_of_their_user(
    live: LiveBroker, kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_leases, "MAX_LEASES_PER_UID", 1)
    [first, second] = kernels[:] = [Kernel(live, "lost-1"), Kernel(live, "lost-2")]
    assert first.ask("acquire")[0] == 200
    status, answer = second.ask("acquire")
    assert status == 413
    assert "keeps its variables" in answer["error"]["message"]
    assert len(live.broker.arbiter.leases()) == 1


def test_the_kernel_below_a_kernel_is_not_that_kernel(live: LiveBroker, kernels: list[Kernel]) -> None:
    """Without a token a process is known by its place, and the nearest kernel above it counts."""
    kernels.append(nested := Kernel(live, "outer", first=NESTED))
    assert nested.ask("acquire", lease_id="inner")[0] == 200, "what answers is the inner one"
    outer = live.on_loop(lambda: take_back(live, "outer", nested.process.pid))
    assert outer.identity == identify(nested.process.pid)
    status, answer = nested.ask("acquire", lease_id="outer")
    assert (status, answer["error"]["reason"]) == (401, "no-token")


async def take_back(live: LiveBroker, lease_id: str, pid: int) -> LeaseKernel:
    """Have the broker take a lease back as if the process had asked."""
    assert live.service.access.lost is not None
    peer = Peer(credentials=PeerCredentials(pid, os.getuid(), os.getgid()), token=None, admin=False)
    await live.service.access.lost.recall(peer, lease_id)
    return live.broker.kernels[lease_id]
