"""Pins, devices that are being emptied, what a lease was over time and what was learnt outlive the broker."""

from pathlib import Path

from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.protocol.status import UsagePoint


def point(at_ms: int) -> UsagePoint:
    return UsagePoint(at_ms=at_ms, state="resident", used_mib=at_ms * 10, saved_mib=1)


def test_points_come_back_in_order_and_no_more_than_asked_for(ledger: Ledger) -> None:
    for at_ms in range(5):
        ledger.add_point("a", point(at_ms))
        ledger.add_point("other", point(at_ms))
    assert ledger.points("a") == [point(at_ms) for at_ms in range(5)]
    assert ledger.points("a", 2) == [point(3), point(4)]
    assert ledger.points("nobody") == []
    ledger.prune(3)
    assert ledger.points("a") == [point(3), point(4)]


def test_a_device_that_is_being_emptied_is_so_after_a_restart(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.set_drained("GPU-2", evict_busy=False)
        ledger.set_drained("GPU-1", evict_busy=False)
        ledger.set_drained("GPU-1", evict_busy=True)
    with Ledger.open(path) as ledger:
        assert ledger.drained() == {"GPU-1": True, "GPU-2": False}
        ledger.set_undrained("GPU-2")
        ledger.set_undrained("GPU-7")
        assert ledger.drained() == {"GPU-1": True}
        ledger.set_drained("GPU-3", evict_busy=False, deadline_ms=7_000)
        assert ledger.drain_deadlines() == {"GPU-3": 7_000}
        ledger.set_drained("GPU-3", evict_busy=False)
        assert ledger.drain_deadlines() == {}, "a drain without a deadline replaces one with it"
        ledger.set_undrained("GPU-3")


def test_what_was_learnt_is_kept_by_name(path: Path) -> None:
    with Ledger.open(path) as ledger:
        assert ledger.kept("forecasts") is None
        ledger.keep("forecasts", "[1]")
        ledger.keep("forecasts", "[2]")
    with Ledger.open(path) as ledger:
        assert ledger.kept("forecasts") == "[2]"
