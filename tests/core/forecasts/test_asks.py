"""The mix of sizes that users ask a pool for: recent requests, also after a restart."""

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.forecasts.asks import MOST_REQUESTS, RequestedSizes

ASKS = st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 8)), max_size=80)


@given(asks=ASKS, free=st.integers(0, 4000))
def test_what_is_usable_is_what_the_asks_could_take(asks: list[tuple[int, int]], free: int) -> None:
    mix = RequestedSizes()
    for mib, devices in asks:
        mix.add(mib, devices)
    assert mix.usable(free) == sum(free // mib * mib for mib, devices in asks if devices == 1)
    assert sorted(mix.several) == sorted({(mib, n, asks.count((mib, n))) for mib, n in asks if n > 1})


def test_only_the_last_asks_count() -> None:
    mix = RequestedSizes()
    for _ in range(MOST_REQUESTS):
        mix.add(100, 1)
    mix.add(700, 1)
    for _ in range(MOST_REQUESTS):
        mix.add(700, 1)
    assert mix.weights == {(700, 1): MOST_REQUESTS}
