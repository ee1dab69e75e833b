"""How findings are reported: sentences with their intervals, JSON that any reader takes, and a picture."""

import json
import xml.etree.ElementTree as ET

import pytest

from fractional_gpu.commands.measuring.measure import as_json, cost_text, figures, picture, sentences, slower
from fractional_gpu.commands.measuring.study import Finding, Setting
from fractional_gpu.stats import Estimate

pytestmark = pytest.mark.promise("measure")

ALONE = Finding(
    setting=Setting(1000, 1),
    rounds=6,
    slower=Estimate(1, 1, 1),
    cost=1.0,
    unit_s=0.05,
    median_s=0.05,
    p95_s=0.06,
    device_units_s=20,
    memory_mib=512,
    unit_gpu_s=0.05,
)
UNKNOWN = Finding(setting=Setting(125, 8), rounds=0, why_not="no room")


def found(fraction_milli: int, value: float, low: float, high: float) -> Finding:
    tenants = 1000 // fraction_milli
    return Finding(
        setting=Setting(fraction_milli, tenants),
        rounds=9,
        slower=Estimate(value, low, high),
        cost=value * fraction_milli / 1000,
        unit_s=0.05 * value,
        median_s=0.05 * value,
        p95_s=0.07 * value,
        device_units_s=tenants / (0.05 * value),
        unit_gpu_s=0.05 * value * fraction_milli / 1000,
    )


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (1.03, 1.01, 1.05, "3 % slower than alone (1 to 5 %)"),
        (0.998, 0.97, 1.02, "0 % slower than alone (-3 to 2 %)"),
        (0.9, 0.85, 0.95, "10 % faster than alone (5 to 15 %)"),
        (4.0, 3.9, 4.1, "300 % slower than alone (290 to 310 %)"),
    ],
)
def test_how_much_slower_is_said_with_its_interval(value: float, low: float, high: float, said: str) -> None:
    assert slower(found(250, value, low, high)) == said


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (0.34, "a third of the cost"),
        (0.2575, "a quarter of the cost"),
        (0.28, "28 % of the cost"),
        (1.02, "the same cost"),
        (1.6, "160 % of the cost"),
    ],
)
def test_costs_are_said_in_words_where_a_simple_part_is_close(part: float, said: str) -> None:
    assert cost_text(part) == said


def test_the_smallest_share_that_suffices_is_named_and_what_is_not_known_of_smaller_ones() -> None:
    findings = [ALONE, found(500, 1.0, 0.98, 1.02), found(250, 1.03, 1.01, 1.05), UNKNOWN]
    said = sentences(findings, 1.1)
    assert said[2] == "1/4 next to 3 others: 3 % slower than alone (1 to 5 %), a quarter of the cost"
    assert said[3] == "1/8 next to 7 others: unknown (no room)"
    assert said[4] == (
        "1/4 is enough (at most 10 % slower than alone), even on a full device. It is unknown whether 1/8 is enough."
    )


def test_the_json_has_every_setting_and_no_number_that_json_lacks() -> None:
    text = as_json([ALONE, found(250, 1.03, 1.01, 1.05), UNKNOWN], 1.1, {"pool": "default"})
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content["suffices_milli"] == 250
    assert [one["unit_s"] for one in content["settings"]] == [0.05, pytest.approx(0.0515), None]


def test_the_table_has_a_line_for_what_was_measured() -> None:
    assert len(figures([ALONE, found(250, 1.03, 1.01, 1.05), UNKNOWN])) == 3


def test_the_picture_is_well_formed_and_needs_something_measured_alone() -> None:
    ET.fromstring(  # noqa: S314 - our own picture
        picture([ALONE, found(500, 1.5, 1.4, 1.6), found(250, 3.0, 2.9, 3.1), UNKNOWN])
    )
    with pytest.raises(ValueError, match="alone"):
        picture([UNKNOWN])
