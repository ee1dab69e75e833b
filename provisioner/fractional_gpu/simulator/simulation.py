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
    cluster = _Cluster(hosts, trace, goal, door=gate, watch=watch, record=record, progress=progress, meter=meter)
    if revocation is not None:
        cluster.revoke(revocation)
    for one in cluster.runs:
        one.arbiter.forecasts.record.watch = judged
    return finished(cluster.run(), trace)


def simulate_part(
    host: Host, trace: Sequence[Session], *, record: Recorder | None = None, progress: Progress | None = None
) -> Part:
    """Run the sessions of one host by themselves: what they add to the figures of all hosts.

    Raises SimulationError for a session that the host cannot serve at all.
    """
    door = Door((host,), trace, DoorRule.FIT)
    return _Cluster((host,), trace, None, door=door, watch=None, record=record, progress=progress).run()


class _Cluster:
    """A run: its hosts, and the door."""

    def __init__(
        self,
        hosts: Sequence[Host],
        trace: Sequence[Session],
        goal: Goal | None,
        *,
        door: Door | Chosen,
        watch: Watch | None,
        record: Recorder | None,
        progress: Progress | None,
        meter: RunMeter | None = None,
    ) -> None:
        self._trace, self._progress = trace, progress
        self._result = begin_result("fractional", trace, hosts)
        self._door = door
        self._ended = 0
        self._state = RunState(
            moments=Moments(),
            result=self._result,
            accounts=Accounts(self._result, hosts),
            felt=Felt(trace, goal),
            watch=watch,
            record=record,
            meter=meter,
            over=self._door.closed,
        )
        if meter is not None:
            meter.begin(hosts)
        self.runs = [HostRun(number, host, self._state) for number, host in enumerate(hosts)]

    def revoke(self, revocation: Revocation) -> None:
        """Take devices away from the first session's opening on, until the last session has ended."""
        figures = self._result.revocation = RevocationFigures(whole_hosts=revocation.whole_hosts)
        begins_ms = min((session.open_ms for session in self._trace), default=0)
        for number, run in enumerate(self.runs):
            devices = HostRevocations(revocation, number, run, figures, self._goes_on)
            self._state.moments.at(begins_ms, devices.begin)

    def _goes_on(self) -> bool:
        return sum(run.over for run in self.runs) < len(self._trace)

    def run(self) -> Part:
        """Run to the end."""
        moments, felt, accounts = self._state.moments, self._state.felt, self._state.accounts
        meter = self._state.meter

        def passing(at_ms: int) -> None:
            accounts.advance(at_ms)
            if meter is not None:
                meter.advance(at_ms)

        for run in self.runs:
            run.begin()
        for session in self._trace:
            moments.at(session.open_ms, partial(self._open, session))
        moments.run(passing, until=lambda: bool(felt.hopeless))
        for run in self.runs:
            run.arbiter.validate()
        accounts.finish()
        if meter is not None:
            meter.finish(moments.now_ms)
        self._result.lost += len(self._trace) - sum(run.over for run in self.runs)
        errors = [run.arbiter.forecasts.errors() for run in self.runs]
        closed_ms = max((run.closed_ms for run in self.runs), default=0)
        return Part(result=self._result, felt=felt, errors=errors, closed_ms=closed_ms)

    def _open(self, session: Session) -> None:
        """Send a session to its host."""
        host, lease = self._door.choose(session)
        if self._state.record is not None:
            self._state.record.moment(host, "placed", self._state.moments.now_ms, session.session_id)
        self._door.opened(host, lease)
        self.runs[host].open(session, lease, self._ends)

    def _ends(self) -> None:
        self._ended += 1
        if self._progress is not None:
            self._progress(self._ended, self._result.sessions)
