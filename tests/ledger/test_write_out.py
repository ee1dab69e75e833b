"""A ledger whose files are deleted while it is open is written out with all that it holds, and no write is lost."""

import errno
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from fractional_gpu.core.metering.usage import Party, Usage, UsageKey, UsageRow
from fractional_gpu.ledger import opening
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord, LedgerError, LedgerInUseError

pytestmark = pytest.mark.promise("restored-files")

_FILES = ["", "-wal", "-shm", ".lock"]


@pytest.fixture
def kept(ledger: Ledger, make_lease: Callable[..., LeaseRecord]) -> Ledger:
    ledger.save_lease(make_lease("a"))
    ledger.record("a", 1, "test", "one")
    assert ledger.is_in_place()
    return ledger


def named(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def sentences(ledger: Ledger) -> list[str]:
    return [line.sentence for line in ledger.story("a")]


@pytest.mark.parametrize("gone", [[""], ["-wal"], ["-shm"], [".lock"], ["", "-wal"], _FILES])
def test_the_next_opening_has_all_that_a_ledger_held_whose_files_were_deleted(
    kept: Ledger, path: Path, gone: list[str]
) -> None:
    for suffix in gone:
        named(path, suffix).unlink()
    assert not kept.is_in_place()
    kept.record("a", 2, "test", "meanwhile")
    kept.write_out()
    kept.record("a", 3, "test", "after")
    with pytest.raises(LedgerInUseError):
        Ledger.open(path)
    kept.close()
    with Ledger.open(path) as again:
        assert {named(path, suffix).stat().st_mode & 0o777 for suffix in _FILES} == {0o600}
        assert sentences(again) == ["one", "meanwhile", "after"]
        assert [lease.spec.lease_id for lease in again.live_leases()] == ["a"]


def test_the_whole_folder_too(kept: Ledger, path: Path) -> None:
    for suffix in _FILES:
        named(path, suffix).unlink()
    path.parent.rmdir()
    kept.write_out()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    kept.close()
    with Ledger.open(path) as again:
        assert sentences(again) == ["one"]


def test_without_room_it_stays_open_and_is_written_out_later(
    kept: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in _FILES:
        named(path, suffix).unlink()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr(os, "fsync", full)
        for _ in range(2):
            with pytest.raises(LedgerError, match=r"was deleted and cannot be written again: .*No space left"):
                kept.write_out()
    assert [one.name for one in path.parent.iterdir()] == [f"{path.name}.lock"]
    kept.record("a", 2, "test", "two")
    kept.write_out()
    kept.close()
    with Ledger.open(path) as again:
        assert sentences(again) == ["one", "two"]


def test_another_brokers_ledger_is_not_touched(kept: Ledger, path: Path) -> None:
    for suffix in _FILES:
        named(path, suffix).unlink()
    with Ledger.open(path) as other:
        with pytest.raises(LedgerInUseError, match="is in use by process"):
            kept.write_out()
        assert sentences(other) == []
    assert sentences(kept) == ["one"]


def test_a_file_that_was_put_in_its_place_is_set_aside(kept: Ledger, path: Path) -> None:
    path.unlink()
    path.write_bytes(b"a backup, perhaps")
    kept.write_out()
    kept.close()
    with Ledger.open(path) as again:
        assert sentences(again) == ["one"]
    (found,) = path.parent.glob("*.found-*")
    assert found.read_bytes() == b"a backup, perhaps"


@pytest.mark.parametrize("there", [[], [""], ["", "-wal", "-shm"], ["-wal"]])
def test_a_broker_that_is_killed_after_it_wrote_its_ledger_out_leaves_it_to_the_next(
    kept: Ledger, path: Path, tmp_path: Path, there: list[str]
) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    for suffix in ("", "-wal", "-shm"):
        os.link(named(path, suffix), aside / f"old{suffix}")  # with "one" only
    kept.record("a", 2, "test", "two")
    connection = kept._connection
    assert connection is not None
    opening.copy_whole(path, connection)
    kept.close()
    for suffix in ("", "-wal", "-shm"):
        named(path, suffix).unlink(missing_ok=True)
        if suffix in there:
            os.link(aside / f"old{suffix}", named(path, suffix))
    assert opening.exists(path)
    with Ledger.open(path) as again:
        assert sentences(again) == ["one", "two"]
    assert not named(path, opening.WHOLE).exists()


def hours(rows: Iterable[tuple[Mapping[str, str | int], Usage]]) -> list[str | int]:
    return [key["hour"] for key, _ in rows]


@pytest.fixture
def metered(kept: Ledger) -> Ledger:
    kept.add_metered([used(3600), used(7200)], "{}")
    return kept


def used(hour_s: int) -> UsageRow:
    return UsageRow(UsageKey(hour_s, "a", "GPU-0", ""), Party("p", "ada"), Usage(reserved_ms=1))


def test_figures_are_read_during_writes_and_as_of_one_moment(metered: Ledger) -> None:
    rows = metered.metered(["hour"], 0, 2**40)
    first = next(rows)
    writer = threading.Thread(target=metered.add_metered, args=([used(10_800)], "{}"))
    writer.start()
    writer.join(30)
    assert not writer.is_alive(), "a write waits until the figures are read"
    assert hours([first, *rows]) == [3600, 7200]
    assert hours(metered.metered(["hour"], 0, 2**40)) == [3600, 7200, 10_800]
