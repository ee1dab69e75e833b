"""The process that listens on a broker's socket: its pid, why it may not answer, and what to do about that."""

import hashlib
import os
import socket
import struct
from contextlib import closing
from pathlib import Path

__all__ = ["ANSWER_S", "claim_address", "claim_holder", "is_service_socket", "listener_pid", "not_answering"]

ANSWER_S = 5.0  # after so long a person learns that the broker does not answer

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_STOPPED, _TRACED = "T", "t"


def is_service_socket(path: str) -> bool:
    """Whether the socket is a system service's: under /run, but not in a user's own part of it."""
    real = Path(os.path.realpath(path))
    return real.is_relative_to("/run") and not real.is_relative_to("/run/user")


def claim_address(path: str) -> bytes:
    """Return the abstract address at which the broker of a socket listens, too: it has no file that could be deleted.

    Links are not followed: a deleted folder may have been replaced by one.
    """
    return b"\0jupyter-gpu-broker-" + hashlib.sha256(os.fsencode(Path(path).absolute())).hexdigest()[:32].encode(
        "ascii"
    )


def claim_holder(path: str) -> int | None:
    """Return the process that is this socket's broker, or starts or ends as such; None if there is none.

    Finds it even if the socket and all files beside it were deleted. Only processes of this user and of root count.
    """
    with closing(
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    ) as client:
        try:
            client.connect(claim_address(path))
            pid, uid, _ = _CREDENTIALS.unpack(
                client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
        except OSError:
            return None
    return pid or None if uid in (0, os.geteuid()) else None


def listener_pid(sock: socket.socket) -> int | None:
    """Return the process that listens on the socket to which this one is connected; None if it cannot be identified."""
    try:
        pid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    except OSError:
        return None  # this end was closed
    return pid or None  # 0: it is in another pid namespace


def not_answering(path: str, seconds: float, pid: int | None) -> str:
    """Return the sentence about a broker that did not answer within `seconds`: its process, its state and what to do."""
    who = f"the GPU broker at {path}{f' (process {pid})' if pid is not None else ''}"
    return f"{who} did not answer within {seconds:g} s: {_remedy(path, pid)}"


def _remedy(path: str, pid: int | None) -> str:
    state = _state(pid) if pid is not None else ""
    if state == _STOPPED:
        return f"that process is stopped; `kill -CONT {pid}` lets it go on"
    if state == _TRACED:
        return "a debugger holds that process; it goes on when the debugger lets it"
    if is_service_socket(path):
        return (
            "the machine may be overloaded, or the broker hangs; then an administrator restarts it with "
            "`systemctl restart jupyter-gpu`, which loses nothing of any kernel"
        )
    return (
        "the machine may be overloaded, or the broker hangs; then restart it with "
        f"`jupyter gpu broker --restart --socket {path}`, which loses nothing of any kernel"
    )


def _state(pid: int) -> str:
    """Return the letter of the process's state in /proc, "" if it cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text("ascii", errors="replace").split("\n"):
            if line.startswith("State:"):
                return line.split()[1]
    except (OSError, IndexError):
        return ""
    return ""
