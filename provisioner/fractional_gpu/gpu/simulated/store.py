"""Manages a simulated host's folder and database. This module uses only the standard library, because notebooks import it.

State shared by all processes is changed in short transactions, which never copy device memory or wait for anything. A forked child opens
its own database connection, because SQLite forbids sharing one. A shared host belongs to root. Its database is writable by all users, so
they are protected from each other's mistakes but not from attacks. Memory can be read only by its owner and root. In a user's folder, root
follows no links and opens only regular files owned by that user (`processes.open_file`). Only root cleans up after other users.
"""

import os
import re
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from fractional_gpu.host.memory import LimitReader, system_headroom

MIB: Final = 1 << 20
VERSION: Final = 1
DATABASE: Final = "host.sqlite"
SOCKET: Final = "memory.sock"  # only for shared hosts; see `device_memory`
_KEY: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z@-]{0,99}")
_BUSY_S: Final = 60.0
_LEFT: Final = 128 * MIB  # this much of a file system is left free

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
"""
_AFRESH: Final = "remove the folder to start over"


class SimulatedHostError(Exception):
    """The simulated host cannot be opened, created or changed. The message says what to do."""


class NoSuchDeviceError(SimulatedHostError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    device_id: str
    index: int
    name: str
    memory_mib: int
    lost: bool


class Store:
    """An open simulated host. Thread-safe. The constructor raises SimulatedHostError if the folder does not contain one."""

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
            self._db = sqlite3.connect(
                self.directory / DATABASE, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            # There is no fsync, because the folder need not survive a reboot, and a killed process does not damage the database.
            self._db.execute("PRAGMA synchronous=OFF")
            if create:
                self._db.execute("PRAGMA journal_mode=WAL").fetchone()
                self._db.executescript(SCHEMA)
            found = self.query("SELECT value FROM meta WHERE name='version'")
        except sqlite3.Error as error:
            if hasattr(self, "_db"):
                self._db.close()
            raise SimulatedHostError(
                f"the simulated GPU host in {self.directory} cannot be opened ({error}): you must own it and be able to write to it; "
                f"{_AFRESH}"
            ) from error
        if found and found[0][0] != str(VERSION):
            self._db.close()
            raise SimulatedHostError(
                f"the simulated GPU host in {self.directory} has version {found[0][0]}, but this program needs version {VERSION}: "
                f"{_AFRESH}"
            )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the host's write lock during the block. Commit at the end, or roll back on any exception. Do not nest transactions."""
        with self._mutex:
            try:
                # This is inside the try block, because an interrupt right after BEGIN must not leave the host locked.
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def query(self, sql: str, *values: Any) -> list[Any]:  # noqa: ANN401 (columns may have any type)
        with self._mutex:
            return self._db.execute(sql, values).fetchall()

    @property
    def shared(self) -> bool:
        return bool(self.memory.stat().st_mode & stat.S_IWOTH)

    def may_tidy(self, entry: Path) -> bool:
        """Return whether this process may move or remove another process's folder, or False if the folder is gone."""
        with suppress(FileNotFoundError):
            return os.geteuid() in (0, entry.lstat().st_uid)
        return False

    def free_for_finalizer(self) -> bool:
        """Return whether this thread could start a transaction now. A finalizer can run while its thread is already in a transaction."""
        return not self._mutex.locked()

    def devices(self) -> list[Device]:
        rows = self.query("SELECT id, idx, name, memory_mib, lost FROM devices ORDER BY idx")
        return [Device(device_id=r[0], index=r[1], name=r[2], memory_mib=r[3], lost=bool(r[4])) for r in rows]

    def device(self, name: str) -> Device:
        devices = self.devices()
        for device in devices:
            if name in (device.device_id, str(device.index)):
                return device
        known = ", ".join(device.device_id for device in devices)
        raise NoSuchDeviceError(f"there is no simulated device {name!r} in {self.directory}; known devices: {known}")

    def home_namespace(self) -> str:
        if self._home is None:
            rows = self.query("SELECT value FROM meta WHERE name='namespace'")
            self._home = rows[0][0] if rows else own_namespace()
        return self._home

    def close(self) -> None:
        with self._mutex:
            self._db.close()

    def available_bytes(self) -> int:
        """Return how many more bytes fit into the folder. If the folder is in memory, memory limits also apply.

        A simulated device can be larger than the machine's memory, but its contents cannot. For a shared host, only the machine's memory is
        considered, not this process's limits.
        """
        status = os.statvfs(self.directory)
        free = status.f_bavail * status.f_frsize - _LEFT
        if in_memory(self.directory):
            with suppress(OSError, ValueError):  # a limit that cannot be read does not count
                room = system_headroom() if self.shared else LimitReader().headroom(os.getpid())
                free = min(free, room.mib * MIB)
        return free

    def process_folder(self, key: str) -> Path:
        # All users can write to the database of a shared host, so allow no path outside the host.
        if not _KEY.fullmatch(key):
            raise SimulatedHostError(
                f"the database in {self.directory} has an invalid process key, {key[:80]!r}: {_AFRESH}"
            )
        return self.memory / key


def own_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")[5:-1]  # noqa: PTH115


@cache  # a folder stays on the same file system while a program uses it
def in_memory(directory: Path) -> bool:
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False
