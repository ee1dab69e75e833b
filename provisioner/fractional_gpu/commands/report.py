"""`jupyter gpu report` shows what leases used and how much that cost, using data from the broker or a file of metered rows.

The command queries the broker only once, for the finest breakdown the output needs, and computes all totals from the answer. Tables, charts
and totals therefore agree with each other even while kernels are running.
"""

import argparse
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fractional_gpu import __version__
from fractional_gpu.commands.terminal.arguments import DEVICES, POOLS, Parser
from fractional_gpu.commands.terminal.connection import RUN_ONE, running_broker, say_if_slow
from fractional_gpu.commands.terminal.text import (
    CommandError,
    UsageError,
    file_errors,
    fitted,
    line,
    plain,
    say,
    shown,
    table,
    terminal_width,
    write_file,
)
from fractional_gpu.core.metering.usage import ACCOUNTS
from fractional_gpu.protocol.accounts import USAGE_BY, UsageReport
from fractional_gpu.reports import rows_file
from fractional_gpu.reports.as_json import as_json
from fractional_gpu.reports.chargeback import as_csv, grain
from fractional_gpu.reports.columns import ADVICE_BASIS, Table, advice_names, scope_text, tabulated
from fractional_gpu.reports.page import page, period_text
from fractional_gpu.reports.periods import DEFAULT, WORDS, period

if TYPE_CHECKING:
    from rich.text import Text

_ONLY = ("user", "group", "pool", "device")
_WITHOUT_BROKER = f"and only a running broker has the figures; {RUN_ONE}, or give a file of metered rows with --from"
_MEANING = (
    "Hours are GPU hours: a whole GPU for an hour, or half of one for two. busy % is the share of the hours held that was busy. "
    "docs/costs.md explains each figure; --html and --json have all of them."
)
EPILOG = """\
examples:
  jupyter gpu report                                    your usage this month; for administrators, everyone's
  jupyter gpu report --by notebook --since 7d           what each of your notebooks used in the last seven days
  jupyter gpu report --by group,pool --since last-month --until last-month
  jupyter gpu report --by day --html --output use.html  a page with charts
  jupyter gpu report --csv --since last-month --until last-month --output october.csv
                                                        rows for chargeback systems (FOCUS 1.2), one per day
  jupyter gpu report --from usage.json                  a simulated week (from `jupyter gpu simulate --set usage=usage.json`)

A word or a date stands for the whole period: --until yesterday includes yesterday. An hour counts if it begins within the period. The
broker's `usage_visible` sets what users see of others' usage; they never see the names of others' notebooks.
"""


@dataclass(frozen=True, slots=True)
class _Ask:
    by: tuple[str, ...]
    only: Mapping[str, str | int]
    form: str  # text, csv, json or html
    command: str

    @property
    def grain(self) -> tuple[str, ...]:
        match self.form:
            case "csv":
                more = grain(self.by)
            case "html":
                more = ["day", "user", "group", "pool"]
            case _:
                more = ["user"]
        return tuple(dict.fromkeys([*self.by, *more]))

    @property
    def whole(self) -> bool:
        return not set(self.only) & {"user", "group", "seated"}


def configure(parser: Parser) -> None:
    parser.describe("Report how much GPU time kernels used, and what it costs.", EPILOG)
    parser.argument(
        "--by",
        "WHAT,...",
        f"what to group by, separated by commas: {', '.join(USAGE_BY)} (default: user)",
        by=_propose_by,
        default="user",
    )
    for name, default, says in (
        ("since", None, f"start of the period: {', '.join(WORDS)}, 7d, 12h, a date or a time (default: {DEFAULT})"),
        ("until", None, "end of the period, in the same form (default: now)"),
    ):
        parser.argument(f"--{name}", "WHEN", says, by=WORDS, default=default)
    parser.argument("--user", None, "only this user")
    parser.argument(
        "--account",
        None,
        "only hub users, or only users of the machine; the same name can exist in both (default: both)",
        choices=ACCOUNTS,
    )
    parser.argument("--group", None, "only users of this group")
    parser.argument("--pool", None, "only this pool", by=POOLS)
    parser.argument("--device", None, "only this device: its number, its id, or the beginning of its id", by=DEVICES)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print rows for chargeback systems, in FOCUS 1.2 format")
    form.add_argument("--json", action="store_true", help="print all figures as JSON, with units")
    form.add_argument("--html", action="store_true", help="print an HTML page with tables and charts")
    parser.argument("--output", "FILE", "write the report to this file", type=Path)
    parser.argument("--from", "FILE", "read rows from this file instead of asking the broker", dest="rows", type=Path)
    parser.add_socket()


def _propose_by(prefix: str, **_: object) -> list[str]:
    before, comma, _word = prefix.rpartition(",")
    return [f"{before}{comma}{name}" for name in USAGE_BY if name not in before.split(",")]


def run(options: argparse.Namespace) -> int:
    ask = _ask(options)
    zone: tzinfo | None = None
    if options.rows is not None:
        zone = rows_file.ZONE
        report, provider = _from_file(options, ask), "simulation"
    else:
        report, provider = _from_broker(options, ask), socket.gethostname()
    text = _formed(report, ask, zone, provider, None if options.output else sys.stdout)
    if options.output is None:
        sys.stdout.write(text)
    else:
        write_file(options.output, text, "--output")
    if report.note and ask.form != "text":
        say(f"note: {report.note}", sys.stderr)
    return 0


def _ask(options: argparse.Namespace) -> _Ask:
    by = tuple(part.strip() for part in options.by.split(","))
    if not set(by) <= set(USAGE_BY) or len(set(by)) < len(by):
        raise UsageError(
            f"invalid value for --by: {options.by[:60]!r}; choose from {', '.join(USAGE_BY)}, each at most once, separated by commas"
        )
    only: dict[str, str | int] = {name: value for name in _ONLY if (value := getattr(options, name)) is not None}
    if empty := [name for name, value in only.items() if not value]:
        raise UsageError(f"--{empty[0]} is empty; give a value, or leave the option out to include all")
    if options.account is not None:
        only["seated"] = ACCOUNTS.index(options.account)
    form = next((one for one in ("csv", "json", "html") if getattr(options, one)), "text")
    shown = {name: getattr(options, name) for name in ("since", "until", "account", *_ONLY)}
    words = [f"--by {options.by}", *(f"--{name} {shlex.quote(value)}" for name, value in shown.items() if value)]
    if options.rows is not None:
        words.append(f"--from {shlex.quote(options.rows.name)}")
    return _Ask(by, only, form, f"jupyter gpu report {' '.join(words)}")


def _period(options: argparse.Namespace, now_s: int, zone: tzinfo | None = None) -> tuple[int, int]:
    try:
        return period(options.since if options.since is not None else DEFAULT, options.until, now_s, zone)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _from_broker(options: argparse.Namespace, ask: _Ask) -> UsageReport:
    since_s, until_s = _period(options, int(time.time()))
    with running_broker(options.socket, without=_WITHOUT_BROKER) as client:
        only: dict[str, str] = {name: str(value) for name, value in ask.only.items()}
        if "device" in only:
            devices = {one.device_id: str(one.index) for one in client.status().devices}
            only["device"] = _device(devices, only["device"])
        with say_if_slow("adding up the figures ..."):
            return client.usage(ask.grain, since_s, until_s, only)


def _device(devices: Mapping[str, str], word: str) -> str:
    """Return the id of the device with this number, id or unique id prefix. Return any other word unchanged."""
    found = [device_id for device_id, number in devices.items() if word in (number, device_id)]
    found = found or [device_id for device_id in devices if device_id.startswith(word)]
    if len(found) > 1:
        raise CommandError(f"--device {word[:60]!r} matches {', '.join(found)}; choose one of them")
    return found[0] if found else word


def _from_file(options: argparse.Namespace, ask: _Ask) -> UsageReport:
    if options.socket is not None:
        raise UsageError(
            "--from and --socket cannot be combined: --from reads a file and does not ask a broker; leave one of them out"
        )
    path: Path = options.rows
    try:
        with file_errors("read", path, "; check --from"), say_if_slow(f"reading {path} ..."):
            file = rows_file.read(path.read_bytes(), str(path))
            since_s, until_s = file.begins_s, file.ends_s
            if options.since is not None or options.until is not None:
                begin = options.since or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(file.begins_s))
                since_s, until_s = _period(
                    argparse.Namespace(since=begin, until=options.until), file.ends_s, rows_file.ZONE
                )
            only = dict(ask.only)
            if "device" in only:
                numbers = {device_id: str(number) for number, device_id in enumerate(rows_file.devices_of(file))}
                only["device"] = _device(numbers, str(only["device"]))
            return rows_file.report_of(file, ask.grain, since_s, until_s, only)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _formed(report: UsageReport, ask: _Ask, zone: tzinfo | None, provider: str, out: TextIO | None) -> str:
    match ask.form:
        case "csv":
            return as_csv(report, ask.by, provider=provider)
        case "json":
            return as_json(report, ask.by) + "\n"
        case "html":
            made_by = f"jupyter-fractional-gpu {__version__}: {ask.command}"
            return page(report, ask.by, made_by=made_by, whole=ask.whole, zone=zone)
        case _:
            lines = as_text(report, ask.by, width=terminal_width(out) if out is not None else None, zone=zone)
            return shown(lines, out) if out is not None else plain(lines)


def as_text(
    report: UsageReport, by: Sequence[str], *, width: int | None = None, zone: tzinfo | None = None
) -> "list[Text]":
    lines = [line(f"GPU use from {period_text(report, zone)}. {scope_text(report)}"), line()]
    if not report.entries:
        lines.append(line("No GPU use in this period, or none that you may see."))
    else:
        tables = [_drawn(tabulated(report, by), None)]
        if width is not None and max(one.cell_len for one in tables[0]) > width:
            time_table = tabulated(report, by, only=lambda one: not one.resource)
            rest_table = tabulated(report, by, only=lambda one: one.resource)
            tables = [_drawn(time_table, width), [line()], _drawn(rest_table, width)]
        lines += [*chain.from_iterable(tables), line(), *fitted([_MEANING], width)]
    lines += _advised(report, width)
    return [*lines, *fitted([text for text in (report.carbon, report.note) if text], width)]


def _advised(report: UsageReport, width: int | None) -> "list[Text]":
    if not report.advice:
        return []
    name = advice_names(report.advice)
    said = [f"{name(one)}: {one.sentence}." for one in report.advice]
    return [
        line(),
        line(f"Advice on shares, {ADVICE_BASIS[:1].lower()}{ADVICE_BASIS[1:]}:"),
        *fitted(said, width),
    ]


def _drawn(found: Table, width: int | None) -> "list[Text]":
    names = (one.name.partition(" ") for one in found.columns)  # in `MEMORY GiB h`, the units stay unchanged
    header = [*(one.upper() for one in found.by), *(f"{first.upper()} {unit}".rstrip() for first, _, unit in names)]
    rows = [[*one.names, *one.cells] for one in found.lines]
    return table(header, rows, width=width, figures_from=len(found.by))
