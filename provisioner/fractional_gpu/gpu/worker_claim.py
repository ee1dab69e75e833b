"""The right to run a checkpoint worker: each socket has at most one worker, even after its broker was killed.

The rules:
- The claim is a lock on a file. The broker takes it, and every worker inherits the descriptor: the claim is free when the broker
  *and* its workers have ended. A worker that outlives a killed broker finishes its operation, and meanwhile the next broker starts no
  worker: two workers never act on one process.
- The file is never removed; only the lock counts. Its content is the pid of the last broker that had the claim, for people.
- A lock is lost with its file, and cleaners delete files. So the claim is also a name in the abstract namespace, which broker and workers
  hold in the same way. Any user can take that name: if another user (not root) has it, the lock alone counts.
"""

import asyncio
import fcntl
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from fractional_gpu.host.claims import NameClaim
from fractional_gpu.host.files import open_own

__all__ = ["WorkerClaim"]

_POLL_S: Final = 0.05


class WorkerClaim:
    """The claim of one broker. Get one with `WorkerClaim.open`, which takes nothing yet."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._held = False
        self._name: NameClaim | None = None
        self._waits_for_name = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the file, which is made if need be. Raises OSError."""
        return cls(path, open_own(path, os.O_RDWR | os.O_CREAT))

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that a worker inherits."""
        return (self._descriptor,) if self._name is None else (self._descriptor, self._name.fileno())

    def take(self) -> bool:
        """Take the claim if it is free, and return whether it is held now. Never blocks. Raises OSError if this filesystem has no locks."""
        if not self._held:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not self._take_name():
                return False
            self._held = True
            with suppress(OSError):  # a full disk; the pid is for people only
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        return True

    def _take_name(self) -> bool:
        """Take the name, and return False if a worker of an earlier broker may be alive that holds it."""
        digest = hashlib.sha256(os.fsencode(self.path.absolute())).hexdigest()[:32]
        found = NameClaim.take(b"\0jupyter-gpu-worker-" + digest.encode("ascii"))
        if isinstance(found, NameClaim):
            self._name = found
            return True
        # Each query stays in the holder's queue, and a full queue hides who the holder is: so the first answer counts.
        self._waits_for_name = self._waits_for_name or found[1] in (0, os.geteuid())
        return not self._waits_for_name

    async def wait(self) -> None:
        """Return when the claim is held. Raises as `take`. Cancellation leaves it as it is."""
        while not self.take():  # noqa: ASYNC110 - another process frees it
            await asyncio.sleep(_POLL_S)

    def holder(self) -> str:
        """Return which process has the claim, for people."""
        pid = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
        return f"the broker that was process {pid}" if pid.isdigit() else "an earlier broker"

    def close(self) -> None:
        """Give up this broker's part of the claim. Idempotent."""
        if self._name is not None:
            self._name.close()
            self._name = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
