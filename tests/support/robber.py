"""Takes TCP ports in every way in which a process gets one whose number it has not chosen.

Run as a program with an address and ports as its arguments: it says which of them it got, as JSON, and keeps those until its input ends.
"""

import json
import socket
import sys
from contextlib import suppress

__all__ = ["rob"]

_IP_LOCAL_PORT_RANGE = 51  # Linux 6.3 and newer: the ports from which the system chooses for this socket
_OPTIONS = ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))


def rob(ip: str, ports: list[int]) -> list[socket.socket]:
    """Return a socket for each port that was free."""
    with socket.create_server((ip, 0)) as server:
        return [taken for port in ports if (taken := _rob(server.getsockname(), port)) is not None]


def _rob(server: tuple[str, int], port: int) -> socket.socket | None:
    for options in _OPTIONS:
        for connects in (True, False):
            thief = socket.socket()
            for option in options:
                thief.setsockopt(socket.SOL_SOCKET, option, 1)
            with suppress(OSError):
                thief.setsockopt(
                    socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, (port << 16 | port).to_bytes(4, sys.byteorder)
                )
                if connects:
                    thief.connect(server)
                else:
                    thief.bind((server[0], 0))
                if thief.getsockname()[1] == port:
                    return thief
            thief.close()
    thief = socket.socket()  # an older Linux: as if the port were given to any process that asks
    try:
        thief.bind((server[0], port))
    except OSError:
        thief.close()
        return None
    return thief


if __name__ == "__main__":
    robbed = rob(sys.argv[1], [int(word) for word in sys.argv[2:]])
    sys.stdout.write(json.dumps([thief.getsockname()[1] for thief in robbed]) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for thief in robbed:
        thief.close()
