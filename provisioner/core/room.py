"""What one pass over the queue has left to give.

Of each device it knows two sums: what is free and not kept for a ticket ahead, and what suspends under way or planned will free and is
not promised yet. A ticket that makes room takes of the second first, so whoever is behind may use at once what is free and not
needed (law 7). A third sum, of all that idle (and, where the pool preempts, busy) leases hold, tells at once where there is no hope.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from provisioner.core.records import Footing, Wait
from provisioner.core.state import Books, Lease
from provisioner.core.units import format_memory
from provisioner.core.victims import Victims

__all__ = ["Plan", "Room"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Room can be made for a ticket on these devices by suspending `victims` (none: suspends under way suffice)."""

    device_ids: tuple[str, ...]
    victims: tuple[Lease, ...]


class Room:
    """The room of all devices, MiB. What a ticket was promised is gone for those behind it."""

    def __init__(self, books: Books, victims: Victims) -> None:
        self._books = books
        self._victims = victims
        self._kept: dict[str, int] = {}
        self._coming: dict[str, int] = {}  # beside what is leaving by the books
        self._planned: set[str] = set()
        self._planned_mib: dict[str, int] = {}  # held by planned victims, by device
        self._planned_host_mib = 0

    # -- sums ------------------------------------------------------------------------------------------------------------

    def free_mib(self, device_id: str) -> int:
        """What is free on the device and not kept; negative if more is kept than there is."""
        device, kept_mib = self._books.devices[device_id], self._kept.get(device_id, 0)
        free_mib = device.free_mib - kept_mib
        return min(0, free_mib) if device.whole and kept_mib else free_mib

    def total_mib(self, device_id: str) -> int:
        """What is free, or comes, and is neither kept nor promised."""
        leaving_mib = self._books.devices[device_id].footing_mib[Footing.LEAVING]
        return self.free_mib(device_id) + leaving_mib + self._coming.get(device_id, 0)

    def most_mib(self, device_id: str, *, busy: bool = False) -> int:
        """What there would be at most if everybody idle stepped aside; with `busy` those, too."""
        sums = self._books.devices[device_id].footing_mib
        most_mib = self.total_mib(device_id) + sums[Footing.RESTING] - self._planned_mib.get(device_id, 0)
        return most_mib + sums[Footing.WORKING] if busy else most_mib

    def _roomy(self, device_id: str, need_mib: int) -> bool:
        return self._books.devices[device_id].roomiest_mib >= need_mib

    # -- where -----------------------------------------------------------------------------------------------------------

    def pick(self, devices: Sequence[str], need_mib: int, count: int = 1) -> tuple[str, ...] | None:
        """Return the devices that the need leaves least room on, the first among equals; None if it fits nowhere."""
        if count > 1:
            fitting = [device_id for device_id in devices if self.free_mib(device_id) >= need_mib]
            return self._alike(fitting, count, self.free_mib)
        best: tuple[int, str] | None = None
        for device_id in devices:
            left = self.free_mib(device_id) - need_mib
            if left >= 0 and (best is None or left < best[0]):
                best = (left, device_id)
        return (best[1],) if best else None

    def _alike(self, devices: Iterable[str], count: int, cost: Callable[[str], int]) -> tuple[str, ...] | None:
        """Return so many devices of one name that cost least together; None if there are not so many."""
        by_name: dict[str, list[str]] = {}
        for device_id in devices:
            by_name.setdefault(self._books.devices[device_id].spec.name, []).append(device_id)
        sets = [sorted(ids, key=cost)[:count] for ids in by_name.values() if len(ids) >= count]
        best = min(sets, key=lambda ids: sum(map(cost, ids)), default=None)
        return tuple(best) if best else None

    def keep(self, device_id: str, need_mib: int) -> None:
        """Keep room that is free, or becomes free, for a ticket."""
        self._kept[device_id] = self._kept.get(device_id, 0) + need_mib

    def nearest(self, devices: Iterable[str], need_mib: int) -> str | None:
        """Return the device that lacks least for the need, among those that could ever have room for it."""
        possible = [device_id for device_id in devices if self._roomy(device_id, need_mib)]
        return max(possible, key=self.total_mib, default=None)

    # -- making room -----------------------------------------------------------------------------------------------------

    def plan(
        self, lease: Lease, devices: Sequence[str], need_mib: int, count: int = 1, *, also: tuple[Lease, ...] = ()
    ) -> Plan | Wait | None:
        """Return how to make room at least cost, a reason of its own why that cannot be done, or None. `also` leave in any case."""
        plans: dict[str, tuple[Lease, ...]] = {}
        costs: dict[str, int] = {}
        busy = self._victims.takes_busy(lease)
        for device_id in devices:
            if self.most_mib(device_id, busy=busy) < need_mib or not self._roomy(device_id, need_mib):
                continue
            given = sum(victim.held_mib for victim in also if device_id in victim.device_ids)
            short_mib = need_mib - self.total_mib(device_id) - given
            victims = self._victims.choose(device_id, short_mib, lease, self._planned, also)
            if victims is not None:
                plans[device_id] = victims
                costs[device_id] = sum(map(self._victims.cost, victims))
        short_of_host: Wait | None = None
        while plans:
            chosen = self._cheapest(plans, costs, count)
            if chosen is None:
                return short_of_host
            victims = tuple(dict.fromkeys([*also, *(victim for device_id in chosen for victim in plans[device_id])]))
            short_of_host = self._short_of_host(victims)
            if short_of_host is None:
                return Plan(chosen, victims)
            del plans[chosen[-1]]
        return short_of_host

    def _cheapest(
        self, plans: dict[str, tuple[Lease, ...]], costs: dict[str, int], count: int
    ) -> tuple[str, ...] | None:
        def cost(device_id: str) -> tuple[int, int, int, int]:
            victims = plans[device_id]
            busy = sum(victim.busy for victim in victims)
            latest = max((victim.last_active_ms for victim in victims), default=0)
            return (busy, costs[device_id], len(victims), latest)

        if count == 1:
            return (min(plans, key=cost),)
        return self._alike(plans, count, lambda device_id: costs[device_id] + len(plans[device_id]))

    def _short_of_host(self, victims: Sequence[Lease]) -> Wait | None:
        if not victims:
            return None
        host_mib = sum(victim.host_need_mib for victim in victims)
        left_mib = self._books.host_left_mib - self._planned_host_mib
        if host_mib <= left_mib:
            return None
        return Wait(
            "wait.host-memory",
            f"idle kernels could make room, but saving them takes up to {format_memory(host_mib)} of host memory, "
            f"of which {format_memory(max(0, left_mib))} are left",
            tuple(victim.lease_id for victim in victims),
        )

    def promise(self, plan: Plan, need_mib: int, *, firm: bool) -> None:
        """Give a ticket the room that its plan makes, and of what is free only what it needs beside.

        Firm: it gets all it needs of what is free, now or later, because the plan may fail and it must not be passed over again.
        """
        for victim in plan.victims:
            self._planned.add(victim.lease_id)
            self._planned_host_mib += victim.host_need_mib
            for device_id in victim.device_ids:
                self._add_coming(device_id, victim.held_mib)
                if not victim.busy:
                    self._planned_mib[device_id] = self._planned_mib.get(device_id, 0) + victim.held_mib
        for device_id in plan.device_ids:
            coming_mib = self.total_mib(device_id) - self.free_mib(device_id)
            made_mib = 0 if firm else min(need_mib, max(0, coming_mib))
            self._add_coming(device_id, -made_mib)
            self.keep(device_id, need_mib - made_mib)

    def begun(self, victim: Lease) -> None:
        """A planned suspend is about to begin: from now on the books count what it frees, and its host memory."""
        self._planned_host_mib -= victim.host_need_mib
        for device_id in victim.device_ids:
            self._add_coming(device_id, -victim.held_mib)
            if not victim.busy:
                self._planned_mib[device_id] -= victim.held_mib

    def _add_coming(self, device_id: str, mib: int) -> None:
        self._coming[device_id] = self._coming.get(device_id, 0) + mib
