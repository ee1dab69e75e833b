"""Where a kernel's sockets may be: only where no other user can have put them, since the broker connects there with its own rights.

- A UNIX socket: in a folder that the kernel's user owns and nobody else can write, below folders where nobody else can exchange it.
- A TCP port (of a loopback address, which `iopub.connection_from_json` checks): none of those that system services listen on.
"""

import os
import stat
from pathlib import Path
from typing import Final

from fractional_gpu.broker.kernels.iopub import Connection

__all__ = ["check_endpoints"]

_FIRST_PORT: Final = 1024
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


def check_endpoints(connection: Connection, uid: int) -> None:
    """Check the endpoints of a kernel of this user. Blocks (folders may lie on a network). Raises ValueError, one sentence."""
    for endpoint in (connection.iopub, connection.shell):
        transport, _, address = endpoint.partition("://")
        if transport == "ipc":
            _check_folder(Path(address).parent, uid)
        elif uid != 0 and int(address.rpartition(":")[2]) < _FIRST_PORT:
            raise ValueError(
                f"the kernel's port {address.rpartition(':')[2]} is one of the system's; allowed: from {_FIRST_PORT} on"
            )


def _check_folder(folder: Path, uid: int) -> None:
    advice = (
        "; start the kernel with its `ip` in a folder that its user alone can write, such as Jupyter's runtime folder"
    )
    try:
        # What the path leads to now; nobody but its user and root can lead it elsewhere, or it is refused.
        real = Path(os.path.realpath(folder, strict=True))
        statuses = [(one, one.stat()) for one in (real, *real.parents)]
    except OSError as error:
        raise ValueError(
            f"the folder of the kernel's sockets, {folder}, cannot be used: {error.strerror}{advice}"
        ) from None
    own, above = statuses[0][1], statuses[1:]
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != uid:
        raise ValueError(
            f"{folder}, the place of the kernel's sockets, is not a folder of its user (uid {uid}){advice}"
        )
    if own.st_mode & _WRITABLE:
        mode = f"{stat.S_IMODE(own.st_mode):04o}"
        raise ValueError(f"others may write to the folder of the kernel's sockets, {folder} (mode {mode}){advice}")
    for one, status in above:
        if status.st_uid not in {uid, 0} or (status.st_mode & _WRITABLE and not status.st_mode & stat.S_ISVTX):
            raise ValueError(
                f"others may exchange the folder of the kernel's sockets, {folder}, since they may write to {one}{advice}"
            )
