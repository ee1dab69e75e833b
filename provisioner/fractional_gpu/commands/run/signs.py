"""Signs that a command which is suspended, or may be soon, needs the GPU: connections to its ports, and the use of the CPU.

The runner is no part of the command, and a call that waits for the GPU tells no other process so. What can be seen from outside:

- `Ports`: a connection to a port that the command serves, in the network namespace of the command. It is seen when the system has
  accepted it, before the command does.
- `CpuWatch`: processes that used the CPU, and then do not any more, may have come to a call that waits for the GPU. They may as well
  wait for anything else: then they come back in vain, and the next sign of the kind counts later.
"""

import errno
import os
import re
import socket
import struct
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from fractional_gpu.host.process import identify, scan

_ESTABLISHED: Final = 1  # numbers of the system, in its table and in its answers
_CLOSE_WAIT: Final = 8
HALF_CLOSED_S: Final = 60.0
"""A connection whose client has sent all that it will send counts for so long: it may wait for the answer, or be forgotten."""

_Connections = Iterable[tuple[bytes, int]]
"""What identifies each connection, and its state."""


class Ports:
    """Counts connections to ports (TCP over IPv4 and IPv6) of one process's network namespace.

    In the runner's own namespace the system is asked for these connections alone (`sock_diag`), which takes a quarter of a millisecond
    for a port. Elsewhere, or where it does not answer, its whole table is read, which takes some milliseconds.
    """

    def __init__(self, pid: int, ports: Collection[int]) -> None:
        self._tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
        self._ports = ports
        self._namespaces = Path(f"/proc/{pid}/ns/net"), Path("/proc/self/ns/net")
        self._half_closed: dict[bytes, float] = {}  # by connection, and since when

    def open(self, now_s: float) -> int:
        """Return how many are open; 0 when the process is gone. `now_s`: monotonic."""
        established, half_closed = 0, dict[bytes, float]()
        for connection, state in self._connections():
            if state == _ESTABLISHED:
                established += 1
            else:
                half_closed[connection] = self._half_closed.get(connection, now_s)
        self._half_closed = half_closed
        return established + sum(now_s - since_s < HALF_CLOSED_S for since_s in half_closed.values())

    def _connections(self) -> _Connections:
        with suppress(OSError):
            command, own = (namespace.readlink() for namespace in self._namespaces)
            if command == own:
                return [one for port in self._ports for family in _FAMILIES for one in diagnosed(family, port)]
        return [one for table in self._tables for one in tabled(table, self._ports)]


def tabled(table: Path, ports: Collection[int]) -> _Connections:
    """Return the connections to these local ports in a table such as /proc/PID/net/tcp; none where it cannot be read."""
    try:
        text = table.read_bytes()
    except OSError:  # no IPv6, or the process is gone
        return []
    named = "|".join(f"{port:04X}" for port in ports)
    # A line's number, its two ends, and its state.
    row = rf"^ *\d+: ([0-9A-F]+:(?:{named}) [0-9A-F:]+) (0{_ESTABLISHED}|0{_CLOSE_WAIT}) "
    return [(ends, int(state)) for ends, state in re.findall(row.encode(), text, re.MULTILINE)]


_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_SOCK_DIAG: Final = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY
_ERROR, _DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_HEADER: Final = struct.Struct("=IHHII")  # struct nlmsghdr
_ID_BYTES: Final = 2 + 2 + 16 + 16  # ports and addresses, the beginning of struct inet_diag_sockid
_ANSWER_S: Final = 1.0


def diagnosed(family: int, port: int) -> _Connections:
    """Return the same from the system's own answer, for the network namespace of this thread. Raises OSError where there is none."""
    states = 1 << _ESTABLISHED | 1 << _CLOSE_WAIT
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, states) + struct.pack("!H", port) + bytes(46)
    found: list[tuple[bytes, int]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as line:
        line.settimeout(_ANSWER_S)
        line.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 0, 0) + request)
        while True:
            answer = line.recv(1 << 18)
            while answer:
                length, kind, *_ = _HEADER.unpack_from(answer)
                if kind == _DONE:
                    return found
                if kind == _ERROR or length < _HEADER.size:
                    raise OSError(errno.EPROTO, "the system does not list connections")
                body, answer = answer[_HEADER.size : length], answer[(length + 3) & ~3 :]
                found.append((body[4 : 4 + _ID_BYTES], body[1]))


def cpu_us(pid: int) -> int:
    """Return how long the threads of a process and of its descendants have used the CPU, microseconds.

    Those that have ended count no more.
    """
    used, left = 0, [pid] if _HAS_CHILDREN else _tree(pid)
    while left:
        process = left.pop()
        try:
            threads = os.listdir(f"/proc/{process}/task")  # noqa: PTH208 - names are enough
        except OSError:  # it ended
            continue
        for thread in threads:
            used += _thread_us(f"/proc/{process}/task/{thread}")
            with suppress(OSError):
                left += map(int, Path(f"/proc/{process}/task/{thread}/children").read_bytes().split())
    return used


_HAS_CHILDREN: Final = Path("/proc/thread-self/children").exists()  # a kernel may be built without it


def _tree(pid: int) -> list[int]:
    """Return the ids of the process and its descendants: all of the machine's are read for it."""
    try:
        return [one.pid for one in scan().tree(identify(pid))]
    except OSError:  # it has ended
        return []


def _thread_us(folder: str) -> int:
    """Return what one thread has used, microseconds. The scheduler counts exactly, the older figure in hundredths of a second."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(folder, "schedstat").read_bytes().split()[0]) // 1000
    with suppress(OSError, ValueError, IndexError):
        fields = Path(folder, "stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1_000_000 // os.sysconf("SC_CLK_TCK")
    return 0


BUSY_US: Final = 5_000
"""A look in which the command used so much of the CPU finds it computing; in one with less it waits for something, perhaps for the GPU."""
USEFUL_US: Final = 1_000
"""One that came back and used less than that of the CPU came back in vain, unless the device saw work of it."""
LOOK_S: Final = 0.25
_DOUBTFUL: Final = 10
FIRST_PATIENCE_S: Final = 5.0
LONGEST_PATIENCE_S: Final = 600.0


class CpuWatch:
    """Decides, from looks at the CPU use of a command, when it may wait for the GPU while it is suspended. Pure: figures in, a sign out.

    - It used the CPU since its suspend, and a look finds it waiting: at once.
    - It used the CPU just before its suspend only: `FIRST_PATIENCE_S` after it. The suspend may have come before a call of the GPU.
    - It computes without a pause: after `LONGEST_PATIENCE_S`, as one of its threads may wait nevertheless.
    - It did not use the CPU at all: never. It waits for what it waited for before.

    Each time that it came back and then neither used the GPU nor computed, the next sign counts later: first `FIRST_PATIENCE_S` after its
    suspend, then twice as long each time, `LONGEST_PATIENCE_S` at most. Where no work on the GPU was seen ten times in a row, it counts
    after `FIRST_PATIENCE_S` at the earliest.
    """

    def __init__(self) -> None:
        self._in_vain = 0
        self._suspended_s = 0.0
        self._used_since_s: float | None = None
        self._used_before = False
        self._only_before = False
        self._last_us = 0
        self._away_us = 0  # its use when it was last seen suspended
        self._unseen = 0  # how often in a row it came back, and no work of it was seen
        self._woken = False

    @property
    def patience_s(self) -> float:
        """How long after its suspend a sign counts, seconds."""
        doubled = FIRST_PATIENCE_S * 2 ** (self._in_vain - 1) if self._in_vain else 0.0
        doubtful = self._only_before or self._unseen >= _DOUBTFUL
        return min(LONGEST_PATIENCE_S, max(doubled, FIRST_PATIENCE_S if doubtful else 0.0))

    def resident(self, used_us: int) -> None:
        """Note a look while it is on the GPU, or has just begun to leave it."""
        self._used_before, self._last_us = used_us != self._last_us, used_us

    def suspended(self, used_us: int, now_s: float, *, worked: bool) -> None:
        """Note that it was suspended. `worked`: it was seen to use the GPU since it came back last."""
        # Saving it may have used its CPU time, so the last look before that counts. It goes on as soon as it is back, before that is known
        # here: what it used since it was last seen suspended counts, though bringing it back may have a part in that.
        if worked or abs(self._last_us - self._away_us) >= USEFUL_US:
            self._in_vain = 0
        elif self._woken:
            self._in_vain = min(self._in_vain + 1, 30)
        if worked:
            self._unseen = 0
        elif self._woken:
            self._unseen += 1
        self._woken = False
        self._suspended_s, self._last_us, self._away_us = now_s, used_us, used_us
        self._only_before = self._used_before
        self._used_since_s = now_s if self._used_before else None

    def look(self, used_us: int, now_s: float) -> bool:
        """Return whether a look at the suspended command is a sign that it needs the GPU."""
        # What threads and processes that ended had used counts no more: any difference is use.
        step_us, self._last_us, self._away_us = abs(used_us - self._last_us), used_us, used_us
        if step_us > 0:
            self._only_before = False
            self._used_since_s = now_s if self._used_since_s is None else self._used_since_s
        if self._used_since_s is None or now_s - self._suspended_s < self.patience_s:
            return False
        if step_us >= BUSY_US and now_s - self._used_since_s < LONGEST_PATIENCE_S:
            return False
        self._woken, self._used_since_s = True, None
        return True

    def woken(self) -> None:
        """Note that it is brought back for another reason, such as a signal: whether that was of use says nothing."""
        self._woken = False
