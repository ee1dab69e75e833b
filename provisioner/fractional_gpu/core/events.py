"""The arbiter's inputs, as data. `at_ms` is the time of the event; the arbiter has no other clock.

The arbiter's clock never goes back: an `at_ms` earlier than the last one counts as the last one. Event logs contain the names of events and
of their fields, so these names are a file format.
"""

from dataclasses import dataclass
from enum import StrEnum

from fractional_gpu.core.model import DeviceSpec, LeaseSpec, LeaseState, PoolSpec, Sign


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class of all events."""

    at_ms: int

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """The leases that the event concerns."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEvent(Event):
    """Base class of events about one lease."""

    lease_id: str

    @property
    def lease_ids(self) -> tuple[str, ...]:
        return (self.lease_id,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeen(Event):
    """A device is available, for the first time or after it was lost. Processes without a lease use `stranger_mib` of it."""

    device: DeviceSpec
    stranger_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost(Event):
    """A device fell off the bus or does not respond. It admits no lease until the next `DeviceSeen`."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDrained(Event):
    """An administrator drains a device: it admits no lease, and its leases are suspended; with `evict_busy`, busy ones too.

    At `deadline_ms` the device goes away (`revoke`). Until then, leases that can be saved are suspended, even during a cell, and users of
    the others get a `UserNotice`. After the deadline the drain continues like one without a deadline. A later event replaces this one.
    """

    device_id: str
    evict_busy: bool = False
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUndrained(Event):
    """The drain ends: the device admits leases again, and does not go away."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfigured(Event):
    """A pool was added, or its policy changed."""

    pool: PoolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemorySeen(Event):
    """The total host memory for suspended state, MiB, used part included. If more is saved, leases resume early until the rest fits."""

    budget_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested(Event):
    """A new lease. Answered by `LeaseAdmitted` or `LeaseRefused`. `needs_reservation`: an ungated kernel, which files its ticket now."""

    spec: LeaseSpec
    needs_reservation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecovered(Event):
    """The real state of a lease in the ledger, as found when the broker starts. Never refused, even if it over-commits a device."""

    spec: LeaseSpec
    state: LeaseState  # unattached, unarmed, resident, suspended or quarantined
    generation: int
    device_id: str | None = None
    saved_mib: int = 0
    busy: bool = False
    device_ids: tuple[str, ...] = ()  # all its devices, `device_id` first; empty: only `device_id`
    pinned_until_ms: int = 0
    sentence: str = ""  # for people, if the state needs an explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached(LeaseEvent):
    """The lease has a live process: it becomes unarmed, or resident if it already has a reservation.

    If the last kernel left processes behind, the lease keeps its state and belongs to the new kernel.
    """

    gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited(LeaseEvent):
    """The kernel process has ended. The lease gives back all that it held and becomes unattached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind(LeaseEvent):
    """The kernel process has ended, but its child processes still have memory on a device, or saved on the host.

    The lease keeps its reservation and counts as busy until `ProcessExited` or `LeaseReleased` reports that they have ended, or `Attached`
    reports a new kernel process. A saved lease gets a ticket. `what` describes the processes; a change is sent as another event. Ignored
    for a lease without a device or saved memory.
    """

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(LeaseEvent):
    """The lease is over. A second release is ignored. `reason` is a word for its story and the counters."""

    reason: str = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatEnded(LeaseEvent):
    """The lease's seat ended at `since_ms`: the lease is revoked. A second event is ignored.

    A lease without a process ends at once. Any other lease is suspended as soon as possible, even during a cell, loses its ticket,
    and ends with its process. It cannot become resident before `SeatRenewed`. `EndProcesses` follows the pool's `revoked_ttl_ms` after
    `since_ms`.
    """

    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatRenewed(LeaseEvent):
    """A revoked lease gets a new seat, and is no longer revoked. Ignored for any other lease."""

    seat: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityChanged(LeaseEvent):
    """The lease's priority changes, because its budget is used up or available again. Its ticket keeps its age."""

    priority: int | None  # None: its own priority
    sentence: str  # why, for its story


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(LeaseEvent):
    """The kernel needs the GPU. Files a ticket; if the lease is resident, answers with `Granted` instead."""

    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted(LeaseEvent):
    """No cell waits any more (interrupt, lost client). The ticket is withdrawn; a resume in progress is completed."""

    interrupted: bool = False  # the wait was interrupted before the GPU or an answer came


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyChanged(LeaseEvent):
    """The kernel became busy or idle. `by_cell`: a cell is, or may be, among the messages that keep it busy."""

    busy: bool
    by_cell: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Device memory that a lease's process tree uses now, MiB.

    `util_milli` is its mean utilisation over the last period, thousandths of a device (the mean of its devices); None: unknown. It is
    ignored unless the lease is busy.
    """

    lease_id: str
    used_mib: int
    util_milli: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesMeasured(Event):
    """A sample of several leases, each at most once. The queue is served once, after all measurements."""

    measurements: tuple[Measurement, ...]

    @property
    def lease_ids(self) -> tuple[str, ...]:
        return tuple(one.lease_id for one in self.measurements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected(LeaseEvent):
    """A sign that the lease's next cell will come before `until_ms`. `confidence_milli`: the sender's confidence, thousandths."""

    until_ms: int
    sign: Sign
    confidence_milli: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk(LeaseEvent):
    """The answer to `Shrink`: what the process tree uses without its caches, MiB; None: it could not free them now."""

    generation: int
    used_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointable(LeaseEvent):
    """Whether the lease's process can be checkpointed. `why_not`: why it never can be, a sentence; empty: it can be."""

    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPressureSeen(LeaseEvent):
    """Whether the control group with the lease's saved state is short of host memory. If so, the lease resumes early if it can."""

    pressed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRequested(LeaseEvent):
    """`by` asks for a suspend of this lease now; it must be resident and idle. Answered by `Suspend` or `Declined`."""

    by: str = "its user"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(LeaseEvent):
    """An administrator moves an idle, resident lease to another device of its pool: to `device_id`, or to any (None).

    Answered by `Suspend`, after which the lease resumes on its target automatically, or by `Declined` about `move`. Ends a pin.
    """

    device_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested(LeaseEvent):
    """A new size for an existing lease. Answered by `Resized`, at once or when there is room, or by `Declined`.

    A growing resident lease keeps its reservation until its device has room for more; idle neighbours are suspended for it. An idle lease
    that may move goes to a device with room. A new request replaces an older one that still waits.
    """

    fraction_milli: int
    reserve_mib: int
    request_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequested(LeaseEvent):
    """Keep the lease resident for `duration_ms` from now. Replaces an earlier pin. Answered by `Pinned` or `Declined`."""

    duration_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinRequested(LeaseEvent):
    """`by` ends the pin. The unused time is returned to the owner's budget."""

    by: str = "its user"


class SuspendOutcome(StrEnum):
    SAVED = "saved"  # checkpointed: `saved_mib` are in host memory
    NOTHING_TO_SAVE = "nothing-to-save"  # no CUDA context: the lease becomes unarmed and gives its reservation back
    ABORTED = "aborted"  # rolled back (became busy, gate did not close, lock timed out): still resident
    REFUSED = "refused"  # not possible now: still resident, and not tried again for a while
    NO_MEMORY = "no-memory"  # like REFUSED: its job, pod or host does not have the memory for the saved state
    IMPOSSIBLE = "impossible"  # cannot be checkpointed: still resident, and not tried again while this process lives
    UNKNOWN = "unknown"  # the lease is quarantined


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryNeeded(LeaseEvent):
    """A suspend in progress must save `need_mib`, more than is reserved. The arbiter reserves it if the host has room."""

    operation_id: int
    generation: int
    need_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendFinished(LeaseEvent):
    """The answer to `Suspend`. A stale one (operation or generation differs) is recorded and ignored."""

    operation_id: int
    generation: int
    outcome: SuspendOutcome
    saved_mib: int = 0
    need_mib: int = 0  # what must be saved, if that was more than was reserved on the host and so nothing was saved
    sentence: str = ""


class ResumeOutcome(StrEnum):
    RESTORED = "restored"  # now resident
    NOT_STARTED = "not-started"  # the device did not have room after all: still suspended, keeps its ticket
    UNKNOWN = "unknown"  # the lease is quarantined


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFinished(LeaseEvent):
    operation_id: int
    generation: int
    outcome: ResumeOutcome
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthFound(LeaseEvent):
    """The answer to `LookAgain`: a quarantined lease's real state. QUARANTINED with a sentence means that the driver failed."""

    generation: int
    state: LeaseState
    device_id: str | None = None
    saved_mib: int = 0
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed. Sent when the last `WakeAt` is due; early and extra ticks are harmless."""
