"""What the broker says, kept at hand for all pages: one connection, one copy of the news, whoever looks.

- A thread follows the broker's feed. When it breaks it is tried again, sooner first, then every `LONGEST_PAUSE_S`; until it is back the
  last picture stays, with the sentence that says why there is no newer one.
- Seats and pools are not in the feed: they are asked for after news, `SEATS_S` apart at the soonest, and every `REFRESH_S` anyway.
- Whoever waits takes `changed` before looking at `picture`, then waits for it: no change is missed.
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

__all__ = ["Picture", "Watch"]

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
SEATS_S, REFRESH_S = 0.5, 5.0
_CALL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is known. `problem`: why that is not what is true now, a sentence; empty: it is. `status` is None before the first news."""

    status: HostStatus | None = None
    seats: SeatList = field(default_factory=SeatList)
    pools: PoolList = field(default_factory=PoolList)
    problem: str = "the GPU broker has not answered yet"
    refused: str = ""  # why seats and pools are not known (any more), a sentence


class Watch:
    """Follows the broker on a socket. `start` and everything read from it belong to one event loop."""

    def __init__(self, socket: str) -> None:
        self.picture = Picture()
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

    def look_again(self) -> None:
        """Something was changed through this service: ask for seats and pools now."""
        self._stale.set()

    # -- in the threads ---------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        def follow(client: SeatClient, works: Callable[[], None]) -> None:
            for status in client.events():
                works()
                self._stale.set()
                self._tell(status=status, problem="")
                if self._stopping.is_set():
                    return

        self._persistently(follow, lambda problem: self._tell(problem=problem))

    def _refresh(self) -> None:
        def refresh(client: SeatClient, works: Callable[[], None]) -> None:
            while not self._stopping.is_set():
                self._stale.clear()
                begun_s = monotonic()
                seats, pools = client.seats(), client.pools()
                works()
                self._tell(seats=seats, pools=pools, refused="")
                self._stopping.wait(max(0.0, SEATS_S - (monotonic() - begun_s)))
                self._stale.wait(REFRESH_S)

        self._persistently(refresh, lambda problem: self._tell(refused=problem))

    def _persistently(
        self, work: Callable[[SeatClient, Callable[[], None]], None], told: Callable[[str], None]
    ) -> None:
        """Do the work with a client of its own, again and again until we stop. It says when it works; `told` why it does not."""
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
            told(problem)
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _tell(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the picture
        if not self._stopping.is_set():
            self._loop.call_soon_threadsafe(self._take, changes)

    # -- on the loop ------------------------------------------------------------------------------------------------------------

    def _take(self, changes: dict[str, Any]) -> None:
        before, self.picture = self.picture, replace(self.picture, **changes)
        if self.picture.problem != before.problem:
            if self.picture.problem:
                log.warning("no news of the broker: %s", self.picture.problem)
            else:
                log.info("the broker answers")
        if self.picture != before:
            self.changed.set()
            self.changed = asyncio.Event()
