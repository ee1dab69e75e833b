"""Removes the token files of leases that have ended: a client that is killed leaves its own behind.

The path is what the kernel's environment says, so it is not trusted. Only a file whose name begins with the lease's id and ends with
`.token` is removed, and only from a folder of the lease's user (or root) that no other user may write to. The client's filesystem may
hang (NFS, FUSE), so one thread of its own does it, and no decision waits for that thread. What cannot be removed stays: it opens nothing.
"""

import asyncio
import contextlib
import logging
import os
import queue
import stat
import threading
from pathlib import PurePath
from typing import Final

__all__ = ["TokenFiles"]

log = logging.getLogger(__name__)

_SUFFIX: Final = ".token"
_MOST_WAITING: Final = 1024
_CLOSE_S: Final = 1.0
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TokenFiles:
    """The removals of one broker. All methods are for its event loop."""

    def __init__(self) -> None:
        self._due: queue.Queue[tuple[PurePath, int] | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def remove(self, lease_id: str, path: str, uid: int) -> None:
        """Have the token's file of a lease of this user removed soon. Another name than a token's is ignored, as is "" for no file."""
        name = PurePath(path).name
        if not (name.startswith(lease_id) and name.endswith(_SUFFIX)):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="token-files", daemon=True)
            self._thread.start()
        with contextlib.suppress(queue.Full):  # its filesystem hangs
            self._due.put_nowait((PurePath(path), uid))

    async def close(self) -> None:
        """Remove what is due and stop; a filesystem that hangs is not waited for longer than a second."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._due.put_nowait(None)
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            path, uid = due
            try:
                _remove(path, uid)
            except OSError as error:
                log.debug("the token's file %s stays: %s", path, error.strerror)


def _remove(path: PurePath, uid: int) -> None:
    """Remove the file from a folder in which only the user could have put it. Raises OSError."""
    folder = os.open(path.parent, _FOLDER)
    try:
        status = os.fstat(folder)
        if status.st_uid in {uid, 0} and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.unlink(path.name, dir_fd=folder)
    finally:
        os.close(folder)
