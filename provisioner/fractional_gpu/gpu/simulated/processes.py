"""Tracks the simulated host's processes: which are alive and where their memory is. Cleans up after dead ones.

A process's key consists of its pid, start time and boot id. Zombies count as dead. A process in a separate pid namespace knows only its
inner pid, so its key also names the namespace, and only processes that can see the namespace decide whether the process is dead.

A process's phase indicates where its bytes are: `device`, `saving`, `saved`, `restoring` or `failed`. A move is committed after its last
byte has been copied, so undoing a move that was killed only means resetting the phase; no bytes are copied back. While a process is
`saving`, its bytes still count towards its device. While it is `restoring`, they already count towards the target. The next reader deletes
dead processes' rows and moves their folders aside, in one transaction.
"""

import fcntl
import os
import shutil  # not imported at exit, because Python would then lose the exit status of an interrupt
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fractional_gpu.gpu.simulated.store import SimulatedHostError, Store, own_namespace
from fractional_gpu.host.process import boot_id, parse_stat, read_file, read_of, read_stat

OPEN: Final = b"O"  # calls may pass
# A file of the process. Its modification time is the end of the process's work on the device, as a time since boot.
WORK: Final = "work"
WANTED: Final = b"W"  # a lock operation waits for calls in flight, and new calls are held
CLOSED: Final = b"C"  # locked, checkpointed or failed; held calls read the reason
# This has only one placeholder, because Python 3.14 does not accept a sequence for numbered ones.
ON_DEVICE: Final = "? = CASE WHEN phase IN ('device', 'saving') THEN device WHEN phase = 'restoring' THEN target END"

_POLL_S: Final = 0.002
_WITHIN: Final = "@"
_visible: dict[str, int] = {}  # our pids of processes in other pid namespaces, by key


@dataclass(frozen=True, slots=True)
class Process:
    key: str
    pid: int
    lease: str
    device: str
    target: str | None
    phase: str
    n_bytes: int
    fatal: str


_COLUMNS: Final = "SELECT key, pid, lease, device, target, phase, bytes, fatal FROM processes"


def _process(row: tuple[str, int, str, str, str | None, str, int, str]) -> Process:
    key, pid, lease, device, target, phase, n_bytes, fatal = row
    return Process(key, visible_pid(key, pid), lease, device, target, phase, n_bytes, fatal)


@cache
def boot() -> str:
    return boot_id()[:8]


def current_key(pid: int) -> str | None:
    try:
        stat = read_stat(pid)
    except ProcessLookupError:
        return None
    if stat.dead:
        return None
    namespace = _namespace(pid)
    if namespace == own_namespace():
        return f"{pid}-{stat.start_time}-{boot()}"
    return f"{_inner_pid(pid)}-{stat.start_time}-{boot()}{_WITHIN}{namespace}"


def own_key(store: Store) -> str:
    try:
        start = parse_stat(read_file("/proc/self/stat")).start_time
    except (FileNotFoundError, ProcessLookupError):
        raise SimulatedHostError("this process is not in /proc: the simulated GPU needs /proc to be mounted") from None
    key = f"{os.getpid()}-{start}-{boot()}"
    return key if own_namespace() == store.home_namespace() else f"{key}{_WITHIN}{own_namespace()}"


def is_dead(store: Store, key: str, pid: int) -> bool:
    _, _, within = key.partition(_WITHIN)
    own, home = own_namespace(), store.home_namespace()
    if (within or home) != own:
        return own == home and visible_pid(key, pid) == 0
    if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115
        return False  # /proc belongs to another namespace, where other processes have these pids
    found = current_key(pid)
    return found is None or found != key.partition(_WITHIN)[0]


def visible_pid(key: str, pid: int) -> int:
    """Return the pid our /proc shows for a recorded process, or 0 if we cannot see the process's namespace."""
    if key.partition(_WITHIN)[2] in ("", own_namespace()):
        return pid
    known = _visible.get(key)
    if known is not None and current_key(known) == key:
        return known
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are enough
        if name.isdigit() and _inner_pid(int(name)) == pid and current_key(int(name)) == key:
            _visible[key] = int(name)
            return int(name)
    _visible.pop(key, None)
    return 0


def _namespace(pid: int) -> str:
    """Return the name of the process's pid namespace, or of our own if that cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")[5:-1]  # noqa: PTH115
    except OSError:
        return own_namespace()


def _inner_pid(pid: int) -> int:
    try:
        status = read_of(pid, "status")
    except ProcessLookupError:
        return 0
    found = [line for line in status.split(b"\n") if line.startswith(b"NSpid:")]
    return int(found[0].split()[-1]) if found else pid


def find_process(store: Store, key: str) -> Process | None:
    rows = store.query(f"{_COLUMNS} WHERE key=?", key)
    return _process(rows[0]) if rows else None


def processes_of(store: Store) -> list[Process]:
    return [_process(row) for row in store.query(_COLUMNS)]


def users_of(store: Store, device_id: str) -> list[Process]:
    return [_process(row) for row in store.query(f"{_COLUMNS} WHERE {ON_DEVICE}", device_id)]


def open_file(folder: Path, name: str, flags: int) -> int:
    """Open a file in a process's folder. New files get mode 0600. Raises FileNotFoundError if the process was reaped.

    The process controls the folder, and we might be root, so this follows no links and raises PermissionError unless the file is a regular
    file without other hard links, owned by the folder's owner or by this user. Do not pass flags that change the file as it is opened, such
    as O_TRUNC.
    """
    there = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(there).st_uid
        # Open the file relative to the opened folder, because the process may replace the path with a link at any moment.
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=there)
    finally:
        os.close(there)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid not in (owner, os.geteuid()):
        os.close(file)
        raise PermissionError(f"{folder / name} is not a regular file of its process, so it was left alone")
    return file


@contextmanager
def opened(folder: Path, name: str, flags: int) -> Iterator[int]:
    descriptor = open_file(folder, name, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _names(folder: Path, ending: str) -> list[str]:
    there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return [name for name in os.listdir(there) if name.endswith(ending)]  # noqa: PTH208 - a descriptor
    finally:
        os.close(there)


def _remove(folder: Path, names: list[str]) -> None:
    there = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=there)
    finally:
        os.close(there)


def _empty(folder: Path, names: list[str]) -> None:
    """Free these files' memory but keep the files, because the next restore writes into them."""
    for name in names:
        with opened(folder, name, os.O_WRONLY) as file:
            os.ftruncate(file, 0)


def read_gate(folder: Path) -> bytes:
    with opened(folder, "gate", os.O_RDONLY) as descriptor:
        return os.pread(descriptor, 1, 0)


def write_gate(folder: Path, value: bytes) -> None:
    """Write the gate's byte in place, because calls in flight hold a lock on the file. Raises FileNotFoundError."""
    with opened(folder, "gate", os.O_WRONLY) as descriptor:
        os.pwrite(descriptor, value, 0)


def open_gate(store: Store, key: str) -> None:
    """Let the process's calls through the gate. The caller must hold the operation lock. Raises FileNotFoundError."""
    folder = store.process_folder(key)
    write_gate(folder, OPEN)
    process = find_process(store, key)
    if process is not None and process.phase == "failed":
        write_gate(folder, CLOSED)  # the device was lost, and calls must read the reason


@contextmanager
def operation_lock(folder: Path, timeout_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock on a process's checkpoint state during the block. Yield False if another operation still holds it after `timeout_s`.

    Raises FileNotFoundError if the process was reaped. Linux releases the lock when its holder dies.
    """
    with opened(folder, "operation", os.O_RDONLY) as descriptor:
        yield lock_file(descriptor, fcntl.LOCK_EX, timeout_s)


def lock_file(descriptor: int, kind: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def settle(store: Store, key: str) -> None:
    """Undo an operation that was killed. The caller must hold the operation lock, which proves that no operation is running."""
    folder = store.process_folder(key)
    # Change the phase before the files. A kill in between leaves copies that a later `settle` removes, but never a phase without its bytes.
    with store.transaction() as db:
        db.execute("UPDATE processes SET phase='device' WHERE key=? AND phase='saving'", (key,))
        db.execute("UPDATE processes SET phase='saved', target=NULL WHERE key=? AND phase='restoring'", (key,))
        row = db.execute("SELECT phase FROM processes WHERE key=?", (key,)).fetchone()
    if row is None:
        return
    if read_gate(folder) == WANTED:
        open_gate(store, key)
    if row[0] == "device":
        _remove(folder, _names(folder, ".saved"))
    elif row[0] == "saved":
        _empty(folder, _names(folder, ".device"))


def settle_if_abandoned(store: Store, key: str) -> None:
    with suppress(FileNotFoundError), operation_lock(store.process_folder(key)) as mine:
        if mine:
            settle(store, key)


def forget(store: Store, keys: list[str]) -> None:
    with store.transaction() as db:
        for key in keys:
            db.execute("DELETE FROM allocations WHERE process=?", (key,))
            db.execute("DELETE FROM processes WHERE key=?", (key,))
        # A folder is created in the transaction that records its process, so a folder without a row has no process.
        known = {row[0] for row in db.execute("SELECT key FROM processes")}
        for folder in store.memory.iterdir():
            if folder.name not in known and store.may_tidy(folder):
                with suppress(PermissionError):  # of a broker whose container has few capabilities: the worker does it
                    folder.rename(store.trash / folder.name)
    empty_trash(store)


def empty_trash(store: Store) -> None:
    """Delete the folders that `forget` moved aside, without following links. Several processes can do this at the same time."""
    for entry in store.trash.iterdir():
        if store.may_tidy(entry):
            with suppress(FileNotFoundError):
                if entry.is_symlink() or not entry.is_dir():
                    entry.unlink()
                else:
                    shutil.rmtree(entry, ignore_errors=True)  # this follows no links


def reap(store: Store) -> None:
    # Root may release the memory of any process, and other users only the memory of their own processes. If the folder of a process is
    # gone, only root may release its memory.
    everything = os.geteuid() == 0 or not store.shared
    recorded = store.query("SELECT key, pid FROM processes")
    dead = [
        key
        for key, pid in recorded
        if is_dead(store, key, pid) and (everything or store.may_tidy(store.process_folder(key)))
    ]
    # This list is preliminary: `forget` reads the rows again in its transaction, and decides.
    known = {key for key, _ in recorded}
    orphans = [folder for folder in store.memory.iterdir() if folder.name not in known and store.may_tidy(folder)]
    if dead or orphans:
        forget(store, dead)
    else:
        empty_trash(store)
