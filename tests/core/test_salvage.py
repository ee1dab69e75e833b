"""What is saved before a deadline: compared with every possible choice, and in the order that loses least if swaps take longer."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fractional_gpu.core.revoke import Candidate, Plan, plan_saving, value_of

pytestmark = pytest.mark.promise("revocation")

_SOME = st.lists(
    st.tuples(
        st.integers(1, 10_000),  # value
        st.integers(1, 400),  # swap_ms
        st.sampled_from([500, 500, 500, 900]),  # deadline_ms
        st.integers(0, 100),  # host_mib
        st.booleans(),  # busy
    ),
    max_size=8,
)


def _candidates(rows: list[tuple[int, int, int, int, bool]]) -> list[Candidate]:
    return [
        Candidate(lease_id=f"k{place}", value=value, swap_ms=ms, deadline_ms=by, host_mib=mib, busy=busy)
        for place, (value, ms, by, mib, busy) in enumerate(rows)
    ]


def _in_time(chosen: Sequence[Candidate], start_ms: int) -> bool:
    for one in sorted(chosen, key=lambda one: one.deadline_ms):
        start_ms += one.swap_ms
        if start_ms > one.deadline_ms:
            return False
    return True


def _most(candidates: list[Candidate], start_ms: int) -> int:
    sets = (chosen for size in range(len(candidates) + 1) for chosen in combinations(candidates, size))
    return max(sum(one.value for one in chosen) for chosen in sets if _in_time(chosen, start_ms))


def _value(plan: Plan) -> int:
    return sum(one.value for one in plan.saved)


@given(_SOME, st.integers(0, 300))
@example([(10, 300, 500, 0, False), *([(7, 250, 500, 0, False)] * 2)], 0)  # the greedy choice is 10
def test_one_channel_saves_as_much_as_any_choice_could(rows: list[tuple[int, int, int, int, bool]], now: int) -> None:
    candidates = _candidates(rows)
    plan = plan_saving(candidates, free_ms=[now], host_left_mib=10_000)
    assert _value(plan) == _most(candidates, now)


@given(_SOME, st.lists(st.integers(0, 300), max_size=3), st.integers(0, 400))
def test_what_is_planned_fits_its_channel_and_host_memory_and_the_rest_is_named(
    rows: list[tuple[int, int, int, int, bool]], free_ms: list[int], host_mib: int
) -> None:
    candidates = _candidates(rows)
    plan = plan_saving(candidates, free_ms=free_ms, host_left_mib=host_mib)
    assert len(plan.channels) == len(free_ms)
    assert all(_in_time(channel, start) for channel, start in zip(plan.channels, sorted(free_ms), strict=True))
    assert sum(one.host_mib for one in plan.saved) <= host_mib
    saved = {one.lease_id for one in plan.saved}
    assert saved | plan.lost.keys() == {one.lease_id for one in candidates}
    assert not saved & plan.lost.keys()


@given(_SOME, st.integers(0, 300))
def test_a_suspend_that_begins_at_its_latest_time_leaves_all_behind_it_in_time(
    rows: list[tuple[int, int, int, int, bool]], now: int
) -> None:
    plan = plan_saving(_candidates(rows), free_ms=[now], host_left_mib=10_000)
    for channel in plan.channels:
        for place, one in enumerate(channel):
            assert plan.latest_ms[one.lease_id] >= now + sum(before.swap_ms for before in channel[:place])
            assert _in_time(channel[place:], plan.latest_ms[one.lease_id])


@given(_SOME, st.integers(1, 500))
def test_more_time_never_saves_less(rows: list[tuple[int, int, int, int, bool]], more: int) -> None:
    candidates = _candidates(rows)
    late, early = (plan_saving(candidates, free_ms=[start], host_left_mib=10_000) for start in (more, 0))
    assert _value(early) >= _value(late)


def test_many_leases_and_a_long_deadline_are_planned_nearly_as_well_in_bounded_work() -> None:
    candidates = [
        Candidate(
            lease_id=f"k{place}",
            value=1 + place * 7919 % 10_007,
            swap_ms=500 + place * 6007 % 9_001,
            deadline_ms=120_000,
        )
        for place in range(200)
    ]
    by_density = sorted(candidates, key=lambda one: -one.value / one.swap_ms)
    bound, left_ms = 0.0, 120_000.0  # of the relaxed problem in which part of a lease can be saved
    for one in by_density:
        bound += one.value * min(1.0, left_ms / one.swap_ms)
        left_ms = max(0.0, left_ms - one.swap_ms)
    plan = plan_saving(candidates, free_ms=[0], host_left_mib=1)
    assert sum(one.swap_ms for one in plan.saved) <= 120_000
    assert _value(plan) >= 0.98 * bound


def test_idle_ones_go_first_and_busy_ones_as_late_as_they_can() -> None:
    idle = Candidate(lease_id="idle", value=1, swap_ms=100, deadline_ms=1_000)
    busy = Candidate(lease_id="busy", value=9_999, swap_ms=300, deadline_ms=1_000, busy=True)
    plan = plan_saving([busy, idle], free_ms=[0], host_left_mib=0)
    assert [one.lease_id for one in plan.saved] == ["idle", "busy"]
    assert plan.latest_ms == {"idle": 600, "busy": 700}


def test_where_there_is_time_the_latest_time_is_cautious() -> None:
    busy = Candidate(lease_id="busy", value=1, swap_ms=300, cautious_ms=500, deadline_ms=1_000, busy=True)
    assert plan_saving([busy], free_ms=[0], host_left_mib=0).latest_ms == {"busy": 500}
    assert plan_saving([busy], free_ms=[650], host_left_mib=0).latest_ms == {"busy": 500}, "it begins at once"


def test_what_is_worth_most_for_its_time_goes_first_among_equals() -> None:
    rows = [("a", 10, 100), ("b", 30, 100), ("c", 30, 50)]
    plan = plan_saving(
        [Candidate(lease_id=name, value=value, swap_ms=ms, deadline_ms=1_000) for name, value, ms in rows],
        free_ms=[0],
        host_left_mib=0,
    )
    assert [one.lease_id for one in plan.saved] == ["c", "b", "a"]


def test_what_host_memory_does_not_hold_is_lost_for_that_reason() -> None:
    large = Candidate(lease_id="large", value=10, swap_ms=1, deadline_ms=1_000, host_mib=900)
    small = Candidate(lease_id="small", value=8, swap_ms=1, deadline_ms=1_000, host_mib=400)
    other = Candidate(lease_id="other", value=7, swap_ms=1, deadline_ms=1_000, host_mib=400)
    slow = Candidate(lease_id="slow", value=7, swap_ms=2_000, deadline_ms=1_000)
    plan = plan_saving([large, small, other, slow], free_ms=[0], host_left_mib=1_000)
    assert {one.lease_id for one in plan.saved} == {"small", "other"}
    assert plan.lost == {"large": "host-memory", "slow": "time"}


def test_each_channel_takes_what_the_others_left() -> None:
    rows = [Candidate(lease_id=f"k{place}", value=1, swap_ms=600, deadline_ms=1_000) for place in range(3)]
    plan = plan_saving(rows, free_ms=[0, 100], host_left_mib=0)
    assert [len(channel) for channel in plan.channels] == [1, 1]
    assert len(plan.lost) == 1


def test_work_and_priority_decide_what_a_lease_is_worth() -> None:
    assert value_of(0, 0) > 0, "one that has only loaded something counts, too"
    assert value_of(120_000, 0) == 3 * value_of(0, 0)
    assert value_of(0, 1) == 2 * value_of(0, 0) == 4 * value_of(0, -1)
    assert value_of(0, 1_000) == value_of(0, 10)
    assert value_of(0, -1_000) >= 1
