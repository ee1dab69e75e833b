"""Reports the status of leases, devices and the host, as messages and as a stream of changes."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from fractional_gpu import __version__
from fractional_gpu.broker.broker import Broker
from fractional_gpu.broker.clock import now_ms, within
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.recovery.lost_leases import lost_sentence
from fractional_gpu.core.model import DeviceView, LeaseView, Span
from fractional_gpu.core.revoke import REVOKED
from fractional_gpu.core.units import format_duration
from fractional_gpu.core.words import STRANGERS_HOLD
from fractional_gpu.gpu.interface import DeviceSensors
from fractional_gpu.protocol.errors import NotFoundError
from fractional_gpu.protocol.limits import PULSE_S
from fractional_gpu.protocol.messages import CLAIM, COMMAND, KERNEL
from fractional_gpu.protocol.status import (
    Cap,
    DeviceStatus,
    HostChange,
    HostStatus,
    LeaseStatus,
    LeftProcess,
    Neighbour,
    Stranger,
    describe_strangers,
)

HAD_ITS_TURN = "this kernel has had its turn on the GPU; kernels already waiting when this cell began go first"
"""The reason given for a cell that is waiting at its kernel's closed gate (`wait.turn`)."""

_MINUTE_MS = 60_000
_NO_USER = -1  # a uid that no user has
# Fields copied from the arbiter's view of a device.
_OF_VIEW = {field.name for field in fields(DeviceView)} & set(DeviceStatus.__struct_fields__) - {"pool"}


def explain(broker: Broker, view: LeaseView) -> tuple[str, str, Span | None]:
    if view.at_gate:
        return "wait.turn", HAD_ITS_TURN, broker.arbiter.gate_wait(view.spec.lease_id, now_ms())
    if view.revoked:
        return REVOKED.code, revoked_sentence(view), None
    ticket, kernel = broker.ticket(view.spec.lease_id), broker.kernels.get(view.spec.lease_id)
    if ticket is None and kernel is not None and kernel.ending.announced:
        return "cull.warned", kernel.ending.announced, None
    if ticket is None:
        return view.reason, view.sentence, None
    asked = "" if kernel is None else "".join(f"; {said}" for one in broker.asked_servers if (said := one(kernel)))
    sentence = ticket.sentence
    if ticket.reason == "wait.stranger":
        viewer, known = Viewer(_NO_USER, caller=view.spec.uid), broker.enforcement.strangers
        there = (one for at in broker.arbiter.stranger_devices(view.spec.lease_id) for one in known.get(at, []))
        sentence = sentence.replace(STRANGERS_HOLD, describe_strangers(map(viewer.shown, there)) or STRANGERS_HOLD)
    return ticket.reason, f"{sentence}{asked}", ticket.expected


def times(expected: Span | None) -> dict[str, Any]:
    return {} if expected is None else {one.name: getattr(expected, one.name) for one in fields(Span)}


def lease_status(broker: Broker, kernel: Kernel, view: LeaseView) -> LeaseStatus:
    reason, sentence, expected = explain(broker, view)
    ticket = broker.ticket(kernel.lease_id)
    device = broker.devices.get(view.device_id or "")
    pool = broker.arbiter.pools().get(view.spec.pool)
    return LeaseStatus(
        lease=view,
        now_ms=now_ms(),
        reason=reason,
        sentence=sentence,
        position=ticket.position if ticket is not None else None,
        expected=expected,
        **structs.asdict(kernel.facts),
        kind=CLAIM if kernel.launch.claim else COMMAND if kernel.launch.command else KERNEL,
        pid=kernel.identity.pid if kernel.identity and not kernel.ending.survivors else None,
        device_name=device.name if device else "",
        simulated=broker.monitor.kind == "simulated",
        busy=kernel.busy,
        gated=kernel.link is not None,
        measured=kernel.measurement.is_fresh,
        working=kernel.gpu_work.working and kernel.gpu_work.last_us > 0,
        left=[
            LeftProcess(pid=one.identity.pid, command=one.command, used_mib=one.used_mib)
            for one in kernel.ending.survivors
        ],
        cap=_cap(broker, kernel),
        slowdown=broker.arbiter.slowdown(kernel.lease_id),
        foresight=str(pool.foresight) if pool is not None else "",
        budget=kernel.budget,
        budget_used_up=kernel.budget_used_up,
        host_goes_away_in_ms=_left_ms(broker.host_deadline_ms),
    )


def _cap(broker: Broker, kernel: Kernel) -> Cap:
    if broker.hard_caps.caps(kernel):
        return Cap.DRIVER
    return Cap.FRAMEWORK if kernel.link is not None else Cap.SAMPLE


def _left_ms(deadline_ms: int | None) -> int | None:
    return None if deadline_ms is None else max(0, deadline_ms - now_ms())


def salvage_counts(broker: Broker) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    if all(device.deadline_ms is None for device in broker.arbiter.devices()):
        return found
    for _, view in broker.views():
        if view.deadline_ms is not None:
            for device_id in view.device_ids:
                saved, lost = found.get(device_id, (0, 0))
                found[device_id] = (saved, lost + 1) if view.lost_because else (saved + 1, lost)
    return found


def view_of(broker: Broker, kernel: Kernel) -> LeaseView:
    view = broker.arbiter.lease(kernel.lease_id)
    if view is None:
        raise NotFoundError("the lease has ended", reason="unknown-lease")
    return view


def full_lease_status(broker: Broker, kernel: Kernel) -> LeaseStatus:
    view = view_of(broker, kernel)
    return replace(
        lease_status(broker, kernel, view), neighbours=neighbours(broker, view), advice=broker.habits.of_lease(view)
    )


def revoked_sentence(view: LeaseView) -> str:
    left = format_duration(max(0, (view.ends_ms or 0) - now_ms()) // _MINUTE_MS * _MINUTE_MS)
    return (
        "the seat of this kernel's server has ended: the kernel keeps its variables, uses no GPU, counts against its user's limits and "
        f"ends in about {left}; to keep it, start that server again with at least as large a share of pool {view.spec.pool!r}; to end "
        f"it now, run `jupyter gpu end {view.spec.lease_id[:8]}`"
    )


@dataclass(frozen=True, slots=True)
class Viewer:
    """The caller of a status route: a uid (None if it may see everything), or a seat and its owner if the caller holds the seat's token."""

    uid: int | None = None
    seat: str | None = None
    owner: str = ""  # "" if the seat has ended
    caller: int | None = None  # the caller's uid, whatever the caller may see

    def sees(self, uid: int, view: LeaseView) -> bool:
        if self.seat is not None:
            own = bool(self.owner) and view.revoked and view.spec.owner == self.owner
            return view.spec.seat == self.seat or own
        # The uid is not enough to see a seat's lease, because containers share uids.
        return self.uid is None or (uid == self.uid and not view.spec.seat)

    def shown(self, stranger: Stranger) -> Stranger:
        """Return what the viewer may see of the process. Nothing is marked as a seat holder's own, because seat holders share uids."""
        own = stranger.uid is not None and stranger.uid == self.caller
        if self.seat is None and (own or self.uid is None):
            return structs.replace(stranger, own=own)
        return Stranger(user=stranger.user, used_mib=stranger.used_mib)


def host_status(broker: Broker, socket: str, viewer: Viewer) -> HostStatus:
    used, salvage = broker.used_mib, salvage_counts(broker)
    devices = [
        DeviceStatus(
            **{name: getattr(view, name) for name in _OF_VIEW},
            **asdict(broker.sensors.get(view.device_id, DeviceSensors())),
            index=broker.devices[view.device_id].index,
            pool=view.pool or "",
            used_mib=used.get(view.device_id, 0),
            strangers=[viewer.shown(one) for one in broker.enforcement.strangers.get(view.device_id, [])],
            goes_away_in_ms=_left_ms(view.deadline_ms),
            leases_saved=salvage.get(view.device_id, (0, 0))[0],
            leases_lost=salvage.get(view.device_id, (0, 0))[1],
        )
        for view in broker.arbiter.devices()
        if view.device_id in broker.devices
    ]
    return HostStatus(
        version=__version__,
        pid=os.getpid(),
        simulated=broker.monitor.kind == "simulated",
        socket=socket,
        host_budget_mib=broker.arbiter.host_budget_mib,
        host_saved_mib=broker.arbiter.host_saved_mib,
        devices=sorted(devices, key=lambda device: device.index),
        leases=[lease_status(broker, kernel, view) for kernel, view in broker.views() if viewer.sees(kernel.uid, view)],
        trouble=broker.writer.trouble or broker.writer.over_limit or lost_sentence(broker.lost),
        pools={name: list(pool.fractions_milli) for name, pool in sorted(broker.arbiter.pools().items())},
        goes_away_in_ms=_left_ms(broker.host_deadline_ms),
        culls_idle=broker.culls_idle,
    )


def device_status(broker: Broker, device_id: str) -> DeviceStatus:
    (device,) = [one for one in host_status(broker, "", Viewer(_NO_USER)).devices if one.device_id == device_id]
    return device


def neighbours(broker: Broker, lease: LeaseView) -> list[Neighbour]:
    mine = set(lease.device_ids) if lease.reserved_mib else set()
    there = [
        view
        for _, view in broker.views()
        if view.spec.lease_id != lease.spec.lease_id and view.reserved_mib and mine.intersection(view.device_ids)
    ]
    return [
        Neighbour(
            fraction_milli=view.spec.fraction_milli,
            reserved_mib=view.reserved_mib,
            state=view.state.value,
            busy=view.busy,
            label=view.spec.label if view.spec.is_same_user(lease.spec) else "",
        )
        for view in sorted(there, key=lambda view: (-view.reserved_mib, view.spec.lease_id))
    ]


# `GET /v1/events` sends subscribers the host's status, at once and after each change.
#
# - One task computes the status for all subscribers, at most every `RATE_S`, and less often if this takes long. Slow subscribers get fewer
#   but current lines, because lines are never queued.
# - A change of an age, or of the remaining time of a pin, does not cause a line. The time left before a deadline causes lines in coarse
#   steps.
# - Later lines contain the devices and leases that changed. They always contain pinned leases and deadlines, because clients count down
#   from the time at which they receive these.


RATE_S = 0.2
_SHARE = 20  # statuses take at most a twentieth of the broker's time, however many leases and subscribers there are
_RUNNING = frozenset({"now_ms", "host_goes_away_in_ms"})  # fields that change just because time passes
_lasting_fields = attrgetter(*(name for name in LeaseStatus.__struct_fields__ if name not in _RUNNING))
_MINUTE_S, _STEP_S = 60, 5


def coarse_s(left_ms: int | None) -> int | None:
    """Return the seconds left before a deadline, rounded up to the minute, or to 5 s in the last two minutes. Return 0 if it has passed."""
    if left_ms is None:
        return None
    step_s = _MINUTE_S if left_ms > 2 * _MINUTE_MS else _STEP_S
    return -(-left_ms // (step_s * 1000)) * step_s


@dataclass(frozen=True, slots=True)
class _LastStatus:
    host: HostStatus  # without devices and leases
    devices: dict[str, DeviceStatus]
    leases: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, status: HostStatus) -> "_LastStatus":
        return cls(
            replace(status, devices=[], leases=[], goes_away_in_ms=coarse_s(status.goes_away_in_ms)),
            {
                device.device_id: replace(device, goes_away_in_ms=coarse_s(device.goes_away_in_ms))
                for device in status.devices
            },
            {
                lease.lease_id: (
                    lease.pinned_ms > 0,
                    coarse_s(lease.goes_away_in_ms),
                    coarse_s(lease.host_goes_away_in_ms),
                    *_lasting_fields(lease),
                )
                for lease in status.leases
            },
        )


class StatusStream:
    def __init__(self, broker: Broker, socket_path: str) -> None:
        self._broker = broker
        self._socket_path = socket_path
        self._subscribers = 0
        self._sampling: asyncio.Task[None] | None = None
        self._latest: HostStatus | None = None
        self._took_s = 0.0  # time spent on the last edition, for all subscribers so far
        self._lasting: _LastStatus | None = None  # of the latest edition
        self._edition = 0  # number of changes of `_lasting`
        self._changed = asyncio.Event()  # replaced with each edition

    async def follow(self, viewer: Viewer) -> AsyncGenerator[HostStatus | HostChange | None, None]:
        """Yield the status the viewer may see, then each change. Yield None whenever `PULSE_S` has passed without a change.

        Sampling stops when the last subscriber leaves.
        """
        self._subscribers += 1
        if self._sampling is None:
            self._sampling = asyncio.get_running_loop().create_task(self._sample())
        told: _LastStatus | None = None
        edition = 0
        try:
            while True:
                changed, latest = self._changed, self._latest
                if latest is not None and edition != self._edition:
                    edition, begun_s = self._edition, time.monotonic()
                    status = _seen_by(viewer, latest, self._broker.kernels)
                    before, told = told, _LastStatus.of(status)
                    line = status if before is None else _difference(before, told, status)
                    self._took_s += time.monotonic() - begun_s
                    if before != told:
                        yield line
                        continue
                if not await within(PULSE_S, changed):
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
            self._latest = host_status(self._broker, self._socket_path, Viewer())
            if (lasting := _LastStatus.of(self._latest)) != self._lasting:
                self._lasting = lasting
                self._edition += 1
                self._changed.set()
                self._changed = asyncio.Event()
            self._took_s = time.monotonic() - begun_s
            await asyncio.sleep(RATE_S)  # so that the subscribers get their lines
            await asyncio.sleep(max(0.0, _SHARE * self._took_s - RATE_S))
            # Some values change just because time passes, such as a shrinking forecast, so sample from time to time without an event.
            ends = self._latest.goes_away_in_ms or any(device.goes_away_in_ms for device in self._latest.devices)
            await within(_STEP_S / 2 if ends else PULSE_S, changed)


def _seen_by(viewer: Viewer, status: HostStatus, kernels: Mapping[str, Kernel]) -> HostStatus:
    leases = [
        lease
        for lease in status.leases
        if (kernel := kernels.get(lease.lease_id)) is not None and viewer.sees(kernel.uid, lease.lease)
    ]
    devices = [replace(one, strangers=[viewer.shown(stranger) for stranger in one.strangers]) for one in status.devices]
    return replace(status, leases=leases, devices=devices)


def _difference(before: _LastStatus, now: _LastStatus, status: HostStatus) -> HostChange:
    return HostChange(
        changed=replace(
            status,
            devices=[
                one
                for one in status.devices
                if one.goes_away_in_ms is not None or before.devices.get(one.device_id) != one
            ],
            leases=[
                one
                for one in status.leases
                if one.pinned_ms
                or one.goes_away_in_ms is not None
                or one.host_goes_away_in_ms is not None
                or before.leases.get(one.lease_id) != now.leases[one.lease_id]
            ],
        ),
        ended=[lease_id for lease_id in before.leases if lease_id not in now.leases],
    )
