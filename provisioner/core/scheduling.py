"""Who gets which room next: pure questions over the books, answered for one pass over the queue.

The queue is served in order. A ticket that fits is granted. One that does not, but would if idle leases stepped aside, makes them do
so one after another, and the room they make is promised to it. One that would not fit even then waits, and nobody is suspended for it
in vain (law 3). Whoever is behind may overtake a ticket that cannot be served at most K times; then room is kept for that one (law 4).

`Room` is what such a pass has left to give. Of each device it knows two sums: what is free and not kept for a ticket ahead, and what
suspends under way or planned will free and is not promised yet. A ticket that makes room takes of the second first, so whoever is
behind may use at once what is free and not needed (law 7).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from provisioner.core.model import HOLDING, LeaseState, PoolSpec
from provisioner.core.state import Books, Lease
from provisioner.core.units import format_memory

__all__ = ["Plan", "Room", "Wait", "candidates", "willing_from_ms"]


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


def candidates(books: Books, pool: PoolSpec, lease: Lease) -> tuple[str, ...]:
    """Return the devices the lease may go to now.

    Saved state goes home, even if its home has left the pool, unless the pool lets it move to a like device; its home comes first.
    """
    present = tuple(
        device_id for device_id in pool.devices if device_id in books.devices and not books.devices[device_id].lost
    )
    if lease.state is not LeaseState.SUSPENDED:
        return present
    home = books.devices.get(lease.home_id or "")
    if home is None:
        return ()
    home_id = home.spec.device_id
    like = tuple(
        device_id
        for device_id in present
        if device_id != home_id and pool.may_move and books.devices[device_id].spec.name == home.spec.name
    )
    home_serves = not home.lost and (home_id in present or not like)
    return (home_id, *like) if home_serves else like


def willing_from_ms(pool: PoolSpec, lease: Lease) -> int | None:
    """Return when a resident lease may be suspended for others: not while it is busy, or was refused, or has had no chance to run."""
    if lease.busy or lease.staying:
        return None
    return max(lease.retry_ms, 0 if lease.ran else lease.since_ms + max(1, pool.min_residency_ms))


class Room:
    """What one pass over the queue has left to give, MiB. What a ticket was promised is gone for those behind it."""

    def __init__(self, books: Books, now_ms: int) -> None:
        self._books = books
        self._now_ms = now_ms
        self._kept: dict[str, int] = {}
        self._coming: dict[str, int] = {}
        self._planned_host_mib = 0
        self._willing: dict[str, list[Lease]] | None = None
        self._holders: dict[str, list[Lease]] | None = None
        for lease in books.by_state[LeaseState.SUSPENDING].values():
            self._add_coming(lease.device_id or "", lease.held_mib)

    def free_mib(self, device_id: str) -> int:
        """What is free on the device and not kept; negative if more is kept than there is."""
        device, kept_mib = self._books.devices[device_id], self._kept.get(device_id, 0)
        return min(0, device.free_mib - kept_mib) if device.whole and kept_mib else device.free_mib - kept_mib

    def best_fit(self, devices: Iterable[str], need_mib: int) -> str | None:
        """Return the device that the need leaves least room on, the first among equals; None if it fits nowhere."""
        best: tuple[int, str] | None = None
        for device_id in devices:
            left = self.free_mib(device_id) - need_mib
            if left >= 0 and (best is None or left < best[0]):
                best = (left, device_id)
        return best[1] if best else None

    def keep(self, device_id: str, need_mib: int) -> None:
        """Keep room that is free, or becomes free, for a ticket."""
        self._kept[device_id] = self._kept.get(device_id, 0) + need_mib

    def nearest(self, devices: Iterable[str], need_mib: int) -> str | None:
        """Return the device that lacks least for the need, among those that could ever have room for it."""
        possible = [device_id for device_id in devices if self._roomy(device_id, need_mib)]
        return max(possible, key=self._total, default=None)

    def plan(self, lease: Lease, devices: Sequence[str]) -> Plan | Wait:
        """Return how to make room with the fewest, least recently used idle leases, or why that cannot be done."""
        best: tuple[int, int, Plan] | None = None
        short_of_host: Wait | None = None
        for device_id in devices:
            victims = self._victims(device_id, lease.need_mib - self._total(device_id))
            if victims is None:
                continue
            host_mib = sum(victim.host_need_mib for victim in victims)
            left_mib = self._books.host_left_mib - self._planned_host_mib
            if victims and host_mib > left_mib:
                short_of_host = Wait(
                    "wait.host-memory",
                    f"idle kernels could make room, but saving them takes up to {format_memory(host_mib)} of host memory, "
                    f"of which {format_memory(max(0, left_mib))} are left",
                    tuple(victim.lease_id for victim in victims),
                )
                continue
            latest = max((victim.last_active_ms for victim in victims), default=0)
            if best is None or (len(victims), latest) < best[:2]:
                best = (len(victims), latest, Plan(device_id, victims))
        if best is not None:
            return best[2]
        return short_of_host or self._why_not(lease, devices)

    def promise(self, plan: Plan, need_mib: int, *, firm: bool) -> None:
        """Give a ticket the room that its plan makes, and of what is free only what it needs beside.

        Firm: it gets all it needs of what is free, now or later, because the plan may fail and it must not be passed over again.
        """
        for victim in plan.victims:
            self._idle(plan.device_id).remove(victim)
            self._add_coming(plan.device_id, victim.held_mib)
            self._planned_host_mib += victim.host_need_mib
        made_mib = 0 if firm else min(need_mib, self._coming.get(plan.device_id, 0))
        self._add_coming(plan.device_id, -made_mib)
        self.keep(plan.device_id, need_mib - made_mib)

    def begun(self, victim: Lease) -> None:
        """A planned suspend is about to begin: the books count its host memory from now on."""
        self._planned_host_mib -= victim.host_need_mib

    def _add_coming(self, device_id: str, mib: int) -> None:
        self._coming[device_id] = self._coming.get(device_id, 0) + mib

    def _total(self, device_id: str) -> int:
        return self.free_mib(device_id) + self._coming.get(device_id, 0)

    def _roomy(self, device_id: str, need_mib: int) -> bool:
        device = self._books.devices[device_id]
        return device.spec.leasable_mib - device.stranger_mib >= need_mib

    def _idle(self, device_id: str) -> list[Lease]:
        """Return who may be suspended on the device, least recently used first."""
        if self._willing is None:
            self._willing = {}
            for lease in self._books.by_state[LeaseState.RESIDENT].values():
                from_ms = willing_from_ms(self._books.policy(lease), lease)
                if from_ms is not None and from_ms <= self._now_ms:
                    self._willing.setdefault(lease.device_id or "", []).append(lease)
            for idle in self._willing.values():
                idle.sort(key=lambda lease: (lease.last_active_ms, lease.lease_id))
        return self._willing.setdefault(device_id, [])

    def _on(self, device_id: str) -> list[Lease]:
        """Return who holds something on the device, at the time of the first question."""
        if self._holders is None:
            self._holders = {}
            for state in (LeaseState.UNATTACHED, *sorted(HOLDING)):
                for lease in self._books.by_state[state].values():
                    if lease.held_mib:
                        self._holders.setdefault(lease.device_id or "", []).append(lease)
        return self._holders.get(device_id, [])

    def _victims(self, device_id: str, short_mib: int) -> tuple[Lease, ...] | None:
        """Return idle leases whose room covers the shortage, none of them in vain; None if there are not enough."""
        if short_mib <= 0:
            return ()
        chosen: list[Lease] = []
        room = 0
        for other in self._idle(device_id):
            if room >= short_mib:
                break
            chosen.append(other)
            room += other.held_mib
        if room < short_mib:
            return None
        for other in list(reversed(chosen)):
            if room - other.held_mib >= short_mib:
                chosen.remove(other)
                room -= other.held_mib
        return tuple(chosen)

    def _why_not(self, lease: Lease, devices: Sequence[str]) -> Wait:
        """Say why a ticket that fits nowhere, and that nobody idle can make room for, waits."""
        need = format_memory(lease.need_mib)
        if not devices:
            return self._nowhere(lease, need)
        free_mib = {device_id: self._books.devices[device_id].free_mib for device_id in devices}
        if max(free_mib.values()) >= lease.need_mib:
            return Wait(
                "wait.older-ticket", f"{need} are needed; the room there is is kept for a kernel that has waited longer"
            )
        free = f"{format_memory(max(0, *free_mib.values()))} are free on the roomiest device"
        if self.nearest(devices, lease.need_mib) is None:
            if any(self._books.devices[device_id].stranger_mib for device_id in devices):
                return Wait("wait.stranger", f"{need} are needed, {free}; processes that hold no lease use the rest")
            return Wait("wait.too-large", f"{need} are needed, more than any device that this kernel may use has")
        return self._in_the_way(need, free, devices)

    def _nowhere(self, lease: Lease, need: str) -> Wait:
        if lease.spec.pool in self._books.pools:
            return Wait("wait.device-lost", f"{need} are needed, but no device that this kernel may use is there now")
        return Wait("wait.no-pool", f"pool {lease.spec.pool!r} is not configured any more: ask the administrator")

    def _in_the_way(self, need: str, free: str, devices: Sequence[str]) -> Wait:
        holders = [other for device_id in devices for other in self._on(device_id)]
        busy = tuple(other.lease_id for other in holders if other.busy)
        if busy:
            kernels = "1 kernel is" if len(busy) == 1 else f"{len(busy)} kernels are"
            return Wait("wait.busy-neighbour", f"{need} are needed, {free}; {kernels} running a cell", busy)
        if holders and all(other.staying for other in holders):
            return Wait(
                "wait.cannot-be-suspended",
                f"{need} are needed, {free}; the kernels there cannot be suspended ({holders[0].stays}): it waits until one ends",
                tuple(other.lease_id for other in holders),
            )
        return Wait(
            "wait.unwilling-neighbour",
            f"{need} are needed, {free}; the kernels there are idle but cannot be suspended just now",
            tuple(other.lease_id for other in holders),
        )
