"""Simulates a trace of notebook sessions in virtual time. Each host runs the same arbiter that the broker uses in real time.

One heap contains the moments of all hosts, ordered by time and then by when they were scheduled. The consequences of an arbiter's effects
are scheduled as later moments. Nothing depends on a real clock or on hash order. A session is assigned to a host when it opens (`hosts`),
stays there, and is run by `one_host`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from fractional_gpu.core.forecasts.outcomes import ForecastOutcome
from fractional_gpu.core.model import LeaseSpec
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.hosts import Door, Machine, Moments, hosts_of
from fractional_gpu.simulator.metering import RunMeter
from fractional_gpu.simulator.one_host import HostRun, RunState, Watch
from fractional_gpu.simulator.record import EventLog
from fractional_gpu.simulator.result import Accounts, Result, begin_result
from fractional_gpu.simulator.traces import Session

Progress = Callable[[int, int], None]


def simulate(
    machine: Machine,
    trace: Sequence[Session],
    *,
    name: str = "fractional",
    door: Door | None = None,
    watch: Watch | None = None,
    record: EventLog | None = None,
    progress: Progress | None = None,
    goal: Goal | None = None,
    meter: RunMeter | None = None,
    judged: Callable[[ForecastOutcome], None] | None = None,
) -> Result:
    """Run the trace on one host, or on several. `door` chooses each session's host (by default, using `DoorRule.FIT`).

    `watch` is called with every event and its effects, `progress` with the number of ended sessions and the total, and `judged` with each
    forecast and its outcome. `meter` does not affect decisions. The run stops once it can no longer meet the `goal`. Raises SimulationError
    for a session that no host can serve.
    """
    hosts = hosts_of(machine)
    gate = door if door is not None else Door(hosts, trace)
    result, moments = begin_result(name, trace, hosts, goal), Moments()
    accounts = Accounts(result, hosts)
    if meter is not None:
        meter.begin(hosts)
    ended = 0

    def ends() -> None:
        nonlocal ended
        ended += 1
        if progress is not None:
            progress(ended, len(trace))

    def over(host: int, lease: LeaseSpec) -> None:
        gate.closed(host, lease)
        if gate.queue:
            moments.at(moments.now_ms + gate.notice_ms, serve)

    state = RunState(moments=moments, accounts=accounts, watch=watch, record=record, meter=meter, over=over, ended=ends)
    runs = [HostRun(number, host, state) for number, host in enumerate(hosts)]

    def opens(session: Session) -> None:
        gate.queue.append(session)
        serve()

    def serve() -> None:
        for session, host, lease in gate.admitted():
            runs[host].open(session, lease)

    def passing(at_ms: int) -> None:
        accounts.advance(at_ms)
        if meter is not None:
            meter.advance(at_ms)

    for run in runs:
        run.arbiter.forecasts.watch = judged
        run.begin()
    for session in trace:
        moments.at(session.open_ms, partial(opens, session))
    moments.run(passing, until=lambda: bool(result.experience.hopeless))
    for run in runs:
        run.arbiter.validate()
        result.errors.append(run.arbiter.forecasts.errors())
    accounts.finish()
    if meter is not None:
        meter.finish(moments.now_ms)
    result.lost += len(trace) - sum(run.over for run in runs)
    result.closed_ms = max((run.closed_ms for run in runs), default=0)
    result.finish(trace)
    return result
