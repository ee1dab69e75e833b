"""What `/proc` says about processes that carry a lease in their environment, for a broker that lost its ledger.

- A process writes its environment, its command line and its connection file itself. So they decide nothing about sizes, priorities or
  other users: only the uid and the identity of the process come from the operating system.
- A file that the command line names is read only if it belongs to the process's user, and without waiting for it.
"""

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from fractional_gpu.broker.kernels.connection import check_endpoints, connection_from_json
from fractional_gpu.broker.kernels.process_inspector import LEASE_VARIABLE
from fractional_gpu.host.ipykernel_command import find_ipykernel, loads_extension
from fractional_gpu.host.process import (
    PROC,
    ProcessIdentity,
    environment_value,
    is_alive,
    owner_uid,
    read_environment,
    read_file,
)
from fractional_gpu.host.tree import scan
from fractional_gpu.protocol.codec import printable
from fractional_gpu.protocol.limits import MAX_NAME

__all__ = ["UNKNOWN_CONNECTION", "Carrier", "Command", "carriers", "carries", "command_of", "still_carries"]

UNKNOWN_CONNECTION: Final = "{}"
"""Stands for the connection of a kernel whose connection file is gone: it cannot be heard, so it counts as busy."""

_SOCKET_VARIABLE: Final = "JUPYTER_GPU_SOCKET"
_NAME_VARIABLE: Final = "JPY_SESSION_NAME"
_LONGEST_FILE: Final = 64 * 1024  # bytes of a connection file
_LEASE_ID: Final = re.compile(r"[0-9a-zA-Z_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """The oldest process of a user that carries a lease's id: by all appearances the root of its kernel's tree."""

    lease_id: str
    uid: int
    identity: ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a process's command line says of it. `connection`: a connection file's JSON, checked, or UNKNOWN_CONNECTION."""

    connection: str = UNKNOWN_CONNECTION
    kernel_id: str = ""
    is_kernel: bool = False  # it names a connection file
    ipykernel: bool = False
    gated: bool = False  # our extension is to load
    label: str = ""


def carriers(uid: int | None, socket: str | None = None) -> list[Carrier]:
    """Return the oldest process of each lease and user, oldest first; of one user only if `uid` is given.

    With `socket`, only those that were started for the broker on that socket. Blocks. Raises OSError.
    """
    snapshot = scan(LEASE_VARIABLE)
    oldest: dict[tuple[str, int], Carrier] = {}
    for lease_id, members in snapshot.marked(uid).items():
        if not _LEASE_ID.fullmatch(lease_id):
            continue
        for identity in members:
            owner = snapshot.owner(identity)
            if owner is not None:
                oldest.setdefault((lease_id, owner), Carrier(lease_id=lease_id, uid=owner, identity=identity))
    found = sorted(oldest.values(), key=lambda one: (one.identity.start_time, one.identity.pid))
    return [one for one in found if socket is None or _is_for(one.identity.pid, socket)]


def _is_for(pid: int, socket: str) -> bool:
    try:
        own = environment_value(pid, _SOCKET_VARIABLE)
    except (ProcessLookupError, PermissionError):
        return False
    return bool(own) and os.path.realpath(str(own)) == os.path.realpath(socket)


def carries(pid: int, lease_id: str) -> bool:
    """Return whether the process that has this pid now carries the lease."""
    try:
        return pid > 0 and environment_value(pid, LEASE_VARIABLE) == lease_id
    except (ProcessLookupError, PermissionError):
        return False


def still_carries(identity: ProcessIdentity, uid: int, lease_id: str) -> bool:
    """Return whether exactly this process lives, belongs to the user, and carries the lease."""
    try:
        return is_alive(identity) and owner_uid(identity.pid) == uid and carries(identity.pid, lease_id)
    except (ProcessLookupError, PermissionError):
        return False


def command_of(one: Carrier) -> Command:
    """Return what the process's command line says; an empty `Command` for a process that is gone. Blocks."""
    pid = one.identity.pid
    try:
        words = [os.fsdecode(word) for word in read_file(f"{PROC}/{pid}/cmdline").split(b"\0")]
        name = read_environment(pid).get(_NAME_VARIABLE, "")
    except OSError:
        return Command()
    paths = [path for word in words if (path := word.rpartition("=")[2]).endswith(".json")]
    connection = next((text for path in paths if (text := _connection(path, one.uid))), "")
    named = next((PurePath(path).stem for path in paths if PurePath(path).name.startswith("kernel-")), "")
    return Command(
        connection=connection or UNKNOWN_CONNECTION,
        kernel_id=printable(named.removeprefix("kernel-"))[:MAX_NAME],
        is_kernel=bool(connection or named),
        ipykernel=find_ipykernel(words) is not None,
        gated=loads_extension(words),
        label=printable(PurePath(name).name)[:MAX_NAME],
    )


def _connection(path: str, uid: int) -> str:
    """Return the connection file's text if it is one, and the user's own; else ""."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
            return ""
        connection = json.loads(os.read(descriptor, _LONGEST_FILE))
        check_endpoints(connection_from_json(connection), uid)
    except (OSError, ValueError, RecursionError):
        return ""
    finally:
        os.close(descriptor)
    return json.dumps(connection)
