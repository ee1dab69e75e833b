"""Decides which leases may be suspended for a waiting lease, computes the cost, and finds the cheapest plan.

**Idle leases** are suspended first, starting with the cheapest, and only if their memory is needed. They are left alone while they are
pinned, for a while after a failed suspend, and until they have had a chance to run (`suspendable_from_ms`).

**Busy leases** are suspended only in pools that allow preemption, and only after their minimum residency (`residency_ms`), which is a
multiple of their swap time to prevent thrashing. They are suspended only for a lease that takes precedence over them
(`goes_before_from_ms`). This can be

- a lease of higher priority (`preempt_priorities`), or
- in a pool that shares by virtual time (`preempt_equals`), a lease of the same priority that has had less of its share than they have, or
  whose ticket is due. Leases of different owners are compared by the owners' virtual times, and leases of the same owner by their own.

Virtual times advance while leases run, so these functions return the time *from* which the condition holds.

**The cost** of a suspend is the swap time divided by the time until the lease is expected to run again (`suspend_cost`).

**A plan** (`Capacity.plan`) is the cheapest set of leases to suspend for a ticket, provided that host memory can hold their state.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND
from fractional_gpu.core.model import LeaseState, PoolSpec, Sharing
from fractional_gpu.core.place import (
    FULL,
    DeviceChoice,
    device_choice,
    excess,
    fullness,
    least_full,
    room_milli,
    spreads,
)
from fractional_gpu.core.state.books import Books
from fractional_gpu.core.state.leases import Lease, OccupancyKind, Reason
from fractional_gpu.core.units import format_memory


def lacks_device(books: Books, lease: Lease) -> bool:
    """Return whether any of the lease's devices is missing or lost, which means its memory can't be saved."""
    devices = [books.devices.get(device_id) for device_id in lease.device_ids]
    return not devices or any(device is None or device.lost for device in devices)


def suspendable_from_ms(pool: PoolSpec, lease: Lease) -> int | None:
    """Return the time from which a resident, idle lease may be suspended for others, or None while it is busy or cannot be suspended.

    The lease is left alone while it is pinned, for a while after a failed suspend, and until it has had a chance to run. If its next cell
    is waiting at a closed gate, it is treated as idle after its minimum residency. The caller must also check `lacks_device`.
    """
    if lease.is_working or lease.is_unsuspendable:
        return None
    chance_ms = 0 if lease.has_run and lease.gate.ticket is None else lease.arrived_ms + max(1, pool.min_residency_ms)
    return max(lease.retries.suspend_after_ms, chance_ms, lease.pinned_until_ms)


def steps_aside(lease: Lease, beneficiary: Lease) -> bool:
    """Return whether an idle lease makes room for the beneficiary. If its own next cell is waiting, the beneficiary must rank higher."""
    place, ticket = lease.gate.ticket, beneficiary.ticket
    if place is None or ticket is None:
        return place is None
    return (-beneficiary.spec.priority, ticket.order) < (-lease.spec.priority, place.order)


# -- leases that cannot be suspended -----------------------------------------------------------------------------------

_BY_SHARING = {
    Sharing.MPS: "its pool shares devices through MPS, whose clients the driver cannot checkpoint",
    Sharing.MIG: "its pool hands out MIG instances, on which the driver cannot checkpoint",
}
_CLAIM = "it is a claim, and the broker does not know which program uses it"
_UNSEEN = "our extension is not loaded in this kernel, and its pool suspends only kernels whose GPU use is known"


def update_suspendability(books: Books, lease: Lease) -> None:
    """Set the sentence explaining why the lease's process, device or pool prevents a suspend, or clear it if nothing does."""
    devices = [books.devices[device_id] for device_id in lease.device_ids if device_id in books.devices]
    by_device = next((device.spec.why_not for device in devices if device.spec.why_not), "")
    policy = books.policy(lease)
    unseen = "" if lease.spec.gated or policy.suspend_unseen else _UNSEEN
    claim = _CLAIM if lease.spec.claim_ms else ""
    lease.unsuspendable_reason = claim or lease.why_not or _BY_SHARING.get(policy.sharing, "") or by_device or unseen


def update_all_suspendability(books: Books, leases: Iterable[Lease]) -> None:
    """Run `update_suspendability` for several leases, and mark exclusive devices (MIG instances)."""
    whole = {device_id for pool in books.pools.values() if pool.sharing is Sharing.MIG for device_id in pool.devices}
    for device_id, device in books.devices.items():
        device.is_exclusive = device_id in whole
    for lease in leases:
        update_suspendability(books, lease)
        if lease.saved_mib:
            books.spread_saved(lease)


# -- busy leases -------------------------------------------------------------------------------------------------------


def swap_ms(books: Books, lease: Lease) -> int:
    """Return the expected time to suspend and resume the lease, in ms."""
    kind, mib = books.kind_of(lease.device_id), lease.used_mib
    return books.forecasts.swap_ms(SUSPEND, kind, mib) + books.forecasts.swap_ms(RESUME, kind, mib)


def residency_ms(books: Books, lease: Lease) -> int:
    """Return the lease's minimum residency: how long it may stay on a contended device before it can be made to leave, in ms."""
    pool = books.policy(lease)
    return max(1, pool.min_residency_ms, pool.min_residency_swaps_milli * swap_ms(books, lease) // 1000)


_MIN_GATE_WAIT_MS = 1_000  # a cell waits at its gate at least this long for the other leases that must leave


def gate_opens_ms(books: Books, lease: Lease, asked_ms: int) -> int:
    """Return the time at which a cell that has been held back since `asked_ms` stops waiting for other leases to leave."""
    return asked_ms + max(_MIN_GATE_WAIT_MS, swap_ms(books, lease))


def preemptible_from_ms(books: Books, lease: Lease) -> int | None:
    """Return the time at which a busy lease completes its minimum residency, or None if it is not resident or cannot be suspended."""
    if lease.state is not LeaseState.RESIDENT or lease.is_unsuspendable or lacks_device(books, lease):
        return None
    return max(lease.arrived_ms + residency_ms(books, lease), lease.retries.suspend_after_ms, lease.pinned_until_ms)


def goes_before_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return the time at which the waiting lease will take precedence over the busy `victim`, or None if waiting alone is not enough."""
    if victim.spec.pool != lease.spec.pool or victim.spec.priority > lease.spec.priority:
        return None
    pool = books.policy(lease)
    if victim.spec.priority < lease.spec.priority:
        return 0 if pool.preempt_priorities else None
    if not pool.preempt_equals:
        return None
    return 0 if lease.ticket is not None and lease.ticket.is_due else _is_behind_from_ms(books, lease, victim)


def preempts_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return the time at which the waiting lease may first preempt the busy `victim`, or None if waiting alone is not enough."""
    before_ms = goes_before_from_ms(books, lease, victim)
    had_turn_ms = preemptible_from_ms(books, victim) if before_ms is not None else None
    return None if before_ms is None or had_turn_ms is None else max(before_ms, had_turn_ms)


def _is_behind_from_ms(books: Books, lease: Lease, victim: Lease) -> int | None:
    """Return the time at which `lease` will have had less of its share than `victim` (of equal priority), or None if waiting won't help."""
    mine_ms, my_milli, my_weight = _virtual_time(books, lease, victim)
    other_ms, other_milli, other_weight = _virtual_time(books, victim, lease)
    if other_ms > mine_ms:
        return 0
    # Virtual time grows by 100 x milli-GPU / weight per ms. `gain` is how fast the victim's virtual time pulls ahead, times both weights.
    gain = 100 * (other_milli * my_weight - my_milli * other_weight)
    if gain <= 0:
        return None
    return books.now_ms + (mine_ms - other_ms) * my_weight * other_weight // gain + 1


def _virtual_time(books: Books, lease: Lease, other: Lease) -> tuple[int, int, int]:
    """Return the lease's virtual time, busy milli-GPU and weight, or its owner's if `other` has a different owner."""
    if lease.spec.owner == other.spec.owner:
        return lease.time_ms, lease.milli if lease.meter.is_running else 0, max(1, lease.spec.weight)
    account = books.accounts.of(lease)
    return account.time_ms, account.busy_milli, account.weight


# -- when the next cell comes ------------------------------------------------------------------------------------------

LIKELY_MILLI = 250
"""Expected cells that are less likely than this, in thousandths, are ignored."""


def likelihood_milli(lease: Lease) -> int:
    """Return the probability that the expected cell will come, in thousandths, or 0 if no cell is expected."""
    return lease.expectation.milli if lease.expectation is not None else 0


def is_expected(books: Books, lease: Lease) -> bool:
    """Return whether the lease's next cell is still expected, and likely enough to act on."""
    known = lease.expectation
    return known is not None and known.until_ms > books.now_ms and likelihood_milli(lease) >= LIKELY_MILLI


def next_cell_in_ms(books: Books, lease: Lease) -> int:
    """Return the expected time until the lease's next cell, in ms, based on past gaps between cells and on signs that one is coming."""
    gap_ms = books.forecasts.gap_left_ms(lease.lease_id, books.now_ms)
    known = lease.expectation
    if known is None or known.until_ms <= books.now_ms:
        return gap_ms
    milli, soon_ms = likelihood_milli(lease), max(1, known.until_ms - books.now_ms)
    if gap_ms <= soon_ms:
        return gap_ms
    # Average the rates, not the times: the cost of a suspend depends on cells per unit of time.
    return 1000 * soon_ms * gap_ms // (milli * gap_ms + (1000 - milli) * soon_ms)


# -- victims -----------------------------------------------------------------------------------------------------------


def suspend_cost(books: Books, lease: Lease) -> int:
    """Return the cost of suspending the lease, on a logarithmic scale with two steps per doubling.

    The scale is coarse, so many leases tie. Of these, the least recently used is suspended first.
    """
    need_mib = lease.host_need_mib
    # The cost rises up to tenfold as host memory runs out, so small leases are chosen first.
    dear_milli = min(10_000, 1000 + 1000 * need_mib // max(1, books.host_left_mib - need_mib))
    cost = swap_ms(books, lease) * dear_milli * 1000 // max(1, next_cell_in_ms(books, lease))
    bits = cost.bit_length()
    return 2 * bits + (cost >> (bits - 2) & 1) if bits > 1 else bits


def may_leave(books: Books, lease: Lease) -> bool:
    """Return whether an idle lease may be suspended now to make room for others."""
    is_idle = lease.occupancy is OccupancyKind.IDLE and not lacks_device(books, lease)
    return is_idle and books.is_time(suspendable_from_ms(books.policy(lease), lease))


class Victims:
    """Candidates for suspension on each device, listed once per pass and shared by all tickets."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._idle: dict[str, list[Lease]] = {}
        self._busy: dict[str, list[Lease]] = {}

    def forget(self, device_ids: Iterable[str]) -> None:
        """Drop the cached candidates of devices that have gained a lease."""
        for device_id in device_ids:
            self._idle.pop(device_id, None)
            self._busy.pop(device_id, None)

    def idle(self, device_id: str) -> list[Lease]:
        """Return the device's idle leases that may be suspended now, cheapest first."""
        if device_id not in self._idle:
            able = [lease for lease in self._books.holders(device_id) if may_leave(self._books, lease)]
            able.sort(key=lambda one: (suspend_cost(self._books, one), one.last_active_ms, one.lease_id))
            self._idle[device_id] = able
        return [lease for lease in self._idle[device_id] if lease.occupancy is OccupancyKind.IDLE]  # some have left

    def _working(self, device_id: str) -> list[Lease]:
        """Return the device's busy leases that can be suspended and have completed their minimum residency."""
        if device_id not in self._busy:
            busy = [lease for lease in self._books.holders(device_id) if lease.occupancy is OccupancyKind.BUSY]
            had_turn = [lease for lease in busy if self._books.is_time(preemptible_from_ms(self._books, lease))]
            self._busy[device_id] = had_turn
        return [lease for lease in self._busy[device_id] if lease.occupancy is OccupancyKind.BUSY]

    def _preemptible(self, device_id: str, beneficiary: Lease) -> list[Lease]:
        """Return the busy leases the beneficiary may preempt now, best choice first."""
        books = self._books
        working = self._working(device_id)
        able = [lease for lease in working if books.is_time(goes_before_from_ms(books, beneficiary, lease))]

        def order(lease: Lease) -> tuple[int | str, ...]:
            owner, own = books.share(lease)
            return lease.spec.priority, -owner, -own, suspend_cost(books, lease), lease.lease_id

        return sorted(able, key=order)

    def _yielding(self, device_id: str, beneficiary: Lease) -> list[Lease]:
        """Return the busy leases that may be asked to yield at the end of a cell. Those that were already asked come first."""
        books, priority = self._books, beneficiary.spec.priority
        working = [lease for lease in self._working(device_id) if lease.spec.priority <= priority]
        able = [lease for lease in working if books.is_time(lease.gate.open_until_ms)]

        def order(lease: Lease) -> tuple[int | str, ...]:
            return not lease.gate.closed, lease.spec.priority, suspend_cost(books, lease), lease.lease_id

        return sorted(able, key=order)

    def choose(
        self,
        device_id: str,
        short_mib: int,
        beneficiary: Lease,
        taken: Container[str],
        *,
        host_mib: int,
        busy: bool = False,
        between_cells: bool = False,
    ) -> tuple[Lease, ...] | None:
        """Return a minimal set of leases that together hold at least `short_mib`, or None if there is none.

        Leases that fit in `host_mib` of host memory are preferred. If there are too few of them, the limit is ignored so that the caller
        can report the shortage of host memory. `busy` also allows leases that may be preempted. `between_cells` instead allows leases that
        may be asked to yield at the end of a cell. Leases in `taken` are skipped.
        """
        if short_mib <= 0:
            return ()
        device = self._books.devices[device_id]
        most_mib = device.mib(OccupancyKind.IDLE) + (device.mib(OccupancyKind.BUSY) if busy or between_cells else 0)
        if most_mib < short_mib:
            return None
        able = [lease for lease in self.idle(device_id) if steps_aside(lease, beneficiary)]
        if between_cells:
            able += self._yielding(device_id, beneficiary)
        elif busy:
            able += self._preemptible(device_id, beneficiary)
        able = [one for one in able if one.lease_id not in taken and one is not beneficiary]
        if sum(lease.held_mib for lease in able) < short_mib:
            return None
        chosen = _enough(able, short_mib, host_mib)
        if not chosen:
            # Prefer busy leases that fit in host memory.
            able.sort(key=lambda one: one.busy and one.host_need_mib > host_mib)
            chosen = _enough(able, short_mib, _UNLIMITED_MIB)
        return chosen or None


_UNLIMITED_MIB = 1 << 60  # more host memory than any machine has


def _enough(able: Sequence[Lease], short_mib: int, host_mib: int) -> tuple[Lease, ...]:
    """Return the first leases that fit in host memory and free enough memory, without any unneeded ones. If too few fit, return ()."""
    chosen: list[Lease] = []
    room_mib, idle_left_out = 0, False
    for lease in able:
        if lease.busy and idle_left_out:
            break  # never preempt a busy lease only because an idle one does not fit in host memory
        if lease.host_need_mib > host_mib:
            idle_left_out |= not lease.busy
            continue
        host_mib -= lease.host_need_mib
        chosen.append(lease)
        room_mib += lease.held_mib
        if room_mib >= short_mib:
            break
    if room_mib < short_mib:
        return ()
    spare_mib, needed = room_mib - short_mib, list[Lease]()
    for lease in reversed(chosen):  # from the most expensive down, a lease that fits in the spare memory can stay
        if lease.held_mib <= spare_mib:
            spare_mib -= lease.held_mib
        else:
            needed.append(lease)
    return tuple(needed[::-1])


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """The leases to suspend to make room for a ticket on these devices. `victims` is empty if current suspends will free enough."""

    device_ids: tuple[str, ...]
    victims: tuple[Lease, ...]


class Capacity:
    """The room that one pass over the queue can still give out. Room promised to one ticket is not available to later ones.

    This includes room that current and planned suspends will free. `promise` sets it aside before the suspends begin, because they might
    have to wait for a swap channel.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self.victims = Victims(books)
        self._kept = defaultdict[str, dict[str, int]](dict)  # by device: MiB kept, by lease
        self.planned: dict[str, Lease] = {}  # leases whose suspend this pass planned, begun or not
        self.stays: set[str] = set()  # leases that get room on their own device; suspending them would waste it
        self.asked_to_yield: set[str] = set()  # leases that earlier tickets ask to yield at the end of a cell
        self.short_of_host_memory: set[str] = set()  # leases that cannot be suspended because host memory is too short

    # -- room on a device, MiB -------------------------------------------------------------------------------------------

    def free_mib(self, device_id: str) -> int:
        """Return the free memory that isn't being kept for a ticket, in MiB. It is negative if more is kept than is free."""
        device, kept = self._books.devices[device_id], self._kept[device_id]
        if not kept:
            return device.free_mib
        free_mib = device.free_mib - sum(kept.values())
        return min(0, free_mib) if device.is_exclusive else free_mib

    def total_mib(self, device_id: str) -> int:
        """Return the memory that will be free once all current and planned suspends have ended, excluding memory kept for tickets."""
        mib = self.free_mib(device_id) + self._books.devices[device_id].mib(OccupancyKind.SUSPENDING)
        for lease in self.planned.values():
            if lease.state is LeaseState.RESIDENT and device_id in lease.device_ids:
                mib += lease.held_mib
        return mib

    def reachable_mib(self, device_id: str) -> int:
        """Return the memory that would be free if all idle leases left, excluding memory kept for tickets."""
        device = self._books.devices[device_id]
        mib = self.free_mib(device_id) + device.mib(OccupancyKind.SUSPENDING) + device.mib(OccupancyKind.IDLE)
        for lease in self.planned.values():
            if lease.occupancy is OccupancyKind.BUSY and device_id in lease.device_ids:
                mib += lease.held_mib
        return mib

    # -- where a ticket fits ---------------------------------------------------------------------------------------------

    def fits(self, devices: Iterable[str], need_mib: int) -> bool:
        return all(self.free_mib(device_id) >= need_mib for device_id in devices)

    def idle_could_free(self, devices: Iterable[str], need_mib: int) -> bool:
        return any(self.reachable_mib(device_id) >= need_mib for device_id in devices)

    def choice(self, lease: Lease, devices: Sequence[str], need_mib: int) -> DeviceChoice:
        """Return a ranking of the devices for the lease. `devices` lists all devices the lease may use."""
        return device_choice(self._books, lease, need_mib, [(one, self.free_mib(one)) for one in devices])

    def pick(self, lease: Lease, devices: Sequence[str], need_mib: int) -> tuple[str, ...] | None:
        """Return the best devices that the lease fits on, or None.

        Pools that spread leases prefer devices with more compute left.
        """
        choice = self.choice(lease, devices, need_mib)
        fitting = [place for place in choice.everywhere if place[1] >= need_mib]
        if lease.count > 1:
            return choice.best_set(fitting, lease.count)
        if len(fitting) > 1 and spreads(self._books, lease):
            fitting = least_full(self._books, lease, fitting)
        best = choice.best(fitting)
        return None if best is None else (best,)

    def pick_for(self, lease: Lease, devices: Sequence[str], need_mib: int) -> tuple[str, ...] | None:
        """Return the devices for the lease, or None if it fits nowhere.

        A saved lease returns to its old device if enough memory and compute are left there.
        """
        home = lease.home_ids if lease.state is LeaseState.SUSPENDED else ()
        if not home or not set(home) <= set(devices) or not self.fits(home, need_mib):
            return self.pick(lease, devices, need_mib)
        if len(home) > 1 or not spreads(self._books, lease) or self._has_compute(home[0], lease):
            return home
        chosen = self.pick(lease, devices, need_mib)
        return chosen if chosen is not None and self._has_compute(chosen[0], lease) else home

    def _has_compute(self, device_id: str, lease: Lease) -> bool:
        """Return whether the device would stay within its pool's bound on compute demand if the lease were added."""
        return fullness(self._books.devices[device_id], room_milli(self._books, lease)) < FULL

    # -- keeping room ----------------------------------------------------------------------------------------------------

    def keep(self, lease: Lease, device_id: str, need_mib: int) -> None:
        """Keep room on the device for a lease, even if the room isn't free yet. Calling this again for the same lease has no effect."""
        self._kept[device_id].setdefault(lease.lease_id, need_mib)

    def release(self, lease: Lease, device_ids: Iterable[str]) -> None:
        """Stop keeping room for a lease that has received it or will not get it."""
        for device_id in device_ids:
            self._kept[device_id].pop(lease.lease_id, None)

    @property
    def keeps_any(self) -> bool:
        return any(self._kept.values())

    def devices_to_keep(self, lease: Lease, devices: Sequence[str], need_mib: int, number: int) -> tuple[str, ...]:
        """Return up to `number` devices on which to keep room for the lease.

        Devices where room is already kept for it come first, then those with the most room. The choice stays the same while the
        devices can serve the ticket, so that the kept room can grow until there is enough.
        """
        able = [device_id for device_id in devices if self._books.devices[device_id].lease_capacity_mib >= need_mib]
        if len(able) < lease.count or lease.ticket is None:  # it needs room on all of its devices at once
            return ()
        kept = [device_id for device_id in lease.ticket.kept_on if device_id in able]
        others = [device_id for device_id in able if device_id not in kept]
        others.sort(key=lambda one: (lease.lease_id not in self._kept[one], -self.total_mib(one)))
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
        """Return the cheapest plan to make room. If only host memory is lacking, return that reason. If there is no plan, return None.

        The leases in `also` will leave in any case. With `between_cells`, the plan may include busy leases that yield at the end of a cell.
        """
        books, pool = self._books, self._books.policy(lease)
        busy = between_cells or (not lease.is_growing and (pool.preempt_equals or pool.preempt_priorities))
        taken = {*self.planned, *self.stays, *(one.lease_id for one in also)}
        if between_cells:
            taken |= self.asked_to_yield
        host_mib = self._host_left_mib - sum(victim.host_need_mib for victim in also)
        victims_of: dict[str, tuple[Lease, ...]] = {}
        for device_id in devices:
            if books.devices[device_id].lease_capacity_mib < need_mib:
                continue
            short_mib = need_mib - self.total_mib(device_id)
            if also:
                short_mib -= sum(one.held_mib for one in also if device_id in one.device_ids)
            victims = self.victims.choose(
                device_id, short_mib, lease, taken, host_mib=host_mib, busy=busy, between_cells=between_cells
            )
            if victims is not None:
                victims_of[device_id] = victims
        short_of_host: Reason | None = None
        for chosen in self._by_cost(lease, devices, need_mib, victims_of):
            # A victim on several devices counts once. If host memory is too short for a plan, the next one is tried.
            victims = tuple(dict.fromkeys([*also, *[one for device_id in chosen for one in victims_of[device_id]]]))
            short_of_host = self.short_of_host(Plan(chosen, victims))
            if short_of_host is None:
                return Plan(chosen, victims)
        return short_of_host

    def _by_cost(
        self, lease: Lease, devices: Sequence[str], need_mib: int, victims_of: dict[str, tuple[Lease, ...]]
    ) -> list[tuple[str, ...]]:
        """Return the possible sets of devices, cheapest first. All devices in a set are of the same type.

        Devices are compared by their busy victims, then by missing compute, swap costs, the number of victims, fragmentation, and how
        recently a victim was active.
        """
        count, goes_back = lease.count, lease.state is LeaseState.SUSPENDED or lease.is_growing
        if count > 1 and goes_back and len(devices) == count:  # it returns to all of its devices, of whatever type
            home = lease.home_ids or lease.device_ids
            return [home] if all(device_id in victims_of for device_id in home) else []
        choice = self.choice(lease, devices, need_mib)

        def cost(device_id: str) -> tuple[int, ...]:
            device, victims = self._books.devices[device_id], victims_of[device_id]
            then_mib = self.total_mib(device_id) + sum(one.held_mib for one in victims if device_id in one.device_ids)
            return (
                sum(one.is_working for one in victims),
                excess(self._books, device, lease, victims),
                sum(suspend_cost(self._books, one) for one in victims),
                len(victims),
                choice.fragmentation([(device_id, then_mib)]),
                max((one.last_active_ms for one in victims), default=0),
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
        """The host memory that will be left once all planned suspends have begun, in MiB."""
        to_come = (one.host_need_mib for one in self.planned.values() if one.state is LeaseState.RESIDENT)
        return self._books.host_left_mib - sum(to_come)

    def short_of_host(self, plan: Plan) -> Reason | None:
        """Return a reason if there isn't enough host memory for the plan, otherwise None."""
        host_mib, left_mib = sum(victim.host_need_mib for victim in plan.victims), self._host_left_mib
        if not plan.victims or host_mib <= left_mib:
            return None
        self.short_of_host_memory.update(victim.lease_id for victim in plan.victims)
        for device_id in plan.device_ids:
            self.short_of_host_memory.update(self._books.devices[device_id].holders)
        return Reason(
            "wait.host-memory",
            f"idle kernels could make room, but saving them is expected to take {format_memory(host_mib)} of host memory, "
            f"and only {format_memory(max(0, left_mib))} is left",
            tuple(victim.lease_id for victim in plan.victims),
        )

    def promise(self, lease: Lease, plan: Plan, need_mib: int) -> None:
        """Mark the plan's victims as leaving, and keep the memory that the ticket needs on the plan's devices."""
        self.planned.update({victim.lease_id: victim for victim in plan.victims})
        for device_id in plan.device_ids:
            self.keep(lease, device_id, need_mib)

    # -- filling kept room -----------------------------------------------------------------------------------------------

    def could_serve(self, device_id: str, need_mib: int, lease: Lease) -> bool:
        """Return whether the lease would fit on the device once every other lease that can leave it has left."""
        books, device = self._books, self._books.devices[device_id]

        def stays(other: Lease) -> bool:
            if other.occupancy in (OccupancyKind.SUSPENDING, OccupancyKind.FIXED):
                return other.occupancy is OccupancyKind.FIXED
            never_leaves = other.is_unsuspendable or other.pinned_until_ms > books.now_ms or lacks_device(books, other)
            return other is lease or never_leaves

        stays_mib = sum(other.held_mib for other in device.holders.values() if stays(other))
        return device.lease_capacity_mib - stays_mib >= need_mib

    def victims_for_kept_room(self, device_id: str, need_mib: int, lease: Lease) -> list[Lease]:
        """Return the cheapest idle leases that fit in host memory, as many as it takes to free the memory the device lacks."""
        device = self._books.devices[device_id]
        lack_mib = need_mib - device.free_mib - device.mib(OccupancyKind.SUSPENDING)
        chosen = []
        for other in self.victims.idle(device_id):
            if lack_mib <= 0:
                break
            taken = other is lease or other.lease_id in self.planned or other.lease_id in self.stays
            if not taken and steps_aside(other, lease) and other.host_need_mib <= self._books.host_left_mib:
                chosen.append(other)
                lack_mib -= other.held_mib
        return chosen
