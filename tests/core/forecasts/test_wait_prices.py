"""What a wait costs: its length, and ten times what it is longer than nine of ten waits of its pool."""

import json

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.forecasts.snapshot import StateReader
from fractional_gpu.core.forecasts.wait_prices import LEAST_WAITS, MOST_POOLS, MOST_WAITS, WaitPrice, WaitPrices

WAITS = st.lists(st.integers(0, 10**8), max_size=3 * MOST_WAITS)


def restored(prices: WaitPrices) -> WaitPrices:
    again = WaitPrices()
    again.take_state(StateReader(json.loads(json.dumps({"version": 1, **prices.state()})), 1))
    return again


@given(WAITS)
def test_the_limit_is_the_90th_percentile_of_the_last_waits_rounded_up_by_a_sixteenth_at_most(waits: list[int]) -> None:
    price = WaitPrice()
    for wait_ms in waits:
        price.learn(wait_ms)
    last = sorted(waits[-MOST_WAITS:])
    exact_ms = last[len(last) * 90 // 100] if len(last) >= LEAST_WAITS else 0
    assert exact_ms <= price.limit_ms <= exact_ms * 17 // 16


@given(WAITS, st.integers(0, 10**8), st.integers(0, 10**8))
def test_a_ms_costs_one_up_to_the_limit_and_ten_beyond_it(waits: list[int], one_ms: int, more_ms: int) -> None:
    price = WaitPrice(waits)
    added = price.of(one_ms + more_ms) - price.of(one_ms)
    if not price.limit_ms or one_ms + more_ms <= price.limit_ms:
        assert added == more_ms
    elif one_ms >= price.limit_ms:
        assert added == 10 * more_ms
    else:
        assert more_ms < added < 10 * more_ms


def test_while_9_of_10_cells_find_room_at_once_a_wait_costs_its_length() -> None:
    price = WaitPrice([0] * 37 + [60_000] * 3)
    assert price.of(90_000) == 90_000
    assert WaitPrice([0] * 35 + [60_000] * 5).of(90_000) > 90_000


@given(WAITS, st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=300))
def test_queueing_for_a_channel_adds_the_mean_of_what_the_last_returns_waited_for_it(
    waits: list[int], returns: list[tuple[int, int]]
) -> None:
    price = WaitPrice(waits)
    assert price.queued_ms == 0
    for resume_ms, channel_ms in returns:
        price.learn_return(resume_ms, channel_ms)
    added = [price.of(resume_ms + channel_ms) - price.of(resume_ms) for resume_ms, channel_ms in returns]
    assert min(added) <= price.queued_ms <= max(added)


def test_what_returns_waited_long_ago_is_forgotten() -> None:
    price = WaitPrice()
    for _ in range(100):
        price.learn_return(500, 8000)
    assert price.queued_ms == 8000
    for _ in range(1000):
        price.learn_return(500, 0)
    assert price.queued_ms == 0


@given(st.lists(st.tuples(st.sampled_from(["p", "q"]), st.integers(0, 10**6)), max_size=100))
def test_prices_survive_as_json(waits: list[tuple[str, int]]) -> None:
    prices = WaitPrices()
    for pool, wait_ms in waits:
        prices.learn(pool, wait_ms)
        prices.learn_return(pool, 2000, wait_ms)
    again = restored(prices)
    for pool in ("p", "q", "unknown"):
        for other in (prices, again):
            other.learn(pool, 7)
        assert again.of(pool).limit_ms == prices.of(pool).limit_ms
        assert again.of(pool).queued_ms == prices.of(pool).queued_ms
        assert list(again.of(pool).recent) == list(prices.of(pool).recent)


def test_so_many_pools_are_remembered_the_last_ones() -> None:
    prices = WaitPrices()
    for number in range(2 * MOST_POOLS):
        for _ in range(LEAST_WAITS):
            prices.learn(f"p{number}", 1000)
    assert [prices.of(f"p{number}").limit_ms for number in (0, 2 * MOST_POOLS - 1)] == [0, 1000 + 24]
    assert str(prices.state()).count("'p") == MOST_POOLS
