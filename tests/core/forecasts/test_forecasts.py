"""What the arbiter learns: forecasts compared with data made by known rules."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.forecasts.forecasts import Forecasts, WaitSpan, rest_ms
from fractional_gpu.core.forecasts.outcomes import RESUME, SUSPEND, ForecastError, quantile

MINUTE = 60_000


def error(forecasts: Forecasts, what: str) -> ForecastError:
    return next(view for view in forecasts.errors() if view.what == what)


def run_cells(forecasts: Forecasts, lease_id: str, cells: list[tuple[int, int]], at_ms: int = 0) -> int:
    """Run cells, each given as (gap before it, duration), and return when the last one ended."""
    for gap_ms, duration_ms in cells:
        forecasts.cell_began(lease_id, at_ms + gap_ms)
        at_ms += gap_ms + duration_ms
        forecasts.cell_ended(lease_id, at_ms)
    return at_ms


# -- quantiles ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_has_its_part_of_the_outcomes_below(outcomes: list[int], part: float) -> None:
    value = quantile(sorted(outcomes), part)
    assert min(outcomes) <= value <= max(outcomes)
    assert sum(one < value - 1e-3 for one in outcomes) <= part * len(outcomes) + 1
    assert sum(one > value + 1e-3 for one in outcomes) <= (1 - part) * len(outcomes) + 1


# -- swaps --------------------------------------------------------------------------------------------------------------


def test_before_anything_was_seen_swaps_take_what_was_published() -> None:
    forecasts = Forecasts()
    assert forecasts.swap_ms(SUSPEND, "A100", 0) == 300
    assert forecasts.swap_ms(SUSPEND, "A100", 18_000) == pytest.approx(300 + 10_000, abs=1)
    assert forecasts.swap_ms(RESUME, "A100", 16_000) == pytest.approx(300 + 4_000, abs=1)


@pytest.mark.parametrize(("fixed_ms", "mib_per_s"), [(100, 9_000), (2_000, 400), (0, 1_800), (900, 50_000)])
def test_a_device_is_known_after_a_dozen_swaps(fixed_ms: int, mib_per_s: int) -> None:
    forecasts, random = Forecasts(), Random(5)
    for swap in range(40):
        mib = random.choice([0, 300, 2_000, 9_000, 40_000])
        took = (fixed_ms + mib * 1000 / mib_per_s) * random.uniform(0.9, 1.1)
        forecasts.swap_finished(SUSPEND, "new", mib, round(took))
        if swap >= 12:
            assert forecasts.swap_ms(SUSPEND, "new", 9_000) == pytest.approx(
                fixed_ms + 9e6 / mib_per_s, rel=0.5, abs=60
            )
    for mib in (0, 1_000, 20_000):
        expected = fixed_ms + mib * 1000 / mib_per_s
        assert forecasts.swap_ms(SUSPEND, "new", mib) == pytest.approx(expected, rel=0.15, abs=60)
    assert forecasts.swap_ms(SUSPEND, "other", 18_000) == pytest.approx(10_300, abs=1)
    assert forecasts.swap_ms(RESUME, "new", 16_000) == pytest.approx(4_300, abs=1)


def test_one_hiccup_does_not_spoil_what_is_known_and_a_new_truth_is_believed() -> None:
    forecasts = Forecasts()
    for _ in range(20):
        forecasts.swap_finished(RESUME, "d", 4_000, 1_000)
    before = forecasts.swap_ms(RESUME, "d", 4_000)
    forecasts.swap_finished(RESUME, "d", 4_000, 90_000)
    assert forecasts.swap_ms(RESUME, "d", 4_000) < before * 1.1
    for _ in range(10):
        forecasts.swap_finished(RESUME, "d", 4_000, 5_000)
    assert forecasts.swap_ms(RESUME, "d", 4_000) == pytest.approx(5_000, rel=0.25)


@pytest.mark.parametrize("mib", [0, 4_000])
def test_swaps_of_one_size_only_teach_that_size(mib: int) -> None:
    forecasts = Forecasts()
    for _ in range(2_000):
        forecasts.swap_finished(SUSPEND, "d", mib, 700)
    assert forecasts.swap_ms(SUSPEND, "d", mib) == pytest.approx(700, rel=0.05)
    assert 0 <= forecasts.swap_ms(SUSPEND, "d", 0) <= forecasts.swap_ms(SUSPEND, "d", 100_000)


def test_four_of_five_swaps_lie_between_the_bounds() -> None:
    forecasts, random = Forecasts(), Random(3)
    inside = 0
    for swap in range(600):
        mib = random.randrange(200, 30_000)
        took = round((300 + mib / 2) * random.lognormvariate(0, 0.3))
        if swap >= 200:
            span = forecasts.swap_span(SUSPEND, "d", mib)
            inside += span.low_ms <= took <= span.high_ms
        forecasts.swap_finished(SUSPEND, "d", mib, took)
    assert 0.7 <= inside / 400 <= 0.9
    assert error(forecasts, SUSPEND).median_error_permille < 350
    assert error(forecasts, RESUME).count == 0


# -- cells and gaps -----------------------------------------------------------------------------------------------------


def test_an_unknown_kernel_is_as_published_traces_are() -> None:
    assert Forecasts().next_cell_ms("new") == pytest.approx(2 * MINUTE, rel=0.1)
    assert Forecasts().gap_left_ms("new", 0) == pytest.approx(3 * MINUTE, rel=0.1)


def test_a_kernels_own_ways_are_learnt_and_others_are_not_taken_for_it() -> None:
    forecasts, random = Forecasts(), Random(2)
    quick = [(round(random.uniform(3_000, 6_000)), round(random.uniform(500, 900))) for _ in range(40)]
    slow = [(round(random.uniform(25, 40) * MINUTE), round(random.uniform(8, 12) * MINUTE)) for _ in range(40)]
    ends = {"quick": run_cells(forecasts, "quick", quick), "slow": run_cells(forecasts, "slow", slow)}
    assert forecasts.gap_left_ms("quick", ends["quick"]) < 10_000
    assert forecasts.gap_left_ms("slow", ends["slow"]) > 15 * MINUTE
    assert forecasts.next_cell_ms("quick") < 2_000
    assert 5 * MINUTE < forecasts.next_cell_ms("slow") < 15 * MINUTE


def test_ways_may_change() -> None:
    forecasts = Forecasts()
    end = run_cells(forecasts, "a", [(2_000, 1_000)] * 60)
    assert forecasts.gap_left_ms("a", end) < 3_000
    end = run_cells(forecasts, "a", [(20 * MINUTE, 1_000)] * 40, end)
    assert forecasts.gap_left_ms("a", end) > 10 * MINUTE


def test_the_longer_a_gap_has_lasted_the_longer_its_rest() -> None:
    forecasts = Forecasts()
    end = run_cells(forecasts, "a", [(60_000, 1_000)] * 2)
    rests = [forecasts.gap_left_ms("a", end + minutes * MINUTE) for minutes in (0, 5, 30)]
    assert rests == sorted(rests)
    assert rests[-1] > 10 * rests[0]


def test_no_gap_is_left_while_a_cell_runs_and_no_cell_while_none_does() -> None:
    forecasts = Forecasts()
    forecasts.cell_began("a", 1_000)
    assert forecasts.gap_left_ms("a", 2_000) == 0
    assert forecasts.cell_left_ms("a", 2_000) > 0
    forecasts.cell_ended("a", 3_000)
    assert forecasts.gap_left_ms("a", 4_000) > 0
    assert forecasts.cell_left_ms("a", 4_000) == 0


def test_a_wait_is_no_part_of_a_cell() -> None:
    forecasts = Forecasts()
    at_ms = 0
    for _ in range(40):
        forecasts.cell_began("a", at_ms)  # asks
        forecasts.cell_began("a", at_ms + 30 * MINUTE)  # is let in
        at_ms += 30 * MINUTE + 4_000
        forecasts.cell_ended("a", at_ms)
        at_ms += 60_000
    assert forecasts.next_cell_ms("a") < 6_000
    assert forecasts.gap_left_ms("a", at_ms - 60_000) == pytest.approx(60_000, rel=0.2)


@pytest.mark.parametrize("waited_s", [0, 20, 120, 600])
def test_half_of_the_cells_end_before_what_is_said_to_be_left(waited_s: int) -> None:
    forecasts, random = Forecasts(), Random(9)
    at_ms = below = asked = 0
    for number in range(4_000):
        duration = round(1000 * random.lognormvariate(4, 1.3))
        forecasts.cell_began("a", at_ms)
        if number > 100 and duration > 1000 * waited_s:
            below += duration - 1000 * waited_s < forecasts.cell_left_ms("a", at_ms + 1000 * waited_s)
            asked += 1
        at_ms += duration
        forecasts.cell_ended("a", at_ms)
        at_ms += 1_000
    assert asked > 100
    assert 0.4 <= below / asked <= 0.6
    assert 700 <= error(forecasts, "cell").covered_permille <= 900


def test_half_of_the_gaps_end_before_what_is_said_to_be_left() -> None:
    forecasts, random = Forecasts(), Random(4)
    at_ms = below = asked = 0
    for number in range(1_200):
        forecasts.cell_began("a", at_ms)
        forecasts.cell_ended("a", at_ms + 500)
        gap, elapsed = round(1000 * random.lognormvariate(5, 1.5)), random.choice([0, 30_000, 200_000])
        if number > 100 and gap > elapsed:
            below += gap - elapsed < forecasts.gap_left_ms("a", at_ms + 500 + elapsed)
            asked += 1
        at_ms += 500 + gap
    assert 0.42 <= below / asked <= 0.58


def test_kernels_that_never_run_again_make_long_gaps_likelier_to_last() -> None:
    steady, leaving = Forecasts(), Forecasts()
    for forecasts, forget in ((steady, False), (leaving, True)):
        for number in range(400):
            end = run_cells(forecasts, f"k{number}", [(60_000, 1_000)] * 3)
            if forget:
                forecasts.forget(f"k{number}")
        forecasts.cell_began("a", end)
        forecasts.cell_ended("a", end)
    long_ms = end + 20 * MINUTE
    assert leaving.gap_left_ms("a", long_ms) > 10 * steady.gap_left_ms("a", long_ms)


def test_what_lasted_longer_than_anything_known_is_expected_to_last_as_long_again() -> None:
    assert rest_ms([10], 50_000, 0.5) == 50_000
    assert rest_ms([10], 50_000, 0.1) == 5_555


# -- waits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bias", "spread"), [(1.0, 0.1), (3.0, 0.5), (0.2, 0.8)])
def test_waits_are_corrected_by_how_earlier_ones_turned_out(bias: float, spread: float) -> None:
    forecasts, random = Forecasts(), Random(6)
    inside = 0
    for number in range(600):
        basis = random.randrange(2_000, 8_000)
        span = forecasts.wait_span("busy", basis)
        waited = round(basis * bias * random.lognormvariate(0, spread))
        if number >= 200:
            inside += span.low_ms <= waited <= span.high_ms
        forecasts.wait_ended(span, waited)
    assert 0.7 <= inside / 400 <= 0.92
    assert forecasts.wait_span("busy", 4_000).expected_ms == pytest.approx(4_000 * bias, rel=0.25)
    assert forecasts.wait_span("busy", 1_000_000).expected_ms == pytest.approx(1_000_000, rel=0.1)
    assert error(forecasts, "wait").count == 600
    assert error(forecasts, "wait").median_error_permille < 1000 * spread


def test_the_error_is_that_of_the_last_forecasts() -> None:
    forecasts = Forecasts()
    span = WaitSpan(expected_ms=1_000, low_ms=500, high_ms=2_000, kind="busy", basis_ms=1_000)
    for _ in range(600):
        forecasts.wait_ended(span, 4_000)
    assert error(forecasts, "wait") == ForecastError(
        what="wait", count=600, median_error_permille=750, covered_permille=0
    )
    for _ in range(600):
        forecasts.wait_ended(span, 2_000)
    assert error(forecasts, "wait") == ForecastError(
        what="wait", count=1200, median_error_permille=500, covered_permille=1000
    )


# -- keeping and forgetting ---------------------------------------------------------------------------------------------


def taught(seed: int) -> Forecasts:
    forecasts, random = Forecasts(), Random(seed)
    for number in range(30):
        forecasts.swap_finished(SUSPEND, "d 80", 1_000 * number, 100 + 300 * number)
        forecasts.wait_ended(forecasts.wait_span("swap", 700 * number), 1_000 * number)
        forecasts.hold_seen(f"p{number % 2}", 10 * number, 10**9 * number)
        run_cells(forecasts, f"k{number % 3}", [(random.randrange(10**6), random.randrange(10**5))], number * 10**7)
    return forecasts


def answers(forecasts: Forecasts) -> list[object]:
    return [
        forecasts.swap_span(SUSPEND, "d 80", 3_000),
        [forecasts.wait_span("swap", length) for length in (0, 500, 5_000, 50_000)],
        [forecasts.hold_cost(pool, 1_000, 40_000_000) for pool in ("p0", "p1", "other")],
        forecasts.errors(),
    ]


def test_equal_calls_give_equal_answers() -> None:
    assert answers(taught(1)) == answers(taught(1))
    assert answers(taught(1)) != answers(taught(2))


def test_forgotten_leases_leave_nothing_but_what_all_have_in_common() -> None:
    forecasts = Forecasts()
    for number in range(50):
        run_cells(forecasts, f"k{number}", [(1_000, 1_000)] * 5)
        forecasts.forget(f"k{number}")
        forecasts.forget(f"k{number}")
    assert forecasts.gaps.own == forecasts.cells.own == {}
    assert forecasts.next_cell_ms("fresh") < 5_000
    for number in range(500):
        forecasts.swap_finished(SUSPEND, f"d{number}", 1, 1)
    assert len(forecasts.swaps) <= 256


def test_late_and_doubled_reports_do_no_harm() -> None:
    forecasts = Forecasts()
    forecasts.cell_ended("a", 5_000)
    forecasts.cell_began("a", 9_000)
    forecasts.cell_ended("a", 8_000)
    forecasts.cell_ended("a", 8_500)
    forecasts.swap_finished(SUSPEND, "d", -3, -10)
    assert forecasts.gap_left_ms("a", 0) > 0
    assert forecasts.swap_ms(SUSPEND, "d", 0) >= 0
