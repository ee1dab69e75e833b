"""A run behind an engine: by whole GPUs, by static shares, or by counts that each node's broker forecasts."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.baselines import run_baseline
from fractional_gpu.simulator.cluster.node import WaitTerms
from fractional_gpu.simulator.cluster.queue import later, starts
from fractional_gpu.simulator.felt import Spread
from fractional_gpu.simulator.fleet.apart import simulate_apart
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.simulation import Progress
from fractional_gpu.simulator.traces import Session

__all__ = ["EngineDoor", "run_engine"]


class EngineDoor(StrEnum):
    """What the engine knows of a node."""

    WHOLE = "engine-whole"  # how many of its GPUs no job has
    SHARDS = "engine-shards"  # what of each GPU no job has: a job's share is on one GPU from begin to end
    COUNT = "engine-count"  # how many thousandths its broker would still give away


_BASELINES = {EngineDoor.WHOLE: "reservation", EngineDoor.SHARDS: "static-fraction"}


def run_engine(
    hosts: Sequence[Host],
    trace: Sequence[Session],
    door: EngineDoor,
    *,
    terms: WaitTerms | None = None,
    processes: int = 1,
    record: Path | None = None,
    progress: Progress | None = None,
    placing: Progress | None = None,
) -> Result:
    """Run the trace behind the engine; `doors` of the result are the waits in its queue.

    `terms`: of the pool, for the counts. `processes`: so many hosts run at a time. `record` is a file, or with counts one for each host
    beside it. `progress` is given the sessions that ended, and all; `placing` those that the engine has seen end. Raises SimulationError
    for a session that no host can serve, or for which no count is ever enough.
    """
    if door in _BASELINES:
        result = run_baseline(_BASELINES[door], hosts, trace, record=record, progress=progress)
        result.name = door.value
        return result
    begun = starts(hosts, trace, terms if terms is not None else WaitTerms(), placing)
    for session, host in zip(trace, begun.hosts, strict=True):
        if host < 0:
            raise SimulationError(
                f"session {session.session_id!r} never begins: no node's count is ever enough for what it asks for; simulate larger "
                "hosts, a wider wait_bound (--policy), or leave such sessions out"
            )
    run = [later(session, waited) for session, waited in zip(trace, begun.waited_ms, strict=True)]
    result = simulate_apart(
        hosts, run, begun.hosts, name=door.value, processes=processes, record=record, progress=progress
    )
    return replace(result, doors=Spread.of(begun.waited_ms))
