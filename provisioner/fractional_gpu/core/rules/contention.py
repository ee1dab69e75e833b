"""How much compute the busy leases of a device leave, and how much they slow each other down.

Each lease needs a part of a device while it is busy (its demand, learnt): what it would use if it were alone. Busy leases that need no
more than the whole device together do not slow each other down. Beyond that, by the model of `time_slicing`, their cells take longer.

**Choosing a device.** A pool that spreads prefers devices in these classes:

1. The demands with the newcomer's own stay within the pool's bound (`slowdown_bound_milli`). Of these, less comes first, in steps of a
   tenth of a device. Idle leases count with a quarter of their demands here, as their next cells will come.
2. Beyond the bound, the least excess first, in steps of a quarter of a device.

`fragmentation` decides within a step. A lease that was let in for a cell counts as busy before the cell begins. No ticket waits for
compute: all this only orders devices that have, or will have, the memory.
"""

from collections.abc import Sequence

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Device, Lease, OccupancyKind
from fractional_gpu.core.model import Compute
from fractional_gpu.core.rules.eligibility import other_devices
from fractional_gpu.core.time_slicing import WHOLE_MILLI, slowed_milli, stretch_milli

FULL = 1 << 20
"""From this on a `fullness` is beyond the bound."""
_STEP_MILLI = 100  # within the bound
_EXCESS_STEP_MILLI = 250  # beyond it


def spreads(books: Books, lease: Lease) -> bool:
    """Return whether the lease's pool weighs compute."""
    return books.policy(lease).compute is Compute.SPREAD


def room_milli(books: Books, newcomer: Lease) -> int:
    """Return what neighbours may need of a device, thousandths, so that all stays within the bound of the newcomer's pool."""
    return books.policy(newcomer).slowdown_bound_milli - newcomer.demand_milli


def fullness(device: Device, room_milli: int, leaving: Sequence[Lease] = ()) -> int:
    """Return how full of busy leases the device would be for a newcomer: less is better; `FULL` and up: beyond its pool's bound.

    `room_milli`: what is left to neighbours; `leaving` make room for it.
    """
    busy_milli, resting_milli = device.sums.wanted_milli, device.sums.resting_milli
    for lease in leaving:
        busy_milli -= lease.counted_milli
        resting_milli -= lease.resting_milli
    if busy_milli <= max(0, room_milli):
        return (busy_milli + resting_milli) // _STEP_MILLI
    return FULL + (busy_milli - room_milli) // _EXCESS_STEP_MILLI


def least_full(books: Books, newcomer: Lease, places: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the least full of the devices (id, and anything), in order. `places` is not empty."""
    room, devices = room_milli(books, newcomer), books.devices
    ranks = [fullness(devices[device_id], room) for device_id, _ in places]
    return [place for rank, place in zip(ranks, places, strict=True) if rank == min(ranks)]


def excess(books: Books, device: Device, newcomer: Lease, leaving: Sequence[Lease] = ()) -> int:
    """Return how far beyond the bound the device would be, in coarse steps; 0: within it, or its pool does not weigh compute."""
    if not spreads(books, newcomer):
        return 0
    return max(0, fullness(device, room_milli(books, newcomer), leaving) - FULL + 1)


def busy_others(device: Device, lease: Lease) -> list[Lease]:
    """Return the other leases that are busy on a device."""
    return [one for one in device.holders.values() if one.occupancy is OccupancyKind.BUSY and one is not lease]


def beside(want_milli: int, others: Sequence[Lease]) -> int:
    """Return how many times as long as alone a cell takes that needs so much of a device, beside other busy leases, thousandths."""
    return slowed_milli(want_milli, stretch_milli((want_milli, *[one.busy_milli for one in others])))


def crowding_ms(books: Books, lease: Lease) -> int:
    """Return what the lease's next cell and those beside it lose because idle leases hold memory of less busy devices, ms."""
    here = books.devices.get(lease.occupied_ids[0]) if lease.count == 1 and lease.occupied_ids else None
    if here is None or not spreads(books, lease):
        return 0
    with_room = with_room_made = _added_loss(here, lease)
    if not with_room:
        return 0
    for device_id in other_devices(books, lease):
        device = books.devices[device_id]
        if device.free_mib >= lease.held_mib:
            with_room = min(with_room, _added_loss(device, lease))
        elif device.free_mib + device.mib(OccupancyKind.IDLE) >= lease.held_mib:
            with_room_made = min(with_room_made, _added_loss(device, lease))
    lost = max(0, with_room - with_room_made)
    return books.forecasts.next_cell_ms(lease.lease_id) * lost // WHOLE_MILLI


def _added_loss(device: Device, lease: Lease) -> int:
    """Return what the lease's cell and those on the device lose more for running together, ms a second, at least."""
    others_milli = device.sums.wanted_milli
    if lease.counted_milli and device.spec.device_id in lease.occupied_ids:
        others_milli -= lease.counted_milli
    return _loss(others_milli + lease.demand_milli) - _loss(others_milli)


def _loss(wants_milli: int) -> int:
    """Return what cells that need so much together lose, ms a second. No cell takes less than by this; `time_slicing` is exact."""
    return wants_milli * max(0, wants_milli - WHOLE_MILLI) // WHOLE_MILLI
