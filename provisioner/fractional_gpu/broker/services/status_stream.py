"""`GET /v1/events`: tells subscribers the host's status, at once and after each change.

Rules:

- One task computes the status for all subscribers, at most every `RATE_S` (less often where computing takes long), and only while there
  are subscribers and something may have changed. A subscriber that reads slowly gets fewer, newer lines; lines are never queued.
- A subscriber gets the present status first, and then a line whenever the status differs from its last line. Ages and the rest of a pin
  run on by themselves: a difference in them alone causes no line.
- A subscriber sees the leases that `GET /v1/status` would show it.
- With `changes_only` a line after the first holds the devices and leases that differ from the line before. Pinned leases are in each
  line, because clients count a pin down from when they receive it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.services.status import host_status, is_shown
from fractional_gpu.protocol.limits import PULSE_S
from fractional_gpu.protocol.messages import DeviceStatus, HostChange, HostStatus, LeaseStatus

__all__ = ["RATE_S", "StatusStream"]

RATE_S = 0.2
_SHARE = 20  # computing the status takes a twentieth of the broker's time at most, however many leases there are
_lasting_fields = attrgetter(*(name for name in LeaseStatus.__struct_fields__ if name not in {"age_ms", "pinned_ms"}))


@dataclass(frozen=True, slots=True)
class _Lasting:
    """What of a status does not change by itself, to be compared with another one's."""

    host: HostStatus  # without devices and leases
    devices: dict[str, DeviceStatus]
    leases: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, status: HostStatus) -> "_Lasting":
        return cls(
            replace(status, devices=[], leases=[]),
            {device.device_id: device for device in status.devices},
            {lease.lease_id: (lease.pinned_ms > 0, *_lasting_fields(lease)) for lease in status.leases},
        )


class StatusStream:
    """Tells subscribers what changed. One per broker; all of it runs on the broker's loop."""

    def __init__(self, broker: Broker, socket_path: str) -> None:
        self._broker = broker
        self._socket_path = socket_path
        self._subscribers = 0
        self._sampling: asyncio.Task[None] | None = None
        self._latest: HostStatus | None = None
        self._lasting: _Lasting | None = None  # of the latest
        self._edition = 0  # how often `_lasting` changed
        self._changed = asyncio.Event()  # replaced with each edition

    async def follow(
        self, uid: int | None, seat: str | None = None, owner: str = "", *, changes_only: bool = False
    ) -> AsyncGenerator[HostStatus | HostChange | None, None]:
        """Yield the status that this uid (None: all) and seat, of this owner, may see: at once, and after each change.

        Yields None when nothing has changed for `PULSE_S`. With `changes_only` all but the first are `HostChange`s.

        Close it to stop: the last subscriber that leaves ends the sampling.
        """
        self._subscribers += 1
        if self._sampling is None:
            self._sampling = asyncio.get_running_loop().create_task(self._sample())
        told: _Lasting | None = None
        edition = 0
        try:
            while True:
                changed, latest = self._changed, self._latest
                if latest is not None and edition != self._edition:
                    edition, status = self._edition, _seen_by(latest, self._broker, uid, seat, owner)
                    before, told = told, _Lasting.of(status)
                    if before != told:
                        yield status if before is None or not changes_only else _difference(before, told, status)
                        continue
                if not await _within(changed, PULSE_S):
                    if self._sampling.done():
                        self._sampling.result()
                    yield None
        finally:
            self._subscribers -= 1
            if self._subscribers == 0:
                self._sampling.cancel()
                self._sampling = self._latest = self._lasting = None

    async def _sample(self) -> None:
        while True:
            changed, begun_s = self._broker.anything_changed, time.monotonic()
            self._latest = host_status(self._broker, self._socket_path, None)
            if (lasting := _Lasting.of(self._latest)) != self._lasting:
                self._lasting = lasting
                self._edition += 1
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(max(RATE_S, _SHARE * (time.monotonic() - begun_s)))
            # No event announces what changes with time alone, such as a shrinking forecast: sample now and then without one.
            await _within(changed, PULSE_S)


def _seen_by(status: HostStatus, broker: Broker, uid: int | None, seat: str | None, owner: str) -> HostStatus:
    seen = [lease for lease in status.leases if _may_see(lease.lease_id, broker, uid, seat, owner)]
    return replace(status, leases=seen)


def _may_see(lease_id: str, broker: Broker, uid: int | None, seat: str | None, owner: str) -> bool:
    kernel, view = broker.kernels.get(lease_id), broker.arbiter.lease(lease_id)
    return kernel is not None and view is not None and is_shown(kernel, view, uid, seat, owner)


def _difference(before: _Lasting, now: _Lasting, status: HostStatus) -> HostChange:
    return HostChange(
        changed=replace(
            status,
            devices=[one for one in status.devices if before.devices.get(one.device_id) != one],
            leases=[
                one
                for one in status.leases
                if one.pinned_ms or before.leases.get(one.lease_id) != now.leases[one.lease_id]
            ],
        ),
        ended=[lease_id for lease_id in before.leases if lease_id not in now.leases],
    )


async def _within(event: asyncio.Event, patience_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await event.wait()
    return event.is_set()
