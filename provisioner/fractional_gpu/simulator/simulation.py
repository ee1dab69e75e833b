"""Virtual time: a trace of notebook sessions drives the same arbiter that the broker drives in real time, one on each host.

- One heap of (time, order) moments for all hosts; an arbiter's effects come back as later moments; nothing depends on a clock or on
  hash order. A session is given its host when it opens (`hosts`), and stays there; what happens there is in `one_host`.
- Device memory is counted a second time, in `accounts`; `lost` counts sessions that could not run to their end.
"""

from collections.abc import Callable, Sequence
from functools import partial

from fractional_gpu.core.forecasts.track_record import Judged
from fractional_gpu.simulator.felt import Felt, Goal
from fractional_gpu.simulator.hosts import Chosen, Door, DoorRule, Machine, Moments, Recorder, hosts_of
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.metering import RunMeter
from fractional_gpu.simulator.one_host import HostRun, RunState, Watch
from fractional_gpu.simulator.result import Accounts, Part, Result, begin_result, finished
from fractional_gpu.simulator.revocation import HostRevocations, Revocation, RevocationFigures
from fractional_gpu.simulator.traces import Session

Progress = Callable[[int, int], None]


def simulate(
    machine: Machine,
    trace: Sequence[Session],
    *,
    door: DoorRule = DoorRule.FIT,
    chosen: Sequence[int] | None = None,
    watch: Watch | None = None,
    record: Recorder | None = None,
    progress: Progress | None = None,
    goal: Goal | None = None,
    meter: RunMeter | None = None,
    revocation: Revocation | None = None,
    judged: Callable[[Judged], None] | None = None,
) -> Result:
    """Run the trace on one host or on several, among which `door` chooses; or `chosen` has the host of each session of the trace.

    `watch` sees every event and its effects; `progress` the sessions that ended, and all; `judged` every forecast with what happened.
    `meter` counts what the leases use, and changes no decision. `revocation` takes devices or hosts away meanwhile; what was lost is in the
    result.

    A run that cannot reach the `goal` any more is given up there.
    Raises SimulationError for a session that no host can serve at all, or that cannot run on the host that was chosen for it.
    """
    hosts = hosts_of(machine)
    gate = Door(hosts, trace, door) if chosen is None else Chosen(hosts, trace, chosen)
    part = simulate_part(
        hosts,
        trace,
        gate,
        watch=watch,
        record=record,
        progress=progress,
        goal=goal,
        meter=meter,
        revocation=revocation,
        judged=judged,
    )
    return finished(part, trace)


def simulate_part(
    hosts: Sequence[Host],
    trace: Sequence[Session],
    door: Door | Chosen,
    *,
    watch: Watch | None = None,
    record: Recorder | None = None,
    progress: Progress | None = None,
    goal: Goal | None = None,
    meter: RunMeter | None = None,
    revocation: Revocation | None = None,
    judged: Callable[[Judged], None] | None = None,
) -> Part:
    """Run the trace as `simulate` does; return what these hosts add to the figures of all hosts."""
    result, moments, felt = begin_result("fractional", trace, hosts), Moments(), Felt(trace, goal)
    accounts = Accounts(result, hosts)
    if meter is not None:
        meter.begin(hosts)
    state = RunState(
        moments=moments,
        result=result,
        accounts=accounts,
        felt=felt,
        watch=watch,
        record=record,
        meter=meter,
        over=door.closed,
    )
    runs = [HostRun(number, host, state) for number, host in enumerate(hosts)]
    ended = 0

    def ends() -> None:
        nonlocal ended
        ended += 1
        if progress is not None:
            progress(ended, len(trace))

    def opens(session: Session) -> None:
        host, lease = door.choose(session)
        if record is not None:
            record.moment(host, "placed", moments.now_ms, session.session_id)
        door.opened(host, lease)
        runs[host].open(session, lease, ends)

    def passing(at_ms: int) -> None:
        accounts.advance(at_ms)
        if meter is not None:
            meter.advance(at_ms)

    if revocation is not None:
        figures = result.revocation = RevocationFigures(whole_hosts=revocation.whole_hosts)
        begins_ms = min((session.open_ms for session in trace), default=0)
        for number, run in enumerate(runs):
            devices = HostRevocations(
                revocation, number, run, figures, goes_on=lambda: sum(run.over for run in runs) < len(trace)
            )
            moments.at(begins_ms, devices.begin)
    for run in runs:
        run.arbiter.forecasts.record.watch = judged
        run.begin()
    for session in trace:
        moments.at(session.open_ms, partial(opens, session))
    moments.run(passing, until=lambda: bool(felt.hopeless))
    for run in runs:
        run.arbiter.validate()
    accounts.finish()
    if meter is not None:
        meter.finish(moments.now_ms)
    result.lost += len(trace) - sum(run.over for run in runs)
    return Part(
        result=result,
        felt=felt,
        errors=[run.arbiter.forecasts.errors() for run in runs],
        closed_ms=max((run.closed_ms for run in runs), default=0),
    )
