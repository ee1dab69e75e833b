"""A lease is followed until it ends, whatever its broker answers before that."""

import os
from functools import partial
from pathlib import Path

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.run import supervisor as run_supervisor
from fractional_gpu.jupyter.kernel_lease import KernelLease
from fractional_gpu.protocol.errors import FractionalGPUError, InternalBrokerError, TooManyRequestsError
from fractional_gpu.protocol.messages import LeaseRequest
from tests.support.fake_broker import FakeBroker


def lease_of(broker: FakeBroker) -> KernelLease:
    with BrokerClient(broker.path) as client:
        reply = client.create_lease(LeaseRequest(fraction_milli=250, pool="default", gated=False))
    return KernelLease(
        lease_id=reply.lease_id,
        token=reply.token,
        token_file=Path("token"),
        socket=broker.path,
        reserve_mib=reply.reserve_mib,
        gated=False,
        environment={},
    )


@pytest.mark.parametrize(
    "error",
    [InternalBrokerError("the broker failed"), TooManyRequestsError("too many connections")],
    ids=["internal", "too-many"],
)
def test_a_broker_that_cannot_answer_for_a_while_is_asked_again(
    broker: FakeBroker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: FractionalGPUError,
) -> None:
    monkeypatch.setattr(run_supervisor, "BrokerClient", partial(BrokerClient, timeout_s=0.5))  # it repeats no request
    supervisor = run_supervisor.Supervisor(lease_of(broker), os.getpid(), [])
    broker.fail["follow"] = error
    supervisor.start()
    try:
        broker.wait_for(lambda: broker.routes().count("follow") >= 2)
    finally:
        supervisor.close(was_killed=False)
    assert capsys.readouterr().err == ""
