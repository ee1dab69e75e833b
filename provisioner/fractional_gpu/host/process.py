"""Processes: their identity, so that a reused pid is never taken for the earlier process, and the peer of a socket.

The rules:
- An identity is (boot id, pid, start time): a pid alone may belong to another process by now.
- Only thread-group leaders have an identity here: /proc also has a folder for each thread id, as if it were a process.
- A zombie is not alive: its memory, its CUDA state included, is gone. (A leader that exited before its threads
  looks like one and is none: the threads keep the memory.)
- Before an operation on a pid, open its pidfd and check the identity again: from then on the pid cannot be reused.
- Nothing is guessed: PermissionError is passed on, and only "no such process" counts as dead.
"""

import errno
import fcntl
import os
import signal
import socket
import struct
import termios
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

PROC: Final = Path("/proc")
_DEAD_STATES: Final = frozenset("ZXx")
_HELD_UP_STATES: Final = frozenset("Tt")
_AT_ONCE: Final = 1 << 16  # bytes
_PF_FORKNOEXEC: Final = 0x00000040
_PF_KTHREAD: Final = 0x00200000


@dataclass(frozen=True, slots=True, order=True)
class ProcessIdentity:
    """One incarnation of a process. `start_time` is in clock ticks since boot (field 22 of /proc/PID/stat)."""

    boot_id: str
    pid: int
    start_time: int

    def to_dict(self) -> dict[str, str | int]:
        """Return plain data for a message or a ledger."""
        return {"boot_id": self.boot_id, "pid": self.pid, "start_time": self.start_time}

    def to_text(self) -> str:
        """Return the same as one word."""
        return f"{self.pid}-{self.start_time}-{self.boot_id}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Rebuild what `to_text` gave. Raises ValueError."""
        pid, start, boot = text.split("-", 2)
        return cls.from_dict({"boot_id": boot, "pid": int(pid), "start_time": int(start)})

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> Self:
        """Rebuild what `to_dict` gave. Raises ValueError that names the field that is missing or of the wrong type."""
        boot, pid, start = (data.get(name) for name in ("boot_id", "pid", "start_time"))
        if not isinstance(boot, str) or not boot:
            raise ValueError(f"a process identity needs boot_id, a non-empty text; got {boot!r}")
        if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
            raise ValueError(f"a process identity needs pid, a positive integer; got {pid!r}")
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            raise ValueError(f"a process identity needs start_time, clock ticks since boot; got {start!r}")
        return cls(boot, pid, start)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat that matter here. `start_time` in clock ticks since boot."""

    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    kernel_thread: bool
    forked: bool  # forked without an exec since: it shares the files that its parent had open
    threads: int
    start_time: int

    @property
    def dead(self) -> bool:
        """Whether it is a zombie or gone already."""
        return self.state in _DEAD_STATES and self.threads <= 1

    @property
    def stopped_or_traced(self) -> bool:
        """Whether it is stopped (SIGSTOP, a terminal) or traced by a debugger."""
        return self.state in _HELD_UP_STATES


def parse_stat(raw: bytes) -> ProcessStat:
    """Parse /proc/PID/stat. Raises ValueError when it has another form than the kernel gives it."""
    try:
        # comm may hold spaces and parentheses: it ends at the last ")".
        start, end = raw.index(b"("), raw.rindex(b")")
        fields = raw[end + 1 :].split()
        return ProcessStat(
            pid=int(raw[:start]),
            comm=raw[start + 1 : end].decode("utf-8", "backslashreplace"),
            state=fields[0].decode("ascii"),
            ppid=int(fields[1]),
            session=int(fields[3]),
            kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
            forked=bool(int(fields[6]) & _PF_FORKNOEXEC),
            threads=int(fields[17]),
            start_time=int(fields[19]),
        )
    except (ValueError, IndexError) as error:
        raise ValueError(f"/proc/PID/stat has an unexpected form: {raw[:200]!r}") from error


def parse_uid(status: bytes) -> int:
    """Return the real uid from /proc/PID/status. Raises ValueError when it has none."""
    return int(_status_field(status, b"Uid").split()[0])


def parse_environment(raw: bytes) -> dict[str, str]:
    """Parse /proc/PID/environ; the first of two equal names counts, as it does for getenv()."""
    found: dict[str, str] = {}
    for entry in raw.split(b"\0"):
        name, separator, value = entry.partition(b"=")
        if separator:
            found.setdefault(os.fsdecode(name), os.fsdecode(value))
    return found


def boot_id(*, proc: Path = PROC) -> str:
    """Return the id of this boot of the machine; it changes with every boot. Raises OSError."""
    return read_file(f"{proc}/sys/kernel/random/boot_id").decode("ascii").strip()


def read_stat(pid: int, *, proc: Path = PROC) -> ProcessStat:
    """Return the parsed /proc/PID/stat. Raises ProcessLookupError when there is no such process."""
    return parse_stat(_read(pid, "stat", proc))


def identify(pid: int, *, proc: Path = PROC) -> ProcessIdentity:
    """Return the identity of the process that has this pid now.

    Raises ProcessLookupError when there is none (a zombie is none), ValueError when the number is a thread's.
    """
    if pid <= 0:
        raise ProcessLookupError(f"{pid} is not a process id: process ids are positive")
    stat = read_stat(pid, proc=proc)
    if stat.dead:
        raise ProcessLookupError(f"process {pid} ({stat.comm}) has exited")
    group = _thread_group(pid, proc)
    if group != pid:
        raise ValueError(f"{pid} is a thread of process {group}, not a process: give the process id {group}")
    return ProcessIdentity(boot_id(proc=proc), pid, stat.start_time)


def is_alive(identity: ProcessIdentity, *, proc: Path = PROC) -> bool:
    """Return whether exactly this incarnation runs: same boot, same start time, no zombie. Raises PermissionError."""
    try:
        stat = read_stat(identity.pid, proc=proc)
    except ProcessLookupError:
        return False
    return stat.start_time == identity.start_time and not stat.dead and boot_id(proc=proc) == identity.boot_id


def owner_uid(pid: int, *, proc: Path = PROC) -> int:
    """Return the real uid of the process (the owner of /proc/PID is root for processes that may not be traced).

    Raises ProcessLookupError.
    """
    return parse_uid(_read(pid, "status", proc))


def read_environment(pid: int, *, proc: Path = PROC) -> dict[str, str]:
    """Return the environment the process was started with. Raises ProcessLookupError, PermissionError.

    A process can overwrite it: about a process of another program it is a hint, never a proof.
    """
    return parse_environment(_read(pid, "environ", proc))


def environment_value(pid: int, name: str, *, proc: Path = PROC) -> str | None:
    """Return one variable of the environment the process was started with, None if it was not set.

    Raises ProcessLookupError, PermissionError.
    """
    return read_environment(pid, proc=proc).get(name)


def open_pidfd(identity: ProcessIdentity) -> int:
    """Return a descriptor that becomes readable when the process exits; the caller closes it.

    Raises ProcessLookupError when the process is gone or the pid is another process's now.
    """
    descriptor = os.pidfd_open(identity.pid)
    # The pid could have been reused before the descriptor was open; from here on it cannot be.
    try:
        alive = is_alive(identity)
    except OSError:
        os.close(descriptor)
        raise
    if not alive:
        os.close(descriptor)
        raise ProcessLookupError(f"process {identity.pid}, started at tick {identity.start_time}, is gone")
    return descriptor


def kill_marked(name: str, value: str) -> list[int]:
    """Kill (SIGKILL) every process of this user whose environment has the variable with this value; return their pids."""
    killed = []
    for pid in [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]:
        with suppress(OSError):  # it has exited, or is another user's
            # Opened before the environment is read: from then on the signal cannot reach another process with this pid.
            descriptor = os.pidfd_open(pid)
            try:
                if environment_value(pid, name) == value:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed.append(pid)
            finally:
                os.close(descriptor)
    return killed


def read_file(path: str, folder: int | None = None) -> bytes:
    """Return all of a file, of a path relative to the descriptor of a folder where one is given. Raises OSError.

    A suspend reads such files dozens of times, so no object is made but the bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        whole = part = os.read(descriptor, _AT_ONCE)
        while len(part) == _AT_ONCE:  # a read from /proc fills the buffer unless the file ends
            part = os.read(descriptor, _AT_ONCE)
            whole += part
        return whole
    finally:
        os.close(descriptor)


def _read(pid: int, name: str, proc: Path) -> bytes:
    try:
        return read_file(f"{proc}/{pid}/{name}")
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        raise ProcessLookupError(f"no process has the id {pid}") from None


def _thread_group(pid: int, proc: Path) -> int:
    return int(_status_field(_read(pid, "status", proc), b"Tgid"))


def _status_field(status: bytes, name: bytes) -> bytes:
    # A process chooses its own name, and the kernel escapes only line feeds in it. splitlines() also splits at other characters.
    for line in status.split(b"\n"):
        key, _, value = line.partition(b":")
        if key == name and value.strip():
            return value.strip()
    raise ValueError(f"/proc/PID/status has no field {name.decode()}: {status[:200]!r}")


# -- peers -------------------------------------------------------------------------------------------------------------
# The credentials of the peer of a UNIX socket, from the kernel.
#
# Pid, uid and gid are those of the moment when the peer connected (or, for a listening peer, listened). Uid and gid stay true; the pid may
# belong to another process since, so it is a hint until the process is identified.


_UCRED: Final = struct.Struct("iII")
_INT: Final = struct.Struct("i")
_SO_PEERGROUPS: Final = 59  # not among the names of Python's socket module
_GROUPS_BYTES: Final = 1024  # the most that Python's getsockopt takes: 256 groups


class PeerCredentials(NamedTuple):
    """The peer's process, user and group. `pid` is 0 when the peer is in a pid namespace that is not visible here."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Return the peer's credentials. Raises ValueError if the socket is not UNIX or not connected, OSError if closed."""
    if sock.family != socket.AF_UNIX:
        raise ValueError(
            f"only UNIX sockets carry peer credentials; this one is {socket.AddressFamily(sock.family).name}"
        )
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid == 0xFFFFFFFF:  # the kernel's value for a socket without a peer
        raise ValueError("this UNIX socket has no peer: it is not connected")
    return PeerCredentials(pid, uid, gid)


def peer_groups(sock: socket.socket) -> frozenset[int]:
    """Return the peer's groups when it connected; only the primary one if there are more than 256. Raises as `peer_credentials`."""
    gid = peer_credentials(sock).gid
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return frozenset({gid})
    return frozenset({gid, *struct.unpack(f"{len(raw) // 4}I", raw)})


def unread(sock: socket.socket) -> bool:
    """Return whether the peer has not yet read everything that was written into this UNIX socket. Raises OSError if closed.

    A thread that is blocked in a read takes the data without running any code of its program; a thread that polls first does not.
    """
    n_bytes: int = _INT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_INT.size)))[0]
    return n_bytes > 0


def detects_unread() -> bool:
    """Return whether `unread` works here: Linux supports it for UNIX sockets, and some systems that emulate Linux do not."""
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
