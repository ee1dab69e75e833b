"""Defines the records kept in the books: operations, tickets, accounts, leases and devices.

`Books` writes the fields that sums depend on: state, reservations, host memory, gates and `busy`. `Accounts` writes accounts and meters.
Derived values are properties.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from fractional_gpu.core.forecasts.forecasts import WaitSpan
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec, Sign
from fractional_gpu.core.time_slicing import WHOLE_MILLI, most_wanted_milli

HOST_MARGIN_MIB = 64
"""The fixed part of the margin that a suspend adds to the last measured use, in MiB (`Lease.host_margin_mib`)."""
HOST_MARGIN_PARTS = 16
"""The proportional part of that margin is the last measured use divided by this number."""
_FIRST_PAUSE_MS = 1_000
_MOST_DOUBLINGS = 16
UNIT = 100  # the usual weight
DAY_MS = 86_400_000
_RESTING_PARTS = 4  # kernels that idle between cells are busy about a quarter of the time, in published traces
_FULL_MILLI = 900  # busy leases that use more than this together fill the device, thousandths
_SAME_TIME_MILLI = 1050  # samples with a larger sum were not taken at the same time
_INEXACT_PARTS = 8  # the driver's measurement error: one part in this many


@dataclass(frozen=True, slots=True)
class Operation:
    """A suspend or resume in progress. Its result is used only if the operation, lease, kind and generation all match."""

    operation_id: int
    lease_id: str
    kind: str
    generation: int
    began_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason a ticket is waiting or a request is refused: a code, a human-readable sentence and the leases in the way."""

    code: str
    sentence: str
    blockers: tuple[str, ...] = ()


class OccupancyKind(IntEnum):
    """How a lease occupies its devices, which determines whether its memory can be freed for others."""

    NONE = 0  # it holds nothing
    IDLE = 1  # resident, and no cell runs
    BUSY = 2  # resident, and a cell runs
    SUSPENDING = 3  # its memory is about to be freed
    FIXED = 4  # resuming, quarantined, or reserved before its start


@dataclass(slots=True, kw_only=True)
class ShownForecast:
    """The wait forecast that was last shown. It is for display only (`ForecastRecorder`); no decision depends on it."""

    since_ms: int  # when the wait, or the resume that ends it, started
    until_ms: int  # the upper end of the forecast
    missed_ms: int = 0  # how long the wait had lasted when it first exceeded a shown forecast; 0 if it never did


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A lease's place in the queue. `queue.Turns` defines the order."""

    order: int
    asked_ms: int
    before_start: bool = False  # can be served before the lease has a process
    urgent: bool = False
    passed_over: int = 0  # room is kept once this reaches the pool's K
    kept_on: tuple[str, ...] = ()  # devices where room is kept
    resize_to: LeaseSpec | None = None  # the size that a lease on its devices waits to grow to
    extra_mib: int = 0  # what it needs in addition to the lease's reservation, on each device
    after_suspend: "Ticket | None" = None  # restored if the lease is suspended while it waits to grow
    preempted: bool = False  # filed because the busy lease was preempted; withdrawn only when the lease ends
    due_ms: int = 0  # estimate of when the ticket becomes due; 0: not computed yet
    waited_long: bool = False  # it has waited longer than its share explains, in a pool that shares by virtual time
    # In such a pool, busy leases are preempted for the ticket. Without this mark, they would often precede it and take the room back
    is_promised: bool = False
    expected: WaitSpan | None = None  # the wait forecast when the ticket was filed
    shown: ShownForecast | None = None
    reason: str = "wait.new"  # code of this wait in the lease's story
    wait: Reason | None = None  # why the last pass did not serve it; None if there was no room
    saves_ms: int = 0  # expected duration of the suspends of idle leases that were started for it

    @property
    def is_due(self) -> bool:
        """Whether the ticket takes precedence over other tickets of the same priority."""
        return self.waited_long or self.is_promised


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """An owner's or group's account in one pool. It tracks leases and pins to enforce limits, and usage to share devices fairly."""

    name: str
    leases: dict[str, "Lease"] = field(default_factory=dict)
    weight: int = 100
    usage: int = 0  # milli-GPU times milliseconds that its leases were busy on a device (see `Accounts`)
    contenders: dict[str, "Lease"] = field(default_factory=dict)  # leases that are busy on a device or waiting for one
    floor: int = 0  # least virtual time of a lease that contends again after a pause
    idle_since_ms: int | None = None  # when its last lease stopped contending
    pinned_ms: int = 0  # part of its pin budget that is used up
    pinned_at_ms: int = 0  # when `pinned_ms` was computed

    def spent_pin_ms(self, pool: PoolSpec, now_ms: int) -> int:
        """Return how much of the pin budget is used up, in ms. The budget refills evenly over a day."""
        passed_ms = now_ms - self.pinned_at_ms
        back_ms = passed_ms if pool.pin_budget_ms is None else pool.pin_budget_ms * passed_ms // DAY_MS
        return max(0, self.pinned_ms - back_ms)

    @property
    def milli(self) -> int:
        """The total size of the account's leases, in milli-GPU."""
        return sum(lease.milli for lease in self.leases.values())

    @property
    def holders(self) -> dict[str, "Lease"]:
        return {lease_id: lease for lease_id, lease in self.leases.items() if lease.held_mib}

    @property
    def resident_milli(self) -> int:
        return sum(lease.milli for lease in self.leases.values() if lease.held_mib)

    @property
    def time_ms(self) -> int:
        """The owner's virtual time, for comparison with the pool's other owners."""
        return self.usage * UNIT // self.weight

    @property
    def busy_milli(self) -> int:
        """The total milli-GPU of the leases currently being charged to the account."""
        return sum(lease.milli for lease in self.contenders.values() if lease.meter.is_running)


@dataclass(slots=True, eq=False)
class UsageMeter:
    """A lease's device usage, for computing fair shares. Maintained by `Accounts`."""

    usage: int = 0  # milli-GPU times milliseconds that the lease was busy on a device
    is_running: bool = False  # it is busy on a device now
    idle_since_ms: int | None = None  # when the lease stopped contending


def pause_ms(failures: int, longest_ms: int) -> int:
    """Return how long to wait before retrying a suspend or resume, in ms. The wait doubles with each failure."""
    return min(_FIRST_PAUSE_MS << min(failures, _MOST_DOUBLINGS), longest_ms)


@dataclass(slots=True, eq=False)
class SwapRetries:
    """A lease's failed suspends and resumes, and when to try again. Maintained by `OperationResults` and `Changes`."""

    suspend_after_ms: int = 0  # the lease is not chosen for a suspend before this
    aborted_suspends: int = 0  # in a row
    failed_suspends: int = 0  # in a row, aborted or refused
    resume_after_ms: int = 0  # no resume is tried before this
    failed_resumes: int = 0  # in a row

    def forget_suspends(self) -> None:
        self.suspend_after_ms = self.aborted_suspends = self.failed_suspends = 0

    def forget_resumes(self) -> None:
        self.resume_after_ms = self.failed_resumes = 0


@dataclass(slots=True, eq=False)
class CacheShrink:
    """What is known about an idle lease's caches. It is reset when the lease runs a cell or leaves its devices."""

    is_requested: bool = False  # the kernel was asked to free its caches, and has not answered
    succeeded: bool | None = None  # whether it freed them; None if it was not asked or has not answered
    host_floor_mib: int = 0  # what a suspend found that it must save, if that exceeded the reservation


@dataclass(slots=True, eq=False)
class Gate:
    """A gate that holds back a resident lease's next cell while an older ticket needs the room (see `queue`). Maintained by `Books`."""

    closed: bool = False  # the next cell must ask before it runs
    open_until_ms: int = 0  # the gate does not close for others before this
    ticket: Ticket | None = None  # of the next cell, which waits at the closed gate


@dataclass(slots=True, kw_only=True, eq=False)
class Expectation:
    """The signs that a lease will run its next cell soon. Maintained by `Expectations`."""

    until_ms: int  # when it lapses
    best: Sign  # the strongest sign
    signs: dict[Sign, int] = field(default_factory=dict)  # the sender's confidence in each, thousandths
    milli: int = 0  # how likely `best` makes the cell; set at the last sign, so that later learning changes no deadline


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A lease: what its kernel requested, and what it holds now."""

    spec: LeaseSpec
    number: int = 0  # in the order of admission
    # Its identity and state.
    state: LeaseState = LeaseState.UNATTACHED
    since_ms: int = 0  # when it entered the state
    arrived_ms: int = 0  # when it became resident; a suspend that did not happen does not change this
    generation: int = 0  # grows with every announced change
    reason: str = ""  # code of the last change; `sentence` is the same for people
    sentence: str = ""
    operation: Operation | None = None  # its suspend or resume in progress
    # Its device memory.
    device_ids: tuple[str, ...] = ()  # where its reservation is; without one, where it was last
    held_mib: int = 0  # reserved on each of its devices
    size_mib: int = 0  # the reservation that its pool makes for it, which is its cap or its use plus headroom
    used_mib: int = 0  # at the last measurement; before the first one, what was resumed, or 0
    is_measured: bool = False  # since it arrived on its devices
    unreserved_mib: int = 0  # what it uses on each device without a reservation; counts as strangers' memory
    growth_mib: int = 0  # growth of its use on each device between the last two measurements
    target_ids: tuple[str, ...] = ()  # devices that it is being moved to, where room is kept for it
    # Its state in host memory.
    home_ids: tuple[str, ...] = ()  # devices whose memory was saved, or may have been
    saved_mib: int = 0
    saved_each_mib: int = 0  # the reservation on each device that this state needs (`Books.set_host_memory`)
    host_mib: int = 0  # reserved for a suspend in progress
    under_host_pressure: bool = False  # its saved state is in a control group that is short of host memory
    # What its kernel is doing.
    busy: bool = False
    has_run: bool = False  # it has been busy since it became resident, or was resumed early
    let_in: bool = False  # it has room for a cell that has not started
    demand_milli: int = 0  # learnt: how much of each device it uses while busy, thousandths
    seen_milli: int | None = None  # its last sample since it became busy
    cell_milli: int | None = None  # the demand of the running cell, from its samples
    last_active_ms: int = 0
    worked_ms: int = 0  # how long its cells have run on a device since its process started
    expectation: Expectation | None = None  # of its next cell
    rhythm_ms: int | None = None  # when its usual rhythm makes a cell likely, while it is suspended
    sent_away: bool = False  # its user or an administrator requested its last suspend
    came_early: bool = False  # it was resumed, or is being resumed, for an expected cell that has not come
    left_behind: str = ""  # description of the ended kernel's processes that still have device memory
    why_not: str = ""  # why its process cannot be checkpointed, a sentence
    unsuspendable_reason: str = ""  # `why_not`, or a reason of its pool or device; written by `update_suspendability`
    # Deadlines.
    expires_ms: int | None = None  # when it ends if it has no process
    hold_until_ms: int = 0  # until when room is kept for a process that has not started
    pinned_until_ms: int = 0
    announced_ms: int = 0  # when the idle suspend comes that its kernel was warned about
    ends_ms: int | None = None  # when its processes are ended, because its seat has ended (`revoke`)
    leaves: tuple[int | None, ...] = ()  # the idle time after which it leaves, and the inputs for that (`idle`)
    # Swaps and the queue.
    suspend_requested_by: str | None = None  # who requested a suspend that has not started
    preempted: bool = False  # its current or last suspend interrupts a cell
    retries: SwapRetries = field(default_factory=SwapRetries)
    shrink: CacheShrink = field(default_factory=CacheShrink)
    gate: Gate = field(default_factory=Gate)
    ticket: Ticket | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    lease_id: str = field(init=False)  # copied from its spec

    def __post_init__(self) -> None:
        self.lease_id = self.spec.lease_id

    def forget_shrinking(self) -> None:
        """Forget what is known about the lease's caches."""
        shrink = self.shrink
        shrink.is_requested, shrink.succeeded, shrink.host_floor_mib = False, None, 0

    @property
    def revoked(self) -> bool:
        """Whether the lease's seat has ended."""
        return self.ends_ms is not None

    @property
    def suspend_requested(self) -> bool:
        return self.suspend_requested_by is not None

    @property
    def occupancy(self) -> OccupancyKind:
        if not self.held_mib:
            return OccupancyKind.NONE
        if self.state is LeaseState.RESIDENT:
            return OccupancyKind.BUSY if self.busy and self.gate.ticket is None else OccupancyKind.IDLE
        return OccupancyKind.SUSPENDING if self.state is LeaseState.SUSPENDING else OccupancyKind.FIXED

    @property
    def occupied_ids(self) -> tuple[str, ...]:
        """The devices where the lease has a reservation."""
        return self.device_ids if self.held_mib else ()

    @property
    def counted_milli(self) -> int:
        """The lease's compute demand, in thousandths of a device, if it is busy or has been given room for a cell. Otherwise 0."""
        if self.occupancy is OccupancyKind.BUSY:
            return self.busy_milli
        is_coming = self.let_in and self.held_mib and self.state in (LeaseState.RESIDENT, LeaseState.RESUMING)
        return self.demand_milli if is_coming else 0

    @property
    def resting_milli(self) -> int:
        """The compute demand to expect from an idle lease, in thousandths of a device. It is a fraction of the lease's full demand."""
        return self.demand_milli // _RESTING_PARTS if self.occupancy is OccupancyKind.IDLE and not self.let_in else 0

    @property
    def busy_milli(self) -> int:
        """The compute demand of the lease while it is busy, in thousandths of each of its devices.

        It is based on the running cell's samples if there are any, otherwise on what was learnt from earlier cells.
        """
        return self.demand_milli if self.cell_milli is None else self.cell_milli

    @property
    def is_working(self) -> bool:
        """Whether a cell is running. A lease with a cell waiting at its closed gate is busy but not working."""
        return self.busy and self.gate.ticket is None

    @property
    def is_unsuspendable(self) -> bool:
        """Whether the lease has memory that cannot be saved, or could allocate such memory at any time."""
        return bool(self.unsuspendable_reason) and (self.used_mib > 0 or not self.spec.gated)

    @property
    def device_id(self) -> str | None:
        return self.device_ids[0] if self.device_ids else None

    @property
    def home_id(self) -> str | None:
        """The first of the devices that the lease's memory was saved from."""
        return self.home_ids[0] if self.home_ids else None

    @property
    def is_growing(self) -> bool:
        """Whether the lease is waiting for more room on its current devices."""
        here = self.state is LeaseState.RESIDENT or (self.state is LeaseState.UNATTACHED and self.held_mib > 0)
        return here and self.ticket is not None and self.ticket.resize_to is not None

    @property
    def waits_for_room(self) -> bool:
        """Whether room is all that the lease's ticket is waiting for. False while the lease is being swapped or is in quarantine."""
        if self.ticket is None:
            return False
        if self.state is LeaseState.UNATTACHED and not self.held_mib:
            return self.ticket.before_start
        return self.state in (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT) or self.is_growing

    @property
    def ask_mib(self) -> int:
        """The memory the lease's ticket needs on each device, in MiB. If the lease is growing in place, this is just the growth."""
        return self.ticket.extra_mib if self.ticket is not None and self.is_growing else self.need_mib

    @property
    def has_reservation(self) -> bool:
        return self.held_mib > 0

    @property
    def count(self) -> int:
        """How many devices the lease needs at once."""
        return len(self.home_ids) or self.spec.devices

    @property
    def milli(self) -> int:
        """The lease's size as used for limits and shares, in milli-GPU."""
        return self.spec.fraction_milli * self.spec.devices

    @property
    def time_ms(self) -> int:
        """The lease's virtual time, for comparison with its owner's other leases."""
        return self.meter.usage * UNIT // max(1, self.spec.weight)

    @property
    def bound_ids(self) -> tuple[str, ...]:
        """The devices where the lease has given up its reservation but still has a CUDA context."""
        return self.device_ids if self.state is LeaseState.NO_CONTEXT and self.unreserved_mib else ()

    @property
    def need_mib(self) -> int:
        """The memory that must be free on each device before the lease can be given room there, in MiB.

        This is the memory that would be reserved, or the amount needed for the saved state if that is more.
        """
        if self.bound_ids:
            return max(1, self.size_mib - self.unreserved_mib)
        return max(self.size_mib, self.saved_each_mib) if self.saved_mib else self.size_mib

    @property
    def used_each_mib(self) -> int:
        """The memory the lease uses on each device, in MiB. The total is divided equally among its devices."""
        return self.used_mib if self.count == 1 else -(-self.used_mib // self.count)

    @property
    def host_need_mib(self) -> int:
        """The host memory that a suspend is expected to need, in MiB.

        This is the last measured use, or the reservation if nothing was measured. It is never less than an earlier suspend turned out to
        need.
        """
        need_mib, floor_mib = self.used_mib, self.shrink.host_floor_mib
        if not need_mib:  # it has a reservation, so reserve something for its state, too
            need_mib = 1 if self.is_measured else max(1, self.held_mib * len(self.device_ids))
        return floor_mib if floor_mib > need_mib else need_mib  # noqa: FURB136 - computed for every candidate

    @property
    def host_margin_mib(self) -> int:
        """The host memory to reserve beyond `host_need_mib` if the host has room, so that a low estimate doesn't make the suspend fail.

        A lease might be using more by the time it is locked. The margin covers small allocations (`HOST_MARGIN_MIB`), allocations that grow
        with the data (one part in `HOST_MARGIN_PARTS`) and, while the lease is busy, its growth between the last two measurements. No
        margin is needed for a size that was measured while the lease was locked (`host_floor_mib`) or after its caches were freed.
        """
        need_mib = self.host_need_mib
        if self.shrink.succeeded or need_mib == self.shrink.host_floor_mib:
            return 0
        margin_mib = HOST_MARGIN_MIB + need_mib // HOST_MARGIN_PARTS
        if self.busy:
            margin_mib += self.growth_mib * len(self.device_ids)
        return max(0, min(margin_mib, self.held_mib * len(self.device_ids) - need_mib))


@dataclass(frozen=True, slots=True)
class EarlySwap:
    """A suspend or resume in anticipation of a cell. It is wasted if the cell never comes."""

    lease_id: str  # the lease whose cell is expected
    at_ms: int
    mib: int  # moved to the device and back


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals for a device's leases, and the memory that remains."""

    reserved_mib: int
    free_mib: int
    mib: tuple[int, ...]  # by `OccupancyKind`
    demand_milli: int  # total demand of busy leases, thousandths of the device
    wanted_milli: int  # plus the demand of leases that have room for a cell that has not started
    resting_milli: int  # demand expected of idle leases


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """A device and the leases with a reservation on it. Totals are computed on demand."""

    spec: DeviceSpec
    stranger_mib: int = 0
    makes_way: bool = False  # strangers have grown into its reservations, so leases leave until a margin is free
    lost: bool = False
    draining: bool = False
    evict_busy: bool = False
    deadline_ms: int | None = None  # when it goes away, while it is drained
    is_exclusive: bool = False  # one lease gets the whole device
    holders: dict[str, Lease] = field(default_factory=dict)
    known_sums: Sums | None = None  # None if the device or one of its leases has changed
    early_swaps: list[EarlySwap] = field(default_factory=list)  # of the last hour, oldest first (`foresight`)

    @property
    def sums(self) -> Sums:
        if self.known_sums is None:
            mib, demand_milli, wanted_milli, resting_milli = [0] * len(OccupancyKind), 0, 0, 0
            for lease in self.holders.values():
                kind = lease.occupancy
                mib[kind] += lease.held_mib
                demand_milli += lease.busy_milli if kind is OccupancyKind.BUSY else 0
                wanted_milli += lease.counted_milli
                resting_milli += lease.resting_milli
            reserved_mib = sum(mib)
            free_mib = self.lease_capacity_mib - reserved_mib
            if self.lost or (self.is_exclusive and reserved_mib):
                free_mib = min(0, free_mib)
            self.known_sums = Sums(reserved_mib, free_mib, tuple(mib), demand_milli, wanted_milli, resting_milli)
        return self.known_sums

    def mib(self, kind: OccupancyKind) -> int:
        """Return the total memory reserved by leases whose occupancy is `kind`, in MiB."""
        return self.sums.mib[kind]

    @property
    def lease_capacity_mib(self) -> int:
        """The most memory that a single lease could reserve, in MiB."""
        return self.spec.leasable_mib - self.stranger_mib

    @property
    def free_mib(self) -> int:
        """The memory left for leases, in MiB.

        It is negative if the device is over-committed, and at most 0 if the device is lost or a lease has exclusive use of it.
        """
        return self.sums.free_mib

    @property
    def free_or_idle_mib(self) -> int:
        return self.free_mib + self.mib(OccupancyKind.IDLE) + self.mib(OccupancyKind.SUSPENDING)

    def most_needed_milli(self, seen_milli: int) -> int:
        """Return an upper bound on a busy lease's demand, given the sample `seen_milli`. Unless the device is full, this is the sample."""
        busy = [lease for lease in self.holders.values() if lease.occupancy is OccupancyKind.BUSY]
        if len(busy) < 2:
            return seen_milli
        used = [lease.demand_milli if lease.seen_milli is None else lease.seen_milli for lease in busy]
        if sum(used) < _FULL_MILLI:
            return seen_milli
        # If a sample is missing, or the sum shows that the samples were not simultaneous, the largest use is unknown.
        if sum(used) > _SAME_TIME_MILLI or any(lease.seen_milli is None for lease in busy):
            return WHOLE_MILLI
        most_milli = most_wanted_milli(seen_milli, max(used))
        return min(WHOLE_MILLI, most_milli + most_milli // _INEXACT_PARTS)
