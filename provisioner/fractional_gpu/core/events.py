"""The arbiter's inputs, as data. `at_ms` is the time of the event; the arbiter has no other clock.

The arbiter's time never goes back: an earlier `at_ms` than the last one counts as the last one. Event logs hold the names of events and
their fields, so these names are a format.
"""

from dataclasses import dataclass
from enum import StrEnum

from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec, Sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    at_ms: int

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """The leases that the event is about."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEvent(Event):
    """Base of events about one lease."""

    lease_id: str

    @property
    def lease_ids(self) -> tuple[str, ...]:
        return (self.lease_id,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeen(Event):
    """A device is available, perhaps again after it was lost; processes without a lease use `stranger_mib` of it."""

    device: DeviceSpec
    stranger_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost(Event):
    """A device fell off the bus or is not responding: it admits no lease until it is seen again."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDrained(Event):
    """An administrator drains a device: it admits no lease, and leases on it are suspended; with `evict_busy` busy ones too.

    `deadline_ms`: the device goes away then (`revoke`). What can be saved before is saved, in the middle of a cell if need be, and the
    users of the rest are told (`UserNotice`). After the deadline it is drained like any other. A later event replaces this one.
    """

    device_id: str
    evict_busy: bool = False
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUndrained(Event):
    """The device admits leases again, and no longer goes away."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfigured(Event):
    """A pool's policy, new or changed."""

    pool: PoolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemorySeen(Event):
    """Total host memory for suspended state, MiB, including what is already saved. If more is saved, leases resume early until it fits."""

    budget_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested(Event):
    """A new lease. Answered by `LeaseAdmitted` or `LeaseRefused`. `needs_reservation`: an ungated kernel wants its ticket now."""

    spec: LeaseSpec
    needs_reservation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecovered(Event):
    """The real state of a lease from the ledger, as a starting broker found it. Never refused, even if it over-commits a device."""

    spec: LeaseSpec
    state: LeaseState  # unattached, unarmed, resident, suspended or quarantined
    generation: int
    device_id: str | None = None
    saved_mib: int = 0
    busy: bool = False
    device_ids: tuple[str, ...] = ()  # all its devices, `device_id` first; empty: only that one
    pinned_until_ms: int = 0
    sentence: str = ""  # for people, if the state alone does not say enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached(LeaseEvent):
    """The lease has a live process (unattached -> unarmed, or resident if it holds a reservation already).

    If the last kernel left processes behind, the lease keeps its state and belongs to the new kernel.
    """

    gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited(LeaseEvent):
    """The kernel process has ended: everything the lease held is freed, and the lease becomes unattached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind(LeaseEvent):
    """The kernel process is gone, but processes that it started still have device memory, on a device or saved on the host.

    The lease keeps its reservation and counts as busy until `ProcessExited` or `LeaseReleased` reports that they are gone, or `Attached`
    that the lease has a new kernel process. A saved one gets a ticket. `what`: the processes, for people. Sent again when
    they change. A lease without a device or saved memory ignores it.
    """

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(LeaseEvent):
    """The lease is over. A second release is ignored. `reason`: a word for its story and the counters."""

    reason: str = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatEnded(LeaseEvent):
    """The lease's seat ended at `since_ms`: the lease is revoked. A second event is ignored.

    A lease without a process ends at once. Any other is suspended as soon as possible, in the middle of a cell, too, has no ticket from
    then on, and ends with its process. It is not resident again before `SeatRenewed`. `EndProcesses` follows `revoked_ttl_ms` of its
    pool after `since_ms`.
    """

    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatRenewed(LeaseEvent):
    """A revoked lease gets a new seat and is like any other lease again. Ignored for a lease that is not revoked."""

    seat: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityChanged(LeaseEvent):
    """The lease's priority changes because its budget is used up or available again. It keeps its place by age."""

    priority: int | None  # None: back to its own
    sentence: str  # why, for its story


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(LeaseEvent):
    """The kernel needs the GPU: files a ticket unless the lease is resident (then `Granted` again)."""

    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted(LeaseEvent):
    """No cell waits any more (interrupt, client gone): the ticket is withdrawn; a resume under way is completed."""

    interrupted: bool = False  # its wait was interrupted before it got the GPU or an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyChanged(LeaseEvent):
    """The set of busy messages became non-empty or empty. `by_cell`: a cell is, or may be, among them."""

    busy: bool
    by_cell: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Device memory that a lease's process tree uses now, MiB.

    `util_milli` is its mean utilisation over the last period, thousandths of one device (the sum over its devices divided by their
    number); None: not known. It counts only if the lease is busy.
    """

    lease_id: str
    used_mib: int
    util_milli: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesMeasured(Event):
    """One sample of the leases, each at most once. The queue is served once, after all measurements."""

    measurements: tuple[Measurement, ...]

    @property
    def lease_ids(self) -> tuple[str, ...]:
        return tuple(one.lease_id for one in self.measurements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected(LeaseEvent):
    """A sign that the lease's next cell comes before `until_ms`. `confidence_milli`: how sure the sender is, thousandths."""

    until_ms: int
    sign: Sign
    confidence_milli: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk(LeaseEvent):
    """The answer to `Shrink`: what the lease's process tree uses without its caches, MiB; None: it could not give them back now."""

    generation: int
    used_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointable(LeaseEvent):
    """Whether the lease's process can be checkpointed. `why_not`: why it never can be, a sentence; empty: it can."""

    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPressureSeen(LeaseEvent):
    """Whether host memory is short where the saved state of this lease lies (its control group): the lease comes back early if it can."""

    pressed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRequested(LeaseEvent):
    """`by` asked for this lease to be suspended now (it must be resident and idle). Answered by `Suspend` or `Declined`."""

    by: str = "its user"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(LeaseEvent):
    """An administrator moves an idle, resident lease to another device of its pool now: to this one, or to any (None).

    Answered by `Suspend`, after which the lease resumes on its target automatically, or by `Declined` about `move`. It ends a pin.
    """

    device_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested(LeaseEvent):
    """Another size for a lease that exists. Answered by `Resized`, at once or when there is room, or by `Declined`.

    A growing resident lease keeps its reservation until its device has room for more; idle neighbours are suspended for it. An idle lease
    that may move goes where there is room. A new request replaces an older one that still waits.
    """

    fraction_milli: int
    reserve_mib: int
    request_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequested(LeaseEvent):
    """Keep the lease resident for `duration_ms` from now. Answered by `Pinned` or `Declined`. Replaces an earlier pin."""

    duration_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinRequested(LeaseEvent):
    """`by` ends the pin; the unused time returns to the owner's budget."""

    by: str = "its user"


class SuspendOutcome(StrEnum):
    SAVED = "saved"  # checkpointed: saved_mib in host memory
    NOTHING_TO_SAVE = "nothing-to-save"  # no CUDA context: the reservation is given back, lease unarmed
    ABORTED = "aborted"  # rolled back (became busy, gate did not close, lock timed out): resident
    REFUSED = "refused"  # not now: resident, and not tried again for a while
    NO_MEMORY = "no-memory"  # as REFUSED: the memory of its job or pod, or of the host, cannot hold what would be saved
    IMPOSSIBLE = "impossible"  # cannot be checkpointed: resident, and not tried again while this process lives
    UNKNOWN = "unknown"  # quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryNeeded(LeaseEvent):
    """A suspend under way counted that it would save `need_mib`, more than is reserved; the arbiter reserves it if the host has it."""

    operation_id: int
    generation: int
    need_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendFinished(LeaseEvent):
    """The answer to `Suspend`. Stale (operation or generation differ) answers are ignored and recorded."""

    operation_id: int
    generation: int
    outcome: SuspendOutcome
    saved_mib: int = 0
    need_mib: int = 0  # nothing was saved, because so much would have been: more than was reserved on the host
    sentence: str = ""


class ResumeOutcome(StrEnum):
    RESTORED = "restored"  # resident
    NOT_STARTED = "not-started"  # the device turned out not to have the room: still suspended, ticket kept
    UNKNOWN = "unknown"  # quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFinished(LeaseEvent):
    operation_id: int
    generation: int
    outcome: ResumeOutcome
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthFound(LeaseEvent):
    """The answer to `LookAgain`: a quarantined lease's real state. Quarantined with a sentence: the driver failed."""

    generation: int
    state: LeaseState
    device_id: str | None = None
    saved_mib: int = 0
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed; sent when the last `WakeAt` is due (early and extra ticks do no harm)."""
