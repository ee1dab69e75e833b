"""A simulated host's folder and its database. Standard library only: notebooks import it.

The rules:
- Everything that more than one process must agree on changes in one transaction.
- A transaction is short: no bytes are moved and nothing is waited for while one is open.
- A connection never crosses a fork (SQLite forbids it): the child leaves it alone and opens its own.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

MIB: Final = 1 << 20
VERSION: Final = 1
DATABASE: Final = "host.sqlite"
_BUSY_S: Final = 60.0

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


class SimulatedHostError(Exception):
    """The simulated host cannot be opened, created or changed as asked; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the simulated hardware behaves. Bandwidths in MiB/s (0: unlimited), latency in ms, context in MiB."""

    checkpoint_mib_s: int = 0
    restore_mib_s: int = 0
    latency_ms: int = 0
    context_mib: int = 32
    checkpointable: int = 1  # 0: as a driver that is too old, on every device

    def __post_init__(self) -> None:
        """Raise SimulatedHostError for what is not a whole number of at least 0."""
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise SimulatedHostError(f"setting {name}={value!r} is not allowed; give a whole number, 0 or more")


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

    def free_for_finalizer(self) -> bool:
        """Return whether a transaction could start in this thread now (a finalizer may run inside another one)."""
        return not self._mutex.locked()

    def devices(self) -> list[Device]:
        """Return the devices, by index."""
        rows = self.query("SELECT id, idx, name, memory_mib, lost FROM devices ORDER BY idx")
        return [Device(device_id=r[0], index=r[1], name=r[2], memory_mib=r[3], lost=bool(r[4])) for r in rows]

    def settings(self) -> Settings:
        """Return the settings in force now."""
        rows = self.query("SELECT value FROM meta WHERE name='settings'")
        return Settings(**json.loads(rows[0][0])) if rows else Settings()

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
        return settings

    def close(self) -> None:
        """Close the database. Idempotent."""
        with self._mutex:
            self._db.close()

    def process_folder(self, key: str) -> Path:
        """Return where a process's memory lies."""
        return self.memory / key
