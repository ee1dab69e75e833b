"""The prediction of the largest peak to come: logarithms in integers, and what more, larger and cut-off days change."""

from math import log2

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.forecasts.peaks import Peak, log2_milli, predicted_log2

WIDE = st.integers(1, 10**9)
PEAKS = st.lists(st.builds(Peak, st.integers(1, 10**6), st.booleans()), min_size=1, max_size=28)


@given(WIDE, WIDE)
def test_the_logarithm_of_a_ratio_is_right_to_two_thousandths(numerator: int, denominator: int) -> None:
    exact = 1000 * log2(numerator / denominator)
    assert exact - 2 < log2_milli(numerator, denominator) <= exact + 1e-6


@given(PEAKS, st.integers(1, 60))
def test_a_longer_time_needs_no_less(peaks: list[Peak], days: int) -> None:
    assert predicted_log2(peaks, days) <= predicted_log2(peaks, days + 1)


@given(PEAKS, st.data())
def test_a_day_that_was_cut_off_needs_no_less_than_one_that_was_not(peaks: list[Peak], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(peaks) - 1))
    seen, cut = list(peaks), list(peaks)
    seen[at], cut[at] = peaks[at]._replace(cut_off=False), peaks[at]._replace(cut_off=True)
    assert predicted_log2(seen, 14) <= predicted_log2(cut, 14)


@given(PEAKS, st.integers(0, 8))
def test_a_scale_of_sizes_moves_the_prediction_by_as_much(peaks: list[Peak], doublings: int) -> None:
    larger = [one._replace(mib=one.mib << doublings) for one in peaks]
    assert predicted_log2(larger, 14) == predicted_log2(peaks, 14) + 1000 * doublings


def test_steady_days_need_little_more_and_days_at_the_end_of_a_share_several_times_as_much() -> None:
    steady = 2 ** (predicted_log2([Peak(8000, cut_off=False)] * 28, 14) / 1000)
    assert 8000 < steady < 10_000
    cut = 2 ** (predicted_log2([Peak(8000, cut_off=True)] * 28, 14) / 1000)
    assert 32_000 < cut < 40_000
    assert predicted_log2([], 14) == 0
