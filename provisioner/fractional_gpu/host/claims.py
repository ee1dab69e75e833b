"""Claims devices for the whole host. A claim is a listening UNIX socket in the abstract namespace, so it is released when its holder exits.

Linux allows only one socket per name and removes it when the holder exits, for whatever reason. Other programs cannot remove it. A process
whose claim is refused sees the credentials of the process that made the existing claim, so claims should be made by a long-lived process.
Each network namespace has its own abstract namespace: if containers have separate networks, give each device to only one container. Claims
prevent mistakes, not attacks. The error for a refused claim names the holder's uid.
"""

import contextlib
import errno
import os
import socket
from typing import Final, Self

from fractional_gpu.host.peers import peer_credentials

_PREFIX: Final = "\0jupyter-gpu-device-"
_BACKLOG: Final = 1024
_MOST_AT_ONCE: Final = 64


class DeviceClaimedError(Exception):
    def __init__(self, device_id: str, pid: int | None, uid: int | None) -> None:
        holder = "a process that cannot be identified" if pid is None else f"process {pid} of user id {uid}"
        super().__init__(
            f"device {device_id} is already managed by {holder}, and a device can have only one broker. Use that broker, stop it, or give "
            "this one other devices. To share the machine among users, an administrator can run one broker for all (`jupyter gpu broker "
            "--service`)"
        )
        self.device_id = device_id
        self.pid = pid
        self.uid = uid


class NameClaim:
    """A claim on an abstract address, held until `close` or the end of the process. Create it with `NameClaim.take`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    @classmethod
    def take(cls, address: bytes) -> "NameClaim | tuple[int | None, int | None]":
        listener = _listening(address)
        return holder(address) if listener is None else NameClaim(listener)

    def fileno(self) -> int:
        """Return the listener's descriptor. It becomes readable when another process queries the claim; then call `drain`."""
        return self._listener.fileno()

    def drain(self) -> int:
        """Drop up to 64 queries from the queue, and return how many were dropped. Never blocks.

        A full queue would hide the holder from the next process that queries the claim. Raises OSError if no descriptor is free; in that
        case, retry later.
        """
        dropped = 0
        with contextlib.suppress(BlockingIOError):
            while dropped < _MOST_AT_ONCE:
                self._listener.accept()[0].close()
                dropped += 1
        return dropped

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceClaim(NameClaim):
    @classmethod
    def claim(cls, device_id: str) -> Self:
        address = os.fsencode(_PREFIX + device_id)
        listener = _listening(address)
        if listener is None:
            raise DeviceClaimedError(device_id, *holder(address))
        return cls(listener)


def _listening(address: bytes) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


def holder(address: bytes) -> tuple[int | None, int | None]:
    """Return the pid and uid of the process listening on an abstract address or a socket path.

    Return (None, None) if there is no such process, if its queue is full, or if this process may not connect to it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asker:
        try:
            asker.connect(address)
        except OSError:
            return None, None
        credentials = peer_credentials(asker)
    return credentials.pid, credentials.uid
