"""A waiting cell says why, its place, how long it may take, and what comes next."""

import re

from fractional_gpu.protocol.messages import Progress
from fractional_gpu_kernel.display.lines import WAIT_TYPE, Sentence, resizing, wait_bundle, wait_text
from tests.kernelext.statuses import LEASE


def text(seconds: float = 0, **fields: object) -> str:
    return wait_text(Progress(kind="waiting", **fields), waited_s=seconds, age_s=seconds)  # type: ignore[arg-type]


def test_place_forecast_reason_and_what_comes_next_are_said() -> None:
    line = text(
        position=2,
        expected_ms=40_000,
        low_ms=10_000,
        high_ms=120_000,
        reason="wait.busy-neighbour",
        sentence="20 GiB is needed, 4 GiB is free; 1 kernel is running a cell",
    )
    shown = [
        "place 2",
        "40 s",
        "10 s to 2 min",
        "20 GiB is needed, 4 GiB is free",
        "saved to host memory",
        "Interrupt",
    ]
    assert re.findall("|".join(shown), line) == shown


def test_a_forecast_counts_down_and_admits_that_it_was_wrong() -> None:
    forecast = {"expected_ms": 40_000, "low_ms": 10_000, "high_ms": 60_000}
    assert "about 20 s more (up to 40)" in text(20, **forecast)
    assert re.findall(r"longer|\d+ s", text(50, **forecast)) == ["longer", "10 s"]
    assert re.findall(r"longer|\d+ s", text(70, **forecast)) == ["longer"]


def test_without_a_forecast_it_says_how_long_it_has_waited() -> None:
    assert re.findall(r"\d+ s", text(5, sentence="in use")) == []
    assert re.findall(r"\d+ s", text(31, sentence="in use")) == ["30 s"]


def test_a_narrow_span_is_not_said_twice() -> None:
    assert text(expected_ms=40_000, low_ms=40_000, high_ms=40_100).count("40 s") == 1


def test_a_larger_share_that_is_waited_for_says_so() -> None:
    assert "share" in resizing(LEASE)


def test_programs_get_the_same_as_numbers_and_codes() -> None:
    progress = Progress(
        kind="waiting", position=2, expected_ms=40_000, low_ms=10_000, high_ms=60_000, reason="wait.busy-neighbour",
        sentence="20 GiB is needed", blockers=("a",),
    )  # fmt: skip
    (data,) = wait_bundle(progress, waited_s=25, age_s=20).values()
    assert data == {
        "version": 1, "position": 2, "expected_ms": 20_000, "low_ms": 0, "high_ms": 40_000, "waited_ms": 25_000,
        "reason": "wait.busy-neighbour", "sentence": "20 GiB is needed", "blockers": ["a"],
    }  # fmt: skip
    (data,) = wait_bundle(Progress(kind="waiting"), waited_s=0, age_s=0).values()
    assert (data["position"], data["expected_ms"], data["blockers"]) == (None, None, [])


def test_the_wait_line_carries_both_forms_in_one_display() -> None:
    view = Sentence("it waits", {WAIT_TYPE: {"version": 1}})
    assert view.bundle().keys() == {"text/plain", "text/html", WAIT_TYPE}
