"""The broker's news: one look at everything after a change, shared by all who follow.

Rules:

- Nobody who follows costs anything while nothing changes, and however much changes, the whole is looked at `RATE_S` apart at the soonest
  (later where a look takes long), once for all followers: a follower that reads slowly gets fewer, newer lines, never a queue of old ones.
- A follower gets the present state at once, and then only what differs from what it was told. Ages and what is left of a pin run
  on by themselves: a difference in them alone is none.
- What a peer may see is what `GET /v1/status` would tell it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.services.status import host_status, is_shown
from fractional_gpu.protocol.limits import PULSE_S
from fractional_gpu.protocol.messages import HostStatus, LeaseStatus

__all__ = ["RATE_S", "Feed"]

RATE_S = 0.2
_SHARE = 20  # looking takes a twentieth of the broker's time at most, however many leases there are
_Lasting = tuple[HostStatus, list[tuple[Any, ...]]]
_what_lasts = attrgetter(*(field.name for field in fields(LeaseStatus) if field.name not in {"age_ms", "pinned_ms"}))


class Feed:
    """Tells followers what changed. One per broker; all of it runs on the broker's loop."""

    def __init__(self, broker: Broker, socket_path: str) -> None:
        self._broker = broker
        self._socket_path = socket_path
        self._followers = 0
        self._looking: asyncio.Task[None] | None = None
        self._latest: HostStatus | None = None
        self._lasting: _Lasting | None = None  # the same without what changes by itself
        self._edition = 0  # of what lasts
        self._news = asyncio.Event()

    async def follow(
        self, uid: int | None, seat: str | None = None, owner: str = ""
    ) -> AsyncGenerator[HostStatus | None, None]:
        """Yield the state that this uid (None: all) and seat, of this owner, may see, at once and after each change.

        Yields None when all is quiet for a while.

        Close it to stop following: the last follower who leaves ends the looking.
        """
        self._followers += 1
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        told: _Lasting | None = None
        edition = 0
        try:
            while True:
                news, latest = self._news, self._latest
                if latest is not None and edition != self._edition:
                    edition, status = self._edition, _seen_by(latest, self._broker, uid, seat, owner)
                    if (lasting := _lasting(status)) != told:
                        told = lasting
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
                self._looking = self._latest = self._lasting = None

    async def _look(self) -> None:
        while True:
            anything_changed, begun_s = self._broker.anything_changed, time.monotonic()
            self._latest = host_status(self._broker, self._socket_path, None)
            if (lasting := _lasting(self._latest)) != self._lasting:
                self._lasting = lasting
                self._edition += 1
                self._news.set()
                self._news = asyncio.Event()
            await asyncio.sleep(max(RATE_S, _SHARE * (time.monotonic() - begun_s)))
            await _within(
                anything_changed, PULSE_S
            )  # what stirs nothing, such as a forecast that shrinks, is looked at now and then


def _seen_by(status: HostStatus, broker: Broker, uid: int | None, seat: str | None, owner: str) -> HostStatus:
    seen = [lease for lease in status.leases if _may_see(lease.lease_id, broker, uid, seat, owner)]
    return replace(status, leases=seen)


def _may_see(lease_id: str, broker: Broker, uid: int | None, seat: str | None, owner: str) -> bool:
    kernel, view = broker.kernels.get(lease_id), broker.arbiter.lease(lease_id)
    return kernel is not None and view is not None and is_shown(kernel, view, uid, seat, owner)


def _lasting(status: HostStatus) -> _Lasting:
    """Return what of the status does not change by itself, to be compared."""
    return replace(status, leases=[]), [(lease.pinned_ms > 0, *_what_lasts(lease)) for lease in status.leases]


async def _within(event: asyncio.Event, patience_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await event.wait()
    return event.is_set()
