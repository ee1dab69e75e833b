"""Maintains a running command's lease: reports when the command needs the GPU, prints notices, and carries on if the broker exits.

One thread follows the lease's state. Another looks for signs that the command needs the GPU, and when it finds one, starts a third thread
to wait for the GPU. If the broker has exited, it is not restarted until the command needs the GPU. All of these are daemon threads, and
none of them ever terminates the command.
"""

import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.commands.terminal.progress import WaitLine
from fractional_gpu.commands.terminal.text import say as write
from fractional_gpu.host.process import identify, scan
from fractional_gpu.jupyter.kernel_lease import KernelLease
from fractional_gpu.protocol.errors import (
    BrokerUnavailableError,
    FractionalGPUError,
    InternalBrokerError,
    TooManyRequestsError,
)
from fractional_gpu.protocol.messages import AcquireRequest, ProgressKind

_ESTABLISHED: Final = 1  # TCP states
_CLOSE_WAIT: Final = 8
HALF_CLOSED_S: Final = 60.0
"""How long a half-closed connection counts as open, because its client may still be waiting for an answer."""


class Ports:
    """A counter of TCP connections (IPv4 and IPv6) to the given ports in the runner's network namespace. Counting takes 0.25 ms per port.

    If the system cannot list connections, the ports are always treated as connected.
    """

    def __init__(self, ports: Collection[int]) -> None:
        self._ports = ports
        self._half_closed: dict[bytes, float] = {}  # maps each connection to the time since which it is half-closed

    def open(self, now_s: float) -> int:
        established, half_closed = 0, dict[bytes, float]()
        try:
            connections = [one for port in self._ports for family in _FAMILIES for one in diagnosed(family, port)]
        except OSError:
            return 1
        for connection, state in connections:
            if state == _ESTABLISHED:
                established += 1
            else:
                half_closed[connection] = self._half_closed.get(connection, now_s)
        self._half_closed = half_closed
        return established + sum(now_s - since_s < HALF_CLOSED_S for since_s in half_closed.values())


_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_SOCK_DIAG: Final = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY
_ERROR, _DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_HEADER: Final = struct.Struct("=IHHII")  # struct nlmsghdr
_ID_BYTES: Final = 2 + 2 + 16 + 16  # ports and addresses, the beginning of struct inet_diag_sockid
_ANSWER_S: Final = 1.0


def diagnosed(family: int, port: int) -> list[tuple[bytes, int]]:
    """Return the identity and TCP state of each established or half-closed connection to this local port. Raises OSError."""
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
                    raise OSError(errno.EPROTO, "the system cannot list connections")
                body, answer = answer[_HEADER.size : length], answer[(length + 3) & ~3 :]
                found.append((body[4 : 4 + _ID_BYTES], body[1]))


def cpu_us(pid: int) -> int:
    """Return the CPU time of a process and its live descendants, in microseconds."""
    used, left = 0, [pid] if _HAS_CHILDREN else _tree(pid)
    while left:
        process = left.pop()
        try:
            threads = os.listdir(f"/proc/{process}/task")  # noqa: PTH208 - names are enough
        except OSError:  # the process ended
            continue
        for thread in threads:
            used += _thread_us(f"/proc/{process}/task/{thread}")
            with suppress(OSError):
                left += map(int, Path(f"/proc/{process}/task/{thread}/children").read_bytes().split())
    return used


_HAS_CHILDREN: Final = Path("/proc/thread-self/children").exists()  # a kernel may be built without it


def _tree(pid: int) -> list[int]:
    try:
        return [one.pid for one in scan().tree(identify(pid))]
    except OSError:  # the process has ended
        return []


def _thread_us(folder: str) -> int:
    """Return a thread's CPU time in microseconds.

    The time is read from schedstat or, if that fails, from stat, which has a resolution of one clock tick.
    """
    with suppress(OSError, ValueError, IndexError):
        return int(Path(folder, "schedstat").read_bytes().split()[0]) // 1000
    with suppress(OSError, ValueError, IndexError):
        fields = Path(folder, "stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1_000_000 // os.sysconf("SC_CLK_TCK")
    return 0


BUSY_US: Final = 5_000
"""A command that uses at least this much CPU time between two readings is computing. One that uses less is waiting, perhaps for the GPU."""
USEFUL_US: Final = 1_000
"""A resume counts as unnecessary if the command uses less CPU time than this afterwards and does not use the device."""
LOOK_S: Final = 0.25
_DOUBTFUL: Final = 10
FIRST_PATIENCE_S: Final = 5.0
LONGEST_PATIENCE_S: Final = 600.0


class CpuWatch:
    """A heuristic that uses a suspended command's CPU time to decide when it may be waiting for the GPU. It does no I/O.

    The command is assumed to be waiting for the GPU:

    - Immediately, if it has used the CPU since it was suspended, but is now hardly using it.
    - After `FIRST_PATIENCE_S`, if it last used the CPU just before it was suspended, because it may have been about to use the GPU.
    - After `LONGEST_PATIENCE_S`, if it computes without pausing, because one of its threads may be waiting.
    - Never, if it has not used the CPU at all, because it must still be waiting for the same thing as before it was suspended.

    A resume counts as unnecessary if the command neither used the GPU nor computed afterwards. At least `FIRST_PATIENCE_S` must then pass
    after the next suspend before the command is assumed to be waiting. This delay doubles with each further unnecessary resume, up to
    `LONGEST_PATIENCE_S`. After ten resumes in a row without GPU work, the delay is at least `FIRST_PATIENCE_S`.
    """

    def __init__(self) -> None:
        self._in_vain = 0
        self._suspended_s = 0.0
        self._used_since_s: float | None = None
        self._used_before = False
        self._only_before = False
        self._last_us = 0
        self._away_us = 0  # its CPU time when it was last seen suspended
        self._unseen = 0  # number of resumes in a row without visible GPU work
        self._woken = False

    @property
    def patience_s(self) -> float:
        doubled = FIRST_PATIENCE_S * 2 ** (self._in_vain - 1) if self._in_vain else 0.0
        doubtful = self._only_before or self._unseen >= _DOUBTFUL
        return min(LONGEST_PATIENCE_S, max(doubled, FIRST_PATIENCE_S if doubtful else 0.0))

    def resident(self, used_us: int) -> None:
        self._used_before, self._last_us = used_us != self._last_us, used_us

    def suspended(self, used_us: int, now_s: float, *, worked: bool) -> None:
        # Saving may use the command's CPU time, so the last look before the suspend counts. After a resume, the command runs before we
        # notice it. So its use since it was last seen suspended counts, although the resume may be part of that use.
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
        # The CPU time of ended threads and processes no longer counts, so the total can fall. Any difference is use.
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
        self._woken = False


PORT_LOOK_S: Final = 0.1  # while the command is suspended
_RESIDENT_PORT_LOOK_S: Final = 0.5
_LINGER_S: Final = 1.0  # the lease stays in use this long after the last connection, as browsers open several in a row
_RESIDENT_LOOK_S: Final = 1.0
_RETRY_S: Final = 1.0
_RESIDENT: Final = "resident"
_SUSPENDED: Final = "suspended"
_GONE: Final = "unattached"
_NOTICE_S: Final = 1.0  # how long to wait for the broker to explain why the command was killed
_PASSING: Final = (BrokerUnavailableError, InternalBrokerError, TooManyRequestsError)
"""Errors that mean the broker cannot answer at the moment. They say nothing about the lease."""


def say(sentence: str) -> None:
    with suppress(OSError):  # stderr is closed, or its terminal is gone
        write(f"jupyter gpu run: {sentence}", sys.stderr, flush=True)


class _GPURequest:
    """One request for the GPU. A thread waits for the GPU and, with `hold`, keeps the lease in use until `end` is called."""

    def __init__(self, lease: KernelLease, *, hold: bool) -> None:
        self._lease = lease
        self._hold = hold
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._client: BrokerClient | None = None
        self._refused = ""
        self._line = WaitLine(lambda text: say(f"the command is waiting for the GPU: {text}"))
        threading.Thread(target=self._run, name="gpu-want", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self) -> None:
        with self._lock:
            self._over.set()
            if self._client is not None:
                self._client.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._wait()
            except BrokerUnavailableError:
                pass  # the broker ended or hangs, or `end` has hung up
            except FractionalGPUError as error:
                self._refuse(str(error))
            self._line.stop()
            self._over.wait(_RETRY_S)

    def _wait(self) -> None:
        with ensure_broker(self._lease.socket, token=self._lease.token) as client:
            with self._lock:
                self._client = client
                if self._over.is_set():
                    return
            stream = client.hold if self._hold else client.acquire
            with closing(stream(self._lease.lease_id, AcquireRequest())) as lines:
                for progress in lines:
                    if progress.kind == ProgressKind.WAITING:
                        self._line.update(progress)
                    else:
                        self._line.stop()
                        if progress.kind == ProgressKind.REFUSED:
                            self._refuse(progress.sentence)
                        elif not self._hold:
                            self._over.set()
                    if self._over.is_set():  # `end` may have been called before the stream existed
                        return

    def _refuse(self, sentence: str) -> None:
        if sentence != self._refused and not self._over.is_set():
            self._refused = sentence
            say(f"the command did not get the GPU: {sentence}")


class Holder:
    def __init__(self, lease: KernelLease) -> None:
        self._lease = lease
        self._lock = threading.Lock()
        self._want: _GPURequest | None = None

    @property
    def is_wanted(self) -> bool:
        return self._want is not None and not self._want.is_over

    def begin(self, *, hold: bool) -> None:
        with self._lock:
            if not self.is_wanted:
                self._want = _GPURequest(self._lease, hold=hold)

    def end(self) -> None:
        with self._lock:
            if self._want is not None:
                self._want.end()
                self._want = None


class Supervisor:
    def __init__(self, lease: KernelLease, pid: int, ports: Collection[int]) -> None:
        self._lease = lease
        self._pid = pid
        self._ports = Ports(ports) if ports else None
        self._holder = Holder(lease)
        self._cpu = CpuWatch()
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._state, self._worked = "", False
        self._is_ending = False
        self._client: BrokerClient | None = None

    def start(self) -> None:
        looks = self._look_at_ports if self._ports is not None else self._look_at_cpu
        for target in (self._follow, looks):
            threading.Thread(target=target, name=f"gpu-{target.__name__.strip('_')}", daemon=True).start()

    def wake(self, *, ending: bool = False) -> None:
        """Resume a suspended command so that it can handle a signal. Returns immediately. May be called from any thread.

        Set `ending` if the signal asks the command to exit. A command that is normally resumed by connections to its ports then stays
        resident while it cleans up, because clients may no longer connect.
        """
        if ending and self._ports is not None:
            self._is_ending = True
            self._holder.end()
            self._holder.begin(hold=True)
        elif self._state != _RESIDENT:
            self._cpu.woken()
            self._holder.begin(hold=False)

    def close(self, *, was_killed: bool) -> None:
        if was_killed:
            with self._changed:
                self._changed.wait_for(lambda: self._state == _GONE, _NOTICE_S)
        with self._changed:
            self._over.set()
            self._changed.notify_all()
        self._holder.end()
        if self._client is not None:
            self._client.close()

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                with BrokerClient(self._lease.socket, token=self._lease.token) as self._client:
                    for news in self._client.follow(self._lease.lease_id):
                        if news.notice:
                            say(news.notice)
                        else:
                            self._note(news.state, worked=news.worked)
            except _PASSING:
                pass  # another broker may start, for the next sign of this command or for another reason
            except FractionalGPUError as error:
                if not self._over.is_set():
                    say(f"the command continues without a GPU lease: {error}")
                return
            else:
                self._note(_GONE, worked=False)
                return
            self._over.wait(_RETRY_S)

    def _note(self, state: str, *, worked: bool) -> None:
        with self._changed:
            self._state, self._worked = state, worked
            self._changed.notify_all()

    def _look_at_ports(self) -> None:
        last_s: float | None = None
        while self._ports is not None and not self._over.is_set():
            state, now_s = self._state, time.monotonic()
            if self._ports.open(now_s):
                last_s = now_s
                self._holder.begin(hold=True)
            elif last_s is not None and now_s - last_s >= _LINGER_S and not self._is_ending:
                last_s = None
                self._holder.end()
            self._wait_for_other(state, _RESIDENT_PORT_LOOK_S if state == _RESIDENT else PORT_LOOK_S)

    def _look_at_cpu(self) -> None:
        before = ""
        while not self._over.is_set():
            state, used_us, now_s = self._state, cpu_us(self._pid), time.monotonic()
            if state == _SUSPENDED:
                if before != _SUSPENDED:
                    self._cpu.suspended(used_us, now_s, worked=self._worked)
                elif not self._holder.is_wanted and self._cpu.look(used_us, now_s):
                    self._holder.begin(hold=False)
            elif _RESIDENT in (state, before):
                self._cpu.resident(used_us)
            before = state
            self._wait_for_other(state, LOOK_S if state == _SUSPENDED else _RESIDENT_LOOK_S)

    def _wait_for_other(self, state: str, longest_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._state != state or self._over.is_set(), longest_s)
