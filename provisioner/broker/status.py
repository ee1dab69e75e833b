"""What the broker tells about leases and devices, as messages."""

import os

from provisioner import __version__
from provisioner.broker.broker import Broker, now_ms
from provisioner.broker.kernels import Kernel
from provisioner.core.model import LeaseView
from provisioner.protocol.messages import DeviceStatus, HostStatus, LeaseStatus

__all__ = ["host_status", "lease_status"]


def lease_status(broker: Broker, kernel: Kernel, view: LeaseView) -> LeaseStatus:
    """Return one lease for people and programs."""
    ticket = broker.arbiter.ticket(kernel.lease_id)
    device = broker.devices.get(view.device_id or "")
    return LeaseStatus(
        lease_id=kernel.lease_id,
        state=view.state.value,
        pool=view.spec.pool,
        owner=view.spec.owner,
        label=view.spec.label,
        kernel_id=kernel.kernel_id,
        pid=kernel.identity.pid if kernel.identity else None,
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
        reason=ticket.reason if ticket is not None else view.reason,
        sentence=ticket.sentence if ticket is not None else view.sentence,
        position=ticket.position if ticket is not None else None,
        suspends=kernel.suspends,
        resumes=kernel.resumes,
        stays=view.stays,
        seat=view.spec.seat,
    )


def _is_shown(kernel: Kernel, view: LeaseView, uid: int | None, seat: str | None) -> bool:
    if seat is not None:
        return view.spec.seat == seat
    # A seat's leases are not everybody's of that uid: containers share uids.
    return uid is None or (kernel.uid == uid and not view.spec.seat)


def host_status(broker: Broker, socket: str, uid: int | None, *, seat: str | None = None) -> HostStatus:
    """Return the host's state; with a seat, only its leases; with a uid, only that user's (sums over devices include everybody's)."""
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
            lease_status(broker, kernel, view) for kernel, view in broker.views() if _is_shown(kernel, view, uid, seat)
        ],
        pools={name: list(pool.fractions_milli) for name, pool in sorted(broker.arbiter.pools().items())},
    )
