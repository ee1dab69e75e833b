"""The ledger's records, as plain data.

Memory is in MiB. Times are in milliseconds since 1970, so that they remain valid after a reboot. Dates come from the wall clock. Deadlines
(`pinned_until_ms`, `expires_ms`) come from `fractional_gpu.broker.clock.DeadlineClock`, which cannot be set.
"""

from dataclasses import dataclass, field, replace

from fractional_gpu.core.events import ResizeRequested
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.protocol.status import KernelFacts, Seat


class LedgerError(Exception):
    """The ledger cannot be read or written. The message names the file and says what is wrong and what to do."""


class LedgerInUseError(LedgerError):
    """Another process has the ledger open."""


class RecordError(LedgerError):
    """The file is intact, but this write cannot be stored or contradicts its contents (for example, because the lease has ended)."""


@dataclass(slots=True, kw_only=True)
class Launch:
    """The client's description of the kernel, as sent in its requests for the lease and for attaching the process.

    The broker modifies this object. A `LeaseRecord` contains a copy of it.
    """

    language: str = ""
    ipykernel: bool = True
    server: ProcessIdentity | None = None  # the only process that may start the lease's kernel, or None if unknown
    had_process: bool = False  # a process was attached, so it has ended if there is none now
    token_file: str = ""  # as in the environment of the kernel's process
    started_on: tuple[str, ...] = ()  # the devices in the reply to which a kernel without a gate was bound
    claim: bool = False  # whether it keeps room for programs of its user that the broker does not know
    holder: ProcessIdentity | None = None  # the claim ends when this process ends
    group: str = ""  # the control group of the claim's user or seat
    command: bool = False  # not a kernel; its runner, `server`, says when it needs the GPU
    in_job: bool = False  # started in a checkpoint job, so forked children do not keep it from being saved
    served: bool = False  # if a device does not count its work, only its connections show whether it is in use

    def attached(self, *, server: ProcessIdentity | None, token_file: str, language: str, ipykernel: bool) -> None:
        self.server, self.token_file, self.had_process = server, token_file, True
        self.language, self.ipykernel = language, ipykernel


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A live lease, with everything a broker needs to restore it after a crash or reboot. The ledger stores it as one document."""

    spec: LeaseSpec
    state: LeaseState  # the last known state; after a restart, ask the driver and /proc
    generation: int
    device_ids: tuple[str, ...]  # all devices of the lease
    saved_mib: int
    uid: int  # the user
    token_sha256: str  # in hexadecimal; the token itself is never stored
    connection: str = field(repr=False)  # Jupyter's connection file as JSON text, or ""
    created_ms: int
    launch: Launch
    identity: ProcessIdentity | None  # None if no process is attached
    facts: KernelFacts = field(default_factory=KernelFacts)
    home_ids: tuple[str, ...] = ()  # where its processes last had memory; a checkpoint belongs to these devices
    pinned_until_ms: int = 0  # 0 if not pinned
    members: tuple[ProcessIdentity, ...] = ()  # processes seen in the kernel's tree
    released: bool = False  # its kernel has ended for good; the lease ends with the remaining processes
    taken_over: bool = False  # whether a server that ran before its seat's server started the kernel
    own_size: ResizeRequested | None = None  # during a burst, the size to return to

    @property
    def device_id(self) -> str | None:
        return self.device_ids[0] if self.device_ids else None


class SeatRecord(Seat, frozen=True, kw_only=True):
    token_sha256: str
    created_ms: int
    expires_ms: int | None  # None if the seat is confirmed and stays until it is ended
    group_seen: bool = False  # whether the workload's control group was seen; once it is gone, the workload is over
    boot_id: str = ""  # the boot in which the workload got the seat; a reboot ends all workloads


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """One user's usage of a pool on one day, added up over all kernels.

    Days are counted from 1970, in UTC. Times are in milliseconds.
    """

    owner: str
    pool: str
    day: int
    live_ms: int  # how long kernels existed
    busy_ms: int  # how long kernels were busy on a device
    busy_mib_ms: int  # device memory in use while busy, in MiB times milliseconds

    def __add__(self, more: "UsageRecord") -> "UsageRecord":
        return replace(
            self,
            live_ms=self.live_ms + more.live_ms,
            busy_ms=self.busy_ms + more.busy_ms,
            busy_mib_ms=self.busy_mib_ms + more.busy_mib_ms,
        )
