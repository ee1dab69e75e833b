"""A waiting cell says why, its place, how long it may take, and what comes next."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.protocol.messages import Progress
from fractional_gpu_kernel.display.wait_line import WaitLine, resizing, rough
from tests.kernelext.statuses import LEASE


def told(**fields: object) -> tuple[WaitLine, float]:
    line = WaitLine(time.monotonic())
    line.tell(Progress(kind="waiting", **fields))  # type: ignore[arg-type]
    return line, time.monotonic()


def test_it_says_nothing_before_the_broker_has() -> None:
    assert WaitLine(0.0).text(100.0) == ""


def test_place_forecast_reason_and_what_comes_next_are_said() -> None:
    line, now_s = told(
        position=2,
        expected_ms=40_000,
        low_ms=10_000,
        high_ms=120_000,
        reason="wait.busy-neighbour",
        sentence="20 GiB are needed, 4 GiB are free; 1 kernel is running a cell",
    )
    assert line.text(now_s) == (
        "This cell waits for the GPU (place 2 in the queue; about 40 s more, likely 10 s to 2 min): "
        "20 GiB are needed, 4 GiB are free; 1 kernel is running a cell. "
        "When that is over, its memory is saved to the host and this kernel gets the room. Interrupt the kernel to stop waiting."
    )


def test_a_forecast_counts_down_and_admits_that_it_was_wrong() -> None:
    line, now_s = told(expected_ms=40_000, low_ms=10_000, high_ms=60_000)
    assert "(about 20 s more, likely under 1 s to 40 s)" in line.text(now_s + 20)
    assert "(longer than expected, likely up to 10 s more)" in line.text(now_s + 50)
    assert "(longer than expected)" in line.text(now_s + 70)


def test_without_a_forecast_it_says_how_long_it_has_waited() -> None:
    line, now_s = told(sentence="the GPU is in use")
    assert (
        line.text(now_s + 5) == "This cell waits for the GPU: the GPU is in use. Interrupt the kernel to stop waiting."
    )
    assert "(30 s so far)" in line.text(now_s + 31)


def test_a_narrow_span_is_not_said_twice() -> None:
    line, now_s = told(expected_ms=40_000, low_ms=40_000, high_ms=40_100)
    assert "(about 40 s more)" in line.text(now_s)


def test_a_larger_share_that_is_waited_for_says_so() -> None:
    waits = resizing(LEASE)
    assert waits.startswith("This kernel waits for its new share. Idle neighbours step aside.")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "under 1 s"),
        (999, "under 1 s"),
        (4_400, "4 s"),
        (43_000, "45 s"),
        (58_000, "1 min"),
        (150_000, "2 min"),
        (3_600_000, "1 h"),
        (4_400_000, "1 h 10 min"),
    ],
)
def test_durations_are_said_as_people_do(ms: int, text: str) -> None:
    assert rough(ms) == text


@given(st.integers(0, 10**9))
def test_a_countdown_changes_its_words_rarely(ms: int) -> None:
    words = {rough(left) for left in range(ms, max(0, ms - 20_000), -500)}
    assert len(words) <= 13
