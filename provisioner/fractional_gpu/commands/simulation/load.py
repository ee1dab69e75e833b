"""Whose sessions `jupyter gpu simulate` runs: those of two files, or those of synthetic users."""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fractional_gpu.commands.simulation.own_history import read_history, sessions_of
from fractional_gpu.commands.terminal.errors import CommandError, UsageError
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.core.units import parse_duration_ms, plural
from fractional_gpu.simulator.load import CLASS_SIZE, SEVERAL_PERCENT, Habit, Load, Memory, Pace, synthetic_sessions
from fractional_gpu.simulator.load.groups import Group, in_groups
from fractional_gpu.simulator.traces import Session, read_sessions

_LONGEST_LUNCH_MS = 4 * 3_600_000
_MOST_ZONES = 24
_GROUP = re.compile(r"([\w.-]{1,60}):(\d{1,6})(?:@([\w.-]{1,60}))?", re.ASCII)
_LARGEST_ERROR = 200
MADE_UP: Final[Mapping[str, Any]] = {
    "days": 1,
    "habit": None,
    "pace": None,
    "memory_of": None,
    "several_gpus": None,
    "joint_starts": None,
    "lunch": "0s",
    "weekends": False,
    "weekend_users": 0,
    "time_zones": 1,
    "ask_error": 0,
    "urgent_users": 0,
}
"""Options about synthetic users only, with what they are where they are left out."""


def configure_load(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say whose sessions to run."""
    _configure_sessions(parser.add_argument_group("sessions, from files or made up"))
    _configure_synthetic(parser.add_argument_group("what synthetic users do; by default what a published trace shows"))


def _configure_sessions(who: argparse._ArgumentGroup) -> None:
    """Add the arguments about where sessions come from, and which of them run."""
    who.add_argument("--sessions", type=Path, metavar="FILE", help="CSV of sessions (with --cells)")
    who.add_argument("--cells", type=Path, metavar="FILE", help="CSV of executed cells (with --sessions)")
    who.add_argument(
        "--from-ledger",
        nargs="?",
        const="",
        metavar="FILE",
        help="the kernels and cells that this machine's broker recorded, in its ledger or in this one",
    )
    who.add_argument("--users", type=positive, metavar="N", help="so many synthetic build-phase users")
    who.add_argument(
        "--days", type=positive, default=MADE_UP["days"], metavar="D", help="for so many days (default: 1)"
    )
    who.add_argument("--seed", type=int, default=1, metavar="S", help="which of the synthetic traces (default: 1)")
    who.add_argument(
        "--groups",
        metavar="NAME:N[@POOL],...",
        help="divide the users into groups of these sizes beside each other, each in a pool of --policy or in the default one, such as "
        "'physics:3,biology:2,teaching:1@small'",
    )
    who.add_argument("--one-gpu-only", action="store_true", help="leave sessions out that use several GPUs at once")
    who.add_argument(
        "--write-trace", type=Path, nargs=2, metavar=("SESSIONS", "CELLS"), help="write the sessions there"
    )


def _configure_synthetic(load: argparse._ArgumentGroup) -> None:
    """Add the arguments about what synthetic users do."""
    load.add_argument(
        "--habit",
        choices=[habit.value for habit in Habit],
        help="how they work: as in the published trace, as a class, with short cells, with cells of hours, with a job for the night, or "
        "a fifth of them in each of these ways (default: published)",
    )
    load.add_argument(
        "--pace",
        choices=[pace.value for pace in Pace],
        help="cells on a GPU of 11 min (median), as in the two days of the trace that are public, or more of 2 min, as its authors say "
        "of the whole of it (default: long)",
    )
    load.add_argument(
        "--memory-of",
        choices=[memory.value for memory in Memory],
        help="what a session holds: the peak of a session of the trace, or what one cell of it held (default: session)",
    )
    load.add_argument(
        "--several-gpus",
        type=percent,
        metavar="PERCENT",
        help=f"of the sessions use 4 or 8 GPUs at once (default: {SEVERAL_PERCENT})",
    )
    load.add_argument(
        "--joint-starts",
        type=percent,
        metavar="PERCENT",
        help=f"of the users are in classes of {CLASS_SIZE} that begin together (default: 0)",
    )
    load.add_argument(
        "--lunch", default=MADE_UP["lunch"], metavar="TIME", help="how long no cell begins at noon (default: 0s)"
    )
    load.add_argument("--weekends", action="store_true", help="two days of seven are free")
    load.add_argument(
        "--weekend-users",
        type=percent,
        default=MADE_UP["weekend_users"],
        metavar="PERCENT",
        help="with --weekends: of the users, who work on a free day nonetheless (default: 0)",
    )
    load.add_argument(
        "--time-zones",
        type=positive,
        default=MADE_UP["time_zones"],
        metavar="N",
        help="in which the users live (default: 1)",
    )
    load.add_argument(
        "--ask-error",
        type=_error,
        default=MADE_UP["ask_error"],
        metavar="PERCENT",
        help="by which the memory that people ask for differs from what they use (default: 0)",
    )
    load.add_argument(
        "--urgent-users",
        type=percent,
        default=MADE_UP["urgent_users"],
        metavar="PERCENT",
        help="of the users, with priority 1",
    )


def positive(text: str) -> int:
    """Return a whole number from 1 on. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number from 1 to 1000000 is")
    return int(text)


def percent(text: str) -> int:
    """Return a whole number from 0 to 100. Raises ArgumentTypeError."""
    return _at_most(text, 100)


def _error(text: str) -> int:
    return _at_most(text, _LARGEST_ERROR)


def _at_most(text: str, most: int) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > most:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number from 0 to {most} is")
    return int(text)


def read_load(options: argparse.Namespace) -> Load:
    """Return what the synthetic users do. Raises UsageError."""
    try:
        lunch_ms = parse_duration_ms(options.lunch)
    except ValueError as error:
        raise UsageError(f"--lunch: {error}") from error
    if lunch_ms > _LONGEST_LUNCH_MS:
        raise UsageError(f"--lunch {options.lunch} is not allowed; a time of at most 4h is")
    if options.time_zones > _MOST_ZONES:
        raise UsageError(f"--time-zones {options.time_zones} is not allowed; a whole number from 1 to {_MOST_ZONES} is")
    if options.weekend_users and not options.weekends:
        raise UsageError(
            f"--weekend-users {options.weekend_users} needs --weekends: without it users work on all days of the week alike"
        )
    habit = _read_habit(options, lunch_ms)
    return Load(
        habit=habit,
        pace=Pace(options.pace or Pace.LONG),
        memory=Memory(options.memory_of or Memory.SESSION),
        several_percent=SEVERAL_PERCENT if options.several_gpus is None else options.several_gpus,
        joint_percent=options.joint_starts or 0,
        lunch_ms=lunch_ms,
        weekends=options.weekends,
        weekend_percent=options.weekend_users,
        time_zones=options.time_zones,
        ask_error_percent=options.ask_error,
        failed_swaps_percent=options.failed_swaps,
        urgent_percent=options.urgent_users,
    )


def usual_load(options: argparse.Namespace) -> dict[str, object]:
    """Return what the options say that were left out about synthetic users, by the options' names. Raises UsageError."""
    if options.users is None:
        return {}
    load = read_load(options)
    said: dict[str, object] = {"habit": load.habit}
    if load.habit is Habit.PUBLISHED:  # of the others these say nothing
        said |= {"pace": load.pace, "memory_of": load.memory}
        said |= {"several_gpus": load.several_percent, "joint_starts": load.joint_percent}
    return said


def _read_habit(options: argparse.Namespace, lunch_ms: int) -> Habit:
    """Return how the synthetic users work. Raises UsageError where another switch says nothing of such users."""
    habit = Habit(options.habit or Habit.PUBLISHED)
    if habit is Habit.TEACHING_LAB and lunch_ms:
        raise UsageError(
            f"--lunch {options.lunch} is not allowed with --habit {habit}, whose classes have no lunch; leave one of the two out"
        )
    of_published = {
        "--pace": options.pace,
        "--memory-of": options.memory_of,
        "--several-gpus": options.several_gpus,
        "--joint-starts": options.joint_starts,
    }
    for name, value in of_published.items():
        if value is not None and habit is not Habit.PUBLISHED:
            raise UsageError(
                f"{name} {value} is not allowed with --habit {habit}, because it describes users of the published habit only; "
                "leave one of the two out"
            )
    return habit


def read_trace(options: argparse.Namespace) -> list[Session]:
    """Return the sessions to run. Raises UsageError, CommandError, TraceError."""
    if (options.sessions is None) != (options.cells is None):
        raise UsageError(
            "--sessions and --cells belong together: one file says when sessions were open, one what ran in them"
        )
    if [options.users, options.sessions, options.from_ledger].count(None) != 2:
        raise UsageError(
            "say whose sessions to simulate: either --users N, or --sessions FILE --cells FILE, or --from-ledger"
        )
    if options.users is None and (made_up := [name for name in MADE_UP if getattr(options, name) != MADE_UP[name]]):
        option, value = "--" + made_up[0].replace("_", "-"), getattr(options, made_up[0])
        said = option if value is True else f"{option} {value}"
        raise UsageError(
            f"{said} is not allowed with sessions of files or of a ledger, which are as recorded; "
            "leave it out, or make users up with --users N"
        )
    if options.users is not None:
        load = read_load(options)
        with Progress("synthetic users") as progress:
            count = progress.counter("user-days made up")
            trace = synthetic_sessions(options.users, options.days, options.seed, load, count)
    elif options.from_ledger is not None:
        with Progress("reading the ledger ...", blocks=True, silent=True):
            trace = sessions_of(read_history(options.from_ledger), pools=options.policy is not None)
    else:
        with Progress(f"reading {options.sessions} and {options.cells} ...", blocks=True, silent=True):
            trace = read_sessions(options.sessions, options.cells)
    if options.groups is not None:
        trace = in_groups(trace, _groups(options.groups))
    if not options.one_gpu_only:
        return trace
    kept = [session for session in trace if session.most_gpus <= 1]
    if len(kept) < len(trace):
        print(f"left out: {plural(len(trace) - len(kept), 'session')} with several GPUs at once", file=sys.stderr)
    if not kept:
        where = options.sessions or "the synthetic users"
        raise CommandError(f"every session of {where} uses several GPUs at once; nothing is left to simulate")
    return kept


def _groups(text: str) -> list[Group]:
    """Return the groups that `physics:3,teaching:1@small` says. Raises UsageError."""
    groups: list[Group] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None or not int(match[2]) or any(group.name == match[1] for group in groups):
            raise UsageError(
                f"--groups {text[:60]!r} is not allowed; NAME:SIZE or NAME:SIZE@POOL, each name once and each size from 1 on, such as "
                "'physics:3,biology:2,teaching:1@small' is"
            )
        groups.append(Group(match[1], int(match[2]), match[3] or ""))
    return groups
