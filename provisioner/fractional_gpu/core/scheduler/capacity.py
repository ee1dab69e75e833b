"""What one pass over the queue still has to give.

**Sums.** For each device a pass keeps two sums. `free_mib` is free and kept for no ticket ahead. `total_mib` also counts what suspends
under way or planned will free and no ticket was promised. A ticket that makes room takes from the second sum first, so a later ticket may
use at once what is free and not needed (law 7). A third sum, what all idle (and busy) leases hold, shows at once where no suspend could
help.

**Plans.** `plan` finds the leases whose leaving makes room for a ticket at least cost: fewest busy ones, then the least swap time, then the
fewest. It compares the devices that lack least, and checks host memory for what would be saved. `promise` takes the plan's room out of the
sums, before its suspends begin: only as many begin as swap channels are free, the others are planned, and `suspend_begun` moves a victim
from planned to what the books themselves count as leaving.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Device, Lease, OccupancyKind, Reason
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.contention import (
    FULL,
    excess,
    expected_fullness,
    fullness,
    least_full,
    room_milli,
    spreads,
)
from fractional_gpu.core.rules.eligibility import steps_aside
from fractional_gpu.core.rules.fragmentation import DeviceChoice, Place, device_choice
from fractional_gpu.core.scheduler.victims import Victims, suspend_cost
from fractional_gpu.core.units import format_memory

_MOST_COMPARED = 32  # devices where room could be made, those that lack least: comparing 8 gave a third more swaps
_MOST_EXPECTED = 4  # devices beyond the bound whose neighbours' cells are looked at one by one


@dataclass(frozen=True, slots=True)
class Plan:
    """Suspending `victims` makes room for a ticket on these devices; no victims: suspends under way suffice."""

    device_ids: tuple[str, ...]
    victims: tuple[Lease, ...]


class _DeviceCapacity:
    """One device in this pass, MiB."""

    __slots__ = ("coming_mib", "device", "free_mib", "kept_mib", "planned_mib", "total_mib")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.kept_mib = 0
        self.coming_mib = 0  # freed by planned suspends, less what was promised of this and of suspends under way
        self.planned_mib = 0  # held by idle leases whose suspend is planned
        self.free_mib = device.free_mib
        self.total_mib = device.free_mib + device.mib_by_occupancy[OccupancyKind.SUSPENDING]

    def refresh(self) -> None:
        """Compute the sums anew."""
        device = self.device
        free_mib = device.free_mib
        if self.kept_mib:
            free_mib = min(0, free_mib - self.kept_mib) if device.is_exclusive else free_mib - self.kept_mib
        self.free_mib = free_mib
        self.total_mib = free_mib + device.mib_by_occupancy[OccupancyKind.SUSPENDING] + self.coming_mib

    def reachable_mib(self, *, busy: bool) -> int:
        """Return what there would be if all idle leases left; with `busy`, those too."""
        sums = self.device.mib_by_occupancy
        most_mib = self.total_mib + sums[OccupancyKind.IDLE] - self.planned_mib
        return most_mib + sums[OccupancyKind.BUSY] if busy else most_mib


class Capacity:
    """The capacity of all devices in one pass, MiB, less what was promised. After a change to a device the caller calls `refresh`."""

    def __init__(self, books: Books, victims: Victims) -> None:
        self._books = books
        self._victims = victims
        self._devices = {device_id: _DeviceCapacity(device) for device_id, device in books.devices.items()}
        self.planned: set[str] = set()
        self.asked_to_yield: set[str] = set()  # leases that make room for a ticket ahead at a cell's end
        self.short_of_host_memory: set[str] = set()  # idle leases that there is too little host memory for
        self._planned_host_mib = 0
        self.version = 0  # grows with every change of the sums

    # -- sums ------------------------------------------------------------------------------------------------------------

    def refresh(self, device_ids: Iterable[str]) -> None:
        """Take over the changed books of these devices."""
        self.version += 1
        for device_id in device_ids:
            if device_id in self._devices:
                self._devices[device_id].refresh()

    def free_mib(self, device_id: str) -> int:
        """Return what is free on the device and not kept; negative if more is kept than there is."""
        return self._devices[device_id].free_mib

    def total_mib(self, device_id: str) -> int:
        """Return what is free, or will be, and is neither kept nor promised."""
        return self._devices[device_id].total_mib

    def any_free(self, devices: Iterable[str]) -> bool:
        """Return whether anything is free and not kept on these devices."""
        for device_id in devices:  # noqa: SIM110 - computed for every ticket
            if self._devices[device_id].free_mib > 0:
                return True
        return False

    def idle_could_free(self, devices: Iterable[str], need_mib: int) -> bool:
        """Return whether idle leases could make room on one of the devices."""
        for device_id in devices:  # noqa: SIM110 - as above
            if self._devices[device_id].reachable_mib(busy=False) >= need_mib:
                return True
        return False

    def can_ever_serve(self, device_id: str, need_mib: int) -> bool:
        """Return whether the device could have room for the need if no other lease were there."""
        sums = self._devices.get(device_id)
        return sums is not None and sums.device.lease_capacity_mib >= need_mib

    def is_exhausted(self, devices: Iterable[str]) -> bool:
        """Return whether nothing is left on these devices, even if all leases left."""
        return all(self._devices[device_id].reachable_mib(busy=True) <= 0 for device_id in devices)

    # -- where -----------------------------------------------------------------------------------------------------------

    def fits(self, devices: Sequence[str], need_mib: int) -> bool:
        """Return whether the need fits on each of these devices now."""
        return all(self._devices[device_id].free_mib >= need_mib for device_id in devices)

    def fits_somewhere(self, devices: Iterable[str], need_mib: int) -> bool:
        """Return whether the need fits on one of the devices now."""
        for device_id in devices:  # noqa: SIM110 - as above
            if self._devices[device_id].free_mib >= need_mib:
                return True
        return False

    def pick(self, lease: Lease, devices: Sequence[str], need_mib: int) -> tuple[str, ...] | None:
        """Return where the need fits, or None: where compute is left, in a pool that spreads (`contention`), then by `fragmentation`."""
        by_id = self._devices
        fitting = [
            (device_id, free_mib) for device_id in devices if (free_mib := by_id[device_id].free_mib) >= need_mib
        ]
        if lease.count > 1:
            return self.choice(lease, devices, need_mib).best_set(fitting, lease.count)
        if fitting and spreads(self._books, lease):
            return self._pick_by_compute(lease, devices, need_mib, fitting)
        best = self.choice(lease, devices, need_mib).best(fitting)
        return None if best is None else (best,)

    def choice(self, lease: Lease, devices: Sequence[str], need_mib: int) -> DeviceChoice:
        """Return what orders devices for the lease. `devices`: all that it may go to."""
        return device_choice(
            self._books, lease, need_mib, lambda: [(one, self._devices[one].free_mib) for one in devices]
        )

    def _pick_by_compute(
        self, lease: Lease, devices: Sequence[str], need_mib: int, fitting: list[Place]
    ) -> tuple[str, ...] | None:
        """Return the best of the fitting devices that are least full of busy leases."""
        least, equal = least_full(self._books, lease, fitting)
        choice = self.choice(lease, devices, need_mib)
        if least >= FULL:
            # Where neighbours' cells soon end, most compute is expected to be left. Looked at on the few that need least now.
            if len(fitting) > _MOST_EXPECTED:
                fitting.sort(key=lambda place: (self._fullness(place[0], lease), choice.rank(place)))
            few = fitting[:_MOST_EXPECTED]
            ranks = [self._expected_fullness(device_id, lease) for device_id, _ in few]
            equal = [place for rank, place in zip(ranks, few, strict=True) if rank == min(ranks)]
        best = choice.best(equal)
        return None if best is None else (best,)

    def _fullness(self, device_id: str, newcomer: Lease) -> int:
        return fullness(self._devices[device_id].device, room_milli(self._books, newcomer))

    def _expected_fullness(self, device_id: str, newcomer: Lease) -> int:
        return expected_fullness(self._books, self._devices[device_id].device, newcomer)

    def pick_for(self, lease: Lease, devices: Sequence[str], need_mib: int) -> tuple[str, ...] | None:
        """Return where the lease's need fits; None if it fits nowhere. Saved state goes home if it can."""
        home = lease.home_ids if lease.state is LeaseState.SUSPENDED and len(devices) > 1 else ()
        if home and set(home) <= set(devices) and self.fits(home, need_mib):
            return self._pick_for_saved(lease, home, devices, need_mib)
        return self.pick(lease, devices, need_mib)

    def _pick_for_saved(
        self, lease: Lease, home: tuple[str, ...], devices: Sequence[str], need_mib: int
    ) -> tuple[str, ...]:
        """Return where saved state that fits at home goes: there, unless home is too busy for it and another device is not."""
        if len(home) > 1 or not spreads(self._books, lease):
            return home
        if self._has_compute(home[0], lease):
            return home
        chosen = self.pick(lease, devices, need_mib)
        return chosen if chosen is not None and self._has_compute(chosen[0], lease) else home

    def _has_compute(self, device_id: str, lease: Lease) -> bool:
        """Return whether the device is, or soon will be, within the bound of the lease's pool with the lease."""
        return self._fullness(device_id, lease) < FULL or self._expected_fullness(device_id, lease) < FULL

    def keep(self, device_id: str, need_mib: int) -> None:
        """Keep room that is free, or becomes free, for a ticket; a negative need gives it back."""
        sums = self._devices[device_id]
        sums.kept_mib += need_mib
        sums.refresh()
        self.version += 1

    def closest_device(self, devices: Iterable[str], need_mib: int) -> str | None:
        """Return the device that lacks least for the need, of those that could ever have room for it."""
        possible = [
            device_id for device_id in devices if self._devices[device_id].device.lease_capacity_mib >= need_mib
        ]
        return max(possible, key=self.total_mib, default=None)

    # -- making room -----------------------------------------------------------------------------------------------------

    def plan(
        self,
        lease: Lease,
        devices: Sequence[str],
        need_mib: int,
        count: int = 1,
        *,
        also: tuple[Lease, ...] = (),
        between_cells: bool = False,
    ) -> Plan | Reason | None:
        """Return how to make room at least cost, why host memory forbids it, or None. `also` leave; `between_cells`: busy ones may, too."""
        plans: dict[str, tuple[Lease, ...]] = {}
        busy, host_mib = between_cells or self._victims.may_preempt_busy(lease), self._host_left_mib
        taken = self.planned | self.asked_to_yield if between_cells else self.planned
        for victim in also:
            host_mib -= victim.host_need_mib
        for short_mib, device_id in self._shortages(devices, need_mib, also, busy=busy):
            if len(plans) >= count + _MOST_COMPARED:
                break
            victims = self._victims.choose(
                device_id, short_mib, lease, taken, also, busy=busy, host_mib=host_mib, between_cells=between_cells
            )
            if victims is not None:
                plans[device_id] = victims
        bound = lease.state is LeaseState.SUSPENDED or lease.is_growing
        home = (lease.home_ids or lease.device_ids) if bound and len(devices) == count else ()
        short_of_host: Reason | None = None
        for chosen in self._by_cost(lease, devices, need_mib, plans, count, home):
            # Victims on several of the devices count once. A plan that host memory is too short for is dropped, and the next tried.
            victims = tuple(dict.fromkeys([*also, *[victim for device_id in chosen for victim in plans[device_id]]]))
            short_of_host = self.short_of_host(Plan(chosen, victims))
            if short_of_host is None:
                return Plan(chosen, victims)
        return short_of_host

    def _shortages(
        self, devices: Sequence[str], need_mib: int, also: tuple[Lease, ...], *, busy: bool
    ) -> list[tuple[int, str]]:
        """Return what each device lacks, least first, of those where suspends can make enough room."""
        found = []
        for device_id in devices:
            sums = self._devices[device_id]
            if sums.reachable_mib(busy=busy) < need_mib or sums.device.lease_capacity_mib < need_mib:
                continue
            given = sum(victim.held_mib for victim in also if device_id in victim.device_ids) if also else 0
            found.append((need_mib - sums.total_mib - given, device_id))
        if len(found) > _MOST_COMPARED:
            found.sort(key=lambda one: one[0])
        return found

    def _by_cost(  # noqa: PLR0917 - one caller
        self,
        lease: Lease,
        devices: Sequence[str],
        need_mib: int,
        plans: dict[str, tuple[Lease, ...]],
        count: int,
        home: tuple[str, ...],
    ) -> Iterator[tuple[str, ...]]:
        """Yield the devices of plans for `count` devices of one name, the cheapest first; each time without the dearest of the last."""
        if home and count > 1:  # saved state of several devices goes back to all of them, whatever their kinds
            if all(device_id in plans for device_id in home):
                yield home
            return
        if count == 1 and len(plans) == 1:
            yield tuple(plans)
            return
        costs = {device_id: self._cost(victims, device_id, lease) for device_id, victims in plans.items()}
        if count == 1:
            choice = self.choice(lease, devices, need_mib)
            for _, equal in groupby(sorted(plans, key=costs.__getitem__), key=costs.__getitem__):
                for device_id in self._by_room_left(list(equal), plans, choice):
                    yield (device_id,)
            return
        by_name: dict[str, list[tuple[int, str]]] = {}
        for device_id, (_, _, swaps, number) in costs.items():
            by_name.setdefault(self._books.devices[device_id].spec.name, []).append((swaps + number, device_id))
        groups = [sorted(group, key=lambda one: one[0]) for group in by_name.values()]
        while groups := [group for group in groups if len(group) >= count]:
            best = min(groups, key=lambda group: sum(cost for cost, _ in group[:count]))
            yield tuple(device_id for _, device_id in best[:count])
            del best[count - 1]

    def excess(self, device_id: str, newcomer: Lease, leaving: Sequence[Lease] = ()) -> int:
        """Return how far beyond its pool's bound the busy leases of a device would be with the newcomer, in coarse steps."""
        return excess(self._books, self._devices[device_id].device, newcomer, leaving)

    def _cost(self, victims: tuple[Lease, ...], device_id: str, lease: Lease) -> tuple[int, int, int, int]:
        """Return what orders plans: busy victims, compute that would be lacking, the cost of all swaps, the number of victims."""
        busy = swaps = 0
        for victim in victims:
            busy += victim.is_working
            swaps += suspend_cost(self._books, victim)
        return (busy, self.excess(device_id, lease, victims), swaps, len(victims))

    def _by_room_left(
        self, device_ids: list[str], plans: dict[str, tuple[Lease, ...]], choice: DeviceChoice
    ) -> list[str]:
        """Order devices whose plans cost the same: by what the ticket spoils there, then by the latest activity of a victim."""
        if len(device_ids) == 1:
            return device_ids

        def rank(device_id: str) -> tuple[int, int]:
            victims = plans[device_id]
            spoilt = 0
            if not choice.is_even:
                made_mib = sum([one.held_mib for one in victims if device_id in one.device_ids])
                spoilt = choice.spoilt([(device_id, self.total_mib(device_id) + made_mib)])
            return spoilt, max([victim.last_active_ms for victim in victims], default=0)

        return sorted(device_ids, key=rank)

    @property
    def _host_left_mib(self) -> int:
        return self._books.host_left_mib - self._planned_host_mib

    def short_of_host(self, plan: Plan) -> Reason | None:
        """Return a reason if there is too little host memory for what the plan would save, else None."""
        victims = plan.victims
        if not victims:
            return None
        host_mib = sum(victim.host_need_mib for victim in victims)
        left_mib = self._host_left_mib
        if host_mib <= left_mib:
            return None
        self.short_of_host_memory.update(victim.lease_id for victim in victims)
        for device_id in plan.device_ids:
            self.short_of_host_memory.update(self._books.devices[device_id].holders)
        return Reason(
            "wait.host-memory",
            f"idle kernels could make room, but saving them is expected to take {format_memory(host_mib)} of host memory, "
            f"of which {format_memory(max(0, left_mib))} are left",
            tuple(victim.lease_id for victim in victims),
        )

    def could_serve(self, device_id: str, need_mib: int, lease: Lease) -> bool:
        """Return whether the device would have room for the lease if all others there that ever can leave did."""
        device = self._devices[device_id].device
        stays_mib = device.mib_by_occupancy[OccupancyKind.FIXED] + sum(
            other.held_mib
            for other in device.holders.values()
            if other.occupancy in (OccupancyKind.IDLE, OccupancyKind.BUSY)
            and (other is lease or self._victims.never_leaves(other))
        )
        return device.lease_capacity_mib - stays_mib >= need_mib

    def victims_for_kept_room(self, device_id: str, need_mib: int, lease: Lease) -> list[Lease]:
        """Return idle leases of the device, cheapest first, that free what is still lacking and that host memory suffices for."""
        device, host_left_mib = self._devices[device_id].device, self._books.host_left_mib
        lack_mib = need_mib - device.free_mib - device.mib_by_occupancy[OccupancyKind.SUSPENDING]
        chosen = []
        for other in self._victims.idle_victims(device_id):
            if lack_mib <= 0:
                break
            if other is lease or other.lease_id in self.planned or other.occupancy is not OccupancyKind.IDLE:
                continue
            if not steps_aside(other, lease):
                continue
            if other.host_need_mib <= host_left_mib:
                chosen.append(other)
                lack_mib -= other.held_mib
        return chosen

    def suspending_leases(self, device_id: str) -> list[str]:
        """Return the leases of the device whose suspend is under way."""
        holders = self._devices[device_id].device.holders.values()
        return [lease.lease_id for lease in holders if lease.occupancy is OccupancyKind.SUSPENDING]

    def promise(self, plan: Plan, need_mib: int, *, firm: bool) -> None:
        """Promise a ticket the room of its plan, and keep of what is free only what it needs beside that; all of it if `firm`."""
        for victim in plan.victims:
            self.planned.add(victim.lease_id)
            self._planned_host_mib += victim.host_need_mib
            self._expect_freed(victim, victim.held_mib)
        for device_id in plan.device_ids:
            sums = self._devices[device_id]
            made_mib = 0 if firm else min(need_mib, max(0, sums.total_mib - sums.free_mib))
            sums.coming_mib -= made_mib
            self.keep(device_id, need_mib - made_mib)

    def protect(self, lease: Lease) -> None:
        """Exclude a lease from the victims: room is being made for it where it is, which its suspend would waste."""
        self.planned.add(lease.lease_id)

    def suspend_begun(self, victim: Lease) -> None:
        """Note that a planned suspend has begun: the books count what it frees, and its host memory, from now on."""
        self._planned_host_mib -= victim.host_need_mib
        self._expect_freed(victim, -victim.held_mib)

    def _expect_freed(self, victim: Lease, held_mib: int) -> None:
        self.version += 1
        for device_id in victim.device_ids:
            sums = self._devices.get(device_id)
            if sums is not None:
                sums.coming_mib += held_mib
                if not victim.is_working:
                    sums.planned_mib += held_mib
                sums.refresh()
