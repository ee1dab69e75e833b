"""Calls from an event loop: each is given up with its task, and a slow reader gets one line after the other."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.following import AsyncClient
from fractional_gpu.protocol.errors import BrokerUnavailableError, ConflictError
from fractional_gpu.protocol.messages import AcquireRequest, LeaseRequest, Progress
from tests.support.fake_broker import FakeBroker


@pytest.fixture
def calls(broker: FakeBroker) -> AsyncClient[BrokerClient]:
    return AsyncClient(lambda: BrokerClient(broker.path, token="token-1"))  # noqa: S106 - the fake's


async def test_a_call_returns_or_raises_what_the_client_does(
    broker: FakeBroker, calls: AsyncClient[BrokerClient]
) -> None:
    assert (await calls.call(lambda client: client.ping())).simulated
    broker.fail["ping"] = ConflictError("no")
    with pytest.raises(ConflictError):
        await calls.call(lambda client: client.ping())


async def test_a_cancelled_stream_hangs_up(broker: FakeBroker, calls: AsyncClient[BrokerClient]) -> None:
    await calls.call(lambda client: client.create_lease(LeaseRequest(fraction_milli=250)))
    broker.progress = [Progress(kind="waiting", position=1)]
    arrived = asyncio.Event()

    async def wait() -> None:
        async with aclosing(calls.stream(lambda client: client.acquire("lease-1", AcquireRequest()))) as lines:
            async for _ in lines:
                arrived.set()

    waiting = asyncio.create_task(wait())
    await arrived.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.to_thread(broker.wait_for, lambda: broker.hung_up == ["acquire"])


async def test_a_broker_that_comes_late_is_waited_for_as_long_as_asked(broker: FakeBroker) -> None:
    broker.hang_up["ping"] = 1
    assert (await AsyncClient(lambda: BrokerClient(broker.path), patience_s=30).call(lambda one: one.ping())).simulated
    broker.hang_up["ping"] = 1
    with pytest.raises(BrokerUnavailableError):
        await AsyncClient(lambda: BrokerClient(broker.path)).call(lambda one: one.ping())


async def test_a_busy_loop_keeps_no_lines(calls: AsyncClient[BrokerClient]) -> None:
    made: list[int] = []

    def lines(_client: BrokerClient) -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    async with aclosing(calls.stream(lines)) as stream:
        assert await anext(stream) == 0
        assert made == [0]
        assert await anext(stream) == 1
