"""`jupyter gpu measure` finds out how large a GPU share a program needs when other programs use the device, too.

A trial run shows whether the program reports units of work. If not, each run counts as one unit. The program is then measured in rounds of
steps (`study`). A step starts one or more copies of the program, each with its own lease (`tenants`), and measures them for a few seconds.
The measurement ends when every confidence interval is narrow enough or time runs out.
"""

import argparse
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.client.seat import own_seat
from fractional_gpu.commands.kernels import ANY_OFFERS_MILLI
from fractional_gpu.commands.measuring.study import (
    WHOLE_MILLI,
    Finding,
    Sample,
    Setting,
    Study,
    TickError,
    right_share,
    settings_of_copies,
    settings_of_fractions,
)
from fractional_gpu.commands.measuring.tenants import (
    LONGEST_S,
    SHORTEST_S,
    DisturbedError,
    NoSpareRoomError,
    Places,
    SilentError,
    Step,
    TenantError,
    TooSlowError,
)
from fractional_gpu.commands.run.process import TIMEOUT_S, EndedError, check_program, signals_raise
from fractional_gpu.commands.terminal.arguments import DURATIONS, FRACTIONS, POOLS, Parser, checked_pool, whole_number
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import (
    CommandError,
    UsageError,
    fitted,
    line,
    parse_argument,
    table,
    terminal_width,
    write,
    write_file,
)
from fractional_gpu.core.units import (
    format_fraction,
    format_memory,
    parse_duration_ms,
    parse_fraction_milli,
    parse_memory_mib,
    plural,
)
from fractional_gpu.curves import Panel, Series, curves
from fractional_gpu.protocol.errors import BrokerUnavailableError, FractionalGPUError, NoRoomError
from fractional_gpu.protocol.status import HostStatus
from fractional_gpu.stats import median

if TYPE_CHECKING:
    from rich.text import Text

_UNKNOWN: Final = "-"
_CLOSE: Final = 0.04  # a cost this close to a simple fraction is shown as the fraction
_PARTS: Final = {
    Fraction(1, 2): "half",
    Fraction(1, 3): "a third",
    Fraction(2, 3): "two thirds",
    Fraction(1, 4): "a quarter",
    Fraction(3, 4): "three quarters",
    Fraction(1, 5): "a fifth",
    Fraction(1, 8): "an eighth",
    Fraction(1, 10): "a tenth",
}


def sentences(findings: Sequence[Finding], most_slower: float) -> list[str]:
    alone, *others = findings
    return [_alone(alone), *(_compared(one) for one in others), verdict(findings, most_slower)]


def _alone(found: Finding) -> str:
    share = format_fraction(found.setting.fraction_milli)
    if math.isnan(found.unit_s):
        return f"alone on {share}: unknown ({found.why_not})"
    memory = f", at most {format_memory(found.memory_mib)} of GPU memory" if found.memory_mib else ""
    return f"alone on {share}: {seconds(found.unit_s)} per unit of work, 95 % within {seconds(found.p95_s)}{memory}"


def name(found: Finding) -> str:
    others = found.setting.tenants - 1
    more = f" next to {plural(others, 'other')}" if others else ""
    return f"{format_fraction(found.setting.fraction_milli)}{more}"


def _compared(found: Finding) -> str:
    if found.slower is None or found.cost is None:
        return f"{name(found)}: unknown ({found.why_not})"
    return f"{name(found)}: {slower(found)}, {cost_text(found.cost)}"


def slower(found: Finding) -> str:
    assert found.slower is not None  # noqa: S101 - promised by the caller
    value, low, high = ((part - 1) * 100 for part in (found.slower.value, found.slower.low, found.slower.high))
    if value < 0 and round(-value):
        return f"{-value:.0f} % faster than alone ({_percent(-high)} to {_percent(-low)} %)"
    return f"{_percent(value)} % slower than alone ({_percent(low)} to {_percent(high)} %)"


def _percent(value: float) -> str:
    return f"{value:.0f}".replace("-0", "0") if abs(value) < 1000 else f"{value:,.0f}"


def cost_text(part: float) -> str:
    close = min(_PARTS, key=lambda one: abs(float(one) - part))
    if abs(part / float(close) - 1) <= _CLOSE:
        return f"{_PARTS[close]} of the cost"
    return "the same cost" if abs(part - 1) <= _CLOSE else f"{part * 100:.0f} % of the cost"


def verdict(findings: Sequence[Finding], most_slower: float) -> str:
    limit = f"at most {(most_slower - 1) * 100:g} % slower than alone"
    best = right_share(findings[1:], most_slower)
    least_milli = best.setting.fraction_milli if best is not None else findings[0].setting.fraction_milli
    unknown = [
        format_fraction(one.setting.fraction_milli)
        for one in findings[1:]
        if one.suffices(most_slower) is None and one.setting.fraction_milli < least_milli
    ]
    doubt = f" It is unknown whether {' or '.join(unknown)} is enough." if unknown else ""
    if best is None:
        return f"No smaller share is known to be enough ({limit}).{doubt}"
    return f"{format_fraction(least_milli)} is enough ({limit}), even on a full device.{doubt}"


def figures(findings: Sequence[Finding], width: int | None = None) -> "list[Text]":
    header = (
        "SHARE",
        "PROGRAMS",
        "UNITS/s",
        "ALL UNITS/s",
        "MEDIAN",
        "P95",
        "MEMORY",
        "BUSY",
        "ENERGY",
        "COST",
        "ROUNDS",
    )
    rows = [
        [
            format_fraction(one.setting.fraction_milli),
            str(one.setting.tenants),
            f"{1 / one.unit_s:.3g}",
            f"{one.device_units_s:.3g}",
            seconds(one.median_s),
            seconds(one.p95_s),
            format_memory(one.memory_mib) if one.memory_mib else _UNKNOWN,
            f"{one.busy_percent:.0f} %" if one.busy_percent is not None else _UNKNOWN,
            f"{one.unit_mj / 1000:.3g} J" if one.unit_mj is not None else _UNKNOWN,
            f"{one.unit_gpu_s:.3g} GPU s" if one.unit_price is None else f"{one.unit_price:.3g} {one.currency}",
            str(one.rounds),
        ]
        for one in findings
        if not math.isnan(one.unit_s)
    ]
    return table(header, rows, width=width, figures_from=1)


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def as_json(findings: Sequence[Finding], most_slower: float, about: Mapping[str, object]) -> str:
    best = right_share(findings[1:], most_slower)
    content = {
        **about,
        "most_slower": most_slower,
        "suffices_milli": best.setting.fraction_milli if best is not None else None,
        "settings": findings,
        "sentences": sentences(findings, most_slower),
        "table": [one.plain for one in figures(findings)],
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"  # NaN becomes null


def picture(findings: Sequence[Finding]) -> str:
    """Return an SVG that plots throughput, latency and cost against the number of tenants (programs sharing the device).

    If several shares have the same number of tenants, only the largest is drawn. Raises ValueError if the program was not measured alone.
    """
    alone = findings[0]
    if math.isnan(alone.unit_s):
        raise ValueError("there is nothing to draw: the program was not measured alone")
    shown: dict[int, Finding] = {}
    for one in sorted(findings, key=lambda one: -one.setting.fraction_milli):
        if not math.isnan(one.unit_s):
            shown.setdefault(one.setting.tenants, one)
    ordered = [shown[tenants] for tenants in sorted(shown)]
    whole_gpu_s = alone.unit_s * alone.setting.fraction_milli / WHOLE_MILLI

    panels: list[tuple[str, Callable[[Finding], float], Callable[[Finding], float]]] = [
        (
            "units of work per second, all programs",
            lambda one: one.device_units_s,
            lambda one: one.setting.tenants / alone.unit_s,
        ),
        ("median latency, ms", lambda one: one.median_s * 1000, lambda _: alone.median_s * 1000),
        ("95th percentile, ms", lambda one: one.p95_s * 1000, lambda _: alone.p95_s * 1000),
        ("GPU seconds per unit of work", lambda one: one.unit_gpu_s, lambda _: whole_gpu_s),
    ]

    def points(value: Callable[[Finding], float]) -> list[tuple[str, float, float]]:
        return [("", float(one.setting.tenants), value(one)) for one in ordered]

    drawn = [
        Panel(title, [Series("on one device", points(ours)), Series("on a device each", points(apart))])
        for title, ours, apart in panels
    ]
    rows = [drawn[:2], drawn[2:]]
    return curves(rows, across="programs on the device", up="see each panel", note="")


_SIGNALLED: Final = 128
_REPEAT: Final = [sys.executable, "-I", "-S", os.fspath(Path(__file__).with_name("repeat.py"))]
_NOTEBOOK: Final = "import sys; from nbclient.cli import main; sys.argv[0] = 'jupyter-execute'; main()"
_TRIAL_PART: Final = 3  # the trial may take a third of the time
_PASSING: Final = (DisturbedError, NoSpareRoomError, NoRoomError)  # NoRoomError: a seat or a limit is full now
_RETRY_S: Final = 0.5
_LEAST_MS: Final = 1000
_COPIES: Final = range(1, 64)
_ROUNDS_WANTED: Final = 10
_DESCRIPTION: Final = "Measure which share of a GPU is enough for a program, alone and next to others on one device."
_EPILOG: Final = """\
examples:
  jupyter gpu measure -- python train.py
  jupyter gpu measure --copies 1,2,3 --within 10m --picture tenants.svg -- python serve_batch.py
  jupyter gpu measure --neighbour "python other.py" --neighbour "python third.py" -- python train.py

The program reports units of work: `from fractional_gpu_kernel.measure import tick`, then `tick()` after each batch. If it ends without
reporting any, its whole run is one unit, as for a notebook (NAME.ipynb). The program is started many times and ended after a few
seconds, so its side effects must not add up. Units should take at least 50 ms. Without --may-wait, this only uses spare room in
the pool, and suspends your idle kernels to make room. The exit status is 0 if anything could be compared, else 1.
"""


def configure(parser: Parser) -> None:
    parser.describe(_DESCRIPTION, _EPILOG)
    pool = os.environ.get("JUPYTER_GPU_DEFAULT_POOL") or "default"
    parser.argument("--pool", "POOL", "the pool of devices", by=POOLS, default=pool)
    parser.argument(
        "--fractions",
        "F,...",
        "shares to measure, each on a device full of programs with that share (default: all on offer)",
        by=FRACTIONS,
    )
    parser.argument(
        "--copies", "N,...", "instead of --fractions: run next to N copies, with the largest share that fits"
    )
    parser.argument(
        "--neighbour", "COMMAND", "run next to this program instead of copies (repeatable)", action="append", default=[]
    )
    parser.argument("--memory", "SIZE", "device memory of each program (default: the fraction's share)")
    parser.argument("--within", "DURATION", "how long to measure at most (default: 5m)", by=DURATIONS, default="5m")
    parser.argument("--interval", "PERCENT", "the widest acceptable confidence interval (default: 5%%)", default="5%")
    parser.argument(
        "--at-most", "PERCENT", "how much slower a share may be and still be enough (default: 10%%)", default="10%"
    )
    parser.flag("--may-wait", "wait for room like other programs, instead of only using spare room")
    parser.flag("--json", "print all figures as JSON")
    parser.argument("--picture", "FILE", "write charts as SVG, by the number of programs on the device", type=Path)
    parser.flag("--end-with-input", argparse.SUPPRESS)  # for %%gpu measure
    parser.argument("command", "COMMAND", "the program, and its arguments", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    if options.end_with_input:
        _end_with_input()
    measurement, ended = None, 0
    try:
        with (
            signals_raise(),
            tempfile.TemporaryDirectory(prefix="jupyter-gpu-measure-") as folder,
            Progress("measuring", silent=True, within_s=plan.within_s) as progress,
        ):
            seat = own_seat()
            with ensure_broker(timeout_s=TIMEOUT_S, token=seat.token if seat is not None else None) as client:
                measurement = Measurement(
                    plan, client, Path(folder), lambda text: progress.say(f"jupyter gpu measure: {text}")
                )
                measurement.run()
    except EndedError as error:
        ended = error.number
    if measurement is None or (ended and (ended != signal.SIGINT or not measurement.study.samples)):
        return _SIGNALLED + ended
    status = _show(options, measurement, interrupted=bool(ended))
    return _SIGNALLED + ended if ended else status


def _end_with_input() -> None:
    """Terminate this process when its standard input reaches end-of-file, so that it does not outlive the notebook's kernel."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="measure-input", daemon=True).start()


def _show(options: argparse.Namespace, measurement: "Measurement", *, interrupted: bool) -> int:
    plan, findings = measurement.plan, measurement.study.findings()
    if findings[0].slower is None:
        raise CommandError(
            f"the program could not be measured alone: {findings[0].why_not}; try again later, or with more time (--within)"
        )
    if options.json:
        about = {**measurement.about(), "interrupted": interrupted, "remarks": measurement.remarks()}
        print(as_json(findings, plan.most_slower, about), end="")
    else:
        remarks = [*(["interrupted; results so far"] if interrupted else []), *measurement.remarks()]
        width = terminal_width(sys.stdout)
        said = [*remarks, *sentences(findings, plan.most_slower)]
        write([*fitted(said, width), line(), *figures(findings, width)])
    if options.picture is not None:
        write_file(options.picture, picture(findings), "--picture")
    return 0 if any(one.slower is not None for one in findings[1:]) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    command: Sequence[str]
    pool: str
    fractions_milli: Sequence[int] | None
    copies: Sequence[int] | None
    neighbours: Sequence[Sequence[str]]
    memory_mib: int | None
    within_s: float
    interval: float
    most_slower: float
    may_wait: bool


def _plan(options: argparse.Namespace) -> Plan:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("give a program after --, for example: jupyter gpu measure -- python train.py")
    if options.fractions is not None and options.copies is not None:
        raise UsageError("--fractions and --copies both set the number of programs; leave one of them out")
    command = _notebook(command)
    neighbours = [_words(text) for text in options.neighbour]
    for one in [command, *neighbours]:
        check_program(one)
    within_ms = parse_argument(parse_duration_ms, options.within)
    if within_ms < _LEAST_MS:
        raise UsageError(f"--within must be at least 1s, not {options.within}")
    copies = _listed(options.copies, lambda text: whole_number("--copies", text, _COPIES))
    if copies is None and neighbours and options.fractions is None:
        copies = [len(neighbours)]
    return Plan(
        command=command,
        pool=checked_pool(options.pool),
        fractions_milli=_listed(options.fractions, lambda text: parse_argument(parse_fraction_milli, text)),
        copies=copies,
        neighbours=neighbours,
        memory_mib=parse_argument(parse_memory_mib, options.memory) if options.memory is not None else None,
        within_s=within_ms / 1000,
        interval=_percentage("--interval", options.interval),
        most_slower=1 + _percentage("--at-most", options.at_most),
        may_wait=options.may_wait,
    )


def _notebook(command: Sequence[str]) -> list[str]:
    if not command[0].endswith(".ipynb"):
        return list(command)
    if not Path(command[0]).is_file():
        raise UsageError(f"there is no notebook {command[0]}; check its path")
    if find_spec("nbclient") is None:
        raise CommandError("a notebook needs nbclient, which is not installed; install it, or measure a script")
    # The kernel belongs to the lease of the measured program, and one of our kernelspecs would take another lease.
    return [sys.executable, "-c", _NOTEBOOK, "--kernel_name=python3", *command]


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--neighbour {text[:60]!r} is not a valid command: {error}; quote it as for a shell"
        ) from None
    if not words:
        raise UsageError("--neighbour is empty; give a command, for example --neighbour 'python other.py'")
    return words


def _listed(text: str | None, parse: Callable[[str], int]) -> list[int] | None:
    return None if text is None else [parse(part.strip()) for part in text.split(",")]


def _percentage(option: str, text: str) -> float:
    try:
        value = float(text.removesuffix("%").strip())
    except ValueError:
        value = -1.0
    if not 0 < value <= 1000:
        raise UsageError(f"{option} must be a percentage above 0, such as 5%, not {text[:20]!r}")
    return value / 100


@dataclass(slots=True)
class Measurement:
    """A measurement. Run it in the main thread, because the programs it starts are terminated when the thread that started them exits."""

    plan: Plan
    client: BrokerClient
    folder: Path
    say: Callable[[str], None]  # reports progress
    study: Study = field(init=False)
    disturbed: dict[str, int] = field(default_factory=dict)  # how often each reason disturbed a step
    _places: Places = field(init=False)
    _host: HostStatus = field(init=False)
    _began_s: float = field(default_factory=time.monotonic)
    _trial_s: float = 0.0
    _told: str = ""  # what the user was last told about a failed attempt
    _has_failed: set[Setting] = field(default_factory=set)  # settings that failed once
    _repeats: bool = False

    def __post_init__(self) -> None:
        self._host = self.client.status()
        baseline, *others = self._settings()
        self.study = Study(baseline, [baseline, *others], self.plan.interval)
        plan = self.plan
        self._places = Places(self.client, plan.pool, plan.memory_mib, self.folder, self.say, plan.may_wait)

    @property
    def until_s(self) -> float:
        return self._began_s + self.plan.within_s

    def run(self) -> None:
        self._trial()
        while (steps := self.study.next_round()) and time.monotonic() < self.until_s:
            found = {}
            for setting in steps:
                if setting not in self.study.failed and (sample := self._attempt(setting)) is not None:
                    found[setting] = sample
                elif setting == self.study.baseline and not found:
                    break  # no step of this round could be compared
            if found:
                self.study.add(found)
                self._report()

    def about(self) -> dict[str, object]:
        return {
            "command": shlex.join(self.plan.command),
            "pool": self.plan.pool,
            "simulated": self._host.simulated,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "rounds": self.study.rounds,
            "unit_is_whole_run": self._repeats,
            "disturbed": self.disturbed,
        }

    def remarks(self) -> list[str]:
        lines = ["on a simulated device"] if self._host.simulated else []
        if self._repeats:
            lines.append("a unit of work is a whole run, because the program reports none")
        samples = [one for each in self.study.samples.values() for one in each]
        if any(one.is_company_unknown for one in samples):
            lines.append(
                "other programs used memory on the device, but the device does not report whether they were working; if they were, "
                "they affected the figures"
            )
        if self.disturbed:
            often = sum(self.disturbed.values())
            reason = max(self.disturbed, key=lambda one: self.disturbed[one])
            lines.append(f"{plural(often, 'step')} left out because others disturbed them, most often: {reason}")
        return lines

    def _settings(self) -> list[Setting]:
        offered = self._host.pools.get(self.plan.pool)
        if offered is None:
            raise CommandError(
                f"there is no pool named {self.plan.pool}; use --pool to choose from {', '.join(sorted(self._host.pools))}"
            )
        if self.plan.copies is None:
            asked = self.plan.fractions_milli or offered or ANY_OFFERS_MILLI
            if offered and (others := [one for one in asked if one not in offered]):
                wrong, there = (", ".join(map(format_fraction, milli)) for milli in (others, offered))
                raise UsageError(
                    f"--fractions has {wrong}, but pool {self.plan.pool!r} offers {there}; choose from these"
                )
            return settings_of_fractions(asked)
        try:
            return settings_of_copies(self.plan.copies, offered or ANY_OFFERS_MILLI)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _trial(self) -> None:
        limit_s = self._began_s + self.plan.within_s / _TRIAL_PART
        self.say(f"a trial run on {format_fraction(self.study.baseline.fraction_milli)}, to determine the unit of work")
        while True:
            began_s = time.monotonic()
            try:
                self._step(self.study.baseline, limit_s)
            except SilentError:
                if self._repeats:
                    raise
                self._repeats = True
            except _PASSING as error:
                if not isinstance(error, DisturbedError) or time.monotonic() >= limit_s:
                    raise CommandError(
                        f"could not measure: {error}; try again later, with smaller --fractions, or with --may-wait"
                    ) from None
                self._tell(f"the trial is waiting: {error}")
                time.sleep(_RETRY_S)
            except TooSlowError as error:
                raise CommandError(f"{error}; allow more time with --within, or use smaller units of work") from None
            except TickError as error:
                raise CommandError(str(error)) from None
            else:
                self._trial_s = time.monotonic() - began_s
                return

    def _attempt(self, setting: Setting) -> Sample | None:
        """Run a step and return its sample. If it fails, record the reason in the study and return None."""
        self._told = ""
        patience_s = 10 + 3 * self._trial_s * setting.tenants
        give_up_s = time.monotonic() + patience_s
        while (now_s := time.monotonic()) < self.until_s:
            try:
                return self._step(setting, min(now_s + patience_s, self.until_s))
            except _PASSING as error:
                self._tell(f"a step will be repeated: {error}")
                self.disturbed[str(error)] = self.disturbed.get(str(error), 0) + 1
                self.study.trouble[setting] = str(error)
                if time.monotonic() >= give_up_s:
                    return None
                time.sleep(_RETRY_S)
            except TooSlowError as error:
                if time.monotonic() < self.until_s:
                    self.study.failed[setting] = str(error)
                return None
            except BrokerUnavailableError:
                raise
            except TenantError as error:
                # Another process may have taken the memory, so one failure does not prove that the share is too small.
                if setting in self._has_failed:
                    self.study.failed[setting] = str(error)
                    return None
                self._has_failed.add(setting)
            except (SilentError, TickError, FractionalGPUError) as error:  # such as a refusal for a seat
                self.study.failed[setting] = str(error)
                return None
        return None

    def _tell(self, sentence: str) -> None:
        if sentence != self._told:
            self.say(sentence)
        self._told = sentence

    def _step(self, setting: Setting, limit_s: float) -> Sample:
        plan = self.plan
        command = [*_REPEAT, *plan.command] if self._repeats else plan.command
        commands = [command] * setting.tenants
        if plan.neighbours:
            mix = [[*_REPEAT, *one] for one in plan.neighbours]
            commands = [command, *(mix[number % len(mix)] for number in range(setting.tenants - 1))]
        measured = 1 if plan.neighbours else setting.tenants
        with self._places.tenants(commands, setting.fraction_milli, limit_s) as tenants:
            bystander = os.environ.get("JUPYTER_GPU_LEASE", "")
            # With long units of work, a step ends early so that enough rounds fit into the time.
            share_s = plan.within_s / (len(self.study.settings) * _ROUNDS_WANTED)
            long_s = min(LONGEST_S, max(SHORTEST_S, share_s))
            return Step(self.client, plan.pool, tenants, measured, limit_s, long_s, bystander).run()

    def _report(self) -> None:
        parts = []
        for setting in self.study.settings:
            if quotients := self.study.quotients.get(setting):
                so_far = f"{(median(quotients) - 1) * 100:+.0f} %"
                sure = "precise enough" if self.study.is_narrow(setting) else plural(len(quotients), "round")
                parts.append(f"{format_fraction(setting.fraction_milli)} x {setting.tenants}: {so_far} ({sure})")
        spent_s = time.monotonic() - self._began_s
        spent = f"{spent_s:.0f} s of at most {self.plan.within_s:.0f} s"
        self.say(f"round {self.study.rounds}, {spent}: {', '.join(parts) or 'nothing to compare yet'}")
