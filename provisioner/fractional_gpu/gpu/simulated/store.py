"""A simulated host's folder, its database and the processes in it. Standard library only: notebooks import it.

The rules:
- Everything that more than one process must agree on changes in one transaction.
- A transaction is short: no bytes are moved and nothing is waited for while one is open.
- A connection never crosses a fork (SQLite forbids it): the child leaves it alone and opens its own.
- A host that users share (`shared`) is root's. Its books are writable by all, so users are guarded against each other's mistakes there,
  not against attack; what is on the device and what is saved is readable by its owner and root only. Root trusts no file in a user's
  folder: it opens none but plain ones of that user (`open_file`), and follows no link. Only root tidies up after another user's process.
"""

import fcntl
import json
import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from fractional_gpu.gpu.simulated import energy

MIB: Final = 1 << 20
VERSION: Final = 1
DATABASE: Final = "host.sqlite"
SOCKET: Final = "memory.sock"  # of a shared host: see `device_memory`
_KEY: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z@-]{0,99}")
_BUSY_S: Final = 60.0
_MOST_MW: Final = 10_000_000
_MOST_NOISE: Final = 1000

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS devices (
  id TEXT PRIMARY KEY, idx INTEGER NOT NULL, name TEXT NOT NULL, memory_mib INTEGER NOT NULL,
  lost INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS processes (
  key TEXT PRIMARY KEY, pid INTEGER NOT NULL, lease TEXT NOT NULL, device TEXT NOT NULL, target TEXT,
  phase TEXT NOT NULL, bytes INTEGER NOT NULL, fatal TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS allocations (
  id INTEGER PRIMARY KEY AUTOINCREMENT, process TEXT NOT NULL, bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS allocations_process ON allocations (process);
CREATE TABLE IF NOT EXISTS faults (
  id INTEGER PRIMARY KEY AUTOINCREMENT, operation TEXT NOT NULL, fault TEXT NOT NULL, left INTEGER, pid INTEGER,
  taken INTEGER NOT NULL DEFAULT 0);
"""
_SETTINGS: Final = "SELECT value FROM meta WHERE name='settings'"
_DRAW: Final = ("idle_mw", "peak_mw", "power_noise_milli")


_AFRESH: Final = "remove the folder to start afresh"


class SimulatedHostError(Exception):
    """The simulated host cannot be opened, created or changed as asked; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the simulated hardware behaves. Bandwidths in MiB/s (0: unlimited), latency in ms, context in MiB, power in mW."""

    checkpoint_mib_s: int = 0
    restore_mib_s: int = 0
    latency_ms: int = 0
    context_mib: int = 32
    checkpointable: int = 1  # 0: as a driver that is too old, on every device
    idle_mw: int = 75_000  # what a device draws at all times; this and the next one are about an H200's
    peak_mw: int = 700_000  # what it draws when all of it is used
    power_noise_milli: int = 0  # by how many thousandths at most the idle draw is more or less

    def __post_init__(self) -> None:
        """Raise SimulatedHostError for what is not a whole number of at least 0."""
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise SimulatedHostError(f"setting {name}={value!r} is not allowed; give a whole number, 0 or more")
        if not self.idle_mw <= self.peak_mw <= _MOST_MW:
            raise SimulatedHostError(
                f"settings idle_mw={self.idle_mw}, peak_mw={self.peak_mw} are not allowed; a device draws at least as much when it is "
                f"used, and {_MOST_MW} mW at most"
            )
        if self.power_noise_milli > _MOST_NOISE:
            raise SimulatedHostError(
                f"setting power_noise_milli={self.power_noise_milli} is not allowed; give 0 to {_MOST_NOISE}, thousandths of idle_mw"
            )

    @property
    def draw(self) -> tuple[int, int, int]:
        """What each device draws, as `energy` takes it."""
        return self.idle_mw, self.peak_mw, self.power_noise_milli


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One simulated device. Memory in MiB."""

    device_id: str
    index: int
    name: str
    memory_mib: int
    lost: bool


class Store:
    """An open simulated host, safe to use from several threads. Raises SimulatedHostError when there is none."""

    def __init__(self, directory: str | Path, *, create: bool = False) -> None:
        self.directory = Path(directory).absolute()
        self.memory = self.directory / "memory"
        self.trash = self.directory / "trash"
        self._mutex = threading.Lock()
        self._home: str | None = None
        if not create and not (self.directory / DATABASE).is_file():
            raise SimulatedHostError(
                f"there is no simulated GPU host in {self.directory}: start a broker with --simulate, or create one"
            )
        try:
            self._db = self._open(create=create)
        except sqlite3.Error as error:
            raise SimulatedHostError(
                f"the simulated GPU host in {self.directory} cannot be opened ({error}): "
                "it must be yours and writable; remove the folder to start afresh"
            ) from error

    def _open(self, *, create: bool) -> sqlite3.Connection:
        path = self.directory / DATABASE
        db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # No fsync: the folder does not outlive the machine, and SQLite survives a killed process without it.
            db.execute("PRAGMA synchronous=OFF")
            if create:
                db.execute("PRAGMA journal_mode=WAL").fetchone()
                db.executescript(SCHEMA)
            found = db.execute("SELECT value FROM meta WHERE name='version'").fetchone()
            if found is None or found[0] == str(VERSION):
                self._add_meters(db)
        except sqlite3.Error:
            db.close()
            raise
        if found is not None and found[0] != str(VERSION):
            db.close()
            raise SimulatedHostError(
                f"the simulated GPU host in {self.directory} is of version {found[0]}, this program speaks {VERSION}: "
                "remove the folder to start afresh"
            )
        return db

    def _add_meters(self, db: sqlite3.Connection) -> None:
        """Begin to count energy: in a new host, or in one that an older version made."""
        if db.execute("SELECT 1 FROM sqlite_master WHERE name='meters'").fetchone():
            return
        db.execute("BEGIN IMMEDIATE")  # the tables come at once, for other processes open the host at the same time
        for statement in energy.SCHEMA:
            db.execute(statement)
        energy.begin_meters(db, *_settings(db.execute(_SETTINGS).fetchall()).draw)
        db.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the host's write lock: commits at the end, rolls back on any exception. Never nested."""
        with self._mutex:
            try:
                # Inside the try, because an interrupt right after BEGIN must not leave the whole host locked.
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def query(self, sql: str, *values: Any) -> list[Any]:  # noqa: ANN401 (rows are of whatever types the columns have)
        """Return all rows of a reading statement."""
        with self._mutex:
            return self._db.execute(sql, values).fetchall()

    @property
    def shared(self) -> bool:
        """Whether users with other uids than the host's owner may use it."""
        return bool(self.memory.stat().st_mode & stat.S_IWOTH)

    def may_tidy(self, entry: Path) -> bool:
        """Whether this process may move or remove that folder of another process. A folder that is gone needs no tidying."""
        with suppress(FileNotFoundError):
            return os.geteuid() in (0, entry.lstat().st_uid)
        return False

    def free_for_finalizer(self) -> bool:
        """Return whether a transaction could start in this thread now (a finalizer may run inside another one)."""
        return not self._mutex.locked()

    def devices(self) -> list[Device]:
        """Return the devices, by index."""
        rows = self.query("SELECT id, idx, name, memory_mib, lost FROM devices ORDER BY idx")
        return [Device(device_id=r[0], index=r[1], name=r[2], memory_mib=r[3], lost=bool(r[4])) for r in rows]

    def home_namespace(self) -> str:
        """Return the pid namespace in which the host was made, where keys need not name it."""
        if self._home is None:
            rows = self.query("SELECT value FROM meta WHERE name='namespace'")
            self._home = rows[0][0] if rows else own_namespace()
        return self._home

    def settings(self) -> Settings:
        """Return the settings in force now."""
        return _settings(self.query(_SETTINGS))

    def configure(self, **changes: int) -> Settings:
        """Change settings for every process, from the next operation on. Raises SimulatedHostError."""
        current = asdict(self.settings())
        if unknown := sorted(set(changes) - set(current)):
            raise SimulatedHostError(
                f"there is no setting {', '.join(unknown)}; there are {', '.join(sorted(current))}"
            )
        settings = Settings(**{**current, **changes})
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('settings', ?)", (json.dumps(asdict(settings)),))
            if any(current[name] != getattr(settings, name) for name in _DRAW):
                energy.set_draw(db, self.memory, *settings.draw)
        return settings

    def close(self) -> None:
        """Close the database. Idempotent."""
        with self._mutex:
            self._db.close()

    def process_folder(self, key: str) -> Path:
        """Return where a process's memory lies. Raises SimulatedHostError for a key that no process has."""
        if not _KEY.fullmatch(
            key
        ):  # the books of a shared host can be written by all: no path outside of it may come from them
            raise SimulatedHostError(
                f"the books of {self.directory} name a process {key[:80]!r}, which cannot be: {_AFRESH}"
            )
        return self.memory / key


def _settings(rows: list[Any]) -> Settings:
    return Settings(**json.loads(rows[0][0])) if rows else Settings()


# -- processes ---------------------------------------------------------------------------------------------------------
# Processes of the simulated host: which are alive, what they hold, and the clean-up after dead ones.
#
# Standard library only: notebooks import it.
#
# The rules:
# - A process is pid, start time and boot, as one text (`current_key`); a zombie is dead.
# - `phase` says where a process's bytes are: `device`; `saving` and `saved`; `restoring`; `failed`. Only a commit changes
#   it, and the commit of a move comes after its last byte. So a killed move is undone by resetting the phase, without any
#   copying.
# - While `saving` the device still holds the bytes, while `restoring` the target device already does.
# - The next reader releases the memory of dead processes: it books what they have used of devices, then deletes the rows and moves the
#   folder aside in one transaction.


OPEN: Final = b"O"  # calls pass
WORK: Final = "work"  # a file of the process; its modification time is the time since boot at which its work on the device ends or ended
WANTED: Final = b"W"  # a lock waits for the calls in flight; new ones are held
CLOSED: Final = b"C"  # locked, checkpointed or failed: held calls read why
# With one plain placeholder: Python 3.14 takes no sequence for numbered ones.
ON_DEVICE: Final = "? = CASE WHEN phase IN ('device', 'saving') THEN device WHEN phase = 'restoring' THEN target END"

_POLL_S: Final = 0.002
_WITHIN: Final = "@"
_visible: dict[str, int] = {}  # pids here of processes in other pid namespaces, by key
_STAT_BYTES: Final = 4096  # longer than any /proc/PID/stat


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process with a context, as the database has it. Memory in bytes, context included."""

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
    return Process(
        key=key,
        pid=visible_pid(key, pid),
        lease=lease,
        device=device,
        target=target,
        phase=phase,
        n_bytes=n_bytes,
        fatal=fatal,
    )


def current_key(pid: int) -> str | None:
    """Return the key of the process that has this pid now, None if there is none."""
    try:
        raw = _read(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = raw[raw.rindex(b")") + 1 :].split()
    # A leader that exited before its threads looks like a zombie, but its memory lives.
    if fields[0] in (b"Z", b"X", b"x") and int(fields[17]) <= 1:
        return None
    namespace = _namespace(pid)
    if namespace == own_namespace():
        return f"{pid}-{int(fields[19])}-{energy.boot()}"
    return f"{_inner_pid(pid)}-{int(fields[19])}-{energy.boot()}{_WITHIN}{namespace}"


# A process in a pid namespace of its own knows its pid there only, and cannot see the processes outside. Its key names the namespace,
# unless the simulated host was made in the same one; it is judged dead only by a process that sees it.


def own_key(store: Store) -> str | None:
    """Return this process's key in the store, None if /proc does not show it."""
    try:
        raw = _read("/proc/self/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    start = int(raw[raw.rindex(b")") + 1 :].split()[19])
    key = f"{os.getpid()}-{start}-{energy.boot()}"
    return key if own_namespace() == store.home_namespace() else f"{key}{_WITHIN}{own_namespace()}"


def is_dead(store: Store, key: str, pid: int) -> bool:
    """Return whether a process that is recorded so is dead, as far as this process can see; `pid`: as it is recorded."""
    _, _, within = key.partition(_WITHIN)
    own, home = own_namespace(), store.home_namespace()
    if (within or home) != own:
        return own == home and visible_pid(key, pid) == 0
    if _shown_as() != os.getpid():
        return False  # /proc is another namespace's: it shows other processes under these pids
    found = current_key(pid)
    return found is None or found != key.partition(_WITHIN)[0]


def visible_pid(key: str, pid: int) -> int:
    """Return the pid that a recorded process has in /proc here; 0 for one of another namespace that is not to be seen."""
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
    """Return what names the pid namespace of a process; our own where it may not be read."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")[5:-1]  # noqa: PTH115
    except OSError:
        return own_namespace()


def own_namespace() -> str:
    """Return what names this process's pid namespace."""
    return os.readlink("/proc/self/ns/pid")[5:-1]  # noqa: PTH115


def _shown_as() -> int:
    return int(os.readlink("/proc/self"))  # noqa: PTH115


def _inner_pid(pid: int) -> int:
    """Return the pid of a process in its own namespace, 0 if it has ended."""
    try:
        status = _read(f"/proc/{pid}/status")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [line for line in status.split(b"\n") if line.startswith(b"NSpid:")]
    return int(found[0].split()[-1]) if found else pid


def _read(path: str) -> bytes:
    """Read a short file of /proc in one read: this is done for every process again and again."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STAT_BYTES)
    finally:
        os.close(descriptor)


def find_process(store: Store, key: str) -> Process | None:
    """Return the process as recorded, None if it has no context."""
    rows = store.query(f"{_COLUMNS} WHERE key=?", key)
    return _process(rows[0]) if rows else None


def processes_of(store: Store) -> list[Process]:
    """Return every process with a context."""
    return [_process(row) for row in store.query(_COLUMNS)]


def users_of(store: Store, device_id: str) -> list[Process]:
    """Return the processes whose bytes count on the device now."""
    return [_process(row) for row in store.query(f"{_COLUMNS} WHERE {ON_DEVICE}", device_id)]


def swapping(store: Store) -> list[Process]:
    """Return the processes whose bytes are being saved or restored."""
    return [_process(row) for row in store.query(f"{_COLUMNS} WHERE phase IN ('saving', 'restoring')")]


def open_file(folder: Path, name: str, flags: int) -> int:
    """Open a file in a process's folder; a new one gets mode 0600. Raises FileNotFoundError when the process was reaped.

    The folder is the process's, and this one may be root: no link is followed, and PermissionError is raised for what is no plain file
    with this one name, of the folder's owner or of this process's user. So flags that change the file at once (O_TRUNC) have no place here.
    """
    there = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(there).st_uid
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=there)
    finally:
        os.close(there)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid not in (owner, os.geteuid()):
        os.close(file)
        raise PermissionError(f"{folder / name} is no plain file of its process: it is not touched")
    return file


def _names(folder: Path, ending: str) -> list[str]:
    """Return the names of the files in a process's folder that end so. Raises FileNotFoundError when the process was reaped."""
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
    """Give the memory of these files back; the files stay, the next restore writes into them."""
    for name in names:
        file = open_file(folder, name, os.O_WRONLY)
        try:
            os.ftruncate(file, 0)
        finally:
            os.close(file)


def read_gate(folder: Path) -> bytes:
    """Return the gate's byte. Raises FileNotFoundError when the process was reaped."""
    descriptor = open_file(folder, "gate", os.O_RDONLY)
    try:
        return os.pread(descriptor, 1, 0)
    finally:
        os.close(descriptor)


def write_gate(folder: Path, value: bytes) -> None:
    """Set the gate's byte, in place: its file is also the lock of the calls in flight. Raises FileNotFoundError."""
    descriptor = open_file(folder, "gate", os.O_WRONLY)
    try:
        os.pwrite(descriptor, value, 0)
    finally:
        os.close(descriptor)


def open_gate(store: Store, key: str) -> None:
    """Let calls pass again. The caller holds the operation lock. Raises FileNotFoundError."""
    folder = store.process_folder(key)
    write_gate(folder, OPEN)
    process = find_process(store, key)
    if process is not None and process.phase == "failed":
        write_gate(folder, CLOSED)  # its device was lost in between: calls must read the reason


@contextmanager
def operation_lock(folder: Path, timeout_s: float = 0.0) -> Iterator[bool]:
    """Hold the right to change a process's checkpoint state; yields False if another operation kept it for `timeout_s`.

    Raises FileNotFoundError when the process was reaped. The kernel releases the lock when the holder dies.
    """
    descriptor = open_file(folder, "operation", os.O_RDONLY)
    try:
        yield lock_file(descriptor, fcntl.LOCK_EX, timeout_s)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, kind: int, timeout_s: float) -> bool:
    """Take a file lock, trying for `timeout_s` seconds; return whether it is held."""
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
    """Undo a killed operation. The caller holds the operation lock, so the process that began it is dead."""
    folder = store.process_folder(key)
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
    """Settle the process unless an operation on it is under way or it is gone."""
    with suppress(FileNotFoundError), operation_lock(store.process_folder(key)) as mine:
        if mine:
            settle(store, key)


def forget(store: Store, keys: list[str]) -> None:
    """Release everything that these processes hold, and folders without an owner. What they have used stays booked."""
    moved = []
    if keys:
        # Before their folders move: whoever finds a process in the books and no folder finds its use booked.
        with store.transaction() as db:
            energy.book(db, store.memory, keys)
    with store.transaction() as db:
        for key in keys:
            db.execute("DELETE FROM allocations WHERE process=?", (key,))
            db.execute("DELETE FROM processes WHERE key=?", (key,))
        # Folders are made inside a transaction that records their owner, so one without a row here has none.
        known = {row[0] for row in db.execute("SELECT key FROM processes")}
        for folder in store.memory.iterdir():
            if folder.name not in known and store.may_tidy(folder):
                folder.rename(store.trash / folder.name)
                moved.append(folder.name)
    empty_trash(store)


def empty_trash(store: Store) -> None:
    """Remove what `forget` moved aside. Several processes may do it at once; after a kill the next one does the rest."""
    for folder in store.trash.iterdir():
        if not store.may_tidy(folder):
            continue
        if store.shared:  # whatever its user put there
            _remove_tree(folder)
            continue
        with suppress(FileNotFoundError):
            for file in folder.iterdir():
                file.unlink(missing_ok=True)
            folder.rmdir()


def _remove_tree(entry: Path) -> None:
    """Remove what a user's process left, links as links. What cannot be removed now is left to the next one."""
    import shutil  # noqa: PLC0415 - notebooks import this module

    with suppress(FileNotFoundError):
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        else:
            shutil.rmtree(entry, ignore_errors=True)  # follows no link


def reap(store: Store) -> None:
    """Release everything that dead processes hold."""
    recorded = store.query("SELECT key, pid FROM processes")
    dead = [key for key, pid in recorded if is_dead(store, key, pid) and _is_ours(store, key)]
    # Listed before the rows are read again inside the transaction of `forget`, which decides.
    known = {key for key, _ in recorded}
    orphans = [folder for folder in store.memory.iterdir() if folder.name not in known and store.may_tidy(folder)]
    if dead or orphans:
        forget(store, dead)
    else:
        empty_trash(store)


def _is_ours(store: Store, key: str) -> bool:
    """Whether this process may release what that one holds: root all, a user what is the user's own. Of a folder that is gone, root."""
    return os.geteuid() == 0 or not store.shared or store.may_tidy(store.process_folder(key))
