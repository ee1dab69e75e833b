"""The picture of curves: round ticks, all points in their places, labels that do not cover one another, light and dark."""

import xml.etree.ElementTree as ET

import pytest

from fractional_gpu.curves import Panel, Series, curves
from fractional_gpu.svg import ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 50, 100]),
        (0, 8, [0, 2, 4, 6, 8]),
        (103, 377, [100, 200, 300, 400]),
        (0, 0.9, [0, 0.5, 1]),
        (72.31, 72.64, [72.3, 72.4, 72.5, 72.6, 72.7]),
        (5, 5, [4, 6]),
        (0, 0, [0, 1]),
    ],
)
def test_ticks_are_round_and_cover_the_figures(low: float, high: float, expected: list[float]) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert high <= found[-1]
    if low != high:
        assert found == pytest.approx(expected)


def drawn() -> tuple[ET.Element, list[tuple[str, float, float]]]:
    points = [(f"rule {number}", 100.0 + number, 50.0 - number * number) for number in range(7)]
    panel = Panel("first <one>", (Series("fixed", points), Series("auto", [("auto", 103.0, 20.0)])))
    return ET.fromstring(curves([[panel, panel], [panel]], across="held", up="wait")), points  # noqa: S314 - our own


def test_every_point_has_a_dot_where_it_belongs() -> None:
    picture, points = drawn()
    panels = picture.findall(f"{SVG}g")
    assert len(panels) == 3
    dots = panels[0].findall(f"{SVG}circle")
    assert len(dots) == len(points) + 1
    places = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in dots[:-1]]
    assert places == sorted(places)  # further right is lower: more held, shorter waits
    for (_, x, y), (_, other_x, other_y), place, other in zip(points, points[1:], places, places[1:], strict=False):
        assert (other[0] - place[0]) / (other_x - x) == pytest.approx((places[1][0] - places[0][0]), abs=0.2)
        assert (other[1] - place[1]) / (y - other_y) == pytest.approx((places[1][1] - places[0][1]), abs=0.2)


def test_labels_do_not_cover_one_another() -> None:
    crowd = [(f"point {number}", 1.0 + number / 1000, 1.0) for number in range(30)]
    panel = Panel("crowded", (Series("fixed", crowd), Series("auto", [("auto", 1.01, 1.0)])))
    (group,) = ET.fromstring(curves([[panel]], across="held", up="wait")).findall(f"{SVG}g")  # noqa: S314 - our own
    labels = [text for text in group.findall(f"{SVG}text") if text.get("class") in {"a", "b"}]
    assert 1 < len(labels) < len(crowd)
    assert "auto" in [text.text for text in labels]  # the last series has its labels first
    boxes = [(float(text.get("x", "")), float(text.get("y", "")), 5.0 * len(text.text or "")) for text in labels]
    for number, (x, y, wide) in enumerate(boxes):
        for other_x, other_y, other_wide in boxes[:number]:
            assert x >= other_x + other_wide or other_x >= x + wide or abs(y - other_y) >= 10


def test_titles_are_escaped_and_colours_follow_the_page() -> None:
    picture, _ = drawn()
    assert [text.text for text in picture.iter(f"{SVG}text")].count("first <one>") == 3
    style = picture.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme:dark" in style
    assert "across: held; up: wait" in "".join(text.text or "" for text in picture.findall(f"{SVG}text"))
