"""The sessions for `jupyter gpu simulate`, taken from two files, synthetic users, or a broker's own ledger (`--from-ledger`).

Each lease in a ledger becomes a session. Each period in which the lease held the GPU becomes a cell, or the remainder of a preempted cell.
Recorded waits are removed, so that only the user's own pauses remain between cells. docs/simulator.md says what a ledger does not record.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fractional_gpu.client.discovery import socket_path
from fractional_gpu.client.state_folder import LEDGER_NAMES, state_folder
from fractional_gpu.commands.simulation.scenario import Scenario
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError, UsageError
from fractional_gpu.core.units import plural
from fractional_gpu.ledger.past import PastLease, read_past
from fractional_gpu.ledger.records import LedgerError
from fractional_gpu.simulator.experience import Spread
from fractional_gpu.simulator.load import Group, in_groups, synthetic_sessions
from fractional_gpu.simulator.traces import Cell, Session, read_sessions

_GROUP = re.compile(r"([\w.-]{1,60}):(\d{1,6})(?:@([\w.-]{1,60}))?", re.ASCII)


def read_trace(scenario: Scenario) -> list[Session]:
    if scenario.users is not None:
        with Progress("synthetic users") as progress:
            count = progress.counter("user-days generated")
            trace = synthetic_sessions(scenario.users, scenario.days, scenario.seed, scenario.load(), count)
    elif scenario.from_ledger is not None:
        with Progress("reading the ledger ...", silent=True):
            trace = sessions_of(read_history(scenario.from_ledger), pools=scenario.policy is not None)
    else:
        sessions, cells = Path(scenario.sessions or ""), Path(scenario.cells or "")
        with Progress(f"reading {sessions} and {cells} ...", silent=True):
            trace = read_sessions(sessions, cells)
    if scenario.groups is not None:
        trace = in_groups(trace, _groups(scenario.groups))
    if not scenario.one_gpu_only:
        return trace
    kept = [session for session in trace if session.most_gpus <= 1]
    if len(kept) < len(trace):
        print(f"left out: {plural(len(trace) - len(kept), 'session')} with several GPUs at once", file=sys.stderr)
    if not kept:
        where = scenario.sessions or "the synthetic trace"
        raise CommandError(f"nothing to simulate: every session in {where} uses several GPUs at once")
    return kept


def _groups(text: str) -> list[Group]:
    groups: list[Group] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None or not int(match[2]) or any(group.name == match[1] for group in groups):
            raise UsageError(
                f"groups={text[:60]!r} is not valid; use NAME:SIZE or NAME:SIZE@POOL, with each name once and sizes from 1, such as "
                "'physics:3,biology:2,teaching:1@small'"
            )
        groups.append(Group(match[1], int(match[2]), match[3] or ""))
    return groups


def read_history(given: str) -> list[PastLease]:
    if given:
        path = Path(given)
    else:
        folder = state_folder(socket_path())
        found_here = [folder / name for name in LEDGER_NAMES if (folder / name).exists()]
        if not found_here:
            raise CommandError(f"there is no ledger in {folder}; give one with --from-ledger FILE")
        path = found_here[0]
    try:
        found = [one for one in read_past(path) if one.turns]
    except LedgerError as error:
        raise CommandError(str(error)) from None
    if not found:
        raise CommandError(f"{path} has no GPU cells yet; run some notebooks with this version of the broker first")
    return found


def sessions_of(history: Sequence[PastLease], *, pools: bool) -> list[Session]:
    base_ms = min(one.created_ms for one in history)
    found = [_session(one, base_ms, pools=pools) for one in history]
    return sorted(found, key=lambda one: (one.open_ms, one.session_id))


def _session(lease: PastLease, base_ms: int, *, pools: bool) -> Session:
    spec, waited_ms, held_mib = lease.spec, 0, 0
    cells: list[Cell] = []
    for turn in lease.turns:
        held_mib = min(spec.reserve_mib, max(held_mib, turn.used_mib, 1))
        use_milli = turn.use_milli or spec.fraction_milli
        start_ms = max(turn.asked_ms - base_ms - waited_ms, lease.created_ms - base_ms)
        ran_ms = turn.ended_ms - turn.begun_ms
        if turn.continues and cells:
            cells[-1] = replace(cells[-1], duration_ms=cells[-1].duration_ms + ran_ms, gpu_mib=held_mib)
        else:
            cells.append(Cell(start_ms, ran_ms, spec.devices, held_mib, max(1, min(1000, use_milli) // 10)))
        waited_ms += turn.begun_ms - turn.asked_ms
    last_ms = cells[-1].start_ms + cells[-1].duration_ms
    close_ms = (lease.ended_ms if lease.ended_ms is not None else lease.turns[-1].ended_ms) - base_ms - waited_ms
    return Session(
        session_id=spec.lease_id,
        user=spec.owner,
        open_ms=lease.created_ms - base_ms,
        close_ms=max(close_ms, last_ms),
        gpus=spec.devices,
        gpu_mib=spec.reserve_mib,
        cells=tuple(cells),
        priority=spec.priority,
        asked_mib=spec.reserve_mib,
        group=spec.group,
        pool=spec.pool if pools else "",
    )


def recorded_waits(history: Sequence[PastLease]) -> Spread:
    return Spread.of(turn.begun_ms - turn.asked_ms for one in history for turn in one.turns if not turn.continues)
