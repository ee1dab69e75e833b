"""What other processes use on a lease's device: all processes except those that belong to the lease or the named leases."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import to_builtins

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.host.process import identify
from fractional_gpu.protocol.messages import COMMAND, AcquireRequest, AttachRequest, LeaseReply
from tests.broker.live import LiveBroker, live_broker
from tests.support.world import until

pytestmark = pytest.mark.promise("measure")

WORKS = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(1 << 20)
print(flush=True)
input()
while True:
    cuda.launch(0.05, 0.4)
"""


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live


class Worker:
    """A process on the device that computes after `go`. Without a lease it is a stranger."""

    def __init__(self, live: LiveBroker, process: "subprocess.Popen[str]", lease: LeaseReply | None) -> None:
        self.live, self.process, self.lease = live, process, lease

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@contextmanager
def worker(live: LiveBroker, *, leased: bool) -> Iterator[Worker]:
    environment = {
        **os.environ,
        **live.broker.monitor.kernel_environment(next(iter(live.broker.devices))),
    }
    lease = live.lease(gated=False, kind=COMMAND) if leased else None
    if lease is not None:
        environment["JUPYTER_GPU_LEASE"] = lease.lease_id
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WORKS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
            if lease is not None:
                begin(live, lease, process.pid)
            yield Worker(live, process, lease)
        finally:
            process.kill()
    if lease is not None:
        live.call("DELETE", f"/v1/leases/{lease.lease_id}")


def begin(live: LiveBroker, lease: LeaseReply, pid: int) -> None:
    """Attach the process and give it its device."""
    identity: dict[str, Any] = identify(pid).to_dict()
    body = to_builtins(AttachRequest(**identity, connection={}, language="", ipykernel=False, kind=COMMAND))
    assert live.call("POST", f"/v1/leases/{lease.lease_id}/attach", body, token=lease.token).status == 200
    answer = live.call("POST", f"/v1/leases/{lease.lease_id}/acquire", to_builtins(AcquireRequest()), token=lease.token)
    assert answer.body["kind"] == "granted"


def others(live: LiveBroker, lease: LeaseReply | None, query: str = "") -> Any:  # noqa: ANN401 - a number or None
    assert lease is not None
    answer = live.call("GET", f"/v1/leases/{lease.lease_id}/others?last_ms=300{query}")
    assert answer.status == 200, answer
    return answer.body["used_milli"]


def test_a_lease_s_own_work_is_no_others_and_that_of_any_other_process_is(live: LiveBroker) -> None:
    with worker(live, leased=True) as mine, worker(live, leased=True) as other, worker(live, leased=False) as stranger:
        mine.go()
        until(lambda: others(live, other.lease) > 300, "another lease's work is seen")
        assert others(live, mine.lease) == 0, "those that do not work use nothing, though they have memory"
        assert other.lease is not None
        assert mine.lease is not None
        assert others(live, other.lease, f"&without={mine.lease.lease_id}") == 0
        stranger.go()
        until(lambda: others(live, mine.lease) > 300, "work without a lease is seen")
        until(lambda: others(live, other.lease) > 700, "it adds up")
        assert 300 < others(live, other.lease, f"&without={mine.lease.lease_id}") < 500


def test_where_nothing_counts_by_process_nothing_is_said(live: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise GPUError(GPUErrorCode.DEVICE_LOST, "gone")

    with worker(live, leased=True) as mine:
        assert others(live, mine.lease) == 0
        answers: list[Callable[..., object]] = [lambda *_: None, lost]
        for utilisation in answers:
            monkeypatch.setattr(live.broker.monitor, "utilisation", utilisation)
            assert others(live, mine.lease) is None
