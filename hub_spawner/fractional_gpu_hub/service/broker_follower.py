"""The broker's latest status for all pages: one connection and one copy, whatever the number of pages.

- A thread follows the broker's status stream. A broken stream is opened again with growing pauses of up to `LONGEST_PAUSE_S`; until then
  the last snapshot stays, with the sentence that says why there is no newer one.
- Seats and pools are not in the stream: another thread requests them after each change, `SEATS_S` apart at least, and every `REFRESH_S`.
- A page takes `changed` before it reads `snapshot`, then waits for `changed`: so it misses no change.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from fractional_gpu.client.seat_client import SeatClient
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import HostStatus
from fractional_gpu.protocol.seats import PoolList, SeatList

__all__ = ["BrokerFollower", "Snapshot"]

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
SEATS_S, REFRESH_S = 0.5, 5.0
_CALL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The broker's last status. `problem`: why it is out of date, a sentence; empty: it is not. `status` is None before the first line."""

    status: HostStatus | None = None
    seats: SeatList = field(default_factory=SeatList)
    pools: PoolList = field(default_factory=PoolList)
    problem: str = "the GPU broker has not answered yet"
    refused: str = ""  # why seats and pools are out of date, a sentence


class BrokerFollower:
    """Follows the broker on a socket. `start`, `snapshot` and `changed` belong to one event loop."""

    def __init__(self, socket: str) -> None:
        self.snapshot = Snapshot()
        self.changed = asyncio.Event()
        self._socket = socket
        self._loop: asyncio.AbstractEventLoop
        self._stopping = threading.Event()
        self._stale = threading.Event()  # seats or pools may have changed
        self._clients: list[SeatClient] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._follow, self._refresh)]

    def start(self) -> None:
        """Begin to follow."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; returns when they have ended."""
        self._stopping.set()
        self._stale.set()
        for thread in self._threads:
            while thread.is_alive():
                for client in list(self._clients):
                    client.close()  # wakes a thread that reads
                thread.join(0.1)

    def refresh_soon(self) -> None:
        """An action of this service has changed something: request seats and pools now."""
        self._stale.set()

    # -- in the threads ---------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        def follow(client: SeatClient, works: Callable[[], None]) -> None:
            for status in client.events():
                works()
                self._stale.set()
                self._publish(status=status, problem="")
                if self._stopping.is_set():
                    return

        self._persistently(follow, lambda problem: self._publish(problem=problem))

    def _refresh(self) -> None:
        def refresh(client: SeatClient, works: Callable[[], None]) -> None:
            while not self._stopping.is_set():
                self._stale.clear()
                begun_s = monotonic()
                seats, pools = client.seats(), client.pools()
                works()
                self._publish(seats=seats, pools=pools, refused="")
                self._stopping.wait(max(0.0, SEATS_S - (monotonic() - begun_s)))
                self._stale.wait(REFRESH_S)

        self._persistently(refresh, lambda problem: self._publish(refused=problem))

    def _persistently(
        self, work: Callable[[SeatClient, Callable[[], None]], None], on_problem: Callable[[str], None]
    ) -> None:
        """Do the work with a client of its own, again after each failure, until `stop`. `on_problem` gets the reason of each failure."""
        pause_s = FIRST_PAUSE_S

        def works() -> None:
            nonlocal pause_s
            pause_s = FIRST_PAUSE_S

        while not self._stopping.is_set():
            client = SeatClient(self._socket, timeout_s=_CALL_S)
            self._clients.append(client)
            try:
                work(client, works)
                problem = "the GPU broker ended"
            except FractionalGPUError as error:
                problem = str(error)
            finally:
                self._clients.remove(client)
                client.close()
            if self._stopping.is_set():
                return
            on_problem(problem)
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _publish(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the snapshot
        if not self._stopping.is_set():
            self._loop.call_soon_threadsafe(self._take, changes)

    # -- on the loop ------------------------------------------------------------------------------------------------------------

    def _take(self, changes: dict[str, Any]) -> None:
        before, self.snapshot = self.snapshot, replace(self.snapshot, **changes)
        if self.snapshot.problem != before.problem:
            if self.snapshot.problem:
                log.warning("no status from the broker: %s", self.snapshot.problem)
            else:
                log.info("the broker answers")
        if self.snapshot != before:
            self.changed.set()
            self.changed = asyncio.Event()
