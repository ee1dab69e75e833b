"""Checks and opens the ledger's file.

An existing file that is not an intact ledger causes an error. It is never replaced, repaired or emptied. A new ledger is built under
another name and renamed once it is complete. A write-ahead log without a database is an error, because it means that the database was
removed. If `<file>.whole` exists, it becomes the ledger: a broker wrote it after its own files had been deleted. Only one broker at a time
can hold the lock on `<file>.lock`. The file contains Jupyter's signing keys, so it is private (0600), in a folder that no other user may
write to.
"""

import contextlib
import fcntl
import os
import shlex
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from fractional_gpu.host.files import open_own, sync_folder
from fractional_gpu.ledger.records import LedgerError, LedgerInUseError
from fractional_gpu.ledger.schema import APPLICATION_ID, SCHEMA, TABLES, create_tables

WHOLE = ".whole"  # suffix of a complete copy that has not yet taken the ledger's name
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_BUSY_S = 5.0  # how long to wait while another program reads


def ledger_error(path: Path, wrong: str, remedy: str | None = None) -> LedgerError:
    """Return a LedgerError about the file. The default advice is to restore a backup or to set the file aside."""
    if remedy is None:
        remedy = (
            f"it is unchanged: restore a backup, or set it aside with `{set_aside_command(path)}`; the next broker then "
            "recovers the running kernels, including suspended ones"
        )
    return LedgerError(f"the ledger {path} {wrong}; {remedy}")


@contextlib.contextmanager
def explained(path: Path, wrong: str, remedy: str | None = None) -> Iterator[None]:
    """Convert OSError and SQLite errors to LedgerError. The message says what is `wrong`, the original reason, and the remedy."""
    try:
        yield
    except OSError as error:
        raise ledger_error(path, f"{wrong}: {error.strerror}", remedy) from error
    except sqlite3.Error as error:
        raise ledger_error(path, f"{wrong}: {error}", remedy) from error


def set_aside_command(path: Path) -> str:
    """Return a shell command that moves the ledger and its log to a new folder, so that the next broker creates a new ledger."""
    return f'mv {shlex.quote(str(path))}* "$(mktemp -d {shlex.quote(str(path.parent / "damaged-XXXXXX"))})"'


def lock(path: Path) -> int:
    """Create the folder if needed, lock the `.lock` file next to `path`, and return its descriptor. Raises LedgerError."""
    _check_folder(path)
    lock_file = path.with_name(path.name + ".lock")
    with explained(path, f"cannot be locked: {lock_file.name}", "check the folder's owner and mode"):
        descriptor = open_own(lock_file, os.O_RDWR | os.O_CREAT)
    try:
        with explained(path, "cannot be locked", "keep the state_dir on a local disk"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                who = f"process {holder}" if holder.isdigit() else "another process"
                remedy = "stop that broker first, or give this one another state_dir"
                raise LedgerInUseError(str(ledger_error(path, f"is in use by {who}", remedy))) from None
    except LedgerError:
        os.close(descriptor)
        raise
    with contextlib.suppress(OSError):  # the disk may be full, and the pid is only for people
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return descriptor


def connect(path: Path) -> sqlite3.Connection:
    """Open an intact ledger, or create one if it is missing. The caller must hold the lock. Raises LedgerError."""
    with explained(path, "cannot be examined", "check the owner and mode of its folder"):
        if os.path.lexists(path.with_name(path.name + WHOLE)):
            adopt_whole(path)
    if os.path.lexists(path):
        _check_files(path)
    else:
        _create(path)
    connection = connect_existing(path)
    try:
        with explained(path, "cannot be read"):
            _check_contents(path, connection)
            _prepare(path, connection)
    except LedgerError:
        connection.close()
        raise
    return connection


def exists(path: Path) -> bool:
    return any(os.path.lexists(path.with_name(path.name + suffix)) for suffix in ("", WHOLE))


def copy_whole(path: Path, connection: sqlite3.Connection) -> None:
    """Write the open ledger to `<file>.whole`, even if the ledger's files are gone, and return once it is on disk.

    The caller must hold the lock. Raises sqlite3.Error or OSError, in which case no `.whole` file is left behind.
    """
    unfinished, descriptor = _new_file(path)
    try:
        connection.execute("VACUUM INTO ?", (str(unfinished),))
        os.fsync(descriptor)
        unfinished.rename(path.with_name(path.name + WHOLE))
        sync_folder(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def adopt_whole(path: Path) -> None:
    """Rename `<file>.whole` to the ledger's name. The caller must hold the lock, and no connection may be open. Raises OSError."""
    for suffix in ("-wal", "-shm"):  # SQLite would apply the logs of an older file to the new one
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.with_name(path.name + WHOLE).rename(path)
    sync_folder(path.parent)


def connect_existing(path: Path, mode: str = "rw") -> sqlite3.Connection:
    """Open an existing file in mode `rw` or `ro`. Raises LedgerError if the file is missing or unusable."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with explained(path, "cannot be opened"):
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def live_leases(path: Path) -> int:
    """Check a ledger, even one in use, without changing it. Return its number of live leases. Raises LedgerError."""
    with contextlib.closing(connect_existing(path, "ro")) as connection, explained(path, "cannot be read"):
        (owner,) = connection.execute("PRAGMA application_id").fetchone()
        if owner != APPLICATION_ID:
            raise ledger_error(path, "is a database that belongs to another program")
        _check_contents(path, connection)
        (count,) = connection.execute("SELECT count(*) FROM leases WHERE ended_ms IS NULL").fetchone()
    return int(count)


def _check_folder(path: Path) -> None:
    folder = path.parent
    with explained(path, f"cannot be stored in {folder}", "choose another state_dir"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    if found.st_uid not in {0, os.geteuid()}:
        raise ledger_error(
            path, f"is in another user's folder (uid {found.st_uid})", "choose a state_dir of the broker's own user"
        )
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise ledger_error(
            path,
            f"is in a folder that other users can write to (mode {found.st_mode & 0o777:04o})",
            f"run: chmod go-w {folder}",
        )


def _check_files(path: Path) -> None:
    """Check the type, owner, links and mode of the ledger's files, and the program named in the header, before SQLite opens the ledger."""
    # If a process closes any descriptor of a file, it loses all its POSIX locks on that file, even those of SQLite. We hold the ledger's
    # lock, so this process has no other connection to the file.
    remedy = "check its owner and mode, and that its disk is writable, or choose another state_dir"
    for file in (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal", "")):
        if os.path.lexists(file):
            with explained(path, f"cannot be opened for writing: {file.name}", remedy):
                descriptor = open_own(file, os.O_RDWR)
                try:
                    mode, header = os.fstat(descriptor).st_mode, os.pread(descriptor, _HEADER_BYTES, 0)
                finally:
                    os.close(descriptor)
    if mode & 0o022:
        raise ledger_error(
            path,
            f"can be written to by other users (mode {mode & 0o777:04o})",
            f"if its contents can be trusted, run: chmod 600 {path}",
        )
    path.chmod(0o600)
    if not header:
        raise ledger_error(path, "is empty (zero bytes)")
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise ledger_error(path, "is not a database, or its header is damaged")
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise ledger_error(path, "is a database that belongs to another program", "choose another state_dir")


def _check_contents(path: Path, connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA:
        wrong = f"was written by another version (schema {version}, this one uses schema {SCHEMA})"
        remedy = (
            "install that version again, or give this one another state_dir; if that version was never released, end its kernels, then "
            f"set the ledger aside with `{set_aside_command(path)}`"
        )
        raise ledger_error(path, wrong, remedy)
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise ledger_error(path, f"is corrupt: {' '.join(str(verdict).split())}")


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise ledger_error(
            path, "is on a file system that does not support write-ahead logging", "keep the state_dir on a local disk"
        )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA trusted_schema = OFF")  # triggers in a tampered file call no functions with side effects
    # The first read after `journal_mode` also creates the log files, which `Ledger.is_in_place` looks for.
    tables = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if missing := sorted(TABLES.keys() - tables):
        raise ledger_error(path, f"is corrupt: it lacks the table {missing[0]}")


def _create(path: Path) -> None:
    """Build a new ledger under another name and then rename it, so that a crash leaves either no ledger or a complete one."""
    if path.with_name(path.name + "-wal").exists():
        raise ledger_error(
            path,
            "is missing, but its write-ahead log still exists",
            f"put the database back, or move the log out of the way with `{set_aside_command(path)}`; the next broker then "
            "recovers the running kernels, including suspended ones",
        )
    with explained(path, "cannot be created", "check the folder's owner and mode and the free space on its disk"):
        unfinished, descriptor = _new_file(path)
        os.close(descriptor)
        with contextlib.closing(connect_existing(unfinished)) as connection:
            connection.execute(
                "PRAGMA auto_vacuum = INCREMENTAL"
            )  # has an effect only before the first table; without it, `Ledger.prune` frees nothing
            connection.execute("PRAGMA synchronous = FULL")
            create_tables(connection)
        unfinished.rename(path)
        sync_folder(path.parent)


def _new_file(path: Path) -> tuple[Path, int]:
    unfinished = path.with_name(f".{path.name}.new")
    for leftover in (unfinished, unfinished.with_name(unfinished.name + "-journal")):
        leftover.unlink(missing_ok=True)
    return unfinished, os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
