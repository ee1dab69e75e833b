"""Who is at the other end of a UNIX socket, as the kernel vouches for it.

- The pid, uid and gid are those of the moment when the peer connected (or, for a listening peer, listened). The uid
and gid stay true for ever; the pid may since have been passed on to another process, so it is a hint until
identified.
"""

import errno
import fcntl
import socket
import struct
import termios
from typing import Final, NamedTuple

__all__ = ["PeerCredentials", "peer_credentials", "peer_groups", "tells_unread", "unread"]

_UCRED: Final = struct.Struct("iII")
_INT: Final = struct.Struct("i")
_SO_PEERGROUPS: Final = 59  # not among the names of Python's socket module
_GROUPS_BYTES: Final = 1024  # the most that Python's getsockopt takes: 256 groups


class PeerCredentials(NamedTuple):
    """The peer's process, user and group. `pid` is 0 when the peer is in a pid namespace that we cannot see into."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Return who connected. Raises ValueError if the socket is not UNIX or not connected, OSError if closed."""
    if sock.family != socket.AF_UNIX:
        raise ValueError(
            f"only UNIX sockets carry peer credentials; this one is {socket.AddressFamily(sock.family).name}"
        )
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid == 0xFFFFFFFF:  # what the kernel says of a socket that nobody connected
        raise ValueError("this UNIX socket has no peer: it is not connected")
    return PeerCredentials(pid, uid, gid)


def peer_groups(sock: socket.socket) -> frozenset[int]:
    """Return the groups of whoever connected, at that moment; of one with more than 256 only its first. Raises as `peer_credentials`."""
    gid = peer_credentials(sock).gid
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return frozenset({gid})
    return frozenset({gid, *struct.unpack(f"{len(raw) // 4}I", raw)})


def unread(sock: socket.socket) -> bool:
    """Return whether something that was written into this UNIX socket has not been read by its peer yet. Raises OSError if closed.

    A thread that is blocked in a read takes what comes without a further step of its program; one that polls first does not.
    """
    n_bytes: int = _INT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_INT.size)))[0]
    return n_bytes > 0


def tells_unread() -> bool:
    """Return whether `unread` can be trusted here: Linux tells it of UNIX sockets, and not everything that passes for Linux does."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            seen = [unread(ours)]
            ours.send(b"x")
            seen.append(unread(ours))
            theirs.recv(1)
            seen.append(unread(ours))
        except OSError:
            return False
    return seen == [False, True, False]
