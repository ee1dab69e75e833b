"""Seats and usage outlive the broker."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import RecordError, SeatRecord, UsageRecord

_SEAT = SeatRecord(
    seat_id="s1",
    owner="ada",
    server="lab",
    group="students",
    pool="default",
    fraction_milli=250,
    memory_mib=20_480,
    priority=3,
    weight=200,
    max_kernels=4,
    uid=1000,
    device_id="GPU-1",
    token_sha256="cd" * 32,
    created_ms=1_750_000_000_000,
    expires_ms=1_750_000_060_000,
)
_USAGE = UsageRecord(owner="ada", pool="default", day=20_000, live_ms=600_000, busy_ms=60_000, busy_mib_ms=120_000_000)
_DAY_MS = 86_400_000


def test_a_seat_comes_back_as_it_was_saved(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.save_seat(_SEAT)
        ledger.save_seat(structs.replace(_SEAT, seat_id="s2", uid=None, device_id=None, expires_ms=None))
    with Ledger.open(path) as ledger:
        assert ledger.live_seats() == [
            _SEAT,
            structs.replace(_SEAT, seat_id="s2", uid=None, device_id=None, expires_ms=None),
        ]


def test_an_ended_seat_stays_ended_and_its_secret_is_gone(ledger: Ledger) -> None:
    ledger.save_seat(_SEAT)
    ledger.end_seat("s1", _SEAT.created_ms + 5000, "released")
    ledger.end_seat("s1", _SEAT.created_ms + 9000, "again")
    assert ledger.live_seats() == []
    document, reason = ledger._read("SELECT document, end_reason FROM seats")[0]
    assert (json.loads(document)["token_sha256"], reason) == ("", "released")
    assert ledger.seat_times_ms("default") == [5000]
    with pytest.raises(RecordError, match="seat s1 has already ended"):
        ledger.save_seat(_SEAT)


def test_usage_of_a_day_adds_up(ledger: Ledger) -> None:
    ledger.add_usage(_USAGE)
    ledger.add_usage(_USAGE)
    ledger.add_usage(replace(_USAGE, day=20_001))
    assert ledger.usage(20_000) == [
        replace(_USAGE, live_ms=1_200_000, busy_ms=120_000, busy_mib_ms=240_000_000),
        replace(_USAGE, day=20_001),
    ]
    assert ledger.usage(20_001) == [replace(_USAGE, day=20_001)]


def test_old_seats_and_usage_are_forgotten_and_living_seats_are_not(ledger: Ledger) -> None:
    ledger.save_seat(_SEAT)
    ledger.save_seat(structs.replace(_SEAT, seat_id="over"))
    ledger.end_seat("over", _SEAT.created_ms, "released")
    ledger.add_usage(_USAGE)
    ledger.prune(_SEAT.created_ms + 1, (_USAGE.day + 1) * _DAY_MS)
    assert ledger.live_seats() == [_SEAT]
    assert ledger.seat_times_ms("default") == []
    assert ledger.usage(0) == []
