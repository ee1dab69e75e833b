"""Finds the devices a lease may be placed on, and picks the best of them.

**Allowed devices** (`allowed_devices`). A lease may be placed on the devices of its pool. Saved state may return to its home, the device it
was saved from, or go to devices of the same kind if the pool moves leases.

**Compute.** A busy lease's demand is the part of a device it needs, which the arbiter learns. Busy leases that together need more than the
whole device slow each other down (`time_slicing`). A pool that spreads leases prefers devices where total demand, including the newcomer's,
stays within its bound (`slowdown_bound_milli`). Among these it prefers the emptiest. If there are none, it prefers the device with the
least excess. Compute never keeps a ticket waiting: it only affects the ranking of devices that have, or will have, enough memory.

**Memory.** Among devices that rank equally for compute, a lease gets the one whose free memory it fragments least (`DeviceChoice`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fractional_gpu.core.forecasts.asks import RequestedSizes
from fractional_gpu.core.model import Compute, LeaseSpec, LeaseState, PoolSpec
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Device, Lease, OccupancyKind
from fractional_gpu.core.time_slicing import slowed_milli, stretch_milli


def allowed_devices(books: Books, lease: Lease) -> tuple[str, ...]:
    """Return the devices on which the lease's ticket can be served. A lease that is waiting to grow stays on its own devices."""
    if not lease.is_growing:
        return eligible_devices(books, books.policy(lease), lease)
    there = [books.devices[device_id] for device_id in lease.device_ids if device_id in books.devices]
    admits = len(there) == len(lease.device_ids) and not any(device.lost or device.draining for device in there)
    return lease.device_ids if admits else ()


def eligible_devices(books: Books, pool: PoolSpec, lease: Lease) -> tuple[str, ...]:
    """Return the devices the lease may be placed on now.

    Saved state can return to its home, even if that device has left the pool. If the pool moves leases and has enough devices of the same
    kind, these are listed after the home. State from devices of several kinds can only return home. Lost or draining devices are excluded,
    as are devices the lease's spec does not allow, even if they are its home.
    """
    allowed = allowed_of(pool, lease.spec)
    if lease.state is not LeaseState.SUSPENDED:
        bound = lease.bound_ids
        return tuple(one for one in allowed if _admits(books, one) and (not bound or one in bound))
    homes = tuple(device_id for device_id in lease.home_ids if device_id in books.devices)
    if not homes or len(homes) < len(lease.home_ids):
        return ()  # one of its old devices is unknown here, and a restore on another device could kill the process
    kinds = {books.devices[device_id].spec.name for device_id in homes}
    moves = pool.may_move and len(kinds) == 1 and not any(books.devices[home].spec.why_no_move for home in homes)
    like = tuple(
        device_id
        for device_id in (allowed if moves else ())
        if device_id not in homes and _admits(books, device_id) and books.devices[device_id].spec.name in kinds
    )
    only = lease.spec.allowed_devices
    home = tuple(one for one in homes if _admits(books, one) and (not only or one in only))
    # A home that has left the pool is used only if the pool has too few devices.
    stays = tuple(device_id for device_id in home if device_id in pool.devices)
    return (*stays, *like) if like and len(stays) + len(like) >= lease.count else home


def other_devices(books: Books, lease: Lease) -> tuple[str, ...]:
    """Return the devices of the same kind to which a resident lease could be moved."""
    pool = books.policy(lease)
    here = books.devices.get(lease.device_id or "")
    if here is None or here.lost or not pool.may_move or here.spec.why_no_move:
        return ()
    return tuple(
        device_id
        for device_id in allowed_of(pool, lease.spec)
        if device_id not in lease.device_ids
        and _admits(books, device_id)
        and books.devices[device_id].spec.name == here.spec.name
    )


def allowed_of(pool: PoolSpec, spec: LeaseSpec) -> tuple[str, ...]:
    """Return the devices of the pool that the lease's spec allows, in the pool's order."""
    if not spec.allowed_devices:
        return pool.devices
    return tuple(device_id for device_id in pool.devices if device_id in spec.allowed_devices)


def _admits(books: Books, device_id: str) -> bool:
    device = books.devices.get(device_id)
    return device is not None and not device.lost and not device.draining


# -- compute -----------------------------------------------------------------------------------------------------------

FULL = 1 << 20
"""The smallest `fullness` of a device whose demand exceeds the pool's bound."""
_STEP_MILLI = 100  # devices within the bound are equal if they differ by less than this
_EXCESS_STEP_MILLI = 250  # the same for devices beyond the bound


def spreads(books: Books, lease: Lease) -> bool:
    """Return whether the lease's pool spreads busy leases across devices."""
    return books.policy(lease).compute is Compute.SPREAD


def room_milli(books: Books, newcomer: Lease) -> int:
    """Return how many thousandths of a device other busy leases may need if the newcomer is to stay within its pool's bound."""
    return books.policy(newcomer).slowdown_bound_milli - newcomer.demand_milli


def fullness(device: Device, room_milli: int, leaving: Sequence[Lease] = ()) -> int:
    """Return how busy the device would be for a newcomer, in coarse steps. Values of `FULL` or more exceed the pool's bound.

    `room_milli` is how many thousandths of the device neighbours may need within that bound. Leases in `leaving` are left out.
    """
    busy_milli, resting_milli = device.sums.wanted_milli, device.sums.resting_milli
    for lease in leaving:
        busy_milli -= lease.counted_milli
        resting_milli -= lease.resting_milli
    if busy_milli <= max(0, room_milli):
        return (busy_milli + resting_milli) // _STEP_MILLI
    return FULL + (busy_milli - room_milli) // _EXCESS_STEP_MILLI


def least_full(books: Books, newcomer: Lease, places: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the places whose devices are the least full, in the given order. `places` must not be empty."""
    room, devices = room_milli(books, newcomer), books.devices
    ranks = [fullness(devices[device_id], room) for device_id, _ in places]
    return [place for rank, place in zip(ranks, places, strict=True) if rank == min(ranks)]


def excess(books: Books, device: Device, newcomer: Lease, leaving: Sequence[Lease] = ()) -> int:
    """Return how far the newcomer would exceed the pool's bound on the device, in coarse steps. If the pool packs leases, return 0."""
    if not spreads(books, newcomer):
        return 0
    return max(0, fullness(device, room_milli(books, newcomer), leaving) - FULL + 1)


def busy_others(device: Device, lease: Lease) -> list[Lease]:
    return [one for one in device.holders.values() if one.occupancy is OccupancyKind.BUSY and one is not lease]


def beside(want_milli: int, others: Sequence[Lease]) -> int:
    """Return how long a cell that needs `want_milli` of a device takes next to other busy leases, in thousandths of its time alone."""
    return slowed_milli(want_milli, stretch_milli((want_milli, *[one.busy_milli for one in others])))


# -- memory ------------------------------------------------------------------------------------------------------------

Place = tuple[str, int]
"""A device id and that device's free memory in MiB."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Ranks devices for a lease that needs `need_mib` on each, by how little the lease would fragment their free memory.

    Free memory that no lease can use is wasted: 30 GiB can serve one request for 20 GiB or three for 10 GiB, but none for 40 GiB. The
    fragmentation a lease causes is how much memory the device could offer the pool's usual requests (`forecasts.asks`) without the lease,
    minus how much it can offer them with it. The device with the least fragmentation comes first, then the one with the least memory left,
    then the first in the given order. In a pool that has had no requests yet, this is plain best fit.

    Source: fragmentation gradient descent (Weng et al., "Beware of Fragmentation", USENIX ATC 2023), applied here to memory instead of GPU
    shares, and with learnt requests.
    """

    mix: RequestedSizes
    need_mib: int
    everywhere: Sequence[Place]  # all devices that the lease may go to
    kind_of: Callable[[str], str]  # by device; a lease on several devices has all of one kind

    def best(self, fitting: Sequence[Place]) -> str | None:
        """Return the best device in `fitting`, the devices the lease fits on. Return None if there are none."""
        if len(fitting) < 2:
            return fitting[0][0] if fitting else None
        return min(fitting, key=self.rank)[0]

    def best_set(self, fitting: Iterable[Place], count: int) -> tuple[str, ...] | None:
        """Return the best `count` devices of one kind among the devices the lease fits on. Return None if no kind has that many."""
        by_kind: dict[str, list[Place]] = {}
        for place in fitting:
            by_kind.setdefault(self.kind_of(place[0]), []).append(place)
        sets = [sorted(found, key=self.rank)[:count] for found in by_kind.values() if len(found) >= count]
        best = min(
            sets, key=lambda places: (self.fragmentation(places), sum(free_mib for _, free_mib in places)), default=None
        )
        return tuple(device_id for device_id, _ in best) if best is not None else None

    def rank(self, place: Place) -> tuple[int, int]:
        """Return a sort key that puts the best device first."""
        return self.fragmentation((place,)), place[1]

    def fragmentation(self, places: Sequence[Place]) -> int:
        """Return how much memory becomes unusable if the lease gets these devices, in MiB, summed over the pool's recent requests.

        The devices must be of one kind, and the lease must fit on each of them.
        """
        mix, need_mib = self.mix, self.need_mib
        fragmentation = sum([mix.usable(free_mib) - mix.usable(free_mib - need_mib) for _, free_mib in places])
        for mib, devices, weight in mix.several:
            fewer = sum([free_mib >= mib > free_mib - need_mib for _, free_mib in places])
            if fewer:
                kind = self.kind_of(places[0][0])
                able = [free_mib >= mib and self.kind_of(one) == kind for one, free_mib in self.everywhere]
                count = max(fewer, sum(able))  # some may become free only by then
                fragmentation += (count // devices - (count - fewer) // devices) * devices * mib * weight
        return fragmentation


def device_choice(books: Books, lease: Lease, need_mib: int, everywhere: Sequence[Place]) -> DeviceChoice:
    """Return the ranking of devices for a lease, based on the requests in its pool. `everywhere` lists all devices the lease may use."""
    return DeviceChoice(books.forecasts.asks(lease.spec.pool), need_mib, everywhere, books.kind_of)
