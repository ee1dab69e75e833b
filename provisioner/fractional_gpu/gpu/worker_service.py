"""Runs the checkpoint worker as a separate service: a supervisor on a UNIX socket that starts the worker for a broker.

jupyter gpu node worker --socket PATH

This is for containers: only the service's container needs privileges. The broker's container can neither start nor kill the worker, so the
broker asks the service to do so. Each connection has one worker. The first message carries the descriptors of the broker's claim
(SCM_RIGHTS), which the worker inherits. The supervisor itself takes the claim's lock first, so it starts a worker only if the claim is
free. The reply carries the broker's end of the channel and the worker's pidfd. If the broker sends anything else on the connection, the
worker is killed. If the connection closes, the worker finishes its operation. The peer's socket credentials must show that it runs as root
or as this process's user, and both processes must see the same pids. On SIGTERM, the service waits for the worker to finish its operation;
the worker ignores the signal.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Final

import msgspec

from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.gpu.open import backend_name
from fractional_gpu.gpu.worker import error_fields
from fractional_gpu.gpu.worker_process import Reply, Request, Worker, readable, receive, trusted_pid

log = logging.getLogger(__name__)

_BACKLOG: Final = 16
_REQUEST_S: Final = 10.0  # how long a peer may take to send its request
_REAP_S: Final = 0.5
_ACCEPT_AGAIN_S: Final = 0.5
SIMULATED: Final = "simulated"


class WorkerService:
    """The supervisor. `kind` is the kind of device; if it is `simulated`, the worker opens the simulated devices named by the broker."""

    def __init__(self, path: str, kind: str = "nvidia") -> None:
        self.path = path
        self._kind = kind
        self._worker: Worker | None = None
        self._channel: socket.socket | None = None  # the worker's end of the channel, used to stop the worker
        self._starting = asyncio.Lock()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop` is called. Raises OSError if the socket cannot be created. Cancellation kills the worker."""
        with contextlib.closing(listen(self.path)) as listener:
            log.info("the checkpoint worker's service (%s) is listening on %s", self._kind, self.path)
            accepting = asyncio.create_task(self._accept(listener))
            try:
                await self._stop.wait()
            finally:
                accepting.cancel()
                await self._finish()

    async def _finish(self) -> None:
        """Let the worker finish its operation, which has a deadline, then close all connections."""
        if self._channel is not None:
            self._channel.shutdown(socket.SHUT_RD)
        try:
            if self._worker is not None:
                await self._worker.wait()
        finally:
            if self._worker is not None and not self._worker.has_ended:
                self._worker.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors or memory left; the worker and waiting peers are not affected
                log.warning("cannot accept connections to %s right now: %s", self.path, error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.closing(connection):
            descriptors: list[int] = []
            try:
                pid = trusted_pid(connection)
                async with asyncio.timeout(_REQUEST_S):
                    request, descriptors = await receive(connection, Request)
                self._check(request, pid)
                async with self._starting:
                    worker = await self._start(connection, request.backend, descriptors, pid)
            except GPUError as error:
                log.warning("refused a connection to %s: %s", self.path, error)
                _send(connection, msgspec.json.encode(error_fields(error)))
                return
            except OSError as error:
                log.warning("a connection to %s failed: %s", self.path, error or "no request came in time")
                return
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            await self._supervise(connection, worker)

    def _check(self, request: Request, pid: int) -> None:
        """Raise GPUError if the broker is in a different pid namespace or has different devices."""
        if request.pid != pid:
            raise GPUError(
                GPUErrorCode.NOT_SUPPORTED,
                f"the broker has pid {request.pid} in its own namespace and {pid} here, but both must see the same pids; set hostPID: "
                "true for the pod of both containers",
            )
        simulated = self._kind == SIMULATED
        if not (request.backend.startswith("simulated:") if simulated else request.backend == backend_name(self._kind)):
            raise GPUError(
                GPUErrorCode.NOT_SUPPORTED,
                f"the broker's devices are {request.backend[:100]!r}, but this service drives {self._kind}; start it with the "
                "--backend NAME that matches the broker's devices",
            )

    async def _start(self, connection: socket.socket, backend: str, descriptors: list[int], pid: int) -> Worker:
        _take_claim(descriptors)
        # When a worker ends, its claim is released before this process sees the end.
        if self._worker is not None and not await self._worker.wait(_REAP_S):
            raise GPUError(
                GPUErrorCode.WORKER_BUSY,
                f"the checkpoint worker {self._worker.pid} of an earlier connection is still running",
            )
        if self._stop.is_set():
            raise GPUError(GPUErrorCode.WORKER_DIED, "the checkpoint worker's service is stopping")
        worker, channel = Worker.start(sys.executable, backend, descriptors)
        self._worker, self._channel = worker, channel
        log.info("started checkpoint worker %d for broker %d", worker.pid, pid)
        with worker.channel as theirs:  # after the block, only the broker has a copy
            _send(connection, msgspec.json.encode(Reply(pid=worker.pid)), theirs.fileno(), worker.pidfd)
        return worker

    async def _supervise(self, connection: socket.socket, worker: Worker) -> None:
        asking = asyncio.create_task(_kill_on_request(connection, worker))
        try:
            await worker.wait()  # even after the connection has ended, because the worker finishes its operation
        finally:
            asking.cancel()
            if self._worker is worker and self._channel is not None:
                self._channel.close()
                self._channel = None
        log.info("checkpoint worker %d ended with status %s", worker.pid, worker.status)


async def _kill_on_request(connection: socket.socket, worker: Worker) -> None:
    await readable(connection.fileno())
    with contextlib.suppress(OSError):
        if connection.recv(1):
            log.warning("killing checkpoint worker %d, as the broker requested", worker.pid)
            worker.kill()


def listen(path: str) -> socket.socket:
    """Return a listening socket with mode 0600. Replace an existing socket if no process is listening on it. Raises OSError.

    Create the folder if needed. It must belong to this user and not be writable by others, who could put their own socket there.
    """
    folder = Path(path).absolute().parent
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise PermissionError(
            errno.EPERM,
            f"the folder of the socket must belong to uid {os.geteuid()} and be writable by no other user; it belongs to uid "
            f"{status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}",
            str(folder),
        )
    found = os.lstat(path) if os.path.lexists(path) else None
    if found is not None:
        if not stat.S_ISSOCK(found.st_mode):
            raise FileExistsError(errno.EEXIST, "the path exists and is not a socket; move it away", path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker:
            try:
                asker.connect(path)
            except ConnectionRefusedError:  # a killed service left the socket, and no process listens on it
                Path(path).unlink()
            else:
                raise OSError(
                    errno.EADDRINUSE, "another checkpoint worker's service is listening there; stop it first", path
                )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(_BACKLOG)  # no process could connect before
    except OSError:
        listener.close()
        raise
    return listener


def _take_claim(descriptors: list[int]) -> None:
    """Lock the claim's file. This works even if the sender already holds the lock, because descriptors share it. Raises GPUError."""
    same, refused = "run the broker and this service from the same image", GPUErrorCode.NOT_PERMITTED
    if not descriptors:
        raise GPUError(refused, f"the broker sent no lock file; {same}")
    if not stat.S_ISREG(os.fstat(descriptors[0]).st_mode):
        raise GPUError(refused, f"the broker's lock file is not a regular file; {same}")
    try:
        fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise GPUError(
            GPUErrorCode.WORKER_BUSY, "another broker's checkpoint worker is still running; wait until it ends"
        ) from None
    except OSError as error:
        raise GPUError(refused, f"could not lock the broker's lock file: {error}") from error


def _send(connection: socket.socket, message: bytes, *descriptors: int) -> None:
    """Send a message, or drop it if the peer is gone or not reading."""
    with contextlib.suppress(OSError):
        socket.send_fds(connection, [message], descriptors)


def run_service(path: str, kind: str) -> None:
    async def serve() -> None:
        service = WorkerService(path, kind)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        await service.run()

    asyncio.run(serve())
