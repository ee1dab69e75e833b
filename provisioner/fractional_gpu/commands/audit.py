"""`jupyter gpu audit` shows what administrators did to other people's kernels, seats, pools and devices.

The command reads the broker's audit log directly, so it needs no broker, and the file's permissions decide who may read it. Lines that
can't be parsed, such as a line cut short by a crash, are counted and skipped.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fractional_gpu.broker.persistence.audit import FILE_NAME, finished_files
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import socket_path
from fractional_gpu.client.state_folder import state_folder
from fractional_gpu.commands.logs import explained, growing_lines, told
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.progress import Progress
from fractional_gpu.commands.terminal.text import CommandError, parse_argument
from fractional_gpu.config import ConfigError, load
from fractional_gpu.core.units import parse_duration_ms, plural
from fractional_gpu.protocol.errors import BrokerUnavailableError

_KEYS = ("time", "id", "act", "object", "outcome")
EPILOG = """\
examples:
  jupyter gpu audit                     every recorded action, oldest first
  jupyter gpu audit --since 2h          only the actions of the last two hours
  jupyter gpu audit --json | jq 'select(.acting_for == "ada")'
  jupyter gpu audit --follow            all of them, then each new one (Ctrl-C stops)

Only root and the user who runs the broker can read it. docs/audit.md says what is recorded and how long it is kept.
"""


def configure(parser: Parser) -> None:
    parser.describe("Show what administrators did: who, when, on whose behalf, and the outcome.", EPILOG)
    parser.argument("--since", "DURATION", "only actions in the last DURATION, such as 2h")
    parser.flag("--json", "print each action as a line of JSON")
    parser.flag("--follow", "keep printing new actions as they happen")
    parser.argument("--file", "PATH", "the log file to read (default: the broker's)")
    parser.add_socket()


def run(options: argparse.Namespace) -> int:
    since_ms = None if options.since is None else parse_argument(parse_duration_ms, options.since)
    path = Path(options.file) if options.file else _path(options.socket)
    least = "" if since_ms is None else datetime.fromtimestamp(time.time() - since_ms / 1000, UTC).isoformat()
    say: Callable[[dict[str, Any]], str] = json.dumps if options.json else sentence
    torn: list[bytes] = []
    with (
        explained(path, "the audit log", "; check --file"),
        closing(growing_lines(path, finished_files(path))) as lines,
    ):
        found = _entries_of(lines, torn)
        with Progress(f"reading {path} ...", silent=True):
            entries = list(told(found))
        for entry in outcomes(entries):
            if entry["time"] >= least:
                print(say(entry), flush=options.follow)
        if options.follow:
            for entry in told(found, time.sleep):
                if entry["outcome"] != "asked":
                    print(say(entry), flush=True)
    if not entries:
        print(f"{path} has no entries yet", file=sys.stderr)
    if torn:
        print(
            f"skipped {plural(len(torn), 'unreadable line')} of {path} (cut short by a crash, or edited)",
            file=sys.stderr,
        )
    return 0


def _path(socket: str | None) -> Path:
    where = socket or socket_path()
    try:
        with BrokerClient(where) as client:
            told = client.status().audit_file
    except BrokerUnavailableError:
        told = ""
    if told:
        return Path(told)
    try:
        settings = load()
    except ConfigError as error:
        raise CommandError(f"{error}; fix this, or use --file to say where the log is") from None
    return settings.audit_file or state_folder(where, settings.state_dir) / FILE_NAME


def _entries_of(lines: Iterable[bytes | None], torn: list[bytes]) -> Iterator[dict[str, Any] | None]:
    for line in lines:
        try:
            entry = None if line is None else json.loads(line)
        except ValueError:
            entry = None
        if line is None or (isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in _KEYS)):
            yield entry
        else:
            torn.append(line)


def outcomes(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ended = {entry["id"] for entry in entries if entry["outcome"] != "asked"}
    return [entry for entry in entries if entry["outcome"] != "asked" or entry["id"] not in ended]


def sentence(entry: dict[str, Any]) -> str:
    """Describe an action in one line. Unprintable text is shown as JSON, so that it can't control a terminal."""
    try:
        at = datetime.fromisoformat(entry["time"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        at = _plain(entry["time"])
    acting_for = f" for {_plain(entry['acting_for'])}" if entry.get("acting_for") else ""
    who = (
        f"{_plain(entry.get('user'))} (uid {_plain(entry.get('uid'))}, process {_plain(entry.get('pid'))}){acting_for}"
    )
    outcome = _plain(entry["outcome"]) if entry["outcome"] != "asked" else "requested, no outcome yet"
    why = f" ({_plain(entry['reason'])}: {_plain(entry.get('sentence'))})" if entry.get("reason") else ""
    given = entry.get("parameters")
    parameters = (
        "".join(f" {_plain(key)}={_plain(value)}" for key, value in given.items()) if isinstance(given, dict) else ""
    )
    return f"{at}  {_plain(entry['act'])} {_plain(entry['object'])}{parameters}: {outcome}{why}, by {who}"


def _plain(value: object) -> str:
    if isinstance(value, str) and value.isprintable():
        return value
    return json.dumps(value)
