"""Gets the broker's latest status for all pages, over one connection, and serves a placeholder page during startup.

- While the broker is not answering, the last snapshot is kept, along with a sentence that explains the problem.
- The broker's stream does not include seats or pools. They are requested after each change, at most every `SEATS_S` seconds and at least
  every `REFRESH_S` seconds.
- To avoid missing a change, a page gets the event `changed` before it reads `snapshot`, and then waits for that event.
"""

import asyncio
import errno
import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from fractional_gpu.client.following import AsyncClient, follow
from fractional_gpu.client.seat import SeatClient
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.seats import PoolList, SeatList
from fractional_gpu.protocol.status import HostStatus

log = logging.getLogger(__name__)

SEATS_S, REFRESH_S = 0.5, 5.0
_CALL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The last known status, or None if there is none yet. `problem` explains why it is out of date, and is empty while it is current."""

    status: HostStatus | None = None
    seats: SeatList = field(default_factory=SeatList)
    pools: PoolList = field(default_factory=PoolList)
    problem: str = "the GPU broker has not responded yet"
    refused: str = ""  # why seats and pools are out of date


class BrokerFollower:
    def __init__(self, socket: str) -> None:
        self.snapshot = Snapshot()
        self.changed = asyncio.Event()
        self._client = AsyncClient(lambda: SeatClient(socket, timeout_s=_CALL_S))
        self._stale = asyncio.Event()  # set if seats or pools may have changed
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        statuses = follow(self._client, self._take_status, lambda error: self._publish(problem=str(error)))
        self._tasks = [asyncio.create_task(statuses), asyncio.create_task(self._refresh())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def refresh_soon(self) -> None:
        """Schedule an early refresh of the seats and pools. Call this after the service has changed something."""
        self._stale.set()

    def _take_status(self, status: HostStatus) -> None:
        self._stale.set()
        self._publish(status=status, problem="")

    async def _refresh(self) -> None:
        while True:
            self._stale.clear()
            try:
                seats, pools = await self._client.call(lambda client: (client.seats(), client.pools()))
                self._publish(seats=seats, pools=pools, refused="")
            except FractionalGPUError as error:
                self._publish(refused=str(error))
            await asyncio.sleep(SEATS_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._stale.wait()

    def _publish(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the snapshot
        before, self.snapshot = self.snapshot, replace(self.snapshot, **changes)
        if self.snapshot.problem != before.problem:
            if self.snapshot.problem:
                log.warning("could not get the broker's status: %s", self.snapshot.problem)
            else:
                log.info("the broker is responding")
        if self.snapshot != before:
            self.changed.set()
            self.changed = asyncio.Event()


# JupyterHub 5 does not start unless a managed service answers within ten seconds. On a busy machine, the imports of the service can take
# longer. So the port is bound first, and each request is answered with 425 "too early", which the hub accepts, until the service takes over
# the socket. The script on the page polls and reloads the page only once, because a screen reader starts over at each reload.

_PATIENCE_S = 30.0  # how long to wait for a port that the service of an earlier hub still uses
_PAUSE_S = 0.2
_POLL_S = 0.1
_PEER_S = 2.0
_BACKLOG = 128
_MOST_BYTES = 65536
_PAGE = (
    b'<!DOCTYPE html><html lang="en"><meta name="color-scheme" content="light dark"><title>GPUs</title>'
    b'<main><h1>GPUs</h1><p role="status">The GPU page is starting; it appears in a moment.</p>'
    b"<noscript><p>Load this page again in a moment.</p></noscript></main>"
    b"<script>(async function ask() {"
    b' const { status } = await fetch(location, { cache: "no-store", redirect: "manual" }).catch(() => ({ status: 425 }));'
    b" if (status === 425) setTimeout(ask, 1000); else location.reload(); })();</script></html>\n"
)
_LATER = (
    b"HTTP/1.1 425 Too Early\r\nRetry-After: 1\r\nContent-Type: text/html\r\nCache-Control: no-store\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_PAGE), _PAGE)
)


class StartupPlaceholder:
    """Answers every request to the service with status 425 until `hand_over` is called. Raises OSError if the port does not become free."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._socket = _bound(place.hostname or "127.0.0.1", place.port or 80)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def hand_over(self) -> socket.socket:
        self._over.set()
        self._thread.join()
        self._socket.setblocking(False)
        return self._socket

    def _answer(self) -> None:
        self._socket.settimeout(_POLL_S)
        while not self._over.is_set():
            with suppress(OSError):
                peer, _ = self._socket.accept()
                with peer:
                    peer.settimeout(_PEER_S)
                    peer.recv(_MOST_BYTES)
                    peer.sendall(_LATER)


def _bound(host: str, port: int) -> socket.socket:
    deadline_s = time.monotonic() + _PATIENCE_S
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                raise
        time.sleep(_PAUSE_S)
