"""The broker's end of a checkpoint worker that another container's service started (`worker_service`).

`RemoteWorker` stands where a child process stands in the link: the same pipes, `kill`, `wait` and return code.

The rules:
- The claim's descriptors go to the service, and from there to the worker.
- The service's socket belongs to root or to this process's user, by the kernel's word; a socket of anybody else is refused.
- While the service does not answer, connecting is repeated for some seconds: its container may be restarting.
- The end of the service is not the end of its worker, which holds the claim for as long as it lives. The worker has ended when the
  service says so, or when both the service and the worker's pipe have ended.
- A kill is a request to the service. Without a service nothing can kill the worker: then it counts as one that cannot be killed.
"""

import asyncio
import contextlib
import json
import os
import socket
import time
from typing import Final

from fractional_gpu import __version__
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.gpu.worker import MAX_LINE, read_error
from fractional_gpu.gpu.worker_service import MAX_DESCRIPTORS, MAX_MESSAGE, SERVICE_PROTOCOL, parse, readable
from fractional_gpu.host.peers import peer_credentials

_RETRY_S: Final = 0.1
STATUS_UNKNOWN: Final = -1  # the service ended before its worker, so no process read the exit status


class _Input(asyncio.StreamWriter):
    """The requests' half of the pipe."""

    def close(self) -> None:
        """Tell the worker that nothing more comes. The other half stays open: its end is the worker's end. Idempotent."""
        if not self.is_closing():
            self.write_eof()

    async def close_both(self) -> None:
        self.transport.close()
        with contextlib.suppress(OSError):
            await self.wait_closed()


class _Replies(asyncio.StreamReader):
    """The replies' half of the pipe; `ended` is set when the worker has closed it, whether or not all was read."""

    def __init__(self) -> None:
        super().__init__(limit=MAX_LINE)
        self.ended = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.ended.set()

    def set_exception(self, exc: Exception) -> None:
        """Note the end of a worker that died with a request unread: the pipe is reset then, and has no end of file."""
        super().set_exception(exc)
        self.ended.set()


class RemoteWorker:
    """A worker of a service. Get one from `connect`."""

    def __init__(self, pid: int, control: socket.socket, stdin: _Input, stdout: _Replies) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._control = control
        self._status: int | None = None
        self._watch = asyncio.create_task(self._until_ended(), name="checkpoint worker's service")

    @property
    def returncode(self) -> int | None:
        """The exit status, STATUS_UNKNOWN if no process read it; None while the worker runs."""
        return self._status

    def kill(self) -> None:
        """Have the service kill it. Raises ProcessLookupError if it has ended, or if its service has."""
        try:
            self._control.send(json.dumps({"kill": True}).encode())
        except OSError as error:
            raise ProcessLookupError(str(error)) from error

    async def wait(self) -> int:
        """Return the exit status when the worker has ended. Cancellation stops the waiting only."""
        return await asyncio.shield(self._watch)

    async def _until_ended(self) -> int:
        with contextlib.closing(self._control):
            status = await self._reported()
            if status is None:
                # The service has ended. Its worker may live: it ends with its operation, and its half of the pipe with it.
                # Our half is closed only afterwards: to close both would look like the worker's end.
                status = STATUS_UNKNOWN
                await self.stdout.ended.wait()
            self._status = status
            await self.stdin.close_both()
            return status

    async def _reported(self) -> int | None:
        """Return the status that the service reports, None if the service ends first."""
        while True:
            await readable(self._control)
            try:
                data = self._control.recv(MAX_MESSAGE)
                status = parse(data).get("ended") if data else None
            except (OSError, GPUError):
                return None
            if not data or type(status) is int:
                return status


async def connect(path: str, backend: str, descriptors: tuple[int, ...], *, patience_s: float) -> RemoteWorker:
    """Have the service at the path start a worker for `backend` that inherits the descriptors.

    Raises GPUError: WORKER_DIED if no service answers within `patience_s` seconds, else as the service refuses. Cancellation gives up
    the connection, and the worker ends.
    """
    deadline = time.monotonic() + patience_s
    while True:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            control.connect(path)
            return await _request(control, path, backend, descriptors, deadline)
        except OSError as error:
            control.close()
            if time.monotonic() > deadline:
                raise GPUError(
                    GPUErrorCode.WORKER_DIED,
                    f"the checkpoint worker's service on {path} does not answer: {error}; look at the container that runs "
                    f"`jupyter gpu node worker --socket {path}`",
                ) from error
        except BaseException:
            control.close()
            raise
        await asyncio.sleep(_RETRY_S)


async def _request(
    control: socket.socket, path: str, backend: str, descriptors: tuple[int, ...], deadline: float
) -> RemoteWorker:
    """Send the request and return the worker. Raises GPUError, and OSError if the service ends meanwhile."""
    peer = peer_credentials(control)
    if peer.uid not in (0, os.geteuid()):
        raise GPUError(
            GPUErrorCode.NOT_PERMITTED,
            f"{path} is served by process {peer.pid} of uid {peer.uid}, which is no checkpoint worker of ours: only root's and "
            f"uid {os.geteuid()}'s is used",
        )
    request = {"protocol": SERVICE_PROTOCOL, "version": __version__, "backend": backend, "pid": os.getpid()}
    socket.send_fds(control, [json.dumps(request).encode()], descriptors)
    try:
        async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
            await readable(control)
    except TimeoutError:
        raise GPUError(
            GPUErrorCode.WORKER_HUNG,
            f"the checkpoint worker's service on {path} did not answer the request for a worker",
        ) from None
    data, received, _, _ = socket.recv_fds(control, MAX_MESSAGE, MAX_DESCRIPTORS)
    pipes = [socket.socket(fileno=descriptor) for descriptor in received]
    try:
        pid = _started(path, data, len(pipes))
        loop, stdout = asyncio.get_running_loop(), _Replies()
        protocol = asyncio.StreamReaderProtocol(stdout)
        transport, _ = await loop.create_unix_connection(lambda: protocol, sock=pipes[0])
        stdin = _Input(transport, protocol, stdout, loop)
    except BaseException:
        for pipe in pipes:
            pipe.close()
        raise
    return RemoteWorker(pid, control, stdin, stdout)


def _started(path: str, data: bytes, n_pipes: int) -> int:
    """Return the worker's pid from the service's reply. Raises GPUError, and ConnectionResetError for no reply."""
    if not data:
        raise ConnectionResetError("it closed the connection")
    reply = parse(data)
    if "fatal" in reply:
        raise read_error(reply["fatal"])
    started = reply.get("started")
    pid = started.get("pid") if isinstance(started, dict) else None
    if type(pid) is not int or n_pipes != 1:
        raise GPUError(
            GPUErrorCode.WORKER_DIED,
            f"the checkpoint worker's service on {path} is of another version than this broker (it said {str(reply)[:200]}): run "
            "both from the same image",
        )
    return pid
