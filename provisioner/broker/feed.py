"""The broker's news: one look at everything after a change, shared by all who follow.

Rules:

- Nobody who follows costs anything while nothing changes, and however much changes, the whole is looked at `RATE_S` apart at the soonest,
  once for all followers: a follower that reads slowly gets fewer, newer lines, never a queue of old ones.
- A follower gets the present state at once, and then only what differs from what it was told. Ages and what is left of a pin run
  on by themselves: a difference in them alone is none.
- What a uid may see is what `GET /v1/status` would tell it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace

from provisioner.broker.broker import Broker
from provisioner.broker.status import host_status
from provisioner.protocol.limits import PULSE_S
from provisioner.protocol.messages import HostStatus

__all__ = ["RATE_S", "Feed"]

RATE_S = 0.2


class Feed:
    """Tells followers what changed. One per broker; all of it runs on the broker's loop."""

    def __init__(self, broker: Broker, socket_path: str) -> None:
        self._broker = broker
        self._socket_path = socket_path
        self._followers = 0
        self._looking: asyncio.Task[None] | None = None
        self._latest: HostStatus | None = None
        self._news = asyncio.Event()

    async def follow(self, uid: int | None) -> AsyncGenerator[HostStatus | None, None]:
        """Yield the state that this uid (None: everybody) may see, at once and after each change; None when all is quiet for a while.

        Close it to stop following: the last follower who leaves ends the looking.
        """
        self._followers += 1
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        told: HostStatus | None = None
        try:
            while True:
                news, latest = self._news, self._latest
                status = None if latest is None else _seen_by(uid, latest, self._broker)
                if status is not None and (told is None or _lasting(status) != told):
                    told = _lasting(status)
                    yield status
                    continue
                if not await _within(news, PULSE_S):
                    if self._looking.done():
                        self._looking.result()
                    yield None
        finally:
            self._followers -= 1
            if self._followers == 0:
                self._looking.cancel()
                self._looking = self._latest = None

    async def _look(self) -> None:
        while True:
            stirred = self._broker.stirred
            self._latest = host_status(self._broker, self._socket_path, None)
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(RATE_S)
            await _within(
                stirred, PULSE_S
            )  # what stirs nothing, such as a forecast that shrinks, is looked at now and then


def _seen_by(uid: int | None, status: HostStatus, broker: Broker) -> HostStatus:
    if uid is None:
        return status
    kernels = broker.kernels
    own = [lease for lease in status.leases if lease.lease_id in kernels and kernels[lease.lease_id].uid == uid]
    return replace(status, leases=own)


def _lasting(status: HostStatus) -> HostStatus:
    """Return the status without what changes by itself."""
    return replace(
        status, leases=[replace(lease, age_ms=0, pinned_ms=int(lease.pinned_ms > 0)) for lease in status.leases]
    )


async def _within(event: asyncio.Event, patience_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await event.wait()
    return event.is_set()
