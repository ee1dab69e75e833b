"""The command: audit a record, print what is wrong, and return the exit code."""

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.simulator.audit.baselines import baseline
from tests.simulator.audit.cells import Audit
from tests.simulator.audit.figures import NOT_AUDITED, compare
from tests.simulator.audit.leases import Leases
from tests.simulator.audit.sessions import AuditError, Entry

MOST_SHOWN = 40
FORMAT, VERSION = "jupyter-gpu-events", 1


def read(path: Path) -> Audit:
    """Audit a record. Raises AuditError."""
    audit: Audit | None = None
    for number, entry in _entries(path):
        try:
            if audit is None:
                audit = _begin(entry)
            else:
                audit.line(number, entry)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise AuditError(f"{path}, line {number}: cannot be read: {type(error).__name__} {error}") from error
    if audit is None:
        raise AuditError(f"{path} is empty")
    audit.end()
    return audit


def _begin(head: Entry) -> Audit:
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        raise AuditError(f"the record is not of version {VERSION}; record the run again with --record")
    return Leases(head) if head["baseline"] is None else baseline(head)


def _entries(path: Path) -> Iterator[tuple[int, Entry]]:
    try:
        with gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise AuditError(f"{path}, line {number}: expected an object")
                yield number, entry
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise AuditError(f"{path} cannot be read: {error}") from error


def _result(path: Path, name: str) -> Entry:
    """Return the figures of the run, or of the baseline, that a command printed."""
    shown: Entry = json.loads(path.read_text())
    figures: Entry = shown.get("baselines", {}).get(name, shown)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit a record, print what is wrong, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator.audit", description="Recompute a simulated run's figures from its record."
    )
    parser.add_argument(
        "record", type=Path, metavar="RECORD", help="what `jupyter gpu simulate --set record=FILE` wrote"
    )
    parser.add_argument("--json", type=Path, metavar="RESULT", help="what the same run printed with --json")
    options = parser.parse_args(arguments)
    try:
        audit = read(options.record)
        result = _result(options.json, audit.name) if options.json is not None else {}
    except (AuditError, OSError, ValueError) as error:
        sys.stderr.write(f"audit: {error}\n")
        return 2
    wrong = [*audit.problems, *(compare(audit.figures(), result) if options.json is not None else ())]
    for sentence in wrong[:MOST_SHOWN]:
        sys.stdout.write(f"{sentence}\n")
    if len(wrong) > MOST_SHOWN:
        sys.stdout.write(f"and {len(wrong) - MOST_SHOWN} more\n")
    if options.json is None:
        sys.stdout.write(json.dumps(audit.figures()) + "\n")
    compared = sum(name not in NOT_AUDITED for name in result)
    sys.stdout.write(f"{audit.lines} lines, {compared} figures compared: {len(wrong)} wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
