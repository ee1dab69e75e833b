"""What the ledger keeps, as plain data.

Memory in MiB; times are wall-clock milliseconds since 1970, because they must survive a reboot.
"""

from dataclasses import dataclass

from provisioner.core.model import LeaseSpec, LeaseState

__all__ = ["LeaseRecord", "LedgerError", "LedgerInUseError", "OperationRecord", "RecordError", "StoryLine"]


class LedgerError(Exception):
    """The ledger cannot be read or written: which file, what is wrong with it and what to do, in one sentence."""


class LedgerInUseError(LedgerError):
    """Another process has the ledger open."""


class RecordError(LedgerError):
    """The file is sound, but what was asked does not fit what it says (unknown operation, ended lease)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A live lease: everything that a broker needs to find it again after a crash or a reboot."""

    spec: LeaseSpec
    state: LeaseState  # as last known; what is true is asked of the driver and of /proc
    generation: int
    device_id: str | None
    saved_mib: int
    uid: int  # of the user that it belongs to
    kernel_id: str
    token_sha256: str  # hexadecimal; the token itself is never stored
    boot_id: str  # with pid and start_time: the identity of the kernel process
    pid: int | None  # None: no process is attached
    start_time: int | None  # clock ticks since boot
    connection: str  # Jupyter's connection file as JSON text, or ""
    language: str
    ipykernel: bool
    created_ms: int
    suspends: int
    resumes: int
    home_device_id: str | None = None  # where its processes last had their memory: a checkpoint is of that device


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """A suspend or resume: intent first, then each phase before it is entered."""

    operation_id: int
    lease_id: str
    generation: int
    kind: str  # "suspend" or "resume"
    device_id: str
    phase: str
    begun_ms: int
    pids: str  # JSON: the processes that it touches
    saved_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryLine:
    """One recorded reason of something that happened to a lease."""

    at_ms: int
    reason: str  # machine-readable
    sentence: str  # for people
