"""Claims, starts and replaces the checkpoint worker, and sends it the broker's requests.

- Calls are served one at a time, in order. Each call has a deadline, measured from the moment the worker begins it. At the deadline, the
  worker is killed and the call raises GPUError WORKER_HUNG. If the worker dies or anything else fails, the call raises WORKER_DIED. In both
  cases it is unknown whether the operation succeeded, so read the target's state afterwards. The next call starts a new worker.
- A call that is cancelled before its turn is withdrawn. If a call has already begun, cancelling it only ends the wait: the operation
  continues, and later calls still have to wait for it to finish.
- The worker is replaced if the driver fails for unknown reasons on two targets in a row, and after `renew` (called after an Xid error, a
  reset or a system sleep), because the driver might be broken only in the worker's process.
- If the link was given a claim, calls raise GPUError WORKER_BUSY while an earlier broker's worker is still running.
- The worker runs in its own session, so Ctrl-C at the terminal does not reach it.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, MemoryLimit, ProcessState
from fractional_gpu.gpu.worker import MAX_MESSAGE, PROTOCOL
from fractional_gpu.gpu.worker_process import Reply, Worker, connect, parse
from fractional_gpu.host.claims import NameClaim
from fractional_gpu.host.files import open_own
from fractional_gpu.host.process import ProcessIdentity

# The claim is a lock on a file whose descriptor every worker inherits. It is released only when the broker *and* its workers have ended, so
# two workers never act on the same process. The file is never removed; it contains the pid of the last broker, for people. A cleaner may
# delete the file and its lock, so the claim also takes a name in the abstract namespace, which is inherited in the same way. Any user can
# take that name: if a user other than root and this one has it, only the lock counts.


_POLL_S: Final = 0.05


class WorkerClaim:
    """A broker's claim on the worker: a lock on the file `path`, and a socket address. The constructor and `take` can raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        self._held = False
        self._name: NameClaim | None = None
        self._waits_for_name = False

    def descriptors(self) -> tuple[int, ...]:
        return (self._descriptor,) if self._name is None else (self._descriptor, self._name.fileno())

    def take(self) -> bool:
        """Take the claim if it is free, and return whether we hold it. Never blocks. Raises OSError if the filesystem can't lock files."""
        if not self._held:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not self._take_name():
                return False
            self._held = True
            with suppress(OSError):  # the disk may be full, and the pid is only for people
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        return True

    def _take_name(self) -> bool:
        """Claim the worker's abstract socket address. Return False if an earlier broker's worker might still hold it."""
        digest = hashlib.sha256(os.fsencode(self.path.absolute())).hexdigest()[:32]
        found = NameClaim.take(b"\0jupyter-gpu-worker-" + digest.encode("ascii"))
        if isinstance(found, NameClaim):
            self._name = found
            return True
        # Each query stays in the holder's queue, and a full queue hides the holder, so the first answer counts.
        self._waits_for_name = self._waits_for_name or found[1] in (0, os.geteuid())
        return not self._waits_for_name

    async def wait(self) -> None:
        """Wait until we hold the claim. Raises the same errors as `take`. Cancellation leaves the claim unchanged."""
        while not self.take():  # noqa: ASYNC110 - another process frees it
            await asyncio.sleep(_POLL_S)

    def holder(self) -> str:
        pid = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
        return f"the broker that was process {pid}" if pid.isdigit() else "an earlier broker"

    def close(self) -> None:
        if self._name is not None:
            self._name.close()
            self._name = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


log = logging.getLogger(__name__)

START_S: Final = 60.0  # initialising a driver takes seconds
_ANSWER_S: Final = 10.0  # for quick operations such as unlock, and for a lock beyond its own timeout
_STATE_S: Final = 30.0  # while the driver is busy in the process, it does not answer
_KILL_S: Final = 5.0
_ALONE_S: Final = 2.0  # a worker whose broker is gone ends this long after a live broker would have killed it


class WorkerLink:
    """A connection to one worker for one backend (`nvidia` or `simulated:DIRECTORY`).

    If the worker is started in another container, `service` is the socket of the service there, and a claim is required. The caller must
    close `claim` after closing the link.
    """

    def __init__(self, backend: str, *, claim: WorkerClaim | None = None, service: str | None = None) -> None:
        if service is not None and claim is None:
            raise ValueError("a WorkerLink with `service` also needs a claim")
        self.backend = backend
        self._service = service
        self._claim = claim
        self._worker: Worker | None = None
        self._unkillable: Worker | None = None
        self._turn = asyncio.Lock()  # held by the current operation
        self._operation: asyncio.Task[Reply] | None = None
        self._closing = False
        # The targets on which the driver has failed for unknown reasons since its last success.
        self._unexplained: set[ProcessIdentity | None] = set()
        self._is_stale = False

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker is not None and not self._worker.has_ended else None

    async def wait_for_previous_worker(self) -> None:
        if self._claim is not None:
            await self._claim.wait()

    async def start(self) -> None:
        """Wait until the worker has opened its backend. Raises GPUError. Cancellation stops the wait, but not the worker."""
        await self._call("ping", None, _ANSWER_S)

    async def state(self, target: ProcessIdentity) -> ProcessState:
        """Return the process's checkpoint state, or GONE if the process has ended. Raises GPUError."""
        reply = await self._call("state", target, _STATE_S)
        try:
            return ProcessState(reply.state or "")
        except ValueError:
            return ProcessState.UNKNOWN

    async def lock(self, target: ProcessIdentity, timeout_ms: int) -> int:
        """Change RUNNING to LOCKED and return the microseconds taken. Raises GPUError; after NOT_READY, the process is still RUNNING."""
        deadline_s = timeout_ms / 1000 + _ANSWER_S
        return (await self._call("lock", target, deadline_s, timeout_ms=timeout_ms)).elapsed_us

    async def checkpoint(self, target: ProcessIdentity, deadline_s: float) -> int:
        return (await self._call("checkpoint", target, deadline_s)).elapsed_us

    async def restore(self, target: ProcessIdentity, moves: Mapping[str, str] | None, deadline_s: float) -> int:
        """Change CHECKPOINTED to LOCKED and return the microseconds taken. Raises GPUError; OUT_OF_MEMORY is fatal to the process."""
        return (await self._call("restore", target, deadline_s, moves=dict(moves) if moves else None)).elapsed_us

    async def unlock(self, target: ProcessIdentity) -> int:
        return (await self._call("unlock", target, _ANSWER_S)).elapsed_us

    async def set_limit(self, device_id: str, group: str, mib: int | None) -> None:
        """Limit a control group's memory on a device, or remove the limit if `mib` is None. Raises GPUError."""
        await self._call("set_limit", None, _ANSWER_S, device_id=device_id, group=group, mib=mib)

    async def read_limit(self, device_id: str, group: str) -> MemoryLimit | None:
        """Return a control group's memory limit on a device, or None if it has no limit. Raises GPUError."""
        reply = await self._call("read_limit", None, _ANSWER_S, device_id=device_id, group=group)
        return None if reply.limit is None else MemoryLimit(**reply.limit)

    def renew(self) -> None:
        """Make the next call start a new worker, because the driver state in the current one might be stale."""
        self._is_stale = True

    async def close(self) -> None:
        """Let the current operation finish within its deadline, then stop the worker. This method is idempotent.

        Calls still waiting for their turn raise GPUError WORKER_DIED. Cancelling this call kills the worker at once.
        """
        self._closing = True
        try:
            async with self._turn:
                if self._worker is not None:
                    await self._end(self._worker)
        except asyncio.CancelledError:
            if self._operation is not None:
                self._operation.cancel()
            await self._kill()
            raise

    async def _call(self, op: str, target: ProcessIdentity | None, deadline_s: float, **arguments: object) -> Reply:
        await self._turn.acquire()  # a cancellation here withdraws the call
        if self._closing:
            self._turn.release()
            raise _closed()
        self._operation = asyncio.create_task(
            self._serve(op, target, deadline_s, arguments), name=f"checkpoint worker: {op}"
        )
        self._operation.add_done_callback(self._finished)
        return await asyncio.shield(self._operation)  # after a cancellation here, the operation continues

    def _finished(self, operation: asyncio.Task[Reply]) -> None:
        self._turn.release()
        if not operation.cancelled():
            operation.exception()  # after a cancelled call, asyncio would log that the exception was never retrieved

    async def _serve(
        self, op: str, target: ProcessIdentity | None, deadline_s: float, arguments: Mapping[str, object]
    ) -> Reply:
        """Serve one call. Turn any failure into a GPUError, so that the caller sees the error and the next call is still served."""
        what = op if target is None else f"{op} of process {target.pid}"
        named = None if target is None else target.to_dict()
        request = {"op": op, "target": named, "deadline_s": deadline_s + _ALONE_S, **arguments}
        try:
            worker = self._worker
            if worker is not None and (self._is_stale or worker.has_ended):
                if self._is_stale:
                    log.warning("replacing the checkpoint worker %d: its driver may be in a broken state", worker.pid)
                await self._end(worker)
                worker = None
            if worker is None:
                worker = await self._begin()
            reply = await self._exchange(worker, msgspec.json.encode(request), deadline_s, what)
        except GPUError:
            raise
        except asyncio.CancelledError:
            raise _closed() from None
        except Exception as error:
            log.critical("the link to the checkpoint worker failed during %s", what, exc_info=error)
            await self._kill()
            sentence = f"could not request {what} from the checkpoint worker: {error!r}"
            raise GPUError(GPUErrorCode.WORKER_DIED, sentence) from error
        failure = reply.failure()
        if failure is None:
            self._unexplained.clear()
            return reply
        if failure.code is GPUErrorCode.UNKNOWN:
            self._unexplained.add(target)
            self._is_stale = self._is_stale or len(self._unexplained) > 1
        raise failure

    async def _begin(self) -> Worker:
        if self._unkillable is not None and not self._unkillable.has_ended:
            # Do not start a second worker, because both could act on the same process.
            raise GPUError(
                GPUErrorCode.WORKER_HUNG,
                f"the checkpoint worker {self._unkillable.pid} is hung in the driver and cannot be killed: nothing can be suspended or "
                "resumed until it is gone; you may have to restart the machine",
            )
        if self._claim is not None and not self._claim.take():
            raise GPUError(
                GPUErrorCode.WORKER_BUSY,
                f"the checkpoint worker of {self._claim.holder()} is still running: nothing can be suspended or resumed until it exits",
            )
        self._is_stale = False
        self._unexplained.clear()
        descriptors = () if self._claim is None else self._claim.descriptors()
        if self._service is not None:
            worker = await connect(self._service, self.backend, descriptors, patience_s=_ANSWER_S)
        else:
            worker, theirs = Worker.start(sys.executable, self.backend, descriptors)
            theirs.close()
        worker.channel.setblocking(False)
        self._worker = worker
        greeting = await self._exchange(worker, b"", START_S, f"opening {self.backend}")
        failure = greeting.failure()
        if failure is None and greeting.protocol != PROTOCOL:
            failure = GPUError(
                GPUErrorCode.WORKER_DIED,
                "the checkpoint worker and this broker have different versions: restart the broker, and run both from the same image",
            )
        if failure is not None:
            await self._end(worker)
            raise failure
        return worker

    async def _exchange(self, worker: Worker, request: bytes, deadline_s: float, what: str) -> Reply:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                if request:  # the greeting comes without a request
                    await loop.sock_sendall(worker.channel, request)
                return parse(await loop.sock_recv(worker.channel, MAX_MESSAGE), Reply)
        except TimeoutError:
            await self._kill()
            raise GPUError(
                GPUErrorCode.WORKER_HUNG,
                f"the checkpoint worker did not finish {what} within {deadline_s:g} s and was replaced",
            ) from None
        except OSError as error:
            await self._end(worker)
            raise GPUError(
                GPUErrorCode.WORKER_DIED, f"the checkpoint worker died during {what} (status {worker.status}): {error}"
            ) from error
        except GPUError as error:
            await self._kill()
            raise GPUError(GPUErrorCode.WORKER_DIED, f"the checkpoint worker failed during {what}: {error}") from error

    async def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        if not await worker.wait(_KILL_S):
            self._unkillable = worker
        worker.channel.close()

    async def _end(self, worker: Worker) -> None:
        """Wait for the worker to exit, so that its exit status is known. Kill the worker if it does not exit in time."""
        worker.channel.close()
        if not await worker.wait(_ANSWER_S):
            await self._kill()
        self._worker = None


def _closed() -> GPUError:
    return GPUError(GPUErrorCode.WORKER_DIED, "the link to the checkpoint worker was closed")
