"""Defines the arbiter's data types.

All values are integers: memory in MiB, fractions in milli-GPU and time in milliseconds. The types have no behaviour. `arbiter` makes the
decisions, and `transitions` defines the legal state changes.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class LeaseState(StrEnum):
    """The state of a lease. `transitions.TABLE` lists the legal changes. The values appear in the protocol and in ledgers."""

    UNATTACHED = "unattached"  # no live process and no device memory; expires after the pool's time to live
    NO_CONTEXT = "unarmed"  # a live process without a CUDA context or a reservation; the value is the older name
    RESIDENT = "resident"  # holds a reservation on its device
    SUSPENDING = "suspending"  # a suspend is in progress; keeps its reservation
    SUSPENDED = "suspended"  # saved to host memory (`saved_mib`); no reservation on any device
    RESUMING = "resuming"  # a resume is in progress; already holds its reservation
    QUARANTINED = "quarantined"  # its real state is unknown; keeps its reservations until it is known
    ENDED = "ended"


HOLDING = frozenset({LeaseState.RESIDENT, LeaseState.SUSPENDING, LeaseState.RESUMING, LeaseState.QUARANTINED})
"""The states in which a lease has memory reserved on its device. A quarantined lease may have no reservation."""


FOUND_FAILED = "found.failed"
"""The reason code of a quarantined lease whose process has failed, according to the driver. Its kernel must be restarted."""


class ReserveBy(StrEnum):
    """How a resident lease's reservation is determined."""

    CAP = "cap"  # its whole cap (limit)
    USE = "use"  # its use plus headroom, at least its request and at most its cap


class Sharing(StrEnum):
    """How leases share a device. Only time-sliced leases can be checkpointed."""

    TIME_SLICE = "time-slice"
    MPS = "mps"  # the MPS server limits compute and memory; leases stay resident
    MIG = "mig"  # the devices are MIG instances, each for one lease; leases stay resident


class Breach(StrEnum):
    """What happens to a lease that uses more than its cap."""

    WARN = "warn"
    SUSPEND = "suspend"  # as soon as it is idle; it resumes on a device with room for all that it uses
    KILL = "kill"  # ends its processes that use the device


class Compute(StrEnum):
    """How leases' compute demand affects the choice of a device."""

    SPREAD = "spread"  # prefer the device with the least demand; no lease waits for it
    PACK = "pack"  # ignore demand; only memory counts


class Foresight(StrEnum):
    """Whether suspended leases are resumed early if their next cell is expected."""

    OFF = "off"
    FREE = "free"  # resume early if there is room
    DISPLACE = "displace"  # also suspend idle leases that are expected later


class Sign(StrEnum):
    """A sign that a cell is about to run. The arbiter learns how reliable each kind of sign is. The values are part of the protocol."""

    FOCUS = "focus"  # the notebook was opened or brought to the front
    SCROLL = "scroll"
    TYPING = "typing"  # a cell was edited
    HOVER = "hover"  # the pointer is over a button that runs a cell
    COMPLETION = "completion"  # a completion was requested
    INSPECTION = "inspection"  # a tooltip was requested
    WIDGET = "widget"  # a widget sent a message
    RHYTHM = "rhythm"  # the kernel's earlier cells came at such intervals
    OTHER = "other"  # sent by another front end or program


class AfterKernel(StrEnum):
    """What happens to processes that outlive their kernel and still hold device memory."""

    KEEP = "keep"  # they continue and keep the kernel's room
    END = "end"  # they are asked to exit, and killed after a grace period


class Strangers(StrEnum):
    """What happens when processes without a lease use a pool's devices."""

    YIELD = "yield"  # idle leases leave for them
    YIELD_BUSY = "yield-busy"  # and busy leases, if that is not enough
    IGNORE = "ignore"
    REFUSE = "refuse"  # the broker ends them if it has permission


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A forecast in milliseconds: an expected value and the bounds of an 80% interval."""

    expected_ms: int
    low_ms: int
    high_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a user or group in a pool. None means unlimited.

    A lease that would exceed `leases` or `milli` is refused. A lease that would exceed `resident_milli` waits.
    """

    leases: int | None = None
    milli: int | None = None  # of all leases together, milli-GPU
    resident_milli: int | None = None  # of all leases with a reservation, milli-GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device and its total memory. Of that, `overhead_mib` is set aside for the driver and as a safety margin, and cannot be leased."""

    device_id: str  # UUID
    name: str
    memory_mib: int
    overhead_mib: int = 0
    why_not: str = ""  # a sentence that explains why nothing on the device can be checkpointed; empty if it can
    # A sentence that explains why state saved from the device can only resume there; empty if other devices of this name will do
    why_no_move: str = ""

    @property
    def leasable_mib(self) -> int:
        """The memory that can be leased, in MiB."""
        return max(0, self.memory_mib - self.overhead_mib)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A set of devices that share one policy. Durations are in milliseconds."""

    name: str
    devices: tuple[str, ...]  # device ids; each device is in one pool
    fractions_milli: tuple[int, ...] = (125, 250, 500, 750, 1000)  # allowed sizes; empty = any from 1 to 1000
    oversubscription_milli: int | None = None  # limit on total requests, thousandths of capacity; None = unlimited
    idle_after_ms: int | None = None  # suspend after this idle time; 0 = at once; None = only when room is needed
    idle_auto: bool = True  # if `idle_after_ms` is None, also suspend when staying would cost more
    hold_price_milli: int = 0  # for `idle_auto`, the price of a device for an hour, in thousandths of any currency
    wait_price_milli: int = 40_000  # for `idle_auto`, the price of an hour that a person waits, in the same unit
    # Before this, a busy lease is not preempted, and a lease that has run nothing since it got room is not suspended
    min_residency_ms: int = 10_000
    unattached_ttl_ms: int = 120_000  # a lease without a process ends after this
    revoked_ttl_ms: int = 86_400_000  # the processes of a lease whose seat has ended are ended after this
    unattached_hold_ms: int = 15_000  # how long room is kept for a kernel that is about to start
    unattached_leases: int = 64  # limit on leases without a process, per owner
    unattached_share_milli: int = 500  # limit on the part of the pool's memory that such leases hold, per owner
    retry_refused_ms: int = 30_000  # pause after a refused or aborted suspend
    max_unused_hold_ms: int | None = None  # how long a cell may hold room without using the GPU; None = until it ends
    max_passed_over: int = 8  # K of law 4
    may_move: bool = True  # leases may resume on another device of the same name, if the driver can do that
    move_busy: bool = False  # with `may_move`, a busy lease may be moved to make room for a waiting lease
    reserve_by: ReserveBy = ReserveBy.CAP
    headroom_mib: int = 512  # with ReserveBy.USE, reserved in addition to the used memory
    # Minimum residency is at least this multiple of the predicted suspend and resume, thousandths
    min_residency_swaps_milli: int = 30_000
    preempt_equals: bool = True  # weighted fair share among equal priorities, by preempting busy leases
    # Leases of a higher priority preempt busy leases of a lower priority after their minimum residency
    preempt_priorities: bool = True
    max_pin_ms: int = 14_400_000  # longest pin; 0: no pins
    longest_claim_ms: int = 3_600_000  # 0: no claims
    # Pinned time per user and day; used time is restored evenly over a day; None = unlimited
    pin_budget_ms: int | None = 28_800_000
    warn_before_ms: int = 0  # announce an idle suspend this early; 0 = never
    max_devices: int = 8  # limit on the whole devices of one lease
    max_priority: int = 0  # the highest that a user without administrator rights may request
    user_limits: Limits = Limits()  # for each user
    group_limits: tuple[tuple[str, Limits], ...] = ()  # by group
    sharing: Sharing = Sharing.TIME_SLICE
    breach: Breach = Breach.WARN  # what happens to a lease that uses more than its cap
    strangers: Strangers = Strangers.YIELD  # what happens to processes without a lease on its devices
    after_kernel: AfterKernel = AfterKernel.KEEP  # what happens to processes that an ended kernel left behind
    # Kernels start in checkpoint jobs, so that forked children do not keep them on the device
    checkpoint_children: bool = False
    exclusive: bool = False  # the driver denies its kernels' control groups all other devices
    suspend_unseen: bool = True  # kernels without our extension may be suspended, although they report no use
    hami_library: str = ""  # HAMi-core library to preload into the pool's kernels; empty: none
    # A cell starts while its kernel is being resumed, and blocks in its first call to the device
    overlap_resume: bool = False
    compute: Compute = Compute.SPREAD  # how devices are chosen
    # With Compute.SPREAD, another device is preferred if the demand of busy leases exceeds this, in thousandths of a device
    slowdown_bound_milli: int = 1000
    empty_devices: bool = False  # with `may_move`, idle leases are moved together if that empties a device
    foresight: Foresight = Foresight.FREE  # what happens for a lease whose next cell is expected
    foresight_swap_ms: int = 2_000  # no early swap starts if it is predicted to take longer
    # Limit on wasted early swaps to and from a device, MiB per hour
    foresight_vain_mib: int = 262_144


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpec:
    """What a kernel requests. `reserve_mib` is its cap: how much memory its process tree may use on each of its devices."""

    lease_id: str
    pool: str
    owner: str  # the user whose limits, shares and budgets apply
    fraction_milli: int
    reserve_mib: int
    priority: int = 0
    # Our extension guards its cells, so it can start without a reservation, and its suspends cannot race with its cells
    gated: bool = True
    label: str = ""  # the name of the kernel or notebook, as shown to people
    request_mib: int | None = None  # the guaranteed memory; None for the whole cap
    devices: int = 1  # if it has several, they are whole devices (fraction_milli is 1000), and it gets all or none
    group: str = ""  # whose limits apply in addition to the owner's
    owner_weight: int = 100  # the owner's share among owners, if the pool preempts equals
    weight: int = 100  # this lease's share among its owner's leases
    seat: str = ""  # the hub seat that it draws on; empty: none
    allowed_devices: tuple[str, ...] = ()  # the devices of the pool that it may use; empty: all
    # Its priority while its budget lasts; None if that is `priority`
    own_priority: int | None = None
    uid: int | None = None  # the system user that runs it, who may differ from the owner; None for a seat
    # If not 0, the lease is a claim. It has no process and no gate, is never suspended, and ends with its pin this long after its grant
    claim_ms: int = 0

    def is_same_user(self, other: "LeaseSpec") -> bool:
        """Return whether both leases belong to the same system user and owner. Only then may messages about one mention the other."""
        return (self.owner, self.uid) == (other.owner, other.uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """A read-only view of one lease, for status and for the ledger."""

    spec: LeaseSpec
    state: LeaseState
    generation: int  # grows with every state change; results with an older one are stale
    device_id: str | None  # where its reservation is (HOLDING), else where it was last
    saved_mib: int  # in host memory while suspended
    used_mib: int  # last measured use on the device; before the first measurement, what was resumed or 0
    busy: bool
    since_ms: int  # when it entered this state
    last_active_ms: int
    operation_id: int | None
    reason: str  # reason code of the last change
    sentence: str  # the same, for people
    reserved_mib: int = 0  # its reservation on `device_id` (an unattached lease may have one in advance)
    is_measured: bool = False  # `used_mib` was measured since it arrived on its devices
    host_reserved_mib: int = 0  # host memory reserved for a suspend in progress
    suspend_requested: bool = False  # its suspend was requested, and waits for a swap channel
    device_ids: tuple[str, ...] = ()  # all its devices, `device_id` first
    pinned_until_ms: int = 0  # not suspended for others or for being idle before this
    resume: Span | None = None  # how long its resume will take, if it is suspended
    # A sentence that explains why it cannot be suspended while it is resident; empty if it can
    unsuspendable_reason: str = ""
    gate_closed: bool = False  # its gate is closed for an older ticket, so its next cell must ask before it runs
    at_gate: bool = False  # its next cell waits at the gate
    left_behind: str = ""  # description of its ended kernel's processes that still have device memory
    revoked: bool = False  # its seat has ended, so it cannot become resident without a new seat
    ends_ms: int | None = None  # when a revoked lease's processes are ended
    demand_milli: int = 0  # learnt: how much of each device it uses while busy, thousandths
    expected_until_ms: int = 0  # its next cell is expected before this; 0: no cell expected
    expected_by: str = ""  # the sign that announced the cell (`Sign`)
    expected_milli: int = 0  # how likely that cell is, thousandths
    came_early: bool = False  # it was resumed for an expected cell, and none has run yet
    deadline_ms: int | None = None  # when its first device goes away, if in the future
    lost_because: str = ""  # a sentence that explains why it cannot be saved before the deadline; empty if it can


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How long a lease's cell takes, in thousandths of the time it would take with the device to itself."""

    milli: int = 1000
    low_milli: int = 1000  # the bounds of an 80 % interval
    high_milli: int = 1000
    brief: str = ""  # why, without a subject: "runs next to eval.ipynb, about 1.4 times as long as alone"; empty: not slowed down

    @property
    def sentence(self) -> str:
        """The slowdown as a sentence, or an empty string if `brief` is empty."""
        return f"its cell {self.brief}" if self.brief else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A read-only view of one device. It is `over_committed` if reservations and other processes add up to more than can be leased."""

    device_id: str
    name: str
    pool: str | None
    memory_mib: int
    leasable_mib: int
    reserved_mib: int
    stranger_mib: int
    over_committed: bool
    lost: bool
    draining: bool = False  # admits no lease; its leases leave as soon as they can
    why_not: str = ""  # a sentence that explains why leases on it cannot be suspended
    why_no_move: str = ""  # a sentence that explains why state saved from it can only resume there
    demand_milli: int = 0  # total demand of its busy leases, thousandths of the device
    deadline_ms: int | None = None  # when it goes away, while it is drained


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDelay:
    """How long a pool's tickets have waited.

    `over_bound` is the number of tickets that have waited longer than other leases' fair turns can explain.
    """

    longest_ms: int = 0  # the longest wait
    over_bound: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketView:
    """A place in the queue. `position` starts at 1 in each pool. It is None if the lease already has its room and is being resumed."""

    lease_id: str
    position: int | None
    asked_ms: int
    passed_over: int
    reason: str  # why it waits, a code
    sentence: str  # why it waits, for people
    blockers: tuple[str, ...] = field(default=())  # lease ids it waits for
    urgent: bool = False  # precedes other tickets of its priority
    need_mib: int = 0  # its reservation once it is served
    kept_on: tuple[str, ...] = ()  # devices where room is kept for it, as it was passed over too often
    expected: Span | None = None  # its remaining wait; None: unknown
