"""A command's lease: attached without a connection, in use while its runner says so, and ended with it."""

import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.core.effects import CapBreached
from fractional_gpu.core.model import Breach, LeaseState
from fractional_gpu.protocol.messages import AcquireRequest, LeaseReply, Progress
from tests.broker.live import DEADLINE_S, LiveBroker, live_broker, started_for

pytestmark = pytest.mark.promise("commands-run")


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live


@contextmanager
def command(live: LiveBroker, fraction_milli: int = 250, **fields: Any) -> Iterator[tuple[LeaseReply, BrokerClient]]:  # noqa: ANN401 - AttachRequest's
    lease = live.lease(gated=False, kind="command", label="train.py", fraction_milli=fraction_milli)
    with (
        started_for(lease.lease_id) as process,
        BrokerClient(live.socket, token=lease.token, timeout_s=DEADLINE_S) as client,
    ):
        request = {**process, "connection": {}, "kind": "command", **fields}
        answer = live.call("POST", f"/v1/leases/{lease.lease_id}/attach", request, token=lease.token)
        assert answer.status == 200, answer
        yield lease, client
        client.release(lease.lease_id)


def busy(live: LiveBroker, lease: LeaseReply) -> bool:
    return bool(live.call("GET", f"/v1/leases/{lease.lease_id}").body["busy"])


def test_it_holds_nothing_before_it_has_asked_and_keeps_what_it_got(live: LiveBroker) -> None:
    with command(live) as (lease, client):
        assert lease.device_id is None
        assert live.state(lease.lease_id) == "unarmed"
        *_, last = client.acquire(lease.lease_id, AcquireRequest())
        assert (last.kind, last.environment["JUPYTER_GPU_MEMORY_MIB"]) == ("granted", "256")
        status = client.lease(lease.lease_id)
        assert (status.state, status.kind, status.busy) == ("resident", "command", True), "it may use it at any moment"


def test_a_hold_keeps_it_in_use_until_it_is_closed(live: LiveBroker) -> None:
    with command(live) as (lease, client):
        live.on_loop(lambda: used(live, lease))
        with closing(client.hold(lease.lease_id, AcquireRequest())) as stream:
            while next(stream).kind != "granted":
                pass
            assert busy(live, lease)
        live.on_loop(lambda: idle(live, lease))


async def used(live: LiveBroker, lease: LeaseReply) -> None:
    live.broker.kernels[lease.lease_id].measurement.has_used = True


async def idle(live: LiveBroker, lease: LeaseReply) -> None:
    kernel = live.broker.kernels[lease.lease_id]
    while True:
        change = kernel.change()
        if not kernel.busy:
            return
        await change.wait()


def test_its_runner_follows_its_state_and_reads_its_notices(live: LiveBroker) -> None:
    with command(live) as (lease, client), closing(client.follow(lease.lease_id)) as news:
        assert next(news).state == "unarmed"
        *_, last = client.acquire(lease.lease_id, AcquireRequest())
        assert (last.kind, next(news).state) == ("granted", "resident")
        live.on_loop(lambda: notice(live, lease))
        assert next(news).notice == "it is over its cap"
        live.on_loop(lambda: goes_away(live, lease))
        assert next(news).notice == "its GPU goes away"
        with BrokerClient(live.socket, token=lease.token) as other:
            other.release(lease.lease_id)
        assert [line.notice for line in news] in ([], [""]), "at the end of the lease the stream ends"


async def notice(live: LiveBroker, lease: LeaseReply) -> None:
    breach = CapBreached(lease_id=lease.lease_id, action=Breach.WARN, sentence="it is over its cap")
    live.broker.enforcement.breached(breach)


async def goes_away(live: LiveBroker, lease: LeaseReply) -> None:
    live.broker.announce_deadline(live.broker.kernels[lease.lease_id], "its GPU goes away")


def test_without_its_runner_it_keeps_its_place_in_the_queue_until_it_has_the_device(live: LiveBroker) -> None:
    with (
        command(live, fraction_milli=1000) as (first, client),
        closing(hold(client, first)),
        command(live, fraction_milli=1000) as (second, _),
    ):
        live.on_loop(lambda: lose_runner(live, second))
        live.on_loop(lambda: sync(live, second))
        assert live.broker.ticket(second.lease_id) is not None
        assert live.broker.kernels[second.lease_id].busy
        client.release(first.lease_id)
        live.on_loop(lambda: resident(live, second))


def hold(client: BrokerClient, lease: LeaseReply) -> Generator[Progress, None, None]:
    stream = client.hold(lease.lease_id, AcquireRequest())
    while next(stream).kind != "granted":
        pass
    return stream


async def lose_runner(live: LiveBroker, lease: LeaseReply) -> None:
    live.broker._runner_ended(live.broker.kernels[lease.lease_id])


async def sync(live: LiveBroker, lease: LeaseReply) -> None:
    live.broker.sync_busy_state(live.broker.kernels[lease.lease_id])


async def resident(live: LiveBroker, lease: LeaseReply) -> None:
    kernel = live.broker.kernels[lease.lease_id]
    while True:
        change, view = kernel.change(), live.broker.arbiter.lease(lease.lease_id)
        if view is not None and view.state is LeaseState.RESIDENT:
            return
        await change.wait()


def test_a_runner_that_the_broker_cannot_see_counts_as_alive(live: LiveBroker) -> None:
    with command(live) as (lease, _):
        kernel = live.broker.kernels[lease.lease_id]
        assert kernel.launch.server is not None
        assert kernel.launch.server.pid == os.getpid()
        assert not kernel.runner_gone
