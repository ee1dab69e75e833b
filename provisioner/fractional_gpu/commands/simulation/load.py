"""Whose sessions `jupyter gpu simulate` runs: those of two files or a ledger, or those of synthetic users."""

import re
import sys
from pathlib import Path

from fractional_gpu.commands.simulation.own_history import read_history, sessions_of
from fractional_gpu.commands.simulation.scenario import Scenario
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError, UsageError
from fractional_gpu.core.units import plural
from fractional_gpu.simulator.load import Group, in_groups, synthetic_sessions
from fractional_gpu.simulator.traces import Session, read_sessions

_GROUP = re.compile(r"([\w.-]{1,60}):(\d{1,6})(?:@([\w.-]{1,60}))?", re.ASCII)


def read_trace(scenario: Scenario) -> list[Session]:
    """Return the sessions to run. Raises UsageError, CommandError, TraceError."""
    if scenario.users is not None:
        with Progress("synthetic users") as progress:
            count = progress.counter("user-days made up")
            trace = synthetic_sessions(scenario.users, scenario.days, scenario.seed, scenario.load(), count)
    elif scenario.from_ledger is not None:
        with Progress("reading the ledger ...", blocks=True, silent=True):
            trace = sessions_of(read_history(scenario.from_ledger), pools=scenario.policy is not None)
    else:
        sessions, cells = Path(scenario.sessions or ""), Path(scenario.cells or "")
        with Progress(f"reading {sessions} and {cells} ...", blocks=True, silent=True):
            trace = read_sessions(sessions, cells)
    if scenario.groups is not None:
        trace = in_groups(trace, _groups(scenario.groups))
    if not scenario.one_gpu_only:
        return trace
    kept = [session for session in trace if session.most_gpus <= 1]
    if len(kept) < len(trace):
        print(f"left out: {plural(len(trace) - len(kept), 'session')} with several GPUs at once", file=sys.stderr)
    if not kept:
        where = scenario.sessions or "the synthetic users"
        raise CommandError(f"every session of {where} uses several GPUs at once; nothing is left to simulate")
    return kept


def _groups(text: str) -> list[Group]:
    """Return the groups that `physics:3,teaching:1@small` says. Raises UsageError."""
    groups: list[Group] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None or not int(match[2]) or any(group.name == match[1] for group in groups):
            raise UsageError(
                f"groups={text[:60]!r} is not allowed; NAME:SIZE or NAME:SIZE@POOL, each name once and each size from 1 on, such as "
                "'physics:3,biology:2,teaching:1@small' is"
            )
        groups.append(Group(match[1], int(match[2]), match[3] or ""))
    return groups
