"""TCP ports for processes that are told theirs, or that take the same one again."""

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["free_port", "free_ports"]

_PARTS = 16


def free_ports(count: int) -> list[int]:
    """Ports below the range from which the system chooses.

    Until they are used no other test takes them: each process of `pytest -n` has a separate part, up to sixteen processes.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first, each = lowest // 3, (lowest - lowest // 3) // _PARTS
    first += int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PARTS * each
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(first, first + each)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def free_port() -> int:
    return free_ports(1)[0]
