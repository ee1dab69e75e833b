"""Who gets which room next: pure questions over the books, answered for the arbiter, which alone changes anything.

The queue is served in order. A ticket that fits is granted. One that does not, but would if idle leases stepped aside, makes them do
so one after another, and the room they make is kept for it (`kept`, MiB per device, counts against everybody behind it). One that
would not fit even then waits, and nobody is suspended for it in vain (law 3). Whoever is behind may overtake a ticket that cannot be
served at most K times; then room is kept for that one, too (law 4).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from provisioner.core.model import LeaseState, PoolSpec
from provisioner.core.state import Books, Lease
from provisioner.core.units import format_memory

__all__ = ["Plan", "Wait", "best_fit", "candidates", "plan_room", "why_not"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Room can be made for a ticket on this device by suspending `victims` (empty: suspends under way suffice)."""

    device_id: str
    victims: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a ticket waits: code, sentence, and the leases in its way."""

    reason: str
    sentence: str
    blockers: tuple[str, ...] = ()


def candidates(books: Books, pool: PoolSpec, lease: Lease) -> list[str]:
    """Return the devices the lease may go to now, its home first. Saved state goes home unless the pool lets it move to a like device."""
    present = [
        device_id for device_id in pool.devices if device_id in books.devices and not books.devices[device_id].lost
    ]
    if lease.state is not LeaseState.SUSPENDED or lease.device_id is None:
        return present
    home = books.devices.get(lease.device_id)
    like = [
        device_id
        for device_id in present
        if device_id == lease.device_id
        or (pool.may_move and home and books.devices[device_id].spec.name == home.spec.name)
    ]
    return sorted(like, key=lambda device_id: device_id != lease.device_id)


def best_fit(books: Books, devices: Iterable[str], need_mib: int, kept: Mapping[str, int]) -> str | None:
    """Return the device that the need leaves least room on, the first among equals; None if it fits nowhere."""
    best: tuple[int, str] | None = None
    for device_id in devices:
        left = books.devices[device_id].free_mib - kept.get(device_id, 0) - need_mib
        if left >= 0 and (best is None or left < best[0]):
            best = (left, device_id)
    return best[1] if best else None


def plan_room(books: Books, lease: Lease, devices: Iterable[str], kept: Mapping[str, int], now_ms: int) -> Plan | Wait:
    """Return how to make room for the lease with the fewest, least recently used idle leases, or why that cannot be done."""
    best: tuple[int, int, Plan] | None = None
    short_of_host: Wait | None = None
    for device_id in devices:
        short = lease.spec.reserve_mib - (books.devices[device_id].free_mib - kept.get(device_id, 0))
        short -= sum(
            other.spec.reserve_mib
            for other in books.by_state[LeaseState.SUSPENDING].values()
            if other.device_id == device_id
        )
        victims = _victims(books, device_id, short, now_ms)
        if victims is None:
            continue
        host_mib = sum(victim.spec.reserve_mib for victim in victims)
        if host_mib > books.host_left_mib:
            short_of_host = Wait(
                "wait.host-memory",
                f"idle kernels could make room, but saving them takes up to {format_memory(host_mib)} of host memory, "
                f"of which {format_memory(max(0, books.host_left_mib))} are left",
                tuple(victim.lease_id for victim in victims),
            )
            continue
        latest = max((victim.last_active_ms for victim in victims), default=0)
        if best is None or (len(victims), latest) < best[:2]:
            best = (len(victims), latest, Plan(device_id, victims))
    if best is not None:
        return best[2]
    return short_of_host or why_not(books, lease, devices, kept)


def _victims(books: Books, device_id: str, short_mib: int, now_ms: int) -> tuple[Lease, ...] | None:
    """Return idle leases whose room covers the shortage, least recently used first and none in vain; None if there are not enough."""
    if short_mib <= 0:
        return ()
    idle = sorted(
        (
            other
            for other in books.by_state[LeaseState.RESIDENT].values()
            if other.device_id == device_id and not other.busy and other.retry_ms <= now_ms
        ),
        key=lambda other: (other.last_active_ms, other.lease_id),
    )
    chosen: list[Lease] = []
    room = 0
    for other in idle:
        if room >= short_mib:
            break
        chosen.append(other)
        room += other.spec.reserve_mib
    if room < short_mib:
        return None
    for other in list(reversed(chosen)):
        if room - other.spec.reserve_mib >= short_mib:
            chosen.remove(other)
            room -= other.spec.reserve_mib
    return tuple(chosen)


def why_not(books: Books, lease: Lease, devices: Iterable[str], kept: Mapping[str, int]) -> Wait:
    """Say why a ticket that fits nowhere, and that nobody idle can make room for, waits."""
    devices = list(devices)
    need = format_memory(lease.spec.reserve_mib)
    if not devices:
        return Wait("wait.device-lost", f"{need} are needed, but no device that this kernel may use is there now")
    holders = [other for other in books.leases.values() if other.reserved and other.device_id in devices]
    busy = [other.lease_id for other in holders if other.busy]
    roomiest = max(books.devices[device_id].free_mib for device_id in devices)
    if any(
        kept.get(device_id, 0) and books.devices[device_id].free_mib >= lease.spec.reserve_mib for device_id in devices
    ):
        return Wait(
            "wait.older-ticket", f"{need} are needed; the room there is is kept for a kernel that has waited longer"
        )
    free = f"{format_memory(max(0, roomiest))} are free on the roomiest device"
    if busy:
        kernels = "1 kernel is" if len(busy) == 1 else f"{len(busy)} kernels are"
        return Wait("wait.busy-neighbour", f"{need} are needed, {free}; {kernels} running a cell", tuple(busy))
    if any(books.devices[device_id].stranger_mib for device_id in devices):
        return Wait("wait.stranger", f"{need} are needed, {free}; processes that hold no lease use the rest")
    return Wait(
        "wait.unwilling-neighbour",
        f"{need} are needed, {free}; the kernels there are idle but could not be suspended just now",
        tuple(other.lease_id for other in holders),
    )
