"""Messages about the state and history of leases, and about the state of devices and the host.

A lease's status contains the arbiter's unmodified view of it (`core.model`). Kernels do not load this module on startup.
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from fractional_gpu.core.forecasts.advice import Advice
from fractional_gpu.core.forecasts.outcomes import ForecastError
from fractional_gpu.core.model import LeaseSpec, LeaseView, Slowdown, Span
from fractional_gpu.core.units import format_memory
from fractional_gpu.protocol.messages import KERNEL, Workload


class ShareAdvice(Struct, frozen=True, kw_only=True):
    """Advice on the share of a notebook or, if none is named, of a server. It is for information only."""

    pool: str
    owner: str
    seated: bool = False  # whether the owner is a user of the hub and not of the machine
    notebook: str
    figures: Advice
    sentence: str = ""  # the advice for people, or "" if there is none
    brief: str = ""


class StoryLine(Struct, frozen=True, kw_only=True):
    """One event in a lease's history. `at_ms` is the time since the epoch."""

    at_ms: int
    reason: str
    sentence: str


class Story(Struct, frozen=True, kw_only=True):
    """The recorded events of a lease and their reasons, oldest first. `omitted` is the number of older lines that are left out."""

    lease_id: str
    lines: list[StoryLine] = []
    omitted: int = 0
    slowdown: Slowdown = Slowdown()  # as in LeaseStatus, now


class UsagePoint(Struct, frozen=True, kw_only=True):
    """The state of a lease from `at_ms` (since the epoch) until the next point."""

    at_ms: int
    state: str
    used_mib: int
    saved_mib: int


class History(Struct, frozen=True, kw_only=True):
    """The state of a lease over time, oldest first."""

    lease_id: str
    cap_mib: int
    points: list[UsagePoint] = []


class Neighbour(Struct, frozen=True, kw_only=True):
    """Another lease on the same device. Its `label` is only set if both leases belong to the same user."""

    fraction_milli: int
    reserved_mib: int
    state: str
    busy: bool
    label: str = ""


class LeftProcess(Struct, frozen=True, kw_only=True):
    """A process that has outlived its kernel and still holds device memory.

    `used_mib` is 0 if the memory is saved on the host or its size is unknown.
    """

    pid: int
    command: str
    used_mib: int


class KernelFacts(Struct, frozen=True, kw_only=True):
    """What the broker knows about a lease's kernel. These fields are part of the lease's status and of its ledger record."""

    kernel_id: str = ""
    note: str = ""  # the user's own words about it, for people
    suspends: int = 0
    resumes: int = 0


class Cap(StrEnum):
    """The mechanisms that limit a kernel's device memory, strictest first."""

    DRIVER = "driver"  # the driver limits its control group, so allocations past its share fail
    FRAMEWORK = "framework"  # its extension limits the frameworks that it knows
    SAMPLE = "sample"  # nothing limits the kernel, and the broker only sees afterwards what it used


class LeaseStatus(KernelFacts, frozen=True, kw_only=True):
    """The status of a lease, for people and programs: the arbiter's view of the lease, and the broker's information about its kernel."""

    lease: LeaseView  # times are on the clock of `now_ms`
    now_ms: int
    reason: str  # why the lease has its state, or why it waits
    sentence: str
    kind: str = KERNEL  # KERNEL, COMMAND or CLAIM
    pid: int | None
    device_name: str
    simulated: bool
    busy: bool
    gated: bool  # whether its extension is connected
    measured: bool = True  # whether its use was measured after its last cell began or ended
    working: bool = False  # whether its processes use the device though no cell runs
    cap: Cap = Cap.SAMPLE  # what keeps it within its device memory
    left: list[LeftProcess] = []  # processes with device memory left by its ended kernel
    position: int | None = None  # place in the queue
    expected: Span | None = None  # forecast of the remaining wait
    slowdown: Slowdown = Slowdown()  # of its cell because of busy neighbours, measured or forecast
    foresight: str = ""  # what its pool does for expected cells: off, free or displace
    budget: str = ""  # a sentence that says that most or all of one of its budgets is spent
    budget_used_up: bool = False
    host_goes_away_in_ms: int | None = None  # as in HostStatus
    neighbours: list[Neighbour] = []  # only in the status of one lease, not in listings
    advice: ShareAdvice | None = None  # on its share, only in the status of one lease, if there is any

    @property
    def spec(self) -> LeaseSpec:
        """The size and pool the kernel requested and was granted."""
        return self.lease.spec

    @property
    def lease_id(self) -> str:
        """The id of the lease."""
        return self.lease.spec.lease_id

    @property
    def state(self) -> str:
        """The state of the lease."""
        return self.lease.state

    @property
    def age_ms(self) -> int:
        """How long the lease has been in its current state, in ms."""
        return max(0, self.now_ms - self.lease.since_ms)

    @property
    def pinned_ms(self) -> int:
        """How long the lease will remain pinned, in ms, or 0 if it is not pinned."""
        return max(0, self.lease.pinned_until_ms - self.now_ms)

    @property
    def goes_away_in_ms(self) -> int | None:
        """The time until the first of its devices becomes unavailable, in ms, or None if all remain available."""
        return None if self.lease.deadline_ms is None else max(0, self.lease.deadline_ms - self.now_ms)


class Stranger(Struct, frozen=True, kw_only=True):
    """A process using a device without a lease. Only its user and administrators see more than its user's name and memory."""

    pid: int = 0  # 0 (like the fields below) if hidden from this viewer
    user: str
    used_mib: int
    command: str = ""  # the name that the process gave itself
    uid: int | None = None
    own: bool = False  # whether it runs as the viewer's system user

    @property
    def name(self) -> str:
        """The name this viewer sees, such as `python (your process 4711)` or `a program of bob`. Callers must escape it in HTML."""
        whose = f"your process {self.pid}" if self.own else f"process {self.pid} of {self.user}"
        return f"{self.command} ({whose})" if self.command else f"a program of {self.user}"


def describe_strangers(strangers: Iterable[Stranger], most: int = 3) -> str:
    """Say how much device memory each of these processes holds. Return "" if nothing is known about them.

    For example: `python (your process 4711) holds 9 GiB, a program of bob holds 3 GiB`.
    """
    known = [f"{one.name} holds {format_memory(one.used_mib)}" for one in strangers if one.used_mib]
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """The status of a device.

    Memory is in MiB. `used_mib` is held by all processes together, `stranger_mib` by processes without a lease, and `reserved_mib` is what
    leases reserve.
    """

    device_id: str
    index: int
    name: str
    pool: str
    memory_mib: int
    leasable_mib: int
    used_mib: int
    reserved_mib: int
    stranger_mib: int
    over_committed: bool
    lost: bool
    draining: bool = False
    goes_away_in_ms: int | None = None  # set while the device drains by a deadline; 0 if the deadline has passed
    leases_saved: int = 0  # number of leases on it now that are to be saved before the deadline
    leases_lost: int = 0  # number of leases on it now that cannot be saved in time
    why_not: str = ""  # a sentence that explains why its kernels cannot be suspended, or "" if they can
    demand_milli: int = 0  # what its busy kernels need, in thousandths; beyond 1000 they slow each other down
    strangers: list[Stranger] = []
    busy_percent: int | None = None  # None, here and below, if the device does not report it
    temperature_c: int | None = None
    power_mw: int | None = None
    energy_mj: int | None = None  # since the driver was loaded


class Seat(Struct, frozen=True, kw_only=True):
    """A hub user's entitlement in a pool: how much all kernels of one server may use in total. Memory is in MiB."""

    seat_id: str
    owner: str  # the user's name at the hub
    server: str  # the server's name at the hub; a server of a hub has one seat
    group: str  # the group through which the user may use the pool, or "" if there is none
    pool: str
    fraction_milli: int
    memory_mib: int
    device_id: str | None  # the device on which the forecast placed the seat
    priority: int
    weight: int
    max_kernels: int
    uid: int | None  # the only system user that may draw on the seat; None for any process with the token
    hub: str = ""  # the address of the API of the hub that took the seat, or "" if unknown
    admitted: bool = False  # whether its engine, and not a forecast, decided that it fits
    allowed_devices: tuple[
        str, ...
    ] = ()  # UUIDs of the only devices its leases may use; empty for all devices of the pool
    workload: Workload | None = None  # the job or pod that the seat belongs to


class SeatStatus(Seat, frozen=True, kw_only=True):
    """The status of a seat, for people and programs. Ages are in milliseconds."""

    kernels: int
    used_milli: int  # the part of the fraction that its kernels use
    confirmed: bool
    age_ms: int
    expires_ms: int | None  # from now, or None if it never expires
    warning: str = ""  # a sentence that explains why its kernels may not be saved when idle, if known


class SeatWait(Struct, frozen=True, kw_only=True):
    """A request waiting for a seat in a pool. Memory is in MiB, and times are in milliseconds."""

    pool: str
    position: int  # counted from 1
    owner: str
    server: str
    fraction_milli: int
    memory_mib: int
    waited_ms: int
    expected_ms: int | None = None  # from now, with bounds that hold 80 % of outcomes, or None if unknown
    low_ms: int | None = None
    high_ms: int | None = None
    passed_over: int = 0  # how many later requests got a seat before it


class HostStatus(Struct, frozen=True, kw_only=True):
    """The state of the host. Users see only their own leases, but the devices' totals include everyone's leases."""

    version: str
    pid: int
    simulated: bool
    socket: str
    host_budget_mib: int
    host_saved_mib: int
    devices: list[DeviceStatus]
    leases: list[LeaseStatus]
    pools: dict[str, list[int]] = {}  # the fractions on offer in each pool, in milli-GPU
    audit_file: str = ""  # the path of the audit log, for administrators
    trouble: str = ""  # a sentence that says that the ledger cannot be written or is at its limit, and what to do
    seats: list[SeatStatus] = []  # not in `/v1/events`
    seat_queue: list[SeatWait] = []  # by pool and position; not in `/v1/events`
    goes_away_in_ms: int | None = None  # when the cloud takes away the host with its memory; 0 if it is overdue
    culls_idle: bool = False  # whether the broker culls idle kernels that hold GPU state, so that others should not
    forecasts: list[ForecastError] = []  # not in `/v1/events`


class HostChange(Struct, frozen=True, kw_only=True):
    """What has changed in a host's status since the previous line of `GET /v1/events`."""

    changed: HostStatus  # only the changed devices and leases, and everything else in full
    ended: list[str]  # ids of leases no longer shown
