"""Suspends leases to make way for strangers: programs that have no lease but use memory reserved for leases.

Idle leases that have completed their minimum residency are suspended first, starting with the cheapest, until strangers have room to grow.
Busy leases are suspended only if their pool allows it (`yield-busy`), and only until the remaining reservations fit. Each lease is resumed
for its next cell once there is room. A stranger whose memory use fluctuates therefore costs a lease at most one swap per minimum residency.
"""

from fractional_gpu.core.changes import Changes
from fractional_gpu.core.model import Strangers
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease, OccupancyKind
from fractional_gpu.core.suspend import Victims, preemptible_from_ms, residency_ms, suspend_cost
from fractional_gpu.core.units import format_memory

_MARGIN_PARTS = 16  # one part in this many of a device's memory stays free for strangers that have grown


def yield_to_strangers(changes: Changes) -> None:
    """Begin suspends on devices where strangers and reservations together exceed the memory. Stop when no swap channel is free."""
    for device in changes.books.devices.values():
        # `free_mib` is 0 if one lease has all of the device
        free_mib = device.lease_capacity_mib - device.sums.reserved_mib + device.mib(OccupancyKind.SUSPENDING)
        margin_mib = device.spec.leasable_mib // _MARGIN_PARTS
        device.makes_way = device.stranger_mib > 0 and (free_mib < 0 or (device.makes_way and free_mib < margin_mib))
        if device.makes_way and not device.lost and not device.draining:
            _make_way(changes, device, free_mib, margin_mib)


def _make_way(changes: Changes, device: Device, free_mib: int, margin_mib: int) -> None:
    used = format_memory(device.stranger_mib)
    for lease in _leaving(changes.books, device):
        if free_mib >= (0 if lease.is_working else margin_mib) or not changes.channel_free:
            return
        if lease.host_need_mib <= changes.books.host_left_mib:
            free_mib += lease.held_mib
            changes.begin_suspend(lease, "suspend.stranger", f"programs without a share use {used} of its device")


def _leaving(books: Books, device: Device) -> list[Lease]:
    """Return the leases that may be suspended now to make room for strangers: idle ones first, then busy ones in pools that allow it."""
    idle = [
        lease
        for lease in Victims(books).idle(device.spec.device_id)
        if books.policy(lease).strangers in (Strangers.YIELD, Strangers.YIELD_BUSY)
        and lease.gate.ticket is None
        and books.is_time(lease.arrived_ms + residency_ms(books, lease))
    ]
    busy = [
        lease
        for lease in device.holders.values()
        if lease.occupancy is OccupancyKind.BUSY
        and books.policy(lease).strangers is Strangers.YIELD_BUSY
        and books.is_time(preemptible_from_ms(books, lease))
    ]
    return idle + sorted(busy, key=lambda lease: (lease.spec.priority, suspend_cost(books, lease), lease.lease_id))
