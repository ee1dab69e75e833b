"""Pins and seats end on time even if the wall clock is set; only across a reboot does the wall clock count."""

from pathlib import Path

import pytest

from fractional_gpu.broker import clock as clock_module
from fractional_gpu.broker.clock import Clocks, DeadlineClock
from fractional_gpu.ledger.ledger import Ledger
from tests.broker.persistence.disk import Disk

pytestmark = pytest.mark.promise("wall-clock")

HOUR_MS = 3_600_000


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Disk.open(tmp_path / "ledger.sqlite")


def clock(ledger: Ledger, wall_ms: int, boot_ms: int) -> DeadlineClock:
    return DeadlineClock.of(ledger, Clocks(wall=lambda: wall_ms, boot=lambda: boot_ms))


@pytest.mark.parametrize("step_ms", [-HOUR_MS, HOUR_MS])
def test_the_next_broker_of_the_same_boot_has_the_same_clock_whatever_the_wall_clock_says(
    ledger: Ledger, step_ms: int
) -> None:
    with ledger:
        assert clock(ledger, wall_ms=100 * HOUR_MS, boot_ms=HOUR_MS).now_ms() == 100 * HOUR_MS
        assert clock(ledger, wall_ms=100 * HOUR_MS + step_ms, boot_ms=HOUR_MS + 5).now_ms() == 100 * HOUR_MS + 5


def test_after_a_reboot_it_is_measured_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    with ledger:
        clock(ledger, wall_ms=100 * HOUR_MS, boot_ms=HOUR_MS)
        monkeypatch.setattr(clock_module, "boot_id", lambda: "another")
        assert clock(ledger, wall_ms=101 * HOUR_MS, boot_ms=7).now_ms() == 101 * HOUR_MS


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"boot_id": 7}', "\x00"])
def test_what_makes_no_sense_is_measured_anew(ledger: Ledger, text: str) -> None:
    with ledger:
        ledger.keep("deadline-clock", text)
        assert clock(ledger, wall_ms=5, boot_ms=2).now_ms() == 5


def test_a_full_disk_does_not_keep_a_broker_from_starting(ledger: Ledger) -> None:
    with ledger:
        assert isinstance(ledger, Disk)
        ledger.full = True
        assert clock(ledger, wall_ms=5, boot_ms=2).now_ms() == 5
