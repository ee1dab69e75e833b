"""Manages a running checkpoint worker, started by this process or by a service in another container (`worker_service`).

Each message is a single JSON object in one packet of a SEQPACKET socket. The worker's pidfd becomes readable when the worker exits; a
service sends its worker's pidfd to the broker. Only the service can kill its worker, so nothing can kill the worker if the service is gone.
The service's socket credentials must show that it runs as root or as this process's user. Connecting is retried for several seconds,
because the service's container might be restarting.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from fractional_gpu.gpu import driver_environment
from fractional_gpu.gpu.interface import GPUError, GPUErrorCode
from fractional_gpu.gpu.worker import MAX_MESSAGE
from fractional_gpu.host.peers import peer_credentials

MAX_DESCRIPTORS: Final = 4
_RETRY_S: Final = 0.1

_Message = TypeVar("_Message")


class Request(msgspec.Struct):
    """A broker's request to the service, sent along with the claim's descriptors. `pid` is the broker's pid in its own namespace."""

    backend: str
    pid: int


class Reply(msgspec.Struct):
    protocol: int = 0  # only in the worker's first message
    pid: int = 0  # the pid of a worker that a service has started; the message carries the worker's channel and pidfd
    state: str | None = None
    elapsed_us: int = 0
    limit: dict[str, int] | None = None
    error: dict[str, str] | None = None

    def failure(self) -> GPUError | None:
        """Return the reply's error, or None if there is none. Unrecognised error codes become UNKNOWN."""
        if self.error is None:
            return None
        code = self.error.get("code", "")
        known = code in {one.value for one in GPUErrorCode}
        return GPUError(GPUErrorCode(code) if known else GPUErrorCode.UNKNOWN, self.error.get("message", ""))


class Worker:
    """A running worker. `channel` carries requests and replies. Create instances only while an event loop is running."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        channel: socket.socket,
        *,
        process: subprocess.Popen[bytes] | None = None,
        service: socket.socket | None = None,
    ) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.channel = channel
        self.status: int | str = "unknown"  # only the process that started the worker can read its exit status
        self._process = process
        self._service = service
        self._watch = asyncio.create_task(self._until_ended(), name=f"checkpoint worker {pid}")

    @classmethod
    def start(cls, python: str, backend: str, descriptors: Sequence[int]) -> tuple["Worker", socket.socket]:
        """Start a worker that inherits the descriptors. The caller must close the returned worker's end of the channel. Raises GPUError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = subprocess.Popen(
                [python, "-P", "-m", "fractional_gpu.gpu.worker", "--backend", backend],
                stdin=theirs.fileno(),
                start_new_session=True,
                env=driver_environment.cleaned(os.environ),
                pass_fds=descriptors,
            )
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            ours.close()  # if the worker has started, it ends when its channel is closed
            theirs.close()
            raise GPUError(GPUErrorCode.WORKER_DIED, f"could not start the checkpoint worker: {error}") from error
        return cls(process.pid, pidfd, ours, process=process), theirs

    @property
    def has_ended(self) -> bool:
        return self._watch.done()

    async def wait(self, limit_s: float | None = None) -> bool:
        """Wait until the worker exits or `limit_s` has passed, and return whether it has exited. Cancellation only stops the wait."""
        await asyncio.wait([self._watch], timeout=limit_s)
        return self.has_ended

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # the worker or its service has ended
            if self._service is not None:
                self._service.send(b"kill")
            else:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def _until_ended(self) -> None:
        try:
            await readable(self.pidfd)
            if self._process is not None:
                self.status = self._process.wait()
        finally:
            os.close(self.pidfd)
            if self._service is not None:
                self._service.close()


async def connect(path: str, backend: str, descriptors: Sequence[int], *, patience_s: float) -> Worker:
    """Ask the service at `path` to start a worker for `backend` that inherits the descriptors.

    Raises GPUError with the service's error, or WORKER_DIED if no service answers within `patience_s`. Cancellation closes the connection,
    which ends the worker.
    """
    problem = "it did not reply to the request for a worker"
    try:
        async with asyncio.timeout(patience_s):
            while True:
                service = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                try:
                    service.connect(path)
                    return await _request(service, path, backend, descriptors)
                except OSError as error:
                    service.close()
                    problem = str(error)
                except BaseException:
                    service.close()
                    raise
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise GPUError(
            GPUErrorCode.WORKER_DIED,
            f"the checkpoint worker's service on {path} is not responding: {problem}; check the container that runs `jupyter gpu node "
            f"worker --socket {path}`",
        ) from None


async def _request(service: socket.socket, path: str, backend: str, descriptors: Sequence[int]) -> Worker:
    trusted_pid(service)
    socket.send_fds(service, [msgspec.json.encode(Request(backend, os.getpid()))], descriptors)
    reply, received = await receive(service, Reply)
    if failure := reply.failure():
        raise failure
    if not reply.pid or len(received) != 2:
        raise GPUError(
            GPUErrorCode.WORKER_DIED,
            f"the checkpoint worker's service on {path} and this broker have different versions: run both from the same image",
        )
    channel, pidfd = received
    return Worker(reply.pid, pidfd, socket.socket(fileno=channel), service=service)


def trusted_pid(connection: socket.socket) -> int:
    peer = peer_credentials(connection)
    if peer.uid not in (0, os.geteuid()):
        raise GPUError(
            GPUErrorCode.NOT_PERMITTED,
            f"process {peer.pid} of uid {peer.uid} is connected to the checkpoint worker's socket, but only root and uid "
            f"{os.geteuid()} are trusted there",
        )
    return peer.pid


async def receive(connection: socket.socket, kind: type[_Message]) -> tuple[_Message, list[int]]:
    """Return the next message and its descriptors, which the caller must close. Raises OSError, or GPUError for an invalid message."""
    await readable(connection.fileno())
    data, descriptors, flags, _ = socket.recv_fds(connection, MAX_MESSAGE, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        return parse(data, kind, flags), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def parse(data: bytes, kind: type[_Message], flags: int = 0) -> _Message:
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):  # the descriptors that were dropped may hold the claim
        problem: object = f"such a message has at most {MAX_MESSAGE} bytes and {MAX_DESCRIPTORS} descriptors"
    else:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problem = error
    raise GPUError(GPUErrorCode.UNKNOWN, f"this is not a message from a checkpoint worker: {problem} ({data[:100]!r})")


async def readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(descriptor, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(descriptor)
