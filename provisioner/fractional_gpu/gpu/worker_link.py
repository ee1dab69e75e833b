"""The broker's end of the checkpoint worker: claims the right to one, starts it, sends it requests, replaces it.

The rules:
- Calls are served one at a time, first come, first served.
- Every call has a deadline from the moment the worker begins with it. On expiry the worker is killed and the call raises
  GPUError WORKER_HUNG; when the worker dies, WORKER_DIED. Either way the result of the operation is unknown: read the
  target's state. The next call starts a new worker.
- Cancelling a call that waits for its turn withdraws it. Cancelling one that the worker has begun only stops
  the waiting: the operation goes on, its reply is consumed, and calls behind it wait for it as before.
- After any other failure in a call the worker is killed and the call raises WORKER_DIED: no call waits for ever.
- A worker whose driver fails without a known reason on two targets in a row is replaced before the next call, as is one that `renew` names:
  an Xid, a reset or a sleep of the machine may have left the driver broken in that process alone.
- With a claim, no worker is started before the claim is held, and every worker inherits it: calls raise GPUError WORKER_BUSY
  while the worker of an earlier broker still runs.
- With `service`, a socket, the worker is started by the service that listens there, in another container: `worker_remote`.
- The worker is in a session of its own, so an interrupt at the terminal does not reach it. It inherits no variable
  that changes CUDA's driver (`driver_environment`).
"""

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from fractional_gpu.gpu import driver_environment
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode, ProcessState
from fractional_gpu.gpu.worker import MAX_LINE, PROTOCOL, read_error
from fractional_gpu.gpu.worker_remote import RemoteWorker, connect
from fractional_gpu.host import files
from fractional_gpu.host.claims import NameClaim
from fractional_gpu.host.files import open_own
from fractional_gpu.host.process import ProcessIdentity

# The right to run a checkpoint worker: each socket has at most one worker, even after its broker was killed.
#
# The rules:
# - The claim is a lock on a file. The broker takes it, and every worker inherits the descriptor: the claim is free when the broker
#   *and* its workers have ended. A worker that outlives a killed broker finishes its operation, and meanwhile the next broker starts no
#   worker: two workers never act on one process.
# - The file is never removed; only the lock counts. Its content is the pid of the last broker that had the claim, for people.
# - A lock is lost with its file, and cleaners delete files. So the claim is also a name in the abstract namespace, which broker and
#   workers hold in the same way. Any user can take that name: if another user (not root) has it, the lock alone counts.


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


log = logging.getLogger(__name__)
WorkerProcess = asyncio.subprocess.Process | RemoteWorker

START_S: Final = 60.0  # initialising a driver takes seconds
_STATE_S: Final = 30.0  # a driver that is at work in the process answers only afterwards
_KILL_S: Final = 5.0
_ALONE_S: Final = 2.0  # a worker whose broker is gone ends itself so much later than a living broker would kill it


@dataclass(frozen=True, slots=True)
class _Call:
    op: str
    number: int
    line: bytes
    what: str  # for people
    target: str  # the process, "" if it is about none
    deadline_s: float
    answer: asyncio.Future[dict[str, Any]]


class WorkerLink:
    """One worker for one backend (`nvidia` or `simulated:DIRECTORY`).

    `answer_s` limits quick operations (unlock), and a lock beyond its own timeout; `start_s` limits the opening of the backend.
    Both in seconds. The caller closes `claim`, after the link.
    `service`: the socket of the service that starts the worker; it needs a claim.
    """

    def __init__(
        self,
        backend: str,
        *,
        python: str = sys.executable,
        answer_s: float = 10.0,
        start_s: float = START_S,
        claim: WorkerClaim | None = None,
        service: str | None = None,
    ) -> None:
        if service is not None and claim is None:
            raise ValueError("the service of a checkpoint worker starts none without a claim; pass one")
        self.backend = backend
        self._service = service
        self._claim = claim
        self._python = python
        self._answer_s = answer_s
        self._start_s = start_s
        self._process: WorkerProcess | None = None
        self._unkillable: WorkerProcess | None = None
        self._waiting: deque[_Call] = deque()
        self._more = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._closing = False
        self._number = 0
        # targets on which the driver failed for no known reason, without a success between
        self._unexplained: set[str] = set()
        self._is_stale = False

    @property
    def pid(self) -> int | None:
        """The worker's pid, None when none runs (the next call starts one)."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def wait_for_previous_worker(self) -> None:
        """Return when no worker of an earlier broker runs. Cancellation stops the waiting."""
        if self._claim is not None:
            await self._claim.wait()

    async def start(self) -> None:
        """Start the worker and wait until its backend is open. Raises GPUError with the reason when it cannot be.

        Cancellation stops the waiting; the worker is kept for the first call.
        """
        await self._call({"op": "ping"}, self._answer_s)

    async def state(self, identity: ProcessIdentity) -> ProcessState:
        """Return the process's state; GONE when there is no such process. Raises GPUError. For cancellation see above."""
        reply = await self._call({"op": "state", "target": identity.to_dict()}, max(_STATE_S, self._answer_s))
        try:
            return ProcessState(reply["state"])
        except ValueError:
            return ProcessState.UNKNOWN

    async def lock(self, identity: ProcessIdentity, timeout_ms: int) -> int:
        """RUNNING -> LOCKED; returns microseconds. Raises GPUError (NOT_READY: still running). For cancellation see above."""
        request = {"op": "lock", "target": identity.to_dict(), "timeout_ms": timeout_ms}
        return _elapsed(await self._call(request, timeout_ms / 1000 + self._answer_s))

    async def checkpoint(self, identity: ProcessIdentity, deadline_s: float) -> int:
        """LOCKED -> CHECKPOINTED; returns microseconds. Raises GPUError. For cancellation see above."""
        return _elapsed(await self._call({"op": "checkpoint", "target": identity.to_dict()}, deadline_s))

    async def restore(self, identity: ProcessIdentity, moves: Mapping[str, str] | None, deadline_s: float) -> int:
        """CHECKPOINTED -> LOCKED; returns microseconds. Raises GPUError (OUT_OF_MEMORY is fatal to the process).

        For cancellation see above.
        """
        request = {"op": "restore", "target": identity.to_dict(), "moves": dict(moves) if moves else None}
        return _elapsed(await self._call(request, deadline_s))

    async def unlock(self, identity: ProcessIdentity) -> int:
        """LOCKED -> RUNNING; returns microseconds. Raises GPUError. For cancellation see above."""
        return _elapsed(await self._call({"op": "unlock", "target": identity.to_dict()}, self._answer_s))

    def renew(self) -> None:
        """Have the next call served by a new worker: what the present one knows of the driver may be out of date."""
        self._is_stale = True

    async def close(self) -> None:
        """Let the current operation finish within its deadline, then end the worker. Idempotent.

        Calls that wait for their turn raise GPUError WORKER_DIED. Cancellation kills the worker at once.
        """
        self._closing = True
        self._fail_waiting()
        self._more.set()
        try:
            if self._runner is not None:
                await self._runner
            if self._process is not None:
                await self._end(self._process)
        except asyncio.CancelledError:
            if self._runner is not None:
                self._runner.cancel()
                self._runner = None
            if self._process is not None:
                await self._kill()
            raise

    async def _call(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        if self._closing:
            raise _closed()
        if self._runner is None:
            self._runner = asyncio.create_task(self._run(), name="checkpoint worker link")
        self._number += 1
        line = json.dumps({"id": self._number, "deadline_s": deadline_s + _ALONE_S, **request}).encode() + b"\n"
        if len(line) > MAX_LINE:
            raise GPUError(GPUErrorCode.UNKNOWN, f"a request of {len(line)} bytes is too long; at most {MAX_LINE}")
        what = f"{request['op']} of process {request['target']['pid']}" if "target" in request else "ping"
        target = json.dumps(request.get("target", ""))
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        call = _Call(request["op"], self._number, line, what, target, deadline_s, future)
        self._waiting.append(call)
        self._more.set()
        reply = await call.answer
        if not reply["ok"]:
            raise read_error(reply["error"])
        return reply

    async def _run(self) -> None:
        while not self._closing:
            if not self._waiting:
                self._more.clear()
                await self._more.wait()
                continue
            call = self._waiting.popleft()
            if call.answer.done():
                continue  # withdrawn while it waited
            try:
                reply = await self._served(call)
            except GPUError as error:
                if not call.answer.done():
                    call.answer.set_exception(error)
            except asyncio.CancelledError:
                if not call.answer.done():
                    call.answer.set_exception(_closed())
                raise
            else:
                if not call.answer.done():
                    call.answer.set_result(reply)

    async def _served(self, call: _Call) -> dict[str, Any]:
        """Serve the call. Raises GPUError for any failure: the caller must get it, and the next call must be served."""
        try:
            return await self._serve(call)
        except GPUError:
            raise
        except Exception as error:
            log.critical("the link to the checkpoint worker failed in %s", call.what, exc_info=error)
            await self._kill()
            sentence = f"the checkpoint worker could not be asked for {call.what}: {error!r}"
            raise GPUError(GPUErrorCode.WORKER_DIED, sentence) from error

    async def _serve(self, call: _Call) -> dict[str, Any]:
        process = self._process
        if process is not None and self._is_stale:
            log.warning("the checkpoint worker %d is replaced: its driver may be in a broken state", process.pid)
            await self._end(process)
            process = None
        if process is None or process.returncode is not None:
            process = await self._begin()
        files.reach(f"link.{call.op}.before")
        reply = await self._exchange(process, call.line, call.deadline_s, call.what)
        files.reach(f"link.{call.op}.after")
        if not _is_reply(reply):
            await self._kill()
            raise GPUError(
                GPUErrorCode.WORKER_DIED,
                f"the checkpoint worker answered {call.what} with what is no reply: {str(reply)[:200]}",
            )
        if reply["id"] != call.number:
            await self._kill()
            raise GPUError(GPUErrorCode.WORKER_DIED, f"the checkpoint worker answered another request than {call.what}")
        self._judge(call, reply)
        return reply

    def _judge(self, call: _Call, reply: Mapping[str, Any]) -> None:
        """Note whether the driver fails without a known reason, whatever the target is."""
        if reply["ok"]:
            self._unexplained.clear()
        elif reply["error"].get("code") == GPUErrorCode.UNKNOWN:
            self._unexplained.add(call.target)
            if len(self._unexplained) > 1:
                self.renew()

    async def _begin(self) -> WorkerProcess:
        if self._unkillable is not None and self._unkillable.returncode is None:
            # Two workers could act on the same process. One operation at a time is the safe rule.
            raise GPUError(
                GPUErrorCode.WORKER_HUNG,
                f"the checkpoint worker {self._unkillable.pid} hangs in the driver and cannot be killed: nothing can be "
                "suspended or resumed before it is gone; restarting the machine may be needed",
            )
        if self._claim is not None and not self._claim.take():
            raise GPUError(
                GPUErrorCode.WORKER_BUSY,
                f"the checkpoint worker of {self._claim.holder()} is still at work: nothing is suspended or resumed before it is done",
            )
        self._is_stale = False
        self._unexplained.clear()
        self._process = await self._started()
        greeting = await self._exchange(self._process, b"", self._start_s, f"opening {self.backend}")
        if "fatal" in greeting:
            await self._kill()
            raise read_error(greeting["fatal"])
        hello = greeting.get("hello")
        if not isinstance(hello, dict) or hello.get("protocol") != PROTOCOL:
            await self._kill()
            raise GPUError(
                GPUErrorCode.WORKER_DIED,
                f"the checkpoint worker is of another version than this broker (it said {greeting!r}): restart the broker",
            )
        return self._process

    async def _started(self) -> WorkerProcess:
        """Start a worker, or have the service start one. Raises GPUError."""
        descriptors = () if self._claim is None else self._claim.descriptors()
        if self._service is not None:
            return await connect(self._service, self.backend, descriptors, patience_s=self._answer_s)
        try:
            return await asyncio.create_subprocess_exec(
                *(self._python, "-P", "-m", "fractional_gpu.gpu.worker", "--backend", self.backend),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE,
                start_new_session=True,
                env=driver_environment.cleaned(os.environ),
                pass_fds=descriptors,
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no thread to watch it
            raise GPUError(GPUErrorCode.WORKER_DIED, f"the checkpoint worker cannot be started: {error}") from error

    async def _exchange(self, process: WorkerProcess, line: bytes, deadline_s: float, what: str) -> dict[str, Any]:
        """Write the line and read one; kill the worker and raise GPUError if none comes in time or it is no reply."""
        if process.stdin is None or process.stdout is None:
            raise GPUError(GPUErrorCode.WORKER_DIED, "the checkpoint worker was started without pipes")
        try:
            async with asyncio.timeout(deadline_s):
                if line:  # the greeting needs no request, and the worker may have ended after it: do not write
                    process.stdin.write(line)
                    await process.stdin.drain()
                answer = await process.stdout.readline()
            reply = json.loads(answer) if answer else None
        except TimeoutError:
            await self._kill()
            raise GPUError(
                GPUErrorCode.WORKER_HUNG,
                f"the checkpoint worker did not finish {what} within {deadline_s:g} s and was replaced",
            ) from None
        except OSError as error:
            await self._end(process)
            raise GPUError(GPUErrorCode.WORKER_DIED, f"the checkpoint worker died before {what}: {error}") from error
        except (ValueError, RecursionError) as error:
            await self._kill()
            raise GPUError(GPUErrorCode.WORKER_DIED, f"the checkpoint worker failed during {what}: {error}") from error
        if not isinstance(reply, dict):
            await self._end(process)
            status = process.returncode
            raise GPUError(GPUErrorCode.WORKER_DIED, f"the checkpoint worker died during {what} (status {status})")
        return reply

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_KILL_S):
                await process.wait()
        except TimeoutError:
            self._unkillable = process

    async def _end(self, process: WorkerProcess) -> None:
        """Let the worker end by itself, so that its exit status is its own; kill it if it does not."""
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(self._answer_s):
                await process.wait()
        except TimeoutError:
            await self._kill()
        self._process = None

    def _fail_waiting(self) -> None:
        while self._waiting:
            call = self._waiting.popleft()
            if not call.answer.done():
                call.answer.set_exception(_closed())


def _closed() -> GPUError:
    return GPUError(GPUErrorCode.WORKER_DIED, "the link to the checkpoint worker was closed")


def _is_reply(reply: Mapping[str, Any]) -> bool:
    """Return whether all fields of a reply are there, with their types."""
    return (
        type(reply.get("id")) is int
        and isinstance(reply.get("ok"), bool)
        and type(reply.get("elapsed_us")) is int
        and isinstance(reply.get("state"), str | None)
        and isinstance(reply.get("error"), type(None) if reply["ok"] else dict)
    )


def _elapsed(reply: dict[str, Any]) -> int:
    return int(reply["elapsed_us"])
