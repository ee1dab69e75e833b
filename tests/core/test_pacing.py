"""When an agent writes to its engine: the laws of `fractional_gpu.core.nodes`."""

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.nodes import Pacing, PacingRules

RULES = st.builds(
    PacingRules,
    floor_ms=st.integers(0, 10_000),
    jitter_ms=st.integers(0, 5000),
    longest_retry_ms=st.integers(0, 100_000),
)
STEPS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3)), max_size=60)
"""How many milliseconds pass, and the state wanted after that."""


@dataclass
class Run:
    """An agent in virtual time; it checks whenever a write is due, as the loop does. `fails`: which attempts fail."""

    pacing: Pacing[int]
    fails: frozenset[int] = frozenset()
    now_ms: int = 0
    attempts: list[tuple[int, int]] = field(default_factory=list)
    written: int | None = None

    def pass_time(self, until_ms: int) -> None:
        while (due := self.pacing.next_ms()) is not None and due <= until_ms:
            self.now_ms = max(self.now_ms, due)
            state = self.pacing.due(self.now_ms)
            assert state is not None
            if len(self.attempts) in self.fails:
                self.pacing.failed(self.now_ms)
            else:
                self.written = state
                self.pacing.written(self.now_ms, state)
            self.attempts.append((self.now_ms, state))
        self.now_ms = until_ms

    def live(self, steps: list[tuple[int, int]]) -> None:
        for pause_ms, state in steps:
            self.pass_time(self.now_ms + pause_ms)
            self.pacing.want(self.now_ms, state)


@given(RULES, st.integers(0, 2**64), STEPS, st.frozensets(st.integers(0, 40)))
def test_between_two_attempts_lies_the_floor_whatever_fails(
    rules: PacingRules, seed: int, steps: list[tuple[int, int]], fails: frozenset[int]
) -> None:
    run = Run(Pacing(rules, seed), fails)
    run.live(steps)
    times = [at for at, _ in run.attempts]
    assert all(after - before >= rules.floor_ms for before, after in pairwise(times))


@given(RULES, st.integers(0, 2**64), STEPS)
def test_a_state_that_lasts_is_written_within_the_bound(
    rules: PacingRules, seed: int, steps: list[tuple[int, int]]
) -> None:
    run = Run(Pacing(rules, seed))
    run.live([*steps, (0, 7)])
    run.pass_time(run.now_ms + rules.floor_ms + rules.jitter_ms)
    assert run.written == 7


@given(RULES, st.integers(0, 2**64), STEPS)
def test_what_the_engine_has_already_is_not_written(
    rules: PacingRules, seed: int, steps: list[tuple[int, int]]
) -> None:
    run = Run(Pacing(rules, seed))
    run.live(steps)
    states = [state for _, state in run.attempts]
    assert all(before != after for before, after in pairwise(states))


@given(RULES, st.integers(0, 2**64), st.integers(1, 20))
def test_failures_are_repeated_ever_more_rarely_and_end_with_the_state_of_their_time(
    rules: PacingRules, seed: int, failures: int
) -> None:
    run = Run(Pacing(rules, seed), frozenset(range(failures)))
    run.pacing.want(0, 1)
    longest = max(rules.floor_ms, rules.longest_retry_ms) + rules.jitter_ms
    run.pass_time(rules.jitter_ms)  # by now the first attempt has failed
    assert [state for _, state in run.attempts][:1] == [1]
    run.pacing.want(run.now_ms, 2)
    run.pass_time((failures + 2) * (longest + 1))
    assert run.written == 2
    times = [at for at, _ in run.attempts]
    pauses = [after - before for before, after in pairwise(times)][:failures]
    assert all(pause >= min(1000 << number, rules.longest_retry_ms) for number, pause in enumerate(pauses))


@given(RULES, st.integers(0, 2**64))
def test_what_others_changed_is_written_again(rules: PacingRules, seed: int) -> None:
    run = Run(Pacing(rules, seed))
    run.live([(0, 1)])
    run.pass_time(20_000)
    assert [state for _, state in run.attempts] == [1]
    run.pacing.saw(run.now_ms, 8)
    run.pass_time(40_000)
    assert [state for _, state in run.attempts] == [1, 1]
    run.pacing.saw(run.now_ms, 1)
    assert run.pacing.next_ms() is None


def test_many_agents_that_see_the_same_event_spread_their_writes() -> None:
    """500 agents: no 100 ms of the jitter gets more than four times its share of the writes."""
    rules = PacingRules(floor_ms=5000, jitter_ms=2000)
    runs = [Run(Pacing(rules, seed)) for seed in range(500)]
    for run in runs:
        run.live([(0, 1)])
        run.pass_time(10_000)
    times = sorted(run.attempts[0][0] for run in runs)
    most = max(sum(start <= at < start + 100 for at in times) for start in range(0, 2001, 100))
    assert most <= 4 * 500 // 20
