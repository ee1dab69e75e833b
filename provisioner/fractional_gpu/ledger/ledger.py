"""The broker's database: a single SQLite file with a single writer.

- Data is on disk when a write method returns or, inside `transaction()`, when the block ends. This requires WAL with synchronous=FULL,
  since NORMAL would lose the last commits in a power failure. Each suspend and resume is recorded before it starts.
- Any thread may call the ledger. A mutex lets one thread in at a time and is held for the whole of a transaction. Only `metered` reads
  without the mutex, on a separate connection, because reading a year's figures takes seconds and would hold up the writes that grants
  depend on.
- Once a lease has ended, it stays ended and its secrets are erased. If it never had a process, it is only counted, because users could
  create any number of these.
- Every failure raises LedgerError, and the failed write or transaction is rolled back.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, replace
from os import PathLike, close
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
from msgspec import structs

from fractional_gpu.core.forecasts.advice import GivenAdvice
from fractional_gpu.core.forecasts.habits import HabitKey, Share, ShareDay
from fractional_gpu.core.metering.turns import Turn
from fractional_gpu.core.metering.usage import FIGURES, Usage, UsageRow
from fractional_gpu.core.model import LeaseState
from fractional_gpu.host.files import file_identity
from fractional_gpu.ledger import opening
from fractional_gpu.ledger.records import LeaseRecord, LedgerError, RecordError, SeatRecord, UsageRecord
from fractional_gpu.protocol.status import StoryLine, UsagePoint

log = logging.getLogger(__name__)
K = TypeVar("K")
T = TypeVar("T")
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)

# The document of a live lease or seat may be replaced, but the document of an ended lease or seat never changes.
_SAVE_LEASE = """
INSERT INTO leases (lease_id, uid, created_ms, document) VALUES (?, ?, ?, ?)
ON CONFLICT (lease_id) DO UPDATE SET document = excluded.document WHERE leases.ended_ms IS NULL
"""
_SAVE_SEAT = """
INSERT INTO seats (seat_id, pool, created_ms, document) VALUES (?, ?, ?, ?)
ON CONFLICT (seat_id) DO UPDATE SET document = excluded.document WHERE seats.ended_ms IS NULL
"""
_COUNT_UNSTARTED = """
INSERT INTO unstarted (hour, uid, leases) VALUES (?, ?, 1) ON CONFLICT (hour, uid) DO UPDATE SET leases = leases + 1
"""
_PRUNED = {
    "metered": ("hour_s < ?", 1000),
    "usage": ("day < ?", 86_400_000),
    "leases": ("ended_ms < ?", 1),
    "story": ("at_ms < ?", 1),
    "points": ("at_ms < ?", 1),
    "turns": ("ended_ms < ?", 1),
    "seats": ("ended_ms < ?", 1),
    "unstarted": ("hour < ?", 3_600_000),
    "share_days": ("day < ?", 86_400_000),
    "advised": ("day < ?", 86_400_000),
}
"""Maps each table to the condition that selects its old rows, and to the unit of the times in it, in milliseconds."""
_ACCOUNTS = frozenset({"metered", "usage"})  # the use of leases
_PRUNE = "DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} WHERE {old} LIMIT ?)"
HISTORY_MS: Final = 90 * 86_400_000
"""How long history is kept: ended leases with their story lines, cells and points, and so on."""
ACCOUNTS_MS: Final = 400 * 86_400_000
"""How long usage rows are kept (long enough for a year's bills)."""
PRUNED_AT_ONCE: Final = 5000
"""The maximum number of rows per table, and of pages of the file, that `Ledger.prune` removes in one transaction.

Such a transaction takes about a tenth of a second.
"""
STORY_LINES: Final = 1000
"""The maximum number of story lines kept per lease. The oldest are dropped, because users can cause any number of them."""
_TRIM_STORY = """
DELETE FROM story WHERE lease_id = :lease_id
AND line_id <= (SELECT line_id FROM story WHERE lease_id = :lease_id ORDER BY line_id DESC LIMIT 1 OFFSET :kept)
"""
_STORY = "SELECT at_ms, reason, sentence FROM story WHERE lease_id = ? ORDER BY line_id DESC LIMIT ?"
_ADD_POINT = """
INSERT INTO points (lease_id, at_ms, state, used_mib, saved_mib) VALUES (:lease_id, :at_ms, :state, :used_mib, :saved_mib)
"""
_POINTS = "SELECT at_ms, state, used_mib, saved_mib FROM points WHERE lease_id = ? ORDER BY point_id DESC LIMIT ?"
_ADD_USAGE = """
INSERT INTO usage (owner, pool, day, live_ms, busy_ms, busy_mib_ms)
VALUES (:owner, :pool, :day, :live_ms, :busy_ms, :busy_mib_ms)
ON CONFLICT (owner, pool, day) DO UPDATE SET
    live_ms = live_ms + excluded.live_ms, busy_ms = busy_ms + excluded.busy_ms,
    busy_mib_ms = busy_mib_ms + excluded.busy_mib_ms
"""
_METERED = ("hour_s", "lease_id", "device_id", "currency", "pool", "owner", "group_name", "label", "seated", *FIGURES)
_ADD_METERED = f"""
INSERT INTO metered ({", ".join(_METERED)}) VALUES ({", ".join("?" * len(_METERED))})
ON CONFLICT (hour_s, lease_id, device_id, currency) DO UPDATE SET
    pool = excluded.pool, owner = excluded.owner, group_name = excluded.group_name, label = excluded.label,
    seated = excluded.seated,
    {", ".join(f"{name} = {name} + excluded.{name}" for name in FIGURES)}
"""  # noqa: S608 - the names are constants
METERED_BY = {
    "hour": "hour_s",
    "lease": "lease_id",
    "device": "device_id",
    "currency": "currency",
    "pool": "pool",
    "user": "owner",
    "group": "group_name",
    "notebook": "label",
    "seated": "seated",
}
"""Maps the public names that metered figures can be grouped by to their columns."""
_SEAT_TIMES = """
SELECT max(0, ended_ms - created_ms) AS lasted_ms FROM seats
WHERE pool = ? AND ended_ms IS NOT NULL ORDER BY ended_ms DESC LIMIT ?
"""
METER: Final = "meter"
"""The name under which the meter's state is saved."""
_ADVISED_DAYS: Final = 60  # how much longer advice is kept than the days it is based on
_HOUR_MS = 3_600_000
_LOCK = ".lock"
_FILES = ("", "-wal", "-shm", _LOCK)


class Ledger:
    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = connection
        self._lock_descriptor = lock
        self._mutex = threading.RLock()
        self._files = self._found()
        self._is_written_out = False

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        """Open the ledger. If it does not exist, create it along with its folder (mode 0700).

        Raises LedgerError and leaves the file unchanged if it is in use, unreadable, corrupt or empty, belongs to another program, or has a
        different schema.
        """
        path = Path(path)
        lock = opening.lock(path)
        try:
            connection = opening.connect(path)
        except LedgerError:
            close(lock)
            raise
        return cls(path, connection, lock)

    def is_in_place(self) -> bool:
        return self._found() == self._files

    def write_out(self) -> None:
        """Write the whole ledger to `<file>.whole` after its files have been deleted or replaced. The next `open` uses that file.

        `close` writes the file again to include later changes. If another file now has the ledger's name, that file is renamed. Raises
        LedgerError, without changing anything, if another process holds the lock or if writing fails.
        """
        with self._mutex:
            connection, path = self._require(), self.path
            taken = self._found()
            if taken[_LOCK] != file_identity(self._lock_descriptor):
                lock = opening.lock(path)
                close(self._lock_descriptor)
                self._lock_descriptor = lock
            remedy = "check its folder and the free space on its disk"
            with opening.explained(path, "was deleted and cannot be written again", remedy):
                opening.copy_whole(path, connection)
                if taken[""] not in (None, self._files[""]):
                    path.rename(path.with_name(f"{path.name}.found-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"))
            self._is_written_out = True

    def _found(self) -> dict[str, tuple[int, int] | None]:
        return {suffix: file_identity(self.path.with_name(self.path.name + suffix)) for suffix in _FILES}

    def close(self) -> None:
        """Close the file and release its lock for the next broker. Idempotent."""
        with self._mutex:
            if self._connection is None:
                return
            try:
                if self._is_written_out:
                    self.write_out()
            finally:
                connection, self._connection = self._connection, None
                try:
                    with opening.explained(self.path, "could not be closed", "check its disk"):
                        connection.close()
                finally:
                    close(self._lock_descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Group writes: all of them are on disk when the block ends, or none if it raises. Nested blocks join the outer one."""
        with self._mutex:
            connection = self._require()
            if connection.in_transaction:
                yield
                return
            with self._explained():
                connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                with self._explained():
                    connection.execute("COMMIT")
            finally:
                self._roll_back(connection)

    # Leases

    def save_lease(self, record: LeaseRecord) -> None:
        """Insert or replace the lease. Raises RecordError if the lease has ended or contains text that cannot be encoded."""
        lease_id = record.spec.lease_id
        if record.state is LeaseState.ENDED:
            raise RecordError(f"lease {lease_id} cannot be saved as ended; end it with end_lease")
        if self._write(_SAVE_LEASE, (lease_id, record.uid, record.created_ms, self._document(record))) == 0:
            raise RecordError(
                f"lease {lease_id} has already ended, so its id cannot be reused; a new lease needs a new id"
            )

    def live_leases(self) -> list[LeaseRecord]:
        rows = self._read(
            "SELECT lease_id AS id, document FROM leases WHERE ended_ms IS NULL ORDER BY created_ms, lease_id"
        )
        return [self._record(row, LeaseRecord) for row in rows]

    def has_lease(self, lease_id: str) -> bool:
        return bool(self._read("SELECT 1 FROM leases WHERE lease_id = ?", (lease_id,)))

    def end_lease(self, lease_id: str, at_ms: int, reason: str) -> None:
        """End the lease and erase its secrets. If it never had a process, just count it and delete it. Ignore unknown and ended leases."""
        with self.transaction():
            rows = self._read(
                "SELECT lease_id AS id, document FROM leases WHERE lease_id = ? AND ended_ms IS NULL", (lease_id,)
            )
            if not rows:
                return
            record = self._record(rows[0], LeaseRecord)
            if record.launch.had_process or record.identity is not None:
                ended = replace(record, state=LeaseState.ENDED, connection="", token_sha256="")
                statement = "UPDATE leases SET ended_ms = ?, end_reason = ?, document = ? WHERE lease_id = ?"
                self._write(statement, (at_ms, reason, self._document(ended), lease_id))
                return
            self._write(_COUNT_UNSTARTED, (at_ms // _HOUR_MS, record.uid))
            for table in ("story", "points", "leases"):
                self._write(f"DELETE FROM {table} WHERE lease_id = ?", (lease_id,))  # noqa: S608 - our own names

    # Seats

    def save_seat(self, record: SeatRecord) -> None:
        row = (record.seat_id, record.pool, record.created_ms, self._document(record))
        if self._write(_SAVE_SEAT, row) == 0:
            raise RecordError(
                f"seat {record.seat_id} has already ended, so its id cannot be reused; a new seat needs a new id"
            )

    def live_seats(self) -> list[SeatRecord]:
        statement = "SELECT seat_id AS id, document FROM seats WHERE ended_ms IS NULL ORDER BY created_ms, seat_id"
        rows = self._read(statement)
        return [self._record(row, SeatRecord) for row in rows]

    def has_seat(self, seat_id: str) -> bool:
        return bool(self._read("SELECT 1 FROM seats WHERE seat_id = ?", (seat_id,)))

    def end_seat(self, seat_id: str, at_ms: int, reason: str) -> None:
        with self.transaction():
            rows = self._read(
                "SELECT seat_id AS id, document FROM seats WHERE seat_id = ? AND ended_ms IS NULL", (seat_id,)
            )
            if rows:
                ended = structs.replace(self._record(rows[0], SeatRecord), token_sha256="")
                statement = "UPDATE seats SET ended_ms = ?, end_reason = ?, document = ? WHERE seat_id = ?"
                self._write(statement, (at_ms, reason, self._document(ended), seat_id))

    def seat_times_ms(self, pool: str, limit: int = 200) -> list[int]:
        """Return how long the pool's latest seats lasted, in ms, most recent first. If the wall clock was set back, a time may be 0."""
        return [int(row["lasted_ms"]) for row in self._read(_SEAT_TIMES, (pool, max(0, limit)))]

    def add_usage(self, usage: UsageRecord) -> None:
        self._write(_ADD_USAGE, asdict(usage))

    def usage(self, since_day: int) -> list[UsageRecord]:
        rows = self._read("SELECT * FROM usage WHERE day >= ? ORDER BY owner, pool, day", (since_day,))
        return [UsageRecord(**dict(row)) for row in rows]

    # What leases used

    def add_metered(self, rows: Sequence[UsageRow], state: str) -> None:
        """Add the rows to the totals for each hour, lease, device and currency, and save the meter's state, in one transaction."""
        with self.transaction():
            for row in rows:
                party = (row.party.pool, row.party.owner, row.party.group, row.party.label, row.party.seated)
                self._write(_ADD_METERED, (*row.key, *party, *(getattr(row.usage, name) for name in FIGURES)))
            self.keep(METER, state)

    def metered(
        self, by: Sequence[str], since_s: int, until_s: int, only: Mapping[str, str | int] | None = None
    ) -> Iterator[tuple[dict[str, str | int], Usage]]:
        """Yield usage totals for the hours that begin in the period, grouped and sorted by the given columns of `METERED_BY`.

        `only` maps columns to required values. All rows come from one snapshot and are read as the caller iterates. Raises LedgerError.
        """
        columns = [METERED_BY[one] for one in by]
        wanted = {METERED_BY[name]: value for name, value in (only or {}).items()}
        sums = ", ".join(f"SUM({name}) AS {name}" for name in FIGURES)
        tests = "".join(f" AND {column} = ?" for column in wanted)
        grouped = f" GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)}" if columns else ""
        statement = (
            f"SELECT {', '.join([*columns, sums])} FROM metered WHERE hour_s >= ? AND hour_s < ?{tests}{grouped}"  # noqa: S608
        )
        for row in self._read_aside(statement, (since_s, until_s, *wanted.values())):
            if row["reserved_ms"] is not None:  # a query without columns always returns a row
                yield {name: row[METERED_BY[name]] for name in by}, Usage(**{name: row[name] for name in FIGURES})

    def add_turns(self, turns: Sequence[Turn]) -> None:
        with self.transaction():
            for one in turns:
                self._write("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(one))

    # What notebooks used of their shares, and the resulting advice

    def save_share_days(self, days: Sequence[tuple[HabitKey, ShareDay]], before_day: int) -> None:
        with self.transaction():
            for key, one in days:
                row = (one.day, self._document((key, one.share)), self._document(one))
                self._write("INSERT OR REPLACE INTO share_days (day, key, document) VALUES (?, ?, ?)", row)
            self._write("DELETE FROM share_days WHERE day < ?", (before_day,))
            self._write("DELETE FROM advised WHERE day < ?", (before_day - _ADVISED_DAYS,))

    def share_days(self, since_day: int) -> list[tuple[HabitKey, ShareDay]]:
        rows = self._read("SELECT key, document FROM share_days WHERE day >= ? ORDER BY day, key", (since_day,))
        found = self._readable(rows, "days of shares", tuple[HabitKey, Share], ShareDay)
        return [(key, day) for (key, _), day in found]

    def save_given_advice(self, key: HabitKey, given: GivenAdvice) -> None:
        row = (self._document(key), given.day, self._document(given))
        self._write("INSERT OR REPLACE INTO advised (key, day, document) VALUES (?, ?, ?)", row)

    def given_advice(self) -> dict[HabitKey, GivenAdvice]:
        rows = self._read("SELECT key, document FROM advised")
        return dict(self._readable(rows, "records of advice", HabitKey, GivenAdvice))

    def _readable(self, rows: Sequence[sqlite3.Row], what: str, key: type[K], document: type[T]) -> list[tuple[K, T]]:
        found, wrong = list[tuple[K, T]](), list[Exception]()
        for row in rows:
            try:
                pair = msgspec.json.decode(row["key"], type=key), msgspec.json.decode(row["document"], type=document)
                found.append(pair)
            except _UNREADABLE as error:
                wrong.append(error)
        if wrong:
            log.warning("%d of %d %s in %s cannot be read: %s", len(wrong), len(rows), what, self.path, wrong[0])
        return found

    # Stories

    def record(self, lease_id: str, at_ms: int, reason: str, sentence: str) -> None:
        with self.transaction():
            self._write(
                "INSERT INTO story (lease_id, at_ms, reason, sentence) VALUES (?, ?, ?, ?)",
                (lease_id, at_ms, reason, sentence),
            )
            self._write(_TRIM_STORY, {"lease_id": lease_id, "kept": STORY_LINES})

    def story(self, lease_id: str, limit: int = 200) -> list[StoryLine]:
        return [StoryLine(**dict(row)) for row in reversed(self._read(_STORY, (lease_id, max(0, limit))))]

    def story_length(self, lease_id: str) -> int:
        (row,) = self._read("SELECT count(*) AS lines FROM story WHERE lease_id = ?", (lease_id,))
        return int(row["lines"])

    def add_point(self, lease_id: str, point: UsagePoint) -> None:
        self._write(_ADD_POINT, {"lease_id": lease_id, **structs.asdict(point)})

    def points(self, lease_id: str, limit: int = 1000) -> list[UsagePoint]:
        return [UsagePoint(**dict(row)) for row in reversed(self._read(_POINTS, (lease_id, max(0, limit))))]

    # Drained devices, and named texts such as forecasts

    def set_drained(self, device_id: str, *, evict_busy: bool, deadline_ms: int = 0) -> None:
        statement = "INSERT OR REPLACE INTO drained (device_id, evict_busy, deadline_ms) VALUES (?, ?, ?)"
        self._write(statement, (device_id, evict_busy, deadline_ms))

    def set_undrained(self, device_id: str) -> None:
        self._write("DELETE FROM drained WHERE device_id = ?", (device_id,))

    def drained(self) -> dict[str, bool]:
        return {
            row["device_id"]: bool(row["evict_busy"]) for row in self._read("SELECT * FROM drained ORDER BY device_id")
        }

    def drain_deadlines(self) -> dict[str, int]:
        rows = self._read("SELECT device_id, deadline_ms FROM drained WHERE deadline_ms > 0 ORDER BY device_id")
        return {row["device_id"]: int(row["deadline_ms"]) for row in rows}

    def keep(self, name: str, value: str) -> None:
        self._write("INSERT OR REPLACE INTO kept (name, value) VALUES (?, ?)", (name, value))

    def kept(self, name: str) -> str | None:
        rows = self._read("SELECT value FROM kept WHERE name = ?", (name,))
        return str(rows[0]["value"]) if rows else None

    def kept_as(self, name: str, kind: type[T], default: T) -> T:
        """Return a stored value, or `default` if there is none or it cannot be decoded as `kind`."""
        text = self.kept(name)
        try:
            return default if text is None else msgspec.json.decode(text, type=kind)
        except _UNREADABLE as error:
            log.warning("cannot use the ledger's %r: %s", name, error)
            return default

    def prune(self, before_ms: int, accounts_before_ms: int = 0) -> bool:
        """Delete a batch of history from before `before_ms`, and of usage from before `accounts_before_ms`. Live leases are kept.

        This also returns freed space to the file system. Returns True if there is more to remove. Pause before the next call, so as not to
        hold up other writes, which kernels may be waiting for.
        """
        with self.transaction():
            deleted = []
            for table, (old, unit_ms) in _PRUNED.items():
                bound_ms = accounts_before_ms if table in _ACCOUNTS else before_ms
                values = (bound_ms // unit_ms, PRUNED_AT_ONCE)
                deleted.append(self._write(_PRUNE.format(table=table, old=old), values))
            return self._shrink() or max(deleted) == PRUNED_AT_ONCE

    def size_bytes(self) -> int:
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    def _shrink(self) -> bool:
        """Free some of the file's unused pages, and return whether more are left. Must be called in a transaction."""
        free = self._pragma("freelist_count")
        for _ in range(min(free, PRUNED_AT_ONCE)):
            self._read("PRAGMA incremental_vacuum")  # one page only, since Python's module runs only the first step
        return 0 < self._pragma("freelist_count") < free  # without auto_vacuum, free pages stay in the file

    def _pragma(self, name: str) -> int:
        ((value,),) = self._read(f"PRAGMA {name}")
        return int(value)

    # The file

    def _require(self) -> sqlite3.Connection:
        if self._connection is None:
            raise LedgerError(f"the ledger {self.path} is closed; open it again to use it")
        return self._connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.IntegrityError, OverflowError, UnicodeEncodeError) as error:
            raise RecordError(str(error)) from error
        except sqlite3.Error as error:
            remedy = "the change was not saved; check the disk and its free space, then start the broker again"
            raise opening.ledger_error(self.path, f"cannot be used: {error}", remedy) from error

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            with self._explained():
                connection.execute("ROLLBACK")

    def _write(self, statement: str, values: Mapping[str, Any] | tuple[Any, ...]) -> int:
        with self.transaction(), self._explained():
            return self._require().execute(statement, values).rowcount

    def _read(self, statement: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        with self._mutex, self._explained():
            cursor = self._require().cursor()
            cursor.row_factory = sqlite3.Row
            return cursor.execute(statement, values).fetchall()

    def _read_aside(self, statement: str, values: tuple[Any, ...]) -> Iterator[sqlite3.Row]:
        """Yield rows from a separate connection, without the mutex.

        If the file has been moved or deleted, use the writer's connection and the mutex, because no other connection can read it.
        """
        with self._mutex:  # wait until the file has been put back
            self._require()
            in_place = self.is_in_place()
        if not in_place:
            yield from self._read(statement, values)
            return
        # When a read-only connection closes, it never deletes a write-ahead log, not even that of another file that has since taken the
        # name.
        with closing(opening.connect_existing(self.path, "ro")) as connection, self._explained():
            cursor = connection.cursor()
            cursor.row_factory = sqlite3.Row
            yield from cursor.execute(statement, values)

    def _document(self, record: object) -> str:
        with self._explained():
            return msgspec.json.encode(record).decode()

    def _record(self, row: sqlite3.Row, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(row["document"], type=kind)
        except _UNREADABLE as error:
            raise opening.ledger_error(self.path, f"has an unreadable entry for {row['id']}: {error}") from error
