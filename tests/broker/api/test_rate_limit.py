"""Whatever the pattern of requests, a caller gets exactly what the rate and the burst allow."""

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.broker.clock import TokenBucket

STEPS = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3)), max_size=80)


@given(STEPS, st.floats(0.1, 20), st.integers(1, 10))
def test_no_caller_gets_more_than_the_burst_and_the_rate(
    steps: list[tuple[float, int]], per_s: float, burst: int
) -> None:
    now_s, taken = 0.0, dict.fromkeys(range(4), 0)
    buckets = TokenBucket(per_s, burst, clock=lambda: now_s)
    for pause_s, key in steps:
        now_s += pause_s
        taken[key] += buckets.take(key) == 0
        assert taken[key] <= burst + per_s * now_s + 1e-6


@given(STEPS, st.floats(0.1, 20), st.integers(1, 10))
def test_who_comes_again_when_he_was_told_gets_in(steps: list[tuple[float, int]], per_s: float, burst: int) -> None:
    now_s = 0.0
    buckets = TokenBucket(per_s, burst, clock=lambda: now_s)
    for pause_s, key in steps:
        now_s += pause_s
        wait_s = buckets.take(key)
        assert 0 <= wait_s <= 1 / per_s
        if wait_s:
            now_s += wait_s + 1e-6
            assert buckets.take(key) == 0
