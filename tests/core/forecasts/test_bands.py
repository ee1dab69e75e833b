"""The bounds of forecasts: four of five outcomes lie between them whatever the data, and one miss widens them at once."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.forecasts.forecasts import Forecasts, Neighbours
from fractional_gpu.core.forecasts.outcomes import RESUME, Band, BoundCorrection
from fractional_gpu.core.model import Span

pytestmark = pytest.mark.promise("forecasts")


def span(expected: int, low: int, high: int) -> Span:
    return Span(expected_ms=expected, low_ms=low, high_ms=high)


SPANS = st.lists(st.integers(0, 10**7), min_size=3, max_size=3).map(
    lambda found: span(*(sorted(found)[i] for i in (1, 0, 2)))
)
CORRECTIONS = st.builds(BoundCorrection, st.floats(1 / 400, 1000), st.integers(0, 4))
BANDS = st.builds(Band, CORRECTIONS, CORRECTIONS)
OUTCOMES = st.integers(0, 10**9)


def played(outcomes: Sequence[int], spans: Sequence[Span], band: Band) -> tuple[int, int]:
    """Return how many outcomes fell below and above the bounds; the band learns from all of them."""
    below = above = 0
    for one, happened in zip(spans, outcomes, strict=True):
        stated = band.spread(one)
        below, above = below + (happened < stated.low_ms), above + (happened > stated.high_ms)
        band.learn(one, happened)
    return below, above


@given(SPANS, BANDS)
def test_stated_bounds_are_in_order_around_the_expected_value_and_never_negative(one: Span, band: Band) -> None:
    stated = band.spread(one)
    assert 0 <= stated.low_ms <= stated.expected_ms == one.expected_ms <= stated.high_ms


@given(SPANS, BANDS, OUTCOMES)
def test_a_miss_widens_its_side_and_no_other_outcome_widens_any(one: Span, band: Band, happened: int) -> None:
    stated, before = band.spread(one), deepcopy(band)
    band.learn(one, happened)
    for side, was, missed in (
        (band.low, before.low, happened < stated.low_ms),
        (band.high, before.high, happened > stated.high_ms),
    ):
        assert side.factor > was.factor if missed else side.factor <= was.factor
        assert not missed or side.factor / 1.0078**7 > was.factor, "seven other outcomes do not bring it back"


@given(st.lists(st.tuples(SPANS, OUTCOMES), max_size=60))
def test_no_sequence_has_more_misses_than_the_law_allows(steps: list[tuple[Span, int]]) -> None:
    band = Band()
    below, above = played([happened for _, happened in steps], [one for one, _ in steps], band)
    for misses, side in ((below, band.low), (above, band.high)):
        if side.factor < 1_000_000:  # no ratio exceeded the largest factor
            assert 8.97 * misses <= len(steps) + log(side.factor) / log(1.0078) + 1e-6


def steady(random: Random, _: int) -> float:
    return random.lognormvariate(0, 0.5)


def heavy(random: Random, _: int) -> float:
    return random.paretovariate(1.2)


def two_kinds(random: Random, _: int) -> float:
    return random.choice([0.1, 1, 1, 8]) * random.uniform(0.9, 1.1)


def suddenly_slower(random: Random, number: int) -> float:
    return steady(random, number) * (1 if number < 1500 else 12)


def back_and_forth(random: Random, number: int) -> float:
    return steady(random, number) * (1 if number // 200 % 2 else 5)


def drifting(random: Random, number: int) -> float:
    return steady(random, number) * 2 ** (number / 400)


@pytest.mark.parametrize(
    ("outcome", "most"),
    [
        (steady, 0.84),
        (heavy, 0.92),
        (two_kinds, 0.92),
        (suddenly_slower, 0.92),
        (back_and_forth, 0.9),
        (drifting, 0.92),
    ],
)
def test_four_of_five_lie_within_whatever_the_habit(outcome: Callable[[Random, int], float], most: float) -> None:
    random, count = Random(3), 3_000
    outcomes = [round(20_000 * outcome(random, number)) for number in range(count)]
    below, above = played(outcomes, [span(20_000, 20_000, 20_000)] * count, Band())
    assert 0.77 <= 1 - (below + above) / count <= most


def test_bounds_that_the_estimator_had_much_too_wide_come_in() -> None:
    random, one, band, count = Random(4), span(20_000, 100, 9_000_000), Band(), 2_000
    played([round(20_000 * random.lognormvariate(0, 0.2)) for _ in range(count)], [one] * count, band)
    stated = band.spread(one)
    assert 10_000 < stated.low_ms < stated.high_ms < 40_000


def test_a_shift_is_covered_again_after_a_few_misses() -> None:
    band, one, misses = Band(), span(1_000, 800, 1_300), 0
    while band.spread(one).high_ms < 20_000:
        band.learn(one, 20_000)
        misses += 1
    assert misses <= 6


def test_what_was_given_up_says_something_only_if_it_had_lasted_longer_than_the_bound() -> None:
    band, one = Band(), span(1_000, 800, 1_300)
    band.outlasted(one, 1_300)
    assert band.spread(one) == one
    band.outlasted(one, 1_301)
    assert band.spread(one).high_ms > 1_300
    assert band.spread(one).low_ms == 800


# -- in the forecasts -----------------------------------------------------------------------------------------------------


def test_a_device_that_is_misjudged_now_and_then_has_its_own_bounds() -> None:
    forecasts, random = Forecasts(), Random(8)
    for number in range(300):
        forecasts.swap_finished(RESUME, "wild", 4_000, round(1_000 * random.choice([1, 1, 1, 6])))
        forecasts.swap_finished(RESUME, "calm", 4_000, round(1_000 * random.uniform(0.98, 1.02)))
        assert number < 60 or forecasts.swap_span(RESUME, "calm", 4_000).high_ms < 1_400
    assert forecasts.swap_span(RESUME, "wild", 4_000).high_ms > 4_000
    (resume,) = [one for one in forecasts.errors() if one.what == RESUME]
    assert 770 <= resume.covered_permille <= 920


def test_the_rest_of_a_running_cell_is_judged_when_half_of_its_time_is_over() -> None:
    forecasts, random, now_ms = Forecasts(), Random(2), 0
    for _ in range(1_500):
        now_ms += 60_000
        forecasts.cell_began("a", now_ms, "H100")
        now_ms += round(90_000 * random.lognormvariate(0, 1))
        forecasts.cell_ended("a", now_ms)
    errors = {one.what: one for one in forecasts.errors()}
    assert errors["cell"].count == 1_500
    assert 0.5 * 1_500 < errors["rest"].count < 1_500, "those that ended before are not judged"
    for what in ("cell", "rest"):
        assert 740 <= errors[what].covered_permille <= 870, errors[what]


def beside(forecasts: Forecasts, lasted_ms: int, *, model_milli: int = 1_500) -> None:
    stated = forecasts.slowdown_span("H100", 1, model_milli)
    forecasts.learn_slowdown("a", Neighbours("H100", 1, model_milli, stated), lasted_ms, ended_alone=False)


def test_slowdowns_are_learnt_from_cells_with_and_without_neighbours() -> None:
    forecasts, random = Forecasts(), Random(6)
    alone = Neighbours("H100", 0, 1_000, None)
    by_model = forecasts.slowdown_span("H100", 1, 1_500)
    assert by_model == span(1_500, 1_236, 1_763), "nothing is known but the model"
    for _ in range(200):
        forecasts.learn_slowdown("a", alone, round(10_000 * random.uniform(0.9, 1.1)), ended_alone=True)
        beside(forecasts, round(20_000 * random.uniform(0.9, 1.1)))  # twice as long: the model leaves something out
    learnt = forecasts.slowdown_span("H100", 1, 1_500)
    assert learnt.expected_ms == pytest.approx(2_000, rel=0.07)
    assert 1_500 < learnt.low_ms < learnt.high_ms < 2_600
    assert forecasts.slowdown_span("another", 1, 1_500).expected_ms == 1_500, "another kind of device is another matter"
    (error,) = [one for one in forecasts.errors() if one.what == "slowdown"]
    assert error.count == 197, "the first four cells alone make it known"
    assert error.median_error_permille < 100
    assert 740 <= error.covered_permille <= 900


def test_cells_that_met_neighbours_or_of_leases_that_never_ran_alone_say_nothing_of_slowdowns() -> None:
    forecasts = Forecasts()
    for _ in range(20):
        beside(forecasts, 50_000)
        forecasts.learn_slowdown("a", Neighbours("H100", 0, 1_000, None), 90_000, ended_alone=False)
    assert forecasts.slowdown_span("H100", 1, 1_500) == span(1_500, 1_236, 1_763)
    assert not any(one.count for one in forecasts.errors() if one.what == "slowdown")


@given(st.integers(0, 10), st.integers(1_000, 100_000), st.lists(st.integers(0, 10**8), max_size=30))
def test_no_neighbour_makes_a_cell_faster(others: int, model_milli: int, cells: list[int]) -> None:
    forecasts = Forecasts()
    for lasted_ms in cells:
        forecasts.learn_slowdown("a", Neighbours("H", 0, 1_000, None), lasted_ms, ended_alone=True)
        beside(forecasts, lasted_ms // 3)
    found = forecasts.slowdown_span("H", others, model_milli)
    assert 1_000 <= found.low_ms <= found.expected_ms <= found.high_ms


def test_seats_are_judged_by_pool() -> None:
    forecasts, worked_out = Forecasts(), span(600_000, 300_000, 900_000)
    before = forecasts.seat_span("a", worked_out)
    forecasts.seat_given("a", worked_out, before, 5_000_000)
    assert forecasts.seat_span("a", worked_out).high_ms > before.high_ms
    assert forecasts.seat_span("b", worked_out) == before == worked_out


def test_where_state_is_at_stake_bounds_are_never_narrower_than_estimated() -> None:
    forecasts = Forecasts()
    for _ in range(400):
        forecasts.swap_finished(RESUME, "calm", 4_000, 1_000)
    stated, widest = forecasts.swap_span(RESUME, "calm", 4_000), forecasts.widest_swap_span(RESUME, "calm", 4_000)
    assert widest.low_ms <= stated.low_ms <= stated.high_ms < widest.high_ms
