"""The scenario for `jupyter gpu simulate`, read from a TOML file, `--set KEY=VALUE`, and flags for the most common keys.

`Scenario` declares each key once, with its type, default and help. The three sources are merged and checked together. Flags override
`--set`, which overrides the file.
"""

import argparse
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self, get_type_hints

import msgspec
from msgspec import Meta

from fractional_gpu.commands.terminal.text import CommandError, UsageError
from fractional_gpu.core.units import parse_duration_ms, parse_memory_mib
from fractional_gpu.simulator.baselines import BASELINES, MPS_FILL_PERCENT
from fractional_gpu.simulator.hosts import DoorRule
from fractional_gpu.simulator.load import CLASS_SIZE, SEVERAL_PERCENT, Habit, Load, Memory, Pace

_LONGEST_LUNCH_MS: Final = 4 * 3_600_000


class Duration(int):
    """A duration in milliseconds, written like `30s`."""

    parse: Callable[[str], int] = staticmethod(parse_duration_ms)
    text: str

    @classmethod
    def of(cls, text: str) -> Self:
        found = cls(cls.parse(text))
        found.text = text
        return found


class Size(Duration):
    """A size in MiB, written like `20GiB`."""

    parse = staticmethod(parse_memory_mib)


USUAL_P95_WAIT: Final = Duration.of("3s")


def _help(text: str) -> Meta:
    return Meta(description=text)


Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Percent = Annotated[int, Meta(ge=0, le=100)]


class Scenario(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    # where sessions come from: exactly one of users, sessions with cells, and from_ledger
    users: Annotated[Count | None, _help("number of synthetic build-phase users")] = None
    days: Annotated[Count, _help("number of days that the users work")] = 1
    seed: Annotated[int, _help("seed of the synthetic sessions")] = 1
    seeds: Annotated[Count, _help("number of seeds, starting at `seed`, that a search must satisfy")] = 1
    sessions: Annotated[str | None, _help("CSV file of sessions; also needs `cells`")] = None
    cells: Annotated[str | None, _help("CSV file of executed cells; also needs `sessions`")] = None
    from_ledger: Annotated[str | None, _help("a broker's ledger; if empty, your own broker's")] = None
    one_gpu_only: Annotated[bool, _help("leave out sessions that use several GPUs at once")] = False
    groups: Annotated[str | None, _help("NAME:SIZE or NAME:SIZE@POOL, separated by commas")] = None
    write_trace: Annotated[tuple[str, str] | None, _help("write sessions and cells to these two files")] = None

    # what synthetic users do; by default, as in the published trace
    habit: Annotated[Habit, _help("how the users work: " + ", ".join(Habit))] = Habit.PUBLISHED
    pace: Annotated[Pace, _help("median GPU cell: 11 min (long), or 2 min with more cells (short)")] = Pace.LONG
    memory_of: Annotated[Memory, _help("size of a session's memory: its peak, or one cell's")] = Memory.SESSION
    several_gpus: Annotated[Percent, _help("percent of sessions that use 4 or 8 GPUs")] = SEVERAL_PERCENT
    joint_starts: Annotated[Percent, _help(f"percent of users who start together, in classes of {CLASS_SIZE}")] = 0
    lunch: Annotated[Duration, _help("length of the lunch break, when no cell starts, at most 4h")] = Duration.of("0s")
    weekends: Annotated[bool, _help("give users two days off in every seven")] = False
    weekend_users: Annotated[Percent, _help("percent of users who work on a day off")] = 0
    time_zones: Annotated[int, Meta(ge=1, le=24), _help("number of time zones that the users live in")] = 1
    ask_error: Annotated[int, Meta(ge=0, le=200), _help("percent by which requested and used memory differ")] = 0
    urgent_users: Annotated[Percent, _help("percent of users with priority 1")] = 0

    # the machine
    devices: Annotated[str, _help("the GPUs of one host")] = "8x80GiB"
    hosts: Annotated[
        str | None, _help("hosts, such as '4x(8x80GiB),2x(4x40GiB)'; '?x(8x80GiB)' searches without a limit")
    ] = None
    door: Annotated[DoorRule, _help("how a session gets a host when it opens: " + ", ".join(DoorRule))] = DoorRule.FIT
    policy: Annotated[str | None, _help("a broker's configuration file")] = None
    host_memory: Annotated[
        Size | None, _help("each host's memory for suspended state (default: the policy's, or 1TiB)")
    ] = None
    swap_fixed: Annotated[Duration, _help("fixed time per swap")] = Duration.of("300ms")
    save_speed: Annotated[Size, _help("memory saved per second")] = Size.of("1800MiB")
    restore_speed: Annotated[Size, _help("memory restored per second")] = Size.of("4000MiB")
    parallel_swaps: Annotated[Count, _help("simultaneous swaps per host")] = 1
    failed_swaps: Annotated[Percent, _help("percent of swaps that fail harmlessly")] = 0
    foresight: Annotated[Duration | None, _help("how long before a GPU cell its user shows activity")] = None
    false_signs: Annotated[int, Meta(ge=0, le=90), _help("percent of such activity that is not followed by a cell")] = 0
    slowdown: Annotated[bool, _help("busy cells on one device slow each other down")] = True
    every_cell_asks: Annotated[bool, _help("make cells that do not use the GPU wait for it too")] = False
    request: Annotated[Percent, _help("guaranteed percent of a session's cap, if the policy reserves by use")] = 100
    growth_patience: Annotated[
        Duration, _help("how long a session waits to reserve more memory before it is out of memory")
    ] = Duration.of("1m")

    # what to find out
    find_devices: Annotated[bool, _help("find the fewest devices, or hosts, that keep waits short enough")] = False
    p95_wait: Annotated[Duration | None, _help("goal: longest wait for 95 % of GPU cells; 3s if no goal is set")] = None
    p99_wait: Annotated[Duration | None, _help("goal: longest wait for 99 % of GPU cells")] = None
    p95_late: Annotated[Duration | None, _help("goal: how late 95 % of the cells of 95 % of users may be")] = None
    baselines: Annotated[tuple[str, ...], _help("also run: " + ", ".join(BASELINES))] = ()
    mps_fill: Annotated[Percent, _help("percent of a device that one cell uses, for mps-pack")] = MPS_FILL_PERCENT
    record: Annotated[str | None, _help("write the run line by line; gzipped if the file name ends in .gz")] = None
    replay: Annotated[str | None, _help("check that replaying this recorded run has the same effects")] = None

    # what the leases use, as the broker meters it
    meter: Annotated[bool, _help("meter device time, energy and charges, at the prices of `policy`")] = False
    usage: Annotated[str | None, _help("write all metered rows to this file, as JSON")] = None
    power: Annotated[str, _help("each device's power, idle to peak, in W")] = "75-700"
    power_noise: Annotated[Percent, _help("percent of noise in power and measured use")] = 0

    def load(self) -> Load:
        return Load(
            habit=self.habit,
            pace=self.pace,
            memory=self.memory_of,
            several_percent=self.several_gpus,
            joint_percent=self.joint_starts,
            lunch_ms=self.lunch,
            weekends=self.weekends,
            weekend_percent=self.weekend_users,
            time_zones=self.time_zones,
            ask_error_percent=self.ask_error,
            failed_swaps_percent=self.failed_swaps,
            urgent_percent=self.urgent_users,
        )

    def command(self) -> str:
        values = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in (None, ())}
        if self.find_devices and not any(goal in values for goal in _GOALS):
            values["p95_wait"] = USUAL_P95_WAIT
        unused = {*_OUTPUTS, "devices" if self.hosts is not None else ""}
        unused |= {name for name, needed in _NEEDS if not any(values.get(one) for one in needed)}
        unused |= set(_MADE_UP) if self.users is None else set()
        unused |= set(_OF_PUBLISHED) if self.habit is not Habit.PUBLISHED else set()
        unused |= {name for name, value in values.items() if value is False and not getattr(Scenario(), name)}
        said = [f"{name}={_text(value)}" for name, value in values.items() if name not in unused]
        return " ".join(["jupyter gpu simulate", *(f"--set {shlex.quote(one)}" for one in said)])


_OUTPUTS: Final = frozenset(["write_trace", "record", "replay", "meter", "usage", "power", "power_noise"])
_OF_PUBLISHED: Final = ("pace", "memory_of", "several_gpus", "joint_starts")
_MADE_UP: Final = (
    *("days", "seeds", "habit", *_OF_PUBLISHED, "lunch", "weekends", "weekend_users"),
    *("time_zones", "ask_error", "urgent_users"),
)
_GOALS: Final = ("p95_wait", "p99_wait", "p95_late")
_OF_METER: Final = ("power", "power_noise")

# Keys that require another key.
_NEEDS: Final = (
    *((name, ("find_devices",)) for name in (*_GOALS, "seeds")),
    *((name, ("meter", "usage")) for name in _OF_METER),
    ("sessions", ("cells",)),
    ("cells", ("sessions",)),
    ("false_signs", ("foresight",)),
    ("weekend_users", ("weekends",)),
)
_OF_ONE_RUN: Final = ("record", "meter", "usage")
_ONE_RUN: Final = "it applies to one run, but a search makes several; search first"
# Keys that exclude each other, and the reason.
_EXCLUDES: Final = (
    ("devices", "hosts", "`devices` describes one host, and `hosts` several"),
    *((one, "find_devices", _ONE_RUN) for one in _OF_ONE_RUN),
    *(("replay", name, "a replay runs no sessions") for name in Scenario.__struct_fields__ if name != "replay"),
)


def read_scenario(options: argparse.Namespace) -> Scenario:
    values: dict[str, Any] = {}
    if options.scenario is not None:
        try:
            values = tomllib.loads(options.scenario.read_text(encoding="utf-8"))
        except OSError as error:
            raise CommandError(f"{options.scenario} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CommandError(f"{options.scenario} is not a scenario: {error}") from error
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text[:60]!r} is not in the form KEY=VALUE, such as several_gpus=0")
        values[name.strip()] = _toml_value(value.strip())
    flags = {name: getattr(options, name) for name in Scenario.__struct_fields__ if hasattr(options, name)}
    if options.trace is not None:
        flags |= {"sessions": options.trace[0], "cells": options.trace[1]}
    values |= {name: value for name, value in flags.items() if value not in (None, False, [])}
    try:
        scenario = msgspec.convert(values, Scenario, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid scenario: {error}; `jupyter gpu simulate --help` lists the keys") from error
    _check(scenario, values)
    return scenario


def _toml_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text  # strings need no quotes


def _decode(kind: type, value: object) -> object:
    if kind in (Duration, Size) and isinstance(value, str):
        return kind.of(value)
    raise ValueError(f"Expected text such as {'30s' if kind is Duration else '20GiB'}, got {value!r}")


def _check(scenario: Scenario, given: Mapping[str, Any]) -> None:
    given = {name: value for name, value in given.items() if value is not False}
    for name, needed in _NEEDS:
        if name in given and not any(one in given for one in needed):
            raise UsageError(f"{_said(name, given)} requires {' or '.join(needed)}; add it, or leave {name} out")
    for one, other, reason in _EXCLUDES:
        if one in given and other in given:
            raise UsageError(f"{one} and {_said(other, given)} cannot be combined: {reason}; leave one of them out")
    if scenario.replay is None and [scenario.users, scenario.sessions, scenario.from_ledger].count(None) != 2:
        raise UsageError("give the sessions to simulate: either --users N, or --trace SESSIONS CELLS, or --from-ledger")
    _check_made_up(scenario, given)
    if scenario.lunch > _LONGEST_LUNCH_MS:
        raise UsageError(f"{_said('lunch', given)} is too long; use at most 4h")
    if scenario.foresight is not None and not scenario.foresight:
        raise UsageError(f"{_said('foresight', given)} is not valid; use a duration greater than 0, such as 20s")
    if unknown := [name for name in scenario.baselines if name not in BASELINES]:
        raise UsageError(f"unknown baseline {unknown[0]!r}; choose from: {', '.join(BASELINES)}")
    if not scenario.find_devices and (scenario.hosts or "").strip().startswith("?"):
        raise UsageError(
            f"--hosts {scenario.hosts!r:.60} requires --find-devices; add it, or give a number of hosts, such as '4x(8x80GiB)'"
        )
    if scenario.door is DoorRule.SLURM_SHARDS and (name := next((one for one in _OF_ONE_RUN if one in given), "")):
        raise UsageError(f"{name} needs a broker, which door=slurm-shards does not have; leave one of them out")


def _check_made_up(scenario: Scenario, given: Mapping[str, Any]) -> None:
    for name in _MADE_UP:
        if name in given and scenario.users is None and scenario.replay is None:
            raise UsageError(
                f"{_said(name, given)} only applies to synthetic users; sessions from files or a ledger run as recorded"
            )
        if name in given and name in _OF_PUBLISHED and scenario.habit is not Habit.PUBLISHED:
            raise UsageError(f"{_said(name, given)} only applies to habit=published, not to habit={scenario.habit}")
    if scenario.habit is Habit.TEACHING_LAB and scenario.lunch:
        raise UsageError(
            f"{_said('lunch', given)} and the habit {scenario.habit} cannot be combined, because that habit has no lunch break; leave one "
            "of them out"
        )


def _said(name: str, given: Mapping[str, Any]) -> str:
    return f"{name}={_text(given[name])}" if name in given else name


def _text(value: Any) -> str:  # noqa: ANN401 - any value of TOML
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(f'"{one}"' for one in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return getattr(value, "text", None) or str(value)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scenario", type=Path, metavar="FILE", help="a TOML file with any of the keys below")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="one of the keys below (repeatable)")
    add("--users", type=int, metavar="N", help="number of synthetic build-phase users")
    add("--days", type=int, metavar="D", help="number of days (default: 1)")
    add("--seed", type=int, metavar="S", help="seed of the synthetic sessions (default: 1)")
    add("--trace", nargs=2, metavar=("SESSIONS", "CELLS"), help="two CSV files: the sessions and their cells")
    add(
        "--from-ledger",
        nargs="?",
        const="",
        metavar="FILE",
        help="kernels and cells recorded by a broker (default: your own)",
    )
    add("--devices", metavar="NxSIZE", help="the GPUs, all in one host (default: 8x80GiB)")
    add(
        "--hosts",
        metavar="Nx(NxSIZE)",
        help="hosts with their GPUs, such as '4x(8x80GiB)'; with --find-devices, at most these; '?x(8x80GiB)' sets no limit",
    )
    add("--policy", metavar="FILE", help="a broker's configuration file (default: a broker's default pool)")
    add("--find-devices", action="store_true", help="find the fewest devices, or hosts, that keep waits short enough")
    add("--p95-wait", metavar="TIME", help="the longest that 95 %% of GPU cells may wait (default: 3s)")
    add("--baseline", action="append", dest="baselines", choices=BASELINES, help="also run this baseline (repeatable)")
    add("--picture", type=Path, metavar="FILE", help="write an HTML page that shows the run")
    add("--json", action="store_true", help="print JSON, with the baselines under `baselines`")


def keys_help() -> str:
    lines = ["keys of a scenario, and of --set, with their defaults:"]
    defaults = Scenario()
    for name, kind in get_type_hints(Scenario, include_extras=True).items():
        value = getattr(defaults, name)
        default = f" ({_text(value)})" if value not in (None, False, ()) else ""
        said = next(meta.description for meta in reversed(kind.__metadata__) if meta.description)
        lines += textwrap.wrap(f"{name:16}{said}{default}", 110, initial_indent="  ", subsequent_indent=" " * 18)
    return "\n".join(lines)
