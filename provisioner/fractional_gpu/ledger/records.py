"""The records of the ledger, as plain data.

Memory in MiB; times are milliseconds since 1970, because they must survive a reboot: dates by the wall clock, deadlines
(`pinned_until_ms`, `expires_ms`) by `fractional_gpu.broker.clock.DeadlineClock`, which cannot be set.
"""

from dataclasses import dataclass, field, replace

from fractional_gpu.core.events import ResizeRequested
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.protocol.status import KernelFacts, Seat


class LedgerError(Exception):
    """The ledger cannot be read or written: which file, what is wrong with it and what to do, in one sentence."""


class LedgerInUseError(LedgerError):
    """Another process has the ledger open."""


class RecordError(LedgerError):
    """The file is sound, but the write contradicts its contents (an ended lease), or fails alone while others can be written."""


@dataclass(slots=True, kw_only=True)
class Launch:
    """What the client said about the kernel when it asked for the lease and when it attached the process.

    The broker changes it; a `LeaseRecord` has a copy.
    """

    language: str = ""
    ipykernel: bool = True
    server: ProcessIdentity | None = None  # the only process that starts the lease's kernel; None: unknown
    had_process: bool = False  # a process was attached: while there is none, it has ended
    token_file: str = ""  # as the environment of the kernel's process names it
    started_on: tuple[str, ...] = ()  # the devices that the reply to its request bound a kernel without a gate to
    command: bool = False  # it is no kernel: its runner, which is `server`, says when it needs the GPU
    served: bool = False  # judged only by the connections to it, if a device does not count its work

    def attached(self, *, server: ProcessIdentity | None, token_file: str, language: str, ipykernel: bool) -> None:
        self.server, self.token_file, self.had_process = server, token_file, True
        self.language, self.ipykernel = language, ipykernel


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A live lease: everything that a broker needs to restore it after a crash or a reboot. The ledger has it as one document."""

    spec: LeaseSpec
    state: LeaseState  # as last known; after a restart the driver and /proc are queried
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
    home_ids: tuple[str, ...] = ()  # where its processes last had their memory; a checkpoint belongs to these devices
    pinned_until_ms: int = 0  # 0: not pinned
    members: tuple[ProcessIdentity, ...] = ()  # processes that were seen in the kernel's tree
    released: bool = False  # its kernel has ended for good; the lease ends with the processes that the kernel left
    taken_over: bool = False  # an earlier server than its seat's started its kernel
    own_size: ResizeRequested | None = None  # in a burst: the size to which it goes back

    @property
    def device_id(self) -> str | None:
        return self.device_ids[0] if self.device_ids else None


class SeatRecord(Seat, frozen=True, kw_only=True):
    token_sha256: str
    created_ms: int
    expires_ms: int | None  # None: confirmed, it stays until it is ended
    group_seen: bool = False  # its workload's control group was there: once it is gone, the workload is over
    boot_id: str = ""  # of the machine when the workload got the seat: no workload outlives it


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """A user's usage of a pool on one day (days since 1970, UTC), summed over kernels. Times in milliseconds."""

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
