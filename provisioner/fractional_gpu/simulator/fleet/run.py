"""A run under the arbiter, on one clock or host by host: which of them follows from how sessions are given their hosts."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.felt import Goal
from fractional_gpu.simulator.fleet.apart import simulate_apart
from fractional_gpu.simulator.fleet.placing import PlaceRule, choose_hosts
from fractional_gpu.simulator.hosts import DoorRule
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.metering import RunMeter
from fractional_gpu.simulator.record import EventLog
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.revocation import Revocation
from fractional_gpu.simulator.simulation import Progress, simulate
from fractional_gpu.simulator.traces import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How sessions are given their hosts.

    By a `DoorRule` as they open, and all hosts run on one clock; or by a `PlaceRule` beforehand, with draws by `seed`, and each host runs
    by itself in one of so many `processes`.
    """

    rule: DoorRule | PlaceRule = DoorRule.FIT
    seed: int = 1
    processes: int = 1


BY_THE_DOOR = Way()


def run(
    hosts: Sequence[Host],
    trace: Sequence[Session],
    way: Way,
    *,
    name: str = "fractional",
    record: Path | None = None,
    goal: Goal | None = None,
    progress: Progress | None = None,
    placing: Progress | None = None,
    meter: RunMeter | None = None,
    revocation: Revocation | None = None,
) -> Result:
    """Run the trace and return its figures under that name. `record` is a file; hosts that run by themselves have one each beside it.

    `progress` is given the sessions that ended, and all; `placing` those that have their host, where they are placed beforehand.
    A run that cannot reach the goal any more is given up there. `meter` counts what the leases use, and `revocation` takes devices away,
    where all hosts run on one clock.
    Raises SimulationError for a session that no host can serve.
    """
    if isinstance(way.rule, PlaceRule):
        if meter is not None:
            raise SimulationError(
                "hosts that run by themselves cannot be metered; give sessions their hosts at the door"
            )
        if revocation is not None:
            raise SimulationError(
                "no devices go away from hosts that run by themselves; give sessions their hosts at the door"
            )
        chosen = choose_hosts(hosts, trace, way.rule, way.seed, placing)
        return simulate_apart(
            hosts, trace, chosen, name=name, processes=way.processes, record=record, goal=goal, progress=progress
        )
    with ExitStack() as stack:
        log = None
        if record is not None:
            log = stack.enter_context(EventLog(record, hosts, trace, door=way.rule, name=name))
        result = simulate(
            hosts,
            trace,
            door=way.rule,
            record=log,
            progress=progress,
            goal=goal,
            meter=meter,
            revocation=revocation,
        )
    result.name = name
    return result
