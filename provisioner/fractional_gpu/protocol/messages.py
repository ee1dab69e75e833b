"""Messages of the lease API: HTTP + JSON on a UNIX socket.

They are msgspec Structs, since every kernel imports this module: to define the same classes as dataclasses takes 17 ms longer.
`fractional_gpu.protocol.codec` encodes and decodes them, `fractional_gpu.protocol.routes` says where they go.
"""

from enum import StrEnum
from typing import Any

from msgspec import Struct

from fractional_gpu.protocol.advice import ShareAdvice

_SECRET_FIELDS = frozenset({"token", "connection"})


class HidesSecrets(Struct, frozen=True, kw_only=True):
    """A message with a token or a connection key: its `repr`, which tracebacks, logs and debuggers show, leaves them out."""

    def __repr__(self) -> str:
        """Return the message without its secret fields."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in _SECRET_FIELDS)
        return f"{type(self).__name__}({', '.join(shown)})"


class Pong(Struct, frozen=True, kw_only=True):
    """The broker that answers."""

    version: str
    protocol: int
    pid: int
    simulated: bool


COMMAND, KERNEL = "command", "kernel"
"""What a lease is for: a Jupyter kernel, or any other program (`jupyter gpu run`), to which no broker can listen."""


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """What a kernel wants. Fractions in milli-GPU, memory in MiB (None: the fraction's share of the device)."""

    fraction_milli: int
    pool: str = "default"
    memory_mib: int | None = None
    request_mib: int | None = None  # the guaranteed part, where the pool reserves by use; None: the fraction's share
    devices: int = 1  # more than one: whole devices (fraction_milli 1000), `memory_mib` on each
    priority: int = 0
    kernel_id: str = ""
    label: str = ""  # for people
    gated: bool = True  # the extension will be loaded: no reservation is needed before the first cell
    wait_ms: int = 0  # ungated only: how long the broker may take to make room before it refuses; it bounds this
    seat: str = ""  # the hub seat that it draws on; its token goes with the request
    # KERNEL or COMMAND. A command is attached before its program runs, waits with `acquire`, and holds its reservation from then on.
    kind: str = KERNEL


class LeaseReply(HidesSecrets, frozen=True, kw_only=True):
    """The lease and what its kernel needs. The caller writes `token` to a file of mode 0600 and passes the path on."""

    lease_id: str
    token: str
    reserve_mib: int
    device_id: str | None  # known only if reserved already
    simulated: bool
    environment: dict[str, str] = {}  # for the kernel, except socket, lease and token file
    notice: str = ""  # what happened to the kernel before this one, for its user


class AttachRequest(HidesSecrets, frozen=True, kw_only=True):
    """The process of a lease and its Jupyter connection (contents, not a path). The broker verifies all of it."""

    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat
    boot_id: str
    connection: dict[str, Any]  # Jupyter's connection file: ip, ports, transport, key (text), signature_scheme
    language: str = "python"
    ipykernel: bool = True  # subscribe to the prefix `kernel.` only
    # KERNEL, or COMMAND: then `connection` is empty, and the process of the client is the one that says when it needs the GPU
    kind: str = KERNEL
    served: bool = (
        False  # a command that is in use by the connections to it alone, where a device does not count its work
    )


class Done(Struct, frozen=True, kw_only=True):
    """The request was carried out; there is nothing else to report."""

    ok: bool = True


class PinRequest(Struct, frozen=True, kw_only=True):
    """Keep the lease resident for so long from now."""

    duration_ms: int


class ExpectRequest(Struct, frozen=True, kw_only=True):
    """A sign that the kernel's next cell comes within so many milliseconds. Of the cell itself nothing is told.

    `sign`: focus, scroll, typing, hover, completion, inspection, widget or other. How often each is right is learnt.
    """

    sign: str = "other"
    within_ms: int = 60_000
    confidence_milli: int = 1000  # how sure the sender is, thousandths


class ResizeRequest(Struct, frozen=True, kw_only=True):
    """Another size; None: unchanged (`memory_mib` None with a new fraction: the fraction's share of the device)."""

    fraction_milli: int | None = None
    memory_mib: int | None = None
    wait_ms: int = 600_000  # how long to wait for room; then the lease stays as it was
    burst: bool = False  # for one cell: the broker restores the former size if the process ends before it does


class MoveRequest(Struct, frozen=True, kw_only=True):
    """Move an idle kernel to this device of its pool (id, beginning of one, or number); None: to any other device."""

    device: str | None = None


class EvictRequest(Struct, frozen=True, kw_only=True):
    """End the kernel's processes and its lease. All its variables are lost, so the broker refuses it without `confirm`."""

    confirm: bool = False
    why: str = ""  # for the kernel's user, whose next kernel shows it


class DrainRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Empty a device; `evict_busy`: suspend also kernels that run a cell. `deadline_in_ms`: the device goes away so long from now."""

    evict_busy: bool = False
    deadline_in_ms: int | None = None


class StoryLine(Struct, frozen=True, kw_only=True):
    """One thing that happened to a lease. `at_ms`: since the epoch."""

    at_ms: int
    reason: str
    sentence: str


class Story(Struct, frozen=True, kw_only=True):
    """The recorded reasons of everything that happened to a lease, oldest first, without the `omitted` oldest ones."""

    lease_id: str
    lines: list[StoryLine] = []
    omitted: int = 0
    slowdown_milli: int = 1000  # as in LeaseStatus, now
    slowdown_low_milli: int = 1000
    slowdown_high_milli: int = 1000
    slowdown: str = ""


class UsagePoint(Struct, frozen=True, kw_only=True):
    """A lease from this moment to the next point. `at_ms`: since the epoch."""

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
    """Another lease on the same device. `label` only if it belongs to the same user."""

    fraction_milli: int
    reserved_mib: int
    state: str
    busy: bool
    label: str = ""


class OthersUse(Struct, frozen=True, kw_only=True):
    """What others used of a lease's device, the mean over a period in thousandths of it; None: the device does not count by process."""

    used_milli: int | None


class LeftProcess(Struct, frozen=True, kw_only=True):
    """A process that outlives the kernel that started it and has device memory. MiB; 0: saved on the host, or unknown."""

    pid: int
    command: str
    used_mib: int


class LeaseStatus(Struct, frozen=True, kw_only=True):
    """One lease for people and programs. Memory in MiB, ages in milliseconds."""

    lease_id: str
    state: str
    pool: str
    owner: str
    label: str
    kernel_id: str
    pid: int | None
    fraction_milli: int
    reserve_mib: int
    used_mib: int
    saved_mib: int
    device_id: str | None
    device_name: str
    simulated: bool
    busy: bool
    gated: bool
    age_ms: int  # in this state
    reason: str
    sentence: str
    position: int | None = None  # place in the queue
    suspends: int = 0
    resumes: int = 0
    device_ids: list[str] = []
    request_mib: int = 0
    reserved_mib: int = 0  # what it holds on each of its devices now
    pinned_ms: int = 0  # how long it stays pinned
    expected_ms: int | None = None  # forecast of the rest of its wait, and the bounds of four outcomes of five
    low_ms: int | None = None
    high_ms: int | None = None
    resume_ms: int | None = None  # forecast of its resume, for one that is suspended, and its bounds
    resume_low_ms: int | None = None
    resume_high_ms: int | None = None
    neighbours: list[Neighbour] = []  # with one lease only, not in listings
    seat: str = ""  # the hub seat that it draws on
    revoked: bool = False  # its seat has ended: it is suspended until a new seat takes it over
    ends_in_ms: int | None = None  # the processes of a revoked lease are ended after so long
    stays: str = ""  # why it cannot be suspended, a sentence; empty: it can
    working: bool = False  # its processes work on the device, though no cell runs
    left: list[LeftProcess] = []  # processes with device memory that its ended kernel left
    demand_milli: int = 0  # learnt: what it uses of each of its devices while it runs cells, thousandths
    slowdown_milli: int = (
        1000  # how many times as long as alone its cell takes beside busy neighbours, or would: a forecast
    )
    slowdown_low_milli: int = 1000  # the bounds of four cells of five
    slowdown_high_milli: int = 1000
    slowdown: str = ""  # the same as a sentence, with the neighbours; empty: it is not slowed down
    slowdown_brief: str = (
        ""  # the same in few words: "runs beside a.ipynb, about 1.4 times as long as alone (1.2 to 1.9)"
    )
    next_cell_ms: int | None = None  # its next cell is expected within so long; None: there is no sign of one
    next_cell_sign: str = ""  # what says so
    next_cell_milli: int = 0  # how likely that is, thousandths
    came_early: bool = False  # it was brought back for an expected cell, which has not come yet
    foresight: str = ""  # what its pool does for expected cells: off, free, displace
    budget: str = ""  # that most of a budget that it counts for is spent, or all of it, a sentence
    budget_used_up: bool = False
    kind: str = KERNEL  # or COMMAND
    goes_away_in_ms: int | None = None  # the first of its devices goes away in so long, which is still to come
    lost_because: str = ""  # why it cannot be saved before, a sentence; empty: it will be
    host_goes_away_in_ms: int | None = None  # as in HostStatus
    advice: ShareAdvice | None = None  # about its share, with one lease only; None: none can be given
    measured: bool = True  # `used_mib` was measured since its last cell began or ended


class AcquireRequest(Struct, frozen=True, kw_only=True):
    """Take a ticket for the GPU. The stream ends with `granted` or `refused`; hanging up withdraws the ticket.

    With `hold` the wait has no limit, and the stream goes on after `granted`: the lease is in use until the client hangs up. One that is
    preempted meanwhile waits again, and the stream says so. With `watch` the stream follows the ticket that a preempted cell has.
    """

    wait_ms: int = 3_600_000
    hold: bool = False
    watch: bool = False


class ResumeRequest(Struct, frozen=True, kw_only=True):
    """Make a lease resident.

    With `if_blocked` only for a suspended process that is in the middle of something and did not ask for the GPU: it may be blocked in a
    GPU call. The wait ends, without a resume, as soon as the process is idle.
    """

    if_blocked: bool = False


class LeaseNews(Struct, frozen=True, kw_only=True):
    """A line of a command's stream: its state, or something that its user should read. `worked`: see LeaseStatus.working.

    `worked` says whether the device has counted work of its processes since they were last brought back.
    """

    state: str = ""
    worked: bool = False
    notice: str = ""


class ProgressKind(StrEnum):
    """What a line of a stream says that waits for the GPU or for a seat."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"


class WaitLine(Struct, frozen=True, kw_only=True):
    """What all lines of such a stream have. `kind`: a ProgressKind."""

    kind: str
    reason: str = ""
    sentence: str = ""
    position: int | None = None  # in the queue, from 1
    expected_ms: int | None = None  # forecast of the rest of the wait, and the bounds of four outcomes of five
    low_ms: int | None = None
    high_ms: int | None = None


class Progress(WaitLine, frozen=True, kw_only=True):
    """A line of an acquire stream. `environment` comes with `granted`: variables that bind the process to its device.

    `overlap` comes with `waiting` (and with the environment): the resume is under way, and the pool lets the cell run meanwhile. The cell
    blocks in its first call of the device until the state is back. The caller reads on until `granted`.
    """

    device_id: str | None = None
    environment: dict[str, str] = {}
    overlap: bool = False
    turn_ms: int | None = None  # the turns of the busy kernels in the way end in so long; None: they are not preempted
    slowdown_milli: int = 1000  # as in LeaseStatus, where the cell would run: a forecast, and its bounds
    slowdown_low_milli: int = 1000
    slowdown_high_milli: int = 1000
    slowdown_brief: str = ""


CELL_RUNS, NO_CELL_RUNS = "a cell runs", "no cell runs"
"""Details of the answer to PREEMPT."""


class GateVerb(StrEnum):
    """What the broker commands the gate to do."""

    CLOSE = "close"  # close the gate if no cell runs: answer `closed` or `busy`
    SHRINK = "shrink"  # free cached device memory, on the idle main loop: answer `done` or `busy`
    OPEN = "open"  # cells may run; carries the environment of the device
    NOTICE = "notice"  # show a sentence at the next cell
    PREEMPT = "preempt"  # close the gate for the next cell, although one runs: answer `closed`, with what the cells do
    LIMIT = "limit"  # the memory limit has changed; carries the environment


class GateCommand(Struct, frozen=True, kw_only=True):
    """A line of the gate stream. The answer to a command repeats its `number` (0: no answer); an empty verb is a keep-alive.

    `urgent`: show the sentence of a notice now, also while a cell runs.
    `topic`: the sentence takes the place of an earlier one with this topic where that is not yet part of a cell's output.
    `hears`, in any line: the broker itself detects whether this stream is read, so the extension need not pulse.
    """

    verb: str = ""
    number: int = 0
    sentence: str = ""
    environment: dict[str, str] = {}
    hears: bool = False
    urgent: bool = False
    topic: str = ""


class GateHello(Struct, frozen=True, kw_only=True):
    """The extension's first message: whether its gate is open, and whether a cell runs."""

    version: str
    open: bool
    busy: bool
    managed: str = ""  # why its process cannot be checkpointed, a sentence; empty: no reason is known
    inputs: list[str] = []  # the ids of the requests that use no GPU


class GateAnswer(Struct, frozen=True, kw_only=True):
    """The extension's answer. `word`: closed, busy, done, managed, open, input or pulse.

    With `number` 0 it answers no command: `pulse` proves that Python runs (to a broker that cannot detect it), `exempt` says that the
    cells that run do not use the GPU, and `done` that the last of them has ended. `managed` says that the process cannot be
    checkpointed, and `detail` why. `input` lists in `detail`, separated by spaces, the ids of all requests that use no GPU, because they
    wait for input or cannot reach the GPU.
    The `detail` of `done` to a shrink says what was freed, and `reserved_mib=N` where the frameworks' allocators report what they hold.
    """

    number: int
    word: str
    detail: str = ""


class Stranger(Struct, frozen=True, kw_only=True):
    """A process that uses a device and belongs to no lease."""

    pid: int
    user: str
    used_mib: int


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """One device. Memory in MiB: `used` by all processes, `reserved` by leases, `stranger` by processes of no lease."""

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
    goes_away_in_ms: int | None = None  # while it is drained by a deadline; 0: that has passed
    leases_saved: int = 0  # on it now, that are going to be saved before the deadline, as planned
    leases_lost: int = 0  # on it now, that cannot be saved before
    why_not: str = ""  # why kernels on it cannot be suspended, a sentence; empty: they can
    demand_milli: int = (
        0  # what its busy kernels need of it together, thousandths: beyond 1000 they slow each other down
    )
    strangers: list[Stranger] = []
    busy_percent: int | None = None  # None, here and below: the device does not report it
    temperature_c: int | None = None
    power_mw: int | None = None
    energy_mj: int | None = None  # since the driver was loaded


SLURM, KUBERNETES = "slurm", "kubernetes"
"""Engines whose jobs and pods hold seats."""


class Workload(Struct, frozen=True, kw_only=True):
    """The job or pod that a seat belongs to. Only processes of that workload draw on the seat, and the seat ends with it."""

    engine: str  # SLURM or KUBERNETES
    id: str  # a Slurm job's number, or a pod's UID
    # Path of its control group on this node, below the mount of the hierarchy (`/slurm/uid_1000/job_12`). Empty: it is that of the first
    # process of the workload that uses the seat
    control_group: str = ""


class SeatStatus(Struct, frozen=True, kw_only=True):
    """One seat, for people and programs. Memory in MiB, ages in milliseconds."""

    seat_id: str
    owner: str
    server: str
    group: str
    pool: str
    fraction_milli: int
    memory_mib: int
    device_id: str | None  # where the forecast placed it
    priority: int
    weight: int
    max_kernels: int
    uid: int | None
    kernels: int
    used_milli: int  # of the fraction, by its kernels
    confirmed: bool
    age_ms: int
    expires_ms: int | None  # from now; None: never
    hub: str = ""  # the address of the API of the hub that took it; empty: unknown
    admitted: bool = False  # its engine decided that it fits: no forecast was asked
    allowed_devices: list[str] | None = None  # UUIDs of the only devices its leases may use; None: all of the pool
    workload: Workload | None = None  # the job or pod that it belongs to
    warning: str = ""  # why its kernels may not be saved when they idle, a sentence; empty: no reason is known


class SeatWait(Struct, frozen=True, kw_only=True):
    """A request in the queue for seats of a pool. Memory in MiB, times in milliseconds."""

    pool: str
    position: int  # from 1
    owner: str
    server: str
    fraction_milli: int
    memory_mib: int
    waited_ms: int
    expected_ms: int | None = None  # from now, with the bounds of four outcomes of five; None: unknown
    low_ms: int | None = None
    high_ms: int | None = None
    passed_over: int = 0  # how many later requests got a seat before it


class ForecastError(Struct, frozen=True, kw_only=True):
    """How far off one kind of forecast was lately, of this user and all others. `stated_permille`: what its bounds promise to cover."""

    what: str  # wait, suspend, resume, cell, rest (of a running cell), slowdown or seat
    count: int  # forecasts that were compared with what happened, ever
    median_error_permille: int  # of the last 256: the error as a share of what happened
    covered_permille: int  # of the last 256: how many lay between their bounds
    stated_permille: int = 800


class HostStatus(Struct, frozen=True, kw_only=True):
    """The state of the host. A uid sees only its own leases; the devices' sums include all."""

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
    trouble: str = ""  # that the ledger cannot be written now, or is at its limit, and what to do
    seats: list[SeatStatus] = []  # not in `/v1/events`
    seat_queue: list[SeatWait] = []  # by pool and position; not in `/v1/events`
    goes_away_in_ms: int | None = None  # the host itself, with its memory, by a cloud's notice; 0: that has passed
    forecasts: list[ForecastError] = []  # not in `/v1/events`


class HostChange(Struct, frozen=True, kw_only=True):
    """How a host's status differs from the line before (`GET /v1/events`)."""

    changed: HostStatus  # its devices and leases are those that changed; everything else is complete
    ended: list[str]  # ids of leases that are no longer shown
