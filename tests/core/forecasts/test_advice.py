"""Advice on shares: what would have sufficed, what it risks, and a warning if the record had been too short of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.forecasts.advice import (
    Advice,
    GivenAdvice,
    Peak,
    Verdict,
    advise,
    brief,
    is_short,
    predicted_peak_mib,
    sentence,
)
from fractional_gpu.core.forecasts.habits import HabitKey, HabitKind, Sample, Share, ShareDay, UseRecorder

pytestmark = pytest.mark.promise("advice")

OFFERS = [Share(milli, 80 * milli) for milli in (125, 250, 500, 750, 1000)]
WHOLE, EIGHTH = OFFERS[-1], OFFERS[0]
HOUR_MS = 3_600_000
KEY = HabitKey("p", "me", False, HabitKind.NOTEBOOK, "a.ipynb")


def day(number: int, peak_mib: int, share: Share = WHOLE, *, use_milli: int = 150) -> ShareDay:
    """Return a day of two hours, one of them in cells."""
    return ShareDay(
        day=number,
        share=share,
        peak_mib=peak_mib,
        held_ms=2 * HOUR_MS,
        busy_ms=HOUR_MS,
        gaps=4,
        use={use_milli // 50: HOUR_MS},
    )


def days(*peaks: int, share: Share = WHOLE, use_milli: int = 150) -> list[ShareDay]:
    return [day(number, peak, share, use_milli=use_milli) for number, peak in enumerate(peaks)]


def suggested(advice: Advice) -> tuple[Verdict, int]:
    return advice.verdict, advice.risk.share.milli


def test_a_little_used_gpu_gets_the_smallest_share_that_sufficed_every_day() -> None:
    advice = advise(days(*[15_000] * 10), WHOLE, OFFERS)
    assert suggested(advice) == (Verdict.SMALLER, 250)
    assert (advice.risk.short_days, advice.risk.days, advice.risk.short_milli) == (0, 10, 1000 // 12)
    assert advice.smaller is not None
    assert (advice.smaller.share.milli, advice.smaller.short_days) == (125, 10)
    assert "would have been short of memory on 10 of 10 days" in sentence(advice)
    assert brief(advice).endswith("would have been enough on 10 of 10 days")


def test_one_day_with_more_counts_as_much_as_all_others() -> None:
    assert suggested(advise(days(*[5000] * 9, 30_000), WHOLE, OFFERS)) == (Verdict.SMALLER, 500)


def test_a_peak_close_to_the_end_of_a_share_needs_the_next_one() -> None:
    assert suggested(advise(days(*[19_500] * 8), WHOLE, OFFERS)) == (Verdict.SMALLER, 500), "a twentieth is kept free"


def test_too_short_a_record_suggests_nothing() -> None:
    advice = advise(days(*[1000] * 6), WHOLE, OFFERS)
    assert suggested(advice) == (Verdict.UNKNOWN, 1000)
    assert not sentence(advice)
    assert advise([], WHOLE, OFFERS).verdict is Verdict.UNKNOWN


def test_what_cells_use_of_a_device_counts_beside_memory() -> None:
    advice = advise(days(*[1000] * 8, use_milli=700), WHOLE, OFFERS)
    assert advice.verdict is Verdict.SMALLER
    assert advice.risk.share.milli > 125
    assert advice.risk.slowed_milli <= 1200
    smaller = advice.smaller
    assert smaller is not None
    assert smaller.slowed_milli > 1200, "else it would have been suggested"


def test_with_mps_a_share_is_a_bound_of_what_cells_use() -> None:
    record = days(*[1000] * 8, share=OFFERS[1], use_milli=700)
    assert suggested(advise(record, OFFERS[1], OFFERS)) == (Verdict.KEEP, 250)
    advice = advise(record, OFFERS[1], OFFERS, bounded=True)
    assert suggested(advice) == (Verdict.LARGER, 750)
    assert advice.present.slowed_milli == 3000, "750 thousandths, the upper end of the bin, on 250"


def test_a_share_that_was_full_says_that_the_need_was_not_seen() -> None:
    advice = advise(days(*[10_000] * 5, share=EIGHTH), EIGHTH, OFFERS)
    assert suggested(advice) == (Verdict.LARGER, 750), "full on each day: of the need nothing is known but its least"
    assert (advice.present.short_days, advice.risk.short_days, advice.risk.unknown_days) == (5, 0, 5)
    assert advice.risk.short_milli == 6000 // 7
    assert "this one may also have been too small" in sentence(advice)


def test_one_full_day_is_followed_by_others() -> None:
    advice = advise(days(5000, 5000, 10_000, share=EIGHTH), EIGHTH, OFFERS)
    assert suggested(advice) == (Verdict.LARGER, 250)
    rare = advise(days(*[4000] * 20, 10_000, share=EIGHTH), EIGHTH, OFFERS)
    assert suggested(rare) == (Verdict.LARGER, 250), "the tail of the other days is short"


def test_peaks_that_grow_are_expected_to_go_on() -> None:
    growing = [14_000 + 400 * number for number in range(12)]
    advice = advise(days(*growing, share=OFFERS[1]), OFFERS[1], OFFERS)
    assert suggested(advice) == (Verdict.LARGER, 500)
    assert advice.growth_milli == 400 * 14 * 1000 // growing[-1]
    assert "growing" in sentence(advice)
    shuffled = [growing[number * 5 % 12] for number in range(12)]
    assert advise(days(*shuffled, share=OFFERS[1]), OFFERS[1], OFFERS).growth_milli == 0, "no trend"


def test_advice_that_was_taken_is_followed_up_and_not_repeated_where_it_was_wrong() -> None:
    before = days(*[9000] * 8)
    taken = GivenAdvice(day=8, before_milli=1000, milli=125)
    good = advise([*before, *(day(8 + one, 9000, EIGHTH) for one in range(4))], EIGHTH, OFFERS, given=taken)
    assert good.verdict is Verdict.KEEP
    assert good.follow_up is not None
    assert (good.follow_up.days, good.follow_up.full_days, good.follow_up.peak_mib) == (4, 0, 9000)
    assert (
        sentence(good) == "Since the suggested change from 1 to 1/8 GPU: at most 8.8 GiB used over 4 days, never full"
    )

    record = [*before, *(day(8 + one, 10_000, EIGHTH) for one in range(2))]
    bad = advise(record, EIGHTH, OFFERS, given=taken)
    assert suggested(bad) == (Verdict.LARGER, 250)
    assert "full on 2" in sentence(bad)
    back = advise([*record, *(day(10 + one, 9000) for one in range(8))], WHOLE, OFFERS)
    assert suggested(back) == (Verdict.SMALLER, 250), "an eighth was full on two days of the record"


@st.composite
def records(draw: st.DrawFn) -> list[ShareDay]:
    """Return an arbitrary record; no peak exceeds the share it was measured in."""
    found = []
    for number in range(draw(st.integers(0, 20))):
        share = draw(st.sampled_from(OFFERS))
        found.append(day(number, draw(st.integers(1, share.memory_mib)), share, use_milli=draw(st.integers(0, 1000))))
    return found


@given(records(), st.sampled_from(OFFERS), st.booleans())
def test_nothing_that_had_been_short_is_suggested_without_saying_so(
    record: list[ShareDay], present: Share, bounded: bool
) -> None:
    advice = advise(record, present, OFFERS, bounded=bounded)
    risk = advice.risk
    assert risk.short_days == len([one for one in record if is_short(risk.share, one)])
    if advice.verdict is Verdict.SMALLER:
        assert risk.share.milli < present.milli
        assert not risk.short_days
    elif advice.verdict is Verdict.LARGER:
        assert risk.share.milli > present.milli
        assert not risk.short_days or f"short of memory on {risk.short_days} of" in sentence(advice)
    else:
        assert risk.share == present


def test_the_recorder_counts_time_memory_use_and_gaps() -> None:
    recorder = UseRecorder()
    for at_s, busy, use in ((0, True, None), (30, True, 400), (60, False, None), (90, False, None)):
        recorder.observe(at_s * 1000, 5, "l", KEY, Sample(WHOLE, 3000 + at_s, busy, use))
    recorder.observe(120_000, 5, "l", KEY, None)
    recorder.observe(500_000, 5, "l", KEY, Sample(WHOLE, 9000, busy=True))
    recorder.observe(900_000, 5, "l", KEY, Sample(WHOLE, 100, busy=True))  # too long without a sample
    (one,) = recorder.days(KEY)
    assert (one.held_ms, one.busy_ms, one.gaps, one.peak_mib) == (120_000, 60_000, 1, 9000)
    assert one.use == {8: 60_000}, "where none was measured, what was measured last counts"
    assert [day for _, day in recorder.take_changed()] == [one]
    assert not recorder.take_changed()


def test_a_new_share_and_a_new_day_are_told_apart_and_old_days_are_dropped() -> None:
    recorder = UseRecorder()
    for number, share in ((1, WHOLE), (1, EIGHTH), (2, EIGHTH)):
        recorder.observe(number * 1000, number, "l", KEY, Sample(share, 100, busy=False))
    assert [(one.day, one.share) for one in recorder.days(KEY)] == [(1, EIGHTH), (1, WHOLE), (2, EIGHTH)]
    recorder.forget(2)
    assert [one.day for one in recorder.days(KEY)] == [2]
    recorder.forget(3)
    assert list(recorder.keys()) == []


def test_notebooks_without_end_share_one_record() -> None:
    recorder = UseRecorder()
    for number in range(300):
        key = recorder.key("p", "me", f"{number}.ipynb", seated=False)
        recorder.observe(0, 1, str(number), key, Sample(WHOLE, 100, busy=False))
    assert len(list(recorder.keys())) <= 201


# -- the largest peak of the days to come -------------------------------------------------------------------------------

PEAKS = st.lists(st.builds(Peak, st.integers(1, 10**6), st.booleans()), min_size=1, max_size=28)


@given(PEAKS, st.integers(1, 60))
def test_a_longer_time_needs_no_less(peaks: list[Peak], days: int) -> None:
    assert predicted_peak_mib(peaks, days) <= predicted_peak_mib(peaks, days + 1)


@given(PEAKS, st.data())
def test_a_day_that_was_cut_off_needs_no_less_than_one_that_was_not(peaks: list[Peak], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(peaks) - 1))
    seen, cut = list(peaks), list(peaks)
    seen[at], cut[at] = peaks[at]._replace(seen=True), peaks[at]._replace(seen=False)
    assert predicted_peak_mib(seen, 14) <= predicted_peak_mib(cut, 14)


@given(PEAKS, st.integers(0, 8))
def test_a_scale_of_sizes_moves_the_prediction_by_as_much(peaks: list[Peak], doublings: int) -> None:
    larger = [one._replace(mib=one.mib << doublings) for one in peaks]
    assert predicted_peak_mib(larger, 14) == pytest.approx(predicted_peak_mib(peaks, 14) * 2**doublings)


def test_steady_days_need_little_more_and_days_at_the_end_of_a_share_several_times_as_much() -> None:
    assert 8000 < predicted_peak_mib([Peak(8000, seen=True)] * 28, 14) < 10_000
    assert 32_000 < predicted_peak_mib([Peak(8000, seen=False)] * 28, 14) < 40_000
