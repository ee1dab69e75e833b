"""Keeps the arbiter's books: its pools, devices, leases and queue.

Only `Books` writes a lease's `state`, `device_ids`, `held_mib`, `saved_mib`, `host_mib`, `gate` and `ticket`. It also writes `busy`, except
when a lease is emptied or recovered. Most derived values are computed when they are read. The exceptions are the leases on each device, the
totals for unchanged devices and the host memory totals, which are stored; `laws` checks them against recomputed values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fractional_gpu.core.forecasts.forecasts import Forecasts
from fractional_gpu.core.model import LeaseSpec, LeaseState, PoolSpec, ReserveBy
from fractional_gpu.core.state.accounts import Accounts
from fractional_gpu.core.state.leases import Device, Lease, OccupancyKind, Ticket
from fractional_gpu.core.time_slicing import WHOLE_MILLI

_LONGEST_HOLD_MS = 3_600_000  # no more than this counts between two events, so a night without events counts as an hour


class Books:
    """The complete state of the arbiter."""

    def __init__(self, forecasts: Forecasts | None = None) -> None:
        self.now_ms = 0
        self.forecasts = forecasts or Forecasts()
        self.pools: dict[str, PoolSpec] = {}
        self.devices: dict[str, Device] = {}
        self.leases: dict[str, Lease] = {}
        self.waiting: dict[str, Lease] = {}  # leases with a ticket
        self.accounts = Accounts(self.shares_by_time)
        self.idle_held: dict[str, int] = {}  # by pool: MiB times ms that idle leases have held since the last grant
        self.host_budget_mib = 0
        self.host_saved_mib = 0
        self.host_reserved_mib = 0
        self.parked: dict[str, Lease] = {}  # leases that need room before their process starts, but have no ticket yet
        self.unsaved: dict[str, str] = {}  # by lease: a sentence that explains why it cannot be saved before a deadline
        self.recheck_ms: int | None = None  # when a decision may change without an event (`recheck_at`)
        self._number = 0

    def recheck_at(self, at_ms: int) -> None:
        """Schedule a run of the scheduler for `at_ms`, unless an earlier run is already scheduled. Times in the past are ignored."""
        if at_ms > self.now_ms and (self.recheck_ms is None or at_ms < self.recheck_ms):
            self.recheck_ms = at_ms

    def is_time(self, at_ms: int | None) -> bool:
        """Return whether `at_ms` has been reached. If not, schedule a recheck for that time. If it is None, just return False."""
        if at_ms is None:
            return False
        self.recheck_at(at_ms)
        return at_ms <= self.now_ms

    # -- leases ----------------------------------------------------------------------------------------------------------

    def add(self, lease: Lease) -> None:
        self._number += 1
        lease.number = self._number
        self.leases[lease.lease_id] = lease
        self.accounts.open(lease)
        lease.size_mib = self.reserve_mib(lease, lease.spec)
        lease.demand_milli = self.forecasts.demand_milli(lease.lease_id, lease.spec.pool)
        self.refresh(lease)

    def remove(self, lease: Lease) -> None:
        """Remove a lease that has no reservation."""
        del self.leases[lease.lease_id]
        self.accounts.close(lease, self.now_ms)

    def in_state(self, *states: LeaseState) -> list[Lease]:
        """Return the leases in any of these states, oldest first."""
        return [lease for lease in self.leases.values() if lease.state in states]

    def set_state(self, lease: Lease, new: LeaseState) -> None:
        lease.state = new
        self.refresh(lease)

    def set_busy(self, lease: Lease, *, busy: bool) -> None:
        lease.busy = busy
        lease.let_in, lease.seen_milli, lease.cell_milli = False, None, None
        lease.has_run |= busy
        if busy:
            lease.announced_ms = 0
            lease.forget_shrinking()
        self.refresh(lease)

    def set_let_in(self, lease: Lease, *, let_in: bool) -> None:
        """Set whether the lease has been given room for a cell that has not started yet."""
        if lease.let_in != let_in:
            lease.let_in = let_in
            self.refresh(lease)

    def see_utilisation(self, lease: Lease, util_milli: int) -> None:
        """Update the lease's compute demand from its utilisation over the last period, in thousandths of a device.

        The running cell is judged by its own samples, because demand varies more from cell to cell than from kernel to kernel. While busy
        leases use the whole device, a lease's demand lies between its sample and the upper bound that `time_slicing` derives from the
        sample.
        """
        if lease.occupancy is not OccupancyKind.BUSY:
            return
        lease.seen_milli = seen_milli = max(0, min(WHOLE_MILLI, util_milli))
        on = self._devices_of(lease)
        most_milli = max((device.most_needed_milli(seen_milli) for device in on), default=seen_milli)
        lease.cell_milli = max(seen_milli, min(lease.busy_milli, most_milli))
        learnt_milli = self.forecasts.demand_seen(
            lease.lease_id, lease.spec.pool, seen_milli, most_milli=most_milli if most_milli > seen_milli else None
        )
        self._set_demand(lease, learnt_milli)

    def _set_demand(self, lease: Lease, demand_milli: int) -> None:
        lease.demand_milli = demand_milli
        self._forget_sums(lease)

    def set_gate(self, lease: Lease, *, closed: bool, next_cell: Ticket | None = None) -> None:
        """Open or close the lease's gate. `next_cell` is the ticket of the cell waiting at the gate, if any."""
        lease.gate.closed, lease.gate.ticket = closed, next_cell
        self.refresh(lease)

    @property
    def gates_closed(self) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.gate.closed]

    def set_reservation(self, lease: Lease, device_ids: Sequence[str], held_mib: int = 0) -> None:
        """Set the lease's reservation on each of these devices. If it is 0, just record that the lease was last on these devices."""
        held_mib = held_mib if device_ids else 0
        for device in self._devices_of(lease):
            if device.spec.device_id not in device_ids or not held_mib:
                del device.holders[lease.lease_id]
                device.known_sums = None
        lease.device_ids, lease.held_mib = tuple(device_ids), held_mib
        for device in self._devices_of(lease):
            device.holders[lease.lease_id] = lease
        self.refresh(lease)

    def set_strangers(self, device: Device, stranger_mib: int) -> None:
        """Set how much of a device's memory is in use without a reservation, and recompute how much of it is used by leases."""
        device.stranger_mib = stranger_mib
        for lease in self.in_state(LeaseState.NO_CONTEXT):
            if device.spec.device_id in lease.device_ids:
                self.note_unreserved(lease)

    def note_unreserved(self, lease: Lease) -> None:
        """Update how much memory this lease uses without a reservation on each device, capped at the device's total of such memory."""
        strangers = [self.devices[one].stranger_mib for one in lease.device_ids if one in self.devices]
        lease.unreserved_mib = min([lease.used_each_mib, *strangers]) if strangers else 0

    def set_host_memory(self, lease: Lease, *, saved_mib: int = 0, reserved_mib: int = 0) -> None:
        self.host_saved_mib += saved_mib - lease.saved_mib
        self.host_reserved_mib += reserved_mib - lease.host_mib
        lease.saved_mib, lease.host_mib = saved_mib, reserved_mib
        self.spread_saved(lease)

    def spread_saved(self, lease: Lease) -> None:
        """Compute how much to reserve on each device for saved state. It is divided equally, because the actual shares are unknown."""
        lease.saved_each_mib = self._fitting_mib(lease, -(-lease.saved_mib // lease.count))
        lease.size_mib = self._fitting_mib(lease, self.reserve_mib(lease, lease.spec))

    def _fitting_mib(self, lease: Lease, each_mib: int) -> int:
        """Return how much to reserve on each device for a lease that needs `each_mib` there.

        A kernel that has grown into the device's overhead needs more than can be reserved. It gets as much as possible, so that it can
        resume.
        """
        if not lease.saved_mib:
            return each_mib
        names = {self.devices[one].spec.name for one in lease.home_ids if one in self.devices}
        alike = [device.spec for device in self.devices.values() if not names or device.spec.name in names]
        leasable_mib = max((spec.leasable_mib for spec in alike), default=0)
        fits_alone = leasable_mib < each_mib <= max((spec.memory_mib for spec in alike), default=0)
        return leasable_mib if fits_alone else each_mib

    def resize(self, lease: Lease, spec: LeaseSpec) -> None:
        """Change the lease's size. Its current reservation does not change."""
        lease.spec = spec
        lease.size_mib = self.reserve_mib(lease, spec)
        self.refresh(lease)

    def reserve_mib(self, lease: Lease, spec: LeaseSpec) -> int:
        """Return the reservation per device for this spec, in MiB. It is the cap, or the used (or saved) memory plus headroom."""
        pool, request_mib = self.policy(lease), spec.reserve_mib if spec.request_mib is None else spec.request_mib
        if self.reserves_cap(lease):
            return max(spec.reserve_mib, lease.saved_each_mib)
        used_mib = (lease.saved_each_mib if lease.saved_mib else lease.used_each_mib) + pool.headroom_mib
        return max(1, min(spec.reserve_mib, max(request_mib, used_mib)), lease.saved_each_mib)

    def reserves_cap(self, lease: Lease) -> bool:
        """Return whether the lease reserves its whole cap, either because its pool's policy says so or because it has several devices."""
        return lease.spec.devices > 1 or self.policy(lease).reserve_by is ReserveBy.CAP

    def revoke(self, lease: Lease, ends_ms: int) -> None:
        """Revoke a lease whose seat has ended. The broker ends its processes at `ends_ms`."""
        lease.ends_ms = ends_ms
        self.refresh(lease)

    def reinstate(self, lease: Lease, spec: LeaseSpec) -> None:
        """Reinstate a revoked lease on a new seat. `spec` differs from the old spec only in the seat."""
        lease.spec, lease.ends_ms = spec, None
        self.refresh(lease)

    def set_priority(self, lease: Lease, spec: LeaseSpec) -> None:
        """Replace the spec with one that differs only in priority. The ticket keeps its age."""
        ticket = lease.ticket
        if ticket is not None and ticket.resize_to is not None:
            own = ticket.resize_to is lease.spec
            ticket.resize_to = (
                spec if own else replace(ticket.resize_to, priority=spec.priority, own_priority=spec.own_priority)
            )
        lease.spec = spec

    def refresh(self, lease: Lease) -> None:
        """Invalidate the sums of the lease's devices, and update its meter. Call this after each change to the lease."""
        self._forget_sums(lease)
        self.accounts.meter(lease, self.now_ms)

    def _forget_sums(self, lease: Lease) -> None:
        for device in self._devices_of(lease):
            device.known_sums = None

    def _devices_of(self, lease: Lease) -> list[Device]:
        """Return the devices where the lease holds memory."""
        return [self.devices[one] for one in lease.occupied_ids if one in self.devices]

    def advance(self, now_ms: int) -> None:
        """Advance the clock, and record how long leases have used or held devices since the last event."""
        passed_ms, self.now_ms = now_ms - self.now_ms, now_ms
        if not passed_ms:
            return
        self.accounts.advance(passed_ms)
        for lease in self.in_state(LeaseState.RESIDENT):
            if lease.occupancy is OccupancyKind.BUSY:
                lease.worked_ms += passed_ms
            else:
                pool, mib = lease.spec.pool, lease.held_mib * len(self._devices_of(lease))
                self.idle_held[pool] = self.idle_held.get(pool, 0) + mib * min(passed_ms, _LONGEST_HOLD_MS)

    @property
    def host_left_mib(self) -> int:
        """The host memory that suspends can still reserve, in MiB."""
        return self.host_budget_mib - self.host_saved_mib - self.host_reserved_mib

    @property
    def draining(self) -> list[Device]:
        return [device for device in self.devices.values() if device.draining]

    def goes_away(self, lease: Lease, *, later: bool = False) -> bool:
        """Return whether any of the lease's devices has a drain deadline. With `later`, ignore deadlines that have passed."""
        return any(not later or at_ms > self.now_ms for at_ms in self._deadlines_ms(lease))

    def deadline_ms(self, lease: Lease) -> int | None:
        """Return the earliest future drain deadline of the devices where the lease has a reservation, or None."""
        if not lease.held_mib:
            return None
        return min((at_ms for at_ms in self._deadlines_ms(lease) if at_ms > self.now_ms), default=None)

    def _deadlines_ms(self, lease: Lease) -> list[int]:
        there = [self.devices[one] for one in lease.device_ids if one in self.devices]
        return [device.deadline_ms for device in there if device.deadline_ms is not None]

    def share(self, lease: Lease) -> tuple[int, int]:
        """Return the owner's and the lease's virtual times, which are used to share devices fairly."""
        return self.accounts.share(lease)

    # -- pools and devices -----------------------------------------------------------------------------------------------

    def add_device(self, device: Device) -> None:
        """Add a device, along with any leases already recovered on it."""
        device_id = device.spec.device_id
        self.devices[device_id] = device
        for lease in self.leases.values():
            if device_id in lease.occupied_ids:
                device.holders[lease.lease_id] = lease

    def configure(self, pool: PoolSpec) -> None:
        """Add a pool, or replace the policy of an existing one."""
        self.pools[pool.name] = pool
        for lease in self.leases.values():
            lease.size_mib = self.reserve_mib(lease, lease.spec)
        for lease in self.waiting.values():
            if lease.ticket is not None and not lease.target_ids:
                lease.ticket.kept_on = ()  # the next pass keeps room again, perhaps on other devices
        for lease in self.leases.values():
            self.accounts.meter(lease, self.now_ms)

    def forget_all_sums(self) -> None:
        """Invalidate the sums of all devices, after a device or pool changed."""
        for device in self.devices.values():
            device.known_sums = None

    def holders(self, device_id: str) -> Iterable[Lease]:
        """Return the leases with a reservation on the device, in order of arrival."""
        device = self.devices.get(device_id)
        return () if device is None else device.holders.values()

    def kind_of(self, device_id: str | None) -> str:
        """Return the device's model name, or an empty string for an unknown device."""
        device = self.devices.get(device_id or "")
        return device.spec.name if device is not None else ""

    def pool_of(self, device_id: str) -> str | None:
        return next((name for name, pool in self.pools.items() if device_id in pool.devices), None)

    def policy(self, lease: Lease) -> PoolSpec:
        """Return the policy of the lease's pool, or a default without devices if the pool is not configured."""
        return self.pools.get(lease.spec.pool) or PoolSpec(name=lease.spec.pool, devices=())

    def shares_by_time(self, lease: Lease) -> bool:
        """Return whether the lease's pool divides device time fairly among owners."""
        return self.policy(lease).preempt_equals

    # -- the queue -------------------------------------------------------------------------------------------------------

    @property
    def waiting_pools(self) -> set[str]:
        return {lease.spec.pool for lease in self.waiting.values()}

    def line(self, pool: str) -> list[Lease]:
        """Return the pool's waiting leases in the order shown to users: by priority, then urgency, then age.

        Pools that share by virtual time compare it before age. Leases may be served in a different order: those being moved come first, and
        some tickets with room kept for them are served earlier (see `Turns`).
        """
        return sorted([lease for lease in self.waiting.values() if lease.spec.pool == pool], key=self._rank)

    def _rank(self, lease: Lease) -> tuple[int, bool, bool, int, int, int]:
        ticket = lease.ticket
        if ticket is None:
            raise ValueError(f"lease {lease.lease_id} has no ticket")
        by_share = self.shares_by_time(lease) and not ticket.is_due
        owner, own = self.share(lease) if by_share else (0, 0)
        return -lease.spec.priority, not ticket.urgent, by_share, owner, own, ticket.order

    def enqueue(self, lease: Lease, ticket: Ticket) -> None:
        """Add a lease to the queue with this ticket. It must not have a ticket yet."""
        lease.ticket = ticket
        self.waiting[lease.lease_id] = lease
        # Until it is first measured while busy, its demand is its pool's mean.
        self._set_demand(lease, self.forecasts.demand_milli(lease.lease_id, lease.spec.pool))
        self.accounts.meter(lease, self.now_ms)

    def dequeue(self, lease: Lease) -> Ticket | None:
        """Remove the lease from the queue, and return its ticket, if any."""
        ticket, lease.ticket = lease.ticket, None
        if ticket is not None:
            del self.waiting[lease.lease_id]
            self.accounts.meter(lease, self.now_ms)
        return ticket
