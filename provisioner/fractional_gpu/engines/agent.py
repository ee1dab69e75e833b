"""Runs the node agent, which asks the broker how much more it could grant, and reports this to the engine as counts and a summary.

1. It asks the broker every second or two, and computes the counts from the answer (`core.nodes`).
2. It reads the node's record periodically and before each write. It rewrites counts that differ, because `scontrol reconfigure`, a
   restarted controller or an administrator may have reset them.
3. It makes at most one write per `floor_ms`, and about one read per `look_ms`, not counting reads before writes.

If the broker does not answer, the last count is kept for `patience_ms` and then drops to the amount in use. If the controller does not
answer, the agent retries at increasing intervals. The agent never starts or ends jobs, and the counts stay in place when it exits.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.core.nodes import (
    Pacing,
    PacingRules,
    count_of,
    count_without_broker,
    rounded_memory_mib,
    rounded_wait_ms,
    spread,
)
from fractional_gpu.engines.engine import Engine, EngineError, NodeRecord, NodeWrite
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.nodes import Capacity, NodeSummary, PoolCapacity, PoolShares, PoolSummary, encode_summary
from fractional_gpu.protocol.status import SeatStatus

_MS = 1_000_000  # nanoseconds
_LONGEST_LOOK_MS = 60_000
_WHOLE = 1000  # milli-GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRules:
    """The agent's intervals, and the names of the resources (Slurm's GRES, Kubernetes' extended resources) that count milli-GPU.

    `counts` maps each pool to its resource. `asked` maps a pool to the name that jobs use to request its resource, if different.
    """

    counts: Mapping[str, str] = field(default_factory=lambda: {"default": "jgpu"})
    asked: Mapping[str, str] = field(default_factory=dict)
    pacing: PacingRules = field(default_factory=PacingRules)
    look_ms: int = 30_000  # how often the engine's record is read
    heartbeat_ms: int = 300_000  # how often an unchanged summary is rewritten
    refuses_beyond: bool = True  # whether the engine refuses a request that exceeds every node's count, or lets it wait
    patience_ms: int = 120_000  # how long the last count is kept while the broker does not answer


class Agent:
    """The agent for one node. `connect` returns a client for the broker, and `is_ours` returns whether a seat is for a job on this node.

    `say` is called with a log line for each change. `after_look` does any other work for the engine that needs the broker. It is called
    with the client and the seats when the broker has answered, about three times per `look_ms`.
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
        self._capacity: Capacity | None = None  # the broker's last answer
        self._seats: list[SeatStatus] = []
        self._silent_since_ms: int | None = None
        self._kept_ms: int | None = None
        self._record: NodeRecord | None = None
        self._look_ms = -1  # when to read the record next
        self._look_failures = 0
        self._looks = 0
        self._written: NodeSummary | None = None  # the summary that was written last
        self._written_ms = 0  # when it was written
        self._next: NodeSummary | None = None  # the summary for the next write
        self._counts: Mapping[str, int] = {}  # the counts that were written last
        self._said: dict[str, str] = {}

    def step(self) -> int:
        """Do all work that is due, and return how many milliseconds to wait until the next read from or write to the engine."""
        now = self._clock_ms()
        try:
            self._ask_broker(now)
            self._silent_since_ms = None
            self._tell("broker", "")
        except FractionalGPUError as error:
            if self._silent_since_ms is None:
                self._silent_since_ms = now
            self._tell("broker", f"the broker is not responding: {error}")
        if now >= self._look_ms:
            self._look(now)
        if self._record is not None:
            self._pacing.want(now, self._wanted(now, self._record))
            if self._pacing.due(now) is not None:
                self._write(now)
        write_ms = self._pacing.next_ms()
        return max(0, min(self._look_ms, self._look_ms if write_ms is None else write_ms) - self._clock_ms())

    def once(self) -> NodeWrite:
        now = self._clock_ms()
        self._ask_broker(now)
        record = self._engine.read_node()
        wanted = self._wanted(now, record)
        self._engine.write_node(wanted, record)
        return wanted

    def _ask_broker(self, now: int) -> None:
        with closing(self._connect()) as client:
            self._capacity, self._seats = client.capacity(), client.seats().seats
            is_due = self._kept_ms is None or now >= self._kept_ms + self._rules.look_ms // 3
            if self._after_look is not None and is_due:
                self._kept_ms = now
                self._after_look(client, self._seats)

    def _wanted(self, now: int, record: NodeRecord) -> NodeWrite:
        summary, written = self._wanted_summary(now), self._written
        fresh = now - self._written_ms < self._rules.heartbeat_ms
        if fresh and written is not None and summary == structs.replace(written, at_s=summary.at_s):
            summary = written
        self._next = summary
        return NodeWrite(counts=self._wanted_counts(now, record), summary=encode_summary(summary))

    def _wanted_counts(self, now: int, record: NodeRecord) -> dict[str, int]:
        known = {pool: name for pool, name in self._rules.counts.items() if name in record.counts}
        missing = ", ".join(sorted(set(self._rules.counts.values()) - set(known.values())))
        self._tell(
            "counts",
            f"the engine's record of this node lacks {missing}, so only the node's summary is written and not these counts; "
            "`jupyter gpu node doctor` says what to add"
            if missing
            else "",
        )
        counts = {}
        pools = {pool.name: pool for pool in self._capacity.pools} if self._capacity is not None else {}
        for pool, name in known.items():
            there, in_use = pools.get(pool), record.in_use.get(name, 0)
            if self._silent_since_ms is not None or self._capacity is None:
                counts[name] = count_without_broker(
                    self._counts.get(name),
                    in_use,
                    silent_ms=now - self._silent_since_ms if self._silent_since_ms is not None else 0,
                    patience_ms=self._rules.patience_ms,
                    least_milli=self._least(there),
                )
                continue
            self._tell(
                f"pool {pool}",
                "" if there else f"the broker has no pool {pool!r}, so the count {name} is set to what is in use",
            )
            counts[name] = in_use
            if there is not None:
                seated = sum(seat.fraction_milli for seat in self._seats if seat.pool == pool and self._is_ours(seat))
                counts[name] = count_of(
                    seated_milli=seated,
                    admissible_milli=there.admissible_milli,
                    in_use_milli=in_use,
                    least_milli=self._least(there),
                )
        return {name: min(count, record.most.get(name, count)) for name, count in counts.items()}

    def _least(self, pool: PoolCapacity | None) -> int:
        """Return the lowest count to write. This is the pool's largest share, or 0 if the engine queues requests that exceed the counts."""
        if not self._rules.refuses_beyond:
            return 0
        return max(pool.fractions_milli) if pool is not None and pool.fractions_milli else _WHOLE

    def _wanted_summary(self, now: int) -> NodeSummary:
        problem = "" if self._capacity is not None else "the node's broker has not answered yet"
        if self._silent_since_ms is not None and now - self._silent_since_ms >= self._rules.patience_ms:
            problem = "the node's broker is not responding"
        if self._capacity is not None and not problem:
            return summary_of(self._capacity, {**self._rules.counts, **self._rules.asked}, self._wall_s())
        last = self._written or NodeSummary(at_s=0)
        nothing_free = [structs.replace(pool, admissible_milli=0) for pool in last.pools]
        return NodeSummary(at_s=self._wall_s(), simulated=last.simulated, pools=nothing_free, problem=problem)

    def _look(self, now: int) -> bool:
        self._looks += 1
        pause_ms = self._rules.look_ms
        try:
            record = self._record = self._engine.read_node()
            self._look_failures = 0
        except EngineError as error:
            self._look_failures += 1
            pause_ms = max(pause_ms, min(pause_ms << min(self._look_failures, 4), _LONGEST_LOOK_MS))
            self._tell("engine", str(error))
            return False
        finally:  # spread the reads of agents that started at the same time
            self._look_ms = now + pause_ms - spread(self._seed + self._looks, pause_ms // 4)
        counts = {name: record.counts[name] for name in self._rules.counts.values() if name in record.counts}
        if self._counts and counts != self._counts:
            self._tell("reset", f"another program changed the counts to {_shown(counts)}; writing them again")
        self._pacing.saw(now, NodeWrite(counts=counts, summary=record.summary))
        return True

    def _write(self, now: int) -> None:
        """Write the counts and the summary. The record is read again first, because the counts depend on the amount in use."""
        if not self._look(now) or (record := self._record) is None:
            self._pacing.failed(now)
            return
        wanted = self._wanted(now, record)
        self._pacing.want(now, wanted)
        if self._pacing.next_ms() is None:  # the engine already has these counts
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
            in_use = {name: record.in_use.get(name, 0) for name in wanted.counts}
            self._say(f"{_shown(wanted.counts)} (in use: {_shown(in_use)})")
        self._counts = wanted.counts
        self._written, self._written_ms = self._next, now

    def _tell(self, about: str, what: str) -> None:
        """Log a message unless it repeats the last one about this subject. An empty message means the problem is over."""
        if self._said.get(about, "") == what:
            return
        if what:
            self._say(what)
        elif about in ("broker", "engine"):
            self._say(f"the {about} is responding again")
        self._said[about] = what


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}:{count}" for name, count in sorted(counts.items())) or "no counts"


def summary_of(capacity: Capacity, counts: Mapping[str, str], at_s: int) -> NodeSummary:
    """Return the public summary of the pools in `counts`. Its figures are rounded so that it doesn't change often.

    `counts` maps each pool to the name of the resource (Slurm's GRES, Kubernetes' extended resource) that its jobs request.
    """
    pools = []
    for pool in capacity.pools:
        if pool.name in counts:
            fields: dict[str, Any] = {name: getattr(pool, name) for name in PoolShares.__struct_fields__}
            pools.append(
                PoolSummary(
                    **fields,
                    devices=len(pool.devices),
                    wait_p50_ms=rounded_wait_ms(round(pool.wait_p50_s * 1000)),
                    wait_p95_ms=rounded_wait_ms(round(pool.wait_p95_s * 1000)),
                    count=counts[pool.name],
                )
            )
    memory_mib = rounded_memory_mib(capacity.host_memory_left_mib)
    return NodeSummary(at_s=at_s, simulated=capacity.simulated, memory_left_mib=memory_mib, pools=pools)
