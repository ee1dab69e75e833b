"""Messages about the state of leases, devices and the host, and about leases' past.

The arbiter's view of a lease (`core.model`) is included unchanged. Kernels do not load this module at startup.
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
    """Advice on the share of a notebook or, without one, of a server. It changes nothing."""

    pool: str
    owner: str
    seated: bool = False  # the owner is a hub's user, not the machine's
    notebook: str
    figures: Advice
    sentence: str = ""  # the advice for people; empty: none
    brief: str = ""


class StoryLine(Struct, frozen=True, kw_only=True):
    """One thing that happened to a lease. `at_ms`: since the epoch."""

    at_ms: int
    reason: str
    sentence: str


class Story(Struct, frozen=True, kw_only=True):
    """The recorded reasons for everything that happened to a lease, oldest first, minus the `omitted` oldest."""

    lease_id: str
    lines: list[StoryLine] = []
    omitted: int = 0
    slowdown: Slowdown = Slowdown()  # as in LeaseStatus, now


class UsagePoint(Struct, frozen=True, kw_only=True):
    """A lease's state from `at_ms` (since the epoch) until the next point."""

    at_ms: int
    state: str
    used_mib: int
    saved_mib: int


class History(Struct, frozen=True, kw_only=True):
    """A lease over time, oldest first."""

    lease_id: str
    cap_mib: int
    points: list[UsagePoint] = []


class Neighbour(Struct, frozen=True, kw_only=True):
    """Another lease on the device. `label` only if it is the same user's."""

    fraction_milli: int
    reserved_mib: int
    state: str
    busy: bool
    label: str = ""


class LeftProcess(Struct, frozen=True, kw_only=True):
    """A process with device memory that outlives its kernel. MiB; 0: saved on the host, or unknown."""

    pid: int
    command: str
    used_mib: int


class KernelFacts(Struct, frozen=True, kw_only=True):
    """The broker's facts about a lease's kernel. Part of the lease's status and ledger record."""

    kernel_id: str = ""
    note: str = ""  # its user's own words, for people
    suspends: int = 0
    resumes: int = 0


class Cap(StrEnum):
    """The mechanisms that limit a kernel's device memory, strictest first."""

    DRIVER = "driver"  # the driver limits its control group: allocations past its share fail
    FRAMEWORK = "framework"  # its extension limits the frameworks that it knows
    SAMPLE = "sample"  # nothing does: the broker sees afterwards what it uses


class LeaseStatus(KernelFacts, frozen=True, kw_only=True):
    """One lease, for people and programs: what the arbiter knows, and what the broker knows of its kernel."""

    lease: LeaseView  # its times are on the clock of `now_ms`
    now_ms: int
    reason: str  # why it has its state, or waits
    sentence: str
    kind: str = KERNEL  # or COMMAND or CLAIM
    pid: int | None
    device_name: str
    simulated: bool
    busy: bool
    gated: bool  # its extension is connected
    measured: bool = True  # its use was measured after its last cell began or ended
    working: bool = False  # its processes use the device though no cell runs
    cap: Cap = Cap.SAMPLE  # what keeps it within its device memory
    left: list[LeftProcess] = []  # processes with device memory left by its ended kernel
    position: int | None = None  # place in the queue
    expected: Span | None = None  # forecast of its remaining wait
    slowdown: Slowdown = Slowdown()  # of its cell beside busy neighbours, measured or forecast
    foresight: str = ""  # what its pool does for expected cells: off, free, displace
    budget: str = ""  # a sentence that most or all of one of its budgets is spent
    budget_used_up: bool = False
    host_goes_away_in_ms: int | None = None  # as in HostStatus
    neighbours: list[Neighbour] = []  # with one lease only, not in listings
    advice: ShareAdvice | None = None  # on its share, with one lease only, if any

    @property
    def spec(self) -> LeaseSpec:
        """The size that the kernel requested and has."""
        return self.lease.spec

    @property
    def lease_id(self) -> str:
        """Its lease's id."""
        return self.lease.spec.lease_id

    @property
    def state(self) -> str:
        """Its lease's state."""
        return self.lease.state

    @property
    def age_ms(self) -> int:
        """The time that it has been in its state."""
        return max(0, self.now_ms - self.lease.since_ms)

    @property
    def pinned_ms(self) -> int:
        """The time until the pin ends; 0: not pinned."""
        return max(0, self.lease.pinned_until_ms - self.now_ms)

    @property
    def goes_away_in_ms(self) -> int | None:
        """The time until the first of its devices goes away, if any does."""
        return None if self.lease.deadline_ms is None else max(0, self.lease.deadline_ms - self.now_ms)


class Stranger(Struct, frozen=True, kw_only=True):
    """A process that uses a device without a lease. Only its user and administrators get more than the user's name."""

    pid: int = 0  # 0, here and below: hidden from this viewer
    user: str
    used_mib: int
    command: str = ""  # the name that the process gave itself
    uid: int | None = None
    own: bool = False  # it runs as the viewer's system user

    @property
    def name(self) -> str:
        """The name for this viewer, such as `python (your process 4711)` or `a program of bob`. Escape it in HTML."""
        whose = f"your process {self.pid}" if self.own else f"process {self.pid} of {self.user}"
        return f"{self.command} ({whose})" if self.command else f"a program of {self.user}"


def describe_strangers(strangers: Iterable[Stranger], most: int = 3) -> str:
    """Say how much memory each holds: `python (your process 4711) holds 9 GiB, a program of bob holds 3 GiB`; "" if unknown."""
    known = [f"{one.name} holds {format_memory(one.used_mib)}" for one in strangers if one.used_mib]
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """One device. Memory in MiB: `used` by all processes, `reserved` by leases, `stranger` by processes without a lease."""

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
    goes_away_in_ms: int | None = None  # while it drains by a deadline; 0: it has passed
    leases_saved: int = 0  # on it now, to be saved before the deadline as planned
    leases_lost: int = 0  # on it now, and cannot be saved in time
    why_not: str = ""  # a sentence why its kernels cannot be suspended; empty: they can
    demand_milli: int = 0  # what its busy kernels need, thousandths: beyond 1000 they slow each other down
    strangers: list[Stranger] = []
    busy_percent: int | None = None  # None, here and below: not reported by the device
    temperature_c: int | None = None
    power_mw: int | None = None
    energy_mj: int | None = None  # since the driver was loaded


class Seat(Struct, frozen=True, kw_only=True):
    """A hub user's entitlement in a pool: what one server's kernels may have in total. Memory in MiB."""

    seat_id: str
    owner: str  # the user's name at the hub
    server: str  # the server's name at the hub; a hub's server has one seat
    group: str  # the group through which the user may use the pool; empty: none
    pool: str
    fraction_milli: int
    memory_mib: int
    device_id: str | None  # where the forecast placed it
    priority: int
    weight: int
    max_kernels: int
    uid: int | None  # the only system user that may draw on it; None: any with the token
    hub: str = ""  # the address of the API of the hub that took it; empty: unknown
    admitted: bool = False  # its engine, not a forecast, decided that it fits
    allowed_devices: tuple[str, ...] = ()  # UUIDs of the only devices its leases may use; empty: all of the pool
    workload: Workload | None = None  # the job or pod that it belongs to


class SeatStatus(Seat, frozen=True, kw_only=True):
    """One seat, for people and programs. Ages in milliseconds."""

    kernels: int
    used_milli: int  # of the fraction, by its kernels
    confirmed: bool
    age_ms: int
    expires_ms: int | None  # from now; None: never
    warning: str = ""  # a sentence why its kernels may not be saved when idle, if known


class SeatWait(Struct, frozen=True, kw_only=True):
    """A request in the queue for seats of a pool. Memory in MiB, times in milliseconds."""

    pool: str
    position: int  # from 1
    owner: str
    server: str
    fraction_milli: int
    memory_mib: int
    waited_ms: int
    expected_ms: int | None = None  # from now, with the bounds of 80 % of outcomes; None: unknown
    low_ms: int | None = None
    high_ms: int | None = None
    passed_over: int = 0  # how many later requests got a seat before it


class HostStatus(Struct, frozen=True, kw_only=True):
    """The state of the host. A uid sees only its own leases, but the devices' sums include all."""

    version: str
    pid: int
    simulated: bool
    socket: str
    host_budget_mib: int
    host_saved_mib: int
    devices: list[DeviceStatus]
    leases: list[LeaseStatus]
    pools: dict[str, list[int]] = {}  # name -> fractions on offer, milli-GPU
    audit_file: str = ""  # the path of the audit log, for administrators
    trouble: str = ""  # that the ledger cannot be written, or is at its limit, and what to do
    seats: list[SeatStatus] = []  # not in `/v1/events`
    seat_queue: list[SeatWait] = []  # by pool and position; not in `/v1/events`
    goes_away_in_ms: int | None = None  # the host itself, with its memory, by a cloud's notice; 0: it has passed
    culls_idle: bool = (
        False  # the broker ends kernels that hold GPU state and have long been idle: others should spare them
    )
    forecasts: list[ForecastError] = []  # not in `/v1/events`


class HostChange(Struct, frozen=True, kw_only=True):
    """The changes of a host's status since the previous line (`GET /v1/events`)."""

    changed: HostStatus  # only changed devices and leases; everything else is complete
    ended: list[str]  # ids of leases no longer shown
