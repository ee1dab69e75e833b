"""What a node agent tells its engine (Slurm, Kubernetes): how many thousandths of a device it may give away, and when to write that.

The engine gives away what its count leaves next to what is in use by its own books. So the count is

    what is in use by its books + what the pool's forecast admits - what is given away already and has no seat yet

Seats of others (a hub, a user of the machine) are not in the books; what they hold reduces what is admitted. If the books say less than the
seats (Slurm forgets some when it rereads its configuration), the books still count, because the engine follows them.

Slurm refuses a job that asks for more than any node's count, and holds a waiting job for good. So the count is never below `least_milli`,
the largest share on offer: one job may then start unadmitted, within what the pool may promise. Without a broker the last count stays for a
while, since a broker restarts within seconds; then only what is in use remains.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar


def count_of(*, seated_milli: int, admissible_milli: int, in_use_milli: int, least_milli: int = 0) -> int:
    """Return the engine's count, milli-GPU, at least `least_milli`.

    `seated_milli`: held by its jobs' seats; `admissible_milli`: free beside all seats; `in_use_milli`: by the engine's own books.
    """
    unseated = max(0, in_use_milli - seated_milli)
    return max(least_milli, in_use_milli + max(0, admissible_milli - unseated))


def count_without_broker(
    last: int | None, in_use_milli: int, *, silent_ms: int, patience_ms: int, least_milli: int = 0
) -> int:
    """Return the count while no broker answers: the last written, or after `patience_ms` what is in use; at least `least_milli`."""
    if last is None or silent_ms >= patience_ms:
        return max(least_milli, in_use_milli, 0)
    return max(least_milli, last, in_use_milli, 0)


def rounded_wait_ms(wait_ms: int) -> int:
    """Round a wait up to 1, 2 or 5 times a power of ten, from 100 ms, to hide small changes."""
    if wait_ms <= 0:
        return 0
    step = 100
    while True:
        for factor in (1, 2, 5):
            if wait_ms <= step * factor:
                return step * factor
        step *= 10


def rounded_memory_mib(mib: int) -> int:
    """Round the size down to a sixteenth of its largest power of two, to hide small changes."""
    if mib < 16:
        return max(0, mib)
    step = 1 << (mib.bit_length() - 5)
    return mib // step * step


State = TypeVar("State")
_MASK = (1 << 64) - 1
_FIRST_RETRY_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingRules:
    """The pace of writes, in milliseconds."""

    floor_ms: int = 5000
    jitter_ms: int = 2000
    longest_retry_ms: int = 120_000


def spread(number: int, bound: int) -> int:
    """Hash a number into 0..bound so that neighbouring numbers scatter (splitmix64: core has no `random`)."""
    mixed = (number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) % (bound + 1)


class Pacing(Generic[State]):
    """When a node agent writes its state: a cluster has hundreds of agents and one controller.

    An agent writes only a state that differs from the engine's, after a random part of `jitter_ms`, so that agents that saw the same event
    do not write together, and at least `floor_ms` after its last attempt. Further changes do not postpone the write; it takes the latest
    state. Failed writes are repeated after pauses that double up to `longest_retry_ms`, with jitter.

    While writes succeed, a wanted state that lasts is written within `floor_ms + jitter_ms` of its first appearance. Times are milliseconds
    of any clock that does not go back. `seed`: different seeds spread the agents' writes.
    """

    def __init__(self, rules: PacingRules, seed: int) -> None:
        self._rules = rules
        self._random = seed & _MASK
        self._wanted: State | None = None
        self._known: State | None = None  # what the engine has; None: unknown
        self._due_ms: int | None = None
        self._attempt_ms: int | None = None  # when the last attempt was made
        self._failures = 0

    def want(self, now_ms: int, state: State) -> None:
        """Set the state that the engine should have."""
        self._wanted = state
        self._plan(now_ms)

    def saw(self, now_ms: int, state: State | None) -> None:
        """Note what the engine has now (None: unknown): another agent, an administrator or a restart may have changed it."""
        self._known = state
        self._plan(now_ms)

    def due(self, now_ms: int) -> State | None:
        """Return the state to write now, or None. The caller then calls `written` or `failed`."""
        if self._due_ms is None or now_ms < self._due_ms:
            return None
        return self._wanted

    def next_ms(self) -> int | None:
        """Return when the next write is due, or None."""
        return self._due_ms

    def written(self, now_ms: int, state: State) -> None:
        """Take note of a write that succeeded."""
        self._known, self._attempt_ms, self._failures, self._due_ms = state, now_ms, 0, None
        self._plan(now_ms)

    def failed(self, now_ms: int) -> None:
        """Note a failed write, after which the engine's state is unknown."""
        self._known, self._attempt_ms, self._due_ms = None, now_ms, None
        self._failures += 1
        self._plan(now_ms)

    def _plan(self, now_ms: int) -> None:
        if self._wanted is None or self._wanted == self._known:
            self._due_ms = None
        elif self._due_ms is None:
            earliest = now_ms if self._attempt_ms is None else max(now_ms, self._attempt_ms + self._pause_ms())
            self._due_ms = earliest + self._below(self._rules.jitter_ms)

    def _pause_ms(self) -> int:
        floor = self._rules.floor_ms
        if not self._failures:
            return floor
        first = max(floor, _FIRST_RETRY_MS)
        return max(floor, min(first << min(self._failures - 1, 20), self._rules.longest_retry_ms))

    def _below(self, bound: int) -> int:
        self._random = (self._random + 1) & _MASK
        return spread(self._random, bound)
