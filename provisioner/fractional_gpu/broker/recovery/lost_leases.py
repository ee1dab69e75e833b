"""Finds live kernels whose leases are not in the ledger, because the ledger was deleted, moved or replaced by an older copy.

Each kernel's environment contains its lease's id and its broker's socket, and a file may hold a backup record (`lease_files`). If the
ledger has the lease, the ledger's record is used. Otherwise, a backup record is used if its process is alive, belongs to the named user,
and has the lease's id in its environment. A kernel without a record is only listed; `jupyter gpu rescue` writes a record for it. A process
can write its own environment, command line and connection file, so these are not trusted for sizes, priorities or other users.
"""

import json
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from fractional_gpu.broker.kernels.connection import check_endpoints, command_connection, connection_from_json
from fractional_gpu.broker.kernels.process_inspector import LEASE_VARIABLE
from fractional_gpu.broker.persistence.lease_files import read_records, remove_lease_file
from fractional_gpu.core.units import plural
from fractional_gpu.host.process import (
    ProcessIdentity,
    environment_value,
    find_ipykernel,
    is_alive,
    loads_extension,
    owner_uid,
    read_command,
    read_environment,
    scan,
)
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.messages import COMMAND

UNKNOWN_CONNECTION: Final = "{}"
"""The connection of a kernel whose connection file is gone. The broker cannot listen to such a kernel, so it counts as busy."""

_SOCKET_VARIABLE: Final = "JUPYTER_GPU_SOCKET"
KIND_VARIABLE: Final = "JUPYTER_GPU_KIND"
_NAME_VARIABLE: Final = "JPY_SESSION_NAME"
_LONGEST_FILE: Final = 64 * 1024  # bytes of a connection file
_LEASE_ID: Final = re.compile(r"[0-9a-zA-Z_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """A user's oldest process with a lease's id in its environment, which is probably the root of the kernel's process tree."""

    lease_id: str
    uid: int
    identity: ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The parsed command line of a process. `connection` is the checked JSON of a connection file, or UNKNOWN_CONNECTION."""

    connection: str = UNKNOWN_CONNECTION
    kernel_id: str = ""
    is_kernel: bool = False  # whether it names a connection file
    ipykernel: bool = False
    gated: bool = False  # whether it loads our extension
    label: str = ""


def carriers(uid: int | None, socket: str | None = None) -> list[Carrier]:
    """Return the oldest process of each lease and user, oldest first. Blocks. Raises OSError.

    With `socket`, ignore processes started for other brokers, even if they are older and have the same lease id.
    """
    snapshot = scan(LEASE_VARIABLE, None if uid is None else {uid})
    oldest: dict[tuple[str, int], Carrier] = {}
    for lease_id, members in snapshot.marked(uid).items():
        if not _LEASE_ID.fullmatch(lease_id):
            continue
        for identity in members:
            owner = snapshot.owner(identity)
            if owner is None or (lease_id, owner) in oldest:
                continue
            if socket is None or _is_for(identity.pid, socket):
                oldest[lease_id, owner] = Carrier(lease_id=lease_id, uid=owner, identity=identity)
    return sorted(oldest.values(), key=lambda one: (one.identity.start_time, one.identity.pid))


def _is_for(pid: int, socket: str) -> bool:
    try:
        own = environment_value(pid, _SOCKET_VARIABLE)
    except (ProcessLookupError, PermissionError):
        return False
    return bool(own) and os.path.realpath(str(own)) == os.path.realpath(socket)


def carries(pid: int, lease_id: str) -> bool:
    try:
        return pid > 0 and environment_value(pid, LEASE_VARIABLE) == lease_id
    except (ProcessLookupError, PermissionError):
        return False


def still_carries(identity: ProcessIdentity, uid: int, lease_id: str) -> bool:
    try:
        return is_alive(identity) and owner_uid(identity.pid) == uid and carries(identity.pid, lease_id)
    except (ProcessLookupError, PermissionError):
        return False


def command_of(one: Carrier) -> Command:
    pid = one.identity.pid
    try:
        kind = environment_value(pid, KIND_VARIABLE)
        words = read_command(pid)
        name = read_environment(pid).get(_NAME_VARIABLE, "")
    except OSError:
        return Command()
    if kind == COMMAND:
        # It is unknown whether the command serves clients. If it does and is idle, it must not stay on the device forever.
        connection = command_connection(served=True)
        return Command(connection=connection, is_kernel=True, label=printable(PurePath(words[0]).name)[:MAX_NAME])
    paths = [path for word in words if (path := word.rpartition("=")[2]).endswith(".json")]
    connection = next((text for path in paths if (text := _connection(path, one.uid, pid))), "")
    named = next((PurePath(path).stem for path in paths if PurePath(path).name.startswith("kernel-")), "")
    return Command(
        connection=connection or UNKNOWN_CONNECTION,
        kernel_id=printable(named.removeprefix("kernel-"))[:MAX_NAME],
        is_kernel=bool(connection or named),
        ipykernel=find_ipykernel(words) is not None,
        gated=loads_extension(words),
        label=printable(PurePath(name).name)[:MAX_NAME],
    )


def _connection(path: str, uid: int, pid: int) -> str:
    """Return the file's text if it is the user's own connection file, and otherwise ""."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
            return ""
        connection = json.loads(os.read(descriptor, _LONGEST_FILE))
        check_endpoints(connection_from_json(connection), uid, pid)
    except (OSError, ValueError, RecursionError):
        return ""
    finally:
        os.close(descriptor)
    return json.dumps(connection)


def lost_kernels(uid: int | None, socket: str, ledger: Ledger, known: Collection[str]) -> dict[str, ProcessIdentity]:
    """Return this socket's live kernels that are neither in the ledger nor in `known`. Blocks. Raises OSError or LedgerError."""
    return {
        one.lease_id: one.identity
        for one in carriers(uid, socket)
        if one.lease_id not in known and not ledger.has_lease(one.lease_id) and command_of(one).is_kernel
    }


def lost_sentence(lost: Mapping[str, ProcessIdentity]) -> str:
    pids = sorted(identity.pid for identity in lost.values() if is_alive(identity))
    if not pids:
        return ""
    return (
        f"the broker lost its records of {plural(len(pids), 'living kernel')} (process {', '.join(map(str, pids))}); the kernels "
        f"keep their variables; {REMEDY}"
    )


REMEDY: Final = "to restore lost records, run `jupyter gpu broker --stop && jupyter gpu rescue` (as an administrator if it is a service)"


def living_records(folder: Path, ledger: Ledger | None) -> list[LeaseRecord]:
    return [
        record
        for record in read_records(folder, LeaseRecord)
        if not (ledger is not None and ledger.has_lease(record.spec.lease_id))
        and record.identity is not None
        and still_carries(record.identity, record.uid, record.spec.lease_id)
    ]


def take_records(folder: Path, ledger: Ledger) -> list[LeaseRecord]:
    """Return the backup records of live kernels, and remove the files of ended leases. Blocks. Raises LedgerError."""
    found = living_records(folder, ledger)
    kept = {record.spec.lease_id for record in (*found, *ledger.live_leases())}
    for record in read_records(folder, LeaseRecord):
        if record.spec.lease_id not in kept:
            remove_lease_file(folder, record.spec.lease_id)
    return found
