"""Calls the broker from an event loop, and follows its status. Used by Jupyter servers, hubs and the hub's page.

A client blocks, so each call or stream has its own daemon thread and connection. Cancelling a call or stream closes its connection, and the
broker then withdraws any ticket.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Generic, TypeVar

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError
from fractional_gpu.protocol.status import HostStatus

T = TypeVar("T")
C = TypeVar("C", bound=BrokerClient)

_RETRY_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class AsyncClient(Generic[C]):
    """Runs blocking clients' calls in threads. `connect` makes a client. Unanswered calls are retried for `patience_s` seconds."""

    def __init__(self, connect: Callable[[], C], *, patience_s: float = 0.0) -> None:
        self._connect = connect
        self._patience_s = patience_s

    async def call(self, work: Callable[[C], T]) -> T:
        """Run `work` in a thread and return its result. Cancellation abandons the call."""
        async with aclosing(self.stream(lambda client: [work(client)])) as results:
            async for result in results:
                return result
        raise AssertionError("bug: the call ended without a result")

    async def stream(self, lines: Callable[[C], Iterable[T]]) -> AsyncGenerator[T, None]:
        """Run `lines` in a thread, yield its items, and raise its errors. Closing or cancelling the generator abandons the stream."""
        end_s = time.monotonic() + self._patience_s
        while True:
            try:
                async with aclosing(self._stream_once(lines)) as found:
                    async for line in found:
                        end_s = time.monotonic() + self._patience_s
                        yield line
            except BrokerUnavailableError:
                if time.monotonic() >= end_s:
                    raise
            else:
                return
            await asyncio.sleep(_RETRY_S)

    async def _stream_once(self, lines: Callable[[C], Iterable[T]]) -> AsyncGenerator[T, None]:
        loop, taken = asyncio.get_running_loop(), threading.Semaphore(0)
        arrived = asyncio.Queue[tuple[T] | Exception | None]()
        clients: list[C] = []
        given_up = False

        def put(item: tuple[T] | Exception | None) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        def read() -> None:
            try:
                clients.append(self._connect())
                with clients[0] as client:
                    for line in () if given_up else lines(client):
                        put((line,))
                        taken.acquire()
                        if given_up:
                            return
            except Exception as error:  # noqa: BLE001 - raised where the lines are awaited
                put(error)
            else:
                put(None)

        threading.Thread(target=read, name="gpu-stream", daemon=True).start()
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item[0]
                taken.release()
        finally:
            given_up = True
            taken.release()
            for client in clients:
                client.close()  # wakes a thread that is reading


async def follow(
    client: AsyncClient[C],
    take: Callable[[HostStatus], None],
    lost: Callable[[FractionalGPUError], None],
) -> None:
    """Call `take` with the host's status now and after each change, and `lost` with each error. Runs until cancelled.

    If the status changes several times while the event loop is busy, only the newest is passed on, because the broker doesn't queue lines.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            async with aclosing(client.stream(lambda one: one.events())) as statuses:
                async for status in statuses:
                    pause_s = _FIRST_PAUSE_S
                    take(status)
            lost(BrokerUnavailableError("the GPU broker ended", reason="hung-up"))
        except FractionalGPUError as error:
            lost(error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
