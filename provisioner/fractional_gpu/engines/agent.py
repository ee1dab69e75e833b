"""The node agent: reads what the broker could still give, and writes it into the engine as counts and a summary.

In each step:

1. The broker is asked (a UNIX socket: cheap, every second or two). What it says gives the wanted counts (`core.nodes.counts`).
2. The node's record is read from the engine now and then, and before each write. What differs from the wanted state is written again:
   `scontrol reconfigure`, a controller that restarts and an administrator all set counts back.
3. A write happens when the pace allows (`core.nodes.pacing`): so the engine sees a change at most once in `floor_ms`, a read once in
   `look_ms`, from each agent.

A broker that does not answer: the last count stays for `patience_ms`, then it is lowered to what is in use, and the summary says why.
A controller that does not answer: the agent tries again ever more rarely. The agent ends nothing and starts nothing; when it ends
itself, the counts stay as they are.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.core.nodes.counts import NodeShares, count_of, count_without_broker
from fractional_gpu.core.nodes.pacing import Pacing, PacingRules, spread
from fractional_gpu.engines.engine import Engine, EngineError, NodeRecord, NodeWrite
from fractional_gpu.engines.summary import says_the_same, summary_of, summary_without_broker
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.nodes import Capacity, NodeSummary, PoolCapacity, encode_summary
from fractional_gpu.protocol.status import SeatStatus

__all__ = ["Agent", "AgentRules", "Observation"]

_MS = 1_000_000  # nanoseconds
_LONGEST_LOOK_MS = 60_000
_WHOLE = 1000  # milli-GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRules:
    """The agent's times in milliseconds, and the engine's name for the thousandths of each pool.

    `asked`: the names by which jobs ask for them, where those are other ones; by pool.
    """

    counts: Mapping[str, str] = field(default_factory=lambda: {"default": "jgpu"})
    asked: Mapping[str, str] = field(default_factory=dict)
    pacing: PacingRules = field(default_factory=PacingRules)
    look_ms: int = 30_000  # how often the engine's record is read
    heartbeat_ms: int = 300_000  # how often an unchanged summary is written anew
    refuses_beyond: bool = (
        True  # the engine refuses requests that no node's count covers, in place of letting them wait
    )
    patience_ms: int = 120_000  # how long the last count stays without a broker


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    capacity: Capacity
    seats: list[SeatStatus]


class Agent:
    """The agent of one node. `connect` returns a client of the broker; `is_ours`: whether a seat is one of the engine's jobs.

    `say` is given a line for the log, once for each change. `after_look` is called after each good observation, at most once in
    `look_ms`, with the client: for what else the engine needs of the broker.
    """

    def __init__(
        self,
        engine: Engine,
        connect: Callable[[], SeatClient],
        rules: AgentRules,
        *,
        is_ours: Callable[[SeatStatus], bool],
        seed: int,
        say: Callable[[str], None],
        after_look: Callable[[SeatClient, list[SeatStatus]], None] | None = None,
        clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // _MS,
        wall_s: Callable[[], int] = lambda: int(time.time()),
    ) -> None:
        self._engine = engine
        self._connect = connect
        self._rules = rules
        self._is_ours = is_ours
        self._say = say
        self._after_look = after_look
        self._clock_ms = clock_ms
        self._wall_s = wall_s
        self._pacing: Pacing[NodeWrite] = Pacing(rules.pacing, seed)
        self._seed = seed
        self._seen: Observation | None = None
        self._silent_since_ms: int | None = None
        self._record: NodeRecord | None = None
        self._looked_ms: int | None = None
        self._look_failures = 0
        self._looks = 0
        self._kept_ms: int | None = None
        self._look_pause_ms = 0
        self._written: NodeSummary | None = None  # what was written last, ...
        self._written_ms = 0  # ... and when
        self._next: NodeSummary | None = None  # what the next write publishes
        self._counts: dict[str, int] = {}  # that were written last
        self._said: dict[str, str] = {}

    # -- steps -------------------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Do what is due, and return after how many milliseconds something may be due again (the broker aside)."""
        now = self._clock_ms()
        self._observe(now)
        if self._look_is_due(now):
            self._look(now)
        if self._record is not None:
            self._pacing.want(now, self._wanted(now, self._record))
            if self._pacing.due(now) is not None:
                self._write(now)
        times = [due for due in (self._pacing.next_ms(), self._next_look_ms()) if due is not None]
        return max(0, min(times) - self._clock_ms()) if times else 0

    def once(self) -> NodeWrite:
        """Observe, read and write at once, whatever the pace. Raises FractionalGPUError where the broker or the engine does not answer."""
        now = self._clock_ms()
        with closing(self._connect()) as client:
            self._seen = Observation(capacity=client.capacity(), seats=client.seats().seats)
            if self._after_look is not None:
                self._after_look(client, self._seen.seats)
        self._record = self._engine.read_node()
        wanted = self._wanted(now, self._record)
        self._engine.write_node(wanted, self._record)
        return wanted

    # -- the broker --------------------------------------------------------------------------------------------------------

    def _observe(self, now: int) -> None:
        try:
            with closing(self._connect()) as client:
                self._seen = Observation(capacity=client.capacity(), seats=client.seats().seats)
                self._silent_since_ms = None
                self._tell("broker", "")
                if self._after_look is not None and (
                    self._kept_ms is None or now >= self._kept_ms + self._rules.look_ms // 3
                ):
                    self._kept_ms = now
                    self._after_look(client, self._seen.seats)
        except FractionalGPUError as error:
            if self._silent_since_ms is None:
                self._silent_since_ms = now
            self._tell("broker", f"the broker does not answer: {error}")

    def _wanted(self, now: int, record: NodeRecord) -> NodeWrite:
        """Return what the engine should have, by the last observation."""
        counts = self._wanted_counts(now, record)
        summary = self._wanted_summary(now)
        fresh = now - self._written_ms < self._rules.heartbeat_ms
        if fresh and self._written is not None and says_the_same(summary, self._written):
            summary = self._written
        self._next = summary
        return NodeWrite(counts=counts, summary=encode_summary(summary))

    def _wanted_counts(self, now: int, record: NodeRecord) -> dict[str, int]:
        known = {pool: name for pool, name in self._rules.counts.items() if name in record.counts}
        missing = sorted(set(self._rules.counts.values()) - set(known.values()))
        self._tell("counts", self._about_missing(missing) if missing else "")
        counts = {}
        pools = {pool.name: pool for pool in self._seen.capacity.pools} if self._seen is not None else {}
        for pool, name in known.items():
            in_use = record.in_use.get(name, 0)
            if self._silent_since_ms is not None or self._seen is None:
                silent_ms = now - (self._silent_since_ms if self._silent_since_ms is not None else now)
                last = self._counts.get(name)
                counts[name] = count_without_broker(
                    last,
                    in_use,
                    silent_ms=silent_ms,
                    patience_ms=self._rules.patience_ms,
                    least_milli=self._least(pools.get(pool)),
                )
                continue
            there = pools.get(pool)
            self._tell(
                f"pool {pool}", "" if there else f"the broker has no pool {pool!r}: its count {name} is what is in use"
            )
            shares = NodeShares(
                seated_milli=self._seated(pool),
                admissible_milli=there.admissible_milli if there is not None else 0,
                in_use_milli=in_use,
            )
            counts[name] = count_of(shares, least_milli=self._least(there)) if there is not None else in_use
        return {name: min(count, record.most.get(name, count)) for name, count in counts.items()}

    def _least(self, pool: PoolCapacity | None) -> int:
        """Return the largest share on offer where the engine refuses what no count covers, else 0. milli-GPU."""
        if not self._rules.refuses_beyond:
            return 0
        return max(pool.fractions_milli) if pool is not None and pool.fractions_milli else _WHOLE

    def _about_missing(self, names: list[str]) -> str:
        return (
            f"the node has no {', '.join(names)} in the engine: its counts are not written, only the summary; "
            "`jupyter gpu node doctor` says what to add"
        )

    def _seated(self, pool: str) -> int:
        """Return what this engine's jobs hold of the pool by their seats, milli-GPU."""
        return sum(
            seat.fraction_milli
            for seat in (self._seen.seats if self._seen is not None else ())
            if seat.pool == pool and self._is_ours(seat)
        )

    def _wanted_summary(self, now: int) -> NodeSummary:
        if self._silent_since_ms is not None and now - self._silent_since_ms >= self._rules.patience_ms:
            return summary_without_broker(self._written, "the node's broker does not answer", self._wall_s())
        if self._seen is None:
            return summary_without_broker(self._written, "the node's broker has not answered yet", self._wall_s())
        return summary_of(self._seen.capacity, {**self._rules.counts, **self._rules.asked}, self._wall_s())

    # -- the engine --------------------------------------------------------------------------------------------------------

    def _next_look_ms(self) -> int | None:
        if self._looked_ms is None:
            return None
        return self._looked_ms + self._look_pause_ms

    def _look_is_due(self, now: int) -> bool:
        due = self._next_look_ms()
        return due is None or now >= due

    def _look(self, now: int) -> bool:
        """Read the node's record; return whether it could be read."""
        self._looked_ms = now
        self._looks += 1
        pause_ms = self._rules.look_ms
        try:
            self._record = self._engine.read_node()
            self._look_failures = 0
        except EngineError as error:
            self._look_failures += 1
            pause_ms = max(pause_ms, min(pause_ms << min(self._look_failures, 4), _LONGEST_LOOK_MS))
            self._tell("engine", str(error))
            return False
        finally:  # agents that were started together do not read together for long
            self._look_pause_ms = pause_ms - spread(self._seed + self._looks, pause_ms // 4)
        counts = {
            name: self._record.counts.get(name, -1)
            for name in self._rules.counts.values()
            if name in self._record.counts
        }
        seen = NodeWrite(counts=counts, summary=self._record.summary)
        if self._counts and counts != self._counts:
            self._tell("reset", f"the counts were changed to {_shown(counts)} by another: they are written again")
        self._pacing.saw(now, seen)
        return True

    def _write(self, now: int) -> None:
        """Read the record again, since what is in use bounds the count, and write."""
        if not self._look(now) or (record := self._record) is None:
            self._pacing.failed(now)
            return
        wanted = self._wanted(now, record)
        self._pacing.want(now, wanted)
        if self._pacing.next_ms() is None:  # another has written the same, or the change is gone
            return
        try:
            self._engine.write_node(wanted, record)
        except EngineError as error:
            self._pacing.failed(now)
            self._tell("engine", str(error))
            return
        self._pacing.written(now, wanted)
        self._tell("engine", "")
        self._tell("reset", "")
        if wanted.counts != self._counts:
            self._say(
                f"{_shown(wanted.counts)} (in use: {_shown({name: record.in_use.get(name, 0) for name in wanted.counts})})"
            )
        self._counts = dict(wanted.counts)
        self._written, self._written_ms = self._next, now

    def _tell(self, about: str, what: str) -> None:
        """Say it unless it was the last thing said about this; an empty text ends a trouble, and says so."""
        if self._said.get(about, "") == what:
            return
        if what:
            self._say(what)
        elif about in ("broker", "engine"):
            self._say(f"the {about} answers again")
        self._said[about] = what


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}:{count}" for name, count in sorted(counts.items())) or "no counts"
