"""What one pass over the queue still has to give, and how to make room.

**Room.** Of each device a pass knows what is free and kept for no ticket ahead (`free_mib`), and what will be when all have left that leave
(`total_mib`): what suspends under way, or planned, will free counts there.

**Plans.** `plan` finds the leases whose leaving makes room for a ticket at least cost, and checks host memory for what they save.
`promise` keeps the plan's room before its suspends begin: only as many begin as swap channels are free.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fractional_gpu.core.books.books import Books
from fractional_gpu.core.books.records import Device, Lease, OccupancyKind, Reason
from fractional_gpu.core.model import LeaseState
from fractional_gpu.core.rules.contention import FULL, excess, fullness, least_full, room_milli, spreads
from fractional_gpu.core.rules.eligibility import steps_aside
from fractional_gpu.core.rules.fragmentation import DeviceChoice, device_choice
from fractional_gpu.core.scheduler.victims import Victims, suspend_cost
from fractional_gpu.core.units import format_memory


@dataclass(frozen=True, slots=True)
class Plan:
    """Suspending `victims` makes room for a ticket on these devices; no victims: suspends under way suffice."""

    device_ids: tuple[str, ...]
    victims: tuple[Lease, ...]


class Room:
    """What one pass has kept and promised of a device, and what that leaves, MiB."""

    __slots__ = (
        "device",
        "free_mib",
        "kept",
        "planned",
        "seen",
        "total_mib",
        "with_busy_mib",
        "with_idle_mib",
    )

    def __init__(self, device: Device) -> None:
        self.device = device
        self.kept: dict[str, int] = {}  # by the lease that it is kept for
        self.planned: list[Lease] = []  # leases there whose suspend is planned, or has begun since
        self.look()

    def look(self) -> None:
        """Compute what is left."""
        device, kept_mib = self.device, sum(self.kept.values())
        self.seen = device.sums
        free_mib = device.free_mib - kept_mib
        # What is free and not kept; negative if more is kept than there is.
        self.free_mib = min(0, free_mib) if kept_mib and device.is_exclusive else free_mib
        leaving_mib, idle_mib, busy_mib = map(
            device.mib, (OccupancyKind.SUSPENDING, OccupancyKind.IDLE, OccupancyKind.BUSY)
        )
        for lease in self.planned:
            if lease.occupancy is OccupancyKind.IDLE:
                leaving_mib, idle_mib = leaving_mib + lease.held_mib, idle_mib - lease.held_mib
            elif lease.occupancy is OccupancyKind.BUSY:
                leaving_mib, busy_mib = leaving_mib + lease.held_mib, busy_mib - lease.held_mib
        # What is free, or will be when all have left that leave, and is not kept.
        self.total_mib = self.free_mib + leaving_mib
        self.with_idle_mib = self.total_mib + idle_mib  # what there would be if all idle leases left ...
        self.with_busy_mib = self.with_idle_mib + busy_mib  # ... and the busy ones


class Capacity:
    """The rooms of all devices in one pass. What a ticket was promised is gone for those behind it."""

    def __init__(self, books: Books, victims: Victims) -> None:
        self._books = books
        self._victims = victims
        self._rooms = {device_id: Room(device) for device_id, device in books.devices.items()}
        self.planned: dict[str, Lease] = {}  # leases whose suspend is planned, or has begun since
        self.stays: set[str] = set()  # leases for which room is being made where they are: their suspend would waste it
        self.asked_to_yield: set[str] = set()  # leases that make room for a ticket ahead at a cell's end
        self.short_of_host_memory: set[str] = set()  # idle leases that there is too little host memory for

    def room(self, device_id: str) -> Room:
        """Return a device's room as it is now."""
        room = self._rooms[device_id]
        if room.seen is not self._books.devices[device_id].known_sums:
            room.look()
        return room

    # -- where a ticket fits ---------------------------------------------------------------------------------------------

    def fits(self, devices: Iterable[str], need_mib: int) -> bool:
        """Return whether the need fits on each of these devices now."""
        return all(self.room(device_id).free_mib >= need_mib for device_id in devices)

    def idle_could_free(self, devices: Iterable[str], need_mib: int) -> bool:
        """Return whether idle leases could make room on one of the devices."""
        return any(self.room(device_id).with_idle_mib >= need_mib for device_id in devices)

    def choice(self, lease: Lease, devices: Sequence[str], need_mib: int) -> DeviceChoice:
        """Return what orders devices for the lease. `devices`: all that it may go to."""
        return device_choice(self._books, lease, need_mib, lambda: [(one, self.room(one).free_mib) for one in devices])

    def pick(self, lease: Lease, devices: Sequence[str], need_mib: int) -> tuple[str, ...] | None:
        """Return where the need fits for the lease; None if it fits nowhere.

        In a pool that spreads, a device where busy leases leave more compute to the lease comes first (`contention`). Of several such
        devices, `fragmentation` chooses.
        """
        places = [(device_id, self.room(device_id).free_mib) for device_id in devices]
        fitting = [place for place in places if place[1] >= need_mib]
        choice = self.choice(lease, devices, need_mib)
        if lease.count > 1:
            return choice.best_set(fitting, lease.count)
        if len(fitting) > 1 and spreads(self._books, lease):
            fitting = least_full(self._books, lease, fitting)
        best = choice.best(fitting)
        return None if best is None else (best,)

    def pick_for(self, lease: Lease, devices: Sequence[str], need_mib: int) -> tuple[str, ...] | None:
        """Return where the lease's need fits; None if it fits nowhere. Saved state goes home if it can, unless home is too busy for it."""
        home = lease.home_ids if lease.state is LeaseState.SUSPENDED else ()
        if not home or not set(home) <= set(devices) or not self.fits(home, need_mib):
            return self.pick(lease, devices, need_mib)
        if len(home) > 1 or not spreads(self._books, lease) or self._has_compute(home[0], lease):
            return home
        chosen = self.pick(lease, devices, need_mib)
        return chosen if chosen is not None and self._has_compute(chosen[0], lease) else home

    def _has_compute(self, device_id: str, lease: Lease) -> bool:
        """Return whether the device is within the bound of the lease's pool with the lease."""
        return fullness(self.room(device_id).device, room_milli(self._books, lease)) < FULL

    # -- keeping room ----------------------------------------------------------------------------------------------------

    def keep(self, lease: Lease, device_id: str, need_mib: int) -> None:
        """Keep room that is free, or becomes free, for a lease; on each device at most once in a pass."""
        room = self._rooms.get(device_id)
        if room is not None and lease.lease_id not in room.kept:
            room.kept[lease.lease_id] = need_mib
            room.look()

    def release(self, lease: Lease, device_ids: Iterable[str]) -> None:
        """Keep room for a lease no longer: the lease has it, or will not get it."""
        for device_id in device_ids:
            if device_id in self._rooms:
                self._rooms[device_id].kept.pop(lease.lease_id, None)
                self._rooms[device_id].look()

    @property
    def keeps_any(self) -> bool:
        """Whether room is kept for any lease."""
        return any(room.kept for room in self._rooms.values())

    def devices_to_keep(self, lease: Lease, devices: Sequence[str], need_mib: int, number: int) -> tuple[str, ...]:
        """Return on which devices to keep room for the lease: where it is kept already, then where least is lacking.

        The devices stay the same while they can serve the ticket, so that the room there can grow to what is needed.
        """
        able = [device_id for device_id in devices if self.room(device_id).device.lease_capacity_mib >= need_mib]
        if len(able) < lease.count or lease.ticket is None:  # room on some of the devices that it needs is of no use
            return ()
        kept = [device_id for device_id in lease.ticket.kept_on if device_id in able]
        others = [device_id for device_id in able if device_id not in kept]
        others.sort(key=lambda one: (lease.lease_id not in self.room(one).kept, -self.room(one).total_mib))
        return tuple([*kept, *others][:number])

    # -- making room -----------------------------------------------------------------------------------------------------

    def plan(
        self,
        lease: Lease,
        devices: Sequence[str],
        need_mib: int,
        *,
        also: tuple[Lease, ...] = (),
        between_cells: bool = False,
    ) -> Plan | Reason | None:
        """Return how to make room at least cost, or why that fails for want of host memory, or None.

        `also` leave in any case. `between_cells`: plan with busy leases that leave at the end of their cells.
        """
        victims_of: dict[str, tuple[Lease, ...]] = {}
        busy = between_cells or self._victims.may_preempt_busy(lease)
        taken = {*self.planned, *self.stays, *(self.asked_to_yield if between_cells else ())}
        host_mib = self._host_left_mib - sum(victim.host_need_mib for victim in also)
        for device_id in devices:
            room = self.room(device_id)
            reachable_mib = room.with_busy_mib if busy else room.with_idle_mib
            if reachable_mib < need_mib or room.device.lease_capacity_mib < need_mib:
                continue
            short_mib = need_mib - room.total_mib - sum(one.held_mib for one in also if device_id in one.device_ids)
            victims = self._victims.choose(
                device_id, short_mib, lease, taken, also, busy=busy, host_mib=host_mib, between_cells=between_cells
            )
            if victims is not None:
                victims_of[device_id] = victims
        short_of_host: Reason | None = None
        for chosen in self._by_cost(lease, devices, need_mib, victims_of):
            # Victims on several of the devices count once. A plan that host memory is too short for is dropped, and the next tried.
            victims = tuple(dict.fromkeys([*also, *[one for device_id in chosen for one in victims_of[device_id]]]))
            short_of_host = self.short_of_host(Plan(chosen, victims))
            if short_of_host is None:
                return Plan(chosen, victims)
        return short_of_host

    def _by_cost(
        self, lease: Lease, devices: Sequence[str], need_mib: int, victims_of: dict[str, tuple[Lease, ...]]
    ) -> list[tuple[str, ...]]:
        """Return the sets of devices that would do, the cheapest first.

        The cost of a device: busy victims, then compute that would be lacking, the swaps, the number of victims, what the lease spoils
        there, and last how recently a victim was active. Several devices are of one name.
        """
        count, bound = lease.count, lease.state is LeaseState.SUSPENDED or lease.is_growing
        if count > 1 and bound and len(devices) == count:
            home = (
                lease.home_ids or lease.device_ids
            )  # it goes back to all of them, or grows there, whatever their names
            return [home] if all(device_id in victims_of for device_id in home) else []
        choice = self.choice(lease, devices, need_mib)

        def cost(device_id: str) -> tuple[int, ...]:
            room, victims = self.room(device_id), victims_of[device_id]
            then_mib = room.total_mib + sum([one.held_mib for one in victims if device_id in one.device_ids])
            return (
                sum([one.is_working for one in victims]),
                excess(self._books, room.device, lease, victims),
                sum([suspend_cost(self._books, one) for one in victims]),
                len(victims),
                choice.spoilt([(device_id, then_mib)]),
                max([one.last_active_ms for one in victims], default=0),
            )

        order = sorted(victims_of, key=cost) if len(victims_of) > 1 else list(victims_of)
        if count == 1:
            return [(device_id,) for device_id in order]
        by_name: dict[str, list[str]] = {}
        for device_id in order:
            by_name.setdefault(self._books.kind_of(device_id), []).append(device_id)
        return [tuple(ids[at : at + count]) for ids in by_name.values() for at in range(len(ids) - count + 1)]

    @property
    def _host_left_mib(self) -> int:
        """Host memory that is left when all planned suspends have begun."""
        to_come = [one.host_need_mib for one in self.planned.values() if one.state is LeaseState.RESIDENT]
        return self._books.host_left_mib - sum(to_come)

    def short_of_host(self, plan: Plan) -> Reason | None:
        """Return a reason if there is too little host memory for what the plan would save, else None."""
        host_mib, left_mib = sum(victim.host_need_mib for victim in plan.victims), self._host_left_mib
        if not plan.victims or host_mib <= left_mib:
            return None
        self.short_of_host_memory.update(victim.lease_id for victim in plan.victims)
        for device_id in plan.device_ids:
            self.short_of_host_memory.update(self.room(device_id).device.holders)
        return Reason(
            "wait.host-memory",
            f"idle kernels could make room, but saving them is expected to take {format_memory(host_mib)} of host memory, "
            f"of which {format_memory(max(0, left_mib))} are left",
            tuple(victim.lease_id for victim in plan.victims),
        )

    def promise(self, lease: Lease, plan: Plan, need_mib: int) -> None:
        """Keep all that a ticket needs on the devices of its plan, whose victims leave."""
        for victim in plan.victims:
            self.planned[victim.lease_id] = victim
            for device_id in victim.device_ids:
                if device_id in self._rooms:
                    self._rooms[device_id].planned.append(victim)
                    self._rooms[device_id].look()
        for device_id in plan.device_ids:
            self.keep(lease, device_id, need_mib)

    # -- gathering kept room ---------------------------------------------------------------------------------------------

    def could_serve(self, device_id: str, need_mib: int, lease: Lease) -> bool:
        """Return whether the device would have room for the lease if all others there that ever can leave did."""
        device = self.room(device_id).device
        stays_mib = device.mib(OccupancyKind.FIXED) + sum(
            other.held_mib
            for other in device.holders.values()
            if other.occupancy in (OccupancyKind.IDLE, OccupancyKind.BUSY)
            and (other is lease or self._victims.never_leaves(other))
        )
        return device.lease_capacity_mib - stays_mib >= need_mib

    def victims_for_kept_room(self, device_id: str, need_mib: int, lease: Lease) -> list[Lease]:
        """Return idle leases of the device, cheapest first, that free what is still lacking and that host memory suffices for."""
        device = self.room(device_id).device
        lack_mib = need_mib - device.free_mib - device.mib(OccupancyKind.SUSPENDING)
        chosen = []
        for other in self._victims.idle(device_id):
            if lack_mib <= 0:
                break
            taken = other is lease or other.lease_id in self.planned or other.lease_id in self.stays
            if not taken and steps_aside(other, lease) and other.host_need_mib <= self._books.host_left_mib:
                chosen.append(other)
                lack_mib -= other.held_mib
        return chosen
