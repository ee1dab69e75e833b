"""The process behind a broker's socket, as its clients see it: who it is, why it may not answer, and what to do about that.

Standard library only: kernels load this when a broker does not answer.
"""

import hashlib
import os
import socket
import struct
from contextlib import closing
from pathlib import Path

__all__ = ["ANSWER_S", "claim_address", "claim_holder", "is_service_socket", "listener_pid", "not_answering"]

ANSWER_S = 5.0  # a person who looks, or asks for something, is told after so long that the broker does not answer

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_STOPPED, _TRACED = "T", "t"


def is_service_socket(path: str) -> bool:
    """Whether the socket is a system service's: under /run, but not in a user's own part of it."""
    real = Path(os.path.realpath(path))
    return real.is_relative_to("/run") and not real.is_relative_to("/run/user")


def claim_address(path: str) -> bytes:
    """Return the abstract address that the broker of a socket listens at: no file leads to it, so none can be deleted.

    Links are not followed: whoever deleted a folder may have put one in its place.
    """
    return b"\0jupyter-gpu-broker-" + hashlib.sha256(os.fsencode(Path(path).absolute())).hexdigest()[:32].encode(
        "ascii"
    )


def claim_holder(path: str) -> int | None:
    """Return the process that is the broker of this socket, or starts or ends as such; None if there is none to be seen.

    It is found, too, where the socket and all files beside it were deleted. Only this user's and root's processes count.
    """
    with closing(
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    ) as asker:
        try:
            asker.connect(claim_address(path))
            pid, uid, _ = _CREDENTIALS.unpack(
                asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
        except OSError:
            return None
    return pid or None if uid in (0, os.geteuid()) else None


def listener_pid(sock: socket.socket) -> int | None:
    """Return the process that listened on the socket that this one is connected to; None where it cannot be seen from here."""
    try:
        pid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    except OSError:
        return None  # this end was closed
    return pid or None  # 0: it is in a pid namespace that cannot be seen from here


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
    """Return the letter that /proc gives the process's state, "" if that cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text("ascii", errors="replace").split("\n"):
            if line.startswith("State:"):
                return line.split()[1]
    except (OSError, IndexError):
        return ""
    return ""
