"""Messages of the lease API, which uses HTTP and JSON over a UNIX socket.

The messages are msgspec Structs, because every kernel imports this module and dataclasses would take 17 ms longer to define.
`fractional_gpu.protocol.codec` encodes and decodes them, and `fractional_gpu.protocol.routes` lists the routes that use them.
"""

from enum import StrEnum
from typing import Any

from msgspec import Struct

_SECRET_FIELDS = frozenset({"token", "connection"})


class HidesSecrets(Struct, frozen=True, kw_only=True):
    """A message with a token or a connection key. Its `repr` omits them to keep them out of tracebacks, logs and debuggers."""

    def __repr__(self) -> str:
        """Return the message without its secret fields."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in _SECRET_FIELDS)
        return f"{type(self).__name__}({', '.join(shown)})"


class Pong(Struct, frozen=True, kw_only=True):
    """The broker's reply to a ping."""

    version: str
    protocol: int
    pid: int
    simulated: bool


CLAIM, COMMAND, KERNEL = "claim", "command", "kernel"
"""The kinds of leases.

CLAIM is for programs the broker does not know about (`jupyter gpu lease`). COMMAND is for a program run with `jupyter gpu run`, which has
no Jupyter channels for the broker to listen to. KERNEL is for a Jupyter kernel.
"""


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """A request for a lease.

    The fraction is in milli-GPU and memory is in MiB. If `memory_mib` is None, the lease gets the fraction's share of the device.

    A claim is a lease of kind CLAIM, for programs the client starts later. It is granted by `acquire`, and ends if `acquire` is
    interrupted. Once granted, the claim covers all of its user's processes on its device that are not covered by another lease. `pin`
    changes when it ends.
    """

    fraction_milli: int  # 0 for the smallest fraction on offer whose share covers `memory_mib`
    pool: str = "default"
    memory_mib: int | None = None
    request_mib: int | None = None  # guaranteed memory if the pool reserves by use; None for the fraction's share
    devices: int = 1  # several devices are whole devices (fraction_milli 1000), with `memory_mib` on each
    priority: int = 0
    kernel_id: str = ""
    label: str = ""  # for people
    gated: bool = True  # whether the extension will load, so that the first cell can wait for a reservation
    wait_ms: int = 0  # how long the broker may take to make room for an ungated kernel; the broker limits this
    seat: str = ""  # the hub seat that the lease draws on; the seat's token goes with the request
    # A COMMAND is attached before its program runs, waits in `acquire`, and then keeps its reservation.
    kind: str = KERNEL
    ttl_ms: int = 0  # how long a claim lasts after its grant; 0 for as long as its pool allows
    holder_pid: int = 0  # the claim ends with this process, if not 0


class LeaseReply(HidesSecrets, frozen=True, kw_only=True):
    """The lease and what its kernel needs.

    The caller writes `token` to a file with mode 0600 and passes the file's path to the kernel.
    """

    lease_id: str
    token: str
    reserve_mib: int
    device_id: str | None  # set only if a device is already reserved
    simulated: bool
    environment: dict[str, str] = {}  # variables for the kernel, without the socket, the lease and the token file
    notice: str = ""  # what happened to the previous kernel, as text for its user


class AttachRequest(HidesSecrets, frozen=True, kw_only=True):
    """A request to attach a process. It includes the contents (not the path) of its Jupyter connection file. The broker verifies both."""

    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat
    boot_id: str
    connection: dict[str, Any]  # Jupyter's connection file: ip, ports, transport, key (text), signature_scheme
    language: str = "python"
    ipykernel: bool = True  # whether to subscribe only to messages with the prefix `kernel.`
    # KERNEL or COMMAND. For a COMMAND, `connection` is empty and the client's process says when it needs the GPU.
    kind: str = KERNEL
    served: bool = False  # the command is in use while it has connections, if the device does not count work


class Done(Struct, frozen=True, kw_only=True):
    """The request was carried out, and there is nothing to report."""

    ok: bool = True


class PinRequest(Struct, frozen=True, kw_only=True):
    """A request to keep the lease resident for the next `duration_ms`."""

    duration_ms: int


class ExpectRequest(Struct, frozen=True, kw_only=True):
    """A report of a sign that a cell is likely to run soon: focus, scroll, typing, hover, completion, inspection, widget or other.

    Don't send one when the cell itself starts.
    """

    sign: str = "other"
    within_ms: int = 60_000
    confidence_milli: int = 1000  # how sure the sender is, in thousandths


class ResizeRequest(Struct, frozen=True, kw_only=True):
    """A new size for a lease.

    None leaves a value unchanged, except that a new fraction resets `memory_mib` to its share of the device.
    """

    fraction_milli: int | None = None
    memory_mib: int | None = None
    wait_ms: int = 600_000  # how long to wait for room; after that, the lease stays as it was
    burst: bool = False  # for one cell: if the process ends first, the broker restores the former size


class MoveRequest(Struct, frozen=True, kw_only=True):
    """A request to move an idle kernel to another device of its pool.

    `device` is the device's id, the beginning of its id, or its number. None means any other device.
    """

    device: str | None = None


class EvictRequest(Struct, frozen=True, kw_only=True):
    """A request to end a kernel and its lease. The kernel's variables are lost, so the broker refuses the request without `confirm`."""

    confirm: bool = False
    why: str = ""  # a text for the kernel's user, shown by the next kernel


class DrainRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to empty a device.

    If `evict_busy` is set, kernels running a cell are suspended as well. `deadline_in_ms` is how long the device will remain available.
    """

    evict_busy: bool = False
    deadline_in_ms: int | None = None


class OthersUse(Struct, frozen=True, kw_only=True):
    """How much of a lease's device others used on average, in milli-GPU, over a period. None if the device does not report this."""

    used_milli: int | None


class AcquireRequest(Struct, frozen=True, kw_only=True):
    """A request for a ticket for the GPU. The stream ends with `granted` or `refused`, and disconnecting withdraws the ticket.

    With `hold`, the wait is unlimited, the stream continues after `granted`, and the lease counts as in use until the client disconnects.
    If the lease is preempted, it waits again, and the stream reports that. With `watch`, the stream follows a preempted cell's ticket.
    """

    wait_ms: int = 3_600_000
    hold: bool = False
    watch: bool = False


class ResumeRequest(Struct, frozen=True, kw_only=True):
    """A request to make a lease resident.

    If `if_blocked` is set, it is resumed only if its suspended process is blocked in code that has not requested the GPU.
    """

    if_blocked: bool = False


class LeaseNews(Struct, frozen=True, kw_only=True):
    """A line in the stream about a command's lease: its state, a notice, or whether the command has used the GPU since the last resume."""

    state: str = ""
    worked: bool = False
    notice: str = ""


class ProgressKind(StrEnum):
    """The kinds of lines in a stream that reports on a wait for the GPU or a seat."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"


class WaitLine(Struct, frozen=True, kw_only=True):
    """The fields shared by all lines in a stream that reports on a wait for the GPU or a seat. `kind` is a ProgressKind."""

    kind: str
    reason: str = ""
    sentence: str = ""
    position: int | None = None  # in the queue, counted from 1
    expected_ms: int | None = None  # forecast of the remaining wait, with bounds that hold 80 % of outcomes
    low_ms: int | None = None
    high_ms: int | None = None


class Progress(WaitLine, frozen=True, kw_only=True):
    """A line in an acquire stream.

    `environment` is sent with `granted` and contains the variables that bind the process to its device. If the pool lets the cell run
    during the resume, `overlap` is sent with `waiting`, together with the environment. In that case, the cell's first device call blocks
    until the state has been restored, and the caller keeps reading until `granted`.
    """

    device_id: str | None = None
    environment: dict[str, str] = {}
    overlap: bool = False
    turn_ms: int | None = None  # when the busy kernels in the way have had their turns; None if they are not preempted
    slowdown_brief: str = ""  # forecast of the slowdown where the cell would run
    blockers: tuple[str, ...] = ()  # ids of the user's own leases in the way


CELL_RUNS, NO_CELL_RUNS = "a cell runs", "no cell runs"
"""The values of `detail` in the extension's answer to PREEMPT."""


class GateVerb(StrEnum):
    """The broker's commands to the gate."""

    CLOSE = "close"  # close the gate if no cell runs; the answer is `closed` or `busy`
    SHRINK = "shrink"  # free cached device memory on the idle main loop; the answer is `done` or `busy`
    OPEN = "open"  # let cells run; carries the environment of the device
    NOTICE = "notice"  # show a sentence at the next cell
    PREEMPT = "preempt"  # close the gate for the next cell even if a cell runs; the answer is `closed` and says whether one runs
    LIMIT = "limit"  # the memory limit has changed; carries the environment


class GateCommand(Struct, frozen=True, kw_only=True):
    """A line in the gate stream.

    The answer to a command repeats its `number`. A command with the number 0 gets no answer. An empty verb is a keep-alive. A notice with
    `urgent` set is shown at once, even while a cell is running. A notice with a `topic` replaces an earlier one on that topic if no cell
    has shown it yet.
    """

    verb: str = ""
    number: int = 0
    sentence: str = ""
    environment: dict[str, str] = {}
    urgent: bool = False
    topic: str = ""


class GateHello(Struct, frozen=True, kw_only=True):
    """The first message from the extension. It says whether the gate is open and whether a cell is running."""

    version: str
    open: bool
    busy: bool
    managed: str = ""  # a sentence that explains why the process cannot be checkpointed, if known
    inputs: list[str] = []  # ids of the requests that use no GPU


class GateAnswer(Struct, frozen=True, kw_only=True):
    """An answer from the extension. `word` is closed, busy, done, managed, open, exempt or input.

    An answer with `number` 0 does not respond to a command. In that case, `exempt` means that the running cells do not use the GPU, and
    `done` means that the last of them has ended. `managed` means that the process cannot be checkpointed, and its `detail` explains why.
    The `detail` of `input` lists the ids of all requests that are waiting for input or cannot reach the GPU, separated by spaces. After a
    shrink, the `detail` of `done` says what was freed, with `reserved_mib=N` if the frameworks' allocators report that figure.
    """

    number: int
    word: str
    detail: str = ""


SLURM, KUBERNETES = "slurm", "kubernetes"
"""The engines whose jobs and pods hold seats."""


class Workload(Struct, frozen=True, kw_only=True):
    """A seat's job or pod. Only its processes may use the seat, and the seat ends when the job or pod does."""

    engine: str  # SLURM or KUBERNETES
    id: str  # a Slurm job's number, or a pod's UID
    # Path of the workload's control group on this node, below the mount point of the hierarchy (`/slurm/uid_1000/job_12`). If it is empty,
    # the broker takes the group of the first process of the workload that uses the seat.
    control_group: str = ""
