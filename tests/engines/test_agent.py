"""The agent's decisions, in virtual time: what it writes to an engine, when, and what it logs. No processes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.core.nodes import PacingRules
from fractional_gpu.engines.agent import Agent, AgentRules
from fractional_gpu.engines.engine import EngineUnavailableError, NodeRecord, NodeWrite
from fractional_gpu.protocol.errors import BrokerUnavailableError
from fractional_gpu.protocol.nodes import Capacity, PoolCapacity, parse_summary
from fractional_gpu.protocol.seats import SeatList
from fractional_gpu.protocol.status import SeatStatus

pytestmark = pytest.mark.promise("slurm")


@dataclass
class World:
    """An engine, a broker and a clock that the test sets."""

    now_ms: int = 0
    admissible: int = 2000
    seats: list[SeatStatus] = field(default_factory=list)
    broker_down: bool = False
    engine_down: bool = False
    counts: dict[str, int] = field(default_factory=lambda: {"jgpu": 1000})
    used: int = 0
    summary: str = ""
    reads: int = 0
    writes: list[tuple[int, NodeWrite]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    # the broker

    def capacity(self) -> Capacity:
        pool = PoolCapacity(
            name="default",
            devices=["GPU-0"],
            total_milli=1000,
            held_milli=0,
            admissible_milli=self.admissible,
            waiting=0,
            wait_p50_s=0.0,
            wait_p95_s=1.5,
            fraction_milli=250,
            fractions_milli=[250],
            wait_target_ms=30_000,
            wait_bound_milli=50,
        )
        return Capacity(version="1", simulated=True, host_memory_total_mib=1000, host_memory_left_mib=500, pools=[pool])

    def close(self) -> None:
        pass

    def connect(self) -> SeatClient:
        if self.broker_down:
            raise BrokerUnavailableError("no broker listens")
        world = self

        class Client:
            capacity = staticmethod(world.capacity)
            seats = staticmethod(lambda: SeatList(seats=world.seats))
            close = staticmethod(world.close)

        return cast("SeatClient", Client())

    # the engine

    def read_node(self) -> NodeRecord:
        self.reads += 1
        if self.engine_down:
            raise EngineUnavailableError("slurmctld is down")
        return NodeRecord(
            counts=dict(self.counts), in_use={"jgpu": self.used}, most={"jgpu": 4000}, summary=self.summary
        )

    def write_node(self, write: NodeWrite, record: NodeRecord) -> None:
        assert record.most == {"jgpu": 4000}
        if self.engine_down:
            raise EngineUnavailableError("slurmctld is down")
        self.writes.append((self.now_ms, write))
        self.counts = dict(write.counts)
        self.summary = write.summary

    # time

    def agent(self, seed: int = 1, after_look: Callable[..., None] | None = None) -> Agent:
        return Agent(
            self,
            self.connect,
            AgentRules(pacing=PacingRules(floor_ms=5000, jitter_ms=2000), asked={"default": "jgpu:open"}),
            is_ours=lambda _: True,
            seed=seed,
            say=self.said.append,
            after_look=after_look,
            clock_ms=lambda: self.now_ms,
            wall_s=lambda: 1_000_000 + self.now_ms // 1000,
        )

    def run(self, agent: Agent, seconds: int) -> None:
        """Step as the process does: every 2 s, and when something is due."""
        end = self.now_ms + seconds * 1000
        while self.now_ms < end:
            pause = min(2000, max(50, agent.step()))
            self.now_ms = min(end, self.now_ms + pause)


def test_it_writes_once_and_then_on_change() -> None:
    world = World()
    agent = world.agent()
    world.run(agent, 200)
    assert [write.counts for _, write in world.writes] == [{"jgpu": 2000}]
    world.admissible = 1500
    world.run(agent, 20)
    assert world.counts == {"jgpu": 1500}
    summary = parse_summary(world.summary)
    assert [(pool.count, pool.admissible_milli, pool.wait_p95_ms) for pool in summary.pools] == [
        ("jgpu:open", 1500, 2000)
    ]


def test_a_state_that_changes_all_the_time_is_written_at_most_once_in_the_floor_and_read_before() -> None:
    world = World()
    agent = world.agent()
    for admissible in range(0, 3000, 10):
        world.admissible = admissible
        world.run(agent, 1)
    times = [at for at, _ in world.writes]
    assert len(times) >= 300 // 8
    assert all(later - earlier >= 5000 for earlier, later in pairwise(times))
    assert world.reads <= len(times) + 300 // 20 + 1


def test_counts_that_others_changed_are_written_again_within_a_look() -> None:
    world = World()
    agent = world.agent()
    world.run(agent, 60)
    world.counts = {"jgpu": 1000}  # `scontrol reconfigure`
    world.run(agent, 40)
    assert world.counts == {"jgpu": 2000}
    assert any("another program changed the counts to jgpu:1000" in line for line in world.said)


def test_a_count_is_never_below_what_is_in_use_and_never_above_what_may_be() -> None:
    world = World(admissible=0, used=700)
    world.run(world.agent(), 10)
    assert world.counts == {"jgpu": 700}
    world = World(admissible=9000)
    world.run(world.agent(), 200)
    assert world.counts == {"jgpu": 4000}
    assert len(world.writes) == 1


def test_without_a_broker_the_count_stays_for_a_while_and_is_then_lowered() -> None:
    world = World(used=300)
    agent = world.agent()
    world.run(agent, 30)
    before = dict(world.counts)
    world.broker_down = True
    world.run(agent, 100)
    assert world.counts == before
    world.run(agent, 60)
    assert world.counts == {"jgpu": 300}
    summary = parse_summary(world.summary)
    assert summary.problem == "the node's broker is not responding"
    assert [pool.admissible_milli for pool in summary.pools] == [0]
    world.broker_down = False
    world.run(agent, 20)
    assert world.counts == before
    assert [line for line in world.said if "broker" in line] == [
        "the broker is not responding: no broker listens",
        "the broker is responding again",
    ]


def test_an_agent_that_starts_without_a_broker_opens_one_device_only() -> None:
    """Not 0: then Slurm would refuse new jobs and hold waiting ones, instead of letting them wait."""
    world = World(broker_down=True, counts={"jgpu": 4000})
    world.run(world.agent(), 20)
    assert world.counts == {"jgpu": 1000}


def test_a_controller_that_is_down_is_tried_ever_more_rarely_and_said_once() -> None:
    world = World()
    agent = world.agent()
    world.run(agent, 30)
    world.engine_down, world.admissible, world.reads = True, 1000, 0
    world.run(agent, 3600)
    assert world.reads <= 150
    assert world.said.count("slurmctld is down") == 1
    world.engine_down = False
    world.run(agent, 180)
    assert world.counts == {"jgpu": 1000}
    assert world.said.count("the engine is responding again") == 1
