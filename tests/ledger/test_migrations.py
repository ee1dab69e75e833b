"""A ledger of every schema that there was opens with all its leases intact; a migration happens as a whole or not at all."""

import hashlib
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fractional_gpu.core.model import LeaseState
from fractional_gpu.ledger import Ledger, LedgerError, schema

SCHEMAS = Path(__file__).parent / "schemas"
_MIGRATE_AND_DIE = """
import os, signal, sys
from fractional_gpu.ledger import Ledger, schema
last = schema.newest_version()
real = schema.MIGRATIONS[last]
def die(connection):
    real(connection)
    connection.execute("DELETE FROM leases")  # what is not committed is not there
    os.kill(os.getpid(), signal.SIGKILL)
schema.MIGRATIONS[last] = die
Ledger.open(sys.argv[1])
"""


def restored(name: str, path: Path) -> Path:
    """Make the ledger that a dump describes."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with closing(sqlite3.connect(path)) as writer:
        writer.executescript((SCHEMAS / f"{name}.sql").read_text(encoding="utf-8"))
        writer.execute("PRAGMA journal_mode = WAL")
    path.chmod(0o600)
    return path


def tables(path: Path) -> dict[str, list[tuple[str, str, int, str | None]]]:
    """Columns of each table: name, type, whether it may be null, default."""
    with closing(sqlite3.connect(path)) as reader:
        names = [
            name for (name,) in reader.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        ]
        return {name: sorted(row[1:5] for row in reader.execute(f"PRAGMA table_info({name})")) for name in names}


def dumps() -> list[str]:
    """Names of the dumps."""
    return sorted(path.stem for path in SCHEMAS.glob("*.sql"))


def test_there_is_a_dump_of_every_schema() -> None:
    missing = {str(number) for number in schema.MIGRATIONS} - set(dumps())
    assert not missing, "python -m tests.ledger.dump_schema > tests/ledger/schemas/N.sql"


@pytest.mark.parametrize("name", dumps())
def test_a_ledger_of_every_schema_is_opened_with_all_that_it_knows(name: str, path: Path, tmp_path: Path) -> None:
    with Ledger.open(restored(name, path)) as ledger:
        first, second = ledger.live_leases()
        assert [lease.spec.lease_id for lease in (first, second)] == ["lease-1", "lease-2"]
        assert (first.state, first.pid, first.start_time, first.uid) == (
            LeaseState.RESIDENT,
            4321,
            99_999_999_999,
            1000,
        )
        assert (second.state, second.saved_mib, second.pid) == (LeaseState.SUSPENDED, 1234, None)
        assert (first.spec.label, first.connection, first.token_sha256) == (
            "Notizbuch é",
            '{"key": "secret"}',
            "ab" * 32,
        )
        (operation,) = ledger.open_operations()
        assert (operation.lease_id, operation.phase, operation.pids) == ("lease-1", "checkpoint", "[4321]")
        assert [line.sentence for line in ledger.story("lease-1")] == ["the kernel got 1/4 of GPU-1"]
        assert ledger.next_operation_id() == 2
        ledger.save_lease(first)
    new = tmp_path / "new" / "ledger.db"
    Ledger.open(new).close()
    assert tables(path) == tables(new), "migrated and new ledgers have the same tables"


def test_an_earlier_program_of_the_same_schema_opens_and_writes_what_this_one_wrote(path: Path) -> None:
    with closing(sqlite3.connect(restored("3", path))) as reader:
        known = [str(row[1]) for row in reader.execute("PRAGMA table_info(leases)")]
        row = reader.execute("SELECT * FROM leases WHERE lease_id = 'lease-1'").fetchone()
    Ledger.open(path).close()
    with closing(sqlite3.connect(path)) as writer, writer:
        assert writer.execute("PRAGMA user_version").fetchone() == (3,)
        insert = f"INSERT INTO leases ({', '.join(known)}) VALUES ({', '.join('?' * len(known))})"  # noqa: S608 - our own names
        writer.execute(insert, ("lease-9", *row[1:]))
    with Ledger.open(path) as ledger:
        assert [(lease.members, lease.released) for lease in ledger.live_leases()] == [((), False)] * 3
        ledger.end_lease("lease-2", 1, "released")
        assert ledger.has_lease("lease-2"), "whether it ever had a process is not known"


@pytest.mark.parametrize("name", [name for name in dumps() if int(name[0]) < schema.newest_version()])
def test_a_migration_that_is_killed_is_made_again_from_the_beginning(name: str, path: Path) -> None:
    restored(name, path)
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", _MIGRATE_AND_DIE, str(path)], check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
        with closing(sqlite3.connect(path)) as reader:
            assert reader.execute("PRAGMA user_version").fetchone() == (int(name[0]),)
    with Ledger.open(path) as ledger:
        assert len(ledger.live_leases()) == 2
        assert ledger._read("PRAGMA user_version")[0][0] == schema.newest_version()


def test_a_newer_ledger_is_refused_and_left_as_it_is_for_the_newer_version(path: Path) -> None:
    Ledger.open(path).close()
    newest = schema.newest_version()
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("ALTER TABLE leases ADD COLUMN colour TEXT")
        writer.execute(f"PRAGMA user_version = {newest + 7}")
    before = {
        file.name: hashlib.sha256(file.read_bytes()).digest()
        for file in path.parent.glob("*.db*")
        if "lock" not in file.name
    }
    with pytest.raises(
        LedgerError, match=rf"newer version \(schema {newest + 7}, this one knows up to {newest}\); install that"
    ):
        Ledger.open(path)
    after = {
        file.name: hashlib.sha256(file.read_bytes()).digest()
        for file in path.parent.glob("*.db*")
        if "lock" not in file.name
    }
    assert after == before
