"""What administrators may do to a user's lease, what is refused, and that an eviction leaves no process."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fractional_gpu.broker.kernels import ending
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.messages import EvictRequest
from tests.broker.live import LiveBroker, attach_fields, started_for

pytestmark = pytest.mark.promise("evicted")

# A kernel that ignores a request to end, with a child in a separate session.
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "open(0).read()"], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
open(0).read()
"""

# A kernel that reports a request to end, and ends when its input does.
SLOW_TO_END = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
print("asked to end", flush=True)
open(0).read()
"""


def attached(live: LiveBroker, process: dict[str, Any], lease_id: str, token: str) -> None:
    answer = live.call("POST", f"/v1/leases/{lease_id}/attach", process, token=token)
    assert answer.status == 200, answer


def test_an_eviction_that_does_not_say_that_it_means_it_ends_nothing(live: LiveBroker) -> None:
    lease = live.lease()
    with started_for(lease.lease_id) as process:
        attached(live, process, lease.lease_id, lease.token)
        for body in ({}, {"confirm": False}):
            error = live.call("POST", f"/v1/leases/{lease.lease_id}/evict", body).error
            assert error["reason"] == "not-confirmed"
        assert live.state(lease.lease_id) == "unarmed"


def test_an_evicted_kernel_ends_and_its_lease_with_it(live: LiveBroker) -> None:
    lease = live.lease()
    with started_for(lease.lease_id) as process, BrokerClient(live.socket) as client:
        attached(live, process, lease.lease_id, lease.token)
        client.evict(lease.lease_id, EvictRequest(confirm=True))
        assert live.call("GET", f"/v1/leases/{lease.lease_id}").status == 404
        assert _is_over(process["pid"])


def test_the_next_kernel_says_who_ended_the_last_one_and_why(live: LiveBroker) -> None:
    lease = live.lease(kernel_id="a notebook's")
    with started_for(lease.lease_id) as process, BrokerClient(live.socket) as client:
        attached(live, process, lease.lease_id, lease.token)
        client.evict(lease.lease_id, EvictRequest(confirm=True, why="the class needs\x1b[2J it"))
        ended = live.broker.metrics.registry.get_sample_value("jupyter_gpu_leases_ended_total", {"reason": "evicted"})
        assert ended is not None
        assert ended >= 1
        other, again, third = (live.lease(kernel_id=name) for name in ("another", "a notebook's", "a notebook's"))
        lines = {one.lease_id: client.story(one.lease_id).lines for one in (other, again, third)}
        (line,) = [one for one in lines[again.lease_id] if one.reason == "evicted"]
        assert line.sentence.startswith("An administrator (root) ended the previous kernel at ")
        assert "the reason given: the class needs?[2J it. Its variables are lost" in line.sentence
        assert all(one.reason != "evicted" for name in (other, third) for one in lines[name.lease_id])
        assert live.broker.kernels[again.lease_id].notices == [line.sentence], "shown when its extension connects"


def test_one_that_does_not_listen_is_made_to_end_with_its_children(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 0.1)
    lease = live.lease()
    environment = {"JUPYTER_GPU_LEASE": lease.lease_id}
    argv = [sys.executable, "-S", "-c", STUBBORN]
    with (
        subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as kernel,
        BrokerClient(live.socket) as client,
    ):
        assert kernel.stdout is not None
        child = int(kernel.stdout.readline())
        attached(live, attach_fields(kernel.pid), lease.lease_id, lease.token)
        client.evict(lease.lease_id, EvictRequest(confirm=True))
        assert kernel.wait() == -signal.SIGKILL
        assert _is_over(child)
    assert live.call("GET", f"/v1/leases/{lease.lease_id}").status == 404


def test_a_kernel_that_is_started_again_while_it_is_evicted_does_not_get_the_lease_that_ends(live: LiveBroker) -> None:
    lease = live.lease()
    argv = [sys.executable, "-S", "-c", SLOW_TO_END]
    environment = {"JUPYTER_GPU_LEASE": lease.lease_id}
    with subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as kernel:
        assert kernel.stdin is not None
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == b"ready\n"
        attached(live, attach_fields(kernel.pid), lease.lease_id, lease.token)
        with ThreadPoolExecutor(1) as administrator:
            evicted = administrator.submit(live.call, "POST", f"/v1/leases/{lease.lease_id}/evict", {"confirm": True})
            assert kernel.stdout.readline() == b"asked to end\n"
            for method, what in (("GET", ""), ("POST", "/detach"), ("POST", "/attach")):
                body = attach_fields(kernel.pid) if what == "/attach" else None
                answer = live.call(method, f"/v1/leases/{lease.lease_id}{what}", body, token=lease.token)
                assert (answer.status, answer.error["reason"]) == (404, "unknown-lease"), what
            assert live.state(lease.lease_id) == "unarmed", "the administrator who evicts it sees it until the end"
            kernel.stdin.close()
            assert evicted.result().body == {"ok": True}
    assert live.call("GET", f"/v1/leases/{lease.lease_id}").status == 404


def _is_over(pid: int) -> bool:
    """Whether it has ended, even if its parent has not read its status yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
