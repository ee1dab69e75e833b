"""Defines what the arbiter asks its driver (broker or simulator) to do.

Recorded event logs contain digests of the names of effects and their fields, so these names are part of a file format.
"""

from dataclasses import dataclass

from fractional_gpu.core.model import Breach, LeaseState


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Base class of all effects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEffect(Effect):
    """Base class of effects on one lease."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEffect(LeaseEffect):
    """Base class of effects on a lease and its devices."""

    device_ids: tuple[str, ...]

    @property
    def device_id(self) -> str:
        return self.device_ids[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAdmitted(LeaseEffect):
    """A request for a lease was accepted. The lease has no kernel process yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRefused(LeaseEffect):
    """A request for a lease was refused. `sentence` says what was requested, what is available and what to do."""

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(LeaseEffect):
    """A request about an existing lease cannot be granted at the moment."""

    reason: str
    sentence: str
    about: str = ""  # what was requested: "suspend" (also if empty), "pin", "resize" or "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(DeviceEffect):
    """The lease now has room on its devices. Open its gate, so that its cells can run."""

    reserved_mib: int  # its reservation on each device, which is the kernel's memory limit for now


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend(DeviceEffect):
    """Suspend the lease. Answer with `SuspendFinished`, using the same operation id and generation."""

    operation_id: int
    generation: int
    host_mib: int  # reserved on the host for what will be saved
    preempt: bool = False  # suspend the lease although it is busy; do not wait for its gate or the end of its cell
    between_cells: bool = False  # no cell runs; the next one waits at the closed gate
    for_lease_id: str = ""  # the lease that needs the room, if any


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGate(LeaseEffect):
    """A resident lease must make room when its current cell ends. Let that cell continue, but hold back the next one.

    Send `Wanted` when the kernel asks to run the next cell, or starts it (if it lacks our extension). `Granted` opens the gate again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink(LeaseEffect):
    """Have an idle kernel free its cached device memory, because host memory is running low. Always answer with `Shrunk`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(DeviceEffect):
    """Resume the lease on its devices, with `reserve_mib` reserved on each. Answer with `ResumeFinished`."""

    operation_id: int
    generation: int
    reserve_mib: int
    from_device_ids: tuple[str, ...] = ()  # where it was checkpointed; empty: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class CapBreached(LeaseEffect):
    """The lease uses more than its cap. Inform the kernel. With `Breach.KILL`, also end the lease's processes that use the device."""

    action: Breach
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(LeaseEffect):
    """The lease's size or its reservation has changed. Set the kernel's memory limit."""

    fraction_milli: int
    reserve_mib: int  # its cap
    reserved_mib: int  # its reservation on each device now; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned(LeaseEffect):
    """The lease won't be suspended to make room, or for being idle, until `until_ms`. If this is 0, the lease is no longer pinned."""

    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendAnnounced(LeaseEffect):
    """An idle lease will be suspended at `at_ms`, unless it runs a cell or is pinned before then."""

    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserNotice(LeaseEffect):
    """Tell the lease's user in the notebook, right away, that the device will become unavailable, or that it will stay available after all.

    The arbiter also records this in the lease's history.
    """

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAgain(LeaseEffect):
    """The lease is quarantined. Find out its real state and answer with `TruthFound`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcesses(LeaseEffect):
    """The pool's `revoked_ttl_ms` has passed since the seat ended. End the lease's processes. This is sent again until they are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded(LeaseEffect):
    """The lease was released or has expired. Forget it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged(LeaseEffect):
    old: LeaseState | None
    new: LeaseState
    generation: int
    device_id: str | None
    saved_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(LeaseEffect):
    """A new line in the lease's history, which users can read."""

    at_ms: int
    reason: str  # machine-readable, e.g. "suspend.idle", "suspend.needed-by", "wait.busy-neighbour"
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketsChanged(Effect):
    """The order, reasons or expected waits in a pool's queue have changed, so anything shown for waiting cells can be updated."""

    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt(Effect):
    """Send `Tick` at this time instead of the time in the previous `WakeAt`. If the time is None, no tick is needed."""

    at_ms: int | None
