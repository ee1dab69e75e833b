"""Ledger writes keep their order and share transactions, and a failed one fails only for its own callers."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fractional_gpu.broker.persistence import ledger_writer as writer_module
from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LedgerError, RecordError
from tests.broker.persistence.disk import Disk

pytestmark = pytest.mark.promise("full-disk-told")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    tmp_path.chmod(0o700)
    return Ledger.open(tmp_path / "ledger.sqlite")


def note(ledger: Ledger, sentence: str) -> Callable[[], None]:
    return lambda: ledger.record("lease", 1, "test", sentence)


def told(ledger: Ledger) -> list[str]:
    return [line.sentence for line in ledger.story("lease")]


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each transaction so far."""
    counted: list[str] = []
    real = Ledger.transaction

    @contextmanager
    def count(self: Ledger) -> Iterator[None]:
        if not self._require().in_transaction:
            counted.append("transaction")
        with real(self):
            yield

    monkeypatch.setattr(Ledger, "transaction", count)
    return counted


async def test_writes_keep_their_order_and_share_transactions(ledger: Ledger, transactions: list[str]) -> None:
    writer = LedgerWriter(ledger)
    begun, held = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert held.wait(30)

    writer.submit(hold)
    assert await asyncio.to_thread(begun.wait, 30)
    notes = [writer.submit(note(ledger, f"{number}")) for number in range(50)]
    last = writer.submit(note(ledger, "last"))
    held.set()
    await last
    assert all(one.done() for one in notes)
    assert told(ledger) == [*map(str, range(50)), "last"]
    assert len(transactions) == 2
    await writer.close()


async def test_the_intent_of_an_operation_shares_the_transaction_of_the_decision(
    ledger: Ledger, transactions: list[str]
) -> None:
    writer = LedgerWriter(ledger)
    writer.submit(note(ledger, "decision"))
    await asyncio.create_task(writer.run(note(ledger, "intent")))
    assert len(transactions) == 1
    assert told(ledger) == ["decision", "intent"]
    await writer.close()


async def test_a_write_that_does_not_fit_fails_alone(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    writer = LedgerWriter(ledger)

    def misfit() -> None:
        raise RecordError("no such operation is open")

    writer.submit(note(ledger, "before"))
    bad = asyncio.create_task(writer.run(misfit))
    writer.submit(misfit)
    writer.submit(note(ledger, "after"))
    with pytest.raises(RecordError, match="no such operation is open"):
        await bad
    await writer.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
        "cannot write the ledger: no such operation is open"
    ]


async def test_a_full_disk_fails_the_whole_group_and_the_next_one_is_tried(ledger: Ledger) -> None:
    writer = LedgerWriter(ledger)

    def full() -> None:
        raise LedgerError("the disk is full")

    first = asyncio.create_task(writer.run(note(ledger, "lost")))
    second = asyncio.create_task(writer.run(full))
    for task in (first, second):
        with pytest.raises(LedgerError, match="the disk is full"):
            await task
    await writer.run(note(ledger, "kept"))
    assert told(ledger) == ["kept"], "nothing of a failed group is kept"
    await writer.close()


async def test_a_text_that_cannot_be_written_fails_alone(ledger: Ledger) -> None:
    writer = LedgerWriter(ledger)
    writer.submit(note(ledger, "before"))
    bad = asyncio.create_task(writer.run(note(ledger, "of control group u\udcff")))
    last = writer.submit(note(ledger, "after"))
    async with asyncio.timeout(30):
        with pytest.raises(RecordError, match="surrogates not allowed"):
            await bad
        await last
    assert told(ledger) == ["before", "after"]
    await writer.close()


async def test_a_write_continues_when_its_waiter_is_cancelled(ledger: Ledger) -> None:
    writer = LedgerWriter(ledger)
    waiting = asyncio.create_task(writer.run(note(ledger, "kept")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await writer.run(note(ledger, "next"))
    assert told(ledger) == ["kept", "next"]
    await writer.close()


async def test_closing_writes_what_is_pending(tmp_path: Path, ledger: Ledger) -> None:
    writer = LedgerWriter(ledger)
    writer.submit(note(ledger, "pending"))
    await writer.close()
    with Ledger.open(tmp_path / "ledger.sqlite") as again:
        assert told(again) == ["pending"]
    with pytest.raises(LedgerError, match="is closed"):
        ledger.story("lease")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    tmp_path.chmod(0o700)
    return Disk.open(tmp_path / "ledger.sqlite")


async def test_a_full_disk_is_told_until_something_could_be_written(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_LOOK_AGAIN_S", 0.01)
    writer = LedgerWriter(disk)
    changes: list[str] = []
    changed = asyncio.Event()

    def note_change() -> None:
        changes.append(writer.trouble)
        changed.set()

    writer.connect(wrote=lambda _took_s: None, trouble_changed=note_change)
    disk.full = True
    with pytest.raises(LedgerError):
        await writer.run(lambda: disk.keep("a", "b"))
    assert f"state folder {disk.path.parent} is full" in writer.trouble
    changed.clear()
    await writer.flushed()  # which writes nothing, and so shows nothing
    assert writer.trouble
    disk.full = False
    await changed.wait()  # only the look itself writes
    assert changes[0]
    assert changes[1:] == [""]
    await writer.close()


async def test_what_must_be_written_is_repeated_before_all_later_writes(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_LOOK_AGAIN_S", 60)
    writer = LedgerWriter(disk)
    disk.full = True
    for number in range(2):
        with pytest.raises(LedgerError):
            await writer.submit(note(disk, f"must {number}"), again=True)
    with pytest.raises(LedgerError):
        await writer.submit(note(disk, "may"))
    disk.full = False
    await writer.run(note(disk, "later"))
    assert told(disk) == ["must 0", "must 1", "later"]
    disk.full = True
    with pytest.raises(LedgerError):
        await writer.submit(note(disk, "at the end"), again=True)
    disk.full = False
    await writer.close()
    with Ledger.open(disk.path) as again:
        assert told(again)[-1] == "at the end"


async def test_while_nothing_can_be_written_what_is_repeated_is_kept_in_order(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the disk is not full but fails."""
    monkeypatch.setattr(writer_module, "_LOOK_AGAIN_S", 60)
    monkeypatch.setattr(disk, "reason", "disk I/O error")
    writer = LedgerWriter(disk)
    disk.full = True
    written = [writer.submit(note(disk, f"must {number}"), again=True) for number in range(3)]
    for one in written:
        with pytest.raises(LedgerError, match="I/O error"):
            await one
    assert writer.trouble
    disk.full = False
    await writer.run(note(disk, "later"))
    assert told(disk) == ["must 0", "must 1", "must 2", "later"]
    assert not writer.trouble
    await writer.close()
