"""One property per law of the design, each in a world built to strain that law. (The observer checks the other laws as well.)"""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.effects import Effect, Resume, Suspend
from fractional_gpu.core.events import (
    DeviceSeen,
    Expected,
    HostMemorySeen,
    LeaseReleased,
    ResumeFinished,
    ResumeOutcome,
    SuspendFinished,
    SuspendOutcome,
    SuspendRequested,
    TruthFound,
)
from fractional_gpu.core.model import Foresight, LeaseState, Sign
from tests.core.driving import Hand, device, lease_measured, pool

pytestmark = pytest.mark.promise("laws")

sizes = st.integers(1, 1000)


@given(
    caps=st.lists(sizes, min_size=1, max_size=8),
    strangers=st.lists(st.integers(0, 1500), max_size=6),
    memory_mib=st.integers(1000, 2000),
)
def test_law_1_no_lease_is_given_memory_that_is_not_there(
    caps: list[int], strangers: list[int], memory_mib: int
) -> None:
    hand = Hand(device("d0", memory_mib), device("d1", memory_mib // 2), pools=[pool("d0", "d1")])
    for number, cap in enumerate(caps):
        before = {view.device_id: view.reserved_mib for view in hand.arbiter.devices()}
        hand.run(f"k{number}", min(cap, memory_mib))
        for view in hand.arbiter.devices():
            if view.reserved_mib > before[view.device_id]:
                assert view.reserved_mib + view.stranger_mib <= view.leasable_mib
        for stranger_mib in strangers[number : number + 1]:
            hand.send(DeviceSeen(at_ms=0, device=device("d0", memory_mib), stranger_mib=stranger_mib))
            over = hand.arbiter.devices()[0]
            assert over.over_committed == (over.reserved_mib + over.stranger_mib > over.leasable_mib)


@given(
    caps=st.lists(st.integers(50, 1000), min_size=2, max_size=6),
    used=st.lists(st.integers(0, 1500), min_size=6, max_size=6),
    saved=st.lists(st.integers(0, 1500), min_size=6, max_size=6),
    budgets=st.lists(st.integers(0, 3000), min_size=6, max_size=6),
)
def test_law_2_no_suspend_without_host_memory_and_no_resume_without_room_for_what_was_saved(
    caps: list[int], used: list[int], saved: list[int], budgets: list[int]
) -> None:
    hand = Hand(device(memory_mib=10_000))
    for number, cap in enumerate(caps):
        name = f"k{number}"
        hand.idle(name, cap)
        hand.send(lease_measured(0, name, used[number]))
        hand.send(HostMemorySeen(at_ms=0, budget_mib=budgets[number]))
        for effect in hand.send(SuspendRequested(at_ms=0, lease_id=name)):
            if isinstance(effect, Suspend):
                assert max(1, used[number]) <= effect.host_mib <= max(cap, used[number])
                assert hand.arbiter.host_saved_mib + hand.arbiter.host_reserved_mib <= budgets[number]
                begun = [*hand.saved([effect], saved_mib=saved[number]), *hand.want(name)]
                while resumes := [effect for effect in begun if isinstance(effect, Resume)]:  # on request, or early
                    (resume,) = resumes
                    kernel = int(resume.lease_id.removeprefix("k"))
                    assert resume.reserve_mib >= max(caps[kernel], saved[kernel])
                    begun = hand.restored([resume], ResumeOutcome.NOT_STARTED)


@given(
    idle=st.lists(st.integers(1, 400), max_size=5),
    busy=st.lists(st.integers(1, 400), max_size=3),
    need_mib=sizes,
    host_mib=st.integers(0, 1500),
)
def test_law_3_no_lease_is_suspended_for_one_that_still_would_not_fit(
    idle: list[int], busy: list[int], need_mib: int, host_mib: int
) -> None:
    hand = Hand(host_mib=host_mib)
    for number, cap in enumerate(busy):
        hand.run(f"busy{number}", cap)
    for number, cap in enumerate(idle):
        hand.idle(f"idle{number}", cap)
    held = {view.spec.lease_id: view.reserved_mib for view in hand.arbiter.leases() if view.reserved_mib}
    hand.start("t", need_mib)
    effects = hand.want("t")
    fits_when_all_idle_go = need_mib <= 1000 - sum(mib for name, mib in held.items() if name.startswith("busy"))
    suspended = 0
    while victims := hand.suspends(effects):
        assert fits_when_all_idle_go
        suspended += sum(held[name] for name in victims)
        effects = hand.saved(effects, saved_mib=0)
    waits_longer = len(held) < len(busy) + len(idle)  # a lease that found no room: a lease that leaves may let it in
    if suspended and not waits_longer:
        assert hand.state("t") is LeaseState.RESIDENT


@given(
    most=st.integers(0, 4),
    caps=st.lists(st.integers(1, 300), min_size=8, max_size=14),
    count=st.integers(1, 3),
    stays=st.integers(1, 3),
)
def test_law_4_a_ticket_is_passed_over_so_many_times_and_then_served(
    most: int, caps: list[int], count: int, stays: int
) -> None:
    ids = [f"d{number}" for number in range(count)]
    hand = Hand(*(device(name) for name in ids), pools=[pool(*ids, max_passed_over=most)])
    for name in ids:
        hand.run(f"first-{name}", 800)
    hand.start("large", 1000)
    hand.want("large")
    living = [f"first-{name}" for name in ids]
    overtook = 0
    for number, cap in enumerate(caps):
        name = f"k{number}"
        hand.start(name, cap)
        hand.want(name)
        hand.work(name)
        living.append(name)
        if hand.state("large") is not LeaseState.RESIDENT:
            overtook += hand.state(name) is LeaseState.RESIDENT
            assert hand.ticket("large").passed_over <= most
            assert overtook <= max(1, most) * count
        if number % stays == 0:
            hand.send(LeaseReleased(at_ms=0, lease_id=living.pop(0)))
    for name in living:
        hand.send(LeaseReleased(at_ms=0, lease_id=name))
        if hand.state("large") is LeaseState.RESIDENT:
            break
    assert hand.state("large") is LeaseState.RESIDENT


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 20_000)), max_size=25),
    idle_after_ms=st.sampled_from([None, 0, 1_000]),
)
def test_law_5_a_busy_kernel_is_never_suspended(steps: list[tuple[int, bool, int]], idle_after_ms: int | None) -> None:
    hand = Hand(pools=[pool(idle_after_ms=idle_after_ms)])
    busy = dict.fromkeys(range(4), False)
    for number in busy:
        hand.start(f"k{number}", 400)
    for number, works, ms in steps:
        name = f"k{number}"
        hand.want(name)
        effects = hand.work(name) if works else hand.rest(name)
        busy[number] = works
        while True:
            for victim in hand.suspends(effects):
                assert not busy[int(victim[1:])]
            if hand.suspends(effects):
                effects = hand.saved(effects)
            elif hand.resumes(effects):
                effects = hand.restored(effects)
            else:
                break
        if works:
            assert hand.suspends(hand.send(SuspendRequested(at_ms=hand.now, lease_id=name))) == []
        hand.now += ms


@given(
    lost_in=st.sampled_from(["suspend", "resume"]),
    answers=st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.booleans()), max_size=6),
    ms=st.integers(0, 10**9),
    truth=st.sampled_from([LeaseState.RESIDENT, LeaseState.SUSPENDED, LeaseState.NO_CONTEXT, LeaseState.UNATTACHED]),
)
def test_law_6_what_is_unknown_is_kept_until_the_truth_is_known(
    lost_in: str, answers: list[tuple[int, int, bool]], ms: int, truth: LeaseState
) -> None:
    hand = Hand(pools=[pool(idle_after_ms=0)])
    hand.run("a")
    (suspend,) = [effect for effect in hand.rest("a") if isinstance(effect, Suspend)]
    if lost_in == "suspend":
        hand.saved([suspend], SuspendOutcome.UNKNOWN)
    else:
        hand.saved([suspend])
        hand.restored(hand.want("a"), ResumeOutcome.UNKNOWN)
    generation = hand.view("a").generation
    for operation, age, saved in answers:
        late = SuspendFinished(
            at_ms=hand.now,
            lease_id="a",
            operation_id=suspend.operation_id + operation,
            generation=generation + age,
            outcome=SuspendOutcome.SAVED,
            saved_mib=1,
        )
        other = ResumeFinished(
            at_ms=hand.now,
            lease_id="a",
            operation_id=late.operation_id,
            generation=late.generation,
            outcome=ResumeOutcome.RESTORED,
        )
        hand.send(late if saved else other)
    hand.wait(ms)
    assert (hand.state("a"), hand.view("a").reserved_mib) == (LeaseState.QUARANTINED, 600)
    hand.start("b", 401)
    hand.want("b")
    assert hand.state("b") is LeaseState.NO_CONTEXT
    hand.send(TruthFound(at_ms=hand.now, lease_id="a", generation=generation, state=truth, saved_mib=1))
    assert hand.state("a") is not LeaseState.QUARANTINED


@given(
    caps=st.lists(sizes, min_size=1, max_size=10),
    leaves=st.lists(st.integers(0, 9), max_size=10),
    most=st.integers(0, 3),
)
def test_law_7_a_ticket_that_fits_in_free_unreserved_memory_does_not_wait(
    caps: list[int], leaves: list[int], most: int
) -> None:
    hand = Hand(device("d0"), device("d1"), pools=[pool("d0", "d1", max_passed_over=most)])
    for number, cap in enumerate(caps):
        hand.start(f"k{number}", cap)
        hand.want(f"k{number}")
        hand.work(f"k{number}")
    for number in leaves:
        hand.send(LeaseReleased(at_ms=0, lease_id=f"k{number}"))
        tickets = hand.arbiter.tickets("p")
        kept = {name for ticket in tickets for name in ticket.kept_on}
        free = [view.leasable_mib - view.reserved_mib for view in hand.arbiter.devices() if view.device_id not in kept]
        assert all(ticket.need_mib > max(free, default=0) for ticket in tickets)


def _answers(hand: Hand, effects: list[Effect]) -> None:
    """Answer all swaps, including those that the answers cause."""
    while effects:
        answered: list[Effect] = []
        if hand.suspends(effects):
            answered += hand.saved(effects)
        if hand.resumes(effects):
            answered += hand.restored(effects)
        effects = answered


def test_law_8_early_swaps_disturb_no_ticket_no_busy_lease_and_no_lease_needed_sooner() -> None:
    """Kernels come, rest and are expected; signs are right, wrong, or arrive while other kernels wait. The observer checks the law."""
    reasons = set[str]()
    for seed in range(12):
        random = Random(seed)
        policy = replace(
            pool("d0", "d1", idle_after_ms=random.choice((None, 5_000))),
            foresight=random.choice((Foresight.FREE, Foresight.DISPLACE, Foresight.DISPLACE)),
            foresight_vain_mib=random.choice((500, 100_000)),
        )
        hand, names = Hand(device("d0"), device("d1"), pools=[policy]), list("abcde")
        for name in names:
            hand.start(name, random.choice((300, 600)))
        for _ in range(80):
            hand.now += random.choice((10, 1_000, 20_000, 300_000))
            name = random.choice(names)
            match random.randrange(4):
                case 0:
                    _answers(hand, hand.want(name))
                    if hand.state(name) is LeaseState.RESIDENT:
                        hand.work(name)
                        if random.random() < 0.9:
                            _answers(hand, hand.rest(name))
                case 1:
                    _answers(hand, [*hand.rest(name), *hand.give_up(name)])
                case _:
                    until_ms, sign = hand.now + random.choice((1_000, 60_000)), random.choice(list(Sign))
                    sign_seen = Expected(at_ms=hand.now, lease_id=name, until_ms=until_ms, sign=sign)
                    _answers(hand, hand.send(sign_seen))
            _answers(hand, hand.wait(0))
        reasons |= hand.observer.counts.keys()
    assert {"resume.expected", "suspend.expected"} <= reasons
