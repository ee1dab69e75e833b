"""Computes how many thousandths of a device a node agent offers its engine (Slurm or Kubernetes), and decides when it writes this count.

The engine allocates whatever part of the count is not in use according to its own records. So the count is

    in use by the engine's records + admitted by the pool's forecast - allocated but without a seat yet

The engine's records do not include hub seats or local users' seats. Those seats reduce what the forecast admits. The records can also show
less than the total of the jobs' seats, because Slurm forgets part of its records when it rereads its configuration. The count is based on
the records even then, because the engine goes by them.

Slurm refuses a new job that requests more than any node offers, and never starts one that is already queued. So the count is never below
`least_milli`, the largest fraction on offer. This lets one job start without being admitted, within the pool's oversubscription. If no
broker answers, the last count is kept for a while, because a broker restarts within seconds, and then drops to what is in use.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar


def count_of(*, seated_milli: int, admissible_milli: int, in_use_milli: int, least_milli: int = 0) -> int:
    """Return how many milli-GPU the node offers its engine (Slurm or Kubernetes), at least `least_milli`.

    `seated_milli` is how much the seats of the engine's jobs hold. `admissible_milli` is how much the forecast admits on top of all seats.
    `in_use_milli` is how much is in use according to the engine's own records.
    """
    unseated = max(0, in_use_milli - seated_milli)
    return max(least_milli, in_use_milli + max(0, admissible_milli - unseated))


def count_without_broker(
    last: int | None, in_use_milli: int, *, silent_ms: int, patience_ms: int, least_milli: int = 0
) -> int:
    """Return the count while no broker answers: the last count for `patience_ms`, then what is in use. It is at least `least_milli`."""
    if last is None or silent_ms >= patience_ms:
        return max(least_milli, in_use_milli, 0)
    return max(least_milli, last, in_use_milli, 0)


def rounded_wait_ms(wait_ms: int) -> int:
    """Round a wait up to 1, 2 or 5 times a power of ten, and to at least 100 ms, to hide small changes. A wait of 0 stays 0."""
    if wait_ms <= 0:
        return 0
    step = 100
    while True:
        for factor in (1, 2, 5):
            if wait_ms <= step * factor:
                return step * factor
        step *= 10


def rounded_memory_mib(mib: int) -> int:
    """Round the size down to five significant binary digits, to hide small changes."""
    if mib < 16:
        return max(0, mib)
    step = 1 << (mib.bit_length() - 5)
    return mib // step * step


State = TypeVar("State")
_MASK = (1 << 64) - 1
_FIRST_RETRY_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingRules:
    """Limits on how often a node agent writes its state to Slurm or Kubernetes, in milliseconds."""

    floor_ms: int = 5000
    jitter_ms: int = 2000
    longest_retry_ms: int = 120_000


def spread(number: int, bound: int) -> int:
    """Hash a number to a value from 0 to `bound`, so that neighbouring numbers give very different results.

    It uses splitmix64, because this package must not use `random`.
    """
    mixed = (number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) % (bound + 1)


class Pacing(Generic[State]):
    """Decides when a node agent writes its state. Writes are limited because hundreds of agents share one controller.

    An agent writes its state only if its engine (Slurm or Kubernetes) has a different one, and no sooner than `floor_ms` after its last
    attempt. A random delay of up to `jitter_ms` keeps agents that saw the same event from writing at the same time. Further changes do not
    postpone the write, which uses the latest state. Failed writes are retried after jittered pauses that double up to `longest_retry_ms`.

    If writes succeed, a state that doesn't change again is written within `floor_ms + jitter_ms` of first appearing. Times are in ms on any
    monotonic clock. Give each agent a different seed, so that their writes are spread out.
    """

    def __init__(self, rules: PacingRules, seed: int) -> None:
        self._rules = rules
        self._random = seed & _MASK
        self._wanted: State | None = None
        self._known: State | None = None  # the engine's state, or None if it is unknown
        self._due_ms: int | None = None
        self._attempt_ms: int | None = None  # the last attempt
        self._failures = 0

    def want(self, now_ms: int, state: State) -> None:
        """Set the state that Slurm or Kubernetes should have for this node."""
        self._wanted = state
        self._plan(now_ms)

    def saw(self, now_ms: int, state: State | None) -> None:
        """Record the state that Slurm or Kubernetes has, or None if it is unknown. An administrator or a restart might have changed it."""
        self._known = state
        self._plan(now_ms)

    def due(self, now_ms: int) -> State | None:
        """Return the state to write now, or None. After writing it, the caller must call `written` or `failed`."""
        if self._due_ms is None or now_ms < self._due_ms:
            return None
        return self._wanted

    def next_ms(self) -> int | None:
        """Return the time at which the next write is due, or None if no write is due."""
        return self._due_ms

    def written(self, now_ms: int, state: State) -> None:
        """Record a successful write."""
        self._known, self._attempt_ms, self._failures, self._due_ms = state, now_ms, 0, None
        self._plan(now_ms)

    def failed(self, now_ms: int) -> None:
        """Record a failed write. Afterwards, it is unknown which state Slurm or Kubernetes has."""
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
