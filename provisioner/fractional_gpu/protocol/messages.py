"""Messages of the lease API: HTTP + JSON on a UNIX socket.

They are msgspec Structs, since every kernel imports this module: defining them as dataclasses takes 17 ms longer.
`fractional_gpu.protocol.codec` encodes and decodes them, `fractional_gpu.protocol.routes` says where they go.
"""

from enum import StrEnum
from typing import Any

from msgspec import Struct

_SECRET_FIELDS = frozenset({"token", "connection"})


class HidesSecrets(Struct, frozen=True, kw_only=True):
    """A message with a token or a connection key. Its `repr`, as in tracebacks, logs and debuggers, leaves them out."""

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


CLAIM, COMMAND, KERNEL = "claim", "command", "kernel"
"""The kinds of leases: for programs that the broker does not know (`jupyter gpu lease`), a program (`jupyter gpu run`), which it cannot
listen to, or a Jupyter kernel."""


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """A request for a lease. Fractions in milli-GPU, memory in MiB (None: the fraction's share of the device).

    A claim (CLAIM) is granted by `acquire`, ends if that is interrupted, and then counts all processes of its user that use its device
    and belong to no other lease. `pin` moves its end.
    """

    fraction_milli: int  # 0: the smallest on offer whose share covers `memory_mib`
    pool: str = "default"
    memory_mib: int | None = None
    request_mib: int | None = None  # the guaranteed memory if the pool reserves by use; None: the fraction's share
    devices: int = 1  # more than one: whole devices (fraction_milli 1000), `memory_mib` on each
    priority: int = 0
    kernel_id: str = ""
    label: str = ""  # for people
    gated: bool = True  # the extension will load, so the first cell can wait for a reservation
    wait_ms: int = 0  # ungated only: how long the broker may take to make room; it bounds this
    seat: str = ""  # the hub seat it draws on; the seat's token goes with the request
    # A COMMAND is attached before its program runs, waits in `acquire`, and then keeps its reservation.
    kind: str = KERNEL
    ttl_ms: int = 0  # of a claim, from its grant; 0: as long as its pool allows
    holder_pid: int = 0  # the claim ends with this process; 0: none


class LeaseReply(HidesSecrets, frozen=True, kw_only=True):
    """The lease and what its kernel needs. The caller writes `token` to a file of mode 0600 and passes on its path."""

    lease_id: str
    token: str
    reserve_mib: int
    device_id: str | None  # known only if already reserved
    simulated: bool
    environment: dict[str, str] = {}  # for the kernel, without socket, lease and token file
    notice: str = ""  # what happened to the previous kernel, for its user


class AttachRequest(HidesSecrets, frozen=True, kw_only=True):
    """A lease's process and its Jupyter connection (contents, not a path). The broker verifies all of it."""

    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat
    boot_id: str
    connection: dict[str, Any]  # Jupyter's connection file: ip, ports, transport, key (text), signature_scheme
    language: str = "python"
    ipykernel: bool = True  # subscribe to the prefix `kernel.` only
    # KERNEL, or COMMAND: then `connection` is empty, and the client's process says when it needs the GPU
    kind: str = KERNEL
    served: bool = False  # a command that is in use while it has connections, on devices that do not count its work


class Done(Struct, frozen=True, kw_only=True):
    """The request was carried out, with nothing to report."""

    ok: bool = True


class PinRequest(Struct, frozen=True, kw_only=True):
    """Keep the lease resident for this long from now."""

    duration_ms: int


class ExpectRequest(Struct, frozen=True, kw_only=True):
    """A sign that a cell will run soon: focus, scroll, typing, hover, completion, inspection, widget or other, but not the cell."""

    sign: str = "other"
    within_ms: int = 60_000
    confidence_milli: int = 1000  # how sure the sender is, thousandths


class ResizeRequest(Struct, frozen=True, kw_only=True):
    """A new size. None: unchanged, except that a new fraction resets `memory_mib` to its share of the device."""

    fraction_milli: int | None = None
    memory_mib: int | None = None
    wait_ms: int = 600_000  # how long to wait for room, else the lease stays as it was
    burst: bool = False  # for one cell: if the process ends first, the broker restores the former size


class MoveRequest(Struct, frozen=True, kw_only=True):
    """Move an idle kernel to this device of its pool (id, beginning of one, or number); None: to any other device."""

    device: str | None = None


class EvictRequest(Struct, frozen=True, kw_only=True):
    """End the kernel's processes and its lease. All its variables are lost, so the broker refuses it without `confirm`."""

    confirm: bool = False
    why: str = ""  # for the kernel's user, shown by the next kernel


class DrainRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Empty a device. `evict_busy`: also suspend kernels that run a cell. `deadline_in_ms`: when the device goes away, from now."""

    evict_busy: bool = False
    deadline_in_ms: int | None = None


class OthersUse(Struct, frozen=True, kw_only=True):
    """Others' mean use of a lease's device over a period, in thousandths; None if the device reports no use per process."""

    used_milli: int | None


class AcquireRequest(Struct, frozen=True, kw_only=True):
    """Take a ticket for the GPU. The stream ends with `granted` or `refused`; disconnecting withdraws the ticket.

    With `hold` the wait has no limit, and the stream continues after `granted`: the lease is in use until the client disconnects. A
    preempted lease waits again, and the stream reports it. With `watch` the stream follows a preempted cell's ticket.
    """

    wait_ms: int = 3_600_000
    hold: bool = False
    watch: bool = False


class ResumeRequest(Struct, frozen=True, kw_only=True):
    """Make a lease resident. `if_blocked`: only if its suspended process is blocked in code that did not request the GPU."""

    if_blocked: bool = False


class LeaseNews(Struct, frozen=True, kw_only=True):
    """A line of a command's stream: its state, whether the device counted work since its last resume, or a notice."""

    state: str = ""
    worked: bool = False
    notice: str = ""


class ProgressKind(StrEnum):
    """The kind of a line in a stream that waits for the GPU or a seat."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"


class WaitLine(Struct, frozen=True, kw_only=True):
    """The fields that all lines of a waiting stream have. `kind`: a ProgressKind."""

    kind: str
    reason: str = ""
    sentence: str = ""
    position: int | None = None  # in the queue, from 1
    expected_ms: int | None = None  # forecast of the remaining wait, with the bounds of 80 % of outcomes
    low_ms: int | None = None
    high_ms: int | None = None


class Progress(WaitLine, frozen=True, kw_only=True):
    """A line of an acquire stream. `environment` comes with `granted`: variables that bind the process to its device.

    `overlap` comes with `waiting` (and the environment): the pool lets the cell run during the resume. Its first
    device call blocks until the state is back. The caller reads on until `granted`.
    """

    device_id: str | None = None
    environment: dict[str, str] = {}
    overlap: bool = False
    turn_ms: int | None = None  # when the turns of the busy kernels in the way end; None: they are not preempted
    slowdown_brief: str = ""  # where the cell would run: a forecast
    blockers: tuple[str, ...] = ()  # ids of the user's own leases in the way


CELL_RUNS, NO_CELL_RUNS = "a cell runs", "no cell runs"
"""Details of the answer to PREEMPT."""


class GateVerb(StrEnum):
    """The broker's commands to the gate."""

    CLOSE = "close"  # close the gate if no cell runs: answer `closed` or `busy`
    SHRINK = "shrink"  # free cached device memory, on the idle main loop: answer `done` or `busy`
    OPEN = "open"  # cells may run; carries the environment of the device
    NOTICE = "notice"  # show a sentence at the next cell
    PREEMPT = "preempt"  # close the gate for the next cell even if one runs: answer `closed`, with what the cells do
    LIMIT = "limit"  # the memory limit has changed; carries the environment


class GateCommand(Struct, frozen=True, kw_only=True):
    """A line of the gate stream. The answer to a command repeats its `number` (0: no answer); an empty verb is a keep-alive.

    `urgent`: show a notice now, even while a cell runs. `topic`: replace an earlier notice on this topic that no cell has shown
    yet. `hears`, in any line: the broker itself detects whether this stream is read, so the extension need not pulse.
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
    managed: str = ""  # a sentence why its process cannot be checkpointed, if known
    inputs: list[str] = []  # ids of the requests that use no GPU


class GateAnswer(Struct, frozen=True, kw_only=True):
    """The extension's answer. `word`: closed, busy, done, managed, open, input or pulse.

    With `number` 0 it answers no command: `pulse` proves that Python runs (to a broker that cannot detect it), `exempt` says that the
    running cells do not use the GPU, and `done` that the last of them has ended. `managed` says that the process cannot be checkpointed,
    and `detail` why. `input` lists in `detail`, separated by spaces, the ids of all requests that wait for input or cannot reach the GPU.
    After a shrink, the `detail` of `done` says what was freed, with `reserved_mib=N` if the frameworks' allocators report
    it.
    """

    number: int
    word: str
    detail: str = ""


SLURM, KUBERNETES = "slurm", "kubernetes"
"""Engines whose jobs and pods hold seats."""


class Workload(Struct, frozen=True, kw_only=True):
    """The job or pod that a seat belongs to. Only its processes draw on the seat, which ends with it."""

    engine: str  # SLURM or KUBERNETES
    id: str  # a Slurm job's number, or a pod's UID
    # Path of its control group on this node, below the hierarchy's mount (`/slurm/uid_1000/job_12`). Empty: the group of the first
    # process of the workload that uses the seat
    control_group: str = ""
