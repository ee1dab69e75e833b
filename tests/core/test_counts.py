"""Counts of shares for an engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.nodes import count_of, count_without_broker, rounded_memory_mib, rounded_wait_ms

pytestmark = pytest.mark.promise("slurm")

SHARES = st.integers(0, 100_000)


@given(SHARES, SHARES, SHARES)
def test_the_count_covers_what_is_in_use_and_gives_no_more_than_what_is_admissible(
    seated: int, admissible: int, in_use: int
) -> None:
    count = count_of(seated_milli=seated, admissible_milli=admissible, in_use_milli=in_use)
    assert count >= in_use
    assert count - in_use <= admissible


@given(SHARES, SHARES, SHARES)
def test_a_seat_that_is_registered_changes_no_count(seated: int, share: int, others: int) -> None:
    """The engine's books count a job's share before its seat registers: the count is the same before and after."""
    before = {"seated_milli": seated, "admissible_milli": others + share, "in_use_milli": seated + share}
    after = {"seated_milli": seated + share, "admissible_milli": others, "in_use_milli": seated + share}
    assert count_of(**before) == count_of(**after)


@given(SHARES, SHARES)
def test_books_that_forgot_what_is_in_use_admit_no_more(seated: int, admissible: int) -> None:
    """After `scontrol reconfigure`, Slurm's books may show less than jobs hold."""
    right = {"seated_milli": seated, "admissible_milli": admissible, "in_use_milli": seated}
    wrong = {"seated_milli": seated, "admissible_milli": admissible, "in_use_milli": seated // 2}
    assert count_of(**right) - seated == count_of(**wrong) - seated // 2 == admissible


@given(SHARES, SHARES, SHARES, SHARES)
def test_a_count_is_never_below_the_largest_share_on_offer(
    seated: int, admissible: int, in_use: int, least: int
) -> None:
    shares = {"seated_milli": seated, "admissible_milli": admissible, "in_use_milli": in_use}
    assert count_of(**shares, least_milli=least) == max(least, count_of(**shares))
    assert count_without_broker(None, in_use, silent_ms=0, patience_ms=1, least_milli=least) == max(least, in_use)


def test_without_a_broker_the_last_count_stays_for_a_while() -> None:
    assert count_without_broker(3000, 500, silent_ms=0, patience_ms=60_000) == 3000
    assert count_without_broker(3000, 500, silent_ms=59_999, patience_ms=60_000) == 3000
    assert count_without_broker(3000, 500, silent_ms=60_000, patience_ms=60_000) == 500
    assert count_without_broker(None, 500, silent_ms=0, patience_ms=60_000) == 500
    assert count_without_broker(200, 500, silent_ms=0, patience_ms=60_000) == 500


@given(st.integers(-1000, 10**9), st.integers(-1000, 10**9))
def test_a_rounded_wait_is_no_less_keeps_the_order_and_is_at_most_two_and_a_half_times_as_long(
    one: int, two: int
) -> None:
    assert max(0, one) <= rounded_wait_ms(one) <= max(100, 5 * one // 2)
    assert rounded_wait_ms(rounded_wait_ms(one)) == rounded_wait_ms(one)
    assert (one <= two) <= (rounded_wait_ms(one) <= rounded_wait_ms(two))


@given(st.integers(-5, 10**9))
def test_a_rounded_size_is_no_more_and_loses_a_sixteenth_at_most(mib: int) -> None:
    rounded = rounded_memory_mib(mib)
    assert rounded <= max(0, mib)
    assert (max(0, mib) - rounded) * 16 <= max(0, mib)
