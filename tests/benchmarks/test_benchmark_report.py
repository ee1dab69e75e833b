"""The benchmarks' table shows what was compared with what, and says when a goal is missed."""

import json
import math
from dataclasses import replace

from tests.benchmarks.report import Row, as_json, as_table
from tests.benchmarks.stats import Estimate

START = Row(
    measured="kernel start",
    compared_with="plain ipykernel",
    unit="s",
    ours=0.21,
    theirs=0.2,
    compared=Estimate(1.05, 1.01, 1.09),
    quotient=True,
    samples=40,
    goal=1.05,
)


def cells_of(row: Row) -> list[str]:
    return [cell.strip() for cell in as_table([row]).splitlines()[2].strip("|").split("|")]


def test_a_row_names_both_sides_the_interval_and_the_goal() -> None:
    assert cells_of(START) == [
        "kernel start",
        "0.210 s",
        "0.200 s (plain ipykernel)",
        "1.050 x (n = 40)",
        "1.010 x to 1.090 x",
        "at most 1.050 x",
    ]


def test_a_missed_goal_cannot_be_overlooked() -> None:
    missed = replace(START, compared=Estimate(1.051, 1.01, 1.09))
    assert cells_of(missed)[-1] == "**missed**: at most 1.050 x"
    assert as_json([missed])[0]["met"] is False


def test_a_difference_has_its_sign_and_unit() -> None:
    row = replace(START, unit="us", quotient=False, compared=Estimate(-12.0, -20.0, 3.0), goal=None)
    assert cells_of(row)[3:] == ["-12 µs (n = 40)", "-20 µs to +3 µs", ""]


def test_moved_bytes_are_shown_as_a_speed_on_both_sides() -> None:
    assert cells_of(replace(START, mib=420))[1:3] == ["0.210 s, 2,000 MiB/s", "0.200 s, 2,100 MiB/s (plain ipykernel)"]


def test_an_interval_of_too_few_samples_is_unknown_and_valid_json() -> None:
    row = replace(START, compared=Estimate(1.0, -math.inf, math.inf))
    assert cells_of(row)[4] == "unknown to unknown"
    assert json.loads(json.dumps(as_json([row]), allow_nan=False))[0]["compared"] == {
        "value": 1.0,
        "low": None,
        "high": None,
    }
