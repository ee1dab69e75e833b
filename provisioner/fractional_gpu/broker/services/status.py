"""The status of leases, devices and the host, as messages."""

import os
from dataclasses import asdict

from msgspec.structs import replace

from fractional_gpu import __version__
from fractional_gpu.broker.broker import Broker, devices_of, now_ms
from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.core.handlers.revocation import REVOKED
from fractional_gpu.core.model import LeaseView
from fractional_gpu.core.units import format_duration
from fractional_gpu.gpu.interface import DeviceSensors
from fractional_gpu.protocol.errors import NotFoundError
from fractional_gpu.protocol.messages import (
    DeviceStatus,
    HostStatus,
    LeaseStatus,
    LeftProcess,
    Neighbour,
)

__all__ = [
    "HAD_ITS_TURN",
    "device_status",
    "full_lease_status",
    "host_status",
    "is_shown",
    "lease_status",
    "neighbours",
    "revoked_sentence",
    "view_of",
]

HAD_ITS_TURN = "this kernel had its turn on the device; others waited before this cell began, and go first"
"""Why a cell waits at its kernel's closed gate (`wait.turn`)."""

_MINUTE_MS = 60_000
_NOBODY = -1  # a uid that no user has


def lease_status(broker: Broker, kernel: Kernel, view: LeaseView) -> LeaseStatus:
    """Return the message about one lease."""
    ticket = broker.ticket(kernel.lease_id)
    expected = ticket.expected if ticket is not None else None
    reason, sentence = (ticket.reason, ticket.sentence) if ticket is not None else (view.reason, view.sentence)
    if view.at_gate:
        reason, sentence = "wait.turn", HAD_ITS_TURN
        expected = broker.arbiter.gate_wait(kernel.lease_id, now_ms())
    elif view.revoked:
        reason, sentence = REVOKED.code, revoked_sentence(view)
    device = broker.devices.get(view.device_id or "")
    return LeaseStatus(
        lease_id=kernel.lease_id,
        state=view.state.value,
        pool=view.spec.pool,
        owner=view.spec.owner,
        label=view.spec.label,
        kernel_id=kernel.launch.kernel_id,
        pid=kernel.identity.pid if kernel.identity and not kernel.ending.survivors else None,
        fraction_milli=view.spec.fraction_milli,
        reserve_mib=view.spec.reserve_mib,
        used_mib=view.used_mib,
        saved_mib=view.saved_mib,
        device_id=view.device_id,
        device_name=device.name if device else "",
        simulated=broker.monitor.kind == "simulated",
        busy=kernel.busy,
        gated=kernel.link is not None,
        age_ms=max(0, now_ms() - view.since_ms),
        reason=reason,
        sentence=sentence,
        position=ticket.position if ticket is not None else None,
        device_ids=list(devices_of(view)),
        request_mib=view.spec.reserve_mib if view.spec.request_mib is None else view.spec.request_mib,
        reserved_mib=view.reserved_mib,
        pinned_ms=max(0, view.pinned_until_ms - now_ms()),
        expected_ms=expected.expected_ms if expected is not None else None,
        low_ms=expected.low_ms if expected is not None else None,
        high_ms=expected.high_ms if expected is not None else None,
        resume_ms=view.resume_ms,
        suspends=kernel.suspends,
        resumes=kernel.resumes,
        stays=view.unsuspendable_reason,
        working=kernel.gpu_work.working and kernel.gpu_work.last_us > 0,
        seat=view.spec.seat,
        revoked=view.revoked,
        ends_in_ms=None if view.ends_ms is None else max(0, view.ends_ms - now_ms()),
        left=[
            LeftProcess(pid=one.identity.pid, command=one.command, used_mib=one.used_mib)
            for one in kernel.ending.survivors
        ],
    )


def view_of(broker: Broker, kernel: Kernel) -> LeaseView:
    """Return the arbiter's view of the lease. Raises NotFoundError when it is over."""
    view = broker.arbiter.lease(kernel.lease_id)
    if view is None:
        raise NotFoundError("the lease is over", reason="unknown-lease")
    return view


def full_lease_status(broker: Broker, kernel: Kernel) -> LeaseStatus:
    """Return the lease as it is now, with its neighbours on the device. Raises NotFoundError when it is over."""
    view = view_of(broker, kernel)
    return replace(lease_status(broker, kernel, view), neighbours=neighbours(broker, view))


def revoked_sentence(view: LeaseView) -> str:
    """Return the sentence about a revoked lease: its state, its end, and what the user can do."""
    left = format_duration(max(0, (view.ends_ms or 0) - now_ms()) // _MINUTE_MS * _MINUTE_MS)
    return (
        "the seat of this kernel's server has ended: it keeps its variables, uses no GPU and counts for its user, and ends in about "
        f"{left}; start that server again with as large a share of pool {view.spec.pool!r}, which takes the kernel over, or end it "
        f"with `jupyter gpu end {view.spec.lease_id[:8]}`"
    )


def is_shown(kernel: Kernel, view: LeaseView, uid: int | None, seat: str | None, owner: str = "") -> bool:
    """Whether a peer of this uid (None: it may see all), or with the token of this seat and its owner, may see the lease."""
    if seat is not None:
        own = bool(owner) and view.revoked and view.spec.owner == owner
        return view.spec.seat == seat or own
    # The uid is not enough for a seat's lease: containers share uids.
    return uid is None or (kernel.uid == uid and not view.spec.seat)


def host_status(
    broker: Broker, socket: str, uid: int | None, *, seat: str | None = None, owner: str = ""
) -> HostStatus:
    """Return the host's status with the leases that the peer may see. Sums over devices include all leases."""
    used = broker.used_mib
    devices = [
        DeviceStatus(
            device_id=view.device_id,
            index=broker.devices[view.device_id].index,
            name=view.name,
            pool=view.pool or "",
            memory_mib=view.memory_mib,
            leasable_mib=view.leasable_mib,
            used_mib=used.get(view.device_id, 0),
            reserved_mib=view.reserved_mib,
            stranger_mib=view.stranger_mib,
            over_committed=view.over_committed,
            lost=view.lost,
            why_not=view.why_not,
            strangers=broker.enforcement.strangers.get(view.device_id, []),
            **asdict(broker.sensors.get(view.device_id, DeviceSensors())),
            draining=view.draining,
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
        leases=[
            lease_status(broker, kernel, view)
            for kernel, view in broker.views()
            if is_shown(kernel, view, uid, seat, owner)
        ],
        trouble=broker.writer.trouble,
        pools={name: list(pool.fractions_milli) for name, pool in sorted(broker.arbiter.pools().items())},
    )


def device_status(broker: Broker, device_id: str) -> DeviceStatus:
    """Return one device that the broker has."""
    (device,) = [one for one in host_status(broker, "", _NOBODY).devices if one.device_id == device_id]
    return device


def neighbours(broker: Broker, lease: LeaseView) -> list[Neighbour]:
    """Return the other leases with memory on the lease's devices, the largest first; labels only of the same owner's leases."""
    mine = set(devices_of(lease)) if lease.reserved_mib else set()
    there = [
        view
        for _, view in broker.views()
        if view.spec.lease_id != lease.spec.lease_id and view.reserved_mib and mine.intersection(devices_of(view))
    ]
    return [
        Neighbour(
            fraction_milli=view.spec.fraction_milli,
            reserved_mib=view.reserved_mib,
            state=view.state.value,
            busy=view.busy,
            label=view.spec.label if view.spec.owner == lease.spec.owner else "",
        )
        for view in sorted(there, key=lambda view: (-view.reserved_mib, view.spec.lease_id))
    ]
