"""The right to have a checkpoint worker: at most one worker of one socket exists, also across the death of its broker.

The rules:
- The claim is a lock on a file. The broker takes it, and every worker inherits the descriptor: the claim is free when the broker
  *and* its workers have ended. A worker that outlives a killed broker finishes what it has in hand, and meanwhile the next broker
  starts none: two workers never act on one process.
- The file stays where it is; only the lock counts. It holds the pid of the last broker that had the claim, for people.
"""

import asyncio
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

__all__ = ["WorkerClaim"]

_POLL_S: Final = 0.05


class WorkerClaim:
    """The claim of one broker. Get one with `WorkerClaim.open`, which takes nothing yet."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._held = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the file, which is made if need be. Raises OSError."""
        return cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def fileno(self) -> int:
        """Return the descriptor that a worker inherits."""
        return self._descriptor

    def take(self) -> bool:
        """Take the claim if it is free, and say whether it is held now. Never blocks. Raises OSError if nobody can take any."""
        if not self._held:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._held = True
            with suppress(OSError):  # a full disk; the pid is for people only
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        return True

    async def wait(self) -> None:
        """Return when the claim is held. Raises as `take`. Cancellation leaves it as it is."""
        while not self.take():  # noqa: ASYNC110 - another process frees it
            await asyncio.sleep(_POLL_S)

    def holder(self) -> str:
        """Return who has the claim, for people."""
        pid = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
        return f"the broker that was process {pid}" if pid.isdigit() else "an earlier broker"

    def close(self) -> None:
        """Give up this broker's part of the claim. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
