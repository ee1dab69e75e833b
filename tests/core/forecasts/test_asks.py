"""The mix of sizes that a pool is asked for: bounded, faded, and the same after a restart."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.forecasts.asks import MOST_SIZES, AskMix
from fractional_gpu.core.forecasts.forecasts import Forecasts

ASKS = st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 8)), max_size=80)


@given(asks=ASKS)
def test_it_stays_bounded_whatever_is_asked_for(asks: list[tuple[int, int]]) -> None:
    mix = AskMix()
    for mib, devices in asks:
        mix.add(mib, devices)
        assert not list(mix.broken())
        assert (mib, devices) in mix.weights, "the last ask counts"
    assert len(mix.weights) == min(MOST_SIZES, len(mix.weights))


def test_old_asks_fade_and_are_forgotten() -> None:
    mix = AskMix()
    for _ in range(1000):
        mix.add(100, 1)
    many = mix.weights[100, 1]
    mix.add(100, 1)
    for _ in range(2000):
        mix.add(700, 1)
    assert mix.weights[100, 1] < many / 4
    for _ in range(20_000):
        mix.add(700, 1)
    assert list(mix.weights) == [(700, 1)]
    assert mix.only_mib == 700


def test_the_rarest_size_makes_room_for_a_new_one() -> None:
    mix = AskMix()
    for number in range(MOST_SIZES):
        for _ in range(1 if number == 7 else 2):
            mix.add(100 + number, 1)
    mix.add(5000, 1)
    assert (107, 1) not in mix.weights
    assert len(mix.weights) == MOST_SIZES


@given(asks=ASKS, free=st.integers(0, 4000))
def test_the_table_is_at_most_a_sixteenth_of_the_asks_behind(asks: list[tuple[int, int]], free: int) -> None:
    mix = AskMix()
    for mib, devices in asks:
        mix.add(mib, devices)
    exact = AskMix(mix.weights).usable(free)
    behind = sum(mix.weights.values()) // 16
    assert exact - behind * free <= mix.usable(free) <= exact


def test_what_cannot_be_is_found() -> None:
    many = AskMix({(mib, 1): 1 for mib in range(1, MOST_SIZES + 2)})
    assert list(many.broken()) == ["33 sizes are known, at most 32 may be"]
    assert list(AskMix({(7, 0): 5}).broken()) == ["asks for 7 MiB on 0 devices have the weight 5"]


def test_what_was_asked_for_survives_a_restart() -> None:
    forecasts = Forecasts()
    for mib, devices in ((100, 1), (200, 1), (1000, 4), (100, 1)):
        forecasts.asked("p", mib, devices)
    kept = json.loads(json.dumps(forecasts.state()))
    again = Forecasts.from_state(kept)
    assert again.state() == forecasts.state()
    assert again.asks("p").weights == forecasts.asks("p").weights
    assert not again.asks("other").weights


@pytest.mark.parametrize("sizes", [[1, 2], [0, 1, 5], [1, 1, 0], [1, 1, 1] * (MOST_SIZES + 1)])
def test_a_damaged_mix_is_refused(sizes: list[int]) -> None:
    kept = Forecasts().state()
    kept["asks"] = {"p": [sizes]}
    with pytest.raises(ValueError, match="at most 32 sizes, three numbers from 1 up for each"):
        Forecasts.from_state(kept)
