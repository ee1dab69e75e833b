"""A ledger at its limit drops its oldest history, reports that, and still writes what kernels need."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.broker.persistence.ledger_writer import LedgerWriter
from fractional_gpu.core.metering.turns import Turn
from fractional_gpu.core.metering.usage import Party, Usage, UsageKey, UsageRow
from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord, SeatRecord, UsageRecord
from fractional_gpu.protocol.status import UsagePoint
from tests.support.records import a_record

pytestmark = pytest.mark.promise("ledger-size")

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NOW_MS = 20_718 * DAY_MS
HISTORY = ("leases", "story", "points", "turns")


def count(ledger: Ledger, table: str, where: str = "1") -> int:
    ((rows,),) = ledger._read(f"SELECT count(*) FROM {table} WHERE {where}")  # noqa: S608 - our own names
    return int(rows)


def lease(lease_id: str, created_ms: int, **changes: Any) -> LeaseRecord:  # noqa: ANN401 - fields
    spec = LeaseSpec(lease_id=lease_id, pool="default", owner="ada", fraction_milli=250, reserve_mib=100)
    values: dict[str, Any] = {
        "spec": spec, "state": LeaseState.RESIDENT, "generation": 1, "device_id": "GPU-1", "saved_mib": 0, "uid": 1000,
        "kernel_id": "k", "token_sha256": "", "boot_id": "b", "pid": 7, "start_time": 8, "connection": "{}",
        "language": "python", "ipykernel": True, "created_ms": created_ms, "suspends": 0, "resumes": 0,
        "had_process": True, **changes,
    }  # fmt: skip
    return a_record(**values)


def seat(seat_id: str) -> SeatRecord:
    return SeatRecord(
        seat_id=seat_id, owner="ada", server="", group="", pool="default", fraction_milli=250, memory_mib=100,
        priority=0, weight=1, max_kernels=1, uid=None, device_id=None, token_sha256="",
        created_ms=NOW_MS - 89 * DAY_MS, expires_ms=None,
    )  # fmt: skip


def fill(ledger: Ledger) -> None:
    """Write 80 days of history, with a lease and its charge every three hours, and data that lives from the first day on."""
    begun_ms = NOW_MS - 80 * DAY_MS
    with ledger.transaction():
        for at_ms in range(begun_ms, NOW_MS, 3 * HOUR_MS):
            lease_id = f"lease-{at_ms}"
            ledger.save_lease(lease(lease_id, at_ms))
            for number in range(10):
                ledger.record(lease_id, at_ms + number, "reason", "x" * 200)
            ledger.add_point(lease_id, UsagePoint(at_ms=at_ms, state="resident", used_mib=1, saved_mib=0))
            ledger.add_turns([Turn(lease_id, at_ms, at_ms, at_ms, 1, 1)])
            ledger.end_lease(lease_id, at_ms + 10, "released")
            key = UsageKey(at_ms // HOUR_MS * 3600, lease_id, "GPU-1", "EUR")
            ledger.add_metered([UsageRow(key, Party("default", "ada"), Usage(charge_milli=1))], "{}")
        for number in range(3):
            ledger.save_lease(lease(f"live-{number}", begun_ms))
        ledger.save_seat(seat("s"))
        ledger.add_usage(
            UsageRecord(owner="ada", pool="default", day=begun_ms // DAY_MS, live_ms=1, busy_ms=1, busy_mib_ms=1)
        )
        ledger.keep("forecasts", "{}")
        ledger.set_drained("GPU-2", evict_busy=False)


def charged(ledger: Ledger) -> int:
    return sum(usage.charge_milli for _, usage in ledger.metered([], 0, 2**40))


def assert_what_lives_is_there(ledger: Ledger) -> None:
    assert [one.spec.lease_id for one in ledger.live_leases()] == ["live-0", "live-1", "live-2"]
    assert [one.seat_id for one in ledger.live_seats()] == ["s"]
    assert (ledger.kept("forecasts"), ledger.drained()) == ("{}", {"GPU-2": False})


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger with too much history for any limit in these tests."""
    with Ledger.open(tmp_path / "state" / "ledger.sqlite") as ledger:
        fill(ledger)
        yield ledger


async def test_the_oldest_history_gives_way_until_the_ledger_fits_its_limit(full: Ledger) -> None:
    size = full.size_bytes()
    writer = LedgerWriter(full, limit_bytes=size // 2)
    await writer.prune(NOW_MS)
    assert size // 4 < writer.size_bytes <= size // 2
    for table in HISTORY:
        assert 0 < count(full, table) < 640 * (10 if table == "story" else 1), table
    newest = f"lease-{NOW_MS - 3 * HOUR_MS}"
    assert full.has_lease(newest)
    assert full.story(newest)
    assert not full.has_lease(f"lease-{NOW_MS - 80 * DAY_MS}")
    assert charged(full) == 640
    assert count(full, "usage") == 1
    assert_what_lives_is_there(full)
    await writer.close()


async def test_what_was_charged_gives_way_when_no_history_is_left(full: Ledger) -> None:
    with full.transaction():
        for number in range(3000):
            key = UsageKey((NOW_MS - 70 * DAY_MS) // 1000 + number * 3600, f"long-{number}", "GPU-1", "EUR")
            full.add_metered([UsageRow(key, Party("default", "ada"), Usage(charge_milli=1))], "{}")
    writer = LedgerWriter(full, limit_bytes=400_000)
    await writer.prune(NOW_MS)
    assert writer.size_bytes <= 400_000
    assert [count(full, table) for table in HISTORY] == [3, 0, 0, 0]
    assert count(full, "metered", f"hour_s < {(NOW_MS - 79 * DAY_MS) // 1000}") == 0, "the oldest first"
    assert 0 < charged(full) < 3640
    assert_what_lives_is_there(full)
    await writer.close()


async def test_that_history_gives_way_is_said_once_and_told_for_as_long_as_the_ledger_is_near_its_limit(
    full: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    limit = full.size_bytes() // 2
    writer, told = LedgerWriter(full, limit_bytes=limit), list[str]()
    writer.connect(wrote=lambda _took_s: None, trouble_changed=lambda: told.append(writer.over_limit))
    with caplog.at_level(logging.WARNING):
        for hour in range(3):
            await writer.prune(NOW_MS + hour * HOUR_MS)
            await writer.run(lambda: fill_again(full))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == told[0] == writer.over_limit
    assert "c.GPUBroker.ledger_limit" in line
    assert str(full.path) in line
    writer.limit_bytes = 100 * limit
    await writer.prune(NOW_MS)
    assert (writer.over_limit, told[1:]) == ("", [""])
    await writer.close()


def fill_again(ledger: Ledger) -> None:
    for number in range(2000):
        ledger.record(f"more-{number}", NOW_MS - number * 60_000, "reason", "x" * 300)


async def test_a_ledger_below_its_limit_loses_what_is_older_than_90_days_alone(full: Ledger) -> None:
    writer = LedgerWriter(full, limit_bytes=2**40)
    await writer.prune(NOW_MS)
    assert (count(full, "leases"), count(full, "story"), charged(full)) == (643, 6400, 640)
    await writer.prune(NOW_MS + 30 * DAY_MS)
    assert (count(full, "leases"), count(full, "story"), charged(full)) == (483, 4800, 640)
    await writer.prune(NOW_MS + 330 * DAY_MS)
    assert (count(full, "story"), charged(full)) == (0, 560)
    assert writer.over_limit == ""
    await writer.close()
