"""`jupyter gpu simulate` estimates how many devices a group of notebook users needs, and how long their cells would wait."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fractional_gpu import __version__
from fractional_gpu.commands.simulation.answer import Answer
from fractional_gpu.commands.simulation.machine import MOST_DEVICES, MachineOptions, check_pools, read_meter
from fractional_gpu.commands.simulation.scenario import USUAL_P95_WAIT, Scenario, keys_help, read_scenario
from fractional_gpu.commands.simulation.scenario import configure as configure_scenario
from fractional_gpu.commands.simulation.sessions import read_history, read_trace, recorded_waits
from fractional_gpu.commands.simulation.tables import compared, compared_text, usage_figures, usage_table
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError, fitted, line, say, table, terminal_width, write
from fractional_gpu.config import ConfigError
from fractional_gpu.core.units import format_memory, plural
from fractional_gpu.simulator import SimulationError
from fractional_gpu.simulator.baselines import CULL_AFTER_MS, WAITING, run_baseline
from fractional_gpu.simulator.experience import Goal
from fractional_gpu.simulator.hosts import DoorRule
from fractional_gpu.simulator.machine import Host
from fractional_gpu.simulator.metering import RunMeter, write_usage
from fractional_gpu.simulator.picture import RunDescription, headline, picture
from fractional_gpu.simulator.record import recording, replay
from fractional_gpu.simulator.result import Result
from fractional_gpu.simulator.search import (
    devices_for_cells,
    devices_for_sessions,
    fewest_for_each,
    gpus_reserved_at_once,
)
from fractional_gpu.simulator.simulation import simulate
from fractional_gpu.simulator.traces import Session, write_sessions

if TYPE_CHECKING:
    from rich.text import Text

OURS = "fractional"
_MOST_IN_A_HOST = 16  # in GPUs; no host on the market has more
_EXAMPLES = """\
examples:
  jupyter gpu simulate --users 50 --devices 8x80GiB
  jupyter gpu simulate --users 50 --hosts '8x(8x80GiB)' --baseline static-fraction
  jupyter gpu simulate --users 300 --hosts '12x(4x80GiB)' --find-devices --set seeds=3 --set several_gpus=0 --set door=slurm-count
  jupyter gpu simulate --users 50 --hosts '?x(8x80GiB)' --find-devices --p95-wait 3s --baseline reservation --picture run.html
  jupyter gpu simulate --trace sessions.csv cells.csv --policy jupyter_gpu_config.py --json
  jupyter gpu simulate --scenario week.toml --set groups=physics:2,teaching:1@small --policy prices.py
  jupyter gpu simulate --users 10000 --hosts '100x(8x80GiB)' --set several_gpus=0 --set foresight=20s
  jupyter gpu simulate --from-ledger --devices 8x80GiB --find-devices --baseline static-fraction
  jupyter gpu simulate --users 20 --set record=run.log && jupyter gpu simulate --set replay=run.log

This runs the broker's own arbiter; only time is virtual. docs/simulator.md lists the assumptions.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run notebook sessions against the broker's arbiter in virtual time."
    parser.epilog = f"{keys_help()}\n\n{_EXAMPLES}"
    configure_scenario(parser)


def run(options: argparse.Namespace) -> int:
    scenario = read_scenario(options)
    try:
        if scenario.replay is not None:
            with Progress(f"replaying {scenario.replay} ..."):
                events, effects = replay(Path(scenario.replay))
            print(f"{events} events had the same {effects} effects as in the recording")
            return 0
        return _run(scenario, options)
    except (SimulationError, ConfigError) as error:
        raise CommandError(str(error)) from error


def _run(scenario: Scenario, options: argparse.Namespace) -> int:
    seeds = range(scenario.seed, scenario.seed + scenario.seeds)
    machines = [MachineOptions(replace(scenario, seed=seed)) for seed in seeds]
    cases = [(machine, read_trace(machine.scenario)) for machine in machines]
    machine, trace = cases[0]
    check_pools(scenario, trace)
    meter = read_meter(scenario, machine)
    if scenario.write_trace is not None:
        sessions, cells = map(Path, scenario.write_trace)
        _writing(sessions, lambda: write_sessions(trace, sessions, cells))
    goal = Goal(p95_wait_ms=scenario.p95_wait, p99_wait_ms=scenario.p99_wait, p95_late_ms=scenario.p95_late)
    if goal == Goal():
        goal = Goal(p95_wait_ms=USUAL_P95_WAIT)
    ours = "static-fraction" if scenario.door is DoorRule.SLURM_SHARDS else OURS
    with Progress(ours) as progress:
        answers = [_fewest(ours, cases, goal, progress, machine.limit)] if scenario.find_devices else []
        hosts = machine.hosts(answers[0].count if answers else None)
        results = [answers[0].results[0] if answers else _simulate(ours, machine, trace, hosts, progress, meter=meter)]
        for name in dict.fromkeys(scenario.baselines):
            if scenario.find_devices and name in WAITING:
                answers.append(_fewest(name, cases, goal, progress))
                results.append(answers[-1].results[0])
            else:
                results.append(_simulate(name, machine, trace, hosts, progress))
    about = _about(scenario, trace, hosts)
    answer: dict[str, Any] = {"sentence": headline(results[0], about)}
    if answers:
        answer = {"sentence": answers[0].sentence(answers[1:]), **answers[0].figures()}
    if options.picture is not None:
        page = picture(results, about, answer["sentence"])
        _writing(options.picture, lambda: options.picture.write_text(page, encoding="utf-8"))
    usage = usage_figures(meter) if meter is not None else {}
    if meter is not None and scenario.usage is not None:
        file = Path(scenario.usage)
        _writing(file, lambda: write_usage(file, meter, hosts))
    _print(scenario, answer, results, usage, as_json=options.json)
    most = max(len(host.devices) for host in hosts)
    if most > _MOST_IN_A_HOST:
        say(f"note: {most} devices are in one host, more than any real host has; use more hosts (--hosts)", sys.stderr)
    return 0


def _print(
    scenario: Scenario,
    answer: dict[str, Any],
    results: Sequence[Result],
    usage: dict[str, dict[str, Any]],
    *,
    as_json: bool,
) -> None:
    recorded = recorded_waits(read_history(scenario.from_ledger)) if scenario.from_ledger is not None else None
    result, *baselines = results
    if as_json:
        shown = {"answer": answer} | result.as_json() | ({"usage": usage} if usage else {})
        if recorded is not None:
            shown["recorded"] = compared(recorded, result.waits)
        if baselines:
            shown["baselines"] = {baseline.name: baseline.as_json() for baseline in baselines}
        print(json.dumps(shown))
        return
    width = terminal_width(sys.stdout)
    parts = [fitted([answer["sentence"]], width), _table(results, width)]
    if usage:
        parts.append(usage_table(usage, width))
    if recorded is not None:
        parts.append(fitted(compared_text(recorded, result.waits), width))
    first, *others = parts
    write([*first, *(one for part in others for one in (line(), *part))])


def _fewest(
    name: str,
    cases: Sequence[tuple[MachineOptions, Sequence[Session]]],
    goal: Goal,
    progress: Progress,
    limit: int | None = None,
) -> Answer:
    """Find the smallest number of devices, or of hosts (at most `limit`), that meets the goal: for all seeds, and for each seed alone."""
    machine, trace = cases[0]
    sessions = [session for _, sessions in cases for session in sessions]
    if machine.several:
        (host,), counted, least = machine.hosts(1), "hosts", 1
        each = len(host.devices)
        most = limit or max(1, min(MOST_DEVICES // each, len(sessions)))
    else:
        counted, each, least = "devices", 1, max(1, *(max(session.gpus, session.most_gpus) for session in sessions))
        (host,) = machine.hosts(least)
        most = min(MOST_DEVICES, sum(max(1, session.gpus) for session in sessions))  # each session has its own devices

    def run(case: int, count: int) -> Result:
        machine, trace = cases[case]
        return _simulate(name, machine, trace, machine.hosts(count), progress, goal=goal)

    start = -(-_start(name, trace, host) // each)
    results, by_seed = fewest_for_each(run, len(cases), goal, most, least=least, start=start, counted=counted)
    return Answer(results=results, by_seed=by_seed, counted=counted, goal=goal, of=limit)


def _start(name: str, trace: Sequence[Session], host: Host) -> int:
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


def _simulate(
    name: str,
    machine: MachineOptions,
    trace: Sequence[Session],
    hosts: Sequence[Host],
    progress: Progress,
    *,
    goal: Goal | None = None,
    meter: RunMeter | None = None,
) -> Result:
    scenario, began_s = machine.scenario, progress.seconds
    ways = [*([f"seed {scenario.seed}"] if scenario.seeds > 1 else []), *([name] if name != OURS else [])]
    progress.what = ", ".join([*ways, plural(sum(len(host.devices) for host in hosts), "device")])
    counter = progress.counter("sessions")
    if name == OURS:
        record, door = Path(scenario.record) if scenario.record is not None else None, machine.door(hosts, trace)
        with recording(record, hosts, trace, door=door.rule) as log:
            result = simulate(hosts, trace, door=door, record=log, goal=goal, progress=counter, meter=meter)
    else:
        rule, seed, fill = scenario.door, scenario.seed, scenario.mps_fill
        result = run_baseline(
            name, hosts, trace, rule=rule, seed=seed, mps_fill_percent=fill, goal=goal, progress=counter
        )
    result.wall_s = progress.seconds - began_s
    return result


def _about(scenario: Scenario, trace: Sequence[Session], hosts: Sequence[Host]) -> RunDescription:
    policy = None
    if scenario.policy is not None:
        try:
            policy = Path(scenario.policy).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise CommandError(f"{scenario.policy} cannot be read: {error.strerror}") from error
    sizes = Counter(device.memory_mib for host in hosts for device in host.devices)
    counted = " and ".join(f"{plural(count, 'device')} of {format_memory(mib)}" for mib, count in sizes.items())
    return RunDescription(
        users=len({session.user for session in trace}),
        machine=f"{len(hosts)} hosts with {counted}" if len(hosts) > 1 else counted,
        whole_gpus=gpus_reserved_at_once(trace),
        command=scenario.command(),
        version=__version__,
        policy=policy,
        hours_of_day=scenario.users is not None,
    )


def _writing(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise CommandError(f"{error.filename or path} cannot be written: {error.strerror}") from error


def _table(results: Sequence[Result], width: int | None) -> "list[Text]":
    header = ["", *(result.name for result in results)]
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = [result.as_json() for result in results]
    for key, value in figures[0].items():
        if key == "forecast_error":
            rows += _errors(results)
        elif isinstance(value, dict):
            rows.extend([f"{key} {part}", *(_shown(one[key][part]) for one in figures)] for part in value)
        else:
            rows.append([key, *(_shown(one[key]) for one in figures)])
    return table(header, rows, indent="", width=width, figures_from=1)


def _errors(results: Sequence[Result]) -> list[list[str]]:
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


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return f"{value:,}"
    return f"{value:,.1f}" if value >= 10 or not value else f"{value:.2f}"
