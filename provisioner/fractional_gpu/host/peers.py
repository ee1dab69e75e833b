"""Queries the peer of a UNIX socket: its credentials, as reported by Linux, and whether it has read everything sent to it.

The pid, uid and gid are those the peer had when it connected or began to listen. Another process might have the pid by now, so the pid is
only a hint until the process has been identified.
"""

import errno
import fcntl
import socket
import struct
import termios
from typing import Final, NamedTuple

_UCRED: Final = struct.Struct("iII")
_INT: Final = struct.Struct("i")
_SO_PEERGROUPS: Final = 59  # missing from Python's socket module
_GROUPS_BYTES: Final = 1024  # Python's limit for getsockopt, which is enough for 256 groups


class PeerCredentials(NamedTuple):
    """A peer's credentials. `pid` is 0 if the peer's pid namespace is not visible from here."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    if sock.family != socket.AF_UNIX:
        raise ValueError(
            f"only UNIX sockets carry peer credentials; this one is {socket.AddressFamily(sock.family).name}"
        )
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid == 0xFFFFFFFF:  # the kernel's value for a socket without a peer
        raise ValueError("this UNIX socket is not connected")
    return PeerCredentials(pid, uid, gid)


def peer_groups(sock: socket.socket) -> frozenset[int]:
    """Return the groups the peer was in when it connected, or only its primary group if there were more than 256. Raises ValueError."""
    gid = peer_credentials(sock).gid
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return frozenset({gid})
    return frozenset({gid, *struct.unpack(f"{len(raw) // 4}I", raw)})


def unread(sock: socket.socket) -> bool:
    """Return whether the peer still has data to read. Data it has read might not have been handled yet."""
    n_bytes: int = _INT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_INT.size)))[0]
    return n_bytes > 0
