"""`jupyter gpu simulate`: how many devices a group of notebook users needs, and how long their cells would wait.

With `--placement` the command runs the placement benchmark instead.
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fractional_gpu import __version__
from fractional_gpu.commands.simulation.load import MADE_UP, configure_load, percent, read_trace, usual_load
from fractional_gpu.commands.simulation.machine import (
    MOST_DEVICES,
    MOST_IN_A_HOST,
    MachineOptions,
    configure_machine,
    parsed,
    read_machine,
    usual_machine,
)
from fractional_gpu.commands.simulation.own_history import compared, compared_text, read_history, recorded_waits
from fractional_gpu.commands.simulation.revocation import configure_revocation, read_revocation, revocation_text
from fractional_gpu.commands.simulation.usage import (
    NO_INPUT,
    check_pools,
    configure_usage,
    read_meter,
    usage_figures,
    usage_table,
)
from fractional_gpu.commands.terminal.errors import CommandError, UsageError
from fractional_gpu.commands.terminal.layout import fitted, line, table
from fractional_gpu.commands.terminal.output import say, terminal_width, write
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.config import ConfigError
from fractional_gpu.core.units import format_memory, parse_duration_ms, plural
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.baselines import BASELINES, CULL_AFTER_MS, MPS_FILL_PERCENT, WAITING, run_baseline
from fractional_gpu.simulator.cluster import run_engine
from fractional_gpu.simulator.felt import Goal
from fractional_gpu.simulator.fleet.run import run as run_hosts
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.metering.run_meter import RunMeter
from fractional_gpu.simulator.metering.usage_file import write_usage
from fractional_gpu.simulator.picture import About, picture
from fractional_gpu.simulator.placement import NodeShape, Outcome, PodKind, place, read_nodes, read_pods
from fractional_gpu.simulator.policies import POLICIES
from fractional_gpu.simulator.record import replay
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.revocation.revocations import Revocation
from fractional_gpu.simulator.search import devices_for_cells, devices_for_sessions, fewest, gpus_reserved_at_once
from fractional_gpu.simulator.traces import Session, write_sessions
from fractional_gpu.simulator.tuning import Step, tune

if TYPE_CHECKING:
    from rich.text import Text

_USUAL_P95_WAIT = "3s"
EPILOG = """\
examples:
  jupyter gpu simulate --users 50 --devices 8x80GiB
  jupyter gpu simulate --users 50 --hosts '8x(8x80GiB)' --baseline static-fraction
  jupyter gpu simulate --users 50 --hosts '?x(8x80GiB)' --find-devices --p95-wait 3s --baseline reservation --picture run.html
  jupyter gpu simulate --sessions sessions.csv --cells cells.csv --policy jupyter_gpu_config.py --json
  jupyter gpu simulate --users 10000 --several-gpus 0 --hosts '100x(8x80GiB)' --place use --foresight 20s
  jupyter gpu simulate --users 80 --several-gpus 0 --hosts '4x(2x80GiB)' --door engine-count
  jupyter gpu simulate --users 60 --days 7 --weekends --policy prices.py --groups 'physics:2,teaching:1@small' --usage usage.json
  jupyter gpu simulate --from-ledger --devices 4x80GiB --policy jupyter_gpu_config.py
  jupyter gpu simulate --from-ledger --devices 8x80GiB --find-devices --baseline static-fraction
  jupyter gpu simulate --users 60 --days 7 --revoke v100/us-west1
  jupyter gpu simulate --users 20 --record run.log && jupyter gpu simulate --replay run.log
  jupyter gpu simulate --placement --nodes nodes.csv --pods pods.csv --policy fgd --seeds 42-51 --json

The arbiter is the one that the broker runs; only time is virtual. What is assumed is in docs/simulator.md.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Run notebook sessions against the broker's arbiter in virtual time."
    parser.epilog = EPILOG
    configure_load(parser)
    configure_machine(parser)
    configure_usage(parser)
    configure_revocation(parser)
    _configure_output(parser)
    _configure_placement(parser)


def _configure_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("what is asked")
    output.add_argument(
        "--find-devices",
        action="store_true",
        help="find the fewest devices with short enough waits, or hosts (--hosts '?x(8x80GiB)')",
    )
    output.add_argument(
        "--p95-wait",
        metavar="TIME",
        help="short enough for 95 %% of GPU cells (default: 3s, if none of these three is given)",
    )
    output.add_argument("--p99-wait", metavar="TIME", help="short enough for 99 %% of GPU cells")
    output.add_argument(
        "--p95-late",
        metavar="TIME",
        help="a lateness that is short enough: for 95 %% of each user's GPU cells, and for 95 %% of the users",
    )
    output.add_argument("--baseline", action="append", choices=BASELINES, default=[], help="run this, too (repeatable)")
    output.add_argument(
        "--mps-fill",
        type=percent,
        default=MPS_FILL_PERCENT,
        metavar="PERCENT",
        help="of a device that a cell fills while it uses it, for the baseline mps-pack (default: 50, an assumption)",
    )
    output.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the whole run, line by line; gzip if it ends in .gz; baselines go to files beside it, BASELINE.FILE, and with --place "
        "each host goes to one, host-0.FILE",
    )
    output.add_argument("--replay", type=Path, metavar="FILE", help="check that a recorded log gives the same effects")
    output.add_argument("--picture", type=Path, metavar="FILE", help="draw the run as an HTML page")
    output.add_argument("--json", action="store_true", help="print JSON; baselines come under `baselines`")


def run(options: argparse.Namespace) -> int:
    """Simulate, replay or place, and print the result."""
    _check_options(options)
    try:
        if options.placement:
            return _run_placement(options)
        if options.replay is not None:
            with Progress(f"{options.replay} is replayed ...", blocks=True):
                events, effects = replay(options.replay)
            print(f"{events} events gave the same {effects} effects as when they were recorded")
            return 0
        return _run(options)
    except (SimulationError, ConfigError) as error:
        raise CommandError(str(error)) from error


_OF_PLACEMENT = ("nodes", "pods", "seeds", "tune")
_OF_SEARCH = ("p95_wait", "p99_wait", "p95_late")
_OF_SESSIONS = (
    *("users", "sessions", "cells", "from_ledger", "groups", "write_trace", "devices", "hosts", "revoke"),
    *("find_devices", *_OF_SEARCH, "baseline", "record", "picture", "usage", "meter"),
)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse an option that says nothing of what is asked. Raises UsageError."""

    def given(names: Sequence[str]) -> str:
        found = [name for name in names if getattr(options, name) not in (None, False, [])]
        return f"--{found[0].replace('_', '-')}" if found else ""

    for asked, others in (
        ("placement", ("replay", *_OF_SESSIONS)),
        ("replay", (*_OF_SESSIONS, *_OF_PLACEMENT)),
    ):
        if given([asked]) and (option := given(others)):
            raise UsageError(f"--{asked} runs no sessions and has no {option}; leave one of the two out")
    for needed, names in (("placement", _OF_PLACEMENT), ("find_devices", _OF_SEARCH)):
        if not given([needed]) and (option := given(names)):
            raise UsageError(f"{option} needs --{needed.replace('_', '-')}, without which it says nothing")


def _run(options: argparse.Namespace) -> int:
    machine = read_machine(options)
    trace = read_trace(options)
    check_pools(options, trace)
    meter, revocation = read_meter(options, machine), read_revocation(options)
    if options.write_trace:
        _writing(options.write_trace[0], lambda: write_sessions(trace, *options.write_trace))
    goal = _goal(options)
    if options.find_devices:
        if options.record is not None:
            raise UsageError("--record takes down one run, and --find-devices makes several; find first, then record")
        result = _fewest("fractional", machine, trace, goal, lambda hosts: _simulate(hosts, trace, machine, goal))
    else:
        result = _simulate(machine.hosts(), trace, machine, None, meter, revocation)
    hosts = (
        machine.hosts(result.hosts if machine.several else result.devices) if options.find_devices else machine.hosts()
    )
    baselines = [
        _baseline(name, trace, machine, hosts=hosts, goal=goal, options=options)
        for name in dict.fromkeys(options.baseline)
    ]
    if options.picture is not None:
        page = picture([result, *baselines], _about(options, trace, hosts))
        _writing(options.picture, lambda: options.picture.write_text(page, encoding="utf-8"))
    usage = usage_figures(meter) if meter is not None else {}
    if meter is not None and options.usage is not None:
        _writing(options.usage, lambda: write_usage(options.usage, meter, hosts))
    _print(options, result, baselines, usage)
    if not machine.several and result.devices > MOST_IN_A_HOST:
        say(
            f"note: all {result.devices} devices are in one host, and no host has so many; --hosts simulates several",
            sys.stderr,
        )
    return 0


def _print(
    options: argparse.Namespace, result: Result, baselines: Sequence[Result], usage: dict[str, dict[str, Any]]
) -> None:
    """Print the figures; those of a ledger's sessions beside what was recorded."""
    recorded = recorded_waits(read_history(options.from_ledger)) if options.from_ledger is not None else None
    if options.json:
        shown = result.as_json() | ({"usage": usage} if usage else {})
        if result.revocation is not None:
            shown["revocation"] = result.revocation.as_json()
        if recorded is not None:
            shown["recorded"] = compared(recorded, result.waits)
        if baselines:
            shown["baselines"] = {baseline.name: baseline.as_json() for baseline in baselines}
        print(json.dumps(shown))
        return
    width = terminal_width(sys.stdout)
    parts = [_table([result, *baselines], width)]
    if usage:
        parts.append(usage_table(usage, width))
    if result.revocation is not None:
        parts.append(revocation_text(result.revocation.as_json(), width))
    if recorded is not None:
        parts.append(fitted(compared_text(recorded, result.waits), width))
    first, *others = parts
    write([*first, *(one for part in others for one in (line(), *part))])


def _fewest(
    name: str, machine: MachineOptions, trace: Sequence[Session], goal: Goal, run: Callable[[Sequence[Host]], Result]
) -> Result:
    """Search for the fewest devices of one host, or the fewest hosts, with which this way of sharing keeps the goal."""
    most_gpus = max(1, *(max(session.gpus, session.most_gpus) for session in trace))
    wanted = min(
        MOST_DEVICES, max(1, sum(max(1, session.gpus) for session in trace))
    )  # each session has its own devices
    if not machine.several:
        start = _start(name, trace, machine.hosts(most_gpus)[0])
        return fewest(lambda count: run(machine.hosts(count)), goal, wanted, least=most_gpus, start=start)
    (host,) = machine.hosts(1)
    each, most = len(host.devices), min(MOST_DEVICES // len(host.devices), len(trace))
    start = -(-_start(name, trace, host) // each)
    return fewest(lambda count: run(machine.hosts(count)), goal, max(1, most), start=start, counted="hosts")


def _goal(options: argparse.Namespace) -> Goal:
    """Return what `--find-devices` must reach."""
    given = {"p95_wait": options.p95_wait, "p99_wait": options.p99_wait, "p95_late": options.p95_late}
    if not any(given.values()):
        given["p95_wait"] = _USUAL_P95_WAIT
    return Goal(
        **{
            f"{name}_ms": parsed("--" + name.replace("_", "-"), parse_duration_ms, text)
            for name, text in given.items()
            if text is not None
        }
    )


def _baseline(
    name: str,
    trace: Sequence[Session],
    machine: MachineOptions,
    *,
    hosts: Sequence[Host],
    goal: Goal,
    options: argparse.Namespace,
) -> Result:
    """Run a baseline; with `--find-devices` on its own fewest devices, if cells wait in this baseline at all."""
    record = options.record.with_name(f"{name}.{options.record.name}") if options.record is not None else None

    def run(found: Sequence[Host], *, goal: Goal | None = None, record: Path | None = None) -> Result:
        with Progress(f"{name}, {_devices_of(found)}") as progress:
            return run_baseline(
                name,
                found,
                trace,
                way=machine.way,
                mps_fill_percent=options.mps_fill,
                goal=goal,
                record=record,
                progress=progress.counter("sessions"),
                placing=progress.counter("sessions placed"),
            )

    began = time.perf_counter()
    if options.find_devices and name in WAITING:
        result = _fewest(name, machine, trace, goal, lambda found: run(found, goal=goal))
    else:
        result = run(hosts, record=record)
    result.wall_s = time.perf_counter() - began
    return result


def _start(name: str, trace: Sequence[Session], host: Host) -> int:
    """Return about how many devices this way of sharing needs: the search starts there."""
    match name:
        case "static-fraction" | "mps-pack":
            return devices_for_sessions(trace, host)
        case "reservation":
            return max(1, gpus_reserved_at_once(trace))
        case "cull":
            return devices_for_cells(trace, host, whole=True, stays_ms=CULL_AFTER_MS)
        case "whole-gpu-suspend":
            return devices_for_cells(trace, host, whole=True)
        case _:
            return devices_for_cells(trace, host)


def _simulate(  # noqa: PLR0917 - as the run that it starts
    hosts: Sequence[Host],
    trace: Sequence[Session],
    machine: MachineOptions,
    goal: Goal | None,
    meter: RunMeter | None = None,
    revocation: Revocation | None = None,
) -> Result:
    with Progress(_devices_of(hosts)) as progress:
        if machine.engine is not None:
            result = run_engine(
                hosts,
                trace,
                machine.engine,
                terms=machine.terms,
                processes=machine.way.processes,
                record=machine.options.record,
                progress=progress.counter("sessions"),
                placing=progress.counter("jobs of the engine"),
            )
        else:
            result = run_hosts(
                hosts,
                trace,
                machine.way,
                record=machine.options.record,
                goal=goal,
                progress=progress.counter("sessions"),
                placing=progress.counter("sessions placed"),
                meter=meter,
                revocation=revocation,
            )
    result.wall_s = progress.seconds
    return result


def _devices_of(hosts: Sequence[Host]) -> str:
    return plural(sum(len(host.devices) for host in hosts), "device")


_NO_INPUT = NO_INPUT | frozenset(
    ["json", "picture", "record", "replay", "write_trace", "processes", "placement", "nodes", "pods", "seeds", "tune"]
)
"""Options by which nothing of a run's figures changes."""


def _about(options: argparse.Namespace, trace: Sequence[Session], hosts: Sequence[Host]) -> About:
    """Return what the page of a run says about it. Raises CommandError for a configuration file that can no longer be read."""
    sizes = Counter(device.memory_mib for host in hosts for device in host.devices)
    counted = " and ".join(f"{plural(count, 'device')} of {format_memory(mib)}" for mib, count in sizes.items())
    policy = options.policy
    return About(
        users=len({session.user for session in trace}),
        machine=f"{len(hosts)} hosts with {counted}" if len(hosts) > 1 else counted,
        whole_gpus=gpus_reserved_at_once(trace),
        command=_command(options),
        version=__version__,
        policy=_text_of(Path(policy)) if policy is not None else None,
        hours_of_day=options.users is not None,
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error


def _command(options: argparse.Namespace) -> str:
    """Return the command line with every option that counts, defaults included: a later version may have others."""
    words = ["jupyter gpu simulate"]
    usual = {**usual_load(options), **usual_machine(options)}
    if options.find_devices and not (options.p95_wait or options.p99_wait or options.p95_late):
        usual["p95_wait"] = _USUAL_P95_WAIT
    for name, value in {**vars(options), **usual}.items():
        if name in _NO_INPUT or value is None or value is False or (name in MADE_UP and options.users is None):
            continue
        option = "--" + name.replace("_", "-")
        given = value if isinstance(value, list) else [value]
        words += [option if one is True else f"{option} {shlex.quote(str(one))}" for one in given]
    return " ".join(words)


def _writing(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise CommandError(f"{error.filename or path} cannot be written: {error.strerror}") from error


# -- printing ---------------------------------------------------------------------------------------------------------


def _table(results: Sequence[Result], width: int | None) -> "list[Text]":
    """Return the figures side by side, a run a column."""
    header = ["", *(result.name for result in results)]
    rows: list[list[str]] = []
    for key, value in results[0].as_json().items():
        if key == "forecast_error":
            rows += _errors(results)
        elif isinstance(value, dict):
            rows.extend([f"{key} {part}", *(_shown(_part(one, key, part)) for one in results)] for part in value)
        else:
            rows.append([key, *(_shown(one.as_json()[key]) for one in results)])
    return table(header, rows, indent="", width=width, figures_from=1)


def _errors(results: Sequence[Result]) -> list[list[str]]:
    """Return the rows about the kinds of forecasts that any run made; baselines make none."""
    rows = []
    for what in results[0].forecast_error:
        counts = [result.forecast_error.get(what, {}).get("count", 0) for result in results]
        if not any(counts):
            continue
        rows.append([f"{what} forecasts", *(_shown(count) if count else "-" for count in counts)])
        for figure, words in (("median_relative", "forecast off by"), ("within_bounds", "forecasts within bounds")):
            errors = [result.forecast_error.get(what) for result in results]
            shown = [f"{100 * error[figure]:.0f} %" if error and error["count"] else "-" for error in errors]
            rows.append([f"{what} {words}", *shown])
    return rows


def _part(result: Result, key: str, part: str) -> object:
    value = result.as_json()[key]
    return value[part] if isinstance(value, dict) else value


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return f"{value:,}"
    return f"{value:,.1f}" if value >= 10 or not value else f"{value:.2f}"


_MOST_SEEDS = 1000
_SEEDS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


# -- the placement benchmark (`--placement`) ----------------------------------------------------------------------------------


def _configure_placement(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments."""
    group = parser.add_argument_group("the placement benchmark, instead of sessions")
    group.add_argument("--placement", action="store_true", help="how much of a cluster a policy can give away")
    group.add_argument("--nodes", type=Path, metavar="FILE", help="CSV of nodes: sn,cpu_milli,memory_mib,gpu,model")
    group.add_argument(
        "--pods", type=Path, metavar="FILE", help="CSV of pods: name,cpu_milli,...,num_gpu,gpu_milli,gpu_spec"
    )
    group.add_argument("--seeds", metavar="A-B", help="orders of arrival (default: 42-51; with --tune 1-3)")
    group.add_argument(
        "--tune", action="store_true", help="choose the default policy's weights, on seeds other than 42-51 (minutes)"
    )


def _run_placement(options: argparse.Namespace) -> int:
    """Run the benchmark and print it."""
    if options.nodes is None or options.pods is None:
        raise UsageError("--placement needs --nodes FILE and --pods FILE")
    name = options.policy if options.policy is not None else "default"
    if name not in POLICIES:
        raise UsageError(f"--policy {name!r} is not a placement policy; allowed: {', '.join(POLICIES)}")
    nodes, pods = read_nodes(options.nodes), read_pods(options.pods)
    if not any(node.gpus for node in nodes):
        raise UsageError(f"no node of {options.nodes} has a GPU")
    if not any(pod.gpus for pod in pods):
        raise UsageError(f"no pod of {options.pods} asks for a GPU")
    if options.tune:
        return _tune(nodes, pods, _seeds(options.seeds or "1-3"), as_json=options.json)
    outcomes: list[Outcome] = []
    seeds = _seeds(options.seeds or "42-51")
    with Progress(name) as progress:
        count = progress.counter("seeds")
        for seed in seeds:
            outcomes.append(place(nodes, pods, POLICIES[name](pods), seed))
            count(len(outcomes), len(seeds))
    mean_100 = round(sum(outcome.alloc_at_100 for outcome in outcomes) / len(outcomes), 3)
    mean_130 = round(sum(outcome.alloc_at_130 for outcome in outcomes) / len(outcomes), 3)
    if options.json:
        listed = [
            {
                "seed": outcome.seed,
                "alloc_at_100": round(outcome.alloc_at_100, 3),
                "alloc_at_130": round(outcome.alloc_at_130, 3),
            }
            for outcome in outcomes
        ]
        mean = {"alloc_at_100": mean_100, "alloc_at_130": mean_130}
        print(json.dumps({"policy": name, "seeds": listed, "mean": mean}))
        return 0
    rows = [(f"seed {one.seed}", f"{one.alloc_at_100:.2f}", f"{one.alloc_at_130:.2f}") for one in outcomes]
    rows.append(("mean", f"{mean_100:.2f}", f"{mean_130:.2f}"))
    say(f"{name}: GPUs allocated, percent, when 100 % and 130 % of them were asked for")
    write(table((), rows, width=terminal_width(sys.stdout), figures_from=1))
    return 0


def _tune(nodes: Sequence[NodeShape], pods: Sequence[PodKind], seeds: Sequence[int], *, as_json: bool) -> int:
    """Choose weights; a line for each set that is tried, on standard error with `--json`."""
    tried: list[Step] = []

    def report(step: Step) -> None:
        tried.append(step)
        progress.say(f"{step.alloc_at_130:7.3f} {_weights(step)}", sys.stderr if as_json else sys.stdout)

    with Progress("trying weights ...", blocks=True, silent=True) as progress:
        best = tune(nodes, pods, seeds, report)
    if as_json:
        print(json.dumps({"seeds": list(seeds), "tried": [_plain(step) for step in tried], "best": _plain(best)}))
    else:
        print(f"best of {len(tried)}, on the seeds {seeds[0]} to {seeds[-1]}: {best.alloc_at_130:.3f} {_weights(best)}")
    return 0


def _plain(step: Step) -> dict[str, object]:
    return {"weights": asdict(step.weights), "alloc_at_130": round(step.alloc_at_130, 3)}


def _weights(step: Step) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(step.weights).items())


def _seeds(text: str) -> list[int]:
    match = _SEEDS.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last < first + _MOST_SEEDS:
        raise UsageError(
            f"--seeds {text[:40]!r} is not allowed; a number or a range of at most {_MOST_SEEDS} such as 42-51 is"
        )
    return list(range(first, last + 1))
