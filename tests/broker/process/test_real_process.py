"""The life of a lease with a broker in a separate process, through the client that provisioners and kernels use."""

import json
from pathlib import Path

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BadRequestError, ForbiddenError, NoRoomError, UnauthorizedError
from fractional_gpu.protocol.messages import AcquireRequest, AttachRequest, GateHello, LeaseRequest
from tests.broker.live import started_for
from tests.support.world import new_world, until


def test_a_lease_lives_and_ends_and_every_refusal_comes_as_its_own_error() -> None:
    with new_world() as world:
        world.start_broker()
        with world.client() as client:
            with pytest.raises(BadRequestError, match=r"'gold'.*default"):
                client.create_lease(LeaseRequest(fraction_milli=250, pool="gold"))
            with pytest.raises(NoRoomError, match="1/4"):
                client.create_lease(LeaseRequest(fraction_milli=260))
            lease, other = (client.create_lease(LeaseRequest(fraction_milli=250, label=label)) for label in "ab")
        with (
            BrokerClient(world.socket, token=lease.token) as own,
            BrokerClient(world.socket, token=other.token) as foreign,
        ):
            with pytest.raises(UnauthorizedError):
                next(iter(foreign.acquire(lease.lease_id, AcquireRequest())))
            with (
                started_for(other.lease_id) as fields,
                pytest.raises(ForbiddenError, match=str(fields["pid"])),
            ):
                own.attach(lease.lease_id, AttachRequest(**fields))
            with started_for(lease.lease_id) as fields:
                assert own.attach(lease.lease_id, AttachRequest(**fields)).state == "unarmed"
                gate = own.gate(lease.lease_id, GateHello(version="1", open=False, busy=False))
                *_, last = own.acquire(lease.lease_id, AcquireRequest())
                assert (last.kind, last.environment["JUPYTER_GPU_MEMORY_MIB"]) == ("granted", "256")
                assert next(command for command in gate if command.verb).verb == "open"
            until(lambda: own.lease(lease.lease_id).state == "unattached", "the end of the process is noticed")
            own.release(lease.lease_id)
            own.release(lease.lease_id)
            assert [lease.spec.label for lease in own.status().leases] == ["b"]
        assert json.loads(Path(world.socket).with_name("broker.json").read_text())["argv"]
