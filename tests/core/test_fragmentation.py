"""Choosing the device on which a lease fragments free memory least for expected requests: laws from the definition, and in the arbiter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.events import Attached, LeaseReleased, LeaseRequested, SuspendRequested
from fractional_gpu.core.forecasts.asks import RequestedSizes
from fractional_gpu.core.model import ReserveBy
from fractional_gpu.core.place import DeviceChoice, Place
from tests.core.driving import Hand, device, pool, spec


def mix_of(weights: Mapping[tuple[int, int], int]) -> RequestedSizes:
    return RequestedSizes([size for size, weight in weights.items() for _ in range(weight)])


SIZES = (125, 250, 375, 500, 750, 1000)
MIXES = st.dictionaries(
    st.tuples(st.sampled_from(SIZES), st.sampled_from((1, 1, 2, 4))), st.integers(1, 9), max_size=5
).map(mix_of)
FREE = st.lists(st.one_of(st.sampled_from(SIZES), st.integers(0, 1000)), min_size=1, max_size=8)
NEEDS = st.sampled_from(SIZES)


def choice(
    mix: RequestedSizes, need_mib: int, places: Sequence[Place], kinds: Mapping[str, str] | None = None
) -> DeviceChoice:
    return DeviceChoice(mix, need_mib, places, lambda one: kinds[one] if kinds is not None else "H")


def named(free: Sequence[int]) -> list[Place]:
    return [(f"d{number}", free_mib) for number, free_mib in enumerate(free)]


def fitting(places: Sequence[Place], need_mib: int) -> list[Place]:
    return [place for place in places if place[1] >= need_mib]


def usable(mix: RequestedSizes, free: Sequence[int]) -> int:
    """By definition: for each size, the memory the devices could give to leases of that size alone, times how often it is requested."""
    total = 0
    for (mib, devices), weight in mix.weights.items():
        if devices == 1:
            total += weight * sum(free_mib // mib * mib for free_mib in free)
        else:
            able = sum(free_mib >= mib for free_mib in free)
            total += weight * (able // devices) * devices * mib
    return total


def after(places: Sequence[Place], chosen: Sequence[str], need_mib: int) -> list[int]:
    return [free_mib - need_mib if device_id in chosen else free_mib for device_id, free_mib in places]


# -- laws ----------------------------------------------------------------------------------------------------------------


@given(mix=MIXES, free=FREE, need=NEEDS, data=st.data())
def test_what_is_spoilt_is_what_was_usable_before_and_is_no_more(
    mix: RequestedSizes, free: list[int], need: int, data: st.DataObject
) -> None:
    places = named(free)
    able = fitting(places, need)
    chosen = data.draw(st.lists(st.sampled_from(able), unique=True, min_size=1)) if able else []
    if chosen:
        then = after(places, [one for one, _ in chosen], need)
        assert choice(mix, need, places).fragmentation(chosen) == usable(mix, free) - usable(mix, then)


@given(mix=MIXES, free=FREE, need=NEEDS)
def test_the_chosen_device_fits_and_no_other_one_fragments_less_or_as_much_and_has_less_left(
    mix: RequestedSizes, free: list[int], need: int
) -> None:
    places = named(free)
    able = fitting(places, need)
    best = choice(mix, need, places).best(able)
    if not able:
        assert best is None
        return
    ranks = {
        device_id: (usable(mix, free) - usable(mix, after(places, [device_id], need)), free_mib)
        for device_id, free_mib in able
    }
    assert best is not None
    assert ranks[best] == min(ranks.values())
    assert best == min(ranks, key=ranks.__getitem__), "the first of equals"


@given(free=FREE, need=NEEDS)
def test_while_no_lease_has_asked_it_is_best_fit(free: list[int], need: int) -> None:
    places = named(free)
    able = fitting(places, need)
    best = choice(RequestedSizes(), need, places).best(able)
    assert best == (min(able, key=lambda place: place[1])[0] if able else None)


@given(free=FREE, need=NEEDS, weight=st.integers(1, 99))
def test_where_all_ask_for_the_same_it_is_best_fit(free: list[int], need: int, weight: int) -> None:
    places = named(free)
    able = fitting(places, need)
    best = choice(mix_of({(need, 1): weight}), need, places).best(able)
    assert best == (min(able, key=lambda place: place[1])[0] if able else None)


@given(mix=MIXES, free=FREE, need=NEEDS, data=st.data())
def test_names_and_order_decide_between_equals_only(
    mix: RequestedSizes, free: list[int], need: int, data: st.DataObject
) -> None:
    places = named(free)
    other = [(f"x{device_id}", free_mib) for device_id, free_mib in data.draw(st.permutations(places))]
    one, two = (choice(mix, need, given).best(fitting(given, need)) for given in (places, other))
    ranked = [
        choice(mix, need, given).rank((chosen, dict(given)[chosen])) if chosen is not None else None
        for given, chosen in ((places, one), (other, two))
    ]
    assert ranked[0] == ranked[1]


@given(mix=MIXES, free=FREE, need=NEEDS, count=st.integers(2, 4), data=st.data())
def test_several_devices_are_of_one_kind_and_fit(
    mix: RequestedSizes, free: list[int], need: int, count: int, data: st.DataObject
) -> None:
    places = named(free)
    kinds = {device_id: data.draw(st.sampled_from("HL")) for device_id, _ in places}
    able = fitting(places, need)
    chosen = choice(mix, need, places, kinds).best_set(able, count)
    most = max(sum(kinds[device_id] == kind for device_id, _ in able) for kind in "HL")
    if chosen is None:
        assert most < count
        return
    assert len(set(chosen)) == count
    assert len({kinds[device_id] for device_id in chosen}) == 1
    assert set(chosen) <= {device_id for device_id, _ in able}


# -- what it is good for -------------------------------------------------------------------------------------------------


def test_a_small_lease_leaves_whole_what_larger_ones_are_asking_for() -> None:
    halves = mix_of({(500, 1): 3, (125, 1): 1})
    places = named([500, 625, 1000])
    assert choice(halves, 125, places).best(places) == "d1", "best fit would take d0, and no half would fit there again"
    assert choice(mix_of({(125, 1): 1}), 125, places).best(places) == "d0"


def test_the_device_that_a_lease_of_several_needs_is_spared() -> None:
    pairs = mix_of({(1000, 2): 1, (250, 1): 3})
    places = named([1000, 1000, 1000])
    kinds = {"d0": "H", "d1": "H", "d2": "L"}
    assert choice(pairs, 250, places, kinds).best(places) == "d2"
    assert choice(mix_of({(250, 1): 3}), 250, places, kinds).best(places) == "d0"


# -- in the arbiter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("halves", "expected"), [(0, "d0"), (30, "d1")])
def test_the_arbiter_learns_from_tickets_what_it_spares(halves: int, expected: str) -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1")])
    for number in range(halves):
        hand.run(f"half{number}", 500)
        hand.send(LeaseReleased(at_ms=hand.now, lease_id=f"half{number}"))
    for number in range(11):
        hand.run(f"k{number}", 125)
    assert [view.reserved_mib for view in hand.arbiter.devices()] == [1000, 375]
    for number in range(4):
        hand.send(LeaseReleased(at_ms=hand.now, lease_id=f"k{number}"))
    hand.run("small", 125)
    assert hand.view("small").device_id == expected, "500 MiB are free on d0, 625 MiB on d1"


def test_every_ticket_for_room_is_an_ask() -> None:
    hand = Hand(device("d0"), pools=[pool("d0", "d1")])
    hand.idle("a", 600)
    asks = hand.arbiter.forecasts.asks("p")
    assert list(asks.weights) == [(600, 1)]
    once = asks.weights[600, 1]
    hand.saved(hand.send(SuspendRequested(at_ms=hand.now, lease_id="a")))
    hand.restored(hand.want("a"))
    assert asks.weights == {(600, 1): 2 * once}
    hand.work("a")
    hand.rest("a")
    hand.want("a")
    assert asks.weights == {(600, 1): 2 * once}, "it was resident, and asked for no room"


def test_leases_that_reserve_by_use_are_no_asks_unless_they_have_several_devices() -> None:
    policy = replace(pool("d0", "d1"), reserve_by=ReserveBy.USE, headroom_mib=50)
    hand = Hand(device("d0"), device("d1"), pools=[policy])
    hand.run("a", 600)
    assert not hand.arbiter.forecasts.asks("p").weights
    hand.send(LeaseReleased(at_ms=hand.now, lease_id="a"))
    hand.send(LeaseRequested(at_ms=hand.now, spec=replace(spec("pair", 1000, milli=1000), devices=2)))
    hand.send(Attached(at_ms=hand.now, lease_id="pair", gated=True))
    hand.want("pair")
    assert list(hand.arbiter.forecasts.asks("p").weights) == [(1000, 2)]
