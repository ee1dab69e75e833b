"""TCP ports for processes that are told theirs, or that take the same one again."""

import random
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["free_port", "free_ports"]


def free_ports(count: int) -> list[int]:
    """Ports below those that the system gives away by itself: between now and their use only another test could take one."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(lowest // 3, lowest)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]
