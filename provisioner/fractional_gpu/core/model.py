"""The data types of the arbiter. Integers only: memory in MiB, fractions in milli-GPU, time in milliseconds.

They have no behaviour; the decisions are in `arbiter`, legal transitions in `transitions`.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class LeaseState(StrEnum):
    """The state of a lease; `transitions.TABLE` says which changes are legal. The values are on the wire and in ledgers."""

    UNATTACHED = "unattached"  # no live process; holds no device memory; expires after the pool's time to live
    NO_CONTEXT = "unarmed"  # a live process without a CUDA context and without a reservation; the value is the state's older name
    RESIDENT = "resident"  # holds a reservation on its device
    SUSPENDING = "suspending"  # a suspend operation is under way; reservation still held
    SUSPENDED = "suspended"  # saved_mib lie in host memory; no reservation on any device
    RESUMING = "resuming"  # a resume operation is under way; reservation already held
    QUARANTINED = "quarantined"  # the truth is unknown; reservations (device and host) are kept until it is found
    ENDED = "ended"


HOLDING = frozenset({LeaseState.RESIDENT, LeaseState.SUSPENDING, LeaseState.RESUMING, LeaseState.QUARANTINED})
"""States whose reservation counts against the device (a quarantined lease only if it has a device)."""


FOUND_FAILED = "found.failed"
"""The reason of a quarantined lease whose process the driver reports as failed: waiting does not help its kernel."""


class ReserveBy(StrEnum):
    """What determines a resident lease's reservation."""

    CAP = "cap"  # its whole cap (limit)
    USE = "use"  # what it uses plus headroom, never under its request and never over its cap


class Sharing(StrEnum):
    """How leases share a device. Only time-sliced leases can be checkpointed."""

    TIME_SLICE = "time-slice"
    MPS = "mps"  # compute and memory are limited by the MPS server; leases stay resident
    MIG = "mig"  # the devices are instances, one lease has a whole one; leases stay resident


class Breach(StrEnum):
    """What a pool does with a lease that uses more than its cap."""

    WARN = "warn"
    SUSPEND = "suspend"  # as soon as it is idle; it resumes where all the memory it uses fits
    KILL = "kill"  # its processes that use the device


class Compute(StrEnum):
    """How a pool weighs the compute that leases need when it chooses among devices."""

    SPREAD = "spread"  # busy leases go where the least is needed; nothing waits for that
    PACK = "pack"  # memory alone decides


class Foresight(StrEnum):
    """What a pool does for a suspended lease whose next cell is expected, before that cell asks."""

    OFF = "off"
    FREE = "free"  # it comes back early where there is room
    DISPLACE = "displace"  # also, idle leases that are expected later make room for it


class Sign(StrEnum):
    """Why a cell is expected. The arbiter learns how often each kind was right; the values are on the wire."""

    FOCUS = "focus"  # the notebook was opened, or came to the front
    SCROLL = "scroll"
    TYPING = "typing"  # a cell was edited
    HOVER = "hover"  # the pointer rests on a button that runs a cell
    COMPLETION = "completion"  # a completion was asked for
    INSPECTION = "inspection"  # a tooltip was asked for
    WIDGET = "widget"  # a widget sent a message
    RHYTHM = "rhythm"  # the kernel's own cells come at such intervals
    OTHER = "other"  # any other front end or program sent it


class AfterKernel(StrEnum):
    """What happens to processes that outlive their kernel and have device memory."""

    KEEP = "keep"  # they continue and keep the kernel's room
    END = "end"  # they are asked to end, and killed after a grace


class Strangers(StrEnum):
    """What a pool does with processes that use its devices and belong to no lease."""

    SHOW = "show"
    REFUSE = "refuse"  # the broker ends them if it may


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A forecast in milliseconds: the expected value, and bounds that four of five outcomes lie between."""

    expected_ms: int
    low_ms: int
    high_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one user, or one group, may have of a pool; None: no limit. The first two refuse new leases, the last one makes them wait."""

    leases: int | None = None
    milli: int | None = None  # sum of the fractions of all leases, milli-GPU
    resident_milli: int | None = None  # sum of the fractions with a reservation at a time, milli-GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device as the arbiter knows it: its whole memory, and `overhead_mib` that no lease may have (driver, margin)."""

    device_id: str  # UUID
    name: str
    memory_mib: int
    overhead_mib: int = 0
    why_not: str = ""  # why nothing on it can be checkpointed, a sentence; empty: it can
    why_no_move: str = (
        ""  # why state saved from it resumes only on itself, a sentence; empty: also on others of its name
    )

    @property
    def leasable_mib(self) -> int:
        """Memory that leases may hold together, MiB."""
        return max(0, self.memory_mib - self.overhead_mib)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Devices with one policy. Durations in milliseconds."""

    name: str
    devices: tuple[str, ...]  # device ids; a device is in one pool
    fractions_milli: tuple[int, ...] = (125, 250, 500, 750, 1000)  # on offer; empty = any from 1 to 1000
    oversubscription_milli: int | None = None  # sum of requests over capacity, in thousandths; None = unlimited
    idle_after_ms: int | None = None  # suspend when idle this long; 0 = at once; None = only when room is needed
    idle_auto: bool = True  # with None: also when holding is expected to cost more than coming back
    hold_price_milli: int = 0  # idle_auto: what holding a whole device for an hour costs, thousandths of any currency
    wait_price_milli: int = 40_000  # idle_auto: what an hour of a person's waiting costs, likewise
    # A busy lease is not preempted before, nor is one suspended that has run nothing since it was let in
    min_residency_ms: int = 10_000
    unattached_ttl_ms: int = 120_000  # a lease without a process ends after this
    revoked_ttl_ms: int = 86_400_000  # the processes of a lease whose seat has ended are ended after this
    unattached_hold_ms: int = 15_000  # room is kept so long for a kernel that is about to start
    unattached_leases: int = 64  # leases of one owner that have no process
    unattached_share_milli: int = 500  # of the pool's memory that these leases of one owner may hold
    retry_refused_ms: int = 30_000  # after a refused or aborted suspend, a lease is left alone for this long
    max_unused_hold_ms: int | None = None  # so long a cell may hold room without using the GPU; None = until it ends
    max_passed_over: int = 8  # K of law 4
    may_move: bool = True  # a suspended lease may be resumed on another device of the same name, where the driver can
    move_busy: bool = False  # with `may_move`: a busy lease may be moved where that lets a waiting one in
    reserve_by: ReserveBy = ReserveBy.CAP
    headroom_mib: int = 512  # ReserveBy.USE: reserved beyond what is used
    # Minimum residency is at least this many thousandths of the predicted suspend and resume
    min_residency_swaps_milli: int = 30_000
    preempt_equals: bool = True  # weighted fair share among equal priorities, by preempting busy leases
    # A higher priority preempts busy leases of a lower one after their minimum residency
    preempt_priorities: bool = True
    max_pin_ms: int = 14_400_000  # longest pin; 0: no pins
    # Pinned time per user and day, which comes back evenly over a day; None = unlimited
    pin_budget_ms: int | None = 28_800_000
    warn_before_ms: int = 0  # announce an idle suspension this early; 0 = not at all
    max_devices: int = 8  # whole devices that one lease may ask for
    max_priority: int = 0  # the highest that a user without administrator rights may request
    user_limits: Limits = Limits()  # of every user
    group_limits: tuple[tuple[str, Limits], ...] = ()  # by group
    sharing: Sharing = Sharing.TIME_SLICE
    breach: Breach = Breach.WARN  # what happens to a lease that uses more than its cap
    strangers: Strangers = Strangers.SHOW  # what happens to processes without a lease on its devices
    after_kernel: AfterKernel = AfterKernel.KEEP  # what happens to what an ended kernel left there
    checkpoint_children: bool = (
        False  # kernels start in checkpoint jobs, so that forked children do not keep them on the device
    )
    exclusive: bool = False  # the driver keeps its kernels' control groups off all other devices
    suspend_unseen: bool = True  # kernels without our extension, whose use is unknown, may be suspended
    hami_library: str = ""  # HAMi-core, preloaded into the pool's kernels; empty: none
    # A cell runs on while its kernel's resume is under way, and blocks in its first call of the device
    overlap_resume: bool = False
    compute: Compute = Compute.SPREAD  # how devices are chosen
    # Compute.SPREAD: what busy leases may need of a device together, in its thousandths, before another device is preferred
    slowdown_bound_milli: int = 1000
    empty_devices: bool = False  # with `may_move`: idle leases are moved together where that empties a device
    foresight: Foresight = Foresight.FREE  # what is done for a lease whose next cell is expected
    foresight_swap_ms: int = 2_000  # no early swap begins if it is predicted to take longer
    # What early swaps may move to and from one device in an hour in vain
    foresight_vain_mib: int = 262_144


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpec:
    """What a kernel asks for. `reserve_mib` is its cap (limit) on each of its devices: everything its process tree may use there."""

    lease_id: str
    pool: str
    owner: str  # the user it counts for: their limits, shares and budgets
    fraction_milli: int
    reserve_mib: int
    priority: int = 0
    gated: bool = True  # our extension guards its cells: it may start without a reservation and be suspended without losing a race
    label: str = ""  # for people: kernel or notebook name
    request_mib: int | None = None  # guaranteed; None: as much as the cap
    devices: int = 1  # more than one: whole devices, all or none (fraction_milli is 1000)
    group: str = ""  # whose limits it counts against, next to the owner's
    owner_weight: int = 100  # the owner's share among owners, where the pool preempts equals
    weight: int = 100  # this lease's share among its owner's
    seat: str = ""  # the hub seat that it draws on; empty: none
    allowed_devices: tuple[str, ...] = ()  # the only devices of the pool that it may go to; empty: all of them
    # Its priority without a used-up budget; None: `priority` is its own
    own_priority: int | None = None
    uid: int | None = None  # the machine's user that it belongs to, who may count for another owner; None: a seat's

    def is_same_user(self, other: "LeaseSpec") -> bool:
        """Whether both belong to one user, who may know both by name. An owner may have several users."""
        return (self.owner, self.uid) == (other.owner, other.uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A read-only view of one lease, for status and for the ledger."""

    spec: LeaseSpec
    state: LeaseState
    generation: int  # grows at every state change; an operation's answer with an old one is stale
    device_id: str | None  # where the reservation is (HOLDING), else the device it was last on
    saved_mib: int  # in host memory while suspended
    used_mib: int  # last measured use on the device; before the first measurement there, what was resumed or 0
    busy: bool
    since_ms: int  # when it entered this state
    last_active_ms: int
    operation_id: int | None
    reason: str  # reason code of the last change
    sentence: str  # the same for people
    reserved_mib: int = 0  # what it holds on `device_id` now (an unattached lease may hold its reservation in advance)
    is_measured: bool = False  # `used_mib` was measured since it came to its devices
    host_reserved_mib: int = 0  # reserved in host memory for what a suspend under way will save
    suspend_requested: bool = False  # its suspend was requested, and waits for the swap channel
    device_ids: tuple[str, ...] = ()  # all its devices, `device_id` first
    pinned_until_ms: int = 0  # not suspended for others, nor for being idle, before this
    resume: Span | None = None  # the time to bring it back, for one that is suspended
    # Why it cannot be suspended for as long as it is resident, a sentence; empty: it can
    unsuspendable_reason: str = ""
    gate_closed: bool = False  # its gate is closed for an older ticket: its next cell asks before it runs
    at_gate: bool = False  # its next cell waits there
    left_behind: str = ""  # processes of its ended kernel that still have device memory, for people
    revoked: bool = False  # its seat has ended: it does not become resident before a new seat takes it over
    ends_ms: int | None = None  # a revoked lease's processes are ended then
    demand_milli: int = 0  # learnt: what it uses of each of its devices while it is busy, thousandths of a device
    expected_until_ms: int = 0  # its next cell is expected before this; 0: no sign of one
    expected_by: str = ""  # the sign that says so (`Sign`)
    expected_milli: int = 0  # how likely that cell is, thousandths
    came_early: bool = False  # it was brought back for a cell that was expected, and none has run yet
    deadline_ms: int | None = None  # when the first of its devices goes away, if in the future
    lost_because: str = ""  # why it cannot be saved before, a sentence; empty: it will be


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How long a lease's cell takes, thousandths of its time alone, and why, for people; empty: it is not slowed down."""

    milli: int = 1000
    low_milli: int = 1000  # the bounds that four of five cells lie between
    high_milli: int = 1000
    brief: str = ""  # without its subject: "runs next to eval.ipynb, about 1.4 times as long as alone"

    @property
    def sentence(self) -> str:
        """The same with its subject."""
        return f"its cell {self.brief}" if self.brief else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A read-only view of one device, MiB. Over-committed: reservations and strangers exceed what may be leased."""

    device_id: str
    name: str
    pool: str | None
    memory_mib: int
    leasable_mib: int
    reserved_mib: int
    stranger_mib: int
    over_committed: bool
    lost: bool
    draining: bool = False  # admits no lease; its leases leave as soon as possible
    why_not: str = ""  # why leases there cannot be suspended, a sentence
    why_no_move: str = ""  # why state saved from it resumes only on itself, a sentence
    demand_milli: int = 0  # what its busy leases need together, thousandths of the device
    deadline_ms: int | None = None  # while it is drained: when it goes away


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDelay:
    """How long a pool's tickets have waited. `over_bound`: how many waited longer than the pool's turns explain."""

    longest_ms: int = 0  # of the one that has waited longest
    over_bound: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketView:
    """A place in the queue. `position` counts from 1 within the pool; None: its lease has its room and is being resumed."""

    lease_id: str
    position: int | None
    asked_ms: int
    passed_over: int
    reason: str  # why it waits, machine-readable
    sentence: str  # why it waits, for people
    blockers: tuple[str, ...] = field(default=())  # lease ids it waits for
    urgent: bool = False  # precedes others of its priority
    need_mib: int = 0  # what it will hold once it is served
    kept_on: tuple[str, ...] = ()  # devices where room is kept for it, because it was passed over too often
    expected: Span | None = None  # how long it will still wait; None: unknown
