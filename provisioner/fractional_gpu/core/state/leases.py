"""The records that the books hold: operations, tickets, accounts, leases, devices.

`Books` writes the fields that sums depend on (state, reservations, host memory, gates, `busy`), `Accounts` those of accounts and meters;
derived values are properties. Comments explain the fields.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from fractional_gpu.core.forecasts.forecasts import WaitSpan
from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, Sign
from fractional_gpu.core.time_slicing import WHOLE_MILLI, most_wanted_milli

HOST_MARGIN_MIB = 64
"""What a lease's suspend may save beyond its last measured use, whatever its size (`Lease.host_margin_mib`)."""
HOST_MARGIN_PARTS = 16
"""Its use divided by this is added to that."""
_FIRST_PAUSE_MS = 1_000
_MOST_DOUBLINGS = 16
UNIT = 100  # the usual weight
_RESTING_PARTS = 4  # kernels that idle between cells are busy about a quarter of the time, in published traces
_FULL_MILLI = 900  # thousandths of a full device that its busy leases use together, about
_SAME_TIME_MILLI = 1050  # the most that simultaneous samples of all its busy leases add up to, about
_INEXACT_PARTS = 8  # one part in this many is allowed for what a driver measures inexactly


@dataclass(frozen=True, slots=True)
class Operation:
    """A suspend or resume under way. A result counts only if it names the same operation, lease, kind and generation."""

    operation_id: int
    lease_id: str
    kind: str
    generation: int
    began_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a ticket waits or a request is refused: a code, a sentence for people, and the leases in the way."""

    code: str
    sentence: str
    blockers: tuple[str, ...] = ()


class OccupancyKind(IntEnum):
    """How a lease occupies its devices, which decides what its memory can be used for."""

    NONE = 0  # it holds nothing
    IDLE = 1  # resident, and no cell runs
    BUSY = 2  # resident, and a cell runs
    SUSPENDING = 3  # a suspend is under way: its memory will be free
    FIXED = 4  # resuming, quarantined, or reserved before its start


@dataclass(slots=True, kw_only=True)
class ShownForecast:
    """The forecast of a wait that was shown last. For display only (`forecast_recorder`); no decision depends on it."""

    since_ms: int  # when the wait, or the resume that ends it, began
    until_ms: int  # the upper end
    missed_ms: int = 0  # how long the wait had lasted when it first outlasted a shown forecast; 0: it did not


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A lease's place in the queue: by priority, then urgent ones, then first come, first served (see `suspend`)."""

    order: int
    asked_ms: int
    before_start: bool = False  # may be served before a process stands behind the lease
    urgent: bool = False
    passed_over: int = 0  # from the pool's K on, room is kept
    kept_on: tuple[str, ...] = ()  # devices where room is kept
    resize_to: LeaseSpec | None = None  # the size that a lease on its devices waits to grow to
    extra_mib: int = 0  # what it needs beyond what the lease holds, on each of its devices
    after_suspend: "Ticket | None" = None  # restored if the lease is suspended while it waits to grow
    preempted: bool = False  # filed for a busy lease that was preempted: withdrawn only when the lease ends
    due_ms: int = 0  # estimate of when the ticket becomes due; 0: not computed yet
    waited_long: bool = False  # for longer than its share explains, in a pool that shares by virtual time
    is_promised: bool = (
        False  # in such a pool: busy leases leave for it, which would often precede it again and take the room back
    )
    expected: WaitSpan | None = None  # the wait, as forecast when the ticket was filed
    shown: ShownForecast | None = None
    reason: str = "wait.new"  # code that the lease's story has of this wait
    wait: Reason | None = None  # why the last pass left it waiting; None: for room
    saves_ms: int = 0  # expected time of the saves that were begun to make idle leases leave for it

    @property
    def is_due(self) -> bool:
        """It precedes the other tickets of its priority."""
        return self.waited_long or self.is_promised


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """What an owner (or a group) has of one pool: its leases for limits, pinned time, and use for fair shares."""

    name: str
    leases: dict[str, "Lease"] = field(default_factory=dict)
    weight: int = 100
    usage: int = 0  # milli-GPU times milliseconds that its leases were busy on a device (see `Accounts`)
    contenders: dict[str, "Lease"] = field(default_factory=dict)  # leases that are busy on a device, or wait for one
    floor: int = 0  # least virtual time of a lease that contends again after a pause
    idle_since_ms: int | None = None  # none of its leases contends since then
    pinned_ms: int = 0  # used up of its pin budget
    pinned_at_ms: int = 0  # time for which `pinned_ms` is right

    @property
    def milli(self) -> int:
        """The sum of the fractions of all its leases."""
        return sum(lease.milli for lease in self.leases.values())

    @property
    def holders(self) -> dict[str, "Lease"]:
        return {lease_id: lease for lease_id, lease in self.leases.items() if lease.held_mib}

    @property
    def resident_milli(self) -> int:
        return sum(lease.milli for lease in self.leases.values() if lease.held_mib)

    @property
    def time_ms(self) -> int:
        """Its virtual time, by which the leases of different owners compare."""
        return self.usage * UNIT // self.weight

    @property
    def busy_milli(self) -> int:
        """What is busy on a device now, milli-GPU. A lease whose meter runs contends."""
        return sum(lease.milli for lease in self.contenders.values() if lease.meter.is_running)


@dataclass(slots=True, eq=False)
class UsageMeter:
    """A lease's use of devices, for fair shares. Written by `Accounts`."""

    usage: int = 0  # milli-GPU times milliseconds that the lease was busy on a device
    is_running: bool = False  # it is busy on a device now
    idle_since_ms: int | None = None  # the lease does not contend since then


def pause_ms(failures: int, longest_ms: int) -> int:
    """Return the pause before a swap is tried again, ms, which doubles with each failure."""
    return min(_FIRST_PAUSE_MS << min(failures, _MOST_DOUBLINGS), longest_ms)


@dataclass(slots=True, eq=False)
class SwapRetries:
    """Swaps of a lease that failed, and when the next attempt is allowed. Written by `OperationResults` and `Changes`."""

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
    """What is known of an idle lease's caches. Forgotten when the lease runs something or leaves its devices."""

    is_requested: bool = False  # the kernel was asked to give its caches back, and has not answered
    succeeded: bool | None = None  # it gave them back, could not, or (None) was not asked
    host_floor_mib: int = 0  # what a suspend found it would have to save, when that was more than was reserved


@dataclass(slots=True, eq=False)
class Gate:
    """The gate before a resident lease's cells, which closes for an older ticket (see `queue`). Written by `Books`."""

    closed: bool = False  # the next cell asks before it runs
    open_until_ms: int = 0  # the gate is not closed for others before this
    ticket: Ticket | None = None  # the place in the queue of the next cell, which waits at the closed gate


@dataclass(slots=True, kw_only=True, eq=False)
class Expectation:
    """Signs that the next cell of a lease is near. Written by `Expectations`."""

    until_ms: int  # it lapses then
    best: Sign  # the sign that says most
    signs: dict[Sign, int] = field(default_factory=dict)  # how sure the sender of each was, thousandths
    milli: int = 0  # how likely `best` makes the cell, as of the last sign: later learning changes no deadline


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """One lease."""

    spec: LeaseSpec
    number: int = 0  # in the order of admission
    # What it is.
    state: LeaseState = LeaseState.UNATTACHED
    since_ms: int = 0  # when it entered the state
    generation: int = 0  # grows with every announced change
    reason: str = ""  # of the last change: a code, and a sentence for people
    sentence: str = ""
    operation: Operation | None = None  # its suspend or resume under way
    # Its device memory.
    device_ids: tuple[str, ...] = ()  # where its reservation is, or (it holds nothing) was
    held_mib: int = 0  # reserved on each of its devices
    size_mib: int = 0  # what its pool reserves for it: its cap, or its use and headroom
    used_mib: int = 0  # as last measured; before the first measurement, what was resumed, or 0
    is_measured: bool = False  # since it came to its devices
    unreserved_mib: int = 0  # what it uses on each device without a reservation: it counts as a stranger's there
    growth_mib: int = 0  # how much its use on each device grew between the last two measurements
    target_ids: tuple[str, ...] = ()  # devices it is being moved to, where room is kept for it
    # Its state in host memory.
    home_ids: tuple[str, ...] = ()  # devices whose memory was, or may have been, saved
    saved_mib: int = 0
    saved_each_mib: int = 0  # what must be reserved for that on each of its devices (`Books.set_host_memory`)
    host_mib: int = 0  # reserved for a suspend under way
    under_host_pressure: bool = False  # host memory is short where its saved state lies
    # What its kernel does.
    busy: bool = False
    has_run: bool = False  # it has been busy since it became resident, or came back before a cell asked for it
    let_in: bool = False  # room was given to it for a cell that has not begun
    demand_milli: int = 0  # what it uses of each of its devices while it is busy, as learnt: thousandths of a device
    seen_milli: int | None = None  # the last sample of that since it became busy
    cell_milli: int | None = None  # what the cell that runs needs, by the samples since it began
    last_active_ms: int = 0
    worked_ms: int = 0  # how long its cells have run on a device since its process began
    expectation: Expectation | None = None  # of its next cell
    rhythm_ms: int | None = None  # while it is suspended: when its own rhythm makes a cell likely
    sent_away: bool = False  # its user, or an administrator, asked for its last suspend
    came_early: bool = False  # it was brought back, or is being, for an expected cell that has not come
    left_behind: str = ""  # processes of the ended kernel that still have device memory, for people
    why_not: str = ""  # why its process cannot be checkpointed, a sentence
    unsuspendable_reason: str = ""  # that, or what its pool or device say; written by `update_suspendability`
    # Deadlines.
    expires_ms: int | None = None  # it ends then, while it has no process
    hold_until_ms: int = 0  # room is kept until then for a process that has not come yet
    pinned_until_ms: int = 0
    announced_ms: int = 0  # the idle suspension that its kernel was warned of
    ends_ms: int | None = None  # its seat has ended, and its processes are ended then (`revoke`)
    leaves: tuple[int | None, ...] = ()  # after how long idle it leaves, and what that was computed from (`idle`)
    # Swaps and the queue.
    suspend_requested_by: str | None = None  # who requested its suspend, which has not begun
    preempted: bool = False  # its suspend under way, or its last one, interrupts a cell
    retries: SwapRetries = field(default_factory=SwapRetries)
    shrink: CacheShrink = field(default_factory=CacheShrink)
    gate: Gate = field(default_factory=Gate)
    ticket: Ticket | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    lease_id: str = field(init=False)  # its spec's, at hand

    def __post_init__(self) -> None:
        self.lease_id = self.spec.lease_id

    def forget_shrinking(self) -> None:
        """Forget what was learnt about its memory while idle."""
        shrink = self.shrink
        shrink.is_requested, shrink.succeeded, shrink.host_floor_mib = False, None, 0

    @property
    def revoked(self) -> bool:
        """Whether the seat that it draws on has ended."""
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
        """The devices where it holds memory."""
        return self.device_ids if self.held_mib else ()

    @property
    def counted_milli(self) -> int:
        """Its part of the demand on its devices while it is busy there, or let in for a cell."""
        if self.occupancy is OccupancyKind.BUSY:
            return self.busy_milli
        is_coming = self.let_in and self.held_mib and self.state in (LeaseState.RESIDENT, LeaseState.RESUMING)
        return self.demand_milli if is_coming else 0

    @property
    def resting_milli(self) -> int:
        """Its part of the demand while idle on its devices: less than it needs, as its next cell will come."""
        return self.demand_milli // _RESTING_PARTS if self.occupancy is OccupancyKind.IDLE and not self.let_in else 0

    @property
    def busy_milli(self) -> int:
        """What it needs of each of its devices while busy, thousandths: as learnt, or by the samples of its cell if there are any."""
        return self.demand_milli if self.cell_milli is None else self.cell_milli

    @property
    def is_working(self) -> bool:
        """Whether a cell runs. A lease whose only cell waits at its closed gate is busy but not working."""
        return self.busy and self.gate.ticket is None

    @property
    def is_unsuspendable(self) -> bool:
        """Whether it has memory that cannot be saved, or may have some at any moment."""
        return bool(self.unsuspendable_reason) and (self.used_mib > 0 or not self.spec.gated)

    @property
    def device_id(self) -> str | None:
        return self.device_ids[0] if self.device_ids else None

    @property
    def home_id(self) -> str | None:
        """The first of the devices whose memory was saved."""
        return self.home_ids[0] if self.home_ids else None

    @property
    def is_growing(self) -> bool:
        """Whether it waits to grow on the devices where it is."""
        here = self.state is LeaseState.RESIDENT or (self.state is LeaseState.UNATTACHED and self.held_mib > 0)
        return here and self.ticket is not None and self.ticket.resize_to is not None

    @property
    def waits_for_room(self) -> bool:
        """Whether room alone is in the way of its ticket. A lease in an operation or in doubt waits for that to end."""
        if self.ticket is None:
            return False
        if self.state is LeaseState.UNATTACHED and not self.held_mib:
            return self.ticket.before_start
        return self.state in (LeaseState.SUSPENDED, LeaseState.NO_CONTEXT) or self.is_growing

    @property
    def ask_mib(self) -> int:
        """What its ticket takes on each of its devices: all that it needs, or what it lacks to grow."""
        return self.ticket.extra_mib if self.ticket is not None and self.is_growing else self.need_mib

    @property
    def has_reservation(self) -> bool:
        return self.held_mib > 0

    @property
    def count(self) -> int:
        """On how many devices it is, or will be."""
        return len(self.home_ids) or self.spec.devices

    @property
    def milli(self) -> int:
        """What limits and shares count it as, milli-GPU."""
        return self.spec.fraction_milli * self.spec.devices

    @property
    def time_ms(self) -> int:
        """Its virtual time, by which it compares with others of its owner."""
        return self.meter.usage * UNIT // max(1, self.spec.weight)

    @property
    def bound_ids(self) -> tuple[str, ...]:
        """The devices that it still uses after it gave up its reservation: its context stays there."""
        return self.device_ids if self.state is LeaseState.NO_CONTEXT and self.unreserved_mib else ()

    @property
    def need_mib(self) -> int:
        """What must be free on each device for it: what its pool reserves, or what was saved if it had exceeded its cap."""
        if self.bound_ids:
            return max(1, self.size_mib - self.unreserved_mib)
        return max(self.size_mib, self.saved_each_mib) if self.saved_mib else self.size_mib

    @property
    def used_each_mib(self) -> int:
        """What it uses of each of its devices; of several, evenly."""
        return self.used_mib if self.count == 1 else -(-self.used_mib // self.count)

    @property
    def host_need_mib(self) -> int:
        """What its suspend is expected to save: its use as last measured, else what it holds; at least what an earlier suspend found."""
        need_mib, floor_mib = self.used_mib, self.shrink.host_floor_mib
        if not need_mib:  # it has a reservation, so something is reserved for its state, too
            need_mib = 1 if self.is_measured else max(1, self.held_mib * len(self.device_ids))
        return floor_mib if floor_mib > need_mib else need_mib  # noqa: FURB136 - computed for every candidate

    @property
    def host_margin_mib(self) -> int:
        """What is reserved beyond `host_need_mib` if the host has it left, so that a low estimate does not fail the attempt.

        A lease may use more when it is locked than when it was last measured: small allocations (`HOST_MARGIN_MIB`), what grows with the
        data (one part in `HOST_MARGIN_PARTS`), and, while it is busy, the growth between two measurements. What was counted under locks
        (`host_floor_mib`), or when nothing but its data was left, needs no margin.
        """
        need_mib = self.host_need_mib
        if self.shrink.succeeded or need_mib == self.shrink.host_floor_mib:
            return 0
        margin_mib = HOST_MARGIN_MIB + need_mib // HOST_MARGIN_PARTS
        if self.busy:
            margin_mib += self.growth_mib * len(self.device_ids)
        return max(0, min(margin_mib, self.held_mib * len(self.device_ids) - need_mib))


@dataclass(frozen=True, slots=True)
class Stake:
    """What an early swap moves, in vain unless a cell follows."""

    lease_id: str  # for which it is done
    at_ms: int
    mib: int  # there and back


@dataclass(frozen=True, slots=True)
class Sums:
    """The totals of a device's leases, and what they leave."""

    reserved_mib: int
    free_mib: int
    mib: tuple[int, ...]  # by `OccupancyKind`
    demand_milli: int  # what the busy ones need together, thousandths of the device
    wanted_milli: int  # that, plus the need of those let in for a cell that has not begun
    resting_milli: int  # what idle ones are expected to need


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """One device and the leases that hold something there. Totals are computed on demand."""

    spec: DeviceSpec
    stranger_mib: int = 0
    lost: bool = False
    draining: bool = False
    evict_busy: bool = False
    deadline_ms: int | None = None  # while it is drained: when it goes away
    is_exclusive: bool = False  # one lease has all of it
    holders: dict[str, Lease] = field(default_factory=dict)
    known_sums: Sums | None = None  # None: a lease here, or the device itself, has changed since
    stakes: list[Stake] = field(default_factory=list)  # of the last hour, oldest first (`foresight`)

    @property
    def sums(self) -> Sums:
        """The totals of its leases."""
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
        """Return the MiB held by leases that occupy the device in this way."""
        return self.sums.mib[kind]

    @property
    def lease_capacity_mib(self) -> int:
        """What one lease could have if it were alone."""
        return self.spec.leasable_mib - self.stranger_mib

    @property
    def free_mib(self) -> int:
        """What is left for leases; negative when over-committed, nothing when lost, or when one lease has all of it."""
        return self.sums.free_mib

    @property
    def free_or_idle_mib(self) -> int:
        return self.free_mib + self.mib(OccupancyKind.IDLE) + self.mib(OccupancyKind.SUSPENDING)

    def most_needed_milli(self, seen_milli: int) -> int:
        """Return the most that a busy lease seen to use `seen_milli` of the device may need: no more, unless the device is full."""
        busy = [lease for lease in self.holders.values() if lease.occupancy is OccupancyKind.BUSY]
        if len(busy) < 2:
            return seen_milli
        used = [lease.demand_milli if lease.seen_milli is None else lease.seen_milli for lease in busy]
        if sum(used) < _FULL_MILLI:
            return seen_milli
        # If samples exceed the device (they are of different times) or one is missing, the largest use is unknown.
        if sum(used) > _SAME_TIME_MILLI or any(lease.seen_milli is None for lease in busy):
            return WHOLE_MILLI
        most_milli = most_wanted_milli(seen_milli, max(used))
        return min(WHOLE_MILLI, most_milli + most_milli // _INEXACT_PARTS)
