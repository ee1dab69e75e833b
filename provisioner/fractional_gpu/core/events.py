"""Defines the events that the arbiter handles. Each carries its time as `at_ms`, which is the arbiter's only clock.

This clock never goes backwards: if `at_ms` is earlier than the last event's time, the arbiter uses the last event's time. Event logs
contain the names of events and their fields, so these names are part of a file format.
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
        """The leases affected by the event."""
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
    """A device is available, for the first time or again after a loss. Processes without a lease use `stranger_mib` of its memory."""

    device: DeviceSpec
    stranger_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost(Event):
    """A device fell off the bus or does not respond. It admits no leases until the next `DeviceSeen`."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDrained(Event):
    """An administrator drains a device. It admits no leases. Its idle leases are suspended, as are its busy ones if `evict_busy` is set.

    If `deadline_ms` is given, the device becomes unavailable at that time (`revoke`). Before then, all leases whose state can be saved are
    suspended, even during a cell, and users of other leases get a `UserNotice`. After the deadline, this is treated as an ordinary drain. A
    later event replaces this one.
    """

    device_id: str
    evict_busy: bool = False
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUndrained(Event):
    """A drain is over. The device admits leases again, and stays available."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfigured(Event):
    """A pool was added, or its policy changed."""

    pool: PoolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemorySeen(Event):
    """Suspended state may use `budget_mib` of host memory in total, including the part already in use.

    If more than that is in use, leases are resumed early until what is left fits.
    """

    budget_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequested(Event):
    """A new lease is requested. The answer is `LeaseAdmitted` or `LeaseRefused`.

    Set `needs_reservation` for a kernel without a gate. It gets a ticket at once.
    """

    spec: LeaseSpec
    needs_reservation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecovered(Event):
    """A new broker has found the real state of a lease from the ledger. The lease is never refused, even if it over-commits a device."""

    spec: LeaseSpec
    state: LeaseState  # unattached, unarmed, resident, suspended or quarantined
    generation: int
    device_id: str | None = None
    saved_mib: int = 0
    busy: bool = False
    device_ids: tuple[str, ...] = ()  # all its devices, `device_id` first; if empty, `device_id` is the only one
    pinned_until_ms: int = 0
    sentence: str = ""  # for people, if the state needs an explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached(LeaseEvent):
    """The lease has a live process. It becomes resident if it already has a reservation. Otherwise, it has no CUDA context (`NO_CONTEXT`).

    If the previous kernel left processes behind, the lease keeps its state and is now used by the new kernel.
    """

    gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited(LeaseEvent):
    """The kernel process has ended. The lease gives up everything it held and becomes unattached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind(LeaseEvent):
    """The kernel process has ended, but its child processes still hold memory on a device or have memory saved on the host.

    The lease keeps its reservation and is treated as busy until `ProcessExited` or `LeaseReleased` reports that they have ended, or
    `Attached` reports a new kernel process. A lease with saved memory gets a ticket. `what` describes the processes, and the event is sent
    again if they change. It is ignored for a lease that has neither a device nor saved memory.
    """

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(LeaseEvent):
    """The lease has ended. A second release is ignored. `reason` is a code for the lease's history and the counters."""

    reason: str = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatEnded(LeaseEvent):
    """The lease's seat ended at `since_ms`, so the lease is revoked. A second event is ignored.

    A lease without a process ends at once. Any other lease loses its ticket, is suspended as soon as possible, even during a cell, and ends
    when its process does. It cannot become resident until `SeatRenewed`. When the pool's `revoked_ttl_ms` has passed since `since_ms`, the
    arbiter emits `EndProcesses`.
    """

    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatRenewed(LeaseEvent):
    """A revoked lease gets a new seat, and is no longer revoked. The event is ignored for any other lease."""

    seat: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityChanged(LeaseEvent):
    """The lease's priority changes, because its owner's or group's budget is used up or available again. Its ticket keeps its age."""

    priority: int | None  # None restores the lease's own priority
    sentence: str  # explains the change in the lease's story


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(LeaseEvent):
    """The kernel needs the GPU. The arbiter files a ticket, or answers with `Granted` if the lease is already resident."""

    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted(LeaseEvent):
    """No cell is waiting any more, because the wait was interrupted or the client is gone.

    The ticket is withdrawn. A resume that has already begun still runs to completion.
    """

    interrupted: bool = False  # the wait was interrupted before the GPU or an answer came


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyChanged(LeaseEvent):
    """The kernel became busy or idle. `by_cell` is true if a cell is keeping it busy, or might be (rather than other messages)."""

    busy: bool
    by_cell: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The device memory that a lease's process tree is using now, in MiB.

    `util_milli` is the mean utilisation of its devices over the last period, in thousandths of a device. It is None if unknown, and ignored
    unless the lease is busy.
    """

    lease_id: str
    used_mib: int
    util_milli: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesMeasured(Event):
    """Measurements of several leases, at most one per lease. The queue is served once, after all of them have been handled."""

    measurements: tuple[Measurement, ...]

    @property
    def lease_ids(self) -> tuple[str, ...]:
        return tuple(one.lease_id for one in self.measurements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected(LeaseEvent):
    """The lease's next cell is likely to start before `until_ms`.

    `confidence_milli` is how probable the sender thinks this is, in thousandths.
    """

    until_ms: int
    sign: Sign
    confidence_milli: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk(LeaseEvent):
    """The answer to `Shrink`. `used_mib` is how much the process tree uses now, or None if its caches could not be freed."""

    generation: int
    used_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointable(LeaseEvent):
    """The broker has found out whether the lease's process can be checkpointed.

    If the process can never be checkpointed, `why_not` is a sentence that explains why. Otherwise, it is empty.
    """

    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPressureSeen(LeaseEvent):
    """The cgroup that holds the lease's saved state is short of host memory. If `pressed` is false, it has enough again.

    While the cgroup is short of memory, the arbiter resumes the lease early if it can.
    """

    pressed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRequested(LeaseEvent):
    """A user or administrator (`by`) asks to suspend the lease now. It must be resident and idle. The answer is `Suspend` or `Declined`."""

    by: str = "its user"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested(LeaseEvent):
    """An administrator asks to move an idle, resident lease to `device_id` or, if that is None, to any other device of its pool.

    The answer is `Declined` with `about` set to "move", or `Suspend`, after which the lease resumes on its target without a further
    request. A move ends the lease's pin.
    """

    device_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested(LeaseEvent):
    """A request to change the size of a lease. The answer is `Declined`, or `Resized` (either at once or when there is room).

    A resident lease that grows keeps its reservation until its device has room for more, and idle neighbours are suspended to make room. An
    idle lease that can be moved goes to a device with room. A new request replaces an older one that is still waiting.
    """

    fraction_milli: int
    reserve_mib: int
    request_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequested(LeaseEvent):
    """A request to keep the lease resident for `duration_ms` from now. It replaces an earlier pin. The answer is `Pinned` or `Declined`."""

    duration_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinRequested(LeaseEvent):
    """A user or administrator (`by`) ends the pin. The unused time is returned to the owner's budget."""

    by: str = "its user"


class SuspendOutcome(StrEnum):
    SAVED = "saved"  # checkpointed: `saved_mib` are in host memory
    NOTHING_TO_SAVE = "nothing-to-save"  # no CUDA context: the lease becomes unarmed and gives its reservation back
    ABORTED = "aborted"  # rolled back (became busy, gate did not close, lock timed out): still resident
    REFUSED = "refused"  # not possible now: still resident, and not tried again for a while
    NO_MEMORY = "no-memory"  # like REFUSED, because its job, pod or host does not have the memory for the saved state
    IMPOSSIBLE = "impossible"  # cannot be checkpointed: still resident, and not tried again while this process lives
    UNKNOWN = "unknown"  # the lease is quarantined


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryNeeded(LeaseEvent):
    """A suspend in progress has to save `need_mib`, which is more than was reserved. The arbiter reserves it if the host has room."""

    operation_id: int
    generation: int
    need_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendFinished(LeaseEvent):
    """The answer to `Suspend`. If its operation id or generation does not match the suspend in progress, it is recorded but ignored."""

    operation_id: int
    generation: int
    outcome: SuspendOutcome
    saved_mib: int = 0
    need_mib: int = 0  # what must be saved, if nothing was saved because this exceeds the reservation on the host
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
    """The answer to `LookAgain`, with the real state of a quarantined lease, or with QUARANTINED if the driver couldn't find out."""

    generation: int
    state: LeaseState
    device_id: str | None = None
    saved_mib: int = 0
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed. The driver sends a tick when the last `WakeAt` is due. Early and extra ticks are harmless."""
