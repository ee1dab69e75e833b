"""The records of the ledger, as plain data.

Memory in MiB. Times in milliseconds since 1970, since they must survive a reboot: dates by the wall clock, deadlines
(`pinned_until_ms`, `expires_ms`) by `fractional_gpu.broker.clock.DeadlineClock`, which cannot be set.
"""

from dataclasses import dataclass, field, replace

from fractional_gpu.core.events import ResizeRequested
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.protocol.status import KernelFacts, Seat


class LedgerError(Exception):
    """The ledger cannot be read or written. The message says which file, what is wrong and what to do."""


class LedgerInUseError(LedgerError):
    """Another process has the ledger open."""


class RecordError(LedgerError):
    """The file is sound, but this write contradicts its contents (an ended lease) or cannot be stored."""


@dataclass(slots=True, kw_only=True)
class Launch:
    """The client's description of the kernel, from its requests for the lease and for attaching the process.

    The broker changes it; a `LeaseRecord` holds a copy.
    """

    language: str = ""
    ipykernel: bool = True
    server: ProcessIdentity | None = None  # the only process that starts the lease's kernel; None: unknown
    had_process: bool = False  # a process was attached: if there is none now, it has ended
    token_file: str = ""  # as in the kernel process's environment
    started_on: tuple[str, ...] = ()  # the devices that a kernel without a gate was bound to in the reply
    claim: bool = False  # keeps room for programs of its user that the broker does not know
    holder: ProcessIdentity | None = None  # the claim ends with this process
    group: str = ""  # control group of the claim's user or seat
    command: bool = False  # not a kernel: its runner, `server`, says when it needs the GPU
    in_job: bool = False  # started in a checkpoint job: its forked children do not keep it from being saved
    served: bool = False  # judged by its connections alone if a device does not count its work

    def attached(self, *, server: ProcessIdentity | None, token_file: str, language: str, ipykernel: bool) -> None:
        self.server, self.token_file, self.had_process = server, token_file, True
        self.language, self.ipykernel = language, ipykernel


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A live lease: all that a broker needs to restore it after a crash or reboot. The ledger stores it as one document."""

    spec: LeaseSpec
    state: LeaseState  # last known; after a restart ask the driver and /proc
    generation: int
    device_ids: tuple[str, ...]  # all its devices
    saved_mib: int
    uid: int  # the user
    token_sha256: str  # hexadecimal; the token itself is never stored
    connection: str = field(repr=False)  # Jupyter's connection file as JSON text, or ""
    created_ms: int
    launch: Launch
    identity: ProcessIdentity | None  # None: no process is attached
    facts: KernelFacts = field(default_factory=KernelFacts)
    home_ids: tuple[str, ...] = ()  # where its processes last had memory; a checkpoint belongs to these devices
    pinned_until_ms: int = 0  # 0: not pinned
    members: tuple[ProcessIdentity, ...] = ()  # processes seen in the kernel's tree
    released: bool = False  # its kernel has ended for good; the lease ends with the remaining processes
    taken_over: bool = False  # a server before its seat's started the kernel
    own_size: ResizeRequested | None = None  # in a burst: the size to return to

    @property
    def device_id(self) -> str | None:
        return self.device_ids[0] if self.device_ids else None


class SeatRecord(Seat, frozen=True, kw_only=True):
    token_sha256: str
    created_ms: int
    expires_ms: int | None  # None: confirmed, stays until ended
    group_seen: bool = False  # its workload's control group was seen: once gone, the workload is over
    boot_id: str = ""  # from when the workload got the seat: a reboot ends workloads


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """A user's use of a pool on one day (days since 1970, UTC), all kernels together. Times in milliseconds."""

    owner: str
    pool: str
    day: int
    live_ms: int  # while kernels existed
    busy_ms: int  # while kernels were busy on a device
    busy_mib_ms: int  # device memory in use while busy, MiB times milliseconds

    def __add__(self, more: "UsageRecord") -> "UsageRecord":
        return replace(
            self,
            live_ms=self.live_ms + more.live_ms,
            busy_ms=self.busy_ms + more.busy_ms,
            busy_mib_ms=self.busy_mib_ms + more.busy_mib_ms,
        )
