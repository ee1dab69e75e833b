"""An existing file is a sound ledger or an error; it is never replaced, repaired or emptied."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fractional_gpu.ledger import opening, schema
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord, LedgerError

pytestmark = pytest.mark.promise("ledger-version")

_NOBODY = 65534
_OPEN_AS = """
import os, sys
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
try:
    Ledger.open(sys.argv[1])
except LedgerError as error:
    print(error)
"""


@pytest.fixture
def kept(path: Path, make_lease: Callable[..., LeaseRecord]) -> Path:
    """Return the path of a closed ledger with something in it."""
    with Ledger.open(path) as ledger:
        for number in range(200):
            ledger.save_lease(make_lease(f"lease {number}"))
    return path


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Yield a folder that an unprivileged process reaches and that belongs to it (the tests may run as root)."""
    with tempfile.TemporaryDirectory() as name:
        if os.geteuid() == 0:
            os.chown(name, _NOBODY, _NOBODY)
        yield Path(name)


def _unprivileged_open(path: Path) -> str:
    """Open the ledger in a process that file modes stop, and return what it says."""
    command = [sys.executable, "-c", _OPEN_AS, str(path), str(_NOBODY)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _assert_refused_untouched(path: Path, message: str) -> None:
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=message) as caught:
        Ledger.open(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_a_new_ledger_is_private_and_whole(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record("a", 1, "r", "s")
        modes = {child.name: stat.S_IMODE(child.stat().st_mode) for child in path.parent.iterdir()}
        assert modes == dict.fromkeys(("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock"), 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with closing(sqlite3.connect(path)) as reader:
        assert reader.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA,)
        assert reader.execute("PRAGMA application_id").fetchone() == (schema.APPLICATION_ID,)


def test_garbage_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(os.urandom(4096))
    _assert_refused_untouched(path, "is not a database, or its header is damaged")


def test_a_destroyed_page_is_found_before_it_is_believed(kept: Path) -> None:
    with closing(sqlite3.connect(kept)) as reader:
        (root,) = reader.execute("SELECT rootpage FROM sqlite_master WHERE name = 'leases'").fetchone()
        (size,) = reader.execute("PRAGMA page_size").fetchone()
    with kept.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xa5" * size)
    _assert_refused_untouched(kept, "is corrupt: |cannot be read: database disk image is malformed")


def test_a_database_of_another_program_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE cookies (x)")
    path.chmod(0o600)
    _assert_refused_untouched(path, "is a database that belongs to another program; choose another state_dir")


@pytest.mark.parametrize("other", [0, schema.SCHEMA + 1])
def test_a_ledger_of_another_schema_is_refused_and_left_as_it_is(kept: Path, other: int) -> None:
    with closing(sqlite3.connect(kept)) as writer:
        writer.execute(f"PRAGMA user_version = {other}")
    names = sorted(kept.parent.iterdir())
    _assert_refused_untouched(
        kept,
        rf"written by another version \(schema {other}, this one uses schema {schema.SCHEMA}\); install that version again",
    )
    assert sorted(kept.parent.iterdir()) == names


def test_a_ledger_that_lacks_a_table_is_refused(kept: Path) -> None:
    with closing(sqlite3.connect(kept)) as writer:
        writer.execute("DROP TABLE story")
    _assert_refused_untouched(kept, "lacks the table story")


def test_a_link_in_its_place_is_not_followed(path: Path, kept: Path) -> None:
    link = path.with_name("link.db")
    link.symlink_to(kept)
    with pytest.raises(
        LedgerError, match=r"link\.db cannot be opened for writing: link\.db: Too many levels of symbolic links"
    ):
        Ledger.open(link)


def test_a_log_without_its_database_is_not_restarted(kept: Path) -> None:
    kept.with_name("ledger.db-wal").write_bytes(b"committed work")
    kept.unlink()
    with pytest.raises(LedgerError, match="is missing, but its write-ahead log still exists"):
        Ledger.open(kept)
    assert not kept.exists()


def test_a_folder_or_file_that_others_can_write_is_refused(kept: Path) -> None:
    kept.chmod(0o666)
    with pytest.raises(LedgerError, match=r"can be written to by other users \(mode 0666\).*chmod 600"):
        Ledger.open(kept)
    kept.chmod(0o600)
    kept.parent.chmod(0o777)
    with pytest.raises(LedgerError, match=r"in a folder that other users can write to \(mode 0777\).*chmod go-w"):
        Ledger.open(kept)


def test_a_file_that_others_can_read_is_closed_to_them(kept: Path) -> None:
    kept.chmod(0o644)
    Ledger.open(kept).close()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_read_only_folder_is_refused(public_folder: Path) -> None:
    public_folder.chmod(0o500)
    said = _unprivileged_open(public_folder / "ledger.db")
    public_folder.chmod(0o700)
    assert said.endswith("cannot be locked: ledger.db.lock: Permission denied; check the folder's owner and mode")


def test_a_ledger_of_another_user_is_refused(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(LedgerError, match=rf"the file belongs to another user \(uid {owner}\); move it away"):
        opening._check_files(kept)


def test_a_second_opener_is_told_who_holds_it(path: Path) -> None:
    with Ledger.open(path), pytest.raises(LedgerError, match=f"in use by process {os.getpid()}; stop that broker"):
        Ledger.open(path)
    Ledger.open(path).close()


def test_a_full_disk_is_reported_and_nothing_is_kept(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record("a", 1, "r", "kept")
        ledger._read(f"PRAGMA max_page_count = {ledger._read('PRAGMA page_count')[0][0]}")
        with pytest.raises(LedgerError, match="cannot be used: database or disk is full; the change was not saved"):
            ledger.record("a", 2, "r", json.dumps("x" * 100_000))
        assert [line.sentence for line in ledger.story("a")] == ["kept"]


@pytest.mark.parametrize("log", [False, True])
def test_a_damaged_ledger_names_the_command_that_sets_it_aside(tmp_path: Path, log: bool) -> None:
    """The printed command works, also a second time, and what it moves is kept."""
    path = tmp_path / "a folder" / "ledger.sqlite"
    for time in (1, 2):
        Ledger.open(path).close()
        path.write_bytes(b"damaged" * time * 100)
        if log:
            path.with_name("ledger.sqlite-wal").write_bytes(b"log")
        with pytest.raises(LedgerError) as caught:
            Ledger.open(path)
        command = str(caught.value).split("`")[1]
        subprocess.run(command, shell=True, check=True)  # noqa: S602 - as a person would
        assert len(list(path.parent.glob("damaged-*/ledger.sqlite"))) == time
        assert len(list(path.parent.glob("damaged-*/ledger.sqlite-wal"))) == time * log
        Ledger.open(path).close()
        path.unlink()
        for rest in path.parent.glob("ledger.sqlite-*"):
            rest.unlink()


def test_a_log_without_its_ledger_names_the_command_that_sets_it_aside(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.with_name("ledger.sqlite-wal").write_bytes(b"log")
    with pytest.raises(LedgerError, match="is missing, but its write-ahead log") as caught:
        Ledger.open(path)
    subprocess.run(str(caught.value).split("`")[1], shell=True, check=True)  # noqa: S602 - as a person would
    Ledger.open(path).close()
    (log,) = tmp_path.glob("damaged-*/ledger.sqlite-wal")
    assert log.read_bytes() == b"log"


def test_an_empty_file_is_refused_not_filled(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    _assert_refused_untouched(path, r"is empty \(zero bytes\); it is unchanged: restore a backup")
