"""What the arbiter asks its driver (broker or simulator) to do.

Recorded event logs contain digests over the names of effects and their fields, so these names are a format.
"""

from dataclasses import dataclass

from fractional_gpu.core.model import Breach, LeaseState


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Base of all effects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEffect(Effect):
    """Base of effects about one lease."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEffect(LeaseEffect):
    """Base of effects about a lease on devices."""

    device_ids: tuple[str, ...]

    @property
    def device_id(self) -> str:
        """The first of the devices."""
        return self.device_ids[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAdmitted(LeaseEffect):
    """The request was accepted; the lease is unattached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRefused(LeaseEffect):
    """The request was refused: a code, and a sentence with what was requested, what there is and what to do."""

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(LeaseEffect):
    """A request about an existing lease (suspend, want) cannot be met now."""

    reason: str
    sentence: str
    about: str = ""  # the request: "suspend" (also when empty), "pin", "resize" or "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted(DeviceEffect):
    """The lease is resident on its devices: open the gate."""

    reserved_mib: int  # on each: what the kernel's own memory limit may be for now


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend(DeviceEffect):
    """Suspend the lease; answer with `SuspendFinished` carrying the same operation id and generation."""

    operation_id: int
    generation: int
    host_mib: int  # reserved on the host for what will be saved
    preempt: bool = False  # the lease is busy and is suspended all the same: do not wait for its gate or its idleness
    between_cells: bool = False  # no cell runs; the next one waits at the closed gate
    for_lease_id: str = ""  # the lease that needs the room, if one does


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGate(LeaseEffect):
    """The resident lease makes room at the end of its cell: make its next cell ask before it runs, and let the running one continue.

    A cell that asks is `Wanted`; where no extension of ours guards the cells, so is one that begins. `Granted` opens the gate again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink(LeaseEffect):
    """Make the idle kernel give cached device memory back, as host memory is short. Always answered with `Shrunk`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(DeviceEffect):
    """Resume the lease on its devices, on each of which `reserve_mib` are reserved for it; answer with `ResumeFinished`."""

    operation_id: int
    generation: int
    reserve_mib: int
    from_device_ids: tuple[str, ...] = ()  # where it was checkpointed; empty: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class CapBreached(LeaseEffect):
    """The lease uses more than its cap: inform the kernel; with `Breach.KILL`, end its processes that use the device."""

    action: Breach
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(LeaseEffect):
    """The lease has another size, or (by measured use) another reservation: set the kernel's memory limit."""

    fraction_milli: int
    reserve_mib: int  # its cap
    reserved_mib: int  # what it holds on each of its devices now; 0: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned(LeaseEffect):
    """The lease is not suspended for others, nor for being idle, before `until_ms`; 0: it is not pinned (any more)."""

    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendAnnounced(LeaseEffect):
    """An idle lease will be suspended at `at_ms` unless it runs something or is pinned before."""

    at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserNotice(LeaseEffect):
    """Tell the lease's user something at once, in the notebook: its device goes away, or no longer does. The story has it, too."""

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAgain(LeaseEffect):
    """The lease is quarantined: find out its real state and answer with `TruthFound`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcesses(LeaseEffect):
    """A revoked lease has run out of time: end its processes. Repeated until they have ended; the lease ends with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded(LeaseEffect):
    """The lease is over (released or expired): forget it."""

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
    """A line of the lease's story."""

    at_ms: int
    reason: str  # machine-readable, e.g. "suspend.idle", "suspend.needed-by", "wait.busy-neighbour"
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketsChanged(Effect):
    """The queue of a pool changed (order, reasons or expected waits): waiting cells may redraw."""

    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt(Effect):
    """Send `Tick` at this time; replaces the previous one. None: no tick needed."""

    at_ms: int | None
