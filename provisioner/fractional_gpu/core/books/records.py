"""What the books are made of: leases, tickets, devices, accounts.

Who may write what is said by `state.Books`; the fields' meaning is said here.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from fractional_gpu.core.model import (
    DeviceSpec,
    LeaseSpec,
    LeaseState,
    LeaseView,
    Span,
)

__all__ = [
    "Account",
    "Bucket",
    "BucketKey",
    "BucketShape",
    "Device",
    "Lease",
    "OccupancyKind",
    "Operation",
    "Reason",
    "ShownForecast",
    "Ticket",
    "VictimRanking",
    "YieldCandidates",
]


_MUCH_STALE = 8  # changes on a device beyond one for everybody there: it is cheaper to begin anew


@dataclass(frozen=True, slots=True)
class Operation:
    """A suspend or resume under way: what its answer must say to be believed."""

    lease_id: str
    kind: str
    generation: int


@dataclass(frozen=True, slots=True)
class Reason:
    """Why somebody waits: code, sentence, and the leases in the way."""

    code: str
    sentence: str
    blockers: tuple[str, ...] = ()


class OccupancyKind(IntEnum):
    """How a lease stands on its device: what its room could be used for."""

    NONE = 0  # it holds nothing
    IDLE = 1  # resident and idle
    BUSY = 2  # resident and busy
    SUSPENDING = 3  # being suspended: its room comes
    FIXED = 4  # resuming, quarantined, or reserved before its start


@dataclass(slots=True, kw_only=True)
class ShownForecast:
    """The upper end of the forecast that was shown last for a wait, and whether the wait outlasted one. See `overdue`; decides nothing."""

    since_ms: int  # when the wait, or the resume that ends it, began
    until_ms: int  # the upper end
    missed_ms: int = 0  # how long the wait had lasted when it was first found to be longer than shown; 0: it was not


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A lease's place in the queue: by priority, then the urgent, then first come first served (`queue` says it exactly)."""

    order: int
    asked_ms: int
    before_start: bool = False  # may be served before a process stands behind the lease
    urgent: bool = False
    passed_over: int = 0  # at most the pool's K; from then on room is kept
    passed_over_elsewhere: int = 0  # passed over since, on devices where no room is kept
    kept_on: tuple[str, ...] = ()  # devices where room is kept
    resize_to: LeaseSpec | None = None  # a resident lease waits for room to have this size
    extra_mib: int = 0  # what it then holds more than now, on each of its devices
    after_suspend: "Ticket | None" = None  # beside growing: its place when it has been suspended, since it was wanted
    preempted: bool = False  # filed for a busy lease that had to make room: only its end withdraws it
    due_ms: int = 0  # it is due then, as far as was known; 0: not worked out yet
    is_due: bool = False  # where a pool shares by virtual time: it goes before the others, because room is being made or it waited too long
    expected: Span | None = None  # the wait, as it was foreseen when the ticket was filed
    shown: ShownForecast | None = None  # what was shown of it last
    reason: str = "wait.new"  # as last written into the story
    wait: Reason | None = None  # why it waits, from the last pass that looked at it by itself
    wait_pass: int = 0  # which pass that was
    rank: tuple[int, bool, int] = (
        0,
        False,
        0,
    )  # by which its pool's line is sorted, when it came there: priority, urgency, order
    bucket_rank: tuple[int, int] = (0, 0)  # likewise its bucket: the virtual time of the lease, order


class BucketKey(NamedTuple):
    """What tickets have in common that wait in one bucket."""

    pool: str
    home: (
        tuple[str, ...] | str | None
    )  # the devices they were saved from, the lease that grows where it is, or anywhere
    accounts: tuple[str, ...]  # whose limits they count against, whose share they are served by, where that matters
    devices: int  # devices
    priority: int
    fair: bool  # the pool serves by shares
    milli: int  # 0 where it does not matter
    need_mib: int  # on each device
    urgent: bool
    room_kept: bool  # they were passed over as often as may be
    paused: bool  # a resume that could not start is not tried again yet
    targets: tuple[str, ...]  # they are being moved, and their room is kept there
    due: bool  # they go before others of their priority, in the order of asking


@dataclass(slots=True, eq=False)
class BucketShape:
    """Buckets of several owners, in a pool that shares by virtual time, whose tickets differ in nothing else.

    A pass that finds that nothing can begin for any bucket that it has not visited notes that here, once for all of them.
    """

    devices: tuple[str, ...] | None = None  # that can serve them, until a device or pool changes
    buckets: dict[int, "Bucket"] = field(default_factory=dict)  # by number
    skipped_in_pass: int = 0  # the last pass that left out the buckets that it had not visited
    first_unskipped: int = 0  # buckets from this number on came after that
    wait: Reason | None = None  # why these wait, where that pass found a reason of its own


@dataclass(slots=True, eq=False)
class Bucket:
    """Tickets with the same need, which the same devices can serve: where one of them fits nowhere, none behind it does."""

    key: BucketKey
    family: tuple[object, ...] = field(
        init=False
    )  # its key but for the need: what is too much for one is too much for a larger one
    devices: tuple[str, ...] | None = None  # that can serve all of them (`explaining`), until a device or pool changes
    members: list["Lease"] = field(default_factory=list)  # by their share of their owner's, then in the order of asking
    wait: Reason | None = None  # why all of them wait, where the last pass found a reason of its own
    wait_pass: int = 0  # which pass that was
    closed_in_pass: int = 0  # the last pass that found nothing for whoever was looked at, nor for those behind
    due_ms: int = 0  # that of its oldest ticket, where that is known; 0: it has other members than before
    oldest_order: int | None = None  # the order of its oldest ticket, where that is known
    number: int = 0  # buckets in the order in which they came
    shape: BucketShape | None = None  # with buckets of other owners, where a pass may leave them out together
    turn: tuple[int, ...] | None = None  # that of its first ticket, where it has a shape and that is known ...
    turn_version: int = 0  # ... as of this state of its owner's account
    account: "Account | None" = None  # its owner's, where it has a shape and somebody has asked
    exhausted_in_pass: int = 0  # the last pass that visited all of its tickets

    def __post_init__(self) -> None:
        """Take over what never changes."""
        self.family = self.key[:7]

    def is_skipped(self, passes: int) -> bool:
        """Whether this pass left it out together with all others of its shape."""
        shape = self.shape
        if shape is None or shape.skipped_in_pass != passes or self.number >= shape.first_unskipped:
            return False
        return passes not in (self.closed_in_pass, self.exhausted_in_pass)

    def is_closed(self, passes: int) -> bool:
        """Whether this pass found nothing for whoever was looked at, nor for those behind."""
        return self.closed_in_pass == passes or self.is_skipped(passes)


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """What an owner (or a group) has of one pool: totals for limits, pinned time, and use for fair shares."""

    name: str
    leases: int = 0
    milli: int = 0  # sum of the fractions of all leases
    resident_milli: int = 0  # of those that hold a reservation
    holders: dict[str, "Lease"] = field(default_factory=dict)  # those
    weight: int = 100
    usage: int = 0  # milli-GPU times milliseconds that its leases were busy on a device (see `fairness`)
    busy_milli: int = 0  # milli-GPU that are busy now
    usage_as_of_ms: int = 0  # `usage` is right for this moment
    contenders: dict[str, "Lease"] = field(default_factory=dict)  # who is busy on a device, or waits for one
    contending_weight: int | None = None  # the sum of their weights, if it is known
    version: int = 0  # grows whenever its virtual time, or that of a lease, changes by something else than use
    floor: int = 0  # virtual time of its leases: whoever comes back starts no lower
    idle_since_ms: int | None = None  # nobody of it contends since then
    pinned_ms: int = 0  # of its budget that is used up
    pinned_at_ms: int = 0  # `pinned_ms` is right for this moment


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """One lease. See `Books` for who may write what."""

    spec: LeaseSpec
    number: int = 0  # leases in the order of their admission
    state: LeaseState = LeaseState.UNATTACHED
    generation: int = 0
    device_ids: tuple[str, ...] = ()  # where its reservation is, or (it holds nothing) was
    held_mib: int = 0  # reserved on each of its devices
    home_ids: tuple[str, ...] = ()  # the devices whose memory was, or may have been, saved
    target_ids: tuple[str, ...] = ()  # it is being moved there, and room is kept for it there
    size_mib: int = 0  # what its pool reserves for it: its cap, or what it uses and headroom
    saved_mib: int = 0  # lies in host memory
    saved_each_mib: int = 0  # what must be reserved for that on each of its devices (`Books.save_on_host`)
    host_mib: int = 0  # reserved in host memory for a suspend under way
    used_mib: int = 0
    growth_mib: int = 0  # by so much its use grew, on each device, from the last measurement but one to the last
    shrinking: bool = False  # it was asked to give its caches back, and has not answered
    shrunk: bool | None = None  # since it became idle: it gave its caches back, could not, or (None) was not asked
    host_floor_mib: int = 0  # what a suspend found that it would have to save, when that was more than was reserved
    busy: bool = False
    since_ms: int = 0
    last_active_ms: int = 0
    operation_id: int | None = None
    reason: str = ""
    sentence: str = ""
    has_run: bool = False  # has been busy since it became resident
    retry_ms: int = 0  # not chosen for a suspend before this
    aborted_suspends: int = 0  # in a row
    failed_resumes: int = 0  # in a row
    resume_after_ms: int = 0  # a resume that could not start is not tried again before this
    expires_ms: int | None = None
    hold_until_ms: int = 0  # so long its room is kept for a process that has not come yet
    pinned_until_ms: int = 0
    announced_ms: int = 0  # for which idle suspension the kernel has been warned
    suspend_requested: bool = False
    suspend_requested_by: str = ""  # who asked last for its suspend
    preempted: bool = False  # its suspend under way, or its last one, takes the device from a busy kernel
    gate_closed: bool = False  # its gate is closed for an older ticket: its next cell asks before it runs (`yielding`)
    gate_open_until_ms: int = 0  # its gate is not closed for others before this
    gate_ticket: Ticket | None = None  # the place in the queue of its next cell, which waits at the closed gate
    began_ms: int = 0  # of its operation under way
    ticket: Ticket | None = None
    why_not: str = ""  # why its process cannot be checkpointed, a sentence
    unsuspendable_reason: str = ""  # that, or what its pool or device say; written by `staying` alone
    left_behind: str = ""  # its kernel has ended, and these of its processes have device memory still, for people
    revoked: bool = False  # the seat that it draws on has ended (`revoked`)
    ends_ms: int | None = None  # its processes are ended then, if it is revoked
    over_since_ms: int | None = None  # more than its cap since then
    over_told: bool = False
    under_host_pressure: bool = False  # host memory is short where its saved state lies
    usage: int = 0  # milli-GPU times milliseconds that it was busy on a device
    is_metered: bool = False  # it counts as busy on a device
    usage_as_of_ms: int = 0  # `usage` is right for this moment, if it is metered
    idle_since_ms: int | None = None  # it does not contend since then
    paused: bool = False  # `resume_after_ms` is still to come
    bucket: Bucket | None = None  # where its ticket waits, if nothing but room is in its way
    occupancy: OccupancyKind = OccupancyKind.NONE  # as its devices have it in their sums
    occupied_mib: int = 0
    occupied_ids: tuple[str, ...] = ()
    cost: int = 0  # of suspending it (`ranking`)
    cost_until_ms: int = 0  # it is to be worked out anew then
    due_ms: int | None = None  # when time alone changes something for it (see `deadlines`)
    view: LeaseView | None = None  # what others saw of it last,
    view_of: int = 0  # as of this event
    lease_id: str = field(init=False)  # its spec's, at hand

    def __post_init__(self) -> None:
        """Take over what never changes."""
        self.lease_id = self.spec.lease_id

    def forget_shrinking(self) -> None:
        """What was found out about its memory while it was idle is true no more."""
        self.shrinking, self.shrunk, self.host_floor_mib = False, None, 0

    @property
    def is_working(self) -> bool:
        """Whether it is in the middle of something: it is busy, and not only with a cell that waits at its closed gate."""
        return self.busy and self.gate_ticket is None

    @property
    def is_unsuspendable(self) -> bool:
        """Whether it cannot be suspended: it has something that cannot be saved, or may have it at any moment."""
        return bool(self.unsuspendable_reason) and (self.used_mib > 0 or not self.spec.gated)

    @property
    def device_id(self) -> str | None:
        """The first of its devices."""
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
    def has_reservation(self) -> bool:
        """Whether it counts against its devices."""
        return self.held_mib > 0

    @property
    def count(self) -> int:
        """On how many devices it is, or will be."""
        return len(self.home_ids) or self.spec.devices

    @property
    def milli(self) -> int:
        """What it counts for in limits and shares, milli-GPU."""
        return self.spec.fraction_milli * self.spec.devices

    @property
    def need_mib(self) -> int:
        """What must be reserved on each device for it: what its pool reserves, or what was saved of one that had gone past its cap."""
        return max(self.size_mib, self.saved_each_mib) if self.saved_mib else self.size_mib

    @property
    def used_each_mib(self) -> int:
        """What it uses of each of its devices; of several, evenly."""
        return self.used_mib if self.count == 1 else -(-self.used_mib // self.count)

    @property
    def host_need_mib(self) -> int:
        """What must be reserved on the host before it is suspended.

        An idle kernel may still fill its reservation, with caches as with data. One that has just given its caches back is taken at what
        it uses. If that was wrong, its suspend finds out before anything is locked.
        """
        need_mib = self.used_mib or 1  # it has a reservation, so something is reserved for its state, too
        if not self.shrunk:
            held_mib = self.held_mib * len(self.device_ids)
            need_mib = held_mib if held_mib > need_mib else need_mib  # noqa: FURB136 - asked for every candidate
        return self.host_floor_mib if self.host_floor_mib > need_mib else need_mib  # noqa: FURB136 - as above


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class YieldCandidates:
    """Busy leases of a device that may be asked to leave at the end of their cells, cheapest first, as it was found."""

    leases: list[Lease]
    mib: int  # what they hold together
    costs_until_ms: int  # then the first of their costs is out of date
    next_ms: int | None  # when time alone makes another lease one of them


@dataclass(slots=True, kw_only=True, eq=False)
class VictimRanking:
    """Who may be suspended on a device, cheapest first, as it was found (`ranking`); `stale` is looked at again."""

    changed: dict[str, Lease]  # who changed since
    busy: dict[str, tuple[int, Lease]] = field(default_factory=dict)  # when busy leases have had their residency
    swaps_learnt: int = 0  # the state of the forecasts that `working` was found with
    highest_priority: int = 0  # priority of `working`
    ready_mib: int = 0  # what they hold together
    yield_candidates: YieldCandidates | None = (
        None  # of `working`: who may be asked to leave at its cell's end; None: not known
    )
    costs_until_ms: int = 0  # then the first of their costs is out of date
    ranked: list[tuple[int, int, str, Lease]] = field(default_factory=list)
    ready: list[Lease] = field(default_factory=list)  # the same
    later: dict[str, tuple[int, Lease]] = field(default_factory=dict)  # when time alone makes somebody else willing
    next_ready_ms: int | None = None  # the first of these moments
    last_used_ms: int = 0  # when somebody asked last


@dataclass(slots=True, kw_only=True, eq=False)
class Device:
    """One device and the running totals of its reservations, MiB."""

    spec: DeviceSpec
    stranger_mib: int = 0
    lost: bool = False
    draining: bool = False
    evict_busy: bool = False
    reserved_mib: int = 0
    is_exclusive: bool = False  # one lease has all of it
    holders: dict[str, Lease] = field(default_factory=dict)
    mib_by_occupancy: list[int] = field(default_factory=lambda: [0] * len(OccupancyKind))  # by `Footing`
    count_by_occupancy: list[int] = field(default_factory=lambda: [0] * len(OccupancyKind))
    victim_ranking: VictimRanking | None = None  # who may be suspended there, if somebody has asked

    free_mib: int = 0  # what is left for leases; negative when over-committed, nothing when lost
    lease_capacity_mib: int = 0  # what one lease could have if no other were there

    def mark_stale(self, lease: Lease) -> None:
        """Somebody who is, or was, on the device changed: whether it may be suspended is to be looked at again."""
        if self.victim_ranking is not None:
            self.victim_ranking.changed[lease.lease_id] = lease
            if len(self.victim_ranking.changed) > _MUCH_STALE + len(self.holders):  # nobody has asked for long
                self.victim_ranking = None

    def recompute_free(self) -> None:
        """Work out what is left: the device itself, or what is reserved on it, changed."""
        self.lease_capacity_mib = self.spec.leasable_mib - self.stranger_mib
        left_mib = self.lease_capacity_mib - self.reserved_mib
        if self.lost or (self.is_exclusive and self.reserved_mib):
            left_mib = min(0, left_mib)
        self.free_mib = left_mib
